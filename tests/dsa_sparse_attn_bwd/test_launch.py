"""What the host side launches, with which tensors, on CPU tensors: launches are recorded, or emulated."""

import pytest
import torch
from dsa_sparse_attn_bwd import arguments, launch, plan, reference
from hopper_kernels.launcher import Launch
from hopper_kernels.models import V41_FLASH
from torch import Tensor

from tests.dsa_sparse_attn_bwd import emulated, inputs
from tests.dsa_sparse_attn_bwd.inputs import NAMES
from tests.support.compare import assert_same_bytes, error64
from tests.support.launches import assert_compiled_ahead, current_tensors

gradients = pytest.importorskip("dsa_sparse_attn_bwd.kernels.gradients")
passes = pytest.importorskip("dsa_sparse_attn_bwd.kernels.passes")

CHANNELS = arguments.CHANNELS
each_mode = pytest.mark.parametrize("ordered", [False, True])


@pytest.fixture
def few_at_a_time(monkeypatch):
    """Two queries, in the ordered mode."""
    monkeypatch.setattr(plan, "SMS", 2)
    monkeypatch.setattr(plan, "PARTS", 1)


def name(one):
    return one.kernel.__name__.removesuffix("_kernel")


def names(launches):
    return [name(one) for one in launches]


def named(one):
    """The run-time arguments by name, tensors for their descriptors."""
    values = [getattr(value, "base", value) for value in one.args]
    return dict(zip(one.kernel.arg_names, values, strict=False))


def tensors(one):
    return {key: value for key, value in named(one).items() if isinstance(value, Tensor)}


def kinds_of(launches, kind):
    return [one for one in launches if name(one) == kind]


@each_mode
def test_the_order_of_launches(ordered, launches):
    launch.backward(*inputs.small(), ordered)
    assert names(launches) == ["prepare", "gradients", *["add"] * ordered, "finish"]
    assert [one.options["ORDERED"] for one in kinds_of(launches, "gradients")] == [ordered]


def test_ordered_queries_in_parts(few_at_a_time, launches):
    """Each query once, each part with its own operands and results; the sums are those of all."""
    t = inputs.small()
    dq, _, _ = launch.backward(*t, True)
    assert names(launches) == ["prepare", *["gradients", "add"] * 3, "finish"]
    first = 0
    for one, size in zip(kinds_of(launches, "gradients"), (2, 2, 1), strict=True):
        of = named(one)
        assert of["items"] == size
        assert of["sums"].shape == (size * 64 + plan.SCRATCH, CHANNELS)
        assert of["dq"].data_ptr() == dq[first].data_ptr()
        assert torch.equal(of["q"], t.q[first : first + size])
        assert torch.equal(of["grad_out"], t.grad_out[first : first + size])
        for key in ("slots", "counts", "logs", "deltas"):
            assert of[key].data_ptr() == named(launches[0])[key][first].data_ptr()
            assert len(of[key]) == size
        first += size
    sums = {named(one)["sums"].data_ptr() for one in (*kinds_of(launches, "add"), launches[-1])}
    assert len(sums) == 1


@each_mode
@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 4), (3, 4, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_to_do_launches_nothing(ordered, shape, dtype, launches, poison):
    t = inputs.small(*shape)
    results = launch.backward(*t._replace(sinks=t.sinks.to(dtype)), ordered)
    assert not launches
    for result, like in zip(results, (t.q, t.kv, t.sinks.to(dtype)), strict=True):
        assert_same_bytes(result, torch.zeros_like(like))


@each_mode
@pytest.mark.parametrize("heads", arguments.HEADS)
@pytest.mark.parametrize("tail", [None, 64, 80, 128])
def test_numbers(ordered, heads, tail, few_at_a_time, monkeypatch, poison):
    """With the kernels emulated, those of the definition: slots with holes and duplicates, int64, sinks in fp16."""
    monkeypatch.setattr(Launch, "run", emulated.run)
    for shape in ((5, 9, 7), (1, 1, 1), (2, 70, 5), (3, 3, 40), (2, 450, 5)):
        t = inputs.small(*shape, heads=heads)
        t = t if tail is None else inputs.with_tail(t, tail)
        t = t._replace(indices=t.indices.long(), sinks=t.sinks.half())
        found, wanted = launch.backward(*t, ordered), reference.backward(*t)
        assert [f.dtype for f in found] == [torch.bfloat16, torch.bfloat16, torch.float16]
        assert all(f.is_contiguous() for f in found)
        for which, got, exact in zip(NAMES, found, wanted, strict=True):
            assert error64(got, exact) < 2**-8, which


def test_parts_of_a_row_are_added_by_queries_and_slots(few_at_a_time, monkeypatch):
    """Ascending in every row, each slot once, none that is empty."""
    seen = []

    def run(one):
        emulated.run(one)
        seen.append(one)

    monkeypatch.setattr(Launch, "run", run)
    t = inputs.small(heads=128)
    launch.backward(*t, True)
    assert len(kinds_of(seen, "add")) == 3
    for one, part in zip(kinds_of(seen, "add"), t.indices.split(2), strict=True):
        of = named(one)
        order, starts = of["order"].tolist(), of["starts"].tolist()
        assert (of["order"].dtype, of["starts"].dtype) == (torch.int64, torch.int64)
        assert len(starts) == len(t.kv) + 1
        assert starts[0] == 0
        assert starts[-1] == 2 * (part >= 0).sum()  # of two parts of 64 heads each
        for row in range(len(t.kv)):
            mine = order[starts[row] : starts[row + 1]]
            assert mine == sorted(set(mine))
            places = [64 * (2 * s + half) + n for s in range(len(part)) for half in (0, 1) for n in range(64)]
            slots = {64 * (2 * s + half): part[s][part[s] >= 0].tolist() for s in range(len(part)) for half in (0, 1)}
            assert mine == [p for p in places if slots[p // 64 * 64][p % 64 : p % 64 + 1] == [row]]


def storages(found):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


@each_mode
@pytest.mark.parametrize(("heads", "slots"), [(16, 9), (128, 70)])
def test_workspace(ordered, heads, slots, launches):
    """The documented formula is that of the tensors, exactly, but for what the sort takes itself."""
    t = inputs.small(5, slots, heads=heads)
    results = launch.backward(*t, ordered)
    found = storages(t for one in launches for key, t in tensors(one).items() if key not in ("order", "starts"))
    for known in storages([*t.tensors().values(), *results]):
        found.pop(known, None)
    pitch = plan.pitch(slots)
    assert pitch == (64 if slots == 9 else 128)
    of_queries = 5 * (4 * pitch + 12 * heads + 4)
    parts = (5 * pitch * max(1, heads // 64) + plan.SCRATCH) * 4 * CHANNELS
    sums = 7 * 4 * CHANNELS + (parts if ordered else plan.SCRATCH * 4 * CHANNELS)
    assert sum(found.values()) == of_queries + sums


@each_mode
def test_sums_start_at_zero(ordered, launches, poison):
    """And the kernels have scratch rows behind those of the buffer."""
    launch.backward(*inputs.small(), ordered)
    sums = named(launches[-1])["sums"]
    assert sums.dtype == torch.float32
    assert sums.shape == (7 if ordered else 7 + plan.SCRATCH, CHANNELS)
    assert not sums.any()
    assert named(kinds_of(launches, "gradients")[0])["nowhere"] == (5 * 64 if ordered else 7)


@each_mode
@pytest.mark.parametrize("strides", inputs.STRIDES)
def test_operands_reach_the_kernels_contiguous_and_aligned(ordered, strides, launches):
    """With the values that they have."""
    t = inputs.with_tail(inputs.small(), 64, left=2.0)
    launch.backward(*t.each(inputs.STRIDES[strides]), ordered)
    for one in launches:
        for key, value in tensors(one).items():
            assert value.is_contiguous(), key
            assert value.data_ptr() % 16 == 0, key
    first, second = named(launches[0]), named(launches[1])
    for key, value in {"grad_out": t.grad_out, "out": t.out, "tail": t.out_tail, "lse": t.lse}.items():
        assert_same_bytes(first[key], value, key)
    for key in ("sinks", "indices"):
        assert_same_bytes(first[key], getattr(t, key), key)
    for key in ("q", "grad_out", "kv"):
        assert_same_bytes(second[key], getattr(t, key), key)


def test_expanded_gradients_are_copied(launches):
    t = inputs.small()
    same = t.grad_out[:1, :1, :1].expand(t.q.shape)
    launch.backward(*t._replace(grad_out=same), False)
    for one in launches[:2]:
        assert_same_bytes(named(one)["grad_out"], same.contiguous())
    assert named(launches[0])["grad_out"] is named(launches[1])["grad_out"]


@each_mode
def test_operands_are_read_in_place_where_they_can(ordered, launches):
    t = inputs.with_tail(inputs.small(), 64)
    launch.backward(*t, ordered)
    first, second = named(launches[0]), named(launches[1])
    for key in ("grad_out", "out", "lse", "sinks", "indices"):
        assert first[key] is getattr(t, key), key
    assert first["tail"] is t.out_tail
    for key in ("q", "grad_out", "kv"):
        assert second[key].data_ptr() == getattr(t, key).data_ptr(), key


@each_mode
def test_results_are_what_is_written(ordered, launches):
    dq, dkv, dsinks = launch.backward(*inputs.small(), ordered)
    assert named(launches[1])["dq"].data_ptr() == dq.data_ptr()
    assert named(launches[-1])["dkv"] is dkv
    shares = named(launches[0])["shares"]
    assert_same_bytes(dsinks, shares.sum(dim=0))


def test_numbers_beyond_32_bits_stay_out_of_range(launches):
    t = inputs.small(2, 6)
    t = t._replace(indices=torch.tensor([[2**40, -(2**40), 2**32, 3, -1, 7], [2**63 - 1, -(2**63), 0, 6, 1, 2**31]]))
    launch.backward(*t, False)
    found = named(launches[0])["indices"]
    assert found.dtype == torch.int32
    assert found.tolist() == [[7, -1, 7, 3, -1, 7], [7, -1, 0, 6, 1, 7]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sinks_are_fp32_to_the_kernels(dtype, launches):
    t = inputs.small()
    launch.backward(*t._replace(sinks=t.sinks.to(dtype)), False)
    assert_same_bytes(named(launches[0])["sinks"], t.sinks.to(dtype).float())


@pytest.mark.parametrize("heads", arguments.HEADS)
def test_grids_and_descriptors(heads, launches):
    t = inputs.with_tail(inputs.small(3, 70, 40, heads=heads), 64)
    launch.backward(*t, True)
    assert [one.grid for one in launches] == [(3,), (3 * max(1, heads // 64),), (40,), (3,)]
    assert [one.options.get("HEADS", heads) for one in launches] == [heads] * 4
    assert [one.options.get("TAIL") for one in launches] == [64, 0, None, None]
    for one in launches[1].args[:4]:
        assert (one.shape, one.block_shape) == ([3, heads, CHANNELS], [1, 64, 64])
        assert one.strides == [heads * CHANNELS, CHANNELS, 1]
    of = named(launches[1])
    assert (of["pitch"], of["items"], of["scale"]) == (128, 3 * max(1, heads // 64), t.sm_scale)
    assert of["scale_log2"] == t.sm_scale * plan.LOG2_E


@pytest.mark.parametrize(("slots", "late"), [(448, False), (449, True), (640, True)])
@pytest.mark.parametrize("tail", [0, 64, 512])
def test_long_lists_have_delta_computed_with_the_products(slots, late, tail, launches):
    """From eight tiles on. The tail is read there then, and nowhere else."""
    t = inputs.small(2, slots)
    launch.backward(*(inputs.with_tail(t, tail) if tail else t), False)
    first, second = launches[:2]
    assert (first.options["DELTAS"], second.options["DELTAS"]) == (not late, late)
    assert (first.options["TAIL"], second.options["TAIL"]) == ((0, tail) if late else (tail, 0))
    assert named(second)["tail"].shape[2] == (tail if tail and late else CHANNELS)
    assert named(first)["shares"] is named(second)["shares"]


@pytest.mark.parametrize("slots", [9, 450])
@pytest.mark.parametrize("tail", [16, 80, 112])
def test_a_tail_of_other_than_whole_panels_is_put_into_the_output(slots, tail, launches):
    """Into a copy, which is read in its place."""
    t = inputs.small(2, slots)
    tailed = inputs.with_tail(t, tail)
    launch.backward(*tailed, False)
    for one in launches[:2]:
        assert one.options["TAIL"] == 0
        assert_same_bytes(named(one)["out"], t.out)
    assert tailed.out[..., -tail:].isnan().all()


def test_no_more_programs_than_a_card_has_places_for(launches):
    launch.backward(*inputs.small(140, 1, 1), False)
    assert [one.grid for one in launches] == [(140,), (132,), (1,)]


@pytest.mark.parametrize(("width", "most"), [(1, 64), (64, 64), (65, 128), (640, 1024), (1024, 1024), (3000, 1024)])
def test_slots_are_looked_at_in_powers_of_two(width, most, launches):
    launch.backward(*inputs.small(1, width), False)
    assert launches[0].options["SLOTS"] == most
    assert launches[0].options["TAIL"] == 0


def test_pitch():
    assert [plan.pitch(slots) for slots in (1, 63, 64, 65, 128, 640)] == [64, 64, 64, 128, 128, 640]


def test_queries_at_a_time(monkeypatch):
    """Whole rounds of all programs, of about a gigabyte, but one at least."""
    assert plan.queries_at_a_time(640, 64) == 6 * 132
    assert plan.queries_at_a_time(128, 64) == 31 * 132
    assert plan.queries_at_a_time(128, 16) == plan.queries_at_a_time(65, 64) == plan.queries_at_a_time(128, 64)
    assert plan.queries_at_a_time(640, 128) == 3 * 132
    assert plan.queries_at_a_time(10**6, 64) == 132
    for slots in (1, 128, 640, 4000):
        for heads in arguments.HEADS:
            share = plan.pitch(slots) * max(1, heads // 64) * 4 * CHANNELS
            assert 132 * share <= plan.queries_at_a_time(slots, heads) * share <= max(2**30, 132 * share)


@each_mode
def test_launches_are_on_the_device_of_the_operands(ordered, monkeypatch):
    entered, seen = current_tensors(monkeypatch), []
    monkeypatch.setattr(Launch, "run", lambda one: seen.append(entered[-1] if entered else None))
    t = inputs.small()
    launch.backward(*t, ordered)
    assert len(seen) == 3 + ordered
    assert all(current is t.q for current in seen)


def test_what_is_compiled_ahead_is_what_a_model_launches(launches):
    """Layers with a window alone and with picks, with a tail and without, in both modes: nothing else, none in vain."""
    for slots in (V41_FLASH.window, V41_FLASH.window + V41_FLASH.index_topk):
        for tail in (None, V41_FLASH.rope_dim):
            t = inputs.small(2, slots, heads=V41_FLASH.heads)
            t = t if tail is None else inputs.with_tail(t, tail)
            for ordered in (False, True):
                launch.backward(*t, ordered)
    variants = launch.variants()
    assert_compiled_ahead(variants, launches)
    assert len({variant.name for variant in variants}) == len(variants)


def test_the_kernels_know_the_constants_of_the_plan():
    assert gradients.CHANNELS.value == passes.CHANNELS.value == CHANNELS
    assert gradients.TILE.value == plan.TILE
    assert gradients.PANEL.value == plan.PANEL
    assert gradients.PANELS.value == plan.ROUNDS
    assert passes.LOG2_E.value == plan.LOG2_E
    assert plan.SCRATCH >= plan.TILE
    assert CHANNELS % passes.BLOCK.value == 0
    assert all(heads % plan.TILE == 0 or heads < plan.TILE for heads in arguments.HEADS)
