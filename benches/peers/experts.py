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


class Operands(NamedTuple):
    """What the products of a step multiply, bf16, and the sizes of the groups.

    x, dout (M, H), hidden (M, I), grad_gate_up (M, 2I); gate_up (E, 2I, H), down (E, H, I); counts (E,).
    """

    x: Tensor
    dout: Tensor
    hidden: Tensor
    grad_gate_up: Tensor
    gate_up: Tensor
    down: Tensor
    counts: Tensor

    def rows_and_weights(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each product of rows: the rows, and the weights (E, terms, columns)."""
        return {
            "gate_up": (self.x, self.gate_up.transpose(1, 2)),
            "down": (self.hidden, self.down.transpose(1, 2)),
            "grad_hidden": (self.dout, self.down),
            "grad_x": (self.grad_gate_up, self.gate_up),
        }

    def sums_of_rows(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Of each weight gradient a^T b: a and b."""
        return {"down_grad": (self.dout, self.hidden), "gate_up_grad": (self.grad_gate_up, self.x)}


Product = Callable[[], tuple[Tensor, Tensor | None]]
"""A call that returns a product of rows and where the experts' rows are in it, None for: as in the operands; or a
weight gradient (E, rows, columns) and None."""


def by_grouped_mm(o: Operands, name: str) -> Product:
    """A product by `torch._grouped_mm`, with gate and up projection packed."""
    ends = o.counts.cumsum(0).int()
    if name in o.sums_of_rows():
        a, b = o.sums_of_rows()[name]
        return lambda: (torch._grouped_mm(a.t(), b, offs=ends), None)
    rows, weights = o.rows_and_weights()[name]
    return lambda: (torch._grouped_mm(rows, weights, offs=ends), None)


def by_deep_gemm(o: Operands, name: str) -> Product:
    """A product of rows by DeepGEMM. Before, and not in the call: rows are put where it wants them, weights
    transposed."""
    import deep_gemm

    rows, weights = o.rows_and_weights()[name]
    sizes = o.counts.tolist()
    padded = [-(-size // TILE) * TILE for size in sizes]
    starts = [sum(padded[:e]) for e in range(len(sizes))]
    own = torch.cat([torch.arange(s, s + n, device=rows.device) for s, n in zip(starts, sizes, strict=True)])
    experts = torch.arange(len(sizes), dtype=torch.int32, device=rows.device)
    layout = torch.repeat_interleave(experts, torch.tensor(padded, device=rows.device))
    a = rows.new_zeros(sum(padded), rows.shape[1])
    a[own] = rows
    b = weights.transpose(1, 2).contiguous()
    out = rows.new_empty(sum(padded), b.shape[1])

    def call() -> tuple[Tensor, Tensor]:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, out, layout)
        return out, own

    return call
