"""opcheck, FakeTensors and torch.compile of the FP8 path: what a traced call promises is what a real one returns."""

import math

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
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, each_shape, operands, step
from tests.moe_experts.on_cpu import each_form
from tests.moe_experts.test_tracing import assert_compiled_like_eager, fp8_layer, halves, in_place_leaves, small
from tests.support.compare import assert_same_bytes
from tests.support.tracing import assert_fake_like_real, fresh_compiler

OPERATORS = torch.ops.moe_experts
UTILITIES = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def calls(t):
    """The operators with all arguments, and with other strides."""
    dout = inputs.cotangent(t).nan_to_num()
    other = dout.t().contiguous().t()
    s, packed = step(t), t.up_proj is None
    wide = [torch.zeros(v.shape[0], v.shape[1] + 1, v.shape[2] + 4)[:, 1:, :-4] for v in s.sums()]
    _, *columns = OPERATORS.moe_experts_fp8_backward_data(dout, *s.data)
    second = s.second_half(columns)
    backward, accumulate = OPERATORS.moe_experts_fp8_backward, OPERATORS.moe_experts_fp8_backward_accumulate
    used = torch.tensor(False)
    return [
        (OPERATORS.moe_experts_fp8_quantize_weights, t[1:4]),
        (OPERATORS.moe_experts_fp8_quantize_weights, halves(t)[1:4]),
        (OPERATORS.moe_experts_fp8_forward, (*t, True)),
        (OPERATORS.moe_experts_fp8_forward, (*t, False)),
        (OPERATORS.moe_experts_fp8_forward, (*halves(t)[:5], math.inf, True)),
        (OPERATORS.moe_experts_fp8_forward_quantized, (t.x, t[4], 1.0, *s.weights[:4])),
        (backward, (dout, *s.joint, packed)),
        (backward, (other, *s.joint, packed, False, True, False, True, used)),
        (backward, (dout, *s.joint, packed, True, False, True, False, None)),
        (OPERATORS.moe_experts_fp8_backward_data, (dout, *s.data)),
        (OPERATORS.moe_experts_fp8_backward_data, (other, *s.data)),
        (accumulate, (dout, *s.joint, *s.sums())),
        (accumulate, (other, *s.joint, *wide, False)),
        (OPERATORS.moe_experts_fp8_weight_grad_accumulate, (*second, *s.sums())),
        (OPERATORS.moe_experts_fp8_weight_grad_accumulate, (*second, *wide, False)),
    ]


@pytest.mark.parametrize(
    ("form", "groups", "tail"),
    [("separate", (4, 0, 5), 2), ("packed", (130,), 0), ("packed", (0, 0), 0)],
    ids=str,
)
def test_opcheck(form, groups, tail):
    """Its test_schema cannot compare tensors of FP8."""
    for operator, arguments in calls(small("fp8", form, groups, tail)):
        opcheck(operator.default, tuple(arguments), test_utils=UTILITIES)


@each_form
def test_opcheck_with_gradients(form):
    """Its test_aot_dispatch_dynamic adds up all results, and those of FP8 cannot be."""
    t = small("fp8", form)
    for strided in (t, halves(t)):
        leaves = in_place_leaves(strided)
        for operator, arguments in calls(leaves)[:5]:
            opcheck(operator.default, tuple(arguments), test_utils=("test_faketensor", "test_autograd_registration"))


@each_form
@each_shape
def test_fake_operators_promise_what_real_ones_return(form, groups, tail, hidden, inner):
    t = operands(form, groups, tail, hidden, inner, limit=1.0)
    for operator, arguments in calls(t):
        _, real = assert_fake_like_real(operator, arguments)
        assert all(r.is_contiguous() for r in real)


def test_fake_cuda_tensors_without_a_gpu():
    """No data is read: group sizes that cannot be are not seen, nor are addresses."""
    with FakeTensorMode():
        t = operands()
        t = t._replace(**{n: v.to("cuda") for n, v in zip(t._fields, t, strict=True) if isinstance(v, torch.Tensor)})
        t = t._replace(num_tokens_per_expert=torch.full((3,), -1, device="cuda"))
        s = step(t)
        dout = torch.empty_like(t.x)
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        sums = [v.to("cuda") for v in s.sums()]
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *sums)
        joint = moe_experts_fp8_backward_accumulate(dout, *s.joint, *sums)
        grads = moe_experts_fp8_backward(dout, *s.joint, False)
        out = call(*t)
    every = [*s.weights, s.out, *s.kept, dx, *columns, joint, *grads, out]
    assert {v.device.type for v in every} == {"cuda"}
    assert s.kept[1].shape == (padded_rows(144, 3) * 256,)


def test_compiled_with_and_without_gradients():
    """One compiled function in both modes: the graph of each keeps what its own mode needs."""
    t = small("fp8")
    compiled = torch.compile(fp8_layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bytes(compiled(*t.requires_grad()), fp8_layer(*t))
    assert_compiled_like_eager(compiled, fp8_layer, t)
    assert_same_bytes(compiled(*t), fp8_layer(*t))


def split_step(dout, x, counts, dw13, dw2, *weights):
    """A micro-batch with cached weights, its backward in halves, into buffers."""
    out, gate_up, x_t, x_t_sf = moe_experts_fp8_forward_quantized(x, counts, 1.0, *weights[:4])
    dx, *columns = moe_experts_fp8_backward_data(dout, counts, gate_up, *weights[4:], 1.0)
    moe_experts_fp8_weight_grad_accumulate(counts, *columns, x_t, x_t_sf, x.shape[0], dw13, dw2)
    return out, dx


def joint_step(dout, x, counts, dw13, dw2, *weights):
    out, gate_up, x_t, x_t_sf = moe_experts_fp8_forward_quantized(x, counts, 1.0, *weights[:4])
    kept = gate_up, x_t, x_t_sf, *weights[4:]
    return out, moe_experts_fp8_backward_accumulate(dout, counts, *kept, 1.0, dw13, dw2)


@pytest.mark.parametrize("function", [split_step, joint_step])
def test_compiled_steps_into_a_flat_buffer(function):
    """Parts of one buffer are changed once in each call, and their neighbours not; another M compiles nothing."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    first = small("fp8")
    weights = moe_experts_fp8_quantize_weights(*first[1:4])
    experts, hidden, inner = first.down_proj.shape
    sizes = [8, experts * 2 * inner * hidden, 4, experts * hidden * inner, 12]
    buffers = [torch.randn(sum(sizes)) for _ in range(2)]
    buffers[1].copy_(buffers[0])
    for groups, tail in (((4, 0, 5), 2), ((130, 3, 1), 0), ((0, 9, 2), 3)):
        t = small("fp8", "separate", groups, tail)
        dout, found = inputs.cotangent(t), []
        for one, buffer in zip((compiled, function), buffers, strict=True):
            _, dw13, _, dw2, _ = buffer.split(sizes)
            sums = dw13.view(experts, 2 * inner, hidden), dw2.view(experts, hidden, inner)
            found.append(one(dout, t.x, t[4], *sums, *weights))
        for got, want in zip(*found, strict=True):
            assert_same_bytes(got, want)
        assert_same_bytes(*buffers)
    assert counter.frame_count == 1


def test_quantising_compiles():
    t = small("fp8")
    compiled = torch.compile(moe_experts_fp8_quantize_weights, fullgraph=True, backend="aot_eager")
    for form in (t, t.packed(), halves(t)):
        for got, want in zip(compiled(*form[1:4]), moe_experts_fp8_quantize_weights(*form[1:4]), strict=True):
            assert_same_bytes(got, want)
