"""The kernels against the definition: every mode, size and distribution of scores."""

import pytest
import torch
from dsa_indexer_topk import arguments, plan

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES

pytestmark = pytest.mark.gpu

each_mode = pytest.mark.parametrize("mode", MODES)
PACKED = (700, 1, 3, 0, 64, 2, 1300, 5)
LONG = plan.LONGEST_WHOLE + 1000  # whose scores are not all kept


@each_mode
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("heads", "head_dim"), [(h, d) for h in arguments.HEADS for d in arguments.HEAD_DIMS])
def test_whole_numbers_are_exact(mode, ratio, heads, head_dim):
    """Packed documents, ties in every row."""
    sizes = {"heads": heads, "head_dim": head_dim, "topk": 64, "block_size": 8, "topk_blocks": 20}
    on_gpu.assert_exact(on_gpu.arguments(PACKED, ratio, mode=mode, numbers=inputs.whole_numbers, listed=30, **sizes))


@each_mode
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 64), (32, 128), (64, 128)])
def test_long_documents_are_exact(mode, heads, head_dim):
    """Groups of entries are scored, and the best ones again."""
    sizes = {"heads": heads, "head_dim": head_dim, "topk": 512, "block_size": 8, "topk_blocks": 2048}
    on_gpu.assert_exact(
        on_gpu.arguments((5, LONG), mode=mode, numbers=inputs.whole_numbers, listed=700, queries=130, **sizes)
    )


@each_mode
@pytest.mark.parametrize(("heads", "head_dim"), [(h, d) for h in arguments.HEADS for d in arguments.HEAD_DIMS])
def test_scoring_the_best_groups_again_changes_nothing(mode, heads, head_dim, monkeypatch):
    """Scores that round have the same bits in both kernels: the picks are those of a document that is kept whole."""
    sizes = {"heads": heads, "head_dim": head_dim, "topk": 300, "block_size": 8, "topk_blocks": 200}
    a = on_gpu.arguments((9000,), mode=mode, listed=700, queries=300, **sizes)
    wanted = on_gpu.dsv41_index_topk(*a)
    monkeypatch.setattr(plan, "LONGEST_WHOLE", 1000)
    on_gpu.assert_same(on_gpu.dsv41_index_topk(*a), wanted)
    if a.candidates is None:
        every = torch.arange(9000 // 8, dtype=torch.int32, device=on_gpu.DEVICE).repeat(300, 1)
        on_gpu.assert_same(on_gpu.dsv41_index_topk(*a._replace(candidates=every)), wanted)


@each_mode
@pytest.mark.parametrize("part", [128, 384, 2**20])
def test_parts_of_documents_change_nothing(mode, part, monkeypatch):
    """Programs that have tiles of some documents only, or of none; an even number of tiles in each."""
    a = on_gpu.arguments(PACKED, mode=mode, listed=30, topk=40, topk_blocks=20)
    wanted = on_gpu.dsv41_index_topk(*a)
    monkeypatch.setattr(plan, "PART", part)
    on_gpu.assert_same(on_gpu.dsv41_index_topk(*a), wanted)


@each_mode
@pytest.mark.parametrize("block_size", arguments.BLOCK_SIZES)
@pytest.mark.parametrize("documents", [PACKED, (3, LONG)], ids=["packed", "long"])
def test_block_sizes(mode, block_size, documents):
    sizes = {"topk": 100, "block_size": block_size, "topk_blocks": 150}
    on_gpu.assert_exact(
        on_gpu.arguments(documents, mode=mode, numbers=inputs.whole_numbers, listed=90, queries=60, **sizes)
    )


@each_mode
@pytest.mark.parametrize("documents", [PACKED, (3, LONG)], ids=["packed", "long"])
@pytest.mark.parametrize(("topk", "topk_blocks"), [(0, 0), (1, 1), (511, 3000), (512, 2048), (1024, 0), (2048, 100000)])
def test_counts(mode, documents, topk, topk_blocks):
    sizes = {"topk": topk, "block_size": 2, "topk_blocks": topk_blocks}
    on_gpu.assert_exact(
        on_gpu.arguments(documents, mode=mode, numbers=inputs.whole_numbers, listed=1200, queries=40, **sizes)
    )


@each_mode
@pytest.mark.parametrize("documents", [PACKED, (4096,), (3, LONG)], ids=str)
def test_normal_numbers(mode, documents):
    """Scores that round: nothing that was left out is better by more than the rounding."""
    on_gpu.assert_right(on_gpu.arguments(documents, mode=mode, listed=1500, queries=700, **on_gpu.V41))


@pytest.mark.parametrize("name", inputs.DISTRIBUTIONS)
@pytest.mark.parametrize("entries", [1, 63, 600, 5000, LONG, 70001])
def test_distributions(name, entries):
    """Scores that a selection may find hard, exact to the last bit, in all modes."""
    values = inputs.DISTRIBUTIONS[name](entries)
    for mode in MODES:
        a = inputs.with_scores(values, rows=9, topk=min(512, entries), emit_candidates=mode in ("source", "both"))
        a = a._replace(ke=(a.ke - torch.arange(9, dtype=torch.int32) * 7).clamp_min(0))
        if mode in ("consumer", "both"):
            a = a._replace(candidates=inputs.blocks(9, entries, 8, 1000))
        on_gpu.assert_exact(on_gpu.cuda(a), mode)


@pytest.mark.parametrize("queries", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("heads", arguments.HEADS)
def test_every_small_count_of_queries(queries, heads):
    for mode in MODES:
        on_gpu.assert_exact(
            on_gpu.arguments((queries,), mode=mode, numbers=inputs.whole_numbers, heads=heads, topk=4, topk_blocks=3)
        )


@each_mode
def test_rows_in_any_order(mode):
    """Of any documents, side by side; some read nothing."""
    a = on_gpu.arguments(PACKED, mode=mode, numbers=inputs.whole_numbers, listed=30, topk=40, topk_blocks=20)
    order = torch.randperm(len(a.q), device=on_gpu.DEVICE)
    wanted = on_gpu.definition(a)
    found = on_gpu.dsv41_index_topk(*a.rows(order))
    on_gpu.assert_same(found, [t[order] if len(t) else t for t in wanted])


@each_mode
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("longest_whole", [plan.LONGEST_WHOLE, 64])
def test_bounds_outside_of_the_keys(mode, dtype, longest_whole, monkeypatch):
    """Whatever ks and ke hold, a row reads what it may; also beside rows of the same first entry."""
    monkeypatch.setattr(plan, "LONGEST_WHOLE", longest_whole)
    a = on_gpu.arguments((300,), mode=mode, numbers=inputs.whole_numbers, listed=30, topk=40, topk_blocks=20)
    least, most = -(2**31), 2**31 - 1
    starts = [-5, 299, 300, 301, most, least, 3, 0, 7, 7, 7, 250]
    ends = [50, 10**6, 10**6, 10**6, most, 3, least, least, least, 90, 6, 0]
    for t, values in ((a.ks, starts), (a.ke, ends)):
        t[20 : 20 + len(values)] = torch.tensor(values, device=on_gpu.DEVICE).int()
    on_gpu.assert_exact(a._replace(ks=a.ks.to(dtype), ke=a.ke.to(dtype), max_entries_per_doc=2**33))


@each_mode
def test_a_bound_of_the_entries_that_is_larger(mode):
    a = on_gpu.arguments((300, 40), mode=mode, numbers=inputs.whole_numbers, listed=30, topk=40, topk_blocks=20)
    wanted = on_gpu.definition(a)
    for longest in (301, 10**5, 2**31):
        on_gpu.assert_same(on_gpu.dsv41_index_topk(*a._replace(max_entries_per_doc=longest)), wanted, str(longest))


@each_mode
def test_no_queries_and_no_entries(mode):
    for documents in ((), (1,), (1, 1)):
        on_gpu.assert_exact(on_gpu.arguments(documents, 2, mode=mode))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_million_entries():
    """The longest document that a model reads."""
    sizes = {"topk": 512, "block_size": 8, "topk_blocks": 2048}
    for mode in MODES:
        a = on_gpu.arguments((2**20,), mode="plain", numbers=inputs.whole_numbers, queries=9, **sizes)
        if mode in ("consumer", "both"):
            a = a._replace(candidates=inputs.blocks(9, 2**20, 8, 2048).to(on_gpu.DEVICE))
        on_gpu.assert_exact(a._replace(emit_candidates=mode in ("source", "both")), mode)
