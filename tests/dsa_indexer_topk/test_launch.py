"""What the host side launches, with which tensors, on CPU tensors: the launches are recorded and not run."""

import pytest
import torch
from dsa_indexer_topk import arguments, launch, plan
from hopper_kernels.launcher import Launch
from torch import Tensor

from tests.dsa_indexer_topk import inputs
from tests.dsa_indexer_topk.inputs import MODES
from tests.support.launches import assert_compiled_ahead, current_tensors

selection = pytest.importorskip("dsa_indexer_topk.kernels.selection")

KINDS = {getattr(selection, name).value: name for name in ("ENTRIES", "GROUPS", "BLOCKS", "CANDIDATES", "UNSORTED")}
LONG = plan.LONGEST_WHOLE + 1
V41 = {"heads": 32, "head_dim": 128, "topk": 512, "block_size": 8, "topk_blocks": 2048}
QUANTIZE = ["quantize", "quantize"]
each_mode = pytest.mark.parametrize("mode", MODES)
SHORT_CALLS = {
    "plain": ["score 1", "ENTRIES 1"],
    "source": ["score 1", "BLOCKS 4 4", "ENTRIES 1"],
    "consumer": ["candidate 4", "UNSORTED 4"],
    "both": ["score 1", "BLOCKS 4 4", "candidate 4", "UNSORTED 4"],
}
LONG_CALLS = {
    "plain": ["score 8", "GROUPS 8", "candidate 8", "CANDIDATES 8"],
    "source": ["score 4", "BLOCKS 4", "GROUPS 4", "candidate 4", "CANDIDATES 4"],
    "consumer": ["candidate 4", "UNSORTED 4"],
    "both": ["score 4", "BLOCKS 4", "candidate 4", "UNSORTED 4"],
}


def name(one):
    """With the kind of a selection, and the entries that count as one."""
    options, kernel = one.options, one.kernel.__name__.removesuffix("_kernel")
    if kernel == "selection":
        per = f" {options['PER']}" if options["PER"] > 1 else ""
        return f"{KINDS[options['KIND']]} {options['SIZE']}{per}"
    return f"{kernel} {options['GROUP']}" if "GROUP" in options else kernel


def names(launches):
    return [name(one) for one in launches]


def tensors(one):
    return [getattr(a, "base", a) for a in one.args if isinstance(getattr(a, "base", a), Tensor)]


def few_queries(entries, mode, queries=3, **options):
    """The last queries of a document that is otherwise long."""
    a = inputs.arguments((queries,), mode=mode, **options)
    ke = torch.arange(entries - queries + 1, entries + 1, dtype=torch.int32)
    k = torch.randn(entries, a.k.shape[1]).bfloat16()
    return a._replace(k=k, ke=ke, max_entries_per_doc=entries)


@each_mode
def test_documents_whose_scores_are_kept(mode, launches):
    for entries in (5, plan.LONGEST_WHOLE):
        launches.clear()
        launch.index_topk(*few_queries(entries, mode))
        assert names(launches) == QUANTIZE + SHORT_CALLS[mode]


@each_mode
def test_long_documents(mode, launches):
    launch.index_topk(*few_queries(LONG, mode))
    assert names(launches) == QUANTIZE + LONG_CALLS[mode]


def test_one_launch_selects_blocks_and_groups(launches):
    """Where more blocks are wanted than picks: the best groups are among the blocks that it looks at."""
    for topk, blocks, both in ((5, 6, True), (5, 5, False)):
        launches.clear()
        launch.index_topk(*few_queries(LONG, "source")._replace(topk=topk, topk_blocks=blocks))
        groups = [] if both else ["GROUPS 4"]
        assert names(launches) == [*QUANTIZE, "score 4", "BLOCKS 4", *groups, "candidate 4", "CANDIDATES 4"]
        written, read = (next(one for one in launches if name(one) == kind) for kind in ("BLOCKS 4", "CANDIDATES 4"))
        assert both == (written.args[7] is read.args[7])
        assert both == (written.args[8] is read.args[3])


def test_long_documents_with_blocks_of_one_entry(launches):
    launch.index_topk(*few_queries(LONG, "source", block_size=1))
    assert names(launches) == [*QUANTIZE, "score 1", "BLOCKS 1", "ENTRIES 1"]


def test_a_bound_that_exceeds_the_keys_makes_no_document_long(launches):
    a = few_queries(plan.LONGEST_WHOLE, "plain")
    launch.index_topk(*a._replace(max_entries_per_doc=2**40))
    assert names(launches) == QUANTIZE + SHORT_CALLS["plain"]
    assert launches[-1].args[-3] == plan.LONGEST_WHOLE


@each_mode
@pytest.mark.parametrize("entries", [5, LONG])
def test_only_what_is_asked_for(mode, entries, launches):
    """No picks, no blocks, neither."""
    calls = LONG_CALLS if entries == LONG else SHORT_CALLS
    a = few_queries(entries, mode)
    launch.index_topk(*a._replace(topk=0))
    wanted = [one for one in calls[mode] if one.startswith(("score", "BLOCKS"))] if a.emit_candidates else []
    assert names(launches) == (QUANTIZE + wanted if wanted else [])
    launches.clear()
    launch.index_topk(*a._replace(topk_blocks=0))
    without = {"source": "plain", "both": "consumer"}.get(mode, mode)
    wanted = calls[without] if entries == 5 else [one.replace("8", "4") for one in calls[without]]
    assert names(launches) == QUANTIZE + (calls[mode] if without == mode else wanted)
    launches.clear()
    launch.index_topk(*a._replace(topk=0, topk_blocks=0))
    assert not launches


@each_mode
def test_nothing_to_read_launches_nothing(mode, launches):
    """The results are right all the same."""
    a = inputs.arguments((4, 1), mode=mode)
    for changed in (a.rows(slice(0, 0)), a._replace(k=a.k[:0]), a._replace(max_entries_per_doc=0)):
        picks, blocks = launch.index_topk(*changed)
        queries = len(changed.q)
        assert torch.equal(picks, torch.full((queries, 5), -1))
        wanted = torch.tensor([[0, -1, -1]] * queries, dtype=torch.int32).reshape(queries, 3)
        assert torch.equal(blocks, wanted if a.emit_candidates else wanted.new_empty(0, 0))
    assert not launches


@pytest.mark.parametrize("mode", ["consumer", "both"])
def test_lists_without_candidates(mode, launches):
    a = inputs.arguments((4, 1), mode=mode)
    picks, _ = launch.index_topk(*a._replace(candidates=a.candidates[:, :0]))
    assert torch.equal(picks, torch.full((5, 5), -1))
    assert names(launches)[2:] == [one for one in SHORT_CALLS[mode] if one.startswith(("score", "BLOCKS"))]


@each_mode
@pytest.mark.parametrize("entries", [40, LONG])
@pytest.mark.parametrize("workspace", [1, 2**21])
def test_rows_in_parts(mode, entries, workspace, launches, monkeypatch):
    """Every row once, in parts of the same size but for the last, each with its own rows of all operands."""
    monkeypatch.setattr(plan, "WORKSPACE", workspace)
    a = few_queries(entries, mode, queries=200)
    results = launch.index_topk(*a)
    listed = None if a.candidates is None else a.candidates.shape[1] * a.block_size
    size = plan.rows_at_a_time(entries, listed, a.topk, a.emit_candidates, a.block_size, a.topk_blocks)
    assert size % 64 == 0
    parts = -(-200 // size)
    calls = (LONG_CALLS if entries == LONG else SHORT_CALLS)[mode]
    assert names(launches) == QUANTIZE + calls * parts
    wanted = list(range(0, 200, size))
    for t, columns in ((results[0], a.topk), (results[1], a.topk_blocks)):
        written = [one.args[5] for one in launches[2:] if name(one)[0].isupper() and one.args[5].dtype == t.dtype]
        written = [w for w in written if w.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()]
        if t.numel():
            assert [w.storage_offset() // columns for w in written] == wanted
            assert sum(len(w) for w in written) == 200
    for one in launches[2:]:
        if name(one)[0].islower():
            q, first = one.args[0].base, one.args[4].storage_offset()
            assert q.storage_offset() == first * 16 * 64
            assert len(q) == len(one.args[4]) * 16
            assert one.args[2].storage_offset() == first * 16


@each_mode
@pytest.mark.parametrize("entries", [40, LONG])
def test_workspace(mode, entries, launches):
    """The documented formula is that of the tensors, exactly."""
    for topk, block_size, topk_blocks in ((5, 4, 3), (600, 8, 2048), (1, 16, 5000)):
        launches.clear()
        a = few_queries(entries, mode, topk=topk, block_size=block_size, topk_blocks=topk_blocks)
        results = launch.index_topk(*a)
        known = [t for t in (*a, *results) if isinstance(t, Tensor)]
        known += [t for one in launches[:2] for t in tensors(one)]
        held = {t.untyped_storage().data_ptr() for t in known}
        found = {}
        for one in launches[2:]:
            for t in tensors(one):
                storage = t.untyped_storage()
                if storage.data_ptr() not in held and storage.nbytes() > 4:  # 4: the flag of unique candidates
                    found[storage.data_ptr()] = storage.nbytes()
        listed = None if a.candidates is None else a.candidates.shape[1] * block_size
        sizes = (entries, listed, topk, a.emit_candidates, block_size, topk_blocks)
        assert sum(found.values()) == 3 * plan.row_bytes(*sizes), (topk, block_size)


def test_workspace_of_the_published_shape():
    """The last of eight ranks of 131,072 tokens: what stands in the README."""
    sizes = (131_072, None, 512, True, 8, 2048)
    assert plan.row_bytes(*sizes) == 4 * (16384 + 513 + 4096) + 8 * 4096
    assert plan.rows_at_a_time(*sizes) == 2240
    assert plan.row_bytes(131_072, 16384, 512, False, 8, 2048) == 4 * 16384 + 8 * 1024


@each_mode
@pytest.mark.parametrize("entries", [40, LONG])
def test_launches_are_on_the_device_of_the_operands(mode, entries, monkeypatch):
    """And the assertion that candidates are unique, after them."""
    entered, seen = current_tensors(monkeypatch), []
    monkeypatch.setattr(Launch, "run", lambda one: seen.append((name(one), entered[-1] if entered else None)))
    monkeypatch.setattr(torch, "_assert_async", lambda flag, text: seen.append((text, entered[-1] if entered else 0)))
    a = few_queries(entries, mode)
    launch.index_topk(*a)
    assert len(seen) >= 4
    assert all(current is a.q for _, current in seen)
    assert [text == arguments.NOT_UNIQUE for text, _ in seen] == [False] * (len(seen) - 1) + [a.candidates is not None]


def test_the_flag_of_unique_candidates(launches, monkeypatch):
    """One for all parts, nonzero unless a kernel writes there; given to the selections among candidates alone."""
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda flag, text: asserted.append(flag))
    monkeypatch.setattr(plan, "WORKSPACE", 1)
    launch.index_topk(*few_queries(40, "both", queries=130))
    (flag,) = asserted
    assert (flag.tolist(), flag.dtype) == ([1], torch.int32)
    given = {
        kind: [one.args[6] is flag for one in launches if name(one) == kind] for kind in ("UNSORTED 4", "BLOCKS 4 4")
    }
    assert given == {"UNSORTED 4": [True] * 3, "BLOCKS 4 4": [False] * 3}


@each_mode
@pytest.mark.parametrize("strides", inputs.STRIDES)
def test_operands_reach_the_kernels_contiguous_and_aligned(mode, strides, launches):
    """With the values that they have."""
    a = inputs.arguments((20, 3, 17), mode=mode)
    change = inputs.STRIDES[strides]
    launch.index_topk(*(change(t) if isinstance(t, Tensor) else t for t in a))
    for one in launches:
        for t in tensors(one):
            assert t.is_contiguous()
            assert t.data_ptr() % 16 == 0
    (q, w, *_), (k, *_), one = (tensors(one) for one in launches[:3])
    for found, wanted in zip((q, w, k, *one[4:6]), (a.q, a.w, a.k, a.ks, a.ke), strict=True):
        assert torch.equal(found.view(wanted.shape), wanted)
    if a.candidates is not None:
        assert torch.equal(launches[-1].args[3], a.candidates)


@each_mode
def test_operands_are_read_in_place_where_they_can(mode, launches):
    a = inputs.arguments((20, 3, 17), mode=mode)
    launch.index_topk(*a)
    assert launches[0].args[0] is a.q
    assert launches[0].args[1] is a.w
    assert launches[1].args[0] is a.k
    places = [t.data_ptr() for t in tensors(launches[-1])]
    assert {t.data_ptr() for t in (a.ks, a.ke, a.candidates) if t is not None} <= set(places)


def test_numbers_beyond_32_bits_stay_out_of_range(launches):
    a = inputs.arguments((3,), mode="consumer")
    ks, ke = torch.tensor([-(2**40), 2**40, 1]), torch.tensor([2**33, -(2**33) + 2, 3])
    candidates = torch.tensor([[2**40, -(2**40), 1, -1]]).expand(3, -1)
    launch.index_topk(*a._replace(ks=ks, ke=ke, candidates=candidates))
    scores, first, last, listed, *_ = launches[-1].args
    assert (first.tolist(), last.tolist()) == ([-1, 3, 1], [3, -1, 3])
    assert listed.tolist() == [[3, -1, 1, -1]] * 3
    assert {t.dtype for t in (first, last, listed)} == {torch.int32}
    assert scores.shape == (3, 16)


def test_what_is_compiled_ahead_is_what_a_model_launches(launches):
    """All modes, for short and long documents, weights in either dtype: nothing else, and nothing in vain."""
    for mode in MODES:
        for entries in (40, LONG):
            a = few_queries(entries, mode, **V41)
            a = a._replace(candidates=None if a.candidates is None else a.candidates.repeat(1, 300))
            for w in (a.w, a.w.float()):
                launch.index_topk(*a._replace(w=w))
    assert_compiled_ahead(launch.variants(), launches)


def test_the_kernels_know_the_constants_of_the_plan():
    heads = pytest.importorskip("dsa_indexer_topk.kernels.heads")
    scores = pytest.importorskip("dsa_indexer_topk.kernels.scores")
    assert heads.BLOCK.value == plan.BLOCK
    assert heads.OCTET.value == plan.OCTET
    assert scores.COLUMNS.value == plan.COLUMNS
    for size in arguments.BLOCK_SIZES:
        assert plan.BLOCK % size == plan.LONGEST_WHOLE % size == 0
        assert plan.PART % (plan.BLOCK * size) == plan.LEAST_PART % (plan.BLOCK * size) == 0
    assert plan.PART % (2 * plan.BLOCK) == plan.LEAST_PART % (2 * plan.BLOCK) == 0
    assert max(arguments.HEADS) * 2 <= plan.COLUMNS
    assert plan.few_keys(arguments.MAX_TOPK) >= arguments.MAX_TOPK


@pytest.mark.parametrize("heads", arguments.HEADS)
def test_few_queries_share_a_document_among_more_programs(heads):
    for count in (1, 63, 64, 500, 1000, 2000, 10**6):
        for longest in (1, 1024, 1025, 16384, 16385, 131072, 2**20):
            length = plan.part(count, heads, longest)
            assert length % plan.LEAST_PART == 0
            assert plan.LEAST_PART <= length <= plan.PART
            programs = -(-count // (2 * plan.COLUMNS // heads)) * -(-longest // length)
            assert programs >= plan.SMS or length in (plan.LEAST_PART, plan.PART)
    assert plan.part(1, 32, 131072) == plan.LEAST_PART
    assert plan.part(16384, 32, 131072) == plan.PART
