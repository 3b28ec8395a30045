"""The operator inside PyTorch: opcheck, compilation, autocast, gradient modes, the definition, other machines."""

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, sparse_attn_backward_flat
from hopper_kernels import KernelUnavailable, launcher, registry
from hopper_kernels import reference as use_definition

from tests.dsa_sparse_attn_bwd import inputs, judge, on_gpu
from tests.dsa_sparse_attn_bwd.inputs import Operands
from tests.dsa_sparse_attn_bwd.on_gpu import DEVICE, MODES
from tests.support import launches, machines
from tests.support.tracing import UTILITIES, assert_fake_like_real, compiled, facts_of_elements

pytestmark = pytest.mark.gpu

OPERATOR = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward.default
SHAPES = [(70, 9, 40), (1, 1, 1), (133, 70, 90), (0, 9, 40), (7, 0, 40), (7, 9, 0)]  # queries, slots, rows
each_mode = pytest.mark.parametrize("deterministic", list(MODES.values()), ids=list(MODES))


def forms(t):
    """As they are, with a tail, strided, with wide indices."""
    return [t, inputs.with_tail(t, 64), t.each(inputs.STRIDES["slice"]), t._replace(indices=t.indices.long())]


@each_mode
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_opcheck(shape, deterministic):
    cases = forms(on_gpu.whole(*shape, heads=16))
    # opcheck copies a tensor as sum((size - 1) * stride) + 32 elements, which strided ones of size 0 do not have.
    for t in cases if shape[0] else (cases[0], cases[-1]):
        torch.library.opcheck(OPERATOR, (*t.batched().values(), deterministic), test_utils=UTILITIES)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_results_are_like_the_real_ones(shape):
    for t in forms(on_gpu.whole(*shape, heads=16)):
        for sinks in (t.sinks, t.sinks.bfloat16()):
            arguments = tuple(t._replace(sinks=sinks).batched().values())
            assert_fake_like_real(OPERATOR, arguments, facts_of_elements)


@each_mode
@pytest.mark.parametrize("shape", [(0, 9, 40), (7, 0, 40), (7, 9, 0), (0, 0, 0)], ids=str)
def test_nothing_to_do_is_zero(shape, deterministic, poison):
    """No queries, no slots or no rows: results of their shapes, full of zeros."""
    t = on_gpu.operands(*shape)
    for call in (on_gpu.flat, on_gpu.batched):
        results = call(t, deterministic)
        assert [r.shape for r in results] == [t.q.shape, t.kv.shape, t.sinks.shape]
        assert not any(r.any() for r in results)


def around(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic):
    """As a layer's backward calls it: on intermediates, with work around it."""
    dq, dkv, dsinks = dsa_sparse_attn_backward(
        grad_out * 2, q, kv[:, : kv.shape[1]], out, lse + 0, indices, sinks, sm_scale, out_tail, deterministic
    )
    return dq * 2, dkv.float().sum(dim=1), dsinks + 1


def around_flat(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic):
    dq, dkv, dsinks = sparse_attn_backward_flat(
        q, kv, out, grad_out * 2, lse + 0, indices, sinks, sm_scale, out_tail, deterministic
    )
    return dq * 2, dkv * 2, dsinks + 1


def compile_and_compare(function, backend, calls, deterministic, **options):
    """Compare with eager, bit for bit; how often it was compiled."""
    with compiled(function, backend, **options) as (call, counter):
        for t in calls:
            given = t.batched() if function is around else t._asdict()
            found, wanted = (f(**given, deterministic=deterministic) for f in (call, function))
            on_gpu.assert_equal(found, wanted, f"{len(t.q)} queries")
    return counter.frame_count


def training_run(counts, tailed):
    """Whole numbers, so that eager's bits come back whatever the order of sums."""
    for count in counts:
        t = on_gpu.whole(count, 20 + count % 50, rows=count + 30, heads=16)
        yield inputs.with_tail(t, 64, left=3.0) if tailed else t


@each_mode
@pytest.mark.parametrize("function", [around, around_flat], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_sizes(function, dynamic, deterministic):
    """No graph break, eager's bits, and one recompilation over the sizes of a training run."""
    for tailed in (False, True):
        calls = training_run([300, *range(64, 64 + 18 * 13, 13)], tailed)
        assert compile_and_compare(function, "aot_eager", calls, deterministic, dynamic=dynamic) <= 2


@pytest.mark.slow
@pytest.mark.timeout(180)
@each_mode
@pytest.mark.parametrize("function", [around, around_flat], ids=lambda f: f.__name__)
def test_compiled_with_inductor(function, deterministic):
    calls = training_run([300, 65, 132, 133], True)
    assert compile_and_compare(function, "inductor", calls, deterministic) <= 2


@each_mode
def test_new_sizes_compile_no_kernel(deterministic):
    """200 numbers of queries and rows, and slots, fresh tensors, also expanded: nothing new is compiled."""

    def call(count, width):
        t = on_gpu.whole(count, width, rows=count + 9, heads=16)
        on_gpu.flat(t, deterministic)
        on_gpu.flat(t._replace(grad_out=t.grad_out[:1].expand_as(t.grad_out)), deterministic)

    for width in (1, 65, 129, 257, 449, 513):  # all sizes that the slots are taken in, and where delta comes late
        call(140, width)
    before = len(launcher._compiled)
    assert before >= 4
    for count in range(1, 201):
        call(count, 1 + 7 * count % 900)
    assert len(launcher._compiled) == before


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, deterministic):
    t = on_gpu.whole(133, 70)
    wanted = on_gpu.flat(t, deterministic)
    with torch.autocast(DEVICE.type, dtype=dtype):
        on_gpu.assert_same(on_gpu.flat(t, deterministic), wanted, ordered=True)


@each_mode
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(mode, deterministic):
    t = on_gpu.whole(133, 70)
    wanted = on_gpu.flat(t, deterministic)
    with mode():
        on_gpu.assert_same(on_gpu.flat(t.each(torch.clone), deterministic), wanted, ordered=True)


@pytest.mark.parametrize("name", ["grad_out", "q", "kv", "out", "lse", "sinks"])
def test_second_order_gradients_raise(name):
    t = on_gpu.whole(133, 70)
    results = on_gpu.flat(t._replace(**{name: getattr(t, name).clone().requires_grad_()}))
    on_gpu.assert_same(tuple(r.detach() for r in results), on_gpu.flat(t), ordered=True)
    for result in results:
        with pytest.raises(RuntimeError, match="no second-order gradients"):
            result.sum().backward()


def test_inside_an_autograd_function():
    """As a trainer uses it: the gradients arrive where they belong, from a non-contiguous gradient too."""
    t = on_gpu.operands(133, 70)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, kv, sinks):
            ctx.save_for_backward(q, kv, sinks)
            return t.out.clone()

        @staticmethod
        def backward(ctx, grad_out):
            q, kv, sinks = ctx.saved_tensors
            return on_gpu.flat(t._replace(grad_out=grad_out, q=q, kv=kv, sinks=sinks), True)

    leaves = [v.clone().requires_grad_() for v in (t.q, t.kv, t.sinks)]
    Attention.apply(*leaves).sum().backward()
    judge.assert_right(tuple(leaf.grad for leaf in leaves), t._replace(grad_out=torch.ones_like(t.out)))


def test_another_architecture():
    """An error that names the device, not the definition in silence; the definition still where it is asked for."""
    t = on_gpu.whole(133, 70)
    wanted = on_gpu.flat(t)
    with machines.capability(8, 0):
        for call in (on_gpu.flat, on_gpu.batched):
            with pytest.raises(KernelUnavailable, match="dsa_sparse_attn_backward requires SM90, found SM80"):
                call(t)
        with use_definition():
            on_gpu.assert_equal(on_gpu.flat(t), wanted)
    on_gpu.assert_same(on_gpu.flat(t), wanted, ordered=True)


def test_a_triton_that_the_kernels_cannot_be_built_with(monkeypatch):
    t = on_gpu.whole(5, 9, heads=16)
    with monkeypatch.context() as patch:
        patch.setattr(registry, "software_reason", lambda name: f"{name} requires triton>=3.6, found 3.5")
        with pytest.raises(KernelUnavailable, match=r"requires triton>=3\.6, found 3\.5"):
            on_gpu.flat(t)
        with use_definition():
            on_gpu.flat(t)
    on_gpu.assert_exact(t)


def test_the_definition_launches_no_kernel():
    t = on_gpu.whole(133, 70)
    with launches.none_allowed():
        with use_definition():
            on_gpu.assert_equal(on_gpu.flat(t), on_gpu.definition(t))
        with pytest.raises(AssertionError, match="was launched"):
            on_gpu.flat(t)


@pytest.mark.parametrize("name", [name for name in Operands._fields if name != "sm_scale"])
def test_mixed_devices(name):
    t = inputs.with_tail(on_gpu.whole(5, 9, heads=16), 64)
    wrong = t._replace(**{name: getattr(t, name).cpu()})
    for call in (on_gpu.flat, on_gpu.batched):
        with pytest.raises(ValueError, match="device"):
            call(wrong)


def test_the_device_computes_after_an_error():
    """Wrong arguments are refused before anything is launched."""
    t = on_gpu.whole(133, 70)
    wanted = on_gpu.flat(t)
    for wrong in (t._replace(lse=t.lse[:-1]), t._replace(q=t.q[..., :256]), t._replace(indices=t.indices.float())):
        with pytest.raises(ValueError, match=r"lse|out|channels|indices"):
            on_gpu.flat(wrong)
    torch.cuda.synchronize()
    on_gpu.assert_same(on_gpu.flat(t), wanted, ordered=True)
