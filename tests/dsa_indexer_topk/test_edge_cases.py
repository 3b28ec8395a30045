"""Scores made by hand: ties, bounds, blocks and candidates at their ends. Each result is written out."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk

from tests.dsa_indexer_topk.inputs import scored


def picks(wanted, **options):
    return dsv41_index_topk(*scored(wanted, **options))[0].tolist()


def blocks(wanted, **options):
    return dsv41_index_topk(*scored(wanted, emit_candidates=True, **options))[1].tolist()


def both(wanted, **options):
    found = dsv41_index_topk(*scored(wanted, **({"emit_candidates": True} | options)))
    return tuple(t.tolist() for t in found)


def test_the_best_ascending():
    assert picks([[1, 9, -2, 0, 16, 3]]) == [[1, 4, 5]]
    assert picks([[-1, -9, -2, -3]]) == [[0, 2, 3]]


def test_equal_scores_go_to_the_smaller_entry():
    assert picks([[5] * 6]) == [[0, 1, 2]]
    assert picks([[0] * 6], ks=[2], ke=[6]) == [[2, 3, 4]]
    assert picks([[-3] * 6]) == [[0, 1, 2]]
    assert picks([[1, 5, 2, 5, 5, 5, 9]]) == [[1, 3, 6]]
    assert picks([[4, 4, 1, 1, 1, 4, 1]], topk=4) == [[0, 1, 2, 5]]


def test_zero_weights_are_ties_of_zero():
    a = scored([[5, 1, 9, 2, 3]], topk=2)
    assert dsv41_index_topk(*a._replace(w=torch.zeros_like(a.w)))[0].tolist() == [[0, 1]]


def test_zero_queries_and_keys_are_ties_of_zero():
    a = scored([[5, -1, 9, 2], [0, 0, 0, 0]], topk=2)
    assert dsv41_index_topk(*a)[0].tolist() == [[0, 2], [0, 1]]
    a.k[2] = 0
    assert dsv41_index_topk(*a)[0].tolist() == [[0, 3], [0, 1]]
    a.k[:] = 0
    assert dsv41_index_topk(*a)[0].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("first", ["negative", "positive"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_score_that_underflows_is_zero_of_either_sign(first, at):
    """-0 is not less than +0, so the smaller entry wins."""
    a = scored([[0, 0]], topk=1)
    a.q[0, 0], a.w[0, 0] = 0, -(2.0**-100) if first == "negative" else 2.0**-100
    a.q[0, 0, at] = 2.0**-40
    a = a._replace(k=a.k * 2.0**-40)
    assert dsv41_index_topk(*a)[0].tolist() == [[0]]


@pytest.mark.parametrize("topk", [0, 1, 2, 3, 4, 5, 7, 100, 2048])
def test_any_topk(topk):
    """More than are readable, more than there are; one; none, with valid blocks."""
    found, kept = both([[3, 1, 4, 2, 5, 9]], topk=topk, ks=[1], ke=[5])
    wanted = sorted([4, 2, 3, 1][:topk])
    assert found == [wanted + [-1] * (topk - len(wanted))]
    assert kept == [[0, 1, -1]]


def test_a_row_reads_its_entries_only():
    scores = [[9, 8, 1, 2, 3, 7]] * 5
    assert picks(scores, ks=[0, 2, 2, 5, 6], ke=[2, 5, 3, 6, 6]) == [
        [0, 1, -1],
        [2, 3, 4],
        [2, -1, -1],
        [5, -1, -1],
        [-1, -1, -1],
    ]


def test_rows_without_entries_emit_block_0():
    found, kept = both([[9, 8, 1, 2]] * 3, ks=[0, 2, 4], ke=[0, 2, 4])
    assert found == [[-1, -1, -1]] * 3
    assert kept == [[0, -1, -1]] * 3
    assert blocks([[9, 8, 1, 2]], ks=[2], ke=[2], topk_blocks=0) == [[]]


def test_no_entries_at_all():
    for options in ({}, {"candidates": [[0, 3], [-1, 1]]}, {"max_entries_per_doc": 7}):
        found, kept = both([[], []], **options)
        assert found == [[-1, -1, -1]] * 2
        assert kept == [[0, -1, -1]] * 2


def test_no_queries():
    a = scored([[1, 2, 3]]).rows(slice(0, 0))
    for candidates in (None, torch.empty(0, 4, dtype=torch.int32)):
        found, kept = dsv41_index_topk(*a._replace(candidates=candidates, emit_candidates=True))
        assert (found.shape, kept.shape) == ((0, 3), (0, 3))
        assert dsv41_index_topk(*a._replace(candidates=candidates))[1].shape == (0, 0)


def test_entries_beyond_the_last_do_not_exist():
    """Picks end there, and the newest block is that of the last entry that exists."""
    found, kept = both([[1, 2, 3, 4, 5]], ks=[3], ke=[90], max_entries_per_doc=90, topk=4, topk_blocks=1)
    assert found == [[3, 4, -1, -1]]
    assert kept == [[0]]
    assert blocks([[9, 1, 1, 1, 1]], ke=[90], max_entries_per_doc=90, topk_blocks=1) == [[2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bounds_out_of_contract_read_nothing_else(dtype):
    """Never an index outside of [ks, min(ke, S_k)) and of the keys."""
    least, most = torch.iinfo(dtype).min // 2, torch.iinfo(dtype).max // 2
    cases = [(-3, 2), (least, 2), (4, 1), (6, 9), (most, most), (5, 5), (least, least), (0, -1)]
    ks, ke = (torch.tensor(t, dtype=dtype) for t in zip(*cases, strict=True))
    for candidates in (None, [[0, 1, 2]] * len(cases)):
        found, kept = both(
            [[1, 2, 3, 4, 5]] * len(cases), ks=ks, ke=ke, max_entries_per_doc=2**63 - 1, candidates=candidates
        )
        for (first, last), row in zip(cases, found, strict=True):
            chosen = [e for e in row if e != -1]
            assert chosen == sorted(set(chosen))
            assert all(max(first, 0) <= e < min(last, 5) for e in chosen)
            assert row == chosen + [-1] * (3 - len(chosen))
        assert all(b == sorted(b, key=lambda i: (i < 0, i)) and b[0] >= 0 for b in kept)


def test_blocks_count_from_the_document():
    """ks is 3: blocks are {3, 4}, {5, 6}, {7}."""
    scores = [[9, 9, 9, 1, 2, 3, 1, 0]]
    assert blocks(scores, ks=[3], ke=[8], topk_blocks=2) == [[1, 2]]
    assert blocks(scores, ks=[3], ke=[8]) == [[0, 1, 2]]
    assert blocks(scores, ks=[2], ke=[8], topk_blocks=2) == [[0, 2]]


def test_the_newest_block_comes_first():
    """Though it is the worst of all, or has a single entry; not where no block is asked for."""
    scores = [[9, 9, 8, 8, 7, 7, -5]]
    assert blocks(scores, topk_blocks=2) == [[0, 3]]
    assert blocks(scores, topk_blocks=1) == [[3]]
    assert blocks(scores, ke=[6], topk_blocks=1) == [[2]]
    assert blocks(scores, topk_blocks=0) == [[]]


def test_a_block_is_as_good_as_its_best_entry():
    scores = [[-9, 3, 2, 2, -16, 4, 1, 1, 0, 0]]
    assert blocks(scores, topk_blocks=2) == [[2, 4]]
    assert blocks(scores, topk_blocks=3) == [[0, 2, 4]]


def test_equal_blocks_go_to_the_smaller_one():
    assert blocks([[5, 1, 1, 5, 5, 5, 0, 0]], topk_blocks=3) == [[0, 1, 3]]
    assert blocks([[0] * 12], topk_blocks=3) == [[0, 1, 5]]


def test_fewer_blocks_than_are_asked_for():
    assert blocks([[1, 2, 3]], topk_blocks=5) == [[0, 1, -1, -1, -1]]
    assert blocks([[1, 2, 3]], ke=[1], topk_blocks=5) == [[0, -1, -1, -1, -1]]


@pytest.mark.parametrize(("size", "wanted"), [(1, [4, 6]), (2, [2, 3]), (4, [0, 1]), (8, [0, -1]), (16, [0, -1])])
def test_block_sizes(size, wanted):
    assert blocks([[1, 2, 3, 4, 9, 5, -6]], block_size=size, topk_blocks=2) == [wanted]


SCORES = [[9, 1, 8, 7, 6, 5, 2]]  # blocks of two: {0, 1}, {2, 3}, {4, 5}, {6}


@pytest.mark.parametrize(
    ("candidates", "wanted"),
    [
        ([0, 1], [0, 2, 3]),
        ([3, 0], [0, 1, 6]),
        ([3, 2, 1, 0], [0, 2, 3]),
        ([-1, 2, -1, -1, 3], [4, 5, 6]),
        ([3], [6, -1, -1]),
        ([4, 5, 2**31 - 1], [-1, -1, -1]),
        ([-1, -1], [-1, -1, -1]),
        ([-5, -(2**31), 2], [4, 5, -1]),
        ([-5, 2, -1, -5, -1], [4, 5, -1]),
        ([], [-1, -1, -1]),
        ([99, 1, -1, *range(100, 150)], [2, 3, -1]),
    ],
)
def test_candidates(candidates, wanted):
    """Of any order and width, with holes, out of range; the newest block only if it is named."""
    given = torch.tensor([candidates], dtype=torch.int32).reshape(1, -1)
    for listed in (given, given.long()):
        assert picks(SCORES, candidates=listed) == [wanted]


def test_candidates_beyond_32_bits():
    assert picks(SCORES, candidates=torch.tensor([[2**40, 2, -(2**40)]])) == [[4, 5, -1]]


def test_candidates_count_from_the_document():
    scores = [[9, 9, 9, 1, 2, 3, 4, 8]] * 2
    assert picks(scores, ks=[3, 0], ke=[7, 8], candidates=[[1], [1]]) == [[5, 6, -1], [2, 3, -1]]


def test_consuming_and_emitting():
    """The blocks are ranked by all that is readable."""
    found, kept = both(SCORES, candidates=[[3, 2]], topk_blocks=2)
    assert found == [[4, 5, 6]]
    assert kept == [[0, 3]]


def test_max_entries_per_doc_changes_nothing():
    """May be larger than needed, and reach beyond the keys."""
    for most in (7, 8, 1000, 2**40):
        assert both(SCORES, max_entries_per_doc=most) == ([[0, 2, 3]], [[0, 1, 3]])
    assert picks(SCORES, ks=[5], max_entries_per_doc=4) == [[5, 6, -1]]


def test_calls_of_other_sizes_in_turn():
    for _ in range(2):
        assert picks([[1, 2, 3, 4]], topk=1) == [[3]]
        assert picks([[4, 2, 3]] * 3, topk=2) == [[0, 2]] * 3
        assert blocks([[1, 2, 3, 4]], block_size=1, topk_blocks=2) == [[2, 3]]
        assert blocks([[1, 2, 3, 4]], block_size=4, topk_blocks=2) == [[0, -1]]
