"""moe_experts against PyTorch and against the products alone: `python -m benches.moe_experts`.

DeepGEMM is measured if it is there: `uv pip install sgl-deep-gemm==0.1.5 apache-tvm-ffi==0.1.11`, and nvcc.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hopper_kernels.models import V41_FLASH
from moe_experts import moe_experts, reference
from torch import Tensor

from benches.difference import Difference
from benches.harness import Bench, Candidate, Case, main
from benches.peers import experts as peers

HIDDEN, INNER = V41_FLASH.hidden, V41_FLASH.moe_intermediate
LIMIT = 10.0
ROWS = 98304  # 16,384 tokens, six experts each
LOADS = {"EP=96": 4, "EP=48": 8, "EP=8": 48}  # experts of a rank
SPREAD, MULTIPLE = 0.2, 8  # of the groups' sizes, and what they are multiples of

FORWARD, BOTH = "forward", "forward + backward"
PRODUCTS = {
    "gate_up": "gate and up with SwiGLU",
    "down": "down",
    "grad_hidden": "gradient of h with SwiGLU",
    "grad_x": "gradient of x",
    "down_grad": "gradient of down",
    "gate_up_grad": "gradients of gate and up",
}
# Rows x columns x terms of each product, in units of rows * HIDDEN * INNER.
SIZES = {"gate_up": 2, "down": 1, "grad_hidden": 1, "grad_x": 2, "down_grad": 1, "gate_up_grad": 2}
TOY = 512, 32  # a CPU gets these fractions of the rows and of the channels

RESULTS = ("out", "grad x", "grad gate", "grad up", "grad down")
# Relative errors (L2) that are allowed, compared with float64 and the definition's roundings. Storing a result in bf16
# alone costs 1.7e-3; where a rounding of gate or up goes the other way at the clamp's bound, a gradient is lost.
BOUNDS = {"out": 5e-3, "grad down": 5e-3, "grad x": 2e-2, "grad gate": 2e-2, "grad up": 2e-2}
LOOSE = {"out": 1e-2, "grad down": 1e-2, "grad x": 6e-2, "grad gate": 6e-2, "grad up": 6e-2}
ELEMENT = 40  # an element may be off by so many times the bound, relative to itself or to its row's mean square


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
        """The definition's results, bf16: out, gradients of x, gate, up and down projection."""
        with torch.no_grad():
            x, *weights = self.leaves
            out, gate, up = reference.forward(x, *weights, self.counts, LIMIT)
            return out, *reference.backward(self.dout, x, *weights, self.counts, gate, up, LIMIT)


def group_sizes(experts: int, rows: int) -> list[int]:
    """Sizes within SPREAD of their mean, multiples of MULTIPLE, about `rows` together. The same in every run."""
    generator = torch.Generator().manual_seed(0)
    shares = 1 + SPREAD * (2 * torch.rand(experts, generator=generator, dtype=torch.float64) - 1)
    sizes = (shares / shares.sum() * rows / MULTIPLE).ceil() * MULTIPLE
    return [int(size) for size in sizes]


def make_inputs(experts: int, rows: int, hidden: int, inner: int, device: torch.device) -> Inputs:
    """Normal numbers. Gates and ups have a standard deviation of 7: about 8 % of the gates and 15 % of the ups are
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
    """Forward, and with the backward, of every load, then each product; on a CPU at toy size; `quick`: EP=96, and no
    peer but the products alone."""
    cuda = device.type == "cuda"
    loads = {"EP=96": LOADS["EP=96"]} if quick else LOADS
    found = []
    for label, experts in loads.items():
        size = (ROWS, HIDDEN, INNER) if cuda else (ROWS // TOY[0], HIDDEN // TOY[1], INNER // TOY[1])
        make = functools.partial(make_inputs, experts, *size, device)
        work = 2 * sum(group_sizes(experts, size[0])) * size[1] * size[2]
        for task, products in ((FORWARD, 3), (BOTH, 9)):
            found.append(
                Case(
                    label=f"{label}, {experts} experts, {task}",
                    make=make,
                    candidates=(_ours(task), *_peers(task, cuda, quick)),
                    verify=functools.partial(close, bounds=BOUNDS),
                    flops=products * work,
                )
            )
        if cuda:
            found += [_product_case(name, label, experts, make, work) for name in PRODUCTS]
    return found


def _ours(task: str) -> Candidate:
    def experts(inputs: Inputs) -> peers.Experts:
        return lambda *leaves: moe_experts(*leaves, inputs.counts, LIMIT)

    return Candidate("moe_experts", functools.partial(prepare, experts, task), ours=True, graph=False)


def _peers(task: str, cuda: bool, quick: bool) -> list[Candidate]:
    def unfused(compiled: bool) -> Callable[[Inputs], peers.Experts]:
        return lambda inputs: peers.grouped_mm(inputs.counts, LIMIT, compiled)

    loose = {
        "verify": functools.partial(close, bounds=LOOSE),
        "tolerance": f"silu rounded, two bf16 gradients of x added; errors up to {LOOSE['grad x']:g}",
        "graph": False,
    }
    found = []
    if not cuda or not quick:
        ways = {"eager": False} if not cuda else {"eager": False, "compiled": True}
        for name, compiled in ways.items():
            name = f"torch._grouped_mm, {name}"
            found.append(Candidate(name, functools.partial(prepare, unfused(compiled), task), **loose))
    if cuda and task == BOTH:
        verify = {"verify": _products_are_right, "tolerance": "the products alone, without SwiGLU", "graph": False}
        found.append(Candidate("six products alone", _prepare_products, **verify))
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
    """All outputs within their bounds of the definition, as a whole (L2) and element by element."""
    found = {}
    for name, expected in zip(RESULTS, inputs.expected, strict=True):
        if name in outputs:
            actual = outputs[name]
            layout = tuple(actual.shape), actual.dtype
            assert layout == (tuple(expected.shape), expected.dtype), f"{name} is {layout}"
            found[name] = _difference(actual, expected)
    report = ", ".join(f"{name} {one.relative():.1e}" for name, one in found.items())
    wrong = [name for name, one in found.items() if not one.relative() <= bounds[name]]
    assert not wrong, f"{', '.join(wrong)} too far from the definition; relative errors: {report}"
    wrong = [f"{name} ({one.worst:.1e})" for name, one in found.items() if not one.worst <= ELEMENT * bounds[name]]
    assert not wrong, f"an element is wrong in {', '.join(wrong)}; relative errors: {report}"
    return f"relative errors: {report}"


def _difference(actual: Tensor, expected: Tensor, rows: int = 4096) -> Difference:
    found = Difference()
    actual, expected = actual.reshape(-1, actual.shape[-1]), expected.reshape(-1, expected.shape[-1])
    for part, wanted in zip(actual.split(rows), expected.split(rows), strict=True):
        found.add(part, wanted.double())
    return found


@dataclass(frozen=True)
class Operands:
    """What the products of a step multiply: of `Inputs`, and h (M, I) and the gradients of gate and up (M, 2I)."""

    counts: Tensor
    x: Tensor
    dout: Tensor
    hidden: Tensor
    grad_gate_up: Tensor
    gate_up: Tensor
    down: Tensor


def _operands(inputs: Inputs) -> Operands:
    """With random h and gradients of gate and up."""
    with torch.no_grad():
        x, gate, up, down = (t.detach() for t in inputs.leaves)
        hidden = torch.randn(len(x), down.shape[2], dtype=x.dtype, device=x.device)
        grads = torch.randn(len(x), 2 * down.shape[2], dtype=x.dtype, device=x.device)
        return Operands(inputs.counts, x, inputs.dout, hidden, grads, torch.cat((gate, up), dim=1), down)


def _public_products(o: Operands) -> peers.Products:
    return peers.deep_gemm_products(o.counts, o.x, o.dout, o.hidden, o.grad_gate_up, o.gate_up, o.down)


def _prepare_products(inputs: Inputs) -> Callable[[], dict[str, object]]:
    """All six, one after the other: the products that a step cannot do without, by the best public kernels."""
    operands = _operands(inputs)
    products = _public_products(operands)
    return lambda: {"operands": operands, **{name: call() for name, call in products._asdict().items()}}


def _products_are_right(inputs: Inputs, outputs: dict[str, object]) -> str:
    operands = outputs["operands"]
    return ", ".join(_product_is_right(name, operands, outputs[name]) for name in PRODUCTS)


def _product_is_right(name: str, o: Operands, found: object) -> str:
    """The product of some rows of the first and of the last expert, in float64, or all of their weights' gradients."""
    out, own = found if isinstance(found, tuple) else (found, None)
    ends = o.counts.cumsum(0).tolist()
    sources = {"gate_up": (o.x, o.gate_up.mT), "down": (o.hidden, o.down.mT), "grad_hidden": (o.dout, o.down)}
    sources |= {"grad_x": (o.grad_gate_up, o.gate_up)}
    sums = {"down_grad": (o.dout, o.hidden), "gate_up_grad": (o.grad_gate_up, o.x)}
    one = Difference()
    for expert in (0, len(ends) - 1):
        rows = slice(ends[expert] - int(o.counts[expert]), ends[expert])
        if name in sums:
            a, b = sums[name]
            columns = slice(0, 256)
            one.add(out[expert, columns], a[rows, columns].double().T @ b[rows].double())
        else:
            a, weights = sources[name]
            some = torch.arange(rows.start, rows.stop, 97, device=out.device)
            one.add(out[some if own is None else own[some]], a[some].double() @ weights[expert].double())
    assert one.relative() <= 3e-3, f"{name}: error {one.relative():.1e}"
    return f"{name} {one.relative():.1e}"


def _product_case(name: str, load: str, experts: int, make: Callable[[], Inputs], work: int) -> Case:
    """One product of a step: ours with what its end does, the others' alone."""

    def public(inputs: Inputs) -> Callable[[], dict[str, object]]:
        operands = _operands(inputs)
        call = getattr(_public_products(operands), name)
        return lambda: {"operands": operands, name: call()}

    def grouped_mm(inputs: Inputs) -> Callable[[], dict[str, object]]:
        o = _operands(inputs)
        call = getattr(
            peers.grouped_mm_products(o.counts, o.x, o.dout, o.hidden, o.grad_gate_up, o.gate_up, o.down), name
        )
        return lambda: {"operands": o, name: call()}

    def right(inputs: Inputs, outputs: dict[str, object]) -> str:
        return _product_is_right(name, outputs["operands"], outputs[name])

    ours = Candidate("moe_experts", functools.partial(_prepare_ours, name), ours=True, graph=False)
    others = [Candidate("torch._grouped_mm", grouped_mm, graph=False)]
    if not name.endswith("_grad"):
        others.insert(0, Candidate("DeepGEMM", public, graph=False))
    return Case(
        label=f"{load}, {PRODUCTS[name]}",
        make=make,
        candidates=(ours, *others),
        verify=right,
        flops=SIZES[name] * work,
    )


def _prepare_ours(name: str, inputs: Inputs) -> Callable[[], dict[str, object]]:
    """The kernel that has this product. What its end makes of it is checked where the whole step is; here, that the
    product of it is right where it can be seen: with gates and ups that are large, h is nearly the product."""
    from moe_experts import plan

    o = _operands(inputs)
    rows, inner = o.hidden.shape
    where = plan.empty_groups(o.counts, rows)
    plan.groups(o.counts, rows, where).run()
    gate_proj, up_proj = o.gate_up[:, :inner], o.gate_up[:, inner:]
    grad_gate, grad_up = o.grad_gate_up[:, :inner], o.grad_gate_up[:, inner:]
    if name == "gate_up":
        both = o.hidden.new_empty(2, rows, inner)
        hidden = torch.empty_like(o.hidden)
        launch = plan.gate_up(o.x, gate_proj, up_proj, LIMIT, where, *both, hidden)
        out = lambda: torch.cat(tuple(both), dim=1)  # noqa: E731
    elif name == "grad_hidden":
        # With an up of 1 within a limit of inf, and a gate so large that silu is the gate, the gradient of up is
        # that of h times the gate.
        gate, up = torch.full_like(o.hidden, 128), torch.ones_like(o.hidden)
        grads, hidden = torch.empty_like(o.grad_gate_up), torch.empty_like(o.hidden)
        launch = plan.grad_hidden(
            o.dout, o.down, gate, up, float("inf"), where, grads[:, :inner], grads[:, inner:], hidden
        )
        out = lambda: grads[:, inner:] / 128  # noqa: E731
    elif name == "down":
        result = torch.empty_like(o.x)
        launch, out = plan.down(o.hidden, o.down, where, result), lambda: result
    elif name == "grad_x":
        result = torch.empty_like(o.x)
        launch, out = plan.grad_x(grad_gate, grad_up, gate_proj, up_proj, where, result), lambda: result
    elif name == "down_grad":
        result = torch.empty_like(o.down)
        launch, out = plan.weight_grad(where, o.hidden, (o.dout, result)), lambda: result
    else:
        result = torch.empty_like(o.gate_up)
        pairs = (grad_gate, result[:, :inner]), (grad_up, result[:, inner:])
        launch, out = plan.weight_grad(where, o.x, *pairs), lambda: result
    launch.run()
    first = {"operands": o, name: out()}

    def call() -> dict[str, object]:
        launch.run()
        return first

    return call


BENCH = Bench(
    name="moe_experts",
    title="Expert MLPs with a clamped SwiGLU, bf16",
    cases=cases,
    wheels=("hopper-kernels", "moe-experts"),
    peers=("sgl-deep-gemm",),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
