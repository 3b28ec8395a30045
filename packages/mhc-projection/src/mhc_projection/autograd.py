"""Derivatives of the operators, and the projection whose backward takes over the gradient of the other readers of x."""

import torch


class ProjectionStreams(torch.autograd.Function):
    """`projection_forward` of (x, weight, pre_mix fp32 or None, eps), and a view of x.

    The gradient of the view becomes the addend of the backward. An operator cannot return a view of its input, so this
    is a Function. Its results are (mixes, collapsed, streams), without `collapsed` if there is no pre_mix.
    """

    @staticmethod
    def forward(ctx, x, weight, pre_mix, eps):
        mixes, rstd, collapsed, used_reference = torch.ops.mhc_projection.projection_forward(x, weight, pre_mix, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, pre_mix, mixes, rstd, used_reference)
        return mixes, *([] if pre_mix is None else [collapsed]), x.view_as(x)

    @staticmethod
    def backward(ctx, grad_mixes, *others):
        saved = ctx.saved_tensors  # looked at once, since a checkpoint hands them out once
        grad_collapsed, addend = (None, *others) if saved[2] is None else others
        return *_projection_gradients(saved, ctx.needs_input_grad, grad_mixes, grad_collapsed, addend), None


class HyperConnectionStreams(torch.autograd.Function):
    """`hyper_connection_forward` in the same way: (pre, post, comb, [collapsed,] streams)."""

    @staticmethod
    def forward(ctx, x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
        operands = x, weight, scale, base, pre_mix
        *gates, collapsed, mixes, rstd, used_reference = torch.ops.mhc_projection.hyper_connection_forward(
            *operands, rms_eps, hc_eps, iters
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, mixes, rstd, used_reference)
        ctx.options = hc_eps, iters
        return *gates, *([] if pre_mix is None else [collapsed]), x.view_as(x)

    @staticmethod
    def backward(ctx, grad_pre, grad_post, grad_comb, *others):
        saved = ctx.saved_tensors
        grad_collapsed, addend = (None, *others) if saved[4] is None else others
        grads = grad_pre, grad_post, grad_comb, grad_collapsed, addend
        found = _hyper_connection_gradients(saved, ctx.needs_input_grad, *grads, *ctx.options)
        return *found, None, None, None


def _in_dtype_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.dtype == parameter.dtype else gradient.to(parameter.dtype)  # the call has a cost


def _projection_gradients(saved, needs_input_grad, grad_mixes, grad_collapsed, addend):
    """Gradients of x, weight and pre_mix; None where none is needed or none flows."""
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
        _in_dtype_of(weight, grad_weight) if need_weight else None,
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
    """Gradients of x, weight, scale, base and pre_mix; None where none is needed or none flows."""
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
        _in_dtype_of(weight, grad_weight) if need_weight else None,
        _in_dtype_of(scale, grad_scale) if need_scale and gates else None,
        _in_dtype_of(base, grad_base) if need_base and gates else None,
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
    return grad_mixes, _in_dtype_of(scale, grad_scale), _in_dtype_of(base, grad_base), None, None, None


FORMULAS = {
    "projection_forward": (_save_projection, _differentiate_projection),
    "hyper_connection_forward": (_save_hyper_connection, _differentiate_hyper_connection),
    "gates_forward": (_save_gates, _differentiate_gates),
}
