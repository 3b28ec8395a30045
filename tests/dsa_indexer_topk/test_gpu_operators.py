"""The operator inside PyTorch: opcheck, compilation, checkpoints, autocast, gradient modes, the definition."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, plan
from hopper_kernels import KernelUnavailable, launcher
from hopper_kernels import reference as use_definition
from torch.utils.checkpoint import checkpoint

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES
from tests.support import launches, machines
from tests.support.compare import assert_same_bytes
from tests.support.device import deterministic_algorithms
from tests.support.tracing import UTILITIES, assert_fake_like_real, compiled

pytestmark = pytest.mark.gpu

OPERATOR = torch.ops.dsa_indexer_topk.dsv41_index_topk.default
TENSORS = ("q", "k", "w", "ks", "ke", "candidates")
LONG = plan.LONGEST_WHOLE + 100
each_mode = pytest.mark.parametrize("mode", MODES)


def strided(a):
    swap = inputs.STRIDES["last axis outermost"]
    return a._replace(**{name: swap(t) for name in TENSORS if (t := getattr(a, name)) is not None})


@each_mode
@pytest.mark.parametrize("documents", [(20, 3, 17), (1,), (), (LONG,)], ids=str)
def test_opcheck(mode, documents):
    a = on_gpu.arguments(documents, mode=mode, queries=min(30, sum(documents)))
    for call in (a, strided(a)):
        torch.library.opcheck(OPERATOR, tuple(call), test_utils=UTILITIES)


@each_mode
def test_opcheck_of_operands_that_require_grad(mode):
    a = on_gpu.arguments((5, 1), mode=mode)
    a = a._replace(**{name: getattr(a, name).requires_grad_() for name in ("q", "k", "w")})
    torch.library.opcheck(OPERATOR, tuple(a), test_utils=UTILITIES)


@each_mode
@pytest.mark.parametrize(("topk", "topk_blocks"), [(0, 0), (1, 1), (5, 3), (2048, 2048)])
def test_fake_results_are_like_the_real_ones(mode, topk, topk_blocks):
    for documents in ((20, 3, 17), (1,), ()):
        a = on_gpu.arguments(documents, mode=mode, topk=topk, topk_blocks=topk_blocks)
        for call in (a, strided(a)):
            assert_fake_like_real(OPERATOR, tuple(call))


def around(q, k, w, ks, ke, topk, candidates, emit, most, block_size, topk_blocks):
    """As a layer calls it: on intermediates, with work around it."""
    picks, blocks = dsv41_index_topk(
        q * 2, k[: k.shape[0]], w + 1, ks, ke, topk, candidates, emit, most, block_size, topk_blocks
    )
    return torch.where(picks >= 0, picks + 128, -1).int(), blocks


def compile_and_compare(mode, backend, counts, **options):
    """Compare with eager for documents of so many tokens; how often it was compiled."""
    with compiled(around, backend, **options) as (call, counter):
        for tokens in counts:
            a = on_gpu.arguments((tokens, tokens // 2), mode=mode, topk=7, listed=tokens // 8 + 2)
            for index, (got, want) in enumerate(zip(call(*a), around(*a), strict=True)):
                assert_same_bytes(got, want, f"{tokens} tokens, result {index}")
    return counter.frame_count


@each_mode
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_sizes(mode, dynamic):
    """No graph break, eager's bytes, and one recompilation over the sizes of a training run."""
    counts = [1024, *range(256, 256 + 12 * 77, 77)]
    assert compile_and_compare(mode, "aot_eager", counts, dynamic=dynamic) <= 2


@pytest.mark.slow
@pytest.mark.timeout(120)
@each_mode
def test_compiled_with_inductor(mode):
    assert compile_and_compare(mode, "inductor", [1024, 300, 515, 130]) <= 2


def test_new_sizes_compile_no_kernel():
    """100 numbers of queries, entries, candidates and picks: nothing new in the launcher's cache."""

    def call(tokens, mode):
        dsv41_index_topk(*on_gpu.arguments((tokens,), mode=mode, topk=300 + tokens % 200, listed=tokens % 9 + 1))

    for mode in MODES:
        call(700, mode)
    before = len(launcher._compiled)
    assert before >= 4
    for tokens in range(1, 101):
        call(tokens * 16 if tokens % 3 else tokens, MODES[tokens % 4])
    assert len(launcher._compiled) == before


def layer(x, a, runs):
    """Picks from what x makes, and gathers what was picked: x has a gradient through the gathered values alone."""
    picks, blocks = dsv41_index_topk(*a._replace(q=(x * 3).bfloat16()))
    runs.append((picks, blocks))
    values = (x * x).flatten(1)
    return torch.where(picks >= 0, values.gather(1, picks.clamp(0, values.shape[1] - 1)), 0.0).sum()


@each_mode
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(mode, use_reentrant):
    """The very same picks in the recomputed forward, of scores with many ties, and gradients as without."""
    a, runs = on_gpu.arguments((900, 3), mode=mode, numbers=inputs.whole_numbers, topk=60, listed=40), []
    plain, checkpointed = (a.q.float().clone().requires_grad_() for _ in range(2))
    layer(plain, a, runs).backward()
    checkpoint(layer, checkpointed, a, runs, use_reentrant=use_reentrant).backward()
    assert len(runs) == 3
    for again in runs[1:]:
        on_gpu.assert_same(again, runs[0])
    assert_same_bytes(checkpointed.grad, plain.grad)


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(mode, dtype):
    a = on_gpu.arguments((300, 20), mode=mode, topk=60, listed=40)
    wanted = dsv41_index_topk(*a)
    with torch.autocast(on_gpu.DEVICE.type, dtype=dtype):
        on_gpu.assert_same(dsv41_index_topk(*a), wanted)


@each_mode
@pytest.mark.parametrize("modes", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(mode, modes):
    a = on_gpu.arguments((300, 20), mode=mode, topk=60, listed=40)
    wanted = dsv41_index_topk(*a)
    with modes():
        made = [t.clone() if isinstance(t, torch.Tensor) else t for t in a]
        on_gpu.assert_same(dsv41_index_topk(*made), wanted)


def test_no_gradient_flows():
    """Results of operands that require grad do not; nothing is kept for a backward, of copies neither."""
    a = on_gpu.arguments((300, 20), mode="both", topk=60, listed=40)
    leaves = a._replace(**{name: getattr(a, name).clone().requires_grad_() for name in ("q", "k", "w")})
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        results = [dsv41_index_topk(*leaves), dsv41_index_topk(*strided(leaves))]
    assert not saved
    for found in results:
        assert not any(t.requires_grad for t in found)
        on_gpu.assert_same(found, dsv41_index_topk(*a))


@each_mode
def test_deterministic_algorithms(mode):
    """PyTorch then fills what is uninitialised and refuses what is not deterministic."""
    a = on_gpu.arguments((300, 20), mode=mode, topk=60, listed=40)
    wanted = dsv41_index_topk(*a)
    with deterministic_algorithms():
        found = dsv41_index_topk(*a)
    on_gpu.assert_same(found, wanted)


def test_another_architecture():
    """An error that names the device, not the definition in silence; the definition still where it is asked for."""
    a = on_gpu.arguments((300,))
    wanted = dsv41_index_topk(*a)
    with machines.capability(8, 0):
        with pytest.raises(KernelUnavailable, match="dsv41_index_topk requires SM90, found SM80"):
            dsv41_index_topk(*a)
        with use_definition():
            assert dsv41_index_topk(*a)[0].shape == (300, 5)
    on_gpu.assert_same(dsv41_index_topk(*a), wanted)


def test_the_definition_launches_no_kernel():
    a = on_gpu.arguments((300,), mode="both")
    with launches.none_allowed():
        on_gpu.definition(a)
        with pytest.raises(AssertionError, match="was launched"):
            dsv41_index_topk(*a)


@pytest.mark.parametrize("on_cpu", TENSORS)
def test_mixed_devices(on_cpu):
    a = on_gpu.arguments((4,), mode="both")
    with pytest.raises(ValueError, match="device"):
        dsv41_index_topk(*a._replace(**{on_cpu: getattr(a, on_cpu).cpu()}))
