"""The same bytes in every run, for any rows of a call, any workspace, stream, graph, device; memory; no waiting."""

from functools import partial

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, plan

from benches import dsa_indexer_topk as bench
from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES
from tests.support import first_call, memory
from tests.support.compare import unchanged
from tests.support.device import (
    assert_same_at_once,
    capture,
    no_sync,
    nothing_allocated,
    other_device,
    repeat_bytes,
    side_stream,
)
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

each_mode = pytest.mark.parametrize("mode", MODES)
LONG = plan.LONGEST_WHOLE + 3000
CALLS = {"packed": (900, 3, 1, 2000), "long": (3, LONG)}
each_call = pytest.mark.parametrize("documents", list(CALLS.values()), ids=list(CALLS))

CAPTURE_FIRST = """
import sys, torch
from dsa_indexer_topk import dsv41_index_topk
from tests.dsa_indexer_topk import inputs, on_gpu
from tests.support import first_call
torch.manual_seed(0)
a = on_gpu.arguments((300, 20), mode=sys.argv[1], numbers=inputs.whole_numbers, topk=40, listed=9)
expected = on_gpu.definition(a)
first_call.capture(lambda: dsv41_index_topk(*a), lambda found: on_gpu.assert_same(found, expected))
"""
LONG_FIRST = """
import sys, torch
from tests.dsa_indexer_topk import inputs, on_gpu
torch.manual_seed(0)
for entries in (int(sys.argv[1]), 5):
    a = inputs.with_scores(torch.randperm(entries), rows=100, topk=512, emit_candidates=True)
    on_gpu.assert_exact(on_gpu.cuda(a))
    torch.cuda.synchronize()
print("right")
"""


def made(documents, mode, **options):
    return on_gpu.arguments(documents, mode=mode, **(on_gpu.V41 | {"listed": 300, "queries": 500} | options))


@each_mode
@each_call
def test_repeats(mode, documents):
    a = made(documents, mode)
    repeat_bytes(lambda: dsv41_index_topk(*a), 20)


@each_mode
@each_call
def test_some_of_the_rows(mode, documents):
    """A context-parallel rank's rows, one row, rows in another order: each keeps its bytes."""
    a = made(documents, mode)
    whole = dsv41_index_topk(*a)
    some = [
        slice(0, 250),
        slice(250, 500),
        slice(3, 4),
        slice(77, 230),
        torch.randperm(500, device=on_gpu.DEVICE)[:200],
    ]
    for rows in some:
        found = dsv41_index_topk(*a.rows(rows))
        on_gpu.assert_same(found, [t[rows] if len(t) else t for t in whole], f"rows {rows}"[:60])


@each_mode
@each_call
def test_any_workspace(mode, documents, monkeypatch):
    a = made(documents, mode)
    wanted = dsv41_index_topk(*a)
    for size in (1, 2**22, 2**23 + 12345):
        monkeypatch.setattr(plan, "WORKSPACE", size)
        on_gpu.assert_same(dsv41_index_topk(*a), wanted, f"{size} bytes")


@each_mode
@each_call
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_poisoned_memory_is_not_seen(mode, documents, pattern, poison):
    a = made(documents, mode)
    wanted = dsv41_index_topk(*a)
    poison(pattern)
    on_gpu.assert_same(dsv41_index_topk(*a), wanted)


@each_mode
@pytest.mark.parametrize("name", list(inputs.STRIDES))
def test_strides(mode, name):
    a = made(CALLS["packed"], mode)
    wanted = dsv41_index_topk(*a)
    strided = [inputs.STRIDES[name](v) if isinstance(v, torch.Tensor) else v for v in a]
    on_gpu.assert_same(dsv41_index_topk(*strided), wanted)


@each_mode
@each_call
def test_inputs_are_not_modified(mode, documents):
    a = made(documents, mode)
    with unchanged(a):
        dsv41_index_topk(*a)


@each_mode
@each_call
def test_side_stream(mode, documents):
    a = made(documents, mode)
    wanted = dsv41_index_topk(*a)
    on_gpu.assert_same(side_stream(dsv41_index_topk, *a), wanted)


@each_mode
@each_call
def test_graph(mode, documents):
    a = made(documents, mode)
    wanted = dsv41_index_topk(*a)
    graph = capture(lambda: dsv41_index_topk(*a))
    for _ in range(3):
        on_gpu.assert_same(graph.replay(), wanted)


@each_mode
@each_call
def test_graph_of_other_contents(mode, documents):
    """Captured for some bounds, replayed for others; at last no row reads anything."""
    a = made(documents, mode)
    graph = capture(lambda: dsv41_index_topk(*a))
    for number in range(3):
        fresh = made(documents, mode)
        for buffer, values in zip(a, fresh, strict=True):
            if isinstance(buffer, torch.Tensor):
                buffer.copy_(values)
        a.ke[number::3] = a.ks[number::3]
        on_gpu.assert_same(graph.replay(), dsv41_index_topk(*a), f"replay {number}")
    a.ke.copy_(a.ks)
    picks, blocks = graph.replay()
    assert (picks == -1).all()
    assert (blocks[:, 1:] == -1).all()
    assert not blocks[:, :1].any()


@pytest.mark.slow
@pytest.mark.timeout(120)
@each_mode
def test_first_call_in_a_capture(mode, tmp_path):
    """A process that compiles, loads and launches inside a capture gets right picks or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, mode, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("entries", [32768, 131_072])
def test_first_call_of_a_process_at_full_length(entries):
    """And a short one after it."""
    assert output_of(start_python(LONG_FIRST, str(entries)), timeout=100).splitlines()[-1] == "right"


@each_mode
@each_call
def test_two_streams_at_once(mode, documents):
    """Each with operands and workspace of its own."""
    calls = [partial(dsv41_index_topk, *made(documents, mode)) for _ in range(2)]
    wanted = [call() for call in calls]
    assert_same_at_once(calls, wanted, on_gpu.assert_same, rounds=50)


@each_mode
@pytest.mark.parametrize("current", [0, 1])
def test_second_device(mode, current):
    """Tensors on one device while the other is current. Nothing is allocated on that one."""
    other = other_device(current)
    for documents in CALLS.values():
        a = made(documents, mode)
        expected = dsv41_index_topk(*a)
        there = [v.to(other) if isinstance(v, torch.Tensor) else v for v in a]
        with nothing_allocated(current):
            results = dsv41_index_topk(*there)
        assert {t.device for t in results} == {other}
        on_gpu.assert_same([t.to("cuda:0") for t in results], expected)


@each_mode
@each_call
def test_nothing_synchronises(mode, documents):
    a = made(documents, mode)
    dsv41_index_topk(*a)
    with no_sync():
        dsv41_index_topk(*a)


@each_mode
@each_call
def test_memory(mode, documents):
    """Results, e4m3 copies and the documented workspace; nothing of it is kept."""
    _within_the_formula(made(documents, mode))


@pytest.mark.parametrize("shape", bench.PUBLISHED, ids=lambda shape: shape.label)
def test_memory_of_the_published_shapes(shape):
    peak, bound = _within_the_formula(bench.make_arguments(shape, on_gpu.DEVICE))
    assert peak > 0.97 * bound, f"{peak} bytes, bound {bound}"


def _within_the_formula(a):
    (queries, heads, d), entries = a.q.shape, a.k.shape[0]
    listed = None if a.candidates is None else a.candidates.shape[1] * a.block_size
    sizes = (a.max_entries_per_doc, listed, a.topk, a.emit_candidates, a.block_size, a.topk_blocks)
    rows = min(queries, plan.rows_at_a_time(*sizes))
    bound = queries * heads * (d + 4) + entries * (d + 4) + rows * plan.row_bytes(*sizes)
    results, peak = memory.peak_of(lambda: dsv41_index_topk(*a))
    bound += sum(t.nbytes for t in results) + 64 * queries + 4096  # the check of ks and ke has int64 temporaries
    assert peak <= bound, f"{peak} bytes, bound {bound}"
    return peak, bound


def test_memory_at_131072_entries():
    """The last of eight ranks: at most half a gigabyte beside the results."""
    sizes = (131072, None, 512, True, 8, 2048)
    queries, entries = 16384, 131072
    rows = min(queries, plan.rows_at_a_time(*sizes))
    assert queries * 32 * (128 + 4) + entries * (128 + 4) + rows * plan.row_bytes(*sizes) <= 500e6
