"""What the GPU tests of this package share: operands on the GPU, all results of a step, and what these must be."""

from typing import NamedTuple

import moe_experts
import torch
from hopper_kernels import reference as use_definition
from torch import Tensor

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes

DEVICE = torch.device("cuda")
HIDDEN, INNER = 5120, 2304  # V4.1's
ULP = 2.0**-7  # of bf16, relative: a sum in another order may round to the neighbour
SUMS = 2.0**-12  # what a sum in fp32 may be off, relative to the mean square of its row


class Step(NamedTuple):
    """All results of a forward and a backward; of gate, up, dgate_dup and h the experts' rows alone."""

    out: Tensor
    gate: Tensor
    up: Tensor
    dx: Tensor
    dgate_dup: Tensor
    h: Tensor
    dw1: Tensor
    dw3: Tensor
    dw2: Tensor


def operands(*args, **options) -> tuple[Operands, Tensor]:
    """As `inputs.operands`, and a gradient of the result, on the GPU."""
    with DEVICE:
        t = inputs.operands(*args, **options)
        return t, inputs.cotangent(t)


def exact(groups: tuple[int, ...], tail: int, hidden: int, inner: int) -> tuple[Operands, Tensor]:
    """Of which no result has a rounding error but its last: a row of x has one 1, and gates are so large that silu is
    the gate itself."""
    with DEVICE:
        t = inputs.operands(groups, tail, hidden, inner, limit=float("inf"))
        x = torch.zeros_like(t.x)
        x[torch.arange(len(x)), torch.randint(hidden, (len(x),))] = 1
        gate = 2.0 ** torch.randint(5, 7, t.gate_proj.shape)
        up, down = torch.randint(-2, 3, t.up_proj.shape), torch.randint(-1, 2, t.down_proj.shape)
        dout = torch.randint(-1, 2, x.shape).bfloat16()
        x[t.owned :] = dout[t.owned :] = float("nan")
        t = t._replace(x=x, gate_proj=gate.bfloat16(), up_proj=up.bfloat16(), down_proj=down.bfloat16())
        return t, dout


def step(t: Operands, dout: Tensor) -> Step:
    counts, limit, owned = t.num_tokens_per_expert, t.swiglu_limit, t.owned
    weights = t.gate_proj, t.up_proj, t.down_proj
    out, gate, up = moe_experts.moe_experts_forward(t.x, *weights, counts, limit)
    dx, dgate_dup, h = moe_experts.moe_experts_backward_data(dout, *weights, counts, gate, up, limit)
    grads = moe_experts.moe_experts_weight_grad(dout, t.x, counts, dgate_dup, h, t.up_proj is None)
    return Step(out, gate[:owned], up[:owned], dx, dgate_dup[:owned], h[:owned], *grads)


def definition(t: Operands, dout: Tensor) -> Step:
    with use_definition():
        return step(t, dout)


def assert_same(found: Step, wanted: Step, what: str = "") -> None:
    for name, got, want in zip(Step._fields, found, wanted, strict=True):
        assert_same_bytes(got, want, f"{what} {name}")


def assert_right(t: Operands, dout: Tensor, found: Step) -> None:
    """Every result is what it must be of the results that it was made from, element by element."""
    owned = t.owned
    for name in ("out", "dx"):
        tail = getattr(found, name)[owned:]
        assert_same_bytes(tail, torch.zeros_like(tail), f"{name} after the last expert")
    inner, limit = t.down_proj.shape[2], t.swiglu_limit
    gate_proj, up_proj = (t.gate_proj[:, :inner], t.gate_proj[:, inner:]) if t.up_proj is None else t[1:3]
    gate, up = found.gate.double(), found.up.double()
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(g)
    _close("h", found.h, g * s * u)
    packed = t.up_proj is None
    dw1, dw3 = (found.dw1[:, :inner], found.dw1[:, inner:]) if packed else (found.dw1, found.dw3)
    dgate, dup = found.dgate_dup[:, :inner], found.dgate_dup[:, inner:]
    begin = 0
    for e, size in enumerate(t.num_tokens_per_expert.tolist()):
        rows = slice(begin, begin + size)
        begin += size
        x, d, h = t.x[rows].double(), dout[rows].double(), found.h[rows].double()
        _close("gate", found.gate[rows], x @ gate_proj[e].double().T, SUMS)
        _close("up", found.up[rows], x @ up_proj[e].double().T, SUMS)
        _close("out", found.out[rows], h @ t.down_proj[e].double().T, SUMS)
        dh = (d @ t.down_proj[e].double()).float().bfloat16().double()
        slope = s[rows] * (1 + g[rows] * (1 - s[rows]))
        wanted = torch.where(gate[rows] <= limit, dh * u[rows] * slope, 0.0)
        # The gradient of h is rounded to bf16 in the kernel: one unit of it more.
        _close("dgate", dgate[rows], wanted, SUMS, 2 * ULP, (dh * u[rows]).abs() * 1e-5)
        _close("dup", dup[rows], torch.where(up[rows].abs() <= limit, dh * g[rows] * s[rows], 0.0), SUMS, 2 * ULP)
        dgate_e, dup_e = dgate[rows].double(), dup[rows].double()
        _close("dx", found.dx[rows], dgate_e @ gate_proj[e].double() + dup_e @ up_proj[e].double(), SUMS)
        _close("dw1", dw1[e], dgate_e.T @ x, SUMS)
        _close("dw3", dw3[e], dup_e.T @ x, SUMS)
        _close("dw2", found.dw2[e], d.T @ h, SUMS)


def _close(name: str, found: Tensor, wanted: Tensor, sums: float = 0.0, ulp: float = ULP, more: float | Tensor = 0.0):
    """Each element within `ulp` of itself and `sums` of its row's mean square."""
    if found.numel() == 0:
        return
    size = wanted.square().mean(1, keepdim=True).sqrt()
    excess = (found.double() - wanted).abs() - (ulp * wanted.abs() + sums * size + more)
    worst = excess.max().item()
    assert worst <= 0, f"{name}: {int((excess > 0).sum())} of {excess.numel()} elements are off, by up to {worst:.3e}"
