"""Operands on the GPU, and calls with them, for the GPU tests of the interface, of PyTorch's features and of sizes."""

import torch
from moe_experts import (
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
    reference,
)
from torch import Tensor

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes, error64

DEVICE = torch.device("cuda")
NAMES = Operands._fields[:4]
GROUPS = (130, 0, 45, 1)  # more than a tile of 128 rows, none, some, one
BOUND = 5e-3  # of a result against float64: as in the package's self-check
FEW = 2e-2  # where a result has so few elements that their errors do not average
Named = dict[str, Tensor]


def operands(form="separate", groups=GROUPS, tail=7, hidden=136, inner=72, *, limit=inputs.LIMIT) -> Operands:
    """As `inputs.operands`, on the GPU, with one weight for gate and up if form is "packed"."""
    with DEVICE:
        t = inputs.operands(groups, tail, hidden, inner, limit=limit)
        return t.packed() if form == "packed" else t


def cotangent(t: Operands) -> Tensor:
    with DEVICE:
        return inputs.cotangent(t)


def names_of(t: Operands) -> list[str]:
    """The operands that there are and that can require grad."""
    return [name for name in NAMES if getattr(t, name) is not None]


def gradients(t: Operands, dout: Tensor, names=None, function=moe_experts) -> Named:
    """out, and the gradients of the operands named, of all by default; the others do not require grad."""
    names = names_of(t) if names is None else names
    leaves = t._replace(**{name: getattr(t, name).detach().requires_grad_(name in names) for name in names_of(t)})
    out = function(*leaves)
    grads = torch.autograd.grad(out, [getattr(leaves, name) for name in names], dout)
    return {"out": out.detach()} | {f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)}


def gradients_by_backward(t: Operands, dout: Tensor, names=None, function=moe_experts) -> Named:
    """As `gradients`, from the leaves' `grad`: of all leaves that got one."""
    names = names_of(t) if names is None else names
    leaves = t.requires_grad(*names)
    out = function(*leaves)
    out.backward(dout)
    grads = {f"grad_{name}": getattr(leaves, name).grad for name in names_of(t)}
    return {"out": out.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def halves(t: Operands, dout: Tensor) -> Named:
    """The forward, and the backward in two parts; what is specified of their results."""
    out, gate, up = moe_experts_forward(*t)
    dx, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, t.swiglu_limit)
    dw1, dw3, dw2 = moe_experts_weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, t.up_proj is None)
    rows = slice(t.owned)
    found = {"gate": gate[rows], "up": up[rows], "dgate_dup": dgate_dup[rows], "h": h[rows]}
    return found | {"out": out, "dx": dx, "dw1": dw1, "dw3": dw3, "dw2": dw2}


def joint(t: Operands, dout: Tensor) -> Named:
    """The forward and the backward in one part."""
    out, gate, up = moe_experts_forward(*t)
    grads = moe_experts_backward(dout, *t[:5], gate, up, t.swiglu_limit)
    return {"out": out} | dict(zip(("dx", "dw1", "dw3", "dw2"), grads, strict=True))


def everything(t: Operands, dout: Tensor) -> Named:
    """Results of autograd and of all operators."""
    return gradients(t, dout) | halves(t, dout) | {f"joint {name}": r for name, r in joint(t, dout).items()}


def definition(t: Operands, dout: Tensor) -> Named:
    """What `gradients` gives, by the definition, in the dtype of the operands."""
    out, gate, up = reference.forward(*t)
    dx, dw1, dw3, dw2 = reference.backward(dout, *t[:5], gate, up, t.swiglu_limit)
    grads = (dx, dw1, dw3, dw2) if t.up_proj is not None else (dx, dw1, dw2)
    return {"out": out} | {f"grad_{name}": grad for name, grad in zip(names_of(t), grads, strict=True)}


def exact(t: Operands, dout: Tensor) -> Named:
    """What `gradients` should give, in float64."""
    return definition(t.double(), dout.double())


def assert_same(found: Named, wanted: Named, what: str = "", names=None) -> None:
    """The same bytes in all results, or in those of `names`."""
    if names is None:
        assert found.keys() == wanted.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted)}"
    for name in found if names is None else names:
        assert_same_bytes(found[name], wanted[name], f"{what} {name}".strip(), strides=False)


def assert_accurate(found: Named, wanted64: Named, what: str = "", bound: float = BOUND) -> None:
    """bf16, and within the bound of float64."""
    assert found.keys() == wanted64.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted64)}"
    for name, got in found.items():
        assert got.dtype == torch.bfloat16, f"{what} {name}"
        error = error64(got, wanted64[name])
        assert error <= bound, f"{what} {name}: error {error:.2e}, bound {bound:.0e}"
