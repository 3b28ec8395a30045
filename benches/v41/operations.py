"""The operations that a kernel can do, and which of them do: chosen once, when a model is set up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hopper_kernels.models import V41_FLASH
from torch import Tensor

from benches.v41 import plain
from benches.v41.fp8_linear import Cast, FP8Linear, plain_cast


@dataclass(frozen=True)
class Operations:
    """Functions with the arguments and results of those in `plain`, whose names they have.

    rotated_linear: (x, weight, head_dim, table, positions) -> (T, H, D), the result's heads rotated.
    """

    index_topk: Callable[..., tuple[Tensor, Tensor]] = plain.index_topk
    attention_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = plain.attention_backward
    hyper_connection: Callable[..., tuple[Tensor, ...]] = plain.hyper_connection
    experts: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = plain.experts
    linear: Callable[[Tensor, Tensor], Tensor] = plain.linear
    rotated_linear: Callable[[Tensor, Tensor, int, Tensor, Tensor], Tensor] = dataclasses.field(
        default=lambda x, weight, head_dim, table, positions: plain.rotate(
            plain.linear(x, weight).unflatten(1, (-1, head_dim)), table, positions
        )
    )


PLAIN = "plain PyTorch"
FP8_LINEAR = "FP8 linears, cast in PyTorch"
FP8_CAST = "fp8_dual_cast"
FP8_EXPERTS = "moe_experts, FP8"
BF16 = ("dsa_indexer_topk", "dsa_sparse_attn_bwd", "mhc_projection", "moe_experts")
FP8 = (*BF16[:3], FP8_EXPERTS, FP8_CAST)


def choose(*names: str) -> Operations:
    """Those by kernels of these names, the others in plain PyTorch. A later name replaces what an earlier one did."""
    found = Operations()
    for name in names:
        found = dataclasses.replace(found, **_KERNELS[name]())
    return found


def _index_topk() -> dict[str, Callable]:
    from dsa_indexer_topk import dsv41_index_topk

    return {"index_topk": dsv41_index_topk}


def _attention_backward() -> dict[str, Callable]:
    from dsa_sparse_attn_bwd import sparse_attn_backward_flat

    return {"attention_backward": sparse_attn_backward_flat}


def _hyper_connection() -> dict[str, Callable]:
    from mhc_projection import hyper_connection_streams

    numbers = {
        "rms_eps": V41_FLASH.rms_eps,
        "hc_eps": V41_FLASH.hc_eps,
        "sinkhorn_iters": V41_FLASH.sinkhorn_iters,
    }
    return {"hyper_connection": functools.partial(hyper_connection_streams, **numbers)}


def _experts(fp8: bool) -> dict[str, Callable]:
    from moe_experts import moe_experts

    def experts(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, limit: float) -> Tensor:
        return moe_experts(x, gate_up, None, down, counts, limit, fp8=fp8)

    return {"experts": experts}


def _fp8_linear(cast: Cast) -> dict[str, Callable]:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return FP8Linear.apply(x, weight, cast, None, None, 0)

    def rotated_linear(x: Tensor, weight: Tensor, head_dim: int, table: Tensor, positions: Tensor) -> Tensor:
        result = FP8Linear.apply(x, weight, cast, table, positions, head_dim)
        return Rotation.apply(result.unflatten(1, (-1, head_dim)), table, positions)

    return {"linear": linear, "rotated_linear": rotated_linear}


class Rotation(torch.autograd.Function):
    """`plain.rotate` with a gradient that is not rotated back: whoever made x does that."""

    @staticmethod
    def forward(ctx, x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
        return plain.rotate(x, table, positions)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None


def _kernel_cast(
    x: Tensor, table: Tensor | None, positions: Tensor | None, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from fp8_dual_cast import fp8_dual_cast

    return fp8_dual_cast(x, cos_sin_cache=table, position_ids=positions, head_dim=head_dim or None)


_KERNELS: dict[str, Callable[[], dict[str, Callable]]] = {
    "dsa_indexer_topk": _index_topk,
    "dsa_sparse_attn_bwd": _attention_backward,
    "mhc_projection": _hyper_connection,
    "moe_experts": functools.partial(_experts, fp8=False),
    FP8_EXPERTS: functools.partial(_experts, fp8=True),
    FP8_LINEAR: functools.partial(_fp8_linear, plain_cast),
    FP8_CAST: functools.partial(_fp8_linear, _kernel_cast),
}
