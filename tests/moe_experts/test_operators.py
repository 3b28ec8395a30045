"""The public functions on CPU tensors: layouts of the arguments, autograd's corners, autocast, checkpoints."""

import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hopper_kernels import KernelUnavailable
from hopper_kernels import reference as use_definition
from moe_experts import (
    OPS_NAMESPACE,
    TOKEN_GROUP_ALIGNMENT,
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
    reference,
    unsupported_shape_reason,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes
from tests.support.device import repeat_bytes

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


@each_form
@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
def test_results_and_gradients_are_the_definitions(form, groups, tail, hidden, inner, poison):
    t = operands(form, groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    same(gradients(t, dout), definition(t, dout))
    assert_same_bytes(moe_experts(*t), reference.forward(*t)[0])


@each_form
@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
def test_the_directions_and_the_halves(form, groups, tail, hidden, inner):
    """The bits of autograd, in one call and in two."""
    t = operands(form, groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    out, gate, up = moe_experts_forward(*t)
    same((out, gate, up), reference.forward(*t))
    whole = moe_experts_backward(dout, *t[:5], gate, up, 1.0)
    dx, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, 1.0)
    halves = dx, *moe_experts_weight_grad(dout, t.x, t[4], dgate_dup, h, form == "packed")
    same(whole, halves)
    same(gradients(t, dout)[1:], [g for g in whole if g.shape != (0,)])
    assert (whole[2].shape == (0,)) == (form == "packed")


def test_constants():
    assert OPS_NAMESPACE == "moe_experts"
    assert TOKEN_GROUP_ALIGNMENT == 8
    namespace = getattr(torch.ops, OPS_NAMESPACE)
    for name in ("forward", "backward", "backward_data", "weight_grad"):
        assert getattr(namespace, f"moe_experts_{name}").default._schema.name == f"moe_experts::moe_experts_{name}"


def test_fp8_is_to_come():
    """After the arguments were checked, for a trainer that asks for it in vain."""
    t = inputs.operands((5, 4), 0, 128, 128)
    assert_same_bytes(moe_experts(*t, fp8=False), moe_experts(*t))
    with pytest.raises(KernelUnavailable, match=r"^moe_experts has no FP8 path yet"):
        moe_experts(*t, fp8=True)
    with pytest.raises(ValueError, match=r"^intermediate_size must be a positive multiple of 128"):
        moe_experts(*inputs.operands((5, 4), 0, 128, 136), fp8=True)
    with pytest.raises(TypeError, match=r"^fp8 must be a bool, got int"):
        moe_experts(*t, fp8=1)


@pytest.mark.parametrize("limit", [math.inf, 10, 0.25])
def test_limits(limit):
    """A Python integer counts as the number that it is."""
    t = inputs.operands(limit=limit, gate_std=7.0)
    dout = inputs.cotangent(t)
    same(gradients(t, dout), definition(t._replace(swiglu_limit=float(limit)), dout))


def half_of_packed(t, offset=0):
    """Gate and up as the halves of one tensor."""
    packed = t.packed().gate_proj
    inner = t.gate_proj.shape[1]
    return t._replace(gate_proj=packed[:, :inner], up_proj=packed[:, inner:])


def slices_of_experts(t):
    """As parts of larger tensors, in which others are NaN."""
    found = {}
    for name in NAMES[1:]:
        weight = getattr(t, name)
        wide = weight.new_full((weight.shape[0] + 3, *weight.shape[1:]), math.nan)
        wide[2:-1] = weight
        found[name] = wide[2:-1]
    return t._replace(**found)


def every_second_expert(t):
    """And other pitches for gate than for up."""
    gate = t.gate_proj.repeat_interleave(2, 0)[::2]
    up = t.up_proj.repeat_interleave(3, 0)[::3]
    return t._replace(gate_proj=gate, up_proj=up)


def rows_of_a_wider_weight(t):
    """An expert's weight ends before the next begins."""
    up = t.up_proj.new_full((t.up_proj.shape[0], t.up_proj.shape[1] + 5, t.up_proj.shape[2]), math.nan)
    up[:, 3:-2] = t.up_proj
    return t._replace(up_proj=up[:, 3:-2])


@pytest.mark.parametrize("layout", [half_of_packed, slices_of_experts, every_second_expert, rows_of_a_wider_weight])
def test_layouts_of_the_weights(layout):
    t = inputs.operands((13, 0, 30), 7, 64, 40, limit=1.0)
    dout = inputs.cotangent(t)
    strided = layout(t)
    assert any(not a.is_contiguous() or a.data_ptr() != b.data_ptr() for a, b in zip(strided[1:4], t[1:4], strict=True))
    wanted = definition(t, dout)
    leaves = strided._replace(**{n: getattr(strided, n).detach().requires_grad_() for n in NAMES})
    assert all(a.stride() == b.stride() for a, b in zip(leaves[:4], strided[:4], strict=True))
    out = moe_experts(*leaves)
    same((out.detach(), *torch.autograd.grad(out, leaves.leaves, dout)), wanted, strides=False)


@pytest.mark.parametrize("shape", [(1, 40, 64), (1, 8, 8)])
def test_a_single_expert_may_have_any_pitch(shape):
    t = inputs.operands((13,), 2, shape[2], shape[1])
    odd = t._replace(gate_proj=t.gate_proj.as_strided(shape, (7, shape[2], 1)))
    dout = inputs.cotangent(t)
    same(gradients(odd, dout), gradients(t, dout))


def test_one_weight_for_all_experts():
    """Expanded over the experts: its gradient is the sum of theirs."""
    t = inputs.operands((5, 8), 0)
    leaf = t.gate_proj[:1].clone().requires_grad_()
    dout = inputs.cotangent(t)
    copied = t._replace(gate_proj=t.gate_proj[:1].repeat(2, 1, 1))
    out = moe_experts(t.x, leaf.expand(2, -1, -1), *t[2:])
    wanted = definition(copied, dout)
    assert_same_bytes(out.detach(), wanted[0])
    (grad,) = torch.autograd.grad(out, leaf, dout)
    torch.testing.assert_close(grad, wanted[2].sum(0, keepdim=True), rtol=2**-7, atol=1e-2)


def test_group_sizes_of_any_dtype_and_strides():
    t = inputs.operands()
    wanted = moe_experts(*t)
    for counts in (t[4].int(), t[4].repeat_interleave(2)[::2], t[4].int().repeat_interleave(3)[::3]):
        assert_same_bytes(moe_experts(*t._replace(num_tokens_per_expert=counts)), wanted)


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
            moe_experts(*leaves).backward(dout)
            assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves.leaves)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        assert not moe_experts(*t).requires_grad
        with torch.no_grad():
            out = moe_experts(*t.requires_grad())
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


def test_twice_backward_accumulates():
    t = inputs.operands().requires_grad()
    before = [leaf.detach().clone() for leaf in t.leaves]
    dout = inputs.cotangent(t)
    out = moe_experts(*t)
    given = dout.clone()
    out.backward(dout, retain_graph=True)
    once = [leaf.grad.clone() for leaf in t.leaves]
    out.backward(dout)
    same([leaf.grad for leaf in t.leaves], [g + g for g in once])
    same([leaf.detach() for leaf in t.leaves], before)
    assert_same_bytes(dout, given)


def test_results_share_no_memory():
    """Not with the operands, nor with each other, also with one expert."""
    for groups in ((13,), (5, 0, 8)):
        for form in ("separate", "packed"):
            t = operands(form, groups, 0)
            dout = inputs.cotangent(t)
            out, gate, up = moe_experts_forward(*t)
            halves = moe_experts_backward_data(dout, *t[1:5], gate, up, 10.0)
            grads = moe_experts_weight_grad(dout, t.x, t[4], *halves[1:], form == "packed")
            grads += moe_experts_backward(dout, *t[:5], gate, up, 10.0)
            every = [*t.leaves, t[4], dout, out, gate, up, *halves, *grads]
            pointers = [v.untyped_storage().data_ptr() for v in every if v.numel()]
            assert len(set(pointers)) == len(pointers)


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


def test_a_result_whose_gradient_is_missing(monkeypatch):
    """Nothing is computed then: no gradient of zeros is made up."""
    monkeypatch.setattr(reference, "backward", lambda *args: pytest.fail("something ran"))
    t = inputs.operands().requires_grad()
    out = WithoutGradient.apply(moe_experts(*t))
    grads = torch.autograd.grad(out, t.leaves, torch.ones_like(out), allow_unused=True)
    assert grads == (None,) * 4


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(form, dtype):
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    with torch.autocast("cpu", dtype):
        same(gradients(t, dout), wanted)
        with pytest.raises(ValueError, match=r"^x must have dtype bfloat16, got float32"):
            moe_experts(t.x.float(), *t[1:])


def test_other_default_device_and_dtype():
    t = inputs.operands(limit=1.0)
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = gradients(t, dout)
    finally:
        torch.set_default_dtype(torch.float32)
    same(found, wanted)


def test_repeats_deterministic_algorithms_and_the_reference_context_change_nothing():
    t = inputs.operands()
    dout = inputs.cotangent(t)
    first = repeat_bytes(lambda: gradients(t, dout), n=3)
    with use_definition():
        same(gradients(t, dout), first)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        same(gradients(t, dout), first)
    finally:
        torch.use_deterministic_algorithms(False)


@each_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(form, use_reentrant):
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    leaves = t.requires_grad()
    out = checkpoint(moe_experts, *leaves, use_reentrant=use_reentrant)
    out.backward(dout)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], gradients(t, dout))


@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(listed, monkeypatch):
    """Policies name the forward operator; saved, it does not run again."""
    calls, forward = [], reference.forward
    t = inputs.operands()
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    monkeypatch.setattr(reference, "forward", lambda *args: calls.append(1) or forward(*args))

    def policy(context, operator, *args, **options):
        saved = listed and operator.name() == "moe_experts::moe_experts_forward"
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = t.requires_grad()
    out = checkpoint(
        moe_experts,
        *leaves,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    out.backward(dout)
    assert len(calls) == (1 if listed else 2)
    same([out.detach(), *(leaf.grad for leaf in leaves.leaves)], wanted)


@pytest.mark.parametrize("name", NAMES)
def test_second_order_gradients_raise(name):
    """The first one may be asked for with create_graph; differentiating it raises."""
    t = inputs.operands((5, 4), 0).requires_grad()
    (grad,) = torch.autograd.grad(moe_experts(*t).float().square().sum(), getattr(t, name), create_graph=True)
    (wanted,) = torch.autograd.grad(moe_experts(*t).float().square().sum(), getattr(t, name))
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


def test_forward_mode_derivatives_raise():
    """Rather than lose the tangent."""
    t = inputs.operands((5, 4), 0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t.x, t.x)
        with pytest.raises(NotImplementedError, match="jvp"):
            moe_experts(dual, *t[1:])
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda x: moe_experts(x, *t[1:]), (t.x,), (t.x,))


def test_inference_mode():
    t = inputs.operands()
    wanted = moe_experts(*t)
    with torch.inference_mode():
        found = moe_experts(*t)
        again = moe_experts(*(v.clone() if isinstance(v, torch.Tensor) else v for v in t))
    same((found, again), (wanted, wanted))


def test_group_sizes_are_read_on_a_cpu():
    t = inputs.operands((5, 4, 5), 0)
    dout = inputs.cotangent(t)
    _, gate, up = moe_experts_forward(*t)
    _, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, 10.0)
    for sizes, message in (([5, -1, 3], "must not be negative"), ([5, 5, 5], "must add up to at most the 14 rows")):
        bad = t._replace(num_tokens_per_expert=torch.tensor(sizes))
        calls = [
            lambda bad=bad: moe_experts(*bad),
            lambda bad=bad: moe_experts(*bad.requires_grad()),
            lambda bad=bad: moe_experts_forward(*bad),
            lambda bad=bad: moe_experts_backward(dout, *bad[:5], gate, up, 10.0),
            lambda bad=bad: moe_experts_backward_data(dout, *bad[1:5], gate, up, 10.0),
            lambda bad=bad: moe_experts_weight_grad(dout, t.x, bad[4], dgate_dup, h, False),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=f"^num_tokens_per_expert {message}"):
                call()


def test_unsupported_shape_reason_is_what_the_call_does():
    for hidden, inner in itertools.product((0, 4, 8, 12, 16, 128, 136), repeat=2):
        x = torch.ones(2, hidden).bfloat16()
        gate, up = (torch.ones(2, inner, hidden).bfloat16() for _ in range(2))
        down = torch.ones(2, hidden, inner).bfloat16()
        reason = unsupported_shape_reason(hidden, inner)
        assert (reason is None) == (hidden % 8 == inner % 8 == 0 and hidden > 0 and inner > 0)
        with nullcontext() if reason is None else pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            moe_experts(x, gate, up, down, torch.tensor([1, 1]), 10.0)
        assert (unsupported_shape_reason(hidden, inner, fp8=True) is None) == (hidden == inner == 128)
    assert "hidden_size 12 and intermediate_size 2304" in unsupported_shape_reason(12, 2304)
    assert unsupported_shape_reason(5120, 2304) is None
    assert unsupported_shape_reason(5120, 2304, fp8=True) is None
    for sizes in ((64.0, 64), (64, "64"), (True, 64)):
        assert "must be an integer, got" in unsupported_shape_reason(*sizes)


def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parents[2] / "packages/moe-experts/README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (130, 512)
    assert scope["up"].grad.any()
    assert not scope["x"].grad[128:].any()
