"""Derivatives of the operators, and the projection whose backward takes over the gradient of the other readers of x."""

from collections.abc import Callable

import torch

from mhc_projection.arguments import flatten_pre_mix, flatten_streams, flatten_tokens


def register(library: torch.library.Library) -> None:
    """Give the operators of `library` their derivatives. Those of the backward operators raise RuntimeError."""
    formulas = {
        "projection_forward": (_save_projection, _differentiate_projection),
        "projection_backward": (_save_nothing, _refuse),
        "hyper_connection_forward": (_save_hyper_connection, _differentiate_hyper_connection),
        "hyper_connection_backward": (_save_nothing, _refuse),
        "gates_forward": (_save_gates, _differentiate_gates),
        "gates_backward": (_save_nothing, _refuse),
    }
    for name, (save, differentiate) in formulas.items():
        library.impl(name, _autograd_kernel(name, save, differentiate), "Autograd")


def _autograd_kernel(name: str, save: Callable, differentiate: Callable) -> Callable:
    """What `torch.library.register_autograd` makes, with less work on the host in each call."""
    operator = getattr(torch.ops.mhc_projection, name).default

    def run(*arguments):
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            results = run(*arguments)
            save(ctx, arguments, results)
            return results

        backward = staticmethod(differentiate)

    def kernel(*arguments):
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            return Derivative.apply(*arguments)
        if torch.autograd.forward_ad._current_level >= 0:  # inside it, a tangent would be dropped without a word
            return Derivative.apply(*arguments)
        return run(*arguments)

    Derivative.__name__ = f"mhc_projection_{name}"
    return kernel


class ProjectionStreams(torch.autograd.Function):
    """`projection_forward` of (x, weight, pre_mix fp32 or None, eps), any leading dimensions, and a view of x.

    The gradient of the view becomes the addend of the backward. An operator cannot return a view of its input, so this
    is a Function. Its results are (mixes, collapsed, streams), without `collapsed` if there is no pre_mix.
    """

    @staticmethod
    def forward(ctx, x, weight, pre_mix, eps):
        lead = x.shape[:-2]
        mixes, rstd, collapsed, used_reference = torch.ops.mhc_projection.projection_forward(
            flatten_streams(x), weight, flatten_pre_mix(pre_mix), eps
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, pre_mix, mixes, rstd, used_reference)
        results = [mixes.view(*lead, weight.shape[0])]
        if pre_mix is not None:
            results.append(collapsed.view(*lead, x.shape[-1]))
        return *results, x.view_as(x)

    @staticmethod
    def backward(ctx, grad_mixes, *others):
        x, weight, pre_mix, mixes, rstd, used_reference = ctx.saved_tensors
        grad_collapsed, addend = (None, *others) if pre_mix is None else others
        if grad_mixes is None and grad_collapsed is None:
            return addend, None, None, None
        saved = (flatten_streams(x), weight, flatten_pre_mix(pre_mix), mixes, rstd, used_reference)
        grads = (grad_mixes, 1), (grad_collapsed, 1), (addend, 2)
        flat = [None if grad is None else flatten_tokens(grad, kept) for grad, kept in grads]
        grad_x, grad_weight, grad_pre_mix = _projection_gradients(saved, ctx.needs_input_grad, *flat)
        return (
            None if grad_x is None else grad_x.view(x.shape),
            grad_weight,
            None if grad_pre_mix is None else grad_pre_mix.view(pre_mix.shape),
            None,
        )


class HyperConnectionStreams(torch.autograd.Function):
    """`hyper_connection_forward` in the same way: (pre, post, comb, [collapsed,] streams)."""

    @staticmethod
    def forward(ctx, x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
        lead, hc = x.shape[:-2], x.shape[-2]
        pre, post, comb, collapsed, mixes, rstd, used_reference = torch.ops.mhc_projection.hyper_connection_forward(
            flatten_streams(x), weight, scale, base, flatten_pre_mix(pre_mix), rms_eps, hc_eps, iters
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, scale, base, pre_mix, mixes, rstd, used_reference)
        ctx.options = hc_eps, iters
        results = [pre.view(*lead, hc), post.view(*lead, hc), comb.view(*lead, hc, hc)]
        if pre_mix is not None:
            results.append(collapsed.view(*lead, x.shape[-1]))
        return *results, x.view_as(x)

    @staticmethod
    def backward(ctx, grad_pre, grad_post, grad_comb, *others):
        x, weight, scale, base, pre_mix, mixes, rstd, used_reference = ctx.saved_tensors
        grad_collapsed, addend = (None, *others) if pre_mix is None else others
        saved = flatten_streams(x), weight, scale, base, flatten_pre_mix(pre_mix), mixes, rstd, used_reference
        grads = (grad_pre, 1), (grad_post, 1), (grad_comb, 2), (grad_collapsed, 1), (addend, 2)
        if all(grad is None for grad, _ in grads[:4]):
            return addend, *[None] * 7
        flat = [None if grad is None else flatten_tokens(grad, kept) for grad, kept in grads]
        grad_x, *parameters, grad_pre_mix = _hyper_connection_gradients(
            saved, ctx.needs_input_grad, *flat, *ctx.options
        )
        grad_x = None if grad_x is None else grad_x.view(x.shape)
        grad_pre_mix = None if grad_pre_mix is None else grad_pre_mix.view(pre_mix.shape)
        return grad_x, *parameters, grad_pre_mix, None, None, None


def _projection_gradients(saved, needs_input_grad, grad_mixes, grad_collapsed, addend):
    """Gradients of x (T, hc, d), weight and pre_mix; None where none is needed or none flows."""
    x, weight, pre_mix, mixes, rstd, used_reference = saved
    if grad_mixes is None and grad_collapsed is None:
        return addend, None, None
    need_x, need_weight, need_pre_mix = needs_input_grad[:3]
    need_weight = need_weight and grad_mixes is not None
    need_pre_mix = need_pre_mix and grad_collapsed is not None
    grad_x, grad_weight, grad_pre_mix = torch.ops.mhc_projection.projection_backward(
        x,
        weight,
        pre_mix,
        mixes,
        rstd,
        grad_mixes,
        grad_collapsed,
        addend,
        need_x,
        need_weight,
        need_pre_mix,
        used_reference,
    )
    return (
        grad_x if need_x else None,
        grad_weight.to(weight.dtype) if need_weight else None,
        grad_pre_mix if need_pre_mix else None,
    )


def _save_projection(ctx, inputs, output):
    x, weight, pre_mix, _ = inputs
    mixes, rstd, collapsed, used_reference = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd, used_reference, *([collapsed] if pre_mix is None else []))
    ctx.save_for_backward(x, weight, pre_mix, mixes, rstd, used_reference)


def _differentiate_projection(ctx, grad_mixes, _rstd, grad_collapsed, _used_reference):
    return *_projection_gradients(ctx.saved_tensors, ctx.needs_input_grad, grad_mixes, grad_collapsed, None), None


def _hyper_connection_gradients(
    saved, needs_input_grad, grad_pre, grad_post, grad_comb, grad_collapsed, addend, hc_eps, iters
):
    """Gradients of x (T, hc, d), weight, scale, base and pre_mix; None where none is needed or none flows."""
    x, weight, scale, base, pre_mix, mixes, rstd, used_reference = saved
    need_x, need_weight, need_scale, need_base, need_pre_mix = needs_input_grad[:5]
    gates = any(grad is not None for grad in (grad_pre, grad_post, grad_comb))
    if not gates and grad_collapsed is None:
        return addend, None, None, None, None
    need_weight, need_pre_mix = need_weight and gates, need_pre_mix and grad_collapsed is not None
    grad_x, grad_weight, grad_scale, grad_base, grad_pre_mix = torch.ops.mhc_projection.hyper_connection_backward(
        x,
        weight,
        scale,
        base,
        pre_mix,
        mixes,
        rstd,
        grad_pre,
        grad_post,
        grad_comb,
        grad_collapsed,
        addend,
        hc_eps,
        iters,
        need_x,
        need_weight,
        need_pre_mix,
        used_reference,
    )
    return (
        grad_x if need_x else None,
        grad_weight.to(weight.dtype) if need_weight else None,
        grad_scale.to(scale.dtype) if need_scale and gates else None,
        grad_base.to(base.dtype) if need_base and gates else None,
        grad_pre_mix if need_pre_mix else None,
    )


def _save_hyper_connection(ctx, inputs, output):
    x, weight, scale, base, pre_mix, _, *ctx.options = inputs
    *_, collapsed, mixes, rstd, used_reference = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mixes, rstd, used_reference, *([collapsed] if pre_mix is None else []))
    ctx.save_for_backward(x, weight, scale, base, pre_mix, mixes, rstd, used_reference)


def _differentiate_hyper_connection(ctx, grad_pre, grad_post, grad_comb, grad_collapsed, *_):
    grads = (grad_pre, grad_post, grad_comb, grad_collapsed, None)
    found = _hyper_connection_gradients(ctx.saved_tensors, ctx.needs_input_grad, *grads, *ctx.options)
    return *found, None, None, None


def _save_gates(ctx, inputs, output):
    mixes, scale, base, *ctx.options = inputs
    ctx.mark_non_differentiable(output[3])
    ctx.save_for_backward(mixes, scale, base, output[3])


def _differentiate_gates(ctx, grad_pre, grad_post, grad_comb, _used_reference):
    mixes, scale, base, used_reference = ctx.saved_tensors
    grad_mixes, grad_scale, grad_base = torch.ops.mhc_projection.gates_backward(
        mixes, scale, base, grad_pre, grad_post, grad_comb, *ctx.options, used_reference
    )
    return grad_mixes, grad_scale.to(scale.dtype), grad_base.to(base.dtype), None, None, None


def _save_nothing(ctx, inputs, output):
    pass


def _refuse(ctx, *_):
    raise RuntimeError("mhc_projection has no second-order gradients")
