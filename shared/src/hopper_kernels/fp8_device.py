"""Device twins of `hopper_kernels.fp8` for Triton kernels. Imports triton, so only kernels import it."""

import triton
import triton.language as tl

_E4M3_MAX = tl.constexpr(448.0)
_MANTISSA = tl.constexpr(0x7FFFFF)
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def block_scale(amax, FLOOR: tl.constexpr, UE8M0: tl.constexpr):
    """`fp8.scale`: RN(max(amax, FLOOR) / 448) in fp32, with UE8M0 the next power of two. NaN counts as no element."""
    scale = tl.math.div_rn(tl.maximum(amax, FLOOR), tl.full(amax.shape, _E4M3_MAX, tl.float32))
    if UE8M0:
        scale = ((scale.to(tl.int32, bitcast=True) + _MANTISSA) & _EXPONENT).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def reciprocal(scale):
    """RN(1 / scale), once for each block; 0 for an Inf scale. What `quantize` takes."""
    return tl.math.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def quantize(v, scale, inverse):
    """`fp8.quantize`: e4m3(RN(v / scale)) with inverse = `reciprocal(scale)`, without a division for each element.

    One Newton step makes v * inverse the correctly rounded quotient (Markstein). Zeros keep the first product: the
    step would turn -0 into +0, and an Inf scale's 0 into NaN. |v / scale| must be finite in fp32, which it is where the
    scale is that of v's block: at most 448.
    """
    first = v * inverse
    corrected = tl.fma(tl.fma(-first, scale, v), inverse, first)
    return tl.where(first == 0.0, first, corrected).to(tl.float8e4nv)
