"""Hyper-connections of other projects, and in plain PyTorch as a trainer without a kernel has them.

Every function here returns a `Connection` with V4.1's numbers; what it needs is imported then, not before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from hopper_kernels.models import V41_FLASH
from torch import Tensor

Connection = Callable[..., tuple[Tensor, ...]]
"""(x, weight, scale, base, pre_mix), as `mhc_projection.hyper_connection` -> (pre, post, comb, collapsed)."""

_HC, _ITERS, _RMS_EPS, _HC_EPS = V41_FLASH.hc, V41_FLASH.sinkhorn_iters, V41_FLASH.rms_eps, V41_FLASH.hc_eps
_SECTIONS = (_HC, _HC, _HC * _HC)


def eager() -> Connection:
    """Plain PyTorch: the products in bf16, the RMS and the gates in fp32, autograd through all iterations.

    The collapse is a bf16 einsum, which spares a pass over fp32 streams and rounds pre_mix to bf16.
    """
    return functools.partial(_plain, collapse=_einsum)


@functools.cache
def compiled() -> Connection:
    """The same under torch.compile, the collapse as an fp32 sum, which Inductor fuses. One function for all cases."""
    from torch._functorch import config as functorch_config

    # A compiled backward may otherwise overwrite what it saved, and refuses to run twice on one graph.
    functorch_config.donated_buffer = False
    return torch.compile(functools.partial(_plain, collapse=_weighted_sum), dynamic=False, fullgraph=True)


def tile_kernels(*, add_gradient: bool = False) -> Connection:
    """TileKernels 1.0.0 (TileLang): the weight in TF32; projection, gates, Sinkhorn, collapse apart, x read twice.

    `add_gradient`: its own way of adding the gradient of other readers, see `tile_kernels_gradients`.
    """
    with contextlib.suppress(ModuleNotFoundError):  # 1.0.0 beside TileLang 0.1.15: its FP8 casts lack a module,
        import tile_kernels  # noqa: F401  # and once they have failed the rest can be imported
    from tile_kernels.modeling.mhc.ops import (
        mhc_pre_apply_mix,
        mhc_pre_norm_fn,
        mhc_pre_split_mixes,
        sinkhorn_normalize,
    )

    def connection(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, pre_mix: Tensor) -> tuple[Tensor, ...]:
        x, pre_mix = x.unsqueeze(0), pre_mix[None, :, :, None]  # it takes (batch, tokens, ...)
        mixes = mhc_pre_norm_fn(x, weight, None, _RMS_EPS, fuse_grad_acc=add_gradient)
        pre, post, comb = mhc_pre_split_mixes(mixes, scale, base, _HC, 2.0, _HC_EPS)
        comb = sinkhorn_normalize(comb, repeat=_ITERS, eps=_HC_EPS)
        collapsed = mhc_pre_apply_mix(x, pre_mix)
        return pre[0, :, :, 0], post[0, :, :, 0], comb[0], collapsed[0]

    return connection


def tile_kernels_gradients(results: tuple[Tensor, ...], leaves: tuple[Tensor, ...], cotangents: tuple, buffer: Tensor):
    """Gradients of `tile_kernels(add_gradient=True)`, that of x added into `buffer`, the gradient of its other readers.

    The library finds the buffer as an attribute of the storage of x; it removes the attribute and gives x no gradient.
    """
    leaves[0].untyped_storage().grad_from_mhc_post = buffer
    grads = torch.autograd.grad(results, leaves, cotangents, retain_graph=True, allow_unused=True)
    assert grads[0] is None, "TileKernels did not add into the buffer"
    return buffer, *grads[1:]


def liger() -> Connection:
    """Liger-Kernel (Triton): the weight transposed and in bf16, sums over tokens by atomics, x read twice.

    It uses comb as (to stream, from stream), but computes it with the same normalisations of the same axes.
    """
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_pre

    options = {"tmax": _ITERS, "rms_eps": _RMS_EPS, "pre_eps": _HC_EPS, "sinkhorn_eps": _HC_EPS, "post_mult": 2.0}

    def connection(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, pre_mix: Tensor) -> tuple[Tensor, ...]:
        gates = liger_mhc_coeffs(x, weight.t().bfloat16(), base, *scale.unbind(), **options)
        return *gates, liger_mhc_pre(x, pre_mix)

    return connection


def _plain(x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, pre_mix: Tensor, *, collapse: Connection):
    flat = x.flatten(1)
    rstd = torch.rsqrt(flat.float().square().mean(-1, keepdim=True) + _RMS_EPS)
    mixes = _Product.apply(flat, weight.bfloat16()) * rstd
    z_pre, z_post, z_comb = (
        part * s + b
        for part, s, b in zip(mixes.split(_SECTIONS, 1), scale.unbind(), base.split(_SECTIONS), strict=True)
    )
    comb = torch.softmax(z_comb.unflatten(1, (_HC, _HC)), -1) + _HC_EPS
    comb = comb / (comb.sum(-2, keepdim=True) + _HC_EPS)
    for _ in range(_ITERS - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + _HC_EPS)
        comb = comb / (comb.sum(-2, keepdim=True) + _HC_EPS)
    return torch.sigmoid(z_pre) + _HC_EPS, 2 * torch.sigmoid(z_post), comb, collapse(x, pre_mix)


def _einsum(x: Tensor, pre_mix: Tensor) -> Tensor:
    return torch.einsum("ti,tic->tc", pre_mix.to(x.dtype), x)


def _weighted_sum(x: Tensor, pre_mix: Tensor) -> Tensor:
    return (pre_mix.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)


class _Product(torch.autograd.Function):
    """x @ w.t() of bf16 matrices in fp32; autograd has no formula for `torch.mm` with an out_dtype."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _mm_fp32(x, w.t())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ w, _mm_fp32(grad.t(), x).to(w.dtype)


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
