"""Hundreds of random small calls against brute force, of everything at once that a caller may give, and then some."""

import random

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk

from tests.dsa_indexer_topk import inputs, oracle
from tests.support.compare import assert_same_bytes

SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0)
VALUES = {
    "whole": inputs.whole_numbers,
    "normal": torch.randn,
    "of all magnitudes": lambda *shape: torch.randn(shape) * torch.randint(-30, 30, shape).float().exp2(),
    "below the floor": lambda *shape: torch.randn(shape) * 1e-12,
    "zeros of both signs": lambda *shape: torch.where(torch.rand(shape) < 0.5, -0.0, 0.0),
    "equal": torch.ones,
}


def values(*shape):
    """Half of the time whole numbers, whose scores tie."""
    return VALUES[random.choice(("whole",) * 5 + tuple(VALUES)[1:])](*shape).float()


def spoiled(t, share):
    """With a few NaN, infinities and -0, in this share of the calls."""
    if t.numel() and random.random() < share:
        for _ in range(random.randrange(1, 4)):
            t.view(-1)[random.randrange(t.numel())] = random.choice(SPECIAL)
    return t


def random_call(share=0.0):
    """A few rows of any part of up to 24 entries, of any sizes, with bounds beyond the last entry among them."""
    rows, entries = random.randrange(1, 4), random.choice((0, 1, 2, 3, 5, 9, 17, 24))
    ks = torch.tensor([random.randrange(entries + 1) for _ in range(rows)])
    ke = torch.tensor([random.randrange(s, entries + 1) + random.choice((0, 0, 0, 40)) for s in ks.tolist()])
    k = values(entries, 64)
    if entries and random.random() < 0.3:
        k[random.randrange(entries)] = k[random.randrange(entries)]
    block_size, integers = random.choice((1, 2, 4, 8, 16)), random.choice((torch.int32, torch.int64))
    candidates = None
    if random.random() < 0.6:
        width = random.choice((0, 1, 2, 5, 30))
        order = torch.rand(rows, max(width, entries // block_size + 4)).argsort(1)[:, :width]
        none = torch.rand(order.shape) < 0.2
        candidates = torch.where(none, torch.randint(-3, 0, order.shape), order).to(integers)
    return inputs.Arguments(
        spoiled(values(rows, 16, 64), share / 2).bfloat16(),
        spoiled(k, share).bfloat16(),
        spoiled(values(rows, 16), share / 2).to(random.choice((torch.bfloat16, torch.float32))),
        ks.to(integers),
        ke.to(integers),
        random.choice((0, 1, 2, 3, 7, 40)),
        candidates,
        random.random() < 0.6,
        random.choice((entries + 40, 1000)),
        block_size,
        random.choice((0, 1, 2, 5, 30)),
    )


@pytest.mark.parametrize("share", [0.0, 0.8], ids=["finite", "with NaN and infinities"])
@pytest.mark.parametrize("part", range(3))
def test_against_brute_force(part, share):
    for _ in range(80):
        a = random_call(share)
        for name, got, want in zip(("picks", "blocks"), dsv41_index_topk(*a), oracle.index_topk(a), strict=True):
            assert_same_bytes(got, want, f"{name} of {a}")


def test_the_calls_are_of_all_kinds():
    """Each mode, ties at the last pick, rows without entries, unreadable ones: each often enough to matter."""
    seen = dict.fromkeys(("plain", "source", "consumer", "both", "tie", "empty", "unreadable", "infinite"), 0)
    for _ in range(200):
        a = random_call(0.8)
        seen[inputs.MODES[2 * (a.candidates is not None) + a.emit_candidates]] += 1
        read = [range(first, last) for first, last in zip(a.ks.tolist(), a.ke.tolist(), strict=True)]
        for row, entries in zip(oracle.scores(a.q, a.k, a.w, read), read, strict=True):
            known = sorted((row[e] for e in entries if e < len(row) and row[e] == row[e]), reverse=True)
            seen["empty"] += len(entries) == 0
            seen["unreadable"] += len(known) < len([e for e in entries if e < len(row)])
            seen["infinite"] += any(abs(s) == float("inf") for s in known)
            seen["tie"] += 0 < a.topk < len(known) and known[a.topk - 1] == known[a.topk]
    assert min(seen.values()) >= 5, seen
