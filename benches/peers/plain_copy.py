"""A copy through the registers of the SMs, where the driver's own copy of that length is slow (Triton)."""

# ruff: noqa: N803  (Triton's compile-time arguments are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # 4 KiB of int32


@triton.jit
def _copy_kernel(source, target, BLOCK: tl.constexpr):
    """A program copies BLOCK numbers; their count is a multiple of BLOCK."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))


def copy_into(source: Tensor, target: Tensor) -> None:
    """Copy contiguous bytes, a multiple of 4 KiB of them."""
    source, target = source.view(torch.int32), target.view(torch.int32)
    block = 4 * _BLOCK if source.numel() % (4 * _BLOCK) == 0 else _BLOCK
    _copy_kernel[(source.numel() // block,)](source, target, BLOCK=block, num_warps=4)
