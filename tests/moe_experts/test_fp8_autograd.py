"""Autograd's corners of the FP8 path that bf16 has not, or otherwise; those of both are in `test_autograd.py`."""

import pytest
import torch
from moe_experts import (
    moe_experts_fp8_backward,
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
    padded_rows,
)
from moe_experts.fp8 import reference

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, gradients, operands, step
from tests.moe_experts.on_cpu import NAMES, each_form, same


def small(form="separate", groups=(5, 4), tail=0):
    return operands(form, groups, tail, 128, 128)


@pytest.mark.parametrize("grad", [True, False])
def test_copies_for_the_backward_are_made_only_for_one(grad, monkeypatch):
    """Without, no operand is quantised along its columns, no weight is transposed, and G and U are not stored."""
    put, kept, forward = [], [], reference.forward
    turned, quantize = [], reference.quantize_weights
    monkeypatch.setattr(
        reference, "quantize_weights", lambda *args: turned.append(quantize(*args)[4:]) or quantize(*args)
    )
    monkeypatch.setattr(reference, "_put_columns", lambda *args: put.append(args))
    monkeypatch.setattr(reference, "forward", lambda *args: kept.append(args[-1]) or forward(*args))
    t = operands()
    call(*(t.requires_grad("down_proj") if grad else t))
    assert kept == [grad]
    assert bool(put) == grad
    assert [bool(w.numel()) for w in turned[0]] == [grad] * 4


@each_form
def test_what_is_kept_for_the_backward(form):
    """The group sizes; G and U, x and the weights in FP8, and a flag of one byte: no reference to what was given."""
    t = operands(form).requires_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        call(*t)
    kept = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saved}
    assert not {v.untyped_storage().data_ptr() for v in t.leaves} & kept.keys()
    experts, hidden, inner = t.down_proj.shape
    padded = padded_rows(len(t.x), experts)
    weights = [(experts * 2 * inner * hidden), (experts * inner * hidden)]
    sizes = [1, t[4].nbytes, padded * 2 * inner * 2, padded * hidden, padded // 128 * hidden * 4]
    sizes += [*weights, *(4 * w // 128**2 for w in weights)]
    assert sorted(kept.values()) == sorted(sizes)


@each_form
def test_cotangents_of_any_strides(form):
    """Expanded, as from a sum; transposed; every second row; off by one element."""
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    s = step(t)
    off = dout.new_empty(dout.numel() + 1)[1:].view_as(dout).copy_(dout)
    for strided in (dout.t().contiguous().t(), dout.repeat_interleave(2, 0)[::2], off):
        same(gradients(t, strided), gradients(t, dout))
        same(moe_experts_fp8_backward_data(strided, *s.data), moe_experts_fp8_backward_data(dout, *s.data))
        packed = form == "packed"
        same(moe_experts_fp8_backward(strided, *s.joint, packed), moe_experts_fp8_backward(dout, *s.joint, packed))
        sums, wanted = s.sums(), s.sums()
        moe_experts_fp8_backward_accumulate(strided, *s.joint, *sums)
        moe_experts_fp8_backward_accumulate(dout, *s.joint, *wanted)
        same(sums, wanted)
    leaves = t.requires_grad()
    call(*leaves).sum().backward()
    same([leaf.grad for leaf in leaves.leaves], gradients(t, torch.ones(t.x.shape).bfloat16())[1:])


def test_a_snapshot_of_the_weights():
    """Weights that change between a forward and its backward do not enter the backward."""
    t = operands(limit=1.0)
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    leaves = t.requires_grad()
    out = call(*leaves)
    for leaf in leaves.leaves:
        leaf.data.fill_(7)
    same(torch.autograd.grad(out, leaves.leaves, dout), wanted[1:])


def test_a_backward_of_a_forward_that_kept_nothing_raises():
    """As of the operator called with save_for_backward=False while gradients are recorded."""
    t = small().requires_grad()
    out, *_ = torch.ops.moe_experts.moe_experts_fp8_forward(*t, False)
    with pytest.raises(RuntimeError, match="kept nothing for a backward"):
        out.sum().backward()


def test_what_is_kept_has_no_gradient():
    out, *kept = torch.ops.moe_experts.moe_experts_fp8_forward(*small().requires_grad(), True)
    assert out.requires_grad
    assert not any(v.requires_grad for v in kept)


def test_no_gradient_flows_through_quantised_weights():
    t = small().requires_grad()
    assert not any(w.requires_grad for w in moe_experts_fp8_quantize_weights(*t[1:4]))


def test_gradients_of_the_functions_without_one_raise():
    t = small()
    s = step(t)
    out, *_ = moe_experts_fp8_forward_quantized(t.x.requires_grad_(), t[4], 10.0, *s.weights[:4])
    with pytest.raises(RuntimeError, match="moe_experts_fp8_forward_quantized has no derivative"):
        out.sum().backward()
    dout = inputs.cotangent(t).requires_grad_()
    for dx in (
        moe_experts_fp8_backward_data(dout, *s.data)[0],
        moe_experts_fp8_backward(dout, *s.joint, False)[0],
        moe_experts_fp8_backward_accumulate(dout, *s.joint, *s.sums()),
    ):
        with pytest.raises(RuntimeError, match="moe_experts has no second-order gradients"):
            dx.sum().backward()


def test_operands_that_require_grad_change_nothing():
    """The second half returns nothing that could have a gradient."""
    t = small()
    s = step(t)
    _, *columns = moe_experts_fp8_backward_data(inputs.cotangent(t).requires_grad_(), *s.data)
    assert columns[0].requires_grad
    sums, wanted = s.sums(), s.sums()
    moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *sums)
    moe_experts_fp8_weight_grad_accumulate(*s.second_half([c.detach() for c in columns]), *wanted)
    same(sums, wanted)
    assert not any(v.requires_grad for v in sums)


@pytest.mark.parametrize(
    ("names", "products", "columns"),
    [
        (("x",), 0, 1),
        (("gate_proj",), 1, 4),
        (("down_proj",), 1, 4),
        (("gate_proj", "up_proj"), 2, 4),
        (NAMES, 3, 4),
    ],
    ids=str,
)
def test_weights_that_are_not_needed_are_not_multiplied(names, products, columns, monkeypatch):
    """The definition's products and copies, counted; one of the copies is the forward's of x."""
    multiplied, put = [], []
    right, right_put = reference._sum_over_rows, reference._put_columns
    monkeypatch.setattr(reference, "_sum_over_rows", lambda *args: multiplied.append(1) or right(*args))
    monkeypatch.setattr(reference, "_put_columns", lambda *args: put.append(1) or right_put(*args))
    t = small(groups=(5, 0)).requires_grad(*names)
    call(*t).backward(inputs.cotangent(t))
    assert len(multiplied) == products
    assert len(put) == columns
