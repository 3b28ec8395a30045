"""dsv41_index_topk against scores in a matrix and torch.topk: `python -m benches.dsa_indexer_topk`.

DeepGEMM is measured if it is there: `uv pip install sgl-deep-gemm==0.1.5 apache-tvm-ffi==0.1.11`, and nvcc.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from dsa_indexer_topk import dsv41_index_topk, reference
from hopper_kernels.models import V41_FLASH
from torch import Tensor

from benches.harness import Bench, Candidate, Case, main
from benches.peers import index_topk as peers
from benches.peers.index_topk import Arguments

PLAIN, SOURCE, CONSUMER = "plain", "candidate source", "candidate consumer"
NORMAL, EQUAL, TWO_VALUES = "normal", "all scores equal", "two values"
BAND, SORTED, NEGATIVE, HUGE = "a band of one ulp", "sorted", "all negative", "one huge"
BLOCK = V41_FLASH.index_block_size

# What the rounding of the sums may change of a score, as a share of what its terms add up to without signs. Tensor
# cores add up e4m3 products with about 14 bits.
ROUNDING = 2.0**-13
SAMPLE = 66  # rows that are compared with exact scores, evenly spread, the first and the last among them
DEFINED = 1 << 24  # scores, up to which the definition is measured too
# Scores that a selection may find hard, of so many entries: whole numbers of up to DIGITS hexadecimal digits.
VALUES = {
    EQUAL: lambda count: torch.full((count,), 7),
    TWO_VALUES: lambda count: 5 + 3 * torch.randint(2, (count,)),
    BAND: lambda count: 2**23 + torch.randint(2, (count,)),
    SORTED: lambda count: torch.arange(count),
    NEGATIVE: lambda count: -1 - torch.randperm(count),
    HUGE: lambda count: torch.randint(16, (count,)).index_fill(0, torch.tensor([count * 2 // 3]), 2**24 - 1),
}
DIGITS = 6  # numbers of more would round in fp32
TOY = 128  # a CPU gets that fraction of queries (at least one), tokens and blocks


@dataclass(frozen=True)
class Shape:
    """The last `queries` tokens of one document of `tokens` tokens, which has one entry for `ratio` tokens."""

    queries: int
    tokens: int
    ratio: int = 1
    mode: str = PLAIN
    heads: int = V41_FLASH.index_heads
    values: str = NORMAL
    channels: int = V41_FLASH.index_head_dim
    topk: int = V41_FLASH.index_topk
    blocks: int = V41_FLASH.index_topk_blocks

    @property
    def entries(self) -> int:
        return self.tokens // self.ratio

    @property
    def label(self) -> str:
        special = ["last of 8 ranks"] if self.tokens == 8 * self.queries else []
        special += [f"{self.heads} heads"] if self.heads != V41_FLASH.index_heads else []
        special += [self.values] if self.values != NORMAL else []
        return ", ".join([f"{self.queries} x {self.entries}", f"ratio {self.ratio}", self.mode, *special])

    def stops(self) -> list[int]:
        """How many entries each query reads."""
        return [token // self.ratio for token in range(self.tokens - self.queries + 1, self.tokens + 1)]

    def flops(self, mode: str | None = None) -> int:
        """Of the dot products with all entries that the queries read; of a consumer, with those in its blocks.

        A consumer's blocks are all full, but for the newest, which is always one of them.
        """
        most = (self.blocks - 1) * BLOCK
        stops = self.stops()
        if (mode or self.mode) == CONSUMER:
            stops = [min(n, most + (n - 1) % BLOCK + 1) for n in stops]
        return 2 * self.heads * self.channels * sum(stops)

    def toy(self) -> Shape:
        """For a CPU."""
        sizes = {"queries": max(1, self.queries // TOY), "tokens": self.tokens // TOY, "blocks": self.blocks // TOY}
        return dataclasses.replace(self, **sizes, channels=64, topk=self.topk // 64)


LAST_RANK = Shape(16384, 131072)  # of eight, which share the queries of a document
PUBLISHED = [
    Shape(16384, 16384),
    Shape(16384, 16384, ratio=2),
    LAST_RANK,
    *(dataclasses.replace(LAST_RANK, mode=mode) for mode in (SOURCE, CONSUMER)),
]
SHAPES = [
    *PUBLISHED,
    dataclasses.replace(LAST_RANK, ratio=2),
    Shape(16384, 16384, heads=2 * V41_FLASH.index_heads),
    Shape(4096, 4096),
    Shape(1, 131072),
    *(Shape(16384, 16384, values=values) for values in VALUES),
]


def make_arguments(shape: Shape, device: torch.device) -> Arguments:
    """Normal q, k and w in bf16. A consumer gets the blocks that a source finds in the same operands."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    q, k = normal(shape.queries, shape.heads, shape.channels), normal(shape.entries, shape.channels)
    w = normal(shape.queries, shape.heads)
    if shape.values != NORMAL:
        _give_scores(q, k, w, VALUES[shape.values](shape.entries))
    a = Arguments(
        q,
        k,
        w,
        torch.zeros(shape.queries, dtype=torch.int32, device=device),
        torch.tensor(shape.stops(), dtype=torch.int32, device=device),
        shape.topk,
        None,
        shape.mode == SOURCE,
        shape.entries,
        BLOCK,
        shape.blocks,
    )
    if shape.mode == CONSUMER:
        a = a._replace(candidates=dsv41_index_topk(*a._replace(emit_candidates=True))[1])
    return a


def _give_scores(q: Tensor, k: Tensor, w: Tensor, values: Tensor) -> None:
    """Write operands whose scores are `values` in every row, without rounding.

    Head j reads the j-th digit of a key from channel j and weighs it by 16^j, of negative numbers head and channel
    DIGITS + j with weight -16^j; other heads have no weight. All else stays random, and no larger than the digits:
    zeros would spare power, and so be faster than other data.
    """
    k.clamp_(-4, 4)
    q[:, : 2 * DIGITS], w[:] = 0, 0
    for sign in (1, -1):
        for j in range(DIGITS):
            head = j if sign > 0 else DIGITS + j
            k[:, head] = ((sign * values).clamp_min(0) >> 4 * j & 15).to(k)
            q[:, head, head] = 1
            w[:, head] = sign * 16.0**j


def cases(device: torch.device, quick: bool) -> list[Case]:
    """All of SHAPES; on a CPU each at toy size; `quick`: the published ones, without peers."""
    if device.type != "cuda":
        return [_case(shape.toy(), device, _definition(shape.toy())) for shape in SHAPES]
    if quick:
        return [_case(shape, device, []) for shape in PUBLISHED]
    return [_case(shape, device, [*_unfused(shape), *_definition(shape)]) for shape in SHAPES]


def _case(shape: Shape, device: torch.device, others: list[Candidate]) -> Case:
    verify = functools.partial(right, ascending=True, exact=shape.values != NORMAL)
    return Case(
        label=shape.label,
        make=lambda: make_arguments(shape, device),
        candidates=(Candidate("dsv41_index_topk", prepare_ours, ours=True, verify=verify), *others),
        verify=right,
        flops=shape.flops(),
    )


def _unfused(shape: Shape) -> list[Candidate]:
    everything = shape.flops(mode=PLAIN)
    return [
        Candidate("DeepGEMM fp8_mqa_logits + torch.topk", peers.deep_gemm, work=everything),
        Candidate("Triton scorer + torch.topk, in chunks", peers.triton),
    ]


def _definition(shape: Shape) -> list[Candidate]:
    small = shape.queries * shape.entries <= DEFINED
    return [Candidate("definition in PyTorch", prepare_definition, graph=False)] if small else []


def prepare_ours(a: Arguments) -> Callable[[], tuple[Tensor, Tensor]]:
    """One call."""
    return lambda: dsv41_index_topk(*a)


def prepare_definition(a: Arguments) -> Callable[[], tuple[Tensor, Tensor]]:
    """Scores in float64, a stable sort."""
    return lambda: reference.index_topk(*a)


def right(a: Arguments, outputs: tuple[Tensor, Tensor], *, ascending: bool = False, exact: bool = False) -> str:
    """All rows are well-formed; in a sample of rows no entry or block is missing that is better than one that is there.

    Better by more than ROUNDING allows in both scores. `ascending`: as ours promises, ascending and then -1. `exact`:
    the scores do not round, so the picks must be the definition's, ties included.
    """
    picks, blocks = outputs
    stop = a.ke.long()
    _well_formed("picks", picks, torch.int64, stop, _listed(a).clamp_max(a.topk), a.topk, ascending)
    rows = torch.linspace(0, len(a.q) - 1, SAMPLE, device=a.q.device).round().long().unique()
    sample = a.rows(rows)
    scores, slack = reference.scores(sample.q, a.k, sample.w), ROUNDING * magnitudes(sample)
    readable = torch.arange(len(a.k), device=a.k.device) < stop[rows, None]
    allowed = readable
    if sample.candidates is not None:
        listed = _mask(sample.candidates, len(a.k) // a.block_size)
        allowed = readable & listed.repeat_interleave(a.block_size, dim=1)
    shares = {"picks": _best("picks", picks[rows], scores, slack, allowed)}
    if a.emit_candidates:
        last = (stop - 1).clamp_min(0) // a.block_size
        _well_formed(
            "blocks", blocks, torch.int32, last + 1, (last + 1).clamp_max(a.topk_blocks), a.topk_blocks, ascending
        )
        maxima = _pinned(scores, readable, last[rows], a.block_size)
        doubt = slack.unflatten(1, (-1, a.block_size)).amax(2)
        shares["blocks"] = _best("blocks", blocks[rows], maxima, doubt, maxima > float("-inf"))
    else:
        assert blocks.shape == (0, 0), f"blocks of shape {tuple(blocks.shape)} that nobody asked for"
    assert not exact or min(shares.values()) == 1, f"not the definition's choice of equal scores: {_percent(shares)}"
    return f"{len(rows)} rows compared with exact scores, of which it has {_percent(shares)}"


def magnitudes(a: Arguments) -> Tensor:
    """What the terms of each score add up to without signs: a cast to e4m3 does not look at the sign."""
    return reference.scores(a.q.abs(), a.k.abs(), a.w.abs())


def _percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{100 * share:.3f} % of the {name}" for name, share in shares.items())


def _listed(a: Arguments) -> Tensor:
    """How many entries each row may pick from."""
    stop = a.ke.long()
    if a.candidates is None:
        return stop
    inside = (stop[:, None] - a.candidates * a.block_size).clamp(0, a.block_size)
    return inside.masked_fill(a.candidates < 0, 0).sum(1)


def _well_formed(
    name: str, found: Tensor, dtype: torch.dtype, stop: Tensor, counts: Tensor, width: int, ascending: bool
) -> None:
    """As many different indices below `stop` as there must be, and -1."""
    wanted = (len(stop), width), dtype
    assert (tuple(found.shape), found.dtype) == wanted, f"{name}: {tuple(found.shape)} {found.dtype}, wanted {wanted}"
    assert ((found >= -1) & (found < stop[:, None])).all(), f"{name}: out of range"
    there = found >= 0
    assert torch.equal(there.sum(1), counts), f"{name}: too few or too many"
    end = torch.iinfo(dtype).max
    ordered = torch.where(there, found, end).sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] < end)
    assert not twice.any(), f"{name}: one of them twice"
    assert not ascending or torch.equal(found, torch.where(ordered < end, ordered, -1)), f"{name}: not ascending"


def _pinned(scores: Tensor, readable: Tensor, last: Tensor, block_size: int) -> Tensor:
    """The best score of each block, +inf for the last of a row."""
    maxima = scores.masked_fill(~readable, float("-inf")).unflatten(1, (-1, block_size)).amax(2)
    return maxima.scatter_(1, last[:, None], float("inf"))


def _best(name: str, found: Tensor, scores: Tensor, slack: Tensor, allowed: Tensor) -> float:
    """Nothing better was left out. Returns the share of the definition's choice that was found."""
    taken = _mask(found, scores.shape[1])
    assert not (taken & ~allowed).any(), f"{name}: not allowed"
    infinite = float("inf")
    worst = (scores + slack).masked_fill(~taken, infinite).amin(1)
    missed = (scores - slack).masked_fill(~allowed | taken, -infinite).amax(1)
    wrong = int((missed > worst).sum())
    assert not wrong, f"{name}: {wrong} of {len(found)} rows lack a better one"
    ranks = reference.rank(scores).masked_fill(~allowed, reference.UNREADABLE)
    wanted = _mask(reference.largest(ranks, found.shape[1]), scores.shape[1])
    return ((taken & wanted).sum() / wanted.sum()).item() if wanted.any() else 1.0


def _mask(indices: Tensor, width: int) -> Tensor:
    """bool (rows, width): the columns that are listed in a row; indices out of range are none."""
    inside = (indices >= 0) & (indices < width)
    mask = torch.zeros(len(indices), width + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(1, torch.where(inside, indices, width).long(), True)[:, :width]


BENCH = Bench(
    name="dsa_indexer_topk",
    title="Index scores and the best entries of each query",
    cases=cases,
    wheels=("hopper-kernels", "dsa-indexer-topk"),
    peers=("sgl-deep-gemm",),
    matmul=torch.float8_e4m3fn,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
