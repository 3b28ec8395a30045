"""Quantisation of index queries and keys, the recipe `hopper_kernels.fp8.INDEX_ROWS` (Triton)."""

import triton
import triton.language as tl


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
    amax = tl.maximum(tl.max(tl.where(v == v, tl.abs(v), 0.0), axis=1), 1e-10)
    bits = tl.div_rn(amax, 448.0).to(tl.int32, bitcast=True)
    s = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)  # the power of two at or above
    y = tl.div_rn(v, tl.broadcast_to(s[:, None], v.shape))
    nan: tl.constexpr = tl.PropagateNan.ALL
    y = tl.minimum(tl.maximum(y, -448.0, propagate_nan=nan), 448.0, propagate_nan=nan)
    tl.store(out + r[:, None] * D + c[None, :], y.to(tl.float8e4nv), mask=inside)
    if WEIGHTED:
        s = s * tl.load(w + r, mask=r < rows, other=0.0).to(tl.float32)
    else:
        s = 0.5 * s
    tl.store(scale + r, s, mask=r < rows)
