"""Triton kernels to precompile. Triton reads the source of a kernel from a file."""

# ruff: noqa: N803  (compile-time parameters are upper case)

import functools

import torch
import triton
import triton.language as tl
from hopper_kernels.precompile import Variant


@triton.jit
def _scale_kernel(x, out, factor, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def _matmul_kernel(a, b, c, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(c + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


def _meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def _compile_scale(**options):
    return _scale_kernel.warmup(_meta(4096), _meta(4096), 2.0, 4096, BLOCK=1024, grid=(4,), **options)


def _compile_matmul(size, num_warps):
    operands = [_meta(size, size, dtype=torch.bfloat16) for _ in range(2)]
    return _matmul_kernel.warmup(*operands, _meta(size, size), N=size, grid=(1,), num_warps=num_warps)


SCALE = Variant("scale", _compile_scale, expect=("LDG", "STG", "UTMALDG"))
# 32 values and their addresses a thread do not fit into the 24 registers that ptxas makes of this.
SPILLS = Variant("spills", functools.partial(_compile_scale, num_warps=1, maxnreg=16))
MATMUL = Variant("matmul", functools.partial(_compile_matmul, 64, 4), expect=("HGMMA",))
