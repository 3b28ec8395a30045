"""The unfused way to pick entries: the score matrix of some queries, its top-k by PyTorch, then the next queries.

Everything here takes the arguments of `dsa_indexer_topk.dsv41_index_topk` for one document: `ks` is 0, and the entries
are a whole number of blocks. Picks and blocks come in any order. What a way needs is imported then, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SCORES_BYTES = 2 << 30  # of the scores of the queries that are handled together
UNREADABLE = float("-inf")


class Arguments(NamedTuple):
    """Arguments of `dsv41_index_topk` in its order."""

    q: Tensor
    k: Tensor
    w: Tensor
    ks: Tensor
    ke: Tensor
    topk: int
    candidates: Tensor | None
    emit_candidates: bool
    max_entries_per_doc: int
    block_size: int
    topk_blocks: int

    def rows(self, rows: slice | Tensor) -> Arguments:
        """The same call for some of the rows."""
        candidates = None if self.candidates is None else self.candidates[rows]
        return self._replace(q=self.q[rows], w=self.w[rows], ks=self.ks[rows], ke=self.ke[rows], candidates=candidates)


class Operands(NamedTuple):
    """queries (rows, H, D) and keys (S_k, D) e4m3; weights (rows, H) times the queries' scales, scales (S_k,) fp32.

    ks, ke: (rows,) int32.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    scales: Tensor
    ks: Tensor
    ke: Tensor

    def rows(self, rows: slice) -> Operands:
        queries, weights, ks, ke = (t[rows] for t in (self.queries, self.weights, self.ks, self.ke))
        return Operands(queries, self.keys, weights, self.scales, ks, ke)


Quantizer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x (..., D) bf16 -> e4m3 of x's shape and scales (...), as `hopper_kernels.fp8.per_row`."""
Scorer = Callable[[Operands, Tensor | None, int], Tensor]
"""(operands, None, block_size) -> fp32 scores (rows, S_k); with candidates (rows, C), of the entries in these blocks,
(rows, C * block_size) in their order. -inf for what a row does not read."""
Call = Callable[[], tuple[Tensor, Tensor]]


def deep_gemm(a: Arguments) -> Call:
    """DeepGEMM's `fp8_mqa_logits`, which knows no candidates: it scores everything, and theirs are gathered."""
    from deep_gemm import fp8_mqa_logits

    from benches.peers.index_scores import quantized

    def score(o: Operands, candidates: Tensor | None, block_size: int) -> Tensor:
        scores = fp8_mqa_logits(o.queries, (o.keys, o.scales), o.weights, o.ks, o.ke, clean_logits=True)
        return scores if candidates is None else gathered(scores, candidates, block_size)

    return unfused(a, quantized, score)


def triton(a: Arguments) -> Call:
    """A Triton kernel that writes the scores, of candidates only theirs."""
    from benches.peers.index_scores import quantized, scores

    return unfused(a, quantized, scores)


def unfused(a: Arguments, quantize: Quantizer, score: Scorer) -> Call:
    """The call that casts, scores and picks, as many queries at a time as have scores of SCORES_BYTES."""
    size = max(1, SCORES_BYTES // (4 * max(1, len(a.k))))

    def call() -> tuple[Tensor, Tensor]:
        (queries, query_scales), (keys, scales) = quantize(a.q), quantize(a.k)
        operands = Operands(queries, keys, a.w.float() * query_scales, scales, a.ks, a.ke)
        picks = a.ks.new_empty((len(a.q), a.topk), dtype=torch.int64)
        blocks = a.ks.new_empty((len(a.q), a.topk_blocks) if a.emit_candidates else (0, 0))
        for start in range(0, len(a.q), size):
            rows = slice(start, start + size)
            part, candidates = operands.rows(rows), None if a.candidates is None else a.candidates[rows]
            scores = score(part, candidates, a.block_size)
            chosen = best(scores, a.topk)
            picks[rows] = chosen if candidates is None else entries_of(chosen, candidates, a.block_size)
            if a.emit_candidates:
                blocks[rows] = best(block_scores(scores, part.ke, a.block_size), a.topk_blocks)
        return picks, blocks

    return call


def best(scores: Tensor, count: int) -> Tensor:
    """Columns of the `count` best scores of each row, int64, -1 for those that there are not."""
    values, columns = scores.topk(min(count, scores.shape[1]), dim=1, sorted=False)
    columns = torch.where(values > UNREADABLE, columns, -1)
    return torch.nn.functional.pad(columns, (0, count - columns.shape[1]), value=-1)


def block_scores(scores: Tensor, ke: Tensor, block_size: int) -> Tensor:
    """The best score in each block, +inf for the block of a row's last entry."""
    newest = (ke[:, None] - 1).clamp_min(0).long() // block_size
    return scores.unflatten(1, (-1, block_size)).amax(2).scatter_(1, newest, float("inf"))


def entries_of(chosen: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Entries of columns of the candidates' scores; -1 stays."""
    column = chosen.clamp_min(0)
    entry = candidates.gather(1, column // block_size).long() * block_size + column % block_size
    return torch.where(chosen < 0, -1, entry)


def gathered(scores: Tensor, candidates: Tensor, block_size: int) -> Tensor:
    """Of the scores of all entries, those in the candidate blocks."""
    offset = torch.arange(block_size, device=scores.device)
    entry = (candidates[:, :, None].long() * block_size + offset).flatten(1)
    there = (entry >= 0) & (entry < scores.shape[1])
    return scores.gather(1, torch.where(there, entry, 0)).masked_fill_(~there, UNREADABLE)
