"""What the GPU tests of this package share: operands on the GPU, the results of a step, and what these must be.

Results are dicts by the names in the package's README. Where bytes are compared they are all compared, but for one
thing that is not promised: the sign of a zero, since a sum of zeros is +0 in the kernels where the definition may have
-0. `without_signs_of_zeros` is for exact sums that are compared with the definition's, and for nothing else.
"""

import moe_experts
import pytest
import torch
from moe_experts import reference
from torch import Tensor

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes, error64

DEVICE = torch.device("cuda")
GROUPS = (130, 0, 45, 1)  # more than a tile of 128 rows, none, some, one
HIDDEN, INNER = 5120, 2304  # V4.1's
ROWS = ("out", "gate", "up", "dx", "dgate_dup", "h")  # results with rows as x, or as many as the experts own
WEIGHTS = ("dw1", "dw3", "dw2")
GRADIENTS = {"x": "dx", "gate_proj": "dw1", "up_proj": "dw3", "down_proj": "dw2"}
ULP = 2.0**-7  # of bf16, relative: a sum in another order may round to the neighbour
SUMS = 2.0**-12  # what a sum in fp32 may be off, relative to the mean square of its row
BOUND = 5e-3  # of a result against float64: as in the package's self-check
FEW = 2e-2  # where a result has so few elements that their errors do not average
OPERATORS = moe_experts.moe_experts_forward, moe_experts.moe_experts_backward_data, moe_experts.moe_experts_weight_grad
DEFINITION = reference.forward, reference.backward_data, reference.weight_grad
Results = dict[str, Tensor]

each_form = pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])


def operands(
    groups=GROUPS, tail=7, hidden=136, inner=72, *, packed=False, limit=inputs.LIMIT, gate_std=1.0
) -> tuple[Operands, Tensor]:
    """As `inputs.operands`, with one weight for gate and up if packed, and a gradient of the result."""
    with DEVICE:
        t = inputs.operands(groups, tail, hidden, inner, limit=limit, gate_std=gate_std)
        return t.packed() if packed else t, inputs.cotangent(t)


def small(*args, **options) -> tuple[Operands, Tensor]:
    """As `operands`, with many gates and ups beyond the clamps."""
    return operands(*args, limit=1.0, **options)


def strided(t):
    """Gate and up as halves of one tensor, the down projection as a slice of more experts, counts with a stride."""
    if t.up_proj is not None:
        gate, up = torch.cat((t.gate_proj, t.up_proj), dim=1).chunk(2, dim=1)
        t = t._replace(gate_proj=gate, up_proj=up)
    down = torch.cat((t.down_proj[:1], t.down_proj))[1:]
    return t._replace(down_proj=down, num_tokens_per_expert=t.num_tokens_per_expert.int().repeat_interleave(2)[::2])


def layer(x, *rest):
    """As a model calls it: on intermediate rows, with work around it."""
    return moe_experts.moe_experts(x * 2, *rest) + 1


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


def names_of(t: Operands) -> list[str]:
    """The operands that there are and that can require grad."""
    return [name for name in GRADIENTS if getattr(t, name) is not None]


def gradients(t: Operands, dout: Tensor, names=None, function=moe_experts.moe_experts) -> Results:
    """By autograd: out, and the gradients of the operands named, of all by default; the others do not require grad."""
    names = names_of(t) if names is None else names
    leaves = t._replace(**{name: getattr(t, name).detach().requires_grad_(name in names) for name in names_of(t)})
    out = function(*leaves)
    grads = torch.autograd.grad(out, [getattr(leaves, name) for name in names], dout)
    return {"out": out.detach()} | {GRADIENTS[name]: grad for name, grad in zip(names, grads, strict=True)}


def accumulated(leaves: Operands) -> Results:
    """The leaves' `grad`, of those that got one."""
    grads = {GRADIENTS[name]: getattr(leaves, name).grad for name in names_of(leaves)}
    return {name: grad for name, grad in grads.items() if grad is not None}


def sample_calls(operands, rows: int, hidden: int, inner: int) -> list[tuple[Operands, Tensor]]:
    """Operands and cotangents, made by `operands`: separate and packed weights, counts of either type."""
    found = []
    for packed in (False, True):
        t, dout = operands((rows, 0, rows // 2, 1), 5, hidden, inner, packed=packed)
        for counts in (t.num_tokens_per_expert, t.num_tokens_per_expert.int()):
            found.append((t._replace(num_tokens_per_expert=counts), dout))
    return found


def step(t: Operands, dout: Tensor, functions=OPERATORS) -> Results:
    """The forward, and the backward in two parts; of gate, up, dgate_dup and h the experts' rows alone."""
    forward, backward_data, weight_grad = functions
    rows = slice(t.owned)
    out, gate, up = forward(*t)
    dx, dgate_dup, h = backward_data(dout, *t[1:5], gate, up, t.swiglu_limit)
    grads = weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, t.up_proj is None)
    found = out, gate[rows], up[rows], dx, dgate_dup[rows], h[rows], *grads
    return dict(zip((*ROWS, *WEIGHTS), found, strict=True))


def joint(t: Operands, dout: Tensor) -> Results:
    """The forward, and the backward in one part."""
    out, gate, up = moe_experts.moe_experts_forward(*t)
    grads = moe_experts.moe_experts_backward(dout, *t[:5], gate, up, t.swiglu_limit)
    return {"out": out} | dict(zip(("dx", *WEIGHTS), grads, strict=True))


def everything(t: Operands, dout: Tensor) -> Results:
    """Results of all operators and of autograd."""
    others = {"joint": joint(t, dout), "autograd": gradients(t, dout)}
    return step(t, dout) | {f"{way} {name}": r for way, found in others.items() for name, r in found.items()}


def definition(t: Operands, dout: Tensor) -> Results:
    """What `step` gives, by the definition, in the dtype of the operands."""
    return step(t, dout, DEFINITION)


def definition64(t: Operands, dout: Tensor) -> Results:
    """What every result should be, in float64."""
    return definition(t.double(), dout.double())


def without_signs_of_zeros(found: Results) -> Results:
    """With +0 for every zero."""
    return {name: r + 0.0 for name, r in found.items()}


def assert_same(found: Results, wanted: Results, what: str = "", names=None, *, strides: bool = True) -> None:
    """The same bytes in all results, or in those of `names`."""
    if names is None:
        assert found.keys() == wanted.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted)}"
    for name in found if names is None else names:
        assert_same_bytes(found[name], wanted[name], f"{what} {name}".strip(), strides=strides)


def assert_accurate(t: Operands, dout: Tensor, found: Results, what: str = "", bound: float = BOUND) -> None:
    """bf16, and each result as a whole within the bound of float64."""
    wanted = definition64(t, dout)
    for name, got in found.items():
        assert got.dtype == torch.bfloat16, f"{what} {name}"
        error = error64(got, wanted[name])
        assert error <= bound, f"{what} {name}: error {error:.2e}, bound {bound:.0e}"


def assert_right(t: Operands, dout: Tensor, found: Results) -> None:
    """Every result is what it must be of the results that it was made from, element by element."""
    owned, packed = t.owned, t.up_proj is None
    for name in ("out", "dx"):
        tail = found[name][owned:]
        assert_same_bytes(tail, torch.zeros_like(tail), f"{name} after the last expert")
    inner, limit = t.down_proj.shape[2], t.swiglu_limit
    gate_proj, up_proj = (t.gate_proj[:, :inner], t.gate_proj[:, inner:]) if packed else t[1:3]
    gate, up = found["gate"].double(), found["up"].double()
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(g)
    _close("h", found["h"], g * s * u)
    dw1, dw3, dw2 = (found[name] for name in WEIGHTS)
    if packed:
        dw1, dw3 = dw1[:, :inner], dw1[:, inner:]
    dgate, dup = found["dgate_dup"][:, :inner], found["dgate_dup"][:, inner:]
    begin = 0
    for e, size in enumerate(t.num_tokens_per_expert.tolist()):
        rows = slice(begin, begin + size)
        begin += size
        x, d, h = t.x[rows].double(), dout[rows].double(), found["h"][rows].double()
        _close("gate", found["gate"][rows], x @ gate_proj[e].double().T, SUMS)
        _close("up", found["up"][rows], x @ up_proj[e].double().T, SUMS)
        _close("out", found["out"][rows], h @ t.down_proj[e].double().T, SUMS)
        dh = (d @ t.down_proj[e].double()).float().bfloat16().double()
        slope = s[rows] * (1 + g[rows] * (1 - s[rows]))
        wanted = torch.where(gate[rows] <= limit, dh * u[rows] * slope, 0.0)
        # The gradient of h is rounded to bf16 in the kernel: one unit of it more.
        _close("dgate", dgate[rows], wanted, SUMS, 2 * ULP, (dh * u[rows]).abs() * 1e-5)
        _close("dup", dup[rows], torch.where(up[rows].abs() <= limit, dh * g[rows] * s[rows], 0.0), SUMS, 2 * ULP)
        dgate_e, dup_e = dgate[rows].double(), dup[rows].double()
        _close("dx", found["dx"][rows], dgate_e @ gate_proj[e].double() + dup_e @ up_proj[e].double(), SUMS)
        _close("dw1", dw1[e], dgate_e.T @ x, SUMS)
        _close("dw3", dw3[e], dup_e.T @ x, SUMS)
        _close("dw2", dw2[e], d.T @ h, SUMS)


def _close(name: str, found: Tensor, wanted: Tensor, sums: float = 0.0, ulp: float = ULP, more: float | Tensor = 0.0):
    """Each element within `ulp` of itself and `sums` of its row's mean square."""
    assert found.shape == wanted.shape, f"{name}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    if found.numel() == 0:
        return
    size = wanted.square().mean(1, keepdim=True).sqrt()
    excess = (found.double() - wanted).abs() - (ulp * wanted.abs() + sums * size + more)
    worst = excess.max().item()
    assert worst <= 0, f"{name}: {int((excess > 0).sum())} of {excess.numel()} elements are off, by up to {worst:.3e}"
