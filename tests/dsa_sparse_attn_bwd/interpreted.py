"""Checks of the Triton kernels under Triton's interpreter; the one in Gluon cannot be interpreted.

`TRITON_INTERPRET=1 python -m tests.dsa_sparse_attn_bwd.interpreted` prints a JSON object: for each of CASES what
failed, "" if nothing did. test_interpreter.py starts it.
"""

import math

import torch
from dsa_sparse_attn_bwd import plan
from torch import Tensor

from tests.support.compare import assert_same_bytes
from tests.support.interpreted import main
from tests.support.memory import guarded

INF, NAN = math.inf, math.nan
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
ROWS = 50


def slots_of(width: int) -> Tensor:
    """(7, width): random, all of them empty, none, with numbers beyond the rows, and the last one alone."""
    indices = torch.randint(0, ROWS, (7, width), dtype=torch.int32)
    indices[0, torch.rand(width) < 0.4] = -1
    indices[1] = -1
    indices[3, ::2] = ROWS
    indices[4, ::3], indices[4, 1::3] = INT_MAX, INT_MIN
    indices[5, :-1] = -7
    return indices


def check_slots() -> None:
    for width in (1, 63, 64, 65, 130, 1100):
        found = prepared(indices := slots_of(width))
        named = [row[(row >= 0) & (row < ROWS)] for row in indices]
        assert_same_bytes(found.counts, torch.tensor([len(row) for row in named], dtype=torch.int32))
        for row, wanted in zip(found.slots, named, strict=True):
            assert_same_bytes(row[: len(wanted)], wanted)


def check_sums() -> None:
    """The softmax's sums with sinks from nothing to everything, for any logarithm; queries without slots."""
    lse = torch.randn(7, 16) * 3
    lse[2], lse[3], lse[1] = -1e4, 1e4, NAN
    sinks = torch.tensor([-INF, -1e4, -60.0, -30.0, -17.0, -1.0, 0.0, 1.0, 17.0, 30.0, 60.0, 1e4, INF, 2.0, 3.0, 4.0])
    found = prepared(slots_of(9), lse=lse, sinks=sinks)
    wanted = torch.logaddexp(lse.double(), sinks.double())
    shares = torch.exp(sinks - wanted).masked_fill(sinks == INF, 1.0)
    left = found.counts > 0
    assert not left.all()
    assert left.sum() == 6
    torch.testing.assert_close(found.logs[left].double(), (wanted * plan.LOG2_E)[left], rtol=3e-7, atol=1e-7)
    torch.testing.assert_close(found.shares[left].double(), (-shares * found.deltas.double())[left], rtol=3e-6, atol=0)
    assert (found.logs[~left] == INF).all()
    assert not found.deltas[~left].any()
    assert not found.shares[~left].any()


def check_small_differences() -> None:
    """log(e^lse + e^sink) keeps what a sink far below adds."""
    lse, sinks = torch.zeros(7, 16), -torch.arange(16.0) * 1.5
    found = prepared(slots_of(9), lse=lse, sinks=sinks)
    wanted = torch.log1p(torch.exp(sinks.double())) * plan.LOG2_E
    torch.testing.assert_close(found.logs[0].double(), wanted, rtol=1e-6, atol=0)


def check_late_deltas() -> None:
    """Long lists leave delta to the products, and the sinks' weights for these."""
    for width in (449, 640):
        short = slots_of(9)
        early, late = prepared(short), prepared(torch.nn.functional.pad(short, (0, width - 9), value=-1))
        assert (early.late_deltas, late.late_deltas) == (False, True)
        assert late.counts.tolist()[1] == 0
        weights = late.shares[[0, 2, 3]]
        torch.testing.assert_close(-weights * early.deltas[[0, 2, 3]], early.shares[[0, 2, 3]], rtol=1e-6, atol=0)
        assert not late.shares[1].any()
        assert_same_bytes(late.logs, early.logs)
        assert late.deltas.isnan().all()


def check_delta() -> None:
    for heads in (16, 64):
        g, out = (torch.randn(7, heads, 512).bfloat16() for _ in range(2))
        wanted = (g.double() * out.double()).sum(dim=2)
        whole = prepared(slots_of(9), g=g, out=out)
        left = whole.counts > 0
        torch.testing.assert_close(whole.deltas[left].double(), wanted[left], rtol=1e-5, atol=1e-4)
        for tail in (64, 128, 512):
            cut = out.clone()
            cut[:, :, -tail:] = NAN
            found = prepared(slots_of(9), g=g, out=cut, tail=out[:, :, -tail:].contiguous())
            assert_same_bytes(found.deltas, whole.deltas)
            assert_same_bytes(found.shares, whole.shares)


def check_numbers_of_empty_queries() -> None:
    g, out = (torch.randn(7, 16, 512).bfloat16() for _ in range(2))
    wanted = prepared(slots_of(9), g=g, out=out)
    for value in (NAN, INF):
        odd, odder = g.clone(), out.clone()
        odd[1], odder[1] = value, -value
        found = prepared(slots_of(9), g=odd, out=odder)
        for name in ("deltas", "logs", "shares"):
            assert_same_bytes(getattr(found, name), getattr(wanted, name))


def prepared(
    indices: Tensor,
    g: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    sinks: Tensor | None = None,
    tail: Tensor | None = None,
) -> plan.Queries:
    queries, width = indices.shape
    torch.manual_seed(7)
    if g is None or out is None:
        g, out = (torch.randn(queries, 16, 512).bfloat16() for _ in range(2))
    heads = g.shape[1]
    lse = torch.randn(queries, heads) if lse is None else lse
    sinks = torch.randn(heads) if sinks is None else sinks
    slots, counts = guarded((queries, plan.pitch(width)), torch.int32), guarded((queries,), torch.int32)
    of_heads = [guarded((queries, heads), torch.float32) for _ in range(3)]
    found = plan.Queries(g, g, out, tail, slots.tensor, counts.tensor, *(one.tensor for one in of_heads))
    plan.prepare(found, lse, sinks, indices, ROWS).run()
    for one in (slots, counts, *of_heads):
        one.check()
    return found


def place_of(channel: Tensor) -> Tensor:
    """Where a channel is in the sums."""
    bit = [channel >> i & 1 for i in range(6)]
    return channel // 64 * 64 + bit[0] + 2 * bit[3] + 4 * bit[1] + 8 * bit[2] + 16 * bit[5] + 32 * bit[4]


def check_finish() -> None:
    for rows in (1, 16, 37):
        wanted = torch.randn(rows, 512)
        sums, dkv = torch.full((rows + plan.SCRATCH, 512), NAN), guarded((rows, 512), torch.bfloat16)
        sums[:rows, place_of(torch.arange(512))] = wanted
        plan.finish(sums, dkv.tensor).run()
        assert_same_bytes(dkv.tensor, wanted.bfloat16())
        dkv.check()


def check_add() -> None:
    """Sums of whole numbers, so of any order: rows with no part, one, a few, more than are read at a time."""
    counts = torch.tensor([3, 0, 1, 20, 0, 8, 9])
    parts = torch.randint(-50, 50, (60, 512)).float()
    order = torch.randperm(60)[: int(counts.sum())]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    before = torch.randint(-50, 50, (7, 512)).float()
    sums = guarded((7, 512), torch.float32)
    sums.tensor.copy_(before)
    plan.add(parts, order, starts, sums.tensor).run()
    for row in range(7):
        mine = order[starts[row] : starts[row + 1]]
        assert_same_bytes(sums.tensor[row], before[row] + parts[mine].sum(dim=0))
    sums.check()


CASES = {
    "slots": check_slots,
    "sums": check_sums,
    "small differences": check_small_differences,
    "delta": check_delta,
    "late deltas": check_late_deltas,
    "numbers of empty queries": check_numbers_of_empty_queries,
    "finish": check_finish,
    "add": check_add,
}

if __name__ == "__main__":
    main(CASES)
