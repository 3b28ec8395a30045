"""Kernels that do nothing but call the device twins of `hopper_kernels.fp8`. Triton reads them from this file."""

# ruff: noqa: N803  (compile-time parameters are upper case)

import triton
import triton.language as tl
from hopper_kernels.fp8_device import block_scale, quantize, reciprocal


@triton.jit
def scale_kernel(amax, scale, inverse, N: tl.constexpr, UE8M0: tl.constexpr):
    """scale and inverse (N,) of amax (N,), all fp32."""
    i = tl.arange(0, N)
    s = block_scale(tl.load(amax + i), 1e-10, UE8M0)
    tl.store(scale + i, s)
    tl.store(inverse + i, reciprocal(s))


@triton.jit
def quantize_kernel(v, scale, q, N: tl.constexpr):
    """q (N,) e4m3 of v (N,) and scale (N,), both fp32."""
    i = tl.arange(0, N)
    s = tl.load(scale + i)
    tl.store(q + i, quantize(tl.load(v + i), s, reciprocal(s)))
