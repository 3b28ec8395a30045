"""Autograd's corners on CPU tensors, in bf16 and, where nothing but the function is another, in FP8: frozen operands,
what is kept, cotangents, checkpoints, what has no derivative."""

import itertools
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from moe_experts import moe_experts, moe_experts_backward_data, moe_experts_forward, moe_experts_weight_grad, reference
from moe_experts.fp8 import reference as fp8_reference
from torch.utils.checkpoint import checkpoint

from tests.moe_experts import fp8_on_cpu, inputs
from tests.moe_experts.on_cpu import NAMES, each_form, gradients, names_of, operands, same
from tests.support.checkpoints import saving
from tests.support.compare import assert_same_bytes


class Path(NamedTuple):
    """bf16 or FP8: the function, operands for it, the definition, and the operator that a forward calls."""

    call: Callable
    operands: Callable
    definition: ModuleType
    operator: str


PATHS = {
    "bf16": Path(moe_experts, operands, reference, "moe_experts_forward"),
    "fp8": Path(fp8_on_cpu.call, fp8_on_cpu.operands, fp8_reference, "moe_experts_fp8_forward"),
}
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


@each_path
@each_form
def test_any_subset_of_inputs_requiring_grad(path, form):
    """The same bits as with all; without any, the result does not require grad and nothing is kept."""
    t = path.operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    wanted = dict(zip(("out", *names_of(t)), gradients(t, dout, None, path.call), strict=True))
    for count in range(1, len(names_of(t)) + 1):
        for names in itertools.combinations(names_of(t), count):
            same(gradients(t, dout, names, path.call), [wanted["out"], *(wanted[name] for name in names)])
            leaves = t.requires_grad(*names)
            path.call(*leaves).backward(dout)
            assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves.leaves)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        assert not path.call(*t).requires_grad
        with torch.no_grad():
            out = path.call(*t.requires_grad())
    assert not saved
    assert not out.requires_grad
    assert_same_bytes(out, wanted["out"])


@each_form
def test_what_is_kept_for_the_backward(form):
    """References to the operands, gate and up, and a flag of one byte."""
    t = operands(form).requires_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        moe_experts(*t)
    given = {v.untyped_storage().data_ptr() for v in (*t.leaves, t.num_tokens_per_expert)}
    kept = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saved}
    assert given <= kept.keys()
    rows, inner = len(t.x), t.down_proj.shape[2]
    assert sorted(size for pointer, size in kept.items() if pointer not in given) == [1, *[2 * rows * inner] * 2]


@each_form
def test_cotangents_of_any_strides(form):
    """Expanded, as from a sum; transposed; every second row; off by one element."""
    t = operands(form, limit=1.0)
    rows, hidden = t.x.shape
    dout = inputs.cotangent(t)
    off = dout.new_empty(dout.numel() + 1)[1:].view_as(dout).copy_(dout)
    others = dout.t().contiguous().t(), dout.repeat_interleave(2, 0)[::2], off
    for strided in others:
        assert not strided.is_contiguous() or strided.data_ptr() % 16
        same(gradients(t, strided), gradients(t, dout))
        _, gate, up = moe_experts_forward(*t)
        halves = moe_experts_backward_data(strided, *t[1:5], gate, up, 1.0)
        same(halves, moe_experts_backward_data(dout, *t[1:5], gate, up, 1.0))
        same(
            moe_experts_weight_grad(strided, t.x, t[4], *halves[1:], form == "packed"),
            moe_experts_weight_grad(dout, t.x, t[4], *halves[1:], form == "packed"),
        )
    leaves = t.requires_grad()
    moe_experts(*leaves).sum().backward()
    wanted = gradients(t, torch.ones(rows, hidden).bfloat16())[1:]
    same([leaf.grad for leaf in leaves.leaves], wanted)


@each_path
def test_twice_backward_accumulates(path):
    t = path.operands().requires_grad()
    before = [leaf.detach().clone() for leaf in t.leaves]
    dout = inputs.cotangent(t)
    out = path.call(*t)
    given = dout.clone()
    out.backward(dout, retain_graph=True)
    once = [leaf.grad.clone() for leaf in t.leaves]
    out.backward(dout)
    same([leaf.grad for leaf in t.leaves], [g + g for g in once])
    same([leaf.detach() for leaf in t.leaves], before)
    assert_same_bytes(dout, given)


def test_gate_and_up_have_no_gradient():
    t = inputs.operands().requires_grad()
    out, gate, up = moe_experts_forward(*t)
    assert out.requires_grad
    assert not gate.requires_grad
    assert not up.requires_grad
    dout = inputs.cotangent(t)
    same(torch.autograd.grad(out, t.leaves, dout), gradients(t, dout)[1:])


class WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@each_path
def test_a_result_whose_gradient_is_missing(path, monkeypatch):
    """Nothing is computed then: no gradient of zeros is made up."""
    monkeypatch.setattr(path.definition, "backward", lambda *args: pytest.fail("something ran"))
    t = path.operands().requires_grad()
    out = WithoutGradient.apply(path.call(*t))
    grads = torch.autograd.grad(out, t.leaves, torch.ones_like(out), allow_unused=True)
    assert grads == (None,) * 4


@each_path
@each_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(path, form, use_reentrant):
    t = path.operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    leaves = t.requires_grad()
    out = checkpoint(path.call, *leaves, use_reentrant=use_reentrant)
    out.backward(dout)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], gradients(t, dout, None, path.call))


@each_path
@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(path, listed, monkeypatch):
    """Policies name the forward operator; saved, it does not run again."""
    calls, forward = [], path.definition.forward
    t = path.operands()
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout, None, path.call)
    monkeypatch.setattr(path.definition, "forward", lambda *args: calls.append(1) or forward(*args))
    saved = [f"moe_experts::{path.operator}"] if listed else []
    leaves = t.requires_grad()
    out = checkpoint(path.call, *leaves, use_reentrant=False, context_fn=saving(*saved))
    out.backward(dout)
    assert len(calls) == (1 if listed else 2)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], wanted)


@each_path
@pytest.mark.parametrize("name", NAMES)
def test_second_order_gradients_raise(path, name):
    """The first one may be asked for with create_graph; differentiating it raises."""
    t = path.operands("separate", (5, 4), 0).requires_grad()
    (grad,) = torch.autograd.grad(path.call(*t).float().square().sum(), getattr(t, name), create_graph=True)
    (wanted,) = torch.autograd.grad(path.call(*t).float().square().sum(), getattr(t, name))
    assert_same_bytes(grad.detach(), wanted)
    with pytest.raises(RuntimeError, match="moe_experts has no second-order gradients"):
        grad.float().sum().backward()


def test_gradients_of_the_halves_raise():
    t = inputs.operands((5, 4), 0)
    dout = inputs.cotangent(t).requires_grad_()
    _, gate, up = moe_experts_forward(*t)
    dx, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, 10.0)
    dw1, *_ = moe_experts_weight_grad(dout, t.x, t[4], dgate_dup.detach(), h.detach(), False)
    for result in (dx, dw1):
        with pytest.raises(RuntimeError, match="moe_experts has no second-order gradients"):
            result.sum().backward()


@each_path
def test_forward_mode_derivatives_raise(path):
    """Rather than lose the tangent."""
    t = path.operands("separate", (5, 4), 0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t.x, t.x)
        with pytest.raises(NotImplementedError, match="jvp"):  # what PyTorch says of a Function without one
            path.call(dual, *t[1:])
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: path.call(x, *t[1:]), (t.x,), (t.x,))
