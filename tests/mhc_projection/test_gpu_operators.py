"""The operators inside PyTorch: opcheck, compilation, checkpoints, autocast, subsets, the definition on request."""

import itertools

import pytest
import torch
from hopper_kernels import KernelUnavailable, launcher
from hopper_kernels import reference as use_definition
from mhc_projection import hyper_connection, hyper_connection_streams
from torch.utils.checkpoint import checkpoint

from tests.mhc_projection import inputs, on_gpu
from tests.mhc_projection.inputs import OPTIONS, RMS_EPS
from tests.support import launches, machines
from tests.support.compare import assert_same_bytes
from tests.support.tracing import UTILITIES, assert_fake_like_real, compiled

pytestmark = pytest.mark.gpu

OPERATORS = torch.ops.mhc_projection
FUNCTIONS = (hyper_connection, hyper_connection_streams)
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def operator_calls(t):
    """Operators with arguments for T tokens: all, without pre_mix, with other strides, with parts not needed."""
    hc = t.x.shape[1]
    c = on_gpu.all_cotangents(t)
    gates = [c[name] for name in on_gpu.GATES]
    mixes, rstd, _, used = OPERATORS.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    saved, connected = (t.x, t.weight, t.pre_mix, mixes, rstd), (*t, mixes.t().contiguous(), rstd)
    turned = c["streams"].mT.contiguous().mT
    return [
        (OPERATORS.projection_forward.default, (t.x, t.weight, t.pre_mix, RMS_EPS)),
        (OPERATORS.projection_forward.default, (t.x.mT.contiguous().mT, t.weight.bfloat16(), None, 1e-6)),
        (OPERATORS.gates_forward.default, (mixes, t.scale, t.base, hc, 3, 1e-6)),
        (OPERATORS.hyper_connection_forward.default, (*t, RMS_EPS, 1e-6, 3)),
        (OPERATORS.hyper_connection_forward.default, (*t[:4], None, RMS_EPS, 1e-6, 3)),
        (OPERATORS.projection_backward.default, (*saved, c["mixes"], c["collapsed"], turned)),
        (OPERATORS.projection_backward.default, (*saved, None, c["collapsed"], None, False, True, True, used)),
        (OPERATORS.projection_backward.default, (*saved, None, None, c["streams"])),
        (OPERATORS.gates_backward.default, (mixes, t.scale, t.base, *gates, hc, 3, 1e-6, used)),
        (OPERATORS.hyper_connection_backward.default, (*connected, *gates, c["collapsed"], turned, 1e-6, 3)),
        (
            OPERATORS.hyper_connection_backward.default,
            (*connected, gates[0], None, None, None, None, 1e-6, 3, True, False, True, used),
        ),
    ]


@pytest.mark.parametrize("tokens", [130, 1, 0])
def test_opcheck(tokens):
    for operator, arguments in operator_calls(on_gpu.operands(tokens, 4, 72)):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_opcheck_with_gradients():
    t = on_gpu.operands(5, 4, 16).requires_grad()
    for operator, arguments in (
        (OPERATORS.projection_forward.default, (t.x, t.weight, t.pre_mix, RMS_EPS)),
        (OPERATORS.hyper_connection_forward.default, (*t, RMS_EPS, 1e-6, 3)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("tokens", [0, 1, 2, 63, 64, 65, 130, 1025])
def test_fake_results_are_like_the_real_ones(tokens):
    for hc in (1, 4):
        for operator, arguments in operator_calls(on_gpu.operands(tokens, hc, 72)):
            assert_fake_like_real(operator, arguments)


def step(function):
    """As a layer calls it: on intermediate streams, with work around it."""

    def run(x, weight, scale, base, pre_mix):
        results = function(x * 2, weight, scale, base, pre_mix, **OPTIONS)
        return (*results[:3], results[3] + 1, *(streams * 3 for streams in results[4:]))

    return run


def gradients(call, t, c):
    leaves = t.requires_grad()
    results = call(*leaves)
    grads = torch.autograd.grad(results, leaves, [c[name] for name, _ in zip(c, results, strict=False)])
    return [*(r.detach() for r in results), *grads]


def compile_and_compare(function, backend, token_counts, **options):
    """Compare the compiled step with eager for each token count; how often it was compiled."""
    with compiled(step(function), backend, **options) as (call, counter):
        for tokens in token_counts:
            t = on_gpu.operands(tokens, 4, 64)
            c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
            wanted = gradients(step(function), t, c)
            for index, (got, want) in enumerate(zip(gradients(call, t, c), wanted, strict=True)):
                assert_same_bytes(got, want, f"{tokens} tokens, result {index}", strides=False)
    return counter.frame_count


@each_function
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_token_count(function, dynamic):
    """No graph break, eager's bytes, and one recompilation over the token counts of a training run."""
    counts = [1024, *range(256, 256 + 12 * 77, 77)]
    assert compile_and_compare(function, "aot_eager", counts, dynamic=dynamic) <= 2


@pytest.mark.slow
@pytest.mark.timeout(120)
@each_function
def test_compiled_with_inductor(function):
    assert compile_and_compare(function, "inductor", [1024, 300, 515, 130]) <= 2


@each_function
def test_compiled_without_tokens(function):
    assert compile_and_compare(function, "aot_eager", [0, 0]) == 1


def test_new_token_counts_compile_no_kernel():
    """200 token counts, widths and fresh tensors: nothing new in Triton's caches, nor in the launcher's."""
    from mhc_projection.kernels import gates, projection, projection_backward, reductions

    kernels = [projection.projection_kernel, projection_backward.projection_backward_kernel, gates.gates_kernel]
    kernels += [gates.gates_backward_kernel, reductions.finish_kernel, reductions.prepare_kernel]
    kernels += [reductions.sum_kernel]

    def call(tokens, d):
        t = on_gpu.operands(tokens, 4, d)
        on_gpu.everything(t, on_gpu.all_cotangents(t))

    def sizes():
        caches = [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]
        return [*caches, len(launcher._compiled)]

    for tokens, d in ((1, 8), (300, 200), (2100, 1280)):
        call(tokens, d)
    before = sizes()
    assert all(count >= 1 for count in before)
    for tokens in range(1, 201):
        call(tokens * 16 if tokens % 3 else tokens, 8 * (1 + tokens % 23))
    assert sizes() == before


@each_function
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(function, use_reentrant):
    t = on_gpu.operands(1100, 4, 72)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    run, leaves = step(function), t.requires_grad()
    results = checkpoint(run, *leaves, use_reentrant=use_reentrant)
    torch.autograd.backward(results, [c[name] for name, _ in zip(c, results, strict=False)])
    found = [*(r.detach() for r in results), *(leaf.grad for leaf in leaves)]
    for index, (got, want) in enumerate(zip(found, gradients(run, t, c), strict=True)):
        assert_same_bytes(got, want, f"result {index}", strides=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    t = on_gpu.operands(130, 4, 72)
    c = on_gpu.all_cotangents(t)
    wanted = on_gpu.everything(t, c)
    with torch.autocast(on_gpu.DEVICE.type, dtype=dtype):
        on_gpu.assert_same(on_gpu.everything(t, c), wanted)


NEEDS = [names for k in (1, 2, 3) for names in itertools.combinations(("x", "weight", "pre_mix"), k)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("names", NEEDS, ids="+".join)
@each_function
def test_any_subset_of_inputs_and_results(function, names):
    """Of the inputs these require grad; of the results every subset is used. The bits are those with all inputs."""
    t = on_gpu.operands(130, 4, 72)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    results = [key for key, _ in zip(c, function(*t, **OPTIONS), strict=False)]
    for used in (used for k in range(1, len(results) + 1) for used in itertools.combinations(results, k)):
        wanted, some = (
            differentiated(function, t, needed, results, {key: c[key] for key in used})
            for needed in (inputs.Operands._fields, names)
        )
        assert some.keys() == set(names)
        for name, got in some.items():
            assert (got is None) == (wanted[name] is None), (name, used)
            if got is not None:
                assert_same_bytes(got, wanted[name], f"{name} of {used}")


def differentiated(function, t, needed, results, c):
    """Gradients of the inputs needed, None where none flows."""
    leaves = t.requires_grad(*needed)
    found = dict(zip(results, function(*leaves, **OPTIONS), strict=True))
    used = [name for name in c if found[name].requires_grad]
    if not used:
        return dict.fromkeys(needed)
    wanted = [getattr(leaves, name) for name in needed]
    grads = torch.autograd.grad([found[n] for n in used], wanted, [c[n] for n in used], allow_unused=True)
    return dict(zip(needed, grads, strict=True))


@each_function
def test_nothing_requires_grad(function):
    t = on_gpu.operands(130, 4, 72)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        assert not any(r.requires_grad for r in function(*t, **OPTIONS))
    assert not saved


@each_function
@pytest.mark.parametrize("result", range(4))
def test_second_order_gradients_raise(function, result):
    t = on_gpu.operands(5).requires_grad()
    (grad,) = torch.autograd.grad(function(*t, **OPTIONS)[result].float().square().sum(), t.x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        grad.float().sum().backward()


def test_another_architecture():
    """An error that names the device, not the definition in silence; the definition still where it is asked for."""
    t = on_gpu.operands(130, 4, 72)
    with machines.capability(8, 0):
        for function in FUNCTIONS:
            with pytest.raises(KernelUnavailable, match="hyper_connection requires SM90, found SM80"):
                function(*t, **OPTIONS)
        with use_definition():
            assert hyper_connection(*t, **OPTIONS)[3].shape == (130, 72)
    assert hyper_connection(*t, **OPTIONS)[3].shape == (130, 72)


def test_a_backward_runs_what_its_forward_ran():
    """The definition inside `reference()`, in the backward outside of it too; no kernel is launched then."""
    t = on_gpu.operands(130, 4, 72)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION)
    wanted = on_gpu.exact(t, c)
    with launches.none_allowed():
        leaves = t.requires_grad()
        with use_definition():
            results = hyper_connection(*leaves, **OPTIONS)
        grads = torch.autograd.grad(results, leaves, list(c.values()))
        with pytest.raises(AssertionError, match="was launched"):
            hyper_connection(*t, **OPTIONS)
    for name, grad in zip(inputs.Operands._fields, grads, strict=True):
        error = (grad.double() - wanted[f"grad_{name}"]).norm() / wanted[f"grad_{name}"].norm()
        assert error.item() <= on_gpu.BOUNDS[f"grad_{name}"], name


@pytest.mark.parametrize("on_cpu", inputs.Operands._fields)
def test_mixed_devices(on_cpu):
    t = on_gpu.operands(4)
    with pytest.raises(ValueError, match="device"):
        hyper_connection(*t._replace(**{on_cpu: getattr(t, on_cpu).cpu()}), **OPTIONS)
