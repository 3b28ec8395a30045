"""What `hopper-kernels check` runs: results and gradients of the public functions against the definition in float64."""

from collections.abc import Sequence

import torch
from hopper_kernels import models
from hopper_kernels.selfcheck import Case, relative_error
from torch import Tensor

from mhc_projection import ops, reference
from mhc_projection.arguments import logits

SEED = 20261
ITERS, RMS_EPS, HC_EPS = models.V41_FLASH.sinkhorn_iters, models.V41_FLASH.rms_eps, models.V41_FLASH.hc_eps
# Storing a result in bf16 alone costs 1.7e-3; a gradient of the streams with an addend is rounded twice.
_BOUNDS = {
    "mixes": 1e-5,
    "collapsed": 3e-3,
    "pre": 1e-5,
    "post": 1e-5,
    "comb": 1e-5,
    "grad_x": 3e-3,
    "grad_weight": 5e-4,
    "grad_pre_mix": 1e-5,
    "grad_scale": 1e-4,
    "grad_base": 1e-4,
}
_RESULTS = ("mixes", "collapsed", "pre", "post", "comb")
_GRADIENTS = ("grad_x", "grad_weight", "grad_pre_mix", "grad_scale", "grad_base")


def cases(device: torch.device) -> list[Case]:
    """Toy streams on a CPU; on a GPU 4,096 tokens of the family's widths too, and sizes that fill no tile."""
    sizes = [(37, 4, 320), (130, 4, 200), (77, 2, 192), (3, 1, 8)]
    if device.type != "cpu":
        widths = (models.V41_FLASH, models.V4_PRO, models.V4_FLASH)
        tokens = (4096, 4096, 1024)
        sizes = [(count, w.hc, w.hidden) for count, w in zip(tokens, widths, strict=True)] + sizes
    return [_case(*size, streams, device) for size in sizes for streams in (False, True)]


def _case(tokens: int, hc: int, d: int, streams: bool, device: torch.device) -> Case:
    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        n = logits(hc)
        x, grad_collapsed, addend = (
            torch.randn(*shape, device=device).bfloat16() for shape in ((tokens, hc, d), (tokens, d), (tokens, hc, d))
        )
        weight, base = torch.randn(n, hc * d, device=device) * 0.02, torch.randn(n, device=device) * 0.5
        scale, pre_mix = torch.rand(3, device=device) + 0.5, torch.rand(tokens, hc, device=device)
        grads = (torch.randn(*shape, device=device) for shape in ((tokens, hc), (tokens, hc), (tokens, hc, hc)))
        return x, weight, scale, base, pre_mix, grad_collapsed, *grads, addend

    def run(x, weight, scale, base, pre_mix, *cotangents) -> dict[str, Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, weight, pre_mix, scale, base)]
        x, weight, pre_mix, scale, base = leaves
        *cotangents, addend = cotangents
        if streams:
            *gates, collapsed, view = ops.hyper_connection_streams(
                x, weight, scale, base, pre_mix, rms_eps=RMS_EPS, hc_eps=HC_EPS, sinkhorn_iters=ITERS
            )
            results = (collapsed, *gates)
            grads = torch.autograd.grad((*results, view), leaves, (*cotangents, addend))
        else:
            mixes, collapsed = ops.mhc_projection(x, weight, pre_mix, RMS_EPS)
            results = (collapsed, *ops.mhc_gates(mixes, scale, base, hc, ITERS, HC_EPS))
            grads = torch.autograd.grad(results, leaves, cotangents)
            results = (mixes, *results)
        return _named([t.detach() for t in results], grads)

    def expected(x, weight, scale, base, pre_mix, grad_collapsed, *cotangents) -> dict[str, Tensor]:
        x, scale, base, pre_mix, grad_collapsed = (t.double() for t in (x, scale, base, pre_mix, grad_collapsed))
        *cotangents, addend = (t.double() for t in cotangents)
        mixes, rstd, collapsed = reference.projection_forward(x, weight, pre_mix, RMS_EPS)
        gates = reference.gates_forward(mixes, scale, base, hc, ITERS, HC_EPS)
        grad_mixes, *gate_grads = reference.gates_backward(mixes, scale, base, *cotangents, hc, ITERS, HC_EPS)
        grads = reference.projection_backward(
            x, weight, pre_mix, mixes, rstd, grad_mixes, grad_collapsed, addend if streams else None
        )
        return _named((*([] if streams else [mixes]), collapsed, *gates), (*grads, *gate_grads))

    what = "hyper_connection_streams" if streams else "projection, gates"
    bounds = {name: bound for name, bound in _BOUNDS.items() if name != "mixes" or not streams}
    return Case(f"{tokens} x {hc} x {d}, {what}", make, run, expected, relative_error, bounds)


def _named(results: Sequence[Tensor], gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    """Names of all results, or of those without the mixes, and of the gradients."""
    names = _RESULTS[len(_RESULTS) - len(results) :]
    return dict(zip((*names, *_GRADIENTS), (*results, *gradients), strict=True))
