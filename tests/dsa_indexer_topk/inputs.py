"""Inputs of the tests: packed documents as a trainer has them, scores made by hand, and operands under all strides."""

import torch
from torch import Tensor

from benches.peers.index_topk import Arguments

MODES = ("plain", "source", "consumer", "both")


def bounds(documents: tuple[int, ...], ratio: int = 1) -> tuple[Tensor, Tensor]:
    """ks and ke, int32, of all tokens of packed documents with one entry for `ratio` tokens."""
    ks, ke, first = [], [], 0
    for length in documents:
        ks += [first] * length
        ke += [first + (position + 1) // ratio for position in range(length)]
        first += length // ratio
    return torch.tensor(ks, dtype=torch.int32), torch.tensor(ke, dtype=torch.int32)


def whole_numbers(*shape: int) -> Tensor:
    """-2 .. 2, whose scores tie often."""
    return torch.randint(-2, 3, shape)


def arguments(
    documents: tuple[int, ...] = (13, 1, 9),
    ratio: int = 1,
    *,
    heads: int = 16,
    head_dim: int = 64,
    topk: int = 5,
    mode: str = "plain",
    block_size: int = 4,
    topk_blocks: int = 3,
    numbers=torch.randn,
) -> Arguments:
    """A call for every token of packed documents; `mode` says whether there are candidates, and whether to emit."""
    ks, ke = bounds(documents, ratio)
    rows, entries = len(ks), sum(length // ratio for length in documents)
    candidates = blocks(rows, entries, block_size) if mode in ("consumer", "both") else None
    return Arguments(
        numbers(rows, heads, head_dim).bfloat16(),
        numbers(entries, head_dim).bfloat16(),
        numbers(rows, heads).bfloat16(),
        ks,
        ke,
        topk,
        candidates,
        mode in ("source", "both"),
        max((length // ratio for length in documents), default=0),
        block_size,
        topk_blocks,
    )


def blocks(rows: int, entries: int, block_size: int, width: int = 5) -> Tensor:
    """Unsorted blocks of each row, some beyond its entries, with -1 anywhere."""
    order = torch.rand(rows, max(width, -(-entries // block_size) + 2)).argsort(1)[:, :width].int()
    return torch.where(torch.rand(order.shape) < 0.2, -1, order)


def scored(wanted: list[list[int]], **options) -> Arguments:
    """A call whose scores are the whole numbers `wanted` of at most 4 bits, for up to 64 entries; 16 heads.

    Entry e is the unit vector e, head 0 of a query holds the positive scores, head 1, of weight -1, the negative ones.
    By default one document, of which each row reads everything.
    """
    value = torch.tensor(wanted, dtype=torch.float32).reshape(len(wanted), -1)
    rows, entries = value.shape
    q, w = torch.zeros(rows, 16, 64), torch.zeros(rows, 16)
    q[:, 0, :entries], q[:, 1, :entries] = value.clamp_min(0), -value.clamp_max(0)
    w[:, 0], w[:, 1] = 1, -1
    made = Arguments(
        q.bfloat16(),
        torch.eye(64)[:entries].bfloat16(),
        w.bfloat16(),
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), entries, dtype=torch.int32),
        topk=3,
        candidates=None,
        emit_candidates=False,
        max_entries_per_doc=entries,
        block_size=2,
        topk_blocks=3,
    )
    given = {name: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for name, v in options.items()}
    return made._replace(**given)


def with_scores(values: Tensor, rows: int = 1, *, heads: int = 16, head_dim: int = 64, **options) -> Arguments:
    """A call whose rows have these scores: whole numbers below 2^24 of either sign, of any number of entries.

    Head j reads one hexadecimal digit of a key and weighs it by 16^j (digits of negative numbers: six heads further, of
    negative weights), so that no sum rounds, in whatever order and however few bits it is formed. By default one
    document, of which each row reads everything.
    """
    digits = (values.abs()[:, None] >> torch.arange(0, 24, 4)) & 15
    k, q, w = torch.zeros(len(values), head_dim), torch.zeros(rows, heads, head_dim), torch.zeros(rows, heads)
    k[:, :6], k[:, 6:12] = digits * (values[:, None] > 0), digits * (values[:, None] < 0)
    q[:, range(12), range(12)] = 1
    w[:, :6] = 16.0 ** torch.arange(6)
    w[:, 6:12] = -w[:, :6]
    made = Arguments(
        q.bfloat16(),
        k.bfloat16(),
        w.bfloat16(),
        torch.zeros(rows, dtype=torch.int32),
        torch.full((rows,), len(values), dtype=torch.int32),
        topk=512,
        candidates=None,
        emit_candidates=False,
        max_entries_per_doc=len(values),
        block_size=8,
        topk_blocks=2048,
    )
    return made._replace(**options)


# Scores of n entries for `with_scores` that a selection may find hard.
DISTRIBUTIONS = {
    "all equal": lambda n: torch.full((n,), 7),
    "all zero": lambda n: torch.zeros(n, dtype=torch.long),
    "two values": lambda n: torch.randint(0, 2, (n,)) * 3 + 5,
    "two neighbours in fp32": lambda n: 2**23 + torch.randint(0, 2, (n,)),
    "a band of neighbours in fp32": lambda n: 2**23 + torch.randperm(n),
    "ascending": torch.arange,
    "descending": lambda n: torch.arange(n).flip(0),
    "all negative": lambda n: -1 - torch.randperm(n) // 3,
    "of both signs": lambda n: torch.randperm(n) - n // 2,
    "one huge": lambda n: torch.randint(0, 16, (n,)).index_fill(0, torch.tensor([n * 2 // 3]), 2**24 - 1),
    "few above many": lambda n: torch.where(torch.rand(n) < 0.01, 1000 + torch.randperm(n), 1),
}


def _inside(t: Tensor) -> Tensor:
    """The values of t as a slice along the last axis, others around it."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 5), 77)
    view = wide[..., 3 : 3 + t.shape[-1]]
    view.copy_(t)
    return view


# Each takes a contiguous tensor and returns the same values with other strides.
STRIDES = {
    "slice": _inside,
    "base off by one element": lambda t: t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t),
    "every second of the first axis": lambda t: t.repeat_interleave(2, 0)[::2],
    "every second of the last axis": lambda t: t.repeat_interleave(2, t.ndim - 1)[..., ::2],
    "last axis outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
    "last axes swapped": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2) if t.ndim > 1 else t,
}
