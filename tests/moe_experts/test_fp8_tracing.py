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
from torch.utils.checkpoint import checkpoint

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, each_shape, operands, step
from tests.moe_experts.on_cpu import each_form
from tests.moe_experts.test_tracing import fresh_compiler, halves
from tests.support.compare import assert_same_bytes

OPERATORS = torch.ops.moe_experts
UTILITIES = ("test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")
assert fresh_compiler  # a fixture


def small(form="separate", groups=(4, 0, 5), tail=2, limit=1.0):
    """Zeros in the tail: opcheck compares results, in which NaN is not equal to itself."""
    t = operands(form, groups, tail, 128, 128, limit=limit)
    t.x[t.owned :] = 0
    return t


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
    for operator, arguments in calls(small(form, groups, tail)):
        opcheck(operator.default, tuple(arguments), test_utils=UTILITIES)


@each_form
def test_opcheck_with_gradients(form):
    """Its test_aot_dispatch_dynamic adds up all results, and those of FP8 cannot be."""
    t = small(form)
    for strided in (t, halves(t)):
        leaves = strided._replace(
            **{n: getattr(strided, n).detach().requires_grad_() for n in t._fields[:4] if getattr(t, n) is not None}
        )
        for operator, arguments in calls(leaves)[:5]:
            opcheck(operator.default, tuple(arguments), test_utils=("test_faketensor", "test_autograd_registration"))


def facts(t):
    return t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.device.type


def tensors(result):
    return [] if result is None else [result] if isinstance(result, torch.Tensor) else list(result)


@each_form
@each_shape
def test_fake_operators_promise_what_real_ones_return(form, groups, tail, hidden, inner):
    t = operands(form, groups, tail, hidden, inner, limit=1.0)
    for operator, arguments in calls(t):
        mode = FakeTensorMode()
        with mode:
            fake = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
        real = tensors(operator(*arguments))
        assert [facts(f) for f in tensors(fake)] == [facts(r) for r in real]
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


def layer(*t):
    """As a model calls it: on intermediate rows, with work around it."""
    x, *rest = t
    return call(x * 2, *rest) + 1


def gradients(function, t):
    leaves = t.requires_grad()
    out = function(*leaves)
    torch.manual_seed(0)
    return [out.detach(), *torch.autograd.grad(out, leaves.leaves, torch.randn(out.shape).bfloat16())]


def assert_compiled_like_eager(compiled, function, t):
    for got, want in zip(gradients(compiled, t), gradients(function, t), strict=True):
        assert_same_bytes(got, want)


@each_form
@pytest.mark.parametrize("dynamic", [None, True])
def test_row_counts_compile_twice_at_most(form, dynamic):
    """The first count, then a dynamic one; with dynamic=True once. PyTorch itself specialises 0 and 1."""
    counter, compilations = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=dynamic)
    for groups, tail in [
        ((4, 0, 5), 2), ((4, 1, 5), 2), ((0, 0, 2), 0), ((130, 40, 30), 0), ((0, 0, 0), 64), ((128, 0, 0), 128),
        ((0, 0, 0), 0), ((0, 1, 0), 0), ((7, 7, 7), 0),
    ]:  # fmt: skip
        assert_compiled_like_eager(compiled, layer, small(form, groups, tail))
        compilations.append(counter.frame_count)
    first = compilations[0]
    assert compilations[1:6] == [first if dynamic else first + 1] * 5
    assert compilations[-1] <= compilations[5] + 2


@pytest.mark.parametrize("names", [("x",), ("down_proj",), ("x", "gate_proj")], ids=str)
def test_compiled_with_frozen_operands(names):
    t = small()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    grads = []
    for function in (compiled, layer):
        leaves = t.requires_grad(*names)
        function(*leaves).float().square().sum().backward()
        grads.append([leaf.grad for leaf in leaves.leaves])
    for got, want in zip(*grads, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got, want)


def test_compiled_with_and_without_gradients():
    """One compiled function in both modes: the graph of each keeps what its own mode needs."""
    t = small()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_same_bytes(compiled(*t.requires_grad()), layer(*t))
    assert_compiled_like_eager(compiled, layer, t)
    assert_same_bytes(compiled(*t), layer(*t))


def test_compiled_with_the_partitioner_of_the_default_backend():
    """It chooses what is saved and what is recomputed."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_compiled_like_eager(compiled, layer, small())


def test_compiled_checkpoint():
    def recomputed(*t):
        return checkpoint(layer, *t, use_reentrant=False)

    compiled = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    assert_compiled_like_eager(compiled, layer, small())


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
    first = small()
    weights = moe_experts_fp8_quantize_weights(*first[1:4])
    experts, hidden, inner = first.down_proj.shape
    sizes = [8, experts * 2 * inner * hidden, 4, experts * hidden * inner, 12]
    buffers = [torch.randn(sum(sizes)) for _ in range(2)]
    buffers[1].copy_(buffers[0])
    for groups, tail in (((4, 0, 5), 2), ((130, 3, 1), 0), ((0, 9, 2), 3)):
        t = small("separate", groups, tail)
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
    t = small()
    compiled = torch.compile(moe_experts_fp8_quantize_weights, fullgraph=True, backend="aot_eager")
    for form in (t, t.packed(), halves(t)):
        for got, want in zip(compiled(*form[1:4]), moe_experts_fp8_quantize_weights(*form[1:4]), strict=True):
            assert_same_bytes(got, want)


def test_limits_may_change():
    """Floats that Dynamo made symbolic pass the checks."""
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    t = small()
    for limit in (1.0, 0.25, 7.0, math.inf):
        assert_same_bytes(compiled(*t[:5], limit), layer(*t[:5], limit))


def test_wrong_arguments_raise_while_tracing():
    t = small()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="x must have dtype bfloat16, got float32"):
        compiled(t.x.float(), *t[1:])
