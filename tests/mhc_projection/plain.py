"""The same mathematics written another way, for autograd: in float64, and as an eager trainer has it in bf16."""

from typing import NamedTuple

import torch
from mhc_projection import mhc_gates, mhc_projection
from torch import Tensor

from tests.mhc_projection.inputs import HC_EPS, ITERS, RMS_EPS, Operands


class Results(NamedTuple):
    mixes: Tensor
    collapsed: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def projection(x: Tensor, weight: Tensor, pre_mix: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise first, then project; weighted sum of the streams. All operands of one dtype."""
    flat = x.flatten(-2)
    mixes = torch.nn.functional.rms_norm(flat, (flat.shape[-1],), eps=eps) @ weight.t()
    return mixes, torch.einsum("...i,...ic->...c", pre_mix, x)


def gates(mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """With torch.logsumexp and one loop over pairs of normalisations."""
    parts, offsets = mixes.split((hc, hc, hc * hc), -1), base.split((hc, hc, hc * hc))
    pre, post, comb = (part * scale[i] + offset for i, (part, offset) in enumerate(zip(parts, offsets, strict=True)))
    comb = comb.unflatten(-1, (hc, hc))
    comb = (comb - comb.logsumexp(-1, keepdim=True)).exp() + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.sigmoid() + eps, 2 * post.sigmoid(), comb


def two_operators(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None = None,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`hyper_connection` as its two halves, with the logits between them in autograd's graph."""
    mixes, collapsed = mhc_projection(x, weight, pre_mix, rms_eps)
    return *mhc_gates(mixes, scale, base, x.shape[-2], sinkhorn_iters, hc_eps), collapsed


def float64(t: Operands) -> Operands:
    """The operands in float64, the weight rounded to bf16 as the contract says."""
    return Operands(t.x.double(), t.weight.bfloat16().double(), t.scale.double(), t.base.double(), t.pre_mix.double())


def exact(t: Operands, hc: int) -> Results:
    """Results in float64 of operands in float64."""
    mixes, collapsed = projection(t.x, t.weight, t.pre_mix, RMS_EPS)
    return Results(mixes, collapsed, *gates(mixes, t.scale, t.base, hc, ITERS, HC_EPS))


def eager(t: Operands, hc: int) -> Results:
    """Results of a trainer's eager path: products in bf16, statistics and gates in fp32."""
    flat = t.x.flatten(-2)
    rstd = (flat.float().square().mean(-1, keepdim=True) + RMS_EPS).rsqrt()
    mixes = (flat @ t.weight.bfloat16().t()).float() * rstd
    collapsed = (t.pre_mix[..., None] * t.x.float()).sum(-2).bfloat16()
    return Results(mixes, collapsed, *gates(mixes, t.scale, t.base, hc, ITERS, HC_EPS))
