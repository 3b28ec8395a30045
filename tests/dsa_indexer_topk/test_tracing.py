"""opcheck, FakeTensors and torch.compile: what a traced call promises is what a real one returns."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from tests.dsa_indexer_topk import inputs
from tests.dsa_indexer_topk.inputs import MODES
from tests.support.compare import assert_same_bytes
from tests.support.tracing import UTILITIES, assert_fake_like_real, facts, fresh_compiler

OPERATOR = torch.ops.dsa_indexer_topk.dsv41_index_topk
each_mode = pytest.mark.parametrize("mode", MODES)
DOCUMENTS = [(20, 3, 17), (1,), (2,), (1, 1), (), (33,)]
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def strided(a):
    names = ("q", "k", "w", "ks", "ke", "candidates")
    swap = inputs.STRIDES["last axis outermost"]
    return a._replace(**{name: swap(t) for name in names if (t := getattr(a, name)) is not None})


@each_mode
@pytest.mark.parametrize("documents", [(20, 3, 17), (1,), ()], ids=str)
def test_opcheck(mode, documents):
    a = inputs.arguments(documents, mode=mode)
    for call in (a, strided(a)):
        opcheck(OPERATOR.default, tuple(call), test_utils=UTILITIES)


@each_mode
def test_opcheck_of_operands_that_require_grad(mode):
    a = inputs.arguments((5, 1), mode=mode)
    a = a._replace(**{name: getattr(a, name).requires_grad_() for name in ("q", "k", "w")})
    opcheck(OPERATOR.default, tuple(a), test_utils=UTILITIES)


@each_mode
@pytest.mark.parametrize(("topk", "topk_blocks"), [(0, 0), (1, 1), (5, 3), (2048, 2048)])
def test_fake_operators_promise_what_real_ones_return(mode, topk, topk_blocks):
    for documents in DOCUMENTS:
        a = inputs.arguments(documents, mode=mode, topk=topk, topk_blocks=topk_blocks)
        for call in (a, strided(a)):
            fake, _ = assert_fake_like_real(OPERATOR, tuple(call))
            assert all(f.device.type == "cpu" for f in fake)


@each_mode
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_other_devices_without_a_gpu(mode, device):
    """Fake CUDA tensors, and meta tensors, whose bounds nobody reads."""
    a = inputs.arguments((20, 3), mode=mode)
    real = dsv41_index_topk(*a)
    with FakeTensorMode():
        moved = [torch.empty(t.shape, dtype=t.dtype, device=device) if isinstance(t, torch.Tensor) else t for t in a]
        fake = dsv41_index_topk(*moved)
    assert [facts(f)[:-1] for f in fake] == [facts(r)[:-1] for r in real]
    assert all(f.device.type == device for f in fake)
    if device == "meta":
        meta = dsv41_index_topk(*(t.to("meta") if isinstance(t, torch.Tensor) else t for t in a))
        assert [facts(m)[:-1] for m in meta] == [facts(r)[:-1] for r in real]


def test_export_with_symbolic_sizes():
    """One graph for any number of queries and entries, from which the longest document is made too."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, w, ks, ke):
            return dsv41_index_topk(q, k, w, ks, ke, 5, None, True, k.shape[0], 4, 3)

    a = inputs.arguments((20, 3))
    queries, entries = torch.export.Dim("queries", min=2), torch.export.Dim("entries", min=2)
    sizes = [{0: queries}, {0: entries}, {0: queries}, {0: queries}, {0: queries}]
    exported = torch.export.export(Layer(), tuple(a[:5]), dynamic_shapes=sizes)
    for documents in ((20, 3), (2,), (40, 17)):
        a = inputs.arguments(documents, mode="source")
        for got, want in zip(exported.module()(*a[:5]), dsv41_index_topk(*a), strict=True):
            assert_same_bytes(got, want)


def around(q, k, w, ks, ke, topk, candidates, emit, most, block_size, topk_blocks):
    """As a layer calls it: on intermediates, with work around it."""
    picks, blocks = dsv41_index_topk(
        q * 2, k[: k.shape[0]], w + 1, ks, ke, topk, candidates, emit, most, block_size, topk_blocks
    )
    return torch.where(picks >= 0, picks + 128, -1).int(), blocks


def assert_compiled_like_eager(compiled, function, a):
    for got, want in zip(compiled(*a), function(*a), strict=True):
        assert_same_bytes(got, want)


def call_of(rows, mode, topk=5, topk_blocks=3):
    """Two documents of `rows` tokens; with candidates of a width of their own."""
    a = inputs.arguments((rows, rows // 2), mode=mode, topk=topk, topk_blocks=topk_blocks)
    if a.candidates is None:
        return a
    return a._replace(candidates=inputs.blocks(len(a.q), len(a.k), 4, rows // 2 + 3))


@pytest.mark.parametrize(("mode", "dynamic"), [*((mode, None) for mode in MODES), ("both", True)])
def test_sizes_compile_twice_at_most(mode, dynamic):
    """The first sizes, then dynamic ones: of queries, entries, candidates, documents. With dynamic=True once."""
    counter, compilations = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(around, fullgraph=True, backend=counter, dynamic=dynamic)
    for rows in (37, 38, 6, 130, 64, 77):
        assert_compiled_like_eager(compiled, around, call_of(rows, mode))
        compilations.append(counter.frame_count)
    assert compilations == ([1] * 6 if dynamic else [1] + [2] * 5)


def test_longer_documents_alone_compile_nothing():
    """max_entries_per_doc is another number in nearly every batch."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(around, fullgraph=True, backend=counter)
    a = call_of(20, "source")
    for most in (20, 21, 22, 1000, 2**20, 37):
        assert_compiled_like_eager(compiled, around, a._replace(max_entries_per_doc=most))
    assert counter.frame_count <= 2


def test_counts_of_picks_and_blocks_are_not_compiled_in():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(around, fullgraph=True, backend=counter)
    for topk, topk_blocks in ((5, 3), (6, 4), (7, 5), (512, 2048), (2, 2)):
        assert_compiled_like_eager(compiled, around, call_of(20, "source", topk, topk_blocks))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("mode", ["plain", "both"])
@pytest.mark.parametrize("what", ["queries", "entries"])
def test_no_queries_and_no_entries(what, mode):
    """PyTorch itself specialises sizes 0 and 1."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(around, fullgraph=True, backend=counter)
    for size in (20, 21, 0, 1, 0, 1, 22):
        a = call_of(30, mode)
        if what == "queries":
            a = a.rows(slice(0, size))
        else:
            a = a._replace(k=a.k[:size], ks=a.ks.clamp_max(size), ke=a.ke.clamp_max(size))
        assert_compiled_like_eager(compiled, around, a)
    assert counter.frame_count <= 5


def test_compiled_with_operands_that_require_grad():
    def step(a, x):
        return dsv41_index_topk(*a), x * 2

    a = inputs.arguments((20, 3), mode="source")
    x = torch.randn(3, requires_grad=True)
    leaves = a._replace(q=a.q.clone().requires_grad_())
    results, doubled = torch.compile(step, fullgraph=True, backend="aot_eager")(leaves, x)
    assert not any(t.requires_grad for t in results)
    doubled.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    for got, want in zip(results, dsv41_index_topk(*a), strict=True):
        assert_same_bytes(got, want)


def test_compiled_checkpoint():
    """Gradients of what gathers the picks, through a checkpoint in the graph: those of eager."""
    a = inputs.arguments((20, 3))

    def layer(x):
        picks, _ = dsv41_index_topk(x.bfloat16(), *a[1:])
        return torch.where(picks >= 0, (x * x).flatten(1).gather(1, picks.clamp_min(0)), 0.0).sum()

    grads = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = a.q.float().requires_grad_()
        torch.compile(call, fullgraph=True, backend="aot_eager")(x).backward()
        grads.append(x.grad)
    x = a.q.float().requires_grad_()
    layer(x).backward()
    for grad in grads:
        assert_same_bytes(grad, x.grad)


def test_compiled_with_the_partitioner_of_the_default_backend():
    compiled = torch.compile(around, fullgraph=True, backend="aot_eager_decomp_partition")
    assert_compiled_like_eager(compiled, around, call_of(20, "both"))


def test_strided_operands_compile():
    compiled = torch.compile(dsv41_index_topk, fullgraph=True, backend="aot_eager")
    a = inputs.arguments((20, 3), mode="both")
    assert_compiled_like_eager(compiled, dsv41_index_topk, strided(a))
