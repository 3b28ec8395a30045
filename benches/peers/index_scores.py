"""Index scores as a matrix: FP8 operands and an unfused scorer, as trainers have them (Triton)."""

# ruff: noqa: N803  (Triton's compile-time arguments are written in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hopper_kernels.fp8_device import block_scale, quantize, reciprocal
from torch import Tensor

from benches.peers.index_topk import Operands

AMAX_FLOOR = tl.constexpr(1e-10)
QUANTIZE_ROWS = 32
COLUMNS = 128  # queries x heads of a product
SCORE = {"SPAN": 4096, "ENTRIES": 128, "num_warps": 8, "num_stages": 3}


@triton.jit(do_not_specialize=["rows"])
def _quantize_kernel(x, out, scale, rows, D: tl.constexpr, ROWS: tl.constexpr):
    """A program casts ROWS rows of D channels with one power-of-two scale each."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    v = tl.load(x + at, mask=(row < rows)[:, None], other=0.0).to(tl.float32)
    s = block_scale(tl.max(tl.abs(v), axis=1), AMAX_FLOOR, True)
    tl.store(out + at, quantize(v, s[:, None], reciprocal(s)[:, None]), mask=(row < rows)[:, None])
    tl.store(scale + row, s, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "entries", "columns"])
def _score_kernel(
    q,
    k,
    weights,
    scale,
    ke,
    candidates,
    out,
    rows,
    entries,
    columns,
    BLOCK_SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    SPAN: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """A program writes SPAN scores, a multiple of ENTRIES, for each of QUERIES rows; -inf from a row's ke on.

    Column c is entry c; LISTED, of one row at a time, it is the entry c % BLOCK_SIZE of that row's block
    candidates[c // BLOCK_SIZE], and -inf for block -1. Tiles that no row reads are not computed.
    """
    t = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    inside = t < rows
    stop = tl.load(ke + t, mask=inside, other=0)
    head = tl.program_id(0).to(tl.int64) * QUERIES * H + tl.arange(0, QUERIES * H)
    d = tl.arange(0, D)
    queries = tl.load(q + head[:, None] * D + d[None, :], mask=(head < rows * H)[:, None], other=0.0)
    weight = tl.load(weights + head, mask=head < rows * H, other=0.0)
    first = tl.program_id(1) * SPAN
    end = tl.minimum(first + SPAN, columns)
    computed = end if LISTED else tl.minimum(end, tl.cdiv(tl.max(stop), ENTRIES) * ENTRIES)
    for start in tl.range(first, computed, ENTRIES):
        column = start + tl.arange(0, ENTRIES)
        entry = column
        if LISTED:
            at = candidates + tl.program_id(0).to(tl.int64) * (columns // BLOCK_SIZE) + column // BLOCK_SIZE
            block = tl.load(at, mask=column < columns, other=-1)
            entry = tl.where(block < 0, entries, block * BLOCK_SIZE + column % BLOCK_SIZE)
        there = entry < entries
        keys = tl.load(k + entry.to(tl.int64)[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        terms = tl.maximum(tl.dot(keys, tl.trans(queries)), 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(terms, (ENTRIES, QUERIES, H)), axis=2)
        score *= tl.load(scale + entry, mask=there, other=0.0)[:, None]
        score = tl.where(there[:, None] & (entry[:, None] < stop[None, :]), score, float("-inf"))
        tl.store(
            out + t[None, :] * columns + column[:, None], score, mask=inside[None, :] & (column < columns)[:, None]
        )
    for start in tl.range(tl.maximum(first, computed), end, ENTRIES):
        column = start + tl.arange(0, ENTRIES)
        nothing = tl.full((QUERIES, ENTRIES), float("-inf"), tl.float32)
        tl.store(
            out + t[:, None] * columns + column[None, :], nothing, mask=inside[:, None] & (column < columns)[None, :]
        )


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 rows of x (..., D) bf16 contiguous, and their scales: bytes of `hopper_kernels.fp8.per_row`."""
    out, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:-1], dtype=torch.float32)
    grid = (triton.cdiv(scale.numel(), QUANTIZE_ROWS),)
    _quantize_kernel[grid](x, out, scale, scale.numel(), x.shape[-1], QUANTIZE_ROWS, num_warps=4)
    return out, scale


def scores(o: Operands, candidates: Tensor | None, block_size: int) -> Tensor:
    """A `benches.peers.index_topk.Scorer`."""
    rows, heads, d = o.queries.shape
    columns = len(o.keys) if candidates is None else candidates.shape[1] * block_size
    out = o.scales.new_empty(rows, columns)
    queries = COLUMNS // heads if candidates is None else 1
    operands = (o.queries, o.keys, o.weights, o.scales, o.ke, o.ke if candidates is None else candidates)
    options = {"BLOCK_SIZE": block_size, "LISTED": candidates is not None, "H": heads, "D": d, "QUERIES": queries}
    grid = (triton.cdiv(rows, queries), triton.cdiv(columns, SCORE["SPAN"]))
    _score_kernel[grid](*operands, out, rows, len(o.keys), columns, **options, **SCORE)
    return out
