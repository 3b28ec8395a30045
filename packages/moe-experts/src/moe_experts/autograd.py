"""Derivatives of the operators."""

import torch


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


FORMULAS = {"moe_experts_forward": (_save_forward, _differentiate_forward)}
