"""The products of a step of `moe_experts`, each alone: cases of `benches.moe_experts`, and the six together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from moe_experts import plan
from torch import Tensor

from benches.difference import Difference
from benches.harness import Candidate, Case
from benches.peers import experts as peers
from benches.peers.experts import Operands, Product

# Rows x columns x terms of each, in units of rows x hidden x inner.
SIZES = {"gate_up": 2, "down": 1, "grad_hidden": 1, "grad_x": 2, "down_grad": 1, "gate_up_grad": 2}
LABELS = {
    "gate_up": "gate and up with SwiGLU",
    "down": "down",
    "grad_hidden": "gradient of h with SwiGLU",
    "grad_x": "gradient of x",
    "down_grad": "gradient of down",
    "gate_up_grad": "gradients of gate and up",
}
ERROR = 3e-3  # relative (L2), against float64; storing a result in bf16 costs 1.7e-3
SAMPLE = 97  # every so manieth row of the first and of the last expert is compared
COLUMNS = 256  # of weight gradients, so many rows of the first and of the last expert


def operands(
    x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor, dout: Tensor, counts: Tensor
) -> Operands:
    """With random h and gradients of gate and up."""
    rows, inner = len(x), down_proj.shape[2]
    hidden, grads = (torch.randn(rows, width, dtype=x.dtype, device=x.device) for width in (inner, 2 * inner))
    return Operands(x, dout, hidden, grads, torch.cat((gate_proj, up_proj), dim=1), down_proj, counts)


def cases(load: str, make: Callable[[], Operands], work: int) -> list[Case]:
    """One for each product; work: operations of a product of `rows x hidden x inner`."""
    return [_case(name, load, make, work) for name in SIZES]


def _case(name: str, load: str, make: Callable[[], Operands], work: int) -> Case:
    ways = {"torch._grouped_mm": peers.by_grouped_mm}
    if not name.endswith("_grad"):
        ways = {"DeepGEMM": peers.by_deep_gemm, **ways}
    return Case(
        label=f"{load}, {LABELS[name]}",
        make=make,
        candidates=(
            Candidate("moe_experts", functools.partial(_ours, name=name), ours=True, graph=False),
            *(Candidate(way, functools.partial(prepare, name=name), graph=False) for way, prepare in ways.items()),
        ),
        verify=functools.partial(right, name),
        flops=SIZES[name] * work,
    )


def right(name: str, o: Operands, found: tuple[Tensor, Tensor | None]) -> str:
    """Rows of the first and of the last expert, in float64."""
    out, own = found
    ends = o.counts.cumsum(0).tolist()
    difference = Difference()
    for expert in (0, len(ends) - 1):
        rows = torch.arange(ends[expert] - int(o.counts[expert]), ends[expert], device=out.device)
        if name in o.sums_of_rows():
            a, b = o.sums_of_rows()[name]
            difference.add(out[expert, :COLUMNS], a[rows, :COLUMNS].double().T @ b[rows].double())
        else:
            a, weights = o.rows_and_weights()[name]
            rows = rows[::SAMPLE]
            difference.add(out[rows if own is None else own[rows]], a[rows].double() @ weights[expert].double())
    error = difference.relative()
    assert error <= ERROR, f"{name}: relative error {error:.1e}"
    return f"{name} {error:.1e}"


def six_alone(o: Operands) -> Callable[[], dict[str, Any]]:
    """All six one after the other, by DeepGEMM and `torch._grouped_mm`: what a step cannot do without."""
    calls: dict[str, Product] = {name: peers.by_deep_gemm(o, name) for name in o.rows_and_weights()}
    calls |= {name: peers.by_grouped_mm(o, name) for name in o.sums_of_rows()}
    return lambda: {name: call() for name, call in calls.items()}


def all_right(o: Operands, found: dict[str, Any]) -> str:
    """`right` of each product."""
    return "relative errors: " + ", ".join(right(name, o, one) for name, one in found.items())


def _ours(o: Operands, name: str) -> Product:
    """The kernel with this product, which it ends with more than that: see `_seen`."""
    rows, inner = o.hidden.shape
    where = plan.empty_groups(o.counts, rows)
    plan.groups(o.counts, rows, where).run()
    gate_proj, up_proj = o.gate_up[:, :inner], o.gate_up[:, inner:]
    grad_gate, grad_up = o.grad_gate_up[:, :inner], o.grad_gate_up[:, inner:]
    infinity = float("inf")
    if name == "gate_up":
        gate, up, hidden = (torch.empty_like(o.hidden) for _ in range(3))
        launch = plan.gate_up(o.x, gate_proj, up_proj, infinity, where, gate, up, hidden)
        return _seen(launch, lambda: torch.cat((gate, up), dim=1))
    if name == "grad_hidden":
        # Where gate is 128 and up 1, the gradient of up is that of h times 128.
        gate, up = torch.full_like(o.hidden, 128), torch.ones_like(o.hidden)
        grads, hidden = torch.empty_like(o.grad_gate_up), torch.empty_like(o.hidden)
        halves = grads[:, :inner], grads[:, inner:]
        launch = plan.grad_hidden(o.dout, o.down, gate, up, infinity, where, *halves, hidden)
        return _seen(launch, lambda: grads[:, inner:] / 128)
    if name in ("down", "grad_x"):
        out = torch.empty_like(o.x)
        down = plan.down(o.hidden, o.down, where, out)
        launch = down if name == "down" else plan.grad_x(grad_gate, grad_up, gate_proj, up_proj, where, out)
        return _seen(launch, lambda: out)
    out = torch.empty_like(o.down if name == "down_grad" else o.gate_up)
    if name == "down_grad":
        return _seen(plan.weight_grad(where, o.hidden, (o.dout, out)), lambda: out)
    return _seen(plan.weight_grad(where, o.x, (grad_gate, out[:, :inner]), (grad_up, out[:, inner:])), lambda: out)


def _seen(launch: Any, product: Callable[[], Tensor]) -> Product:
    """The launch; its first call also returns the product, as far as its results show it."""
    first = []

    def call() -> tuple[Tensor | None, None]:
        launch.run()
        if first:
            return None, None
        first.append(True)
        return product(), None

    return call
