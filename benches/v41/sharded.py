"""Experts in FP8 under FSDP2, whose gradients are summed in fp32 over micro-batches by the kernels themselves.

FSDP2 sums the micro-batches' gradients of a parameter in the dtype of its reduction, in a buffer that it sends off in
the last backward. A backward that adds into this buffer itself spares the gradients in bf16 and their addition.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from moe_experts import (
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benches.v41.model import Experts, Stack

Buffers = Callable[[], tuple[Tensor, Tensor, bool]]
"""Sums (E, 2I, H) and (E, H, I) fp32 of the weights' gradients, and whether there is anything in them yet."""


class SummedExperts(torch.autograd.Function):
    """(rows, gate_up, down, counts, limit, buffers) -> results, as `moe_experts(..., fp8=True)`; the weights' gradients
    are added to the buffers, and autograd gets none."""

    @staticmethod
    def forward(
        ctx, x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, limit: float, buffers: Buffers
    ) -> Tensor:
        weights = moe_experts_fp8_quantize_weights(gate_up, None, down)
        out, *kept = moe_experts_fp8_forward_quantized(x, counts, limit, *weights[:4])
        ctx.save_for_backward(counts, *kept, *weights[4:])
        ctx.limit, ctx.buffers = limit, buffers
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        counts, *operands = ctx.saved_tensors
        *sums, begun = ctx.buffers()
        dx = moe_experts_fp8_backward_accumulate(grad, counts, *operands, ctx.limit, *sums, accumulate=begun)
        return dx, None, None, None, None, None


def shard(model: Stack) -> list[nn.Parameter]:
    """Applies FSDP2 to every layer and apart to its experts, which compute in FP8 and sum in fp32 from now on.

    FSDP2 wants one dtype in a group: returned are the parameters in fp32, few and small, that stay whole everywhere.
    """
    whole = [p for p in model.parameters() if p.dtype == torch.float32]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer.experts, mp_policy=policy)
        fully_shard(layer, mp_policy=policy, ignored_params=set(whole))
        layer.experts.run = _runner(layer.experts)
    fully_shard(model, mp_policy=policy, ignored_params=set(whole))
    return whole


def gradients(model: Stack, whole: list[nn.Parameter], backwards: int) -> dict[str, Tensor]:
    """By name and in full, the mean over the processes' sequences, of which each had `backwards`."""
    found = {}
    kept = {id(p) for p in whole}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if id(parameter) in kept:
            grad = parameter.grad.clone()
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        else:
            grad = parameter.grad.full_tensor()
        found[name] = grad.float() / backwards
    return found


def _runner(experts: Experts) -> Callable[[Tensor, Tensor], Tensor]:
    def buffers() -> tuple[Tensor, Tensor, bool]:
        found = [_fp32_sum(experts, name) for name in ("gate_up", "down")]
        return found[0][0], found[1][0], found[0][1]

    def run(rows: Tensor, counts: Tensor) -> Tensor:
        limit = experts.config.swiglu_limit
        return SummedExperts.apply(rows, experts.gate_up, experts.down, counts, limit, buffers)

    return run


def _fp32_sum(module: FSDPModule, name: str) -> tuple[Tensor, bool]:
    """The buffer of FSDP2 (torch 2.11, not public) for a parameter's gradients, made if need be; if it was there."""
    parameters = module._get_fsdp_state()._fsdp_param_group.fsdp_params
    (one,) = [p for p in parameters if p._module_info.module is module and p._module_info.param_name == name]
    begun = one.unsharded_accumulated_grad is not None
    if not begun:
        one.unsharded_accumulated_grad = torch.empty_like(one.unsharded_param, dtype=torch.float32)
    return one.unsharded_accumulated_grad, begun
