"""NaN, infinity and very different magnitudes: what the definition gives, and whom it affects."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, reference

from tests.dsa_indexer_topk import inputs, oracle
from tests.dsa_indexer_topk.inputs import MODES, scored
from tests.support.compare import assert_same_bytes

NAN, INF = float("nan"), float("inf")
each_mode = pytest.mark.parametrize("mode", MODES)
each_value = pytest.mark.parametrize("value", [NAN, INF, -INF])


def assert_sound(a, picks, blocks):
    """No index out of range or twice, -1 at the end only, ascending."""
    for row, first, last in zip(picks.tolist(), a.ks.tolist(), a.ke.tolist(), strict=True):
        chosen = [e for e in row if e != -1]
        assert chosen == sorted(set(chosen))
        assert all(first <= e < last for e in chosen)
        assert row == chosen + [-1] * (len(row) - len(chosen))
    rows = zip(blocks.tolist(), a.ks.tolist(), a.ke.tolist(), strict=True) if a.emit_candidates else ()
    for row, first, last in rows:
        chosen = [b for b in row if b != -1]
        assert chosen == sorted(set(chosen))
        assert chosen[-1] == max(last - first - 1, 0) // a.block_size
        assert row == chosen + [-1] * (len(row) - len(chosen))


@each_mode
@each_value
@pytest.mark.parametrize("name", ["q", "w"])
def test_in_a_query_or_its_weights(name, value, mode):
    """Other rows keep their results; this one's are sound."""
    a = inputs.arguments((20, 3, 17), mode=mode)
    clean = dsv41_index_topk(*a)
    getattr(a, name)[30, 5] = value
    found = dsv41_index_topk(*a)
    assert_sound(a, *found)
    others = torch.arange(40) != 30
    for got, want in zip(found, clean, strict=True):
        assert_same_bytes(got[others[: len(got)]], want[others[: len(want)]])


@each_value
def test_a_query_whose_scores_are_nan_reads_nothing(value):
    a = scored([[1, 2, 3, 4, 5]] * 2, emit_candidates=True)
    a.q[0, 7, 3] = value
    picks, blocks = dsv41_index_topk(*a)
    assert picks.tolist() == [[-1, -1, -1], [2, 3, 4]]
    assert blocks.tolist() == [[2, -1, -1], [0, 1, 2]]


@each_value
def test_weights_of_nan(value):
    """Also an infinite one where a dot product is zero; where none is, the scores are infinite and tie."""
    a = scored([[0, 2, 3, 4, 5]])
    a.w[0, 0] = value
    picks = dsv41_index_topk(*a)[0].tolist()
    assert picks == ([[-1, -1, -1]] if value != value else [[1, 2, 3]])


@each_mode
@each_value
def test_in_a_key(value, mode):
    """Its entry cannot be read; the results are those of the scores without it."""
    a = inputs.arguments((20, 3, 17), mode=mode)
    plain = oracle.scores(a.q, a.k, a.w)
    bad = [4, 5, 6, 7, 21, 39]
    a.k[bad, 11] = value
    for row in plain:
        for e in bad:
            row[e] = NAN
    found = dsv41_index_topk(*a)
    assert_sound(a, *found)
    for got, want in zip(found, oracle.select(plain, a), strict=True):
        assert_same_bytes(got, want)


def test_a_block_that_cannot_be_read():
    """Is not emitted, unless it is the newest."""
    a = scored([[1, 2, 3, 4, 5, 6, 7]], emit_candidates=True, topk_blocks=5)
    a.k[2:4] = NAN
    assert dsv41_index_topk(*a)[1].tolist() == [[0, 2, 3, -1, -1]]
    a.k[6] = NAN
    assert dsv41_index_topk(*a)[1].tolist() == [[0, 2, 3, -1, -1]]


def test_infinite_scores_are_readable():
    """Products that overflow are out of contract, yet no entry is lost: -inf comes before what cannot be read."""
    a = scored([[1, 2, 3, 4, 5, 6]], topk=5, emit_candidates=True)
    a = a._replace(w=a.w.float() * 3e38, k=a.k * 2.0**60, q=a.q * 2.0**60)
    for weight, wanted in ((1, [0, 1, 2, 3, 4]), (-1, [0, 1, 2, 3, 4])):
        a.w[0, 0] = weight * 3e38
        picks, blocks = dsv41_index_topk(*a)
        assert picks.tolist() == [wanted]
        assert blocks.tolist() == [[0, 1, 2]]
        assert dsv41_index_topk(*a._replace(topk_blocks=1))[1].tolist() == [[2]]  # the newest, before an infinite one
    a.k[1] = NAN
    assert dsv41_index_topk(*a)[0].tolist() == [[0, 2, 3, 4, 5]]


@each_mode
@pytest.mark.parametrize("spread", [2.0**20, 2.0**-20, 1e-10, 1e-30])
def test_very_different_magnitudes(spread, mode):
    """Heads and entries that differ by 2^20, rows below the floor, beside normal ones: exact."""
    a = inputs.arguments((20, 3, 17), mode=mode)
    a = a._replace(
        q=a.q * torch.where(torch.arange(16) % 3 == 0, spread, 1.0)[:, None].bfloat16(),
        k=a.k * torch.where(torch.arange(40) % 4 == 1, spread, 1.0)[:, None].bfloat16(),
        w=a.w.float() * torch.where(torch.arange(16) % 5 == 2, spread, 1.0),
    )
    for got, want in zip(dsv41_index_topk(*a), oracle.index_topk(a), strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("weight", [-1.0, 1.0])
def test_weights_of_one_sign(weight):
    a = inputs.arguments((20, 3, 17), mode="source")
    a = a._replace(w=weight * a.w.abs())
    found = reference.scores(a.q, a.k, a.w)
    assert (found * weight >= 0).all()
    for got, want in zip(dsv41_index_topk(*a), oracle.index_topk(a), strict=True):
        assert_same_bytes(got, want)


def test_duplicates_of_a_key():
    """Exact copies straddle the last pick: the first of them are taken."""
    a = scored([[3, 1, 9, 2, 0, 8]])
    order = torch.tensor([1, 0, 3, 0, 0, 2, 0, 5])
    a = a._replace(k=a.k[order], ke=a.ke + 2, max_entries_per_doc=8)
    assert dsv41_index_topk(*a._replace(topk=4))[0].tolist() == [[1, 3, 5, 7]]
