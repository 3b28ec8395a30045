"""moe_experts against PyTorch and against its products alone: `python -m benches.moe_experts`.

DeepGEMM is measured if it is there: `uv pip install sgl-deep-gemm==0.1.5 apache-tvm-ffi==0.1.11`, and nvcc.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hopper_kernels.models import V41_FLASH
from moe_experts import moe_experts, reference
from torch import Tensor

from benches import moe_products
from benches.difference import Difference
from benches.harness import Bench, Candidate, Case, main
from benches.peers import experts as peers

HIDDEN, INNER = V41_FLASH.hidden, V41_FLASH.moe_intermediate
LIMIT = 10.0
ROWS = 98304  # 16,384 tokens, six experts each
LOADS = {"EP=96": 4, "EP=48": 8, "EP=8": 48}  # experts of a rank
SPREAD, MULTIPLE = 0.2, 8  # of the groups' sizes, and what they are multiples of
TOY = 512, 32  # a CPU gets these fractions of the rows and of the channels

FORWARD, BOTH = "forward", "forward + backward"
PRODUCTS = {FORWARD: 3, BOTH: 9}  # of rows x hidden x inner
RESULTS = ("out", "grad x", "grad gate", "grad up", "grad down")
# Relative errors (L2) that are allowed, compared with the definition. Storing a result in bf16 alone costs
# 1.7e-3. A gate or an up that rounds to the other side of a clamp's bound has a gradient, or has none any more.
BOUNDS = {"out": 5e-3, "grad down": 5e-3, "grad x": 2e-2, "grad gate": 2e-2, "grad up": 2e-2}
LOOSE = {"out": 1e-2, "grad down": 1e-2, "grad x": 6e-2, "grad gate": 6e-2, "grad up": 6e-2}


@dataclass(frozen=True)
class Inputs:
    """x (M, H), gate_proj and up_proj (E, I, H), down_proj (E, H, I), all requiring grad, dout (M, H), counts (E,)."""

    x: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    dout: Tensor
    counts: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.gate_proj, self.up_proj, self.down_proj

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """What RESULTS should be, by the definition."""
        with torch.no_grad():
            x, *weights = self.leaves
            out, gate, up = reference.forward(x, *weights, self.counts, LIMIT)
            return out, *reference.backward(self.dout, x, *weights, self.counts, gate, up, LIMIT)

    @functools.cached_property
    def operands(self) -> peers.Operands:
        """Of the products alone."""
        return moe_products.operands(*(t.detach() for t in self.leaves), self.dout, self.counts)


def group_sizes(experts: int, rows: int) -> list[int]:
    """Sizes within SPREAD of their mean, multiples of MULTIPLE, about `rows` together. The same in every run."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 + SPREAD * (2 * torch.rand(experts, generator=generator, dtype=torch.float64) - 1)
    return [int(size) for size in (shares / shares.sum() * rows / MULTIPLE).ceil() * MULTIPLE]


def make_inputs(experts: int, rows: int, hidden: int, inner: int, device: torch.device) -> Inputs:
    """Normal numbers. Gates and ups have a standard deviation of 7, so about 8 % of the gates and 15 % of the ups are
    beyond LIMIT."""
    sizes = group_sizes(experts, rows)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(std)

    return Inputs(
        normal(sum(sizes), hidden).requires_grad_(),
        normal(experts, inner, hidden, std=7 * hidden**-0.5).requires_grad_(),
        normal(experts, inner, hidden, std=7 * hidden**-0.5).requires_grad_(),
        normal(experts, hidden, inner, std=inner**-0.5).requires_grad_(),
        normal(sum(sizes), hidden),
        torch.tensor(sizes, dtype=torch.int32, device=device),
    )


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Every load forward and with the backward, then each product; on a CPU at toy size, without the products alone;
    `quick`: EP=96 alone."""
    cuda = device.type == "cuda"
    found = []
    for load, experts in LOADS.items() if not quick else [("EP=96", LOADS["EP=96"])]:
        size = (ROWS, HIDDEN, INNER) if cuda else (ROWS // TOY[0], HIDDEN // TOY[1], INNER // TOY[1])
        make = functools.partial(make_inputs, experts, *size, device)
        work = 2 * sum(group_sizes(experts, size[0])) * size[1] * size[2]
        found += [_case(f"{load}, {experts} experts", task, make, work, cuda) for task in PRODUCTS]
        if cuda:
            found += moe_products.cases(load, lambda make=make: make().operands, work)
    return found


def _case(load: str, task: str, make: Callable[[], Inputs], work: int, cuda: bool) -> Case:
    return Case(
        label=f"{load}, {task}",
        make=make,
        candidates=(_ours(task), *_peers(task, cuda)),
        verify=functools.partial(close, bounds=BOUNDS),
        flops=PRODUCTS[task] * work,
    )


def _ours(task: str) -> Candidate:
    def experts(inputs: Inputs) -> peers.Experts:
        return lambda *leaves: moe_experts(*leaves, inputs.counts, LIMIT)

    return Candidate("moe_experts", functools.partial(prepare, experts, task), ours=True, graph=False)


def _peers(task: str, cuda: bool) -> list[Candidate]:
    def unfused(compiled: bool) -> Callable[[Inputs], peers.Experts]:
        return lambda inputs: peers.grouped_mm(inputs.counts, LIMIT, compiled)

    loose: dict[str, Any] = {
        "verify": functools.partial(close, bounds=LOOSE),
        "tolerance": f"silu rounded to bf16, two bf16 gradients of x added; errors up to {LOOSE['grad x']:g}",
        "graph": False,
    }
    found = []
    for name, compiled in {"eager": False, "compiled": True}.items() if cuda else {"eager": False}.items():
        prepared = functools.partial(prepare, unfused(compiled), task)
        found.append(Candidate(f"torch._grouped_mm, {name}", prepared, **loose))
    if cuda and task == BOTH:
        found.append(
            Candidate(
                "its six products alone",
                lambda inputs: moe_products.six_alone(inputs.operands),
                verify=lambda inputs, outputs: moe_products.all_right(inputs.operands, outputs),
                tolerance="no SwiGLU",
                graph=False,
            )
        )
    return found


def prepare(load: Callable[[Inputs], peers.Experts], task: str, inputs: Inputs) -> Callable[[], dict[str, Tensor]]:
    """The call that does `task`; results and gradients by name."""
    experts = load(inputs)

    def forward() -> dict[str, Tensor]:
        with torch.no_grad():
            return {"out": experts(*inputs.leaves)}

    def both() -> dict[str, Tensor]:
        out = experts(*inputs.leaves)
        grads = torch.autograd.grad(out, inputs.leaves, inputs.dout)
        return dict(zip(RESULTS, (out.detach(), *grads), strict=True))

    return forward if task == FORWARD else both


def close(inputs: Inputs, outputs: dict[str, Tensor], bounds: dict[str, float]) -> str:
    """All outputs within their bounds of the definition."""
    errors = {}
    for name, expected in zip(RESULTS, inputs.expected, strict=True):
        if name in outputs:
            found = tuple(outputs[name].shape), outputs[name].dtype
            wanted = tuple(expected.shape), expected.dtype
            assert found == wanted, f"{name} is {found}, expected {wanted}"
            errors[name] = _difference(outputs[name], expected).relative()
    report = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    assert not wrong, f"{', '.join(wrong)} too far from the definition; relative errors: {report}"
    return f"relative errors: {report}"


def _difference(actual: Tensor, expected: Tensor, rows: int = 4096) -> Difference:
    found = Difference()
    pairs = (t.reshape(-1, t.shape[-1]).split(rows) for t in (actual, expected))
    for part, wanted in zip(*pairs, strict=True):
        found.add(part, wanted.double())
    return found


BENCH = Bench(
    name="moe_experts",
    title="Expert MLPs with a clamped SwiGLU in bf16, with gradients",
    cases=cases,
    wheels=("hopper-kernels", "moe-experts"),
    peers=("sgl-deep-gemm",),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
