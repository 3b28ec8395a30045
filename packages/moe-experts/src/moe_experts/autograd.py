"""Derivatives of the operators."""

from collections.abc import Callable

import torch


def register(library: torch.library.Library, namespace: str) -> None:
    """Give the operators of `library` their derivatives. Those of the backward operators raise RuntimeError."""
    formulas = {
        "moe_experts_forward": (_save_forward, _differentiate_forward),
        "moe_experts_backward": (_save_nothing, _refuse),
        "moe_experts_backward_data": (_save_nothing, _refuse),
        "moe_experts_weight_grad": (_save_nothing, _refuse),
    }
    for name, formula in formulas.items():
        operator = getattr(getattr(torch.ops, namespace), name).default
        library.impl(name, _autograd_kernel(name, operator, *formula), "Autograd")


def _autograd_kernel(name: str, operator: Callable, save: Callable, differentiate: Callable) -> Callable:
    """What `torch.library.register_autograd` makes, but for forward mode, where that would drop a tangent silently."""

    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with torch._C._AutoDispatchBelowAutograd():
                results = operator(*arguments)
            save(ctx, arguments, results)
            return results

        backward = staticmethod(differentiate)

    Derivative.__name__ = name

    def kernel(*arguments):
        if _requires_grad(arguments) or torch.autograd.forward_ad._current_level >= 0:
            return Derivative.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    return kernel


def _requires_grad(arguments: tuple) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments)


def _save_forward(ctx, inputs, output):
    *operands, ctx.swiglu_limit = inputs
    _, gate, up, used_reference = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gate, up, used_reference)
    ctx.save_for_backward(*operands, gate, up, used_reference)


def _differentiate_forward(ctx, dout, *_):
    needed = ctx.needs_input_grad[:4]
    if dout is None:
        return None, None, None, None, None, None
    *operands, used_reference = ctx.saved_tensors  # looked at once, since a checkpoint hands them out once
    grads = torch.ops.moe_experts.moe_experts_backward(dout, *operands, ctx.swiglu_limit, *needed, used_reference)
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None


def _save_nothing(ctx, inputs, output):
    pass


def _refuse(ctx, *_):
    raise RuntimeError("moe_experts has no second-order gradients")
