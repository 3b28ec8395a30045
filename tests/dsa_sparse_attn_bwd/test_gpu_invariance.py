"""The same bits in every run, for any queries of a call, any memory, stream, graph, device; memory; no waiting."""

from functools import partial

import pytest
import torch
from dsa_sparse_attn_bwd import arguments, dsa_sparse_attn_backward, launch, plan, reference

from tests.dsa_sparse_attn_bwd import inputs, judge, on_gpu
from tests.dsa_sparse_attn_bwd.inputs import NAMES
from tests.dsa_sparse_attn_bwd.on_gpu import CHANNELS, DEVICE, MODES
from tests.support import first_call, memory
from tests.support.compare import assert_same_bytes, unchanged
from tests.support.device import (
    assert_same_at_once,
    capture,
    deterministic_algorithms,
    no_sync,
    nothing_allocated,
    other_device,
    repeat_bytes,
    side_stream,
)

pytestmark = pytest.mark.gpu

each_mode = pytest.mark.parametrize("deterministic", list(MODES.values()), ids=list(MODES))
# Queries, slots, rows, heads.
SHAPES = {"V4.1": (300, 640, 900, 64), "ragged": (397, 65, 700, 64), "16 heads": (133, 70, 300, 16)}
SHAPES |= {"128 heads": (150, 130, 500, 128)}
each_shape = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))

CAPTURE_FIRST = """
import sys, torch
from tests.dsa_sparse_attn_bwd import on_gpu
from tests.support import first_call
torch.manual_seed(0)
t, deterministic = on_gpu.whole(133, 70), sys.argv[1] == "True"
expected = on_gpu.definition(t)
first_call.capture(lambda: on_gpu.flat(t, deterministic), lambda found: on_gpu.assert_equal(found, expected))
"""


@each_shape
def test_repeats(shape):
    """dq and dsinks have the same bits in 200 runs; dkv but for the order of its sums."""
    t = on_gpu.operands(*shape)
    dq, dkv, dsinks = on_gpu.assert_right(t)
    runs = repeat_bytes(lambda: on_gpu.flat(t)[::2], 200)
    for got, want in zip(runs, (dq, dsinks), strict=True):
        assert_same_bytes(got, want)
    for _ in range(10):
        judge.assert_reordered(on_gpu.flat(t)[1], dkv)


@each_shape
def test_one_order_repeats(shape):
    """All bits, in 50 runs; dq and dsinks are those of any order, dkv but for the order."""
    t = on_gpu.operands(*shape)
    found = repeat_bytes(lambda: on_gpu.flat(t, True), 50)
    judge.assert_right(found, t)
    on_gpu.assert_same(on_gpu.flat(t), found)


@each_shape
def test_deterministic_algorithms_ask_for_one_order(shape):
    """PyTorch also fills what is uninitialised then."""
    t = on_gpu.operands(*shape)
    wanted = on_gpu.flat(t, True)
    with deterministic_algorithms():
        found = repeat_bytes(lambda: on_gpu.flat(t), 5)
        again = on_gpu.batched(t, False)
    on_gpu.assert_same(found, wanted, ordered=True)
    on_gpu.assert_same(again, wanted, ordered=True)


def keep(monkeypatch, width, heads, steps):
    """Shares of `steps` times 132 queries are kept at a time."""
    parts = max(1, heads // plan.TILE)
    monkeypatch.setattr(plan, "PARTS", steps * plan.SMS * plan.pitch(width) * parts * CHANNELS * 4)
    assert plan.queries_at_a_time(plan.pitch(width), heads) == steps * plan.SMS


@pytest.mark.parametrize("heads", arguments.HEADS)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_any_number_of_queries_at_a_time(heads, steps, monkeypatch):
    """Of numbers that do not round: each share is added to its row, once. The last part has one query, or a few."""
    for queries in (264, 397):
        t = on_gpu.whole(queries, 70, heads=heads)
        keep(monkeypatch, 70, heads, steps)
        on_gpu.assert_exact(t, True, f"{queries} queries")


@each_shape
def test_the_number_of_queries_at_a_time_changes_no_bit(shape, monkeypatch):
    t = on_gpu.operands(*shape)
    wanted = on_gpu.flat(t, True)
    for steps in (1, 2):
        keep(monkeypatch, shape[1], shape[3], steps)
        on_gpu.assert_same(on_gpu.flat(t, True), wanted, f"{steps} x 132 queries", ordered=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [640, 64])
def test_two_thousand_runs(width):
    """Long lists and short ones: all numbers finite, dq and dsinks bit for bit, dkv but for the order of its sums."""
    t = on_gpu.operands(397, width, rows=2000, alone=0)
    first = on_gpu.assert_right(t)
    wanted = first[1].float()
    bound = judge.ULP * wanted.abs() + judge.NOISE * wanted.square().mean(dim=1, keepdim=True).sqrt()
    wrong = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    for _ in range(2000):
        dq, dkv, dsinks = on_gpu.flat(t)
        different = (dq.view(torch.int16) != first[0].view(torch.int16)).any()
        apart = ~((dkv.float() - wanted).abs() <= bound)
        wrong += torch.stack([different, (dsinks != first[2]).any(), apart.any(), ~dkv.isfinite().all()])
    assert wrong.tolist() == [0, 0, 0, 0], "runs with another dq, dsinks, dkv, and with one that is not finite"


@each_mode
def test_shared_memory_is_not_seen(deterministic):
    """What a program finds there is what an earlier one left: NaN in every tile."""
    for width in (1, 64, 70, 200, 460):
        t = on_gpu.whole(265, width)
        bad = t._replace(**{name: torch.full_like(getattr(t, name), float("nan")) for name in ("q", "grad_out", "kv")})
        wanted = on_gpu.assert_exact(t, deterministic)
        for _ in range(100):
            on_gpu.flat(bad, deterministic)
            on_gpu.assert_same(on_gpu.flat(t, deterministic), wanted, f"{width} slots", ordered=True)


@each_mode
@each_shape
def test_a_query_does_not_depend_on_the_others(shape, deterministic):
    """Some of the queries, one alone, in another order: dq of each has the same bits."""
    t = on_gpu.operands(*shape)
    dq, _, _ = on_gpu.flat(t, deterministic)
    count = shape[0]
    order = torch.randperm(count, device=DEVICE)
    for which in (slice(0, 1), slice(0, 100), slice(37, 132), slice(count - 1, None), slice(0, None, 3), order):
        part = on_gpu.queries(t, which)
        found = on_gpu.flat(part, deterministic)
        assert_same_bytes(found[0], dq[which], f"queries {which}"[:60], strides=False)


@each_mode
def test_rows_are_sums_over_parts_of_a_call(deterministic):
    """Context-parallel ranks have some of the queries each: their sums of dkv and dsinks are the whole call's."""
    t = on_gpu.whole(397, 70)
    dq, dkv, dsinks = on_gpu.flat(t, deterministic)
    ranks = [on_gpu.flat(on_gpu.queries(t, which), deterministic) for which in (slice(0, 150), slice(150, None))]
    assert torch.equal(torch.cat([part[0] for part in ranks]), dq)
    assert torch.equal(ranks[0][2] + ranks[1][2], dsinks)
    exact = [reference.backward(*on_gpu.queries(t, which))[1] for which in (slice(0, 150), slice(150, None))]
    assert torch.equal((exact[0] + exact[1]).bfloat16(), dkv)


@each_mode
@each_shape
def test_batched_and_flat_are_one(shape, deterministic):
    t = on_gpu.operands(*shape)
    on_gpu.assert_same(on_gpu.batched(t, deterministic), on_gpu.flat(t, deterministic), ordered=deterministic)


@each_mode
@each_shape
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_poisoned_memory_is_not_seen(shape, pattern, deterministic, poison):
    t = on_gpu.operands(*shape)
    wanted = on_gpu.flat(t, deterministic)
    poison(pattern)
    on_gpu.assert_same(on_gpu.flat(t, deterministic), wanted, ordered=deterministic)


@each_mode
def test_nothing_is_written_beside_results_and_workspace(deterministic, guarded):
    """They lie between sentinels, which the fixture looks at afterwards, and start as NaN; so do the operands."""
    for queries, width, rows, heads in ((133, 70, 301, 64), (5, 640, 17, 16), (1, 1, 1, 128), (397, 64, 333, 32)):
        t = on_gpu.whole(queries, width, rows, heads)
        wanted = on_gpu.definition(t)
        inside = t.each(lambda v: guarded(tuple(v.shape), v.dtype, v.device).tensor.copy_(v))
        with memory.GuardedAllocations(guarded) as allocations:
            found = launch.backward(*inside, deterministic)
        assert allocations.count >= 8
        on_gpu.assert_equal(found, wanted, f"{queries} queries")


@each_mode
@pytest.mark.parametrize("name", list(inputs.STRIDES))
@pytest.mark.parametrize("width", [70, 460])
def test_strides(width, name, deterministic):
    """Of all operands, and of each alone."""
    t = inputs.with_tail(on_gpu.whole(133, width), 64)
    wanted = on_gpu.flat(t, deterministic)
    change = inputs.STRIDES[name]
    calls = [t.each(change), *(t._replace(**{operand: change(v)}) for operand, v in t.tensors().items())]
    for call in calls:
        on_gpu.assert_same(on_gpu.flat(call, deterministic), wanted, ordered=True)
        on_gpu.assert_same(on_gpu.batched(call, deterministic), wanted, "batched", ordered=True)


@each_mode
def test_expanded_operands(deterministic):
    """Stride 0: the gradient of a sum, and everything else that a caller may expand."""
    t = on_gpu.operands(133, 70)
    ones = torch.ones((), device=DEVICE).bfloat16()
    some = on_gpu.normal(1, 1, CHANNELS)
    for grad_out in (ones.expand(t.q.shape), some.expand(t.q.shape), t.grad_out[:1].expand(t.q.shape)):
        call = t._replace(grad_out=grad_out)
        wanted = on_gpu.flat(call._replace(grad_out=grad_out.contiguous()), deterministic)
        on_gpu.assert_same(on_gpu.flat(call, deterministic), wanted, ordered=deterministic)
        on_gpu.assert_right(call, deterministic)
    one = t.each(lambda v: v[:1].expand(v.shape))
    wanted = on_gpu.flat(one.each(lambda v: v.contiguous()), deterministic)
    on_gpu.assert_same(on_gpu.flat(one, deterministic), wanted, ordered=deterministic)


@each_mode
@pytest.mark.parametrize("stride", [1, 7, 2**33])
def test_the_stride_of_an_axis_of_length_1(stride, deterministic):
    """One query, one row, one slot: of a contiguous tensor it may be any number."""
    t = on_gpu.whole(1, 1, rows=1, empty=0.0, alone=0)
    wanted = on_gpu.assert_exact(t, deterministic)

    def odd(v):
        return v.as_strided(v.shape, [stride if size == 1 else s for size, s in zip(v.shape, v.stride(), strict=True)])

    on_gpu.assert_same(on_gpu.flat(t.each(odd), deterministic), wanted, ordered=True)
    tensors = {name: odd(v) if isinstance(v, torch.Tensor) else v for name, v in t.batched().items()}
    found = dsa_sparse_attn_backward(**tensors, deterministic=deterministic)
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert torch.equal(got.flatten(), want.flatten()), name


@each_mode
@each_shape
def test_inputs_are_not_modified(shape, deterministic):
    t = inputs.with_tail(on_gpu.operands(*shape), 64)
    with unchanged(t):
        on_gpu.flat(t, deterministic)
        on_gpu.batched(t, deterministic)


@each_mode
def test_results_share_no_memory_with_the_operands(deterministic):
    t = on_gpu.operands(70, 70)
    storages = [v.untyped_storage().data_ptr() for v in (*t.tensors().values(), *on_gpu.flat(t, deterministic))]
    assert len(set(storages)) == len(storages)


@each_mode
@each_shape
def test_side_stream(shape, deterministic):
    t = on_gpu.operands(*shape)
    wanted = on_gpu.flat(t, deterministic)
    names = list(t.tensors())

    def call(*tensors):
        return on_gpu.flat(t._replace(**dict(zip(names, tensors, strict=True))), deterministic)

    on_gpu.assert_same(side_stream(call, *t.tensors().values()), wanted, ordered=deterministic)


@each_mode
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("width", [70, 460])
def test_graph_of_other_contents(width, heads, deterministic):
    """Captured for some slots, replayed for others; at last no query has any."""
    t = inputs.with_tail(on_gpu.whole(397, width, heads=heads), 64)
    wanted = on_gpu.definition(t)
    graph = capture(lambda: on_gpu.flat(t, deterministic))
    for _ in range(3):
        on_gpu.assert_equal(graph.replay(), wanted)
    for number in range(3):
        fresh = inputs.with_tail(on_gpu.whole(397, width, heads=heads, empty=(0.0, 0.5, 0.95)[number]), 64)
        for buffer, values in zip(t.tensors().values(), fresh.tensors().values(), strict=True):
            buffer.copy_(values)
        on_gpu.assert_equal(graph.replay(), on_gpu.definition(t), f"replay {number}")
    t.indices.fill_(-1)
    for result in graph.replay():
        assert not result.any()


@each_mode
@each_shape
def test_graph(shape, deterministic):
    t = on_gpu.operands(*shape)
    wanted = on_gpu.flat(t, deterministic)
    graph = capture(lambda: on_gpu.flat(t, deterministic))
    for _ in range(3):
        on_gpu.assert_same(graph.replay(), wanted, ordered=deterministic)


@pytest.mark.slow
@pytest.mark.timeout(120)
@each_mode
def test_first_call_in_a_capture(deterministic, tmp_path):
    """A process that compiles, loads and launches inside a capture gets right gradients or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, str(deterministic), folder=tmp_path)


@each_mode
def test_two_streams_at_once(deterministic):
    """Each with operands and workspace of its own."""
    operands = [on_gpu.whole(265, width) for width in (70, 200)]
    wanted = [on_gpu.assert_exact(t, deterministic) for t in operands]
    calls = [partial(on_gpu.flat, t, deterministic) for t in operands]
    assert_same_at_once(calls, wanted, partial(on_gpu.assert_same, ordered=True), rounds=50)


@each_mode
@pytest.mark.parametrize("current", [0, 1])
def test_second_device(current, deterministic):
    """Tensors on one device while the other is current. Nothing is allocated on that one."""
    other = other_device(current)
    t = on_gpu.operands(*SHAPES["ragged"])
    wanted = on_gpu.flat(t, deterministic)
    there = t.each(lambda v: v.to(other))
    with nothing_allocated(current):
        found = on_gpu.flat(there, deterministic)
    assert {r.device for r in found} == {other}
    on_gpu.assert_same([r.to("cuda:0") for r in found], wanted, ordered=deterministic)


@each_mode
@each_shape
def test_nothing_synchronises(shape, deterministic):
    t = inputs.with_tail(on_gpu.operands(*shape), 64)
    wide = t._replace(indices=t.indices.long(), sinks=t.sinks.double())
    strided = t.each(inputs.STRIDES["slice"])
    calls = [t, wide, strided]
    wanted = [on_gpu.flat(call, deterministic) for call in calls]
    with no_sync():
        found = [on_gpu.flat(call, deterministic) for call in calls]
    for got, want in zip(found, wanted, strict=True):
        on_gpu.assert_same(got, want, ordered=deterministic)


@each_mode
@each_shape
def test_memory(shape, deterministic):
    """Results and the documented workspace; nothing of it is kept."""
    t = on_gpu.operands(*shape)
    queries, width, rows, heads = shape
    pitch, parts = plan.pitch(width), max(1, heads // plan.TILE)
    bound = 2048 * (rows + plan.SCRATCH) + queries * (4 * pitch + 4 + 12 * heads)
    if deterministic:
        kept = min(queries, plan.queries_at_a_time(pitch, heads)) * pitch * parts
        # Sorting takes memory of PyTorch's own, a few numbers for each slot.
        bound += 2048 * (kept + plan.SCRATCH) + 64 * kept + 16 * rows
    results, peak = memory.peak_of(lambda: on_gpu.flat(t, deterministic))
    bound += sum(r.nbytes for r in results) + 2**16
    assert peak <= bound, f"{peak} bytes, bound {bound}"
    del results
    before = memory.allocated()
    on_gpu.flat(t, deterministic)
    assert memory.allocated() == before
