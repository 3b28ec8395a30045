"""What the tests of calls on CPU tensors share."""

import pytest
import torch
from moe_experts import moe_experts, reference

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes

NAMES = Operands._fields[:4]
each_form = pytest.mark.parametrize("form", ["separate", "packed"])


def operands(form="separate", *args, **options):
    t = inputs.operands(*args, **options)
    return t.packed() if form == "packed" else t


def same(found, wanted, strides=True):
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same_bytes(got, want, strides=strides)


def names_of(t):
    return [name for name in NAMES if getattr(t, name) is not None]


def definition(t, dout):
    """out, and the gradients that there are."""
    out, gate, up = reference.forward(*t)
    dx, dw1, dw3, dw2 = reference.backward(dout, *t[:5], gate, up, t.swiglu_limit)
    return out, dx, dw1, *([] if t.up_proj is None else [dw3]), dw2


def gradients(t, dout, names=None, function=moe_experts):
    """out, and gradients of the operands named."""
    leaves = t.requires_grad(*(names or ()))
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, [getattr(leaves, n) for n in names or names_of(t)], dout)


def assert_padding_adds_nothing(found, wanted, padding, rows):
    """Results with rows of zeros among them, and without: `rows` says how many results, the first, have rows."""
    kept = [i for i in range(len(found[0])) if i not in padding]
    for i, (got, want) in enumerate(zip(found, wanted, strict=True)):
        if i < rows:
            assert not got[padding].any()
            got = got[kept]
        assert_same_bytes(got, want)
