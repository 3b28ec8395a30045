"""Other ways to run the experts' MLPs: PyTorch's grouped product with the SwiGLU apart, and public products alone.

Rows are grouped by expert, and no row is behind the last group. What a way needs is imported then, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Experts = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x, gate_proj, up_proj, down_proj) -> out, differentiable."""
TILE = 128  # rows: DeepGEMM's groups start at multiples of it


def grouped_mm(counts: Tensor, limit: float, compiled: bool) -> Experts:
    """`torch._grouped_mm` three times, with the clamped SwiGLU in bf16 between, eager or under `torch.compile`."""
    ends = counts.cumsum(0).int()
    activation = _swiglu
    if compiled:
        torch._dynamo.reset()  # otherwise the shapes of the earlier cases count against the recompile limit
        activation = torch.compile(_swiglu, dynamic=False, fullgraph=True)

    def experts(x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
        gate = torch._grouped_mm(x, gate_proj.transpose(1, 2), offs=ends)
        up = torch._grouped_mm(x, up_proj.transpose(1, 2), offs=ends)
        return torch._grouped_mm(activation(gate, up, limit), down_proj.transpose(1, 2), offs=ends)

    return experts


def _swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Products(NamedTuple):
    """The products of a step, each a call that returns (rows, columns) or (experts, rows, columns)."""

    gate_up: Callable[[], Tensor]
    down: Callable[[], Tensor]
    grad_hidden: Callable[[], Tensor]
    grad_x: Callable[[], Tensor]
    down_grad: Callable[[], Tensor]
    gate_up_grad: Callable[[], Tensor]


def weight_grads(counts: Tensor, x: Tensor, dout: Tensor, hidden: Tensor, grad_gate_up: Tensor) -> dict[str, Callable]:
    """The weight gradients by `torch._grouped_mm`."""
    ends = counts.cumsum(0).int()
    return {
        "down_grad": lambda: torch._grouped_mm(dout.t(), hidden, offs=ends),
        "gate_up_grad": lambda: torch._grouped_mm(grad_gate_up.t(), x, offs=ends),
    }


def grouped_mm_products(
    counts: Tensor, x: Tensor, dout: Tensor, hidden: Tensor, grad_gate_up: Tensor, gate_up: Tensor, down: Tensor
) -> Products:
    """All by `torch._grouped_mm`, with gate and up projection packed."""
    ends = counts.cumsum(0).int()
    return Products(
        lambda: torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends),
        lambda: torch._grouped_mm(hidden, down.transpose(1, 2), offs=ends),
        lambda: torch._grouped_mm(dout, down, offs=ends),
        lambda: torch._grouped_mm(grad_gate_up, gate_up, offs=ends),
        **weight_grads(counts, x, dout, hidden, grad_gate_up),
    )


def deep_gemm_products(
    counts: Tensor, x: Tensor, dout: Tensor, hidden: Tensor, grad_gate_up: Tensor, gate_up: Tensor, down: Tensor
) -> Products:
    """DeepGEMM's grouped product, and for the weight gradients `torch._grouped_mm`.

    Rows are put where DeepGEMM wants them and weights transposed beforehand, and that is not part of the calls; a
    result has the experts' rows, taken out outside the products' own memory.
    """
    import deep_gemm

    sizes = counts.tolist()
    padded = [-(-size // TILE) * TILE for size in sizes]
    starts = [sum(padded[:e]) for e in range(len(sizes))]
    own = torch.cat([torch.arange(s, s + n, device=x.device) for s, n in zip(starts, sizes, strict=True)])
    numbers = torch.arange(len(sizes), dtype=torch.int32, device=x.device)
    layout = torch.repeat_interleave(numbers, torch.tensor(padded, device=x.device))

    def product(rows: Tensor, weights: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
        a = rows.new_zeros(sum(padded), rows.shape[1])
        a[own] = rows
        weights = weights.contiguous()
        out = rows.new_empty(sum(padded), weights.shape[1])

        def call() -> tuple[Tensor, Tensor]:
            deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, weights, out, layout)
            return out, own

        return call

    return Products(
        product(x, gate_up),
        product(hidden, down),
        product(dout, down.transpose(1, 2)),
        product(grad_gate_up, gate_up.transpose(1, 2)),
        **weight_grads(counts, x, dout, hidden, grad_gate_up),
    )
