"""Derivatives of the FP8 operators."""

import torch
from hopper_kernels import derivatives


def _save_forward(ctx, inputs, output):
    _, _, up_proj, _, num_tokens_per_expert, ctx.swiglu_limit, ctx.saved = inputs
    ctx.packed = up_proj is None
    _, *kept = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(num_tokens_per_expert, *kept)


def _differentiate_forward(ctx, dout, *_):
    if dout is None:
        return (None,) * 7
    if not ctx.saved:
        raise RuntimeError("this forward of moe_experts kept nothing for a backward: it had save_for_backward=False")
    needed = ctx.needs_input_grad[:4]
    *kept, used_reference = ctx.saved_tensors  # looked at once, since a checkpoint hands them out once
    grads = torch.ops.moe_experts.moe_experts_fp8_backward(
        dout, *kept, ctx.swiglu_limit, ctx.packed, *needed, used_reference
    )
    return *(grad if need else None for grad, need in zip(grads, needed, strict=True)), None, None, None


def _take_no_gradient(ctx, inputs, output):
    """Quantised weights are a snapshot: what is made of them has no gradient of the weights."""
    ctx.mark_non_differentiable(*output)


def _no_gradient(ctx, *_):
    return None, None, None


FORMULAS = {
    "moe_experts_fp8_forward": (_save_forward, _differentiate_forward),
    "moe_experts_fp8_quantize_weights": (_take_no_gradient, _no_gradient),
    "moe_experts_fp8_forward_quantized": derivatives.refusing(
        "moe_experts_fp8_forward_quantized has no derivative: call moe_experts_fp8_backward or its halves, or"
        " moe_experts with fp8=True"
    ),
}
