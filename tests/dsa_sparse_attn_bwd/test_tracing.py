"""opcheck, FakeTensors and torch.compile: what a traced call promises is what a real one returns."""

import functools

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, reference, sparse_attn_backward_flat
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tests.dsa_sparse_attn_bwd import inputs
from tests.dsa_sparse_attn_bwd.inputs import NAMES, assert_near, assert_same
from tests.support.checkpoints import saving
from tests.support.compare import assert_same_bytes, error64
from tests.support.tracing import UTILITIES, facts, facts_of_elements, fresh_compiler

OPERATOR = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward
SHAPES = [(5, 9, 7), (1, 1, 1), (4, 0, 3), (3, 4, 0), (0, 3, 5), (2, 2, 2)]  # queries, slots, rows
FORMS = ("batched", "flat")
each_form = pytest.mark.parametrize("form", FORMS)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def strided(t):
    return t.each(inputs.STRIDES["last axis outermost"])


def with_sinks(t, dtype):
    return t._replace(sinks=t.sinks.to(dtype))


def function_of(form):
    return sparse_attn_backward_flat if form == "flat" else dsa_sparse_attn_backward


def arguments_of(form, t):
    return t.flat() if form == "flat" else t.batched()


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_opcheck(shape):
    opcheck(OPERATOR.default, tuple(inputs.small(*shape).batched().values()), test_utils=UTILITIES)


def test_opcheck_of_other_operands():
    """A tail, other strides and dtypes, the deterministic mode."""
    t = inputs.with_tail(inputs.small(3, 3, 3), 64, left=0.0)
    wide = with_sinks(t._replace(indices=t.indices.long()), torch.float64)
    for call in (strided(t), wide):
        opcheck(OPERATOR.default, (*call.batched().values(), True), test_utils=UTILITIES)


def test_opcheck_of_operands_that_require_grad():
    """But for the backward, which there is none of."""
    t = inputs.small(3, 3, 3)
    t = t._replace(**{name: getattr(t, name).requires_grad_() for name in ("q", "kv", "sinks")})
    utilities = [one for one in UTILITIES if one != "test_aot_dispatch_dynamic"]
    opcheck(OPERATOR.default, tuple(t.batched().values()), test_utils=utilities)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_fake_calls_promise_what_real_ones_return(form, dtype):
    for shape in SHAPES:
        t = with_sinks(inputs.with_tail(inputs.small(*shape), 16), dtype)
        for call in (t, strided(t)):
            real = function_of(form)(**arguments_of(form, call))
            mode = FakeTensorMode()
            with mode:
                fake = function_of(form)(**arguments_of(form, call.each(mode.from_tensor)))
            assert [facts_of_elements(f) for f in fake] == [facts_of_elements(r) for r in real]
            assert all(f.device.type == "cpu" for f in fake)


@each_form
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_without_a_gpu(form, device):
    t = inputs.with_tail(inputs.small(), 64)
    function, real = function_of(form), function_of(form)(**arguments_of(form, t))
    with FakeTensorMode():
        fake = function(**arguments_of(form, t.each(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device))))
    assert [facts(f)[:-1] for f in fake] == [facts(r)[:-1] for r in real]
    assert all(f.device.type == device for f in fake)
    if device == "meta":
        meta = function(**arguments_of(form, t.each(lambda x: x.to("meta"))))
        assert [facts(m)[:-1] for m in meta] == [facts(r)[:-1] for r in real]


def test_export_with_symbolic_sizes():
    """One graph for any number of queries, slots and rows."""

    class Layer(torch.nn.Module):
        def forward(self, q, kv, out, grad_out, lse, indices, sinks):
            return sparse_attn_backward_flat(q, kv, out, grad_out, lse, indices, sinks, 0.05)

    tensors = list(inputs.small().flat().values())[:7]
    queries, slots, rows = (torch.export.Dim(name, min=2) for name in ("queries", "slots", "rows"))
    sizes = [{0: queries}, {0: rows}, *[{0: queries}] * 3, {0: queries, 1: slots}, None]
    exported = torch.export.export(Layer(), tuple(tensors), dynamic_shapes=sizes)
    for shape in ((5, 9, 7), (2, 3, 9), (4, 2, 2)):
        tensors = list(inputs.small(*shape).flat().values())[:7]
        assert_same(exported.module()(*tensors), Layer()(*tensors))


def around(form, **arguments):
    """As a layer calls it: on intermediates, with work around it and a scale that is always the same."""
    arguments["q"] = arguments["q"] * 2
    arguments["indices"] = arguments["indices"] + 1
    arguments["sm_scale"] = 0.05
    dq, dkv, dsinks = function_of(form)(**arguments)
    return dq / 2, dkv + 1, dsinks


def assert_compiled_like_eager(compiled, function, arguments):
    assert_same(compiled(**arguments), function(**arguments))


def without_scale(form, t):
    """A number that is given to a compiled function is taken for one that changes."""
    arguments = arguments_of(form, t)
    del arguments["sm_scale"]
    return arguments


@pytest.mark.parametrize(
    ("form", "tail", "dynamic"),
    [("batched", None, None), ("batched", 64, None), ("flat", None, None), ("flat", 64, True)],
)
def test_sizes_compile_twice_at_most(form, tail, dynamic):
    """The first sizes, then dynamic ones: of queries, slots and rows. With dynamic=True once."""
    counter, compilations = CompileCounterWithBackend("aot_eager"), []
    function = functools.partial(around, form)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=dynamic)
    for shape in ((5, 9, 7), (4, 8, 6), (2, 3, 9), (3, 7, 2), (5, 2, 4)):
        t = inputs.small(*shape)
        t = t if tail is None else inputs.with_tail(t, tail)
        assert_compiled_like_eager(compiled, function, without_scale(form, t))
        compilations.append(counter.frame_count)
    assert compilations == ([1] * 5 if dynamic else [1] + [2] * 4)


@pytest.mark.parametrize("what", [0, 1, 2], ids=["queries", "slots", "rows"])
def test_none_of_them_and_one(what):
    """PyTorch itself specialises sizes 0 and 1."""
    counter = CompileCounterWithBackend("aot_eager")
    function = functools.partial(around, "batched")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for size in (4, 5, 0, 1, 0, 1, 3):
        shape = [5, 9, 7]
        shape[what] = size
        assert_compiled_like_eager(compiled, function, without_scale("batched", inputs.small(*shape)))
    assert counter.frame_count <= 4


@each_form
@pytest.mark.parametrize("backend", ["aot_eager", "aot_eager_decomp_partition"])
def test_strided_operands_compile(form, backend):
    """An expanded gradient too; with the partitioner of the default backend."""
    t = strided(inputs.with_tail(inputs.small(), 64))
    t = t._replace(grad_out=t.grad_out[:, :1].expand(t.q.shape))
    compiled = torch.compile(function_of(form), fullgraph=True, backend=backend)
    assert_compiled_like_eager(compiled, function_of(form), arguments_of(form, t))


class Attention(torch.autograd.Function):
    """As trainers use the operator: the forward by another library, whose output is overwritten when it is saved."""

    @staticmethod
    def forward(ctx, q, kv, sinks, indices, scale):
        out, lse = inputs.forward(*(t.float() for t in (q, kv)), indices, sinks, scale)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, lse, indices, sinks, out[..., -64:].clone())
        ctx.scale = scale
        return out.clone()

    @staticmethod
    def backward(ctx, grad_out):
        q, kv, out, lse, indices, sinks, tail = ctx.saved_tensors
        dq, dkv, dsinks = dsa_sparse_attn_backward(
            grad_out[None],
            q[None],
            kv[None, :, None],
            torch.cat([out[..., :-64], -tail], dim=-1)[None],
            lse[None],
            indices[None, :, None],
            sinks,
            ctx.scale,
            tail[None],
        )
        return dq[0], dkv[0, :, 0], dsinks, None, None


def layer(q, kv, sinks, indices):
    """Its gradient is expanded from one number, as that of a sum is."""
    return Attention.apply(q * 1.5, kv + 0.5, sinks * 2, indices, 0.05).float().sum()


def leaves_of(t):
    return tuple(x.detach().clone().requires_grad_() for x in (t.q, t.kv, t.sinks))


def grads_of(function, t):
    leaves = leaves_of(t)
    function(*leaves, t.indices).backward()
    return tuple(leaf.grad for leaf in leaves)


def test_in_the_backward_of_a_function():
    """The gradients are those of autograd in float64 through the plain forward."""
    t = inputs.small()
    found = grads_of(layer, t)
    q, kv, sinks = (x.double() for x in leaves_of(t))
    rounded = [(q * 1.5).bfloat16().double(), (kv + 0.5).bfloat16().double(), sinks * 2]
    grads = torch.autograd.grad(inputs.forward(*rounded[:2], t.indices, rounded[2], 0.05)[0].sum(), rounded)
    for name, got, exact, factor in zip(NAMES, found, grads, (1.5, 1, 2), strict=True):
        assert error64(got, factor * exact) < 2e-2, name


def test_compiled_in_the_backward_of_a_function():
    """In a whole graph, with sizes that change."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for shape in ((5, 9, 7), (4, 8, 6), (3, 5, 4)):
        t = inputs.small(*shape)
        assert_near(grads_of(compiled, t), grads_of(layer, t))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(("compiled", "use_reentrant"), [(False, False), (False, True), (True, False)])
def test_under_a_checkpoint(compiled, use_reentrant):
    def call(*operands):
        return checkpoint(layer, *operands, use_reentrant=use_reentrant)

    t = inputs.small()
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_near(grads_of(call, t), grads_of(layer, t))


@pytest.mark.parametrize("compiled", [False, True])
def test_under_a_selective_checkpoint(compiled, monkeypatch):
    """Whose policy names the operator: one call in the backward, none when the forward is made again."""
    calls, right = [], reference.backward
    monkeypatch.setattr(reference, "backward", lambda *given: calls.append(1) or right(*given))
    contexts = saving("aten::bmm", "dsa_sparse_attn_bwd::dsa_sparse_attn_backward")

    def call(*operands):
        return checkpoint(layer, *operands, use_reentrant=False, context_fn=contexts)

    t = inputs.small()
    wanted = grads_of(layer, t)
    assert len(calls) == 1
    if compiled:
        call = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_near(grads_of(call, t), wanted)
    assert len(calls) == 2


@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(listed, monkeypatch):
    """Inside the checkpointed part itself, its results saved, it does not run again."""
    calls, right = [], reference.backward
    monkeypatch.setattr(reference, "backward", lambda *given: calls.append(1) or right(*given))
    contexts = saving(*(["dsa_sparse_attn_bwd::dsa_sparse_attn_backward"] if listed else []))

    def scaled(x, arguments):
        dq, _, _ = dsa_sparse_attn_backward(**arguments)
        return (dq.float() * x * x).sum()

    arguments, grads = inputs.small().batched(), []
    for call in (scaled, lambda *given: checkpoint(scaled, *given, use_reentrant=False, context_fn=contexts)):
        calls.clear()
        x = torch.ones(arguments["q"].shape, requires_grad=True)
        call(x, arguments).backward()
        grads.append(x.grad)
    assert len(calls) == (1 if listed else 2)
    assert_same_bytes(grads[1], grads[0])


def test_compiled_with_operands_that_require_grad():
    """Of a call outside of a backward, whose results are not differentiated."""

    def step(x, **arguments):
        dq, *rest = dsa_sparse_attn_backward(**arguments)
        return dq.detach(), *(r.detach() for r in rest), x * 2

    arguments = inputs.small().batched()
    wanted = dsa_sparse_attn_backward(**arguments)
    arguments["q"] = arguments["q"].clone().requires_grad_()
    x = torch.randn(3, requires_grad=True)
    *found, doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(x, **arguments)
    assert_same(tuple(found), wanted)
    doubled.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    assert not any(isinstance(f, Tensor) and f.requires_grad for f in found)
