"""Queries split among ranks, and documents packed: a row gets what it gets alone, and sees nothing that comes later."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk

from tests.dsa_indexer_topk import inputs
from tests.dsa_indexer_topk.inputs import MODES, with_scores
from tests.support.compare import assert_same_bytes

RANKS = 8
each_mode = pytest.mark.parametrize("mode", MODES)
each_ratio = pytest.mark.parametrize("ratio", [1, 2, 4])
# 128 tokens, 16 a rank: a document that ends at a rank's end, documents of one token, one over several ranks.
DOCUMENTS = (40, 1, 23, 1, 1, 62)


def rank_slices(rows):
    return [slice(rank * rows // RANKS, (rank + 1) * rows // RANKS) for rank in range(RANKS)]


def assert_same(found, wanted):
    for name, got, want in zip(("picks", "blocks"), found, wanted, strict=True):
        assert_same_bytes(got, want, name)


@each_mode
@each_ratio
@pytest.mark.parametrize("numbers", [torch.randn, inputs.whole_numbers], ids=["normal", "whole"])
def test_the_ranks_together_are_one_device(mode, ratio, numbers):
    """Byte for byte, each with the length of the longest document of its own queries or of all."""
    a = inputs.arguments(DOCUMENTS, ratio, topk=9, mode=mode, numbers=numbers)
    whole = dsv41_index_topk(*a)
    for own_length in (False, True):
        parts = []
        for rows in rank_slices(len(a.q)):
            part = a.rows(rows)
            if own_length:
                part = part._replace(max_entries_per_doc=int((part.ke - part.ks).max()))
            parts.append(dsv41_index_topk(*part))
        picks, blocks = (torch.cat(t) for t in zip(*parts, strict=True))
        assert_same((picks, blocks if a.emit_candidates else blocks.view(0, 0)), whole)


@each_mode
def test_a_row_does_not_depend_on_the_others(mode):
    """Alone, in any slice, in another order, twice, between rows of NaN: the very same results."""
    a = inputs.arguments(DOCUMENTS, topk=9, mode=mode)
    whole = dsv41_index_topk(*a)
    order = torch.randperm(len(a.q))
    for rows in (*(slice(t, t + 1) for t in range(0, 128, 9)), slice(3, 100), order, order[:7], order[:5].repeat(2)):
        found = dsv41_index_topk(*a.rows(rows))
        assert_same_bytes(found[0], whole[0][rows], "picks")
        if a.emit_candidates:
            assert_same_bytes(found[1], whole[1][rows], "blocks")
    spoiled = a._replace(q=a.q.clone())
    spoiled.q[::2] = float("nan")
    found = dsv41_index_topk(*spoiled)
    assert_same([t[1::2] for t in found], [t[1::2] for t in whole])


@each_mode
@each_ratio
def test_packed_documents_are_those_alone(mode, ratio):
    a = inputs.arguments(DOCUMENTS, ratio, mode=mode)
    picks, blocks = dsv41_index_topk(*a)
    row = entry = 0
    for length in DOCUMENTS:
        rows, entries = slice(row, row + length), slice(entry, entry + length // ratio)
        alone = a.rows(rows)
        alone = alone._replace(k=a.k[entries], ks=alone.ks - entry, ke=alone.ke - entry)
        got = dsv41_index_topk(*alone)
        assert_same_bytes(torch.where(got[0] >= 0, got[0] + entry, -1), picks[rows], "picks")
        if a.emit_candidates:
            assert_same_bytes(got[1], blocks[rows], "blocks")
        row, entry = rows.stop, entries.stop


@each_ratio
@pytest.mark.parametrize("rank", [0, 3, 7])
def test_what_comes_later_is_not_seen(rank, ratio):
    """Each entry is better than all before it, in its own document and in others: a row picks the last it may read."""
    ks, ke = inputs.bounds(DOCUMENTS, ratio)
    a = with_scores(1 + torch.arange(int(ke.max())), len(ks), ks=ks, ke=ke, topk=5, block_size=2, topk_blocks=2)
    a = a.rows(rank_slices(len(ks))[rank])
    picks, blocks = dsv41_index_topk(*a._replace(emit_candidates=True))
    for first, last, row, kept in zip(a.ks.tolist(), a.ke.tolist(), picks.tolist(), blocks.tolist(), strict=True):
        seen = list(range(max(first, last - 5), last))
        assert row == seen + [-1] * (5 - len(seen))
        newest = max(last - first - 1, 0) // 2
        assert kept == ([newest - 1, newest] if newest else [0, -1])


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("length", [128, 512])
def test_lengths_of_every_remainder(length, ratio):
    """Whatever a document's length leaves over, the best entries are found as soon as they are complete."""
    for tokens in range(length, length + 2 * ratio + 1):
        ks, ke = inputs.bounds((7, tokens), ratio)
        own = tokens // ratio
        planted = 7 // ratio + torch.tensor([1, own // 2, own - 1])
        values = torch.zeros(int(ke.max()), dtype=torch.long).index_fill(0, planted, 3)
        a = with_scores(values, len(ks), ks=ks, ke=ke, topk=3).rows(slice(7, None))
        picks, _ = dsv41_index_topk(*a)
        for last, row in zip(a.ke.tolist(), picks.tolist(), strict=True):
            assert {e for e in planted.tolist() if e < last} <= set(row)
