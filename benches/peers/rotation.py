"""The in-place rotation that a fused cast replaces: interleaved RoPE of the last channels of each head (Triton)."""

# ruff: noqa: N803  (Triton's compile-time arguments are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rotate_kernel(
    x,
    table,
    positions,
    heads,
    pitch,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    INVERSE: tl.constexpr,
):
    """A program rotates the last 2 * HALF channels of BLOCK_H heads of one token; nobody else touches them."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    pair = tl.arange(0, HALF)
    cosine = tl.load(table + position * 2 * HALF + pair)[None, :]
    sine = tl.load(table + position * 2 * HALF + HALF + pair)[None, :]
    # A product changes the sign of zeros too; Triton's unary minus is 0 - x, which leaves +0 as it is.
    minus_sine = sine * -1.0
    if INVERSE:
        sine, minus_sine = minus_sine, sine
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    channel = HEAD_DIM - 2 * HALF + tl.arange(0, 2 * HALF)
    where = x + token * pitch + head[:, None] * HEAD_DIM + channel[None, :]
    inside = (head < heads)[:, None]
    values = tl.load(where, mask=inside, other=0.0).to(tl.float32)
    a, b = tl.split(tl.reshape(values, (BLOCK_H, HALF, 2)))
    # These two fmas and no others: the placement is part of the definition (fp8_dual_cast.reference.rotate).
    y_a = tl.fma(a, tl.broadcast_to(cosine, (BLOCK_H, HALF)), b * minus_sine)
    y_b = tl.fma(a, tl.broadcast_to(sine, (BLOCK_H, HALF)), b * cosine)
    rotated = tl.reshape(tl.join(y_a, y_b), (BLOCK_H, 2 * HALF))
    tl.store(where, rotated.to(tl.bfloat16), mask=inside)


def rotate_(
    x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, head_dim: int, *, inverse: bool = True
) -> None:
    """Rotate x (T, C) bf16 in place; table (max_pos, R) fp32 contiguous, R a power of two; positions (T,) integers.

    The transpose of the rotation with `inverse`. Bytes as fp8_dual_cast.reference.rotate. Reads and writes R of every
    `head_dim` channels: 4 * R / head_dim bytes an element.
    """
    tokens, channels = x.shape
    heads = channels // head_dim
    block = min(32, triton.next_power_of_2(heads))
    grid = (tokens, triton.cdiv(heads, block))
    half = table.shape[1] // 2
    _rotate_kernel[grid](x, table, positions, heads, x.stride(0), head_dim, half, block, inverse, num_warps=4)
