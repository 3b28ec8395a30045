"""The transposed cast as a Triton kernel of its own, as trainers have it: what the fused kernel is compared with."""

# ruff: noqa: N803  (Triton's compile-time arguments are written in capitals)

from __future__ import annotations

import triton
import triton.language as tl
from fp8_dual_cast import launch
from hopper_kernels.fp8_device import block_scale, quantize, reciprocal
from torch import Tensor

BLOCK = tl.constexpr(128)
AMAX_FLOOR = tl.constexpr(1e-10)
OPTIONS = {"COLUMNS": 64, "num_warps": 8}


@triton.jit(do_not_specialize=["tokens", "blocks_c", "pitch_over_8"])
def _column_cast_kernel(x, q_t, sf_t, tokens, blocks_c, pitch_over_8, COLUMNS: tl.constexpr, UE8M0: tl.constexpr):
    """A program casts and transposes 128 tokens x COLUMNS channels; tokens past the end count as zeros.

    Triton transposes the 8-bit results, which ptxas 12.9 gets wrong where a kernel also stores them plainly
    (triton-lang/triton#11111); this one does not.
    """
    channels = blocks_c * BLOCK
    pitch = pitch_over_8 * 8
    columns = blocks_c * (BLOCK // COLUMNS)
    block_t = (tl.program_id(0) // columns).to(tl.int64)
    token = block_t * BLOCK + tl.arange(0, BLOCK)
    channel = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
    v = tl.load(x + token[:, None] * pitch + channel[None, :], mask=(token < tokens)[:, None], other=0.0)
    v = tl.trans(v).to(tl.float32)
    scale = block_scale(tl.max(tl.abs(v), axis=1), AMAX_FLOOR, UE8M0)
    out = quantize(v, scale[:, None], reciprocal(scale)[:, None])
    pitch_t = tl.cdiv(tokens, BLOCK).to(tl.int64) * BLOCK
    tl.store(q_t + channel.to(tl.int64)[:, None] * pitch_t + token[None, :], out)
    tl.store(sf_t + block_t * channels + channel, scale)


def column_cast(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """q_t and the storage of sf_t for x (T, C) bf16 contiguous: bytes of the operator `fp8_dual_cast::column_cast`."""
    q_t, sf_t = launch.column_results(x)
    cast_into(x, q_t, sf_t, use_ue8m0)
    return q_t, sf_t


def cast_into(x: Tensor, q_t: Tensor, sf_t: Tensor, use_ue8m0: bool) -> None:
    """The same into tensors at hand."""
    tokens, channels = x.shape
    grid = (q_t.shape[1] // 128 * (channels // OPTIONS["COLUMNS"]),)
    _column_cast_kernel[grid](x, q_t, sf_t, tokens, channels // 128, x.stride(0) // 8, UE8M0=use_ue8m0, **OPTIONS)
