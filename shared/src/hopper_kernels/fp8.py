"""The e4m3 recipes of the kernels and the layouts of their scales, in plain PyTorch.

"Cast to FP8" is ambiguous: consumers differ in the block that shares a scale, in the floor and what it bounds, in
the rounding of the scale and in what a NaN does. Each combination is therefore a named `Recipe`, and every function
here takes its constants from one. They are definitions: they run on any device and on FakeTensors, never
synchronise, repeat bit for bit and give the same bytes everywhere.

All arithmetic is fp32, rounded to nearest even. For a block with largest magnitude `amax`:

    s    = RN(max(amax, floor) / 448)           or the next power of two at or above it, with `ue8m0`
    byte = e4m3(clamp(RN(v / s), -448, 448))    -0 and negative underflow give 0x80, NaN stays NaN

An Inf makes its block's scale Inf (also with `ue8m0`): the finite elements become zeros of their sign, Inf itself NaN.

The divisions must be IEEE ones. Eager PyTorch's are, for tensors of one device; Inductor's on a GPU need not be, so a
graph that has to match bit for bit calls these functions inside an operator.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hopper_kernels import checks

E4M3_MAX = 448.0
BLOCK = 128
ACT_AMAX_FLOOR = 1e-10
WEIGHT_FLOOR = 1e-4
TMA_ALIGN_BYTES = 16

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_SCALE_ALIGN = TMA_ALIGN_BYTES // 4  # fp32 scales in one TMA-aligned unit
_MANTISSA = 0x7FFFFF


@dataclass(frozen=True)
class Recipe:
    """How one consumer wants its operand quantised.

    name, consumer: for messages and documentation.
    block: rows and columns that share a scale; None means the whole axis.
    floor: lower bound, of the block's largest magnitude (`floor_on="amax"`) or of the scale itself ("scale", where the
        same number bounds 448 times more). It keeps the scale of an all-zero block a normal number.
    ue8m0: whether scales are powers of two unless the caller says otherwise.
    nan: "ignored": a NaN element does not count in its block's maximum. "propagated": it makes the scale NaN, and with
        it the whole block. The element itself stays NaN either way.
    """

    name: str
    consumer: str
    block: tuple[int | None, int | None]
    floor: float
    floor_on: Literal["amax", "scale"] = "amax"
    ue8m0: bool = False
    nan: Literal["ignored", "propagated"] = "ignored"

    def scales(self, blocks: Tensor, dim: int | tuple[int, ...], ue8m0: bool) -> Tensor:
        """Scales (fp32) of the blocks that extend along `dim` of `blocks`; `dim` is reduced away."""
        magnitude = blocks.abs()
        if self.nan == "ignored":
            magnitude = magnitude.masked_fill(blocks.isnan(), 0.0)
        amax = magnitude.amax(dim).float()
        if self.floor_on == "amax":
            s = scale(amax, floor=self.floor, ue8m0=ue8m0)
        else:
            s = torch.fmax(_divide_by_max(amax), _constant(self.floor, amax))
            s = _next_power_of_two(s) if ue8m0 else s
        return torch.where(amax.isnan(), amax, s) if self.nan == "propagated" else s


PER_TOKEN = Recipe("per_token", "fp8_dual_cast; linear layers' activations and gradients", (1, BLOCK), ACT_AMAX_FLOOR)
PER_TOKEN_TRANSPOSED = Recipe(
    "per_token_transposed", "fp8_dual_cast; operands of a linear layer's weight gradient", (BLOCK, 1), ACT_AMAX_FLOOR
)
MOE_ROWS = Recipe("moe_rows", "moe_experts; activations and gradients", (1, BLOCK), ACT_AMAX_FLOOR, nan="propagated")
MOE_COLUMNS = Recipe(
    "moe_columns", "moe_experts; operands of a weight gradient", (BLOCK, 1), ACT_AMAX_FLOOR, nan="propagated"
)
MOE_WEIGHTS = Recipe("moe_weights", "moe_experts; weights", (BLOCK, BLOCK), WEIGHT_FLOOR, nan="propagated")
LINEAR_WEIGHTS = Recipe("linear_weights", "linear layers' weights", (BLOCK, BLOCK), WEIGHT_FLOOR, floor_on="scale")
INDEX_ROWS = Recipe("index_rows", "dsa_indexer_topk; queries and keys", (1, None), ACT_AMAX_FLOOR, ue8m0=True)


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. Takes SymInts."""
    return -(-a // b)


def align(a: int, b: int) -> int:
    """The smallest multiple of b that is at least a. Takes SymInts."""
    return ceil_div(a, b) * b


def scale(amax: Tensor, *, floor: float = ACT_AMAX_FLOOR, ue8m0: bool = False) -> Tensor:
    """Scale of blocks whose largest magnitudes are `amax` (any shape; non-negative, NaN means "no element").

    Returns RN(max(amax, floor) / 448) in fp32, raised to the next power of two with `ue8m0`. `floor` must be positive
    and is rounded to fp32; 448 times the least normal fp32 or more keeps the scale a normal number.
    """
    amax = amax.float()
    s = _divide_by_max(torch.fmax(amax, _constant(floor, amax)))
    return _next_power_of_two(s) if ue8m0 else s


def quantize(v: Tensor, s: Tensor) -> Tensor:
    """e4m3(RN(v / s)), saturating at +-448, of the broadcast shape of `v` and `s`. NaN and the sign of zero are kept.

    Raises ValueError for tensors on different devices: PyTorch divides by a scalar of the CPU with a reciprocal.
    """
    checks.same_device(v=v, s=s)
    # The cast turns magnitudes above 464 into NaN, the GPU's saturating conversion does not.
    return (v.float() / s).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def per_token(x: Tensor, *, ue8m0: bool = PER_TOKEN.ue8m0, recipe: Recipe = PER_TOKEN) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for each token and 128 neighbouring channels.

    x: (T, C), bf16, fp16 or fp32, C a multiple of 128, any strides. T may be 0.
    recipe: PER_TOKEN or another one with blocks of 1 x 128 (MOE_ROWS).
    Returns q (T, C) e4m3fn, contiguous, and sf (T, C / 128) fp32, a view with strides (1, align(T, 4)) of a storage
    whose padding is 0. Raises ValueError for another rank, dtype, C or block, TypeError
    for a non-tensor.
    """
    _check_matrix(x, recipe, PER_TOKEN.block)
    tokens, channels = x.shape
    blocks = x.reshape(tokens, channels // BLOCK, BLOCK)
    s = recipe.scales(blocks, -1, ue8m0)
    storage = row_scales_like(tokens, channels, x.device).zero_()
    storage[:, :tokens] = s.t()
    q = quantize(blocks, s.unsqueeze(-1)).reshape(tokens, channels).contiguous()
    return q, row_scales_view(storage, tokens)


def per_token_transposed(
    x: Tensor, *, ue8m0: bool = PER_TOKEN_TRANSPOSED.ue8m0, recipe: Recipe = PER_TOKEN_TRANSPOSED
) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for each channel and 128 neighbouring tokens, and transpose.

    x: as for `per_token`. With Tp = align(T, 128), missing tokens count as zeros.
    recipe: PER_TOKEN_TRANSPOSED or another one with blocks of 128 x 1 (MOE_COLUMNS, an expert's rows at a time).
    Returns q_t (C, Tp) e4m3fn, contiguous, columns T and up of byte 0x00 whatever the scale, and sf_t (C, Tp / 128)
    fp32, a view with strides (1, C). Raises as `per_token`.
    """
    _check_matrix(x, recipe, PER_TOKEN_TRANSPOSED.block)
    tokens = x.shape[0]
    blocks = _pad_end(x, 0, BLOCK).unflatten(0, (ceil_div(tokens, BLOCK), BLOCK))
    storage = recipe.scales(blocks, 1, ue8m0)
    q = quantize(blocks, storage.unsqueeze(1)).flatten(0, 1)
    q_t = _pad_end(q.view(torch.uint8)[:tokens].t(), 1, BLOCK)
    return q_t.view(torch.float8_e4m3fn), col_scales_view(storage)


def per_block(w: Tensor, *, floor_on: Literal["amax", "scale"], ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise weights with one scale for each 128 x 128 block of their last two axes.

    w: (..., R, C), bf16, fp16 or fp32, any strides; blocks at the lower and right edge may be smaller.
    floor_on: "amax" for MOE_WEIGHTS, "scale" for LINEAR_WEIGHTS; their scales differ for blocks of small values.
    Returns q of w's shape, e4m3fn, and sf (..., ceil(R / 128), ceil(C / 128)) fp32, both contiguous. Raises ValueError
    for fewer than two axes, another dtype or another `floor_on`, TypeError for a non-tensor.
    """
    _check_floating("w", w)
    if w.dim() < 2:
        raise ValueError(f"w must have at least 2 dimensions, got {w.dim()}")
    if floor_on not in ("amax", "scale"):
        raise ValueError(f"floor_on must be 'amax' or 'scale', got {floor_on!r}")
    recipe = MOE_WEIGHTS if floor_on == "amax" else LINEAR_WEIGHTS
    rows, cols = w.shape[-2:]
    blocks = _pad_end(_pad_end(w, -2, BLOCK), -1, BLOCK)
    blocks = blocks.unflatten(-1, (ceil_div(cols, BLOCK), BLOCK)).unflatten(-3, (ceil_div(rows, BLOCK), BLOCK))
    sf = recipe.scales(blocks, (-3, -1), ue8m0)
    q = quantize(blocks, sf[..., :, None, :, None]).flatten(-4, -3).flatten(-2, -1)
    return q[..., :rows, :cols].contiguous(), sf


def per_row(x: Tensor, *, ue8m0: bool = INDEX_ROWS.ue8m0) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for each row: the recipe INDEX_ROWS.

    x: (..., D), bf16, fp16 or fp32, D >= 1, any strides. Returns q of x's shape, e4m3fn, and s (...) fp32, both
    contiguous. Raises ValueError for a scalar, D = 0 or another dtype, TypeError for a non-tensor.
    """
    _check_floating("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must have a last dimension of at least 1, got shape {tuple(x.shape)}")
    x = x.contiguous()
    s = INDEX_ROWS.scales(x, -1, ue8m0)
    return quantize(x, s.unsqueeze(-1)), s


def dequantize(q: Tensor, sf: Tensor, block: tuple[int, int] = (1, BLOCK)) -> Tensor:
    """RN(q * s) in fp32, contiguous: what the bytes stand for.

    q: (..., R, C) e4m3fn; sf: (..., ceil(R / block[0]), ceil(C / block[1])) fp32, any strides. The default suits
    `per_token`, and also `per_token_transposed` with its transposed results; weights have (128, 128), the results of
    `per_row` (1, D) with `s.unsqueeze(-1)`. Raises ValueError if sf has another shape.
    """
    *lead, rows, cols = q.shape
    row_blocks, col_blocks = ceil_div(rows, block[0]), ceil_div(cols, block[1])
    checks.shape("sf", sf, (*lead, row_blocks, col_blocks))
    s = sf[..., :, None, :, None].expand(*lead, row_blocks, block[0], col_blocks, block[1])
    s = s.reshape(*lead, row_blocks * block[0], col_blocks * block[1])
    return q.float().contiguous() * s[..., :rows, :cols]


def row_scales_like(tokens: int, channels: int, device: torch.device | str) -> Tensor:
    """Uninitialised storage (channels / 128, align(tokens, 4)) fp32 for the scales of `per_token`.

    Token-contiguous with a pitch that is a multiple of 16 bytes, which TMA asks for. Whoever fills it also writes 0 to
    the columns from `tokens` on.
    """
    return torch.empty(channels // BLOCK, align(tokens, _SCALE_ALIGN), dtype=torch.float32, device=device)


def row_scales_view(storage: Tensor, tokens: int) -> Tensor:
    """The scales (tokens, channels / 128) in such a storage, strides (1, align(tokens, 4)).

    The strides hold for a single column too: DeepGEMM compares them literally and transposes otherwise.
    """
    # Not `storage[:, :tokens].t()`: compiled for any token count, a slice asks whether it is the whole.
    return storage.as_strided((tokens, storage.shape[0]), (1, storage.stride(0)))


def col_scales_like(tokens: int, channels: int, device: torch.device | str) -> Tensor:
    """Uninitialised storage (ceil(tokens / 128), channels) fp32 for the scales of `per_token_transposed`."""
    return torch.empty(ceil_div(tokens, BLOCK), channels, dtype=torch.float32, device=device)


def col_scales_view(storage: Tensor) -> Tensor:
    """The scales (channels, ceil(tokens / 128)) in such a storage, strides (1, channels), single column included."""
    return storage.t()


def _pad_end(t: Tensor, dim: int, multiple: int) -> Tensor:
    """`t`, contiguous, with zeros up to the next multiple along `dim`."""
    shape = list(t.shape)
    shape[dim] = align(shape[dim], multiple)
    padded = t.new_zeros(shape)
    padded.narrow(dim, 0, t.shape[dim]).copy_(t)
    return padded


def _constant(value: float, like: Tensor) -> Tensor:
    """A 0-dim fp32 tensor on the device of `like`."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _divide_by_max(amax: Tensor) -> Tensor:
    """RN(amax / 448). On CUDA a Python number as divisor would become a product with its reciprocal."""
    return amax / _constant(E4M3_MAX, amax)


def _next_power_of_two(s: Tensor) -> Tensor:
    """The least power of two at or above `s` (fp32, normal, positive), from the bits: exact, and Inf stays Inf."""
    return ((s.view(torch.int32) + _MANTISSA) & ~_MANTISSA).view(torch.float32)


def _check_floating(name: str, t: Tensor) -> None:
    checks.tensor(name, t)
    checks.dtype(name, t, *_INPUT_DTYPES)


def _check_matrix(x: Tensor, recipe: Recipe, block: tuple[int | None, int | None]) -> None:
    _check_floating("x", x)
    checks.ndim("x", x, 2)
    checks.multiple("C", x.shape[1], BLOCK)
    if recipe.block != block:
        raise ValueError(f"recipe must have blocks of {block}, got {recipe.name} with {recipe.block}")
