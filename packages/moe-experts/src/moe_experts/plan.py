"""Plan of the kernels: tiles, grids, descriptors and arguments of each launch, and what is compiled ahead."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from hopper_kernels.launcher import Launch
from torch import Tensor

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

ROWS, HALF, COLUMNS, DEPTH, PANEL = 128, 64, 256, 64, 64  # as in `kernels.tiles`
BEYOND = 0x40000000  # as in `kernels.tiles.ragged`
SMS = 132
STAGES = 4
FINISHED_STAGES = 3  # where warps of their own finish the tiles, and whole tiles lie in shared memory for them
GROUPS_CHUNK = 256  # tiles that a program of the groups' kernel writes at a time
LEAST_EXPERTS = 1024  # that the groups' kernel is compiled for: so that for fewer nothing else is


class Groups(NamedTuple):
    """Where each expert's rows are, int32: see `kernels.groups`."""

    starts: Tensor
    blocks: Tensor
    tiles: Tensor
    valid: Tensor


def most_tiles(rows: int, experts: int) -> int:
    """Tiles of the rows of all experts, and of those after the last one, at most."""
    return -(-rows // ROWS) + experts + 1


def empty_groups(counts: Tensor, rows: int) -> Groups:
    """Memory for `groups`, in one piece, each part aligned to 16 bytes."""
    experts = counts.numel()
    tiles, starts = 4 * (most_tiles(rows, experts) + 1), -(-(experts + 1) // 4) * 4
    memory = torch.empty(tiles + 4 + 2 * starts, dtype=torch.int32, device=counts.device)
    parts = memory.split((tiles, 4, starts, starts))
    return Groups(parts[2][: experts + 1], parts[3][: experts + 1], parts[0], parts[1][:1])


def groups(counts: Tensor, rows: int, out: Groups) -> Launch:
    """Fill `out` from the counts."""
    from moe_experts.kernels.groups import groups_kernel

    experts = counts.numel()
    args = (counts, *out, experts, rows, most_tiles(rows, experts))
    slots = max(LEAST_EXPERTS, 1 << experts.bit_length())
    options = {"ROWS": ROWS, "EXPERTS": slots, "CHUNK": GROUPS_CHUNK, "num_warps": 4}
    return Launch(groups_kernel, (experts + 1,), args, options)


def gate_up(
    x: Tensor, gate_proj: Tensor, up_proj: Tensor, limit: float, where: Groups, gate: Tensor, up: Tensor, hidden: Tensor
) -> Launch:
    """gate, up and silu(gate) * up, clamped, of the experts' rows."""
    from moe_experts.kernels.gate_up import gate_up_kernel

    experts, inner, depth = gate_proj.shape
    args = (
        descriptor(x, (ROWS, DEPTH)),
        *(descriptor(w, (1, COLUMNS // 2, DEPTH)) for w in (gate_proj, up_proj)),
        *(ragged(t, PANEL) for t in (gate, up)),
        hidden,
        where.tiles,
        experts,
        _tiles(inner, COLUMNS // 2),
        _tiles(depth, DEPTH),
        inner // 8,
        float(limit),
    )
    return Launch(gate_up_kernel, (SMS,), args, {"STAGES": FINISHED_STAGES, "num_warps": 4})


def down(hidden: Tensor, down_proj: Tensor, where: Groups, out: Tensor) -> Launch:
    """hidden times the down projection; zeros after the last expert."""
    a, matrix = descriptor(hidden, (ROWS, DEPTH)), descriptor(down_proj, (1, COLUMNS, DEPTH))
    experts, columns, depth = down_proj.shape
    return _product(where, (a, matrix, a, matrix), out, (experts, _tiles(columns, COLUMNS), _tiles(depth, DEPTH)), 1)


def grad_hidden(
    dout: Tensor,
    down_proj: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    where: Groups,
    grad_gate: Tensor,
    grad_up: Tensor,
    hidden: Tensor,
) -> Launch:
    """The gradients of gate and up, and silu(gate) * up again."""
    from moe_experts.kernels.grad_hidden import grad_hidden_kernel

    experts, depth, columns = down_proj.shape
    args = (
        descriptor(dout, (ROWS, DEPTH)),
        descriptor(down_proj, (1, DEPTH, COLUMNS)),
        gate,
        up,
        grad_gate,
        grad_up,
        hidden,
        where.tiles,
        experts,
        _tiles(columns, COLUMNS),
        _tiles(depth, DEPTH),
        columns // 8,
        float(limit),
    )
    return Launch(grad_hidden_kernel, (SMS,), args, {"STAGES": FINISHED_STAGES, "num_warps": 4})


def grad_x(grad_gate: Tensor, grad_up: Tensor, gate_proj: Tensor, up_proj: Tensor, where: Groups, dx: Tensor) -> Launch:
    """The gradient of x; zeros after the last expert."""
    sources = [descriptor(t, (ROWS, DEPTH)) for t in (grad_gate, grad_up)]
    matrices = [descriptor(w, (1, DEPTH, COLUMNS)) for w in (gate_proj, up_proj)]
    experts, depth, columns = gate_proj.shape
    pairs = (sources[0], matrices[0], sources[1], matrices[1])
    return _product(where, pairs, dx, (experts, _tiles(columns, COLUMNS), _tiles(depth, DEPTH)), 2)


def _product(where: Groups, pairs: tuple, out: Tensor, sizes: tuple[int, int, int], products: int) -> Launch:
    from moe_experts.kernels.products import product_kernel

    args = (*pairs, ragged(out, PANEL), where.tiles, *sizes)
    return Launch(product_kernel, (SMS,), args, {"PRODUCTS": products, "STAGES": STAGES, "num_warps": 4})


def weight_grad(where: Groups, b: Tensor, *pairs: tuple[Tensor, Tensor]) -> Launch:
    """For one or two pairs (a, out): out (experts, columns of a, columns of b) = a^T b over each expert's rows."""
    from moe_experts.kernels.weight_grad import weight_grad_kernel

    (a, out), (other_a, other_out) = pairs[0], pairs[-1]
    experts, rows, columns = out.shape
    height, width = _tiles(rows, ROWS), _tiles(columns, COLUMNS)
    args = (
        *(ragged(t, HALF, DEPTH) for t in (a, other_a)),
        ragged(b, COLUMNS, DEPTH),
        *(descriptor(t, (1, HALF, PANEL)) for t in (out, other_out)),
        where.starts,
        experts * len(pairs) * height * width,
        len(pairs),
        height,
        width,
    )
    return Launch(weight_grad_kernel, (SMS,), args, {"STAGES": STAGES, "num_warps": 4})


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def descriptor(t: Tensor, block: tuple[int, ...]):
    """A TMA descriptor of a bf16 tensor; what is outside is read as zero and not written."""
    return _descriptor(t, list(t.shape), strides(t), block)


def strides(t: Tensor) -> list[int]:
    """Of t, but where only one index is, whose stride may be anything, that of whole inner dimensions."""
    found, whole = [], 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        found.insert(0, stride if size > 1 else whole)
        whole = size * found[0]
    return found


def ragged(t: Tensor, columns: int, rows: int = HALF):
    """A TMA descriptor of (rows, columns) bf16, for tiles that end with an expert's rows: see `kernels.tiles.ragged`.

    The row is counted from the end of the third dimension, where the hardware's bounds are; the strides of the outer
    ones bring the address back, modulo 2^64. After Triton's `tools.ragged_tma`.
    """
    pitch, _ = strides(t)
    shape = [0x7FFF0000, 0x7FFF0000, BEYOND, t.shape[1]]
    return _descriptor(t, shape, [2**34 - pitch, pitch, pitch, 1], (1, 1, rows, columns))


def _descriptor(t: Tensor, shape: list[int], steps: list[int], block: tuple[int, ...]):
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(t, shape, steps, list(block), _layout(len(block)))


@functools.cache
def _layout(rank: int):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: all there is, for counts of either type."""
    from hopper_kernels.models import V41_FLASH
    from hopper_kernels.precompile import Variant

    hidden_size, inner, experts, rows = V41_FLASH.hidden, V41_FLASH.moe_intermediate, 4, 1024

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, h = meta(rows, hidden_size), meta(rows, inner)
    w13, w2 = meta(experts, inner, hidden_size), meta(experts, hidden_size, inner)
    where = empty_groups(meta(experts, dtype=torch.int32), rows)
    expected = "HGMMA", "UTMALDG", "STSM"
    found = [
        Variant(f"groups[{dtype}]".replace("torch.", ""), groups(meta(experts, dtype=dtype), rows, where).compile)
        for dtype in (torch.int32, torch.int64)
    ]
    launches = {
        "gate_up": gate_up(x, w13, w13, 10.0, where, h, h, h),
        "down": down(h, w2, where, x),
        "grad_hidden": grad_hidden(x, w2, h, h, 10.0, where, h, h, h),
        "grad_x": grad_x(h, h, w13, w13, where, x),
        "weight_grad": weight_grad(where, h, (x, w2)),
    }
    return found + [Variant(name, launch.compile, expected) for name, launch in launches.items()]
