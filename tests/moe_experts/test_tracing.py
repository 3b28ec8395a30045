"""opcheck, FakeTensors and torch.compile: what a traced call promises is what a real one returns; FP8 where alike."""

import math

import pytest
import torch
from moe_experts import (
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tests.moe_experts import inputs, on_cpu
from tests.moe_experts.on_cpu import each_form
from tests.support.compare import assert_same_bytes
from tests.support.tracing import UTILITIES, assert_fake_like_real, fresh_compiler

OPERATORS = torch.ops.moe_experts
# path: (H, I) of small operands
WIDTHS = {"bf16": (16, 24), "fp8": (128, 128)}
each_path = pytest.mark.parametrize("path", WIDTHS)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def operands(form, groups=(4, 0, 5), tail=2, hidden=16, inner=24, limit=1.0):
    """Zeros in the tail: opcheck compares results, in which NaN is not equal to itself."""
    t = on_cpu.operands(form, groups, tail, hidden, inner, limit=limit)
    t.x[t.owned :] = 0
    return t


def small(path, form="separate", groups=(4, 0, 5), tail=2):
    return operands(form, groups, tail, *WIDTHS[path])


def halves(t):
    """Gate and up as halves of one tensor, experts as a slice, group sizes with a stride."""
    if t.up_proj is not None:
        packed = torch.cat((t.gate_proj, t.up_proj), dim=1)
        gate, up = packed.chunk(2, dim=1)
        t = t._replace(gate_proj=gate, up_proj=up)
    down = torch.cat((t.down_proj[:1], t.down_proj))[1:]
    return t._replace(down_proj=down, num_tokens_per_expert=t[4].int().repeat_interleave(2)[::2])


def in_place_leaves(t):
    """The same memory and strides, as leaves that require grad."""
    return t._replace(**{n: getattr(t, n).detach().requires_grad_() for n in on_cpu.names_of(t)})


def calls(t):
    """The operators with all arguments, and with other strides."""
    dout = inputs.cotangent(t).nan_to_num()
    _, gate, up, used = OPERATORS.moe_experts_forward(*t)
    saved = *t[:5], gate, up, t.swiglu_limit
    data = OPERATORS.moe_experts_backward_data(dout, *t[1:5], gate, up, 1.0)
    strided = dout.t().contiguous().t()
    backward, weight_grad = OPERATORS.moe_experts_backward.default, OPERATORS.moe_experts_weight_grad.default
    return [
        (OPERATORS.moe_experts_forward.default, tuple(t)),
        (OPERATORS.moe_experts_forward.default, (*halves(t)[:5], math.inf)),
        (backward, (dout, *saved)),
        (backward, (strided, *halves(t)[:5], *saved[5:])),
        (backward, (dout, *saved, False, True, False, True, used)),
        (backward, (dout, *saved, True, False, True, False, used)),
        (backward, (dout, *saved, True, False, False, False, None)),
        (OPERATORS.moe_experts_backward_data.default, (dout, *saved[1:])),
        (OPERATORS.moe_experts_backward_data.default, (strided, *halves(t)[1:5], *saved[5:])),
        (weight_grad, (dout, t.x, t[4], *data[1:], t.up_proj is None)),
        (weight_grad, (strided, t.x, t[4].int(), *data[1:], t.up_proj is None)),
    ]


@pytest.mark.parametrize(
    ("form", "groups", "tail"),
    [
        ("separate", (4, 0, 5), 2),
        ("packed", (4, 0, 5), 2),
        ("packed", (3,), 0),
        ("separate", (1,), 0),
        ("separate", (0, 0), 0),
        ("packed", (0, 0), 3),
    ],
    ids=str,
)
def test_opcheck(form, groups, tail):
    for operator, arguments in calls(operands(form, groups, tail)):
        opcheck(operator, arguments, test_utils=UTILITIES)


@each_form
def test_opcheck_with_gradients(form):
    t = operands(form)
    for strided in (t, halves(t)):
        opcheck(OPERATORS.moe_experts_forward.default, tuple(in_place_leaves(strided)), test_utils=UTILITIES)
    opcheck(OPERATORS.moe_experts_forward.default, tuple(t.requires_grad("down_proj")), test_utils=UTILITIES)


@each_form
@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
def test_fake_operators_promise_what_real_ones_return(form, groups, tail, hidden, inner):
    for operator, arguments in calls(operands(form, groups, tail, hidden, inner)):
        _, real = assert_fake_like_real(operator, arguments)
        assert all(r.is_contiguous() for r in real)


def test_fake_cuda_tensors_without_a_gpu():
    """No data is read: group sizes that cannot be are not seen."""
    with FakeTensorMode():
        t = inputs.operands()
        t = t._replace(**{n: v.to("cuda") for n, v in zip(t._fields, t, strict=True) if isinstance(v, torch.Tensor)})
        counts = torch.full((3,), -1, device="cuda")
        out, gate, up = moe_experts_forward(*t._replace(num_tokens_per_expert=counts))
        grads = moe_experts_backward(torch.empty_like(out), *t[:5], gate, up, 10.0)
    assert {v.device.type for v in (out, gate, up, *grads)} == {"cuda"}
    assert [tuple(v.shape) for v in (out, gate, up)] == [(50, 64), (50, 40), (50, 40)]
    assert [tuple(g.shape) for g in grads] == [(50, 64), (3, 40, 64), (3, 40, 64), (3, 64, 40)]


def layer(*t):
    """As a model calls it: on intermediate rows, with work around it."""
    x, *rest = t
    return moe_experts(x * 2, *rest) + 1


def fp8_layer(*t):
    x, *rest = t
    return moe_experts(x * 2, *rest, fp8=True) + 1


LAYERS = {"bf16": layer, "fp8": fp8_layer}


def gradients(function, t):
    leaves = t.requires_grad()
    out = function(*leaves)
    torch.manual_seed(0)
    return [out.detach(), *torch.autograd.grad(out, leaves.leaves, torch.randn(out.shape).bfloat16())]


def assert_compiled_like_eager(compiled, function, t):
    for got, want in zip(gradients(compiled, t), gradients(function, t), strict=True):
        assert_same_bytes(got, want)


# path: (sizes of the groups, rows past the last) of one call after another
CALLS_IN_TURN = {
    "bf16": [
        ((4, 0, 5), 2), ((4, 1, 5), 2), ((0, 0, 2), 0), ((60, 40, 30), 0), ((0, 0, 0), 64), ((9, 9, 9), 50),
        ((0, 0, 0), 0), ((0, 1, 0), 0), ((0, 0, 0), 0), ((7, 7, 7), 0),
    ],
    "fp8": [
        ((4, 0, 5), 2), ((4, 1, 5), 2), ((0, 0, 2), 0), ((130, 40, 30), 0), ((0, 0, 0), 64), ((128, 0, 0), 128),
        ((0, 0, 0), 0), ((0, 1, 0), 0), ((7, 7, 7), 0),
    ],
}  # fmt: skip


@each_path
@each_form
@pytest.mark.parametrize("dynamic", [None, True])
def test_row_counts_compile_twice_at_most(path, form, dynamic):
    """The first count, then a dynamic one; with dynamic=True once. PyTorch itself specialises 0 and 1."""
    counter, compilations = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(LAYERS[path], fullgraph=True, backend=counter, dynamic=dynamic)
    for groups, tail in CALLS_IN_TURN[path]:
        assert_compiled_like_eager(compiled, LAYERS[path], small(path, form, groups, tail))
        compilations.append(counter.frame_count)
    first = compilations[0]
    assert compilations[1:6] == [first if dynamic else first + 1] * 5
    assert compilations[-1] <= compilations[5] + 2


def test_other_routings_of_as_many_rows_compile_nothing():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for groups in ((4, 0, 5), (9, 0, 0), (0, 0, 9), (3, 3, 3), (0, 0, 0)):
        assert_compiled_like_eager(compiled, layer, operands("separate", groups, 11 - sum(groups)))
    assert counter.frame_count == 1


@each_path
@each_form
@pytest.mark.parametrize("names", [("x",), ("down_proj",), ("x", "gate_proj")], ids=str)
def test_compiled_with_frozen_operands(path, form, names):
    t = small(path, form)
    compiled = torch.compile(LAYERS[path], fullgraph=True, backend="aot_eager")
    grads = []
    for function in (compiled, LAYERS[path]):
        leaves = t.requires_grad(*names)
        function(*leaves).float().square().sum().backward()
        grads.append([leaf.grad for leaf in leaves.leaves])
    for got, want in zip(*grads, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.equal(got, want)


@each_path
@each_form
def test_compiled_with_the_partitioner_of_the_default_backend(path, form):
    """It chooses what is saved and what is recomputed."""
    compiled = torch.compile(LAYERS[path], fullgraph=True, backend="aot_eager_decomp_partition")
    assert_compiled_like_eager(compiled, LAYERS[path], small(path, form))


@each_form
def test_a_compiled_step_with_the_backward_in_halves(form):
    """The forward and the halves of the backward in one graph."""

    def step(dout, x, gate_proj, up_proj, down_proj, counts):
        out, gate, up = moe_experts_forward(x, gate_proj, up_proj, down_proj, counts, 1.0)
        dx, dgate_dup, h = moe_experts_backward_data(dout, gate_proj, up_proj, down_proj, counts, gate, up, 1.0)
        return out, dx, *moe_experts_weight_grad(dout, x, counts, dgate_dup, h, up_proj is None)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for groups in ((4, 0, 5), (8, 3, 1)):
        t = operands(form, groups)
        dout = inputs.cotangent(t)
        for got, want in zip(compiled(dout, *t[:5]), step(dout, *t[:5]), strict=True):
            assert_same_bytes(got, want)


def test_strided_weights_compile():
    t = halves(operands("separate"))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bytes(compiled(*t), layer(*t))


@each_path
def test_limits_may_change(path):
    """Floats that Dynamo made symbolic pass the checks."""
    compiled = torch.compile(LAYERS[path], fullgraph=True, backend="aot_eager", dynamic=True)
    t = small(path)
    for limit in (1.0, 0.25, 7.0, math.inf):
        assert_same_bytes(compiled(*t[:5], limit), LAYERS[path](*t[:5], limit))


@each_path
def test_compiled_checkpoint(path):
    def recomputed(*t):
        return checkpoint(LAYERS[path], *t, use_reentrant=False)

    compiled = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    assert_compiled_like_eager(compiled, LAYERS[path], small(path))


@each_path
def test_wrong_arguments_raise_while_tracing(path):
    t = small(path)
    compiled = torch.compile(LAYERS[path], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="x must have dtype bfloat16, got float32"):
        compiled(t.x.float(), *t[1:])


def test_traced_with_symbolic_sizes_after_functionalization():
    """There tensors are no subclass and have sizes that cannot be hashed."""
    t, other = operands("separate"), operands("separate", (9, 1, 2))
    f = torch.func.functionalize(lambda *a: moe_experts(*a, 1.0))
    graph = make_fx(f, tracing_mode="symbolic")(*t[:5])
    assert torch.equal(graph(*other[:5]), moe_experts(*other[:5], 1.0))
