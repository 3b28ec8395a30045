"""The definition of the operator in plain PyTorch: what a CPU runs and the oracle of the tests.

A dot product of two e4m3 rows is exact in float64, whatever the order of its sum. All else is done element by element
in one order, so a score has the same bits in any batch and on any device.
"""

from collections.abc import Iterator

import torch
from hopper_kernels import fp8
from torch import Tensor

CHUNK = 2**22  # elements of a temporary: scores, queries or candidates
KEYS = 2**14  # keys that are held in float64
UNREADABLE, PINNED = -(2**31), 2**31 - 1  # below and above the rank of every score


def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ks: Tensor,
    ke: Tensor,
    topk: int,
    candidates: Tensor | None,
    emit_candidates: bool,
    max_entries_per_doc: int,
    block_size: int,
    topk_blocks: int,
) -> tuple[Tensor, Tensor]:
    """Picks (S_q, topk) int64, ascending, then -1; blocks (S_q, topk_blocks) int32, ascending, then -1, or (0, 0).

    Row t reads the entries ks[t] <= e < min(ke[t], S_k) whose score is not NaN, with `candidates` only those in one of
    its blocks: block b of a row holds the entries ks[t] + b * block_size and on. It picks the topk best, the smaller
    entry of equal ones. Emitted are the topk_blocks best blocks, each judged by the best of all its readable entries,
    the smaller block of equal ones; the newest, that of the last entry, NaN or not, comes before all others, and is
    block 0 in a row without entries.

    max_entries_per_doc, which the operator has checked, changes nothing here. Memory: the results, two int64 numbers a
    row, and temporaries of CHUNK elements, or of one row where that is more.
    """
    entries = k.shape[0]
    picks = _filled((q.shape[0], topk), torch.int64, q)
    blocks = _filled((q.shape[0], topk_blocks) if emit_candidates else (0, 0), torch.int32, q)
    # What lies outside of the keys is read by nobody, so no index leaves its tensor below.
    start, stop = (t.long().clamp(0, entries)[:, None] for t in (ks, ke))
    e = torch.arange(entries, device=q.device)
    count = max(1, fp8.ceil_div(entries, block_size))
    listed = 0 if candidates is None else candidates.shape[1]
    width = max(entries, q.shape[1] * q.shape[2], listed, topk, topk_blocks if emit_candidates else 0)
    for rows in _chunks(q.shape[0], width):
        values = scores(q[rows], k, w[rows])
        readable = (e >= start[rows]) & (e < stop[rows]) & ~values.isnan()
        ranks = rank(values).masked_fill(~readable, UNREADABLE)
        block = ((e - start[rows]) // block_size).clamp_min(0)
        if emit_candidates:
            best = ranks.new_full((len(ranks), count), UNREADABLE).scatter_reduce_(1, block, ranks, "amax")
            newest = (stop[rows] - start[rows] - 1).clamp_min(0) // block_size
            blocks[rows] = largest(best.scatter_(1, newest, PINNED), topk_blocks).int()
        if candidates is not None:
            ranks = ranks.masked_fill(~_listed(candidates[rows], count).gather(1, block), UNREADABLE)
        picks[rows] = largest(ranks, topk)
    return picks, blocks


def scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """score[t, e] = s_k[e] sum_h max(q^[t, h] . k^[e], 0) w[t, h] s_q[t, h], fp32 (S_q, S_k), never -0.

    q (S_q, H, D), k (S_k, D) bf16, w (S_q, H) fp32 or bf16; q^, k^, s_q, s_k are bytes and scales of the recipe
    `hopper_kernels.fp8.INDEX_ROWS`. w s_q is rounded to fp32; the dot products are exact; products with weights and
    their sum over heads, in the order of the heads, are rounded to float64, and the score, once, to fp32. NaN of a dot
    product stays NaN.
    """
    q8, q_scale = fp8.per_row(q)
    weights = (w.float() * q_scale).double()
    parts = [k.new_empty((q.shape[0], 0), dtype=torch.float32)]
    for keys in k.split(KEYS):
        k8, k_scale = fp8.per_row(keys)
        k8 = k8.double().t()
        total = k.new_zeros((q.shape[0], len(keys)), dtype=torch.float64)
        for h in range(q.shape[1]):
            total += weights[:, h, None] * (q8[:, h].double() @ k8).clamp_min_(0)
        parts.append((total * k_scale.double()).float() + 0.0)
    return torch.cat(parts, dim=1)


def rank(values: Tensor) -> Tensor:
    """int32 numbers in the order of fp32 values that are neither NaN nor -0, above UNREADABLE and below PINNED."""
    bits = values.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def largest(ranks: Tensor, count: int) -> Tensor:
    """Columns of the `count` largest ranks of each row, the first of equal ones: ascending, then -1 for UNREADABLE."""
    rows, width = ranks.shape
    order = torch.sort(ranks, dim=1, descending=True, stable=True).indices[:, :count]
    chosen = torch.where(ranks.gather(1, order) > UNREADABLE, order, width).sort(dim=1).values
    result = _filled((rows, count), torch.int64, ranks)
    result[:, : chosen.shape[1]] = torch.where(chosen < width, chosen, -1)
    return result


def _listed(candidates: Tensor, count: int) -> Tensor:
    """Whether block b < count is among the candidates of a row: bool (rows, count + 1), the last one meaningless."""
    inside = (candidates >= 0) & (candidates < count)
    listed = torch.zeros((len(candidates), count + 1), dtype=torch.bool, device=candidates.device)
    return listed.scatter_(1, torch.where(inside, candidates, count).long(), True)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.full(shape, -1, dtype=dtype, device=like.device)


def _chunks(rows: int, width: int) -> Iterator[slice]:
    """Slices of the rows, of at most CHUNK elements (one row at least)."""
    size = max(1, CHUNK // max(1, width))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
