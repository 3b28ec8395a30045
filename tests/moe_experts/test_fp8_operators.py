"""The public FP8 functions on CPU tensors: one set of bits by every way, layouts of the arguments, modes."""

import itertools
import math
import re
from contextlib import nullcontext
from pathlib import Path

import moe_experts as package
import pytest
import torch
from hopper_kernels import reference as use_definition
from hopper_kernels import registry
from moe_experts import (
    fp8_unavailable_reason,
    moe_experts,
    moe_experts_fp8_backward,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
    padded_rows,
    unsupported_shape_reason,
)

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, each_shape, gradients, operands, results, step
from tests.moe_experts.on_cpu import NAMES, each_form, same
from tests.moe_experts.test_operators import (
    every_second_expert,
    half_of_packed,
    rows_of_a_wider_weight,
    slices_of_experts,
)
from tests.support.compare import assert_same_bytes
from tests.support.device import deterministic_algorithms, other_defaults, repeat_bytes


@each_form
@each_shape
def test_every_way_has_the_same_bits(form, groups, tail, hidden, inner, poison):
    """Autograd, the functions with quantised weights, the backward in one and in two; with and without gradients."""
    t = operands(form, groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    s = step(t)
    wanted = gradients(t, dout)
    whole = moe_experts_fp8_backward(dout, *s.joint, form == "packed")
    same((s.out, *(g for g in whole if g.shape != (0,))), wanted)
    assert (whole[2].shape == (0,)) == (form == "packed")
    dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    dw13, dw2 = s.sums()
    assert moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2) is None
    weights = (dw13,) if form == "packed" else dw13.split(inner, dim=1)
    same((dx, *(w.bfloat16() for w in (*weights, dw2))), wanted[1:], strides=False)
    with torch.no_grad():
        assert_same_bytes(call(*t.requires_grad()), wanted[0])
    assert_same_bytes(call(*t), wanted[0])


@each_shape
def test_packed_and_separate_weights_have_the_same_bytes(groups, tail, hidden, inner):
    t = operands("separate", groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    found, wanted = results(t.packed(), dout), results(t, dout)
    for name, want in wanted.items():
        assert_same_bytes(found[name], want, name)
    out, dx, dw1, dw3, dw2 = gradients(t, dout)
    same(gradients(t.packed(), dout), (out, dx, torch.cat((dw1, dw3), dim=1), dw2))


def test_micro_batches_share_quantised_weights():
    """Each with its own routing and number of rows."""
    t = operands()
    weights = moe_experts_fp8_quantize_weights(*t[1:4])
    for groups, tail in (((130, 0, 5), 9), ((0, 64, 1), 0), ((3, 3, 300), 2)):
        other = operands("separate", groups, tail)._replace(**dict(zip(NAMES[1:], t[1:4], strict=True)))
        dout = inputs.cotangent(other)
        s = step(other, weights)
        same((s.out, *moe_experts_fp8_backward(dout, *s.joint, False)), gradients(other, dout))


@each_form
def test_what_is_not_needed_is_empty(form):
    t = operands(form, limit=1.0)
    s, dout = step(t), inputs.cotangent(t)
    backward = torch.ops.moe_experts.moe_experts_fp8_backward
    packed = form == "packed"
    full = backward(dout, *s.joint, packed)
    for needs in itertools.product((True, False), repeat=4):
        wanted = [g if need else g.new_zeros(0) for g, need in zip(full, needs, strict=True)]
        same(backward(dout, *s.joint, packed, *needs), wanted)


def test_nothing_is_kept_unless_it_is_saved():
    """Seven empty tensors of the right dtypes, and the same result."""
    t = operands()
    forward = torch.ops.moe_experts.moe_experts_fp8_forward
    out, *kept, flag = forward(*t, True)
    other, *nothing, other_flag = forward(*t, False)
    assert_same_bytes(other, out)
    assert flag.item() is other_flag.item() is False
    assert len(kept) == len(nothing) == 7
    for some, none in zip(kept, nothing, strict=True):
        assert none.shape == (0,)
        assert none.dtype == some.dtype
        assert some.numel()
    same(kept, [*step(t).kept, *step(t).weights[4:]])


def test_results_have_the_promised_shapes():
    rows, experts, hidden, inner = 144, 3, 256, 128
    s = step(operands())
    padded = padded_rows(rows, experts)
    shapes = [
        (experts, 2 * inner, hidden),
        (experts, 2 * inner // 128, hidden // 128),
        (experts, hidden, inner),
        (experts, hidden // 128, inner // 128),
        (experts, hidden, 2 * inner),
        (experts, hidden // 128, 2 * inner // 128),
        (experts, inner, hidden),
        (experts, inner // 128, hidden // 128),
    ]
    assert isinstance(s.weights, list)
    assert [tuple(t.shape) for t in s.weights] == shapes
    assert [tuple(t.shape) for t in s.kept] == [(padded, 2 * inner), (padded * hidden,), (padded // 128, hidden)]
    columns = moe_experts_fp8_backward_data(inputs.cotangent(s.t), *s.data)
    assert len(columns) == 7
    for found, channels in zip(columns[1::2], (hidden, inner, 2 * inner), strict=True):
        assert found.shape == (padded * channels,)
    for codes, scales in zip((*s.weights[::2], *columns[1::2]), (*s.weights[1::2], *columns[2::2]), strict=True):
        assert codes.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
    assert all(t.is_contiguous() for t in (*s.weights, *s.kept, *columns))


def test_transposed_weights_are_exact_transposes():
    weights = moe_experts_fp8_quantize_weights(*operands()[1:4])
    for plain, transposed in zip(weights[:4], weights[4:], strict=True):
        assert_same_bytes(transposed, plain.mT, strides=False)


@pytest.mark.parametrize("limit", [math.inf, 10, 0.25])
def test_limits(limit):
    """A Python integer counts as the number that it is."""
    t = operands(limit=limit, gate_std=7.0)
    dout = inputs.cotangent(t)
    same(gradients(t, dout), gradients(t._replace(swiglu_limit=float(limit)), dout))


@pytest.mark.parametrize("layout", [half_of_packed, slices_of_experts, every_second_expert, rows_of_a_wider_weight])
def test_layouts_of_the_weights(layout):
    t = operands(limit=1.0)
    dout = inputs.cotangent(t)
    strided = layout(t)
    leaves = strided._replace(**{n: getattr(strided, n).detach().requires_grad_() for n in NAMES})
    assert all(a.stride() == b.stride() for a, b in zip(leaves[:4], strided[:4], strict=True))
    out = call(*leaves)
    same((out.detach(), *torch.autograd.grad(out, leaves.leaves, dout)), gradients(t, dout), strides=False)
    same(moe_experts_fp8_quantize_weights(*strided[1:4]), moe_experts_fp8_quantize_weights(*t[1:4]))


def test_group_sizes_of_any_dtype_and_strides():
    t = operands()
    dout = inputs.cotangent(t)
    wanted = results(t, dout)
    for counts in (t[4].int(), t[4].repeat_interleave(2)[::2], t[4].int().repeat_interleave(3)[::3]):
        same(results(t._replace(num_tokens_per_expert=counts), dout).values(), wanted.values())


@each_form
@pytest.mark.parametrize(("groups", "hidden", "inner"), [((13,), 128, 128), ((5, 0, 8), 256, 128)])
def test_results_share_no_memory(form, groups, hidden, inner):
    """Not with the operands, nor with each other; with one expert and one block, too, whose transpose is itself."""
    t = operands(form, groups, 0, hidden, inner)
    dout = inputs.cotangent(t)
    s = step(t)
    halves = moe_experts_fp8_backward_data(dout, *s.data)
    grads = moe_experts_fp8_backward(dout, *s.joint, form == "packed")
    whole = torch.ops.moe_experts.moe_experts_fp8_forward(*t, True)
    without = torch.ops.moe_experts.moe_experts_fp8_forward(*t, False)
    every = [*t.leaves, t[4], dout, s.out, *s.weights, *s.kept, *halves, *grads, *whole, *without]
    pointers = [v.untyped_storage().data_ptr() for v in every if v.numel()]
    assert len(set(pointers)) == len(pointers)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(form, dtype):
    t = operands(form, limit=1.0)
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout), results(t, dout)
    with torch.autocast("cpu", dtype):
        same(gradients(t, dout), wanted[0])
        same(results(t, dout).values(), wanted[1].values())
        with pytest.raises(ValueError, match=r"^x must have dtype bfloat16, got float32"):
            call(t.x.float(), *t[1:])


def test_other_default_device_and_dtype():
    t = operands(limit=1.0)
    dout = inputs.cotangent(t)
    wanted = gradients(t, dout)
    with other_defaults():
        found = gradients(t, dout)
    same(found, wanted)


def test_repeats_deterministic_algorithms_and_the_reference_context_change_nothing():
    t = operands()
    dout = inputs.cotangent(t)
    first = repeat_bytes(lambda: tuple(results(t, dout).values()), n=3)
    with use_definition():
        same(results(t, dout).values(), first)
    with deterministic_algorithms():
        same(results(t, dout).values(), first)


def test_inference_mode():
    t = operands()
    dout = inputs.cotangent(t)
    wanted = results(t, dout)
    with torch.inference_mode():
        same(results(t, dout).values(), wanted.values())
        assert_same_bytes(call(*t), wanted["out"])


def test_group_sizes_are_read_on_a_cpu():
    t = operands("separate", (5, 4, 5), 0)
    dout = inputs.cotangent(t)
    s = step(t)
    _, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    for sizes, message in (([5, -1, 3], "must not be negative"), ([5, 5, 5], "must add up to at most the 14 rows")):
        bad = s._replace(t=t._replace(num_tokens_per_expert=torch.tensor(sizes)))
        dw13, dw2 = s.sums(7.0)
        calls = [
            lambda bad=bad: call(*bad.t),
            lambda bad=bad: call(*bad.t.requires_grad()),
            lambda bad=bad: moe_experts_fp8_forward_quantized(t.x, bad.t[4], 10.0, *s.weights[:4]),
            lambda bad=bad: moe_experts_fp8_backward(dout, *bad.joint, False),
            lambda bad=bad: moe_experts_fp8_backward_data(dout, *bad.data),
            lambda bad=bad, sums=(dw13, dw2): moe_experts_fp8_weight_grad_accumulate(
                *bad.second_half(columns), *sums, accumulate=False
            ),
        ]
        for one in calls:
            with pytest.raises(ValueError, match=f"^num_tokens_per_expert {message}"):
                one()
        assert dw13.eq(7).all()
        assert dw2.eq(7).all()


def test_unsupported_shape_reason_is_what_the_call_does():
    for hidden, inner in itertools.product((0, 64, 128, 136, 256), repeat=2):
        x = torch.ones(2, hidden).bfloat16()
        gate, up = (torch.ones(2, inner, hidden).bfloat16() for _ in range(2))
        down = torch.ones(2, hidden, inner).bfloat16()
        reason = unsupported_shape_reason(hidden, inner, fp8=True)
        assert (reason is None) == (hidden in (128, 256) and inner in (128, 256))
        for function in (
            lambda t=(x, gate, up, down): moe_experts(*t, torch.tensor([1, 1]), 10.0, fp8=True),
            lambda t=(gate, up, down): moe_experts_fp8_quantize_weights(*t),
        ):
            with nullcontext() if reason is None else pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                function()


@pytest.mark.parametrize("found", [None, "moe_experts requires SM90, found no CUDA device"])
def test_why_the_kernels_cannot_run(found, monkeypatch):
    """What the package as a whole lacks: FP8 needs nothing else."""
    monkeypatch.setattr(registry, "unavailable_reason", lambda name: found if name == "moe_experts" else "another")
    assert fp8_unavailable_reason() == found


@pytest.mark.parametrize(("name", "most"), [("hidden_size", 16384), ("intermediate_size", 8192)])
def test_the_largest_sizes(name, most):
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    assert unsupported_shape_reason(**{**sizes, name: most}, fp8=True) is None
    reason = unsupported_shape_reason(**{**sizes, name: most + 128}, fp8=True)
    assert reason.startswith(f"{name} must be at most {most} with fp8, got hidden_size ")
    assert unsupported_shape_reason(**{**sizes, name: most + 128}) is None


def test_everything_public_is_there():
    for name in package.__all__:
        assert getattr(package, name) is not None
    names = {name for name in package.__all__ if "fp8" in name.lower()}
    assert len(names) == 9
    assert {n for n in names if n.startswith("moe_")} <= {n.partition("::")[2] for n in operators_of_the_package()}


def operators_of_the_package():
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("moe_experts::")}


def test_the_example_of_the_readme_runs():
    """A trainer's step: two micro-batches, gradients of the weights summed in fp32."""
    text = (Path(__file__).parents[2] / "packages/moe-experts/README.md").read_text()
    example, other = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    exec(compile(other, "README.md", "exec"), scope)
    dw13, dw2 = scope["dw13"], scope["dw2"]
    assert dw13[0].any()
    assert dw2[0].any()
    assert not dw13[1].any()  # without rows in both
