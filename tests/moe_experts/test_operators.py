"""The public functions on CPU tensors: results, layouts of the arguments, group sizes, autocast, modes."""

import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
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

from tests.moe_experts import inputs
from tests.moe_experts.on_cpu import NAMES, definition, each_form, gradients, operands, same
from tests.support.compare import assert_same_bytes
from tests.support.device import deterministic_algorithms, other_defaults, repeat_bytes


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


def test_fp8_is_off_unless_asked_for():
    t = inputs.operands((5, 4), 0, 128, 128)
    assert_same_bytes(moe_experts(*t, fp8=False), moe_experts(*t))
    assert not torch.equal(moe_experts(*t, fp8=True), moe_experts(*t))
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
    with other_defaults():
        found = gradients(t, dout)
    same(found, wanted)


def test_repeats_deterministic_algorithms_and_the_reference_context_change_nothing():
    t = inputs.operands()
    dout = inputs.cotangent(t)
    first = repeat_bytes(lambda: gradients(t, dout), n=3)
    with use_definition():
        same(gradients(t, dout), first)
    with deterministic_algorithms():
        same(gradients(t, dout), first)


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
    example, _ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["out"].shape == (130, 512)
    assert scope["up"].grad.any()
    assert not scope["x"].grad[128:].any()
