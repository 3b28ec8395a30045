"""Whether picks and blocks are right for scores that an implementation rounds otherwise than the definition does."""

import torch
from dsa_indexer_topk import reference
from hopper_kernels import fp8
from torch import Tensor

from tests.dsa_indexer_topk.inputs import Arguments


def tolerance(q: Tensor, k: Tensor, w: Tensor, share: float) -> Tensor:
    """`share` of s_k sum_h |w s_q| (|q^| . |k^|), fp32 (S_q, S_k): what the terms of a score add up to without signs.

    The rounding of any order of the sums is bounded by a share of that: about 2^-24 for each addition in fp32, more for
    matrix instructions that keep fewer bits.
    """
    (q8, q_scale), (k8, k_scale) = fp8.per_row(q), fp8.per_row(k)
    weights, keys = (w.float() * q_scale).abs(), k8.float().abs().t()
    total = q_scale.new_zeros(q.shape[0], k.shape[0])
    for h in range(q.shape[1]):
        total += weights[:, h, None] * (q8[:, h].float().abs() @ keys)
    return total * k_scale * share


def assert_right(found: tuple[Tensor, Tensor], a: Arguments, share: float = 0.0) -> float:
    """All that is promised, ties aside; the mean share of the definition's picks that were found.

    Each row holds as many picks as it can, of what it may read, once each, ascending, then -1. No entry that was left
    out has a score that exceeds that of a pick by more than both tolerances: with 0, a set of best entries; where the
    scores are further apart than that, the definition's. Likewise the blocks, the newest always among them.
    """
    assert [t.dtype for t in found] == [torch.int64, torch.int32]
    start, stop = (t.long().clamp(0, a.k.shape[0])[:, None] for t in (a.ks, a.ke))
    e = torch.arange(a.k.shape[0], device=a.k.device)
    count = max(1, -(-a.k.shape[0] // a.block_size))
    block = ((e - start) // a.block_size).clamp_min(0)
    scores, slack = reference.scores(a.q, a.k, a.w), tolerance(a.q, a.k, a.w, share)
    readable = (e >= start) & (e < stop) & ~scores.isnan()
    low, high = scores - slack, scores + slack
    allowed = readable if a.candidates is None else readable & _mask(a.candidates, count).gather(1, block)
    picked = _assert_best("picks", found[0], a.topk, low, high, allowed)
    if a.emit_candidates:
        newest = (stop - start - 1).clamp_min(0) // a.block_size
        low, high = (_maxima(t, block, readable, count).scatter(1, newest, float("inf")) for t in (low, high))
        _assert_best("blocks", found[1], a.topk_blocks, low, high, high > float("-inf"))
    else:
        assert found[1].shape == (0, 0)
    wanted = reference.largest(reference.rank(scores).masked_fill(~allowed, reference.UNREADABLE), a.topk)
    wanted = _mask(wanted, len(e))
    return ((picked & wanted).sum() / wanted.sum()).item() if wanted.any() else 1.0


def _assert_best(name: str, found: Tensor, count: int, low: Tensor, high: Tensor, allowed: Tensor) -> Tensor:
    """found: indices of columns; low, high: what their scores may be. Returns the mask of the columns found."""
    rows, width = allowed.shape
    assert found.shape == (rows, count), f"{name}: shape {tuple(found.shape)}"
    there = found >= 0
    assert torch.equal(there.sum(1), allowed.sum(1).clamp_max(count)), f"{name}: as many as there are, and no more"
    assert ((found >= -1) & (found < width)).all(), f"{name}: out of range"
    assert (found[:, 1:] > found[:, :-1])[there[:, 1:]].all(), f"{name}: ascending, once each"
    assert not (there[:, 1:] & ~there[:, :-1]).any(), f"{name}: -1 before the end"
    taken = _mask(found, width)
    assert not (taken & ~allowed).any(), f"{name}: not allowed"
    infinite = high.new_tensor(float("inf"))
    worst = torch.where(taken, high, infinite).amin(1) if width else high.new_zeros(rows)
    missed = torch.where(allowed & ~taken, low, -infinite).amax(1) if width else high.new_zeros(rows)
    wrong = (missed > worst).nonzero().flatten()
    assert not len(wrong), f"{name}: {len(wrong)} rows lack a better one, first row {wrong[0]}"
    return taken


def _mask(indices: Tensor, width: int) -> Tensor:
    """bool (rows, width): the columns that are listed in a row; indices out of range are none."""
    inside = (indices >= 0) & (indices < width)
    mask = torch.zeros(len(indices), width + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, torch.where(inside, indices, width).long(), True)[:, :width]


def _maxima(values: Tensor, block: Tensor, readable: Tensor, count: int) -> Tensor:
    values = values.masked_fill(~readable, float("-inf"))
    return values.new_full((len(values), count), float("-inf")).scatter_reduce(1, block, values, "amax")
