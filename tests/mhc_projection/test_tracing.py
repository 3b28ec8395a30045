"""opcheck, FakeTensors and torch.compile: what a traced call promises is what a real one returns."""

import pytest
import torch
from mhc_projection import hyper_connection, hyper_connection_streams, mhc_gates, mhc_projection, mhc_projection_streams
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tests.mhc_projection import inputs
from tests.mhc_projection.inputs import OPTIONS, RMS_EPS
from tests.support.compare import assert_same_bytes
from tests.support.tracing import UTILITIES, assert_fake_like_real, facts, fresh_compiler

OPERATORS = torch.ops.mhc_projection
FUNCTIONS = (hyper_connection, hyper_connection_streams)
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def forward_calls(t):
    """The forward operators with all arguments, without pre_mix, with other strides."""
    *lead, hc, _ = t.x.shape
    mixes = torch.randn(*lead, t.weight.shape[0])
    return [
        (OPERATORS.projection_forward.default, (t.x, t.weight, t.pre_mix, RMS_EPS)),
        (OPERATORS.projection_forward.default, (t.x, t.weight.bfloat16(), None, 1e-6)),
        (OPERATORS.projection_forward.default, (t.x.mT.contiguous().mT, t.weight, t.pre_mix, RMS_EPS)),
        (OPERATORS.hyper_connection_forward.default, (*t, RMS_EPS, 1e-6, 3)),
        (OPERATORS.hyper_connection_forward.default, (*(p.bfloat16() for p in t[:4]), None, 1e-6, 0.0, 1)),
        (
            OPERATORS.hyper_connection_forward.default,
            (
                t.x.mT.contiguous().mT,
                t.weight.t().contiguous().t(),
                *t[2:4],
                t.pre_mix.mT.contiguous().mT,
                0.0,
                0.0,
                2,
            ),
        ),
        (OPERATORS.gates_forward.default, (mixes, t.scale, t.base, hc, 3, 1e-6)),
        (OPERATORS.gates_forward.default, (mixes.mT.contiguous().mT, t.scale.bfloat16(), t.base, hc, 1, 0.0)),
    ]


def backward_calls(t):
    *lead, hc, d = t.x.shape
    g_m, g_c, addend = torch.randn(*lead, t.weight.shape[0]), torch.randn(*lead, d).to(BF16), torch.randn_like(t.x)
    mixes, rstd, _, used = OPERATORS.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    saved = (t.x, t.weight, t.pre_mix, mixes, rstd)
    gates = tuple(torch.randn(*lead, *shape) for shape in ((hc,), (hc,), (hc, hc)))
    backward, gates_backward = OPERATORS.projection_backward.default, OPERATORS.gates_backward.default
    connection_backward = OPERATORS.hyper_connection_backward.default
    by_logit = mixes.flatten(0, -2).t()
    both = (*t, by_logit.clone(memory_format=torch.contiguous_format), rstd)
    return [
        (backward, (*saved, g_m, g_c, addend)),
        (backward, (*saved, g_m, None, None, True, False, True, used)),
        (backward, (*saved, None, g_c, None, False, True, True, used)),
        (backward, (*saved, g_m, g_c, addend.mT.contiguous().mT, True, True, False, None)),
        (backward, (*saved, None, None, addend)),
        (backward, (t.x, t.weight, None, mixes, rstd, g_m, None, None)),
        (connection_backward, (*both, *gates, g_c, addend, 1e-6, 3)),
        (connection_backward, (*both, gates[0], None, None, None, None, 1e-6, 2, True, False, True, used)),
        (connection_backward, (*both, None, None, gates[2], g_c, None, 0.0, 1, False, True, True, used)),
        (connection_backward, (*both, None, None, None, g_c, addend, 0.0, 1, True, True, False, None)),
        (connection_backward, (*both, None, None, None, None, addend, 0.0, 1)),
        (connection_backward, (*t[:4], None, by_logit, rstd, None, gates[1].flip(0), None, None, None, 1e-6, 2)),
        (gates_backward, (mixes, t.scale, t.base, *gates, hc, 3, 1e-6)),
        (gates_backward, (mixes, t.scale, t.base, *(g.flip(0) for g in gates), hc, 1, 0.0, used)),
    ]


@pytest.mark.parametrize(("lead", "hc", "d"), [((5,), 4, 16), ((1,), 2, 8), ((0,), 4, 8), ((2, 3), 4, 8)], ids=str)
def test_opcheck(lead, hc, d):
    t = inputs.operands(0, hc, d, lead=lead)
    for operator, arguments in (*forward_calls(t), *backward_calls(t)):
        opcheck(operator, arguments, test_utils=UTILITIES)


def test_opcheck_with_gradients():
    t = inputs.operands(5, 4, 16)
    for operator, arguments in forward_calls(t.requires_grad()):
        opcheck(operator, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("tokens", [0, 1, 3, 130])
def test_fake_operators_promise_what_real_ones_return(tokens):
    for hc in (1, 2, 4):
        t = inputs.operands(tokens, hc, 16)
        for operator, arguments in (*forward_calls(t), *backward_calls(t)):
            _, real = assert_fake_like_real(operator, arguments)
            given = {a.untyped_storage().data_ptr() for a in arguments if isinstance(a, torch.Tensor) and a.numel()}
            assert not given & {r.untyped_storage().data_ptr() for r in real if r.numel()}
            assert all(r.is_contiguous() for r in real)


@each_function
def test_fake_cuda_tensors_without_a_gpu(function):
    real = function(*inputs.operands(0, lead=(3, 5)), **OPTIONS)
    with FakeTensorMode():
        t = inputs.Operands(*(v.to("cuda") for v in inputs.operands(0, lead=(3, 5))))
        fake = function(*t, **OPTIONS)
    assert [facts(f)[:-1] for f in fake] == [facts(r)[:-1] for r in real]
    assert all(f.device.type == "cuda" for f in fake)


def gradients(function, t, used=None):
    leaves = t.requires_grad()
    results = function(*leaves)
    results = [results[i] for i in used] if used else list(results)
    torch.manual_seed(0)
    cotangents = inputs.cotangents(*results)
    found = torch.autograd.grad(results, leaves, cotangents, allow_unused=True)
    return [r.detach() for r in results], found


def connection(function):
    """As a layer calls it: on intermediate streams, with work around it."""

    def step(x, weight, scale, base, pre_mix):
        results = function(x * 2, weight, scale, base, pre_mix, **OPTIONS)
        return (*results[:3], results[3] + 1, *(streams * 3 for streams in results[4:]))

    return step


def assert_compiled_like_eager(compiled, step, t):
    """Results and gradients bit for bit."""
    for found, wanted in zip(gradients(compiled, t), gradients(step, t), strict=True):
        for got, want in zip(found, wanted, strict=True):
            assert_same_bytes(got, want, strides=False)


@each_function
@pytest.mark.parametrize("dynamic", [None, True])
def test_token_counts_compile_twice_at_most(function, dynamic):
    """The first count, then a dynamic one; with dynamic=True once. PyTorch itself specialises 0 and 1."""
    step, counter, compilations = connection(function), CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in (37, 38, 2, 130, 64, 77, 0, 1, 0, 1, 39):
        assert_compiled_like_eager(compiled, step, inputs.operands(tokens, 4, 16))
        compilations.append(counter.frame_count)
    first = compilations[0]  # with dynamic=True, Dynamo tries twice: it makes floats symbolic, and then does not
    assert compilations[1:6] == [first if dynamic else first + 1] * 5
    assert compilations[-1] <= compilations[5] + 2


@each_function
def test_compiled_with_the_partitioner_of_the_default_backend(function):
    """It chooses what is saved and what is recomputed."""
    step = connection(function)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_compiled_like_eager(compiled, step, inputs.operands(37, 2, 16))


def test_epsilons_and_iterations_may_change():
    """Floats that Dynamo made symbolic pass the checks."""

    def step(x, weight, scale, base, rms_eps, hc_eps, iters):
        return hyper_connection(x, weight, scale, base, rms_eps=rms_eps, hc_eps=hc_eps, sinkhorn_iters=iters)[:3]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    t = inputs.operands(9, 4, 16)
    for options in ((1e-20, 1e-6, 3), (1e-6, 1e-5, 3), (1e-3, 0.0, 2), (1.0, 1e-2, 5)):
        for got, want in zip(compiled(*t[:4], *options), step(*t[:4], *options), strict=True):
            assert_same_bytes(got, want)


@pytest.mark.parametrize("function", [mhc_projection, mhc_projection_streams], ids=lambda f: f.__name__)
def test_compiled_without_pre_mix(function):
    def step(x, weight, *_):
        results = function(x, weight)
        assert results[1] is None
        return (results[0] * 2, *results[2:])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    t = inputs.operands(9, 4, 16)
    for found, wanted in zip(gradients(compiled, t), gradients(step, t), strict=True):
        for got, want in zip(found, wanted, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                assert_same_bytes(got, want, strides=False)


def test_compiled_gates():
    compiled = torch.compile(mhc_gates, fullgraph=True, backend="aot_eager")
    t = inputs.operands(9, 4, 16)
    mixes = torch.randn(3, 5, 24)
    for got, want in zip(
        compiled(mixes, t.scale, t.base, 4, 3, 1e-6), mhc_gates(mixes, t.scale, t.base, 4, 3, 1e-6), strict=True
    ):
        assert_same_bytes(got, want)


@each_function
@pytest.mark.parametrize("used", [(0,), (3,), (0, 3), (2, 1)])
def test_compiled_with_some_results_used(function, used):
    """Inside the graph, so that a missing gradient is missing there too."""

    def step(*t):
        results = function(*t, **OPTIONS)
        return sum(results[i].float().square().sum() for i in used), results[4:]

    t = inputs.operands(9, 4, 16)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (compiled, step):
        leaves = t.requires_grad()
        grads.append(torch.autograd.grad(call(*leaves)[0], leaves, allow_unused=True))
    for got, want in zip(*grads, strict=True):
        # The compiler's graph has a gradient for every input: zeros where eager has none.
        assert torch.equal(torch.zeros_like(got) if want is None else want, got) if got is not None else want is None


@each_function
def test_compiled_checkpoint(function):
    step = connection(function)

    def layer(*t):
        return checkpoint(step, *t, use_reentrant=False)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_compiled_like_eager(compiled, step, inputs.operands(9, 4, 16))


def test_strided_streams_compile():
    step = connection(hyper_connection_streams)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    t = inputs.operands(9, 4, 16)
    for name in ("aligned slice", "streams outermost"):
        x = inputs.STRIDES[name](t.x)
        for got, want in zip(compiled(x, *t[1:]), step(x, *t[1:]), strict=True):
            assert_same_bytes(got, want)


def test_compiled_with_a_gradient_of_the_streams_alone():
    """The compiler fills in zeros for the missing gradients: the same numbers, but -0 becomes +0."""

    def step(*t):
        return hyper_connection_streams(*t, **OPTIONS)[4]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    t = inputs.operands(9, 4, 16).requires_grad("x", "weight")
    addend = torch.tensor([-0.0, 0.0, 1.5, -3.0]).repeat(9 * 16).view(9, 4, 16).to(BF16)
    (grad,) = torch.autograd.grad(compiled(*t), t.x, addend)
    assert_same_bytes(grad, addend + 0.0)


def test_traced_with_symbolic_sizes_after_functionalization():
    """There tensors are no subclass and have sizes that cannot be hashed."""
    t = inputs.operands(3)
    f = torch.func.functionalize(lambda x, w, p: mhc_projection(x, w, p)[0])
    graph = make_fx(f, tracing_mode="symbolic")(t.x, t.weight.detach(), t.pre_mix.detach())
    other = inputs.operands(7)
    arguments = other.x, other.weight.detach(), other.pre_mix.detach()
    assert torch.equal(graph(*arguments), mhc_projection(*arguments)[0])
