"""Autograd's corners of the FP8 path: frozen operands, what is kept, cotangents, checkpoints, no derivatives."""

import itertools

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
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, gradients, operands, step
from tests.moe_experts.on_cpu import NAMES, each_form, names_of, same
from tests.moe_experts.test_autograd import WithoutGradient
from tests.support.compare import assert_same_bytes


def small(form="separate", groups=(5, 4), tail=0):
    return operands(form, groups, tail, 128, 128)


@each_form
def test_any_subset_of_inputs_requiring_grad(form):
    """The same bits as with all; without any, the result does not require grad and nothing is kept."""
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    wanted = dict(zip(("out", *names_of(t)), gradients(t, dout), strict=True))
    for count in range(1, len(names_of(t)) + 1):
        for names in itertools.combinations(names_of(t), count):
            same(gradients(t, dout, names), [wanted["out"], *(wanted[name] for name in names)])
            leaves = t.requires_grad(*names)
            call(*leaves).backward(dout)
            assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves.leaves)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        assert not call(*t).requires_grad
        with torch.no_grad():
            out = call(*t.requires_grad())
    assert not saved
    assert not out.requires_grad
    assert_same_bytes(out, wanted["out"])


@pytest.mark.parametrize("grad", [True, False])
def test_copies_for_the_backward_are_made_only_for_one(grad, monkeypatch):
    """Without, no operand is quantised along its columns, and G and U are not stored."""
    put, kept, forward = [], [], reference.forward
    monkeypatch.setattr(reference, "_put_columns", lambda *args: put.append(args))
    monkeypatch.setattr(reference, "forward", lambda *args: kept.append(args[-1]) or forward(*args))
    t = operands()
    call(*(t.requires_grad("down_proj") if grad else t))
    assert kept == [grad]
    assert bool(put) == grad


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


def test_twice_backward_accumulates():
    t = operands().requires_grad()
    before = [leaf.detach().clone() for leaf in t.leaves]
    dout = inputs.cotangent(t)
    given = dout.clone()
    out = call(*t)
    out.backward(dout, retain_graph=True)
    once = [leaf.grad.clone() for leaf in t.leaves]
    out.backward(dout)
    same([leaf.grad for leaf in t.leaves], [g + g for g in once])
    same([leaf.detach() for leaf in t.leaves], before)
    assert_same_bytes(dout, given)


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


def test_a_result_whose_gradient_is_missing(monkeypatch):
    """Nothing is computed then: no gradient of zeros is made up."""
    monkeypatch.setattr(reference, "backward", lambda *args: pytest.fail("something ran"))
    t = small().requires_grad()
    out = WithoutGradient.apply(call(*t))
    assert torch.autograd.grad(out, t.leaves, torch.ones_like(out), allow_unused=True) == (None,) * 4


@each_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(form, use_reentrant):
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    leaves = t.requires_grad()
    out = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    out.backward(dout)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], gradients(t, dout))


@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(listed, monkeypatch):
    """Policies name the forward operator; saved, it does not run again."""
    calls, forward = [], reference.forward
    t = operands()
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    monkeypatch.setattr(reference, "forward", lambda *args: calls.append(1) or forward(*args))

    def policy(context, operator, *args, **options):
        saved = listed and operator.name() == "moe_experts::moe_experts_fp8_forward"
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = t.requires_grad()
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint(call, *leaves, use_reentrant=False, context_fn=contexts)
    out.backward(dout)
    assert len(calls) == (1 if listed else 2)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], wanted)


def test_a_backward_of_a_forward_that_kept_nothing_raises():
    """As of the operator called with save_for_backward=False while gradients are recorded."""
    t = small().requires_grad()
    out, *_ = torch.ops.moe_experts.moe_experts_fp8_forward(*t, False)
    with pytest.raises(RuntimeError, match="kept nothing for a backward"):
        out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_second_order_gradients_raise(name):
    """The first one may be asked for with create_graph; differentiating it raises."""
    t = small().requires_grad()
    (grad,) = torch.autograd.grad(call(*t).float().square().sum(), getattr(t, name), create_graph=True)
    (wanted,) = torch.autograd.grad(call(*t).float().square().sum(), getattr(t, name))
    assert_same_bytes(grad.detach(), wanted)
    with pytest.raises(RuntimeError, match="moe_experts has no second-order gradients"):
        grad.float().sum().backward()


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


def test_forward_mode_derivatives_raise():
    """Rather than lose the tangent."""
    t = small()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t.x, t.x)
        with pytest.raises(NotImplementedError, match="jvp"):  # what PyTorch says of a Function without one
            call(dual, *t[1:])


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
