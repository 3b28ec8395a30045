"""Host side of the kernels: what is launched for a given matrix, and the launch itself."""

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from hopper_kernels import fp8
from torch import Tensor

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

TILE = 128
MAX_GRID_Y = 65535
MAX_SIZE = 2**24  # tokens, channels or row pitch: row * pitch inside a tile is a 32-bit product

# Three programs an SM: while one computes, the loads and stores of the others are under way.
DUAL_OPTIONS = {"num_warps": 8, "maxnreg": 80}
ROW_OPTIONS = {"ROWS": 32, "num_warps": 4}


class Launch(NamedTuple):
    """A kernel with its grid and arguments."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream; the first time, compile."""
        self.kernel[self.grid](*self.args, **self.options)

    def compile(self) -> Any:
        """Compile only: the tensors may be meta tensors. Returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options)


def dual_cast(
    x: Tensor,
    use_ue8m0: bool,
    cos_sin_cache: Tensor | None,
    position_ids: Tensor | None,
    head_dim: int,
    inverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate the four results and launch the fused kernel on the current stream of x's device."""
    results = *row_results(x), *column_results(x)
    if x.shape[0]:
        with torch.cuda.device_of(x):
            _dual(_readable(x), *results, use_ue8m0, cos_sin_cache, position_ids, head_dim, inverse).run()
    return results


def row_cast(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Allocate q and the storage of sf and launch the row kernel on the current stream of x's device."""
    results = row_results(x)
    if x.shape[0]:
        with torch.cuda.device_of(x):
            _row(_readable(x), *results, use_ue8m0).run()
    return results


def column_cast(x: Tensor, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """Allocate q_t and the storage of sf_t and launch the fused kernel for its transposed half."""
    results = column_results(x)
    if x.shape[0]:
        with torch.cuda.device_of(x):
            _column(_readable(x), *results, use_ue8m0).run()
    return results


def row_results(x: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised q (T, C) and the storage of its scales, for x (T, C)."""
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return q, fp8.row_scales_like(x.shape[0], x.shape[1], x.device)


def column_results(x: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised q_t (C, align(T, 128)) and the storage of its scales, for x (T, C)."""
    tokens, channels = x.shape
    q_t = torch.empty(channels, fp8.align(tokens, TILE), dtype=torch.float8_e4m3fn, device=x.device)
    return q_t, fp8.col_scales_like(tokens, channels, x.device)


def variants() -> "list[Variant]":
    """The compilations that launches ask for, for `hopper_kernels.precompile`; not those of a misaligned table."""
    from hopper_kernels.precompile import Variant

    x = torch.empty(TILE, 12 * TILE, dtype=torch.bfloat16, device="meta")
    rows, columns = row_results(x), column_results(x)
    # head_dim and rope_dim: rotated channels in half of a tile or anywhere, read four pairs at a time or one by one.
    rotations = {"half": (512, 64), "half scalar": (128, 4), "all": (64, 64), "all scalar": (12, 4)}
    found = []
    for ue8m0 in (False, True):
        flag = f"ue8m0={int(ue8m0)}"
        found += [
            Variant(f"row_cast[{flag}]", _row(x, *rows, ue8m0).compile, ("F2FP",)),
            Variant(f"column_cast[{flag}]", _column(x, *columns, ue8m0).compile, ("F2FP", "LDGSTS")),
            Variant(f"dual_cast[{flag}]", _dual(x, *rows, *columns, ue8m0).compile, ("F2FP", "LDGSTS")),
        ]
        for (name, (head_dim, rope_dim)), dtype in itertools.product(rotations.items(), (torch.int32, torch.int64)):
            table = torch.empty(TILE, rope_dim, device="meta")
            positions = torch.empty(TILE, dtype=dtype, device="meta")
            label = f"dual_cast[{flag},rope={name},{str(dtype).removeprefix('torch.')}]"
            launch = _dual(x, *rows, *columns, ue8m0, table, positions, head_dim)
            found.append(Variant(label, launch.compile, ("F2FP", "LDGSTS")))
    return found


def _row(x: Tensor, q: Tensor, sf: Tensor, use_ue8m0: bool) -> Launch:
    from fp8_dual_cast.kernels.row_cast import row_cast_kernel

    grid = fp8.ceil_div(x.shape[0], ROW_OPTIONS["ROWS"]) * (x.shape[1] // TILE)
    args = (x, q, sf, x.shape[0], x.shape[1] // TILE, _pitch(x) // 8)
    return Launch(row_cast_kernel, (grid,), args, {"UE8M0": use_ue8m0, **ROW_OPTIONS})


def _column(x: Tensor, q_t: Tensor, sf_t: Tensor, use_ue8m0: bool) -> Launch:
    return _dual(x, None, None, q_t, sf_t, use_ue8m0)


def _dual(
    x: Tensor,
    q: Tensor | None,
    sf: Tensor | None,
    q_t: Tensor,
    sf_t: Tensor,
    use_ue8m0: bool,
    cos_sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    head_dim: int = 0,
    inverse: bool = True,
) -> Launch:
    from fp8_dual_cast.kernels.dual_cast import dual_cast_kernel

    both, rope = q is not None, cos_sin_cache is not None
    rope_dim = cos_sin_cache.shape[1] if rope else 0
    args = (
        x,
        q if both else q_t,
        sf if both else sf_t,
        q_t,
        sf_t,
        cos_sin_cache.contiguous() if rope else sf_t,
        position_ids.contiguous() if rope else sf_t,
        -1.0 if inverse else 1.0,
        x.shape[0],
        _pitch(x) // 8,
        head_dim,
        rope_dim,
    )
    # Where heads are whole tiles and half a tile holds all rotated channels, the other half is left alone.
    first = TILE // 2 if rope and head_dim % TILE == 0 and rope_dim <= TILE // 2 else 0
    # Four neighbouring pairs then lie in one head and in 16 aligned bytes of the table.
    vector = rope and head_dim % 8 == 0 and rope_dim % 8 == 0
    options = {"ROPE": rope, "FIRST": first, "VECTOR": vector, "UE8M0": use_ue8m0, "BOTH": both, **DUAL_OPTIONS}
    blocks_t, blocks_c = q_t.shape[1] // TILE, x.shape[1] // TILE
    plane = min(blocks_t, MAX_GRID_Y)
    return Launch(dual_cast_kernel, (blocks_c, plane, fp8.ceil_div(blocks_t, plane)), args, options)


def _readable(x: Tensor) -> Tensor:
    """x itself where 16-byte copies can read it: channels contiguous, base and pitch multiples of 16 bytes."""
    pitch = _pitch(x)
    readable = x.stride(1) == 1 and x.shape[1] <= pitch <= MAX_SIZE and pitch % 8 == 0 and x.data_ptr() % 16 == 0
    return x if readable else x.clone(memory_format=torch.contiguous_format)


def _pitch(x: Tensor) -> int:
    """Elements from one row to the next. The stride of an axis of length 1 means nothing."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]
