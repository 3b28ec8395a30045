"""Quantisation of index queries and keys, the recipe `hopper_kernels.fp8.INDEX_ROWS` (Triton)."""

import triton
import triton.language as tl
from hopper_kernels.fp8_device import block_scale, quantize, reciprocal

AMAX_FLOOR = tl.constexpr(1e-10)


@triton.jit(do_not_specialize=["rows"])
def quantize_kernel(x, w, out, scale, rows, WEIGHTED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """x (rows, D) bf16 -> out e4m3, and scale (rows,) fp32; if WEIGHTED, the scales times w (rows,), in fp32; else half
    the scales, as the kernels of the scores sum up twice each ReLU.

    NaN elements do not count for the scale of their row, and stay NaN.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, D)
    inside = (r < rows)[:, None]
    v = tl.load(x + r[:, None] * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.where(v == v, tl.abs(v), 0.0), axis=1)
    s = block_scale(amax, AMAX_FLOOR, True)
    y = quantize(v, s[:, None], reciprocal(s)[:, None])
    tl.store(out + r[:, None] * D + c[None, :], y, mask=inside)
    if WEIGHTED:
        s = s * tl.load(w + r, mask=r < rows, other=0.0).to(tl.float32)
    else:
        s = 0.5 * s
    tl.store(scale + r, s, mask=r < rows)
