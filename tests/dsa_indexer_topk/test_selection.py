"""Which entries are the best ones: scores that are hard to select from, and every count of picks and entries.

The scores are exact in whatever way they are summed, so all results are compared element by element.
"""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, reference

from tests.dsa_indexer_topk import inputs
from tests.dsa_indexer_topk.inputs import DISTRIBUTIONS, with_scores

COUNTS = (1, 3, 511, 512, 513, 1024, 2048)


def first(order, count):
    """The first `count` of the indices, ascending; then -1."""
    chosen = sorted(order[:count])
    return chosen + [-1] * (count - len(chosen))


def best(values, count, entries=None):
    """The picks of a row that reads `entries` (default: all)."""
    scores = values.tolist()
    return first(sorted(range(len(scores)) if entries is None else entries, key=lambda e: (-scores[e], e)), count)


def best_blocks(values, size, count):
    """The blocks of a row that reads everything."""
    maxima = [max(part) for part in (values[i : i + size].tolist() for i in range(0, len(values), size))]
    newest = len(maxima) - 1
    return first(sorted(range(len(maxima)), key=lambda b: (b != newest, -maxima[b], b)), count)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_the_scores_are_those_asked_for(name):
    values = DISTRIBUTIONS[name](300)
    a = with_scores(values, rows=2)
    assert torch.equal(reference.scores(a.q, a.k, a.w), values.float().expand(2, -1))


@pytest.mark.parametrize("entries", [16, 513, 3001])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions(name, entries):
    """All modes: candidates are every third block, the newest not among them."""
    values = DISTRIBUTIONS[name](entries)
    candidates = torch.arange(0, entries // 8, 3, dtype=torch.int32)[None].flip(1)
    a = with_scores(values, topk_blocks=40, emit_candidates=True)
    for topk in (1, 64, 512):
        picks, blocks = dsv41_index_topk(*a._replace(topk=topk))
        assert picks.tolist() == [best(values, topk)]
        assert blocks.tolist() == [best_blocks(values, 8, 40)]
        picks, again = dsv41_index_topk(*a._replace(topk=topk, candidates=candidates))
        allowed = [e for e in range(entries) if e // 8 in candidates[0].tolist()]
        assert picks.tolist() == [best(values, topk, allowed)]
        assert torch.equal(again, blocks)


@pytest.mark.parametrize("topk", COUNTS)
def test_readable_entries_about_as_many_as_picks(topk):
    """None, one, one fewer, as many, one more: all are picked as long as there is room, -1 at the end only."""
    values = torch.randperm(2100)
    counts = [0, 1, topk - 1, topk, topk + 1]
    for start in (0, 37):
        ks = torch.full((5,), start, dtype=torch.int32)
        a = with_scores(values, 5, topk=topk, ks=ks, ke=ks + torch.tensor(counts, dtype=torch.int32))
        picks, _ = dsv41_index_topk(*a)
        for row, count in zip(picks.tolist(), counts, strict=True):
            assert row == best(values, topk, range(start, start + count))


@pytest.mark.parametrize("topk", COUNTS)
@pytest.mark.parametrize("entries", [1, 5, 100, 2048])
def test_any_number_of_picks_and_entries(topk, entries):
    values = inputs.DISTRIBUTIONS["few above many"](entries)
    assert dsv41_index_topk(*with_scores(values, topk=topk))[0].tolist() == [best(values, topk)]


@pytest.mark.parametrize("entries", [512, 513, 1024, 16384])
def test_ties_at_the_last_pick(entries):
    """Of equal scores the first 512 entries, however many there are."""
    for name in ("all equal", "all zero"):
        picks, _ = dsv41_index_topk(*with_scores(DISTRIBUTIONS[name](entries), rows=3))
        assert torch.equal(picks, torch.arange(512).expand(3, -1))


@pytest.mark.parametrize("entries", [131072 + 8, 200001])
def test_long_documents(entries):
    """Beyond 2^17 entries; the best ones lie anywhere, also first and last, and are never just the last ones."""
    values = torch.randperm(entries)
    values[[0, -1]] = torch.tensor([entries, entries + 1])
    picks, blocks = dsv41_index_topk(*with_scores(values, emit_candidates=True, topk_blocks=300))
    assert picks.tolist() == [best(values, 512)]
    assert picks[0, 0] == 0
    assert picks[0, -1] == entries - 1
    assert blocks.tolist() == [best_blocks(values, 8, 300)]


def test_a_short_call_after_a_long_one():
    """Nothing is left over from sizes seen before."""
    for entries in (30000, 5, 2000, 5):
        values = torch.randperm(entries)
        assert dsv41_index_topk(*with_scores(values))[0].tolist() == [best(values, 512)]
