"""The row cast alone (Triton), for operands of which only that copy is needed."""

import triton
import triton.language as tl
from hopper_kernels.fp8_device import block_scale, quantize, reciprocal

BLOCK = tl.constexpr(128)
AMAX_FLOOR = tl.constexpr(1e-10)


@triton.jit(do_not_specialize=["tokens", "blocks_c", "pitch_over_8"])
def row_cast_kernel(x, q, sf, tokens, blocks_c, pitch_over_8, ROWS: tl.constexpr, UE8M0: tl.constexpr):
    """A program casts ROWS tokens x 128 channels. It owns those bytes of q, their scales, and the padding behind sf."""
    channels = blocks_c * BLOCK
    pitch = pitch_over_8 * 8
    block_c = tl.program_id(0) % blocks_c
    row = (tl.program_id(0) // blocks_c).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = block_c * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None]
    v = tl.load(x + row[:, None] * pitch + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = block_scale(tl.max(tl.abs(v), axis=1), AMAX_FLOOR, UE8M0)
    out = quantize(v, scale[:, None], reciprocal(scale)[:, None])
    tl.store(q + row[:, None] * channels + channel[None, :], out, mask=inside)
    pitch_sf = tl.cdiv(tokens, 4) * 4
    scale = tl.where(row < tokens, scale, 0.0)
    tl.store(sf + block_c.to(tl.int64) * pitch_sf + row, scale, mask=row < pitch_sf)
