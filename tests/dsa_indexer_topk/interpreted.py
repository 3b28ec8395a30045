"""Checks of the Triton kernels under Triton's interpreter; those in Gluon cannot be interpreted.

`TRITON_INTERPRET=1 python -m tests.dsa_indexer_topk.interpreted` prints a JSON object: for each of CASES what failed,
"" if nothing did. The variable is read when triton is imported, hence a process of its own; test_interpreter.py starts
it.
"""

import math

import torch
from dsa_indexer_topk import plan, reference
from hopper_kernels import fp8
from torch import Tensor

from tests.support.compare import assert_same_bytes
from tests.support.interpreted import main
from tests.support.memory import guarded

NAN, INF = math.nan, math.inf
ROWS = 8


def rows_like(starts: list[int], lengths: list[int], entries: int, longest: int) -> plan.Rows:
    """Rows of which only the bounds matter."""
    keys, one = torch.empty(entries, 64, dtype=torch.float8_e4m3fn), torch.empty(len(starts), 1)
    ks, ke = torch.tensor(starts, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32) + torch.tensor(lengths)
    return plan.Rows(one, keys, one, one, ks, ke.int(), longest)


def difficult(width: int) -> Tensor:
    """(ROWS, width) scores: random, equal, tied, NaN among them, ascending, nothing but NaN and zeros, one huge."""
    values = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width))
    values[1] = 1.5
    values[2] = values[2].round()
    values[3, ::3] = NAN
    values[4] = torch.arange(width)
    values[5] = NAN
    zeros = values[5, width // 2 : width // 2 + 3]
    zeros.copy_(torch.tensor([0.0, -0.0, 0.0])[: len(zeros)])
    values[6] = -values[6].abs()
    values[6, width // 3], values[6, width // 4] = INF, -INF
    values[7, : width // 2] = -7.0
    return values


def ranks(values: Tensor) -> Tensor:
    return reference.rank(values + 0.0).masked_fill(values.isnan(), reference.UNREADABLE)


def few(topk: int) -> Tensor:
    return guarded((ROWS, plan.few_keys(topk)), torch.int64).tensor


def padded(values: Tensor) -> Tensor:
    """With rows of a multiple of 4, as the kernels read them; what follows a row's scores is better than they are."""
    return torch.nn.functional.pad(values, (0, -values.shape[1] % 4), value=INF)


def check_quantize() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, d in ((1, 64), (31, 128), (33, 64), (64, 128)):
        x = torch.randn(rows, d, generator=generator) * torch.exp2(torch.arange(rows) - 20.0)[:, None]
        x[0, 3], x[rows // 2, 5], x[rows // 3] = NAN, INF, 0.0
        x[rows - 1, 0] = 448 * 2.0**3
        x, w = x.bfloat16(), torch.randn(rows, generator=generator)
        wanted, wanted_scales = fp8.per_row(x)
        for weight in (None, w, w.bfloat16()):
            out, scales = guarded((rows, d), torch.float8_e4m3fn), guarded((rows,), torch.float32)
            plan.quantize(x, weight, out.tensor, scales.tensor).run()
            assert_same_bytes(out.tensor, wanted)
            assert_same_bytes(scales.tensor, wanted_scales / 2 if weight is None else weight.float() * wanted_scales)
            out.check(), scales.check()


def check_entries() -> None:
    for width, topk in ((5, 3), (200, 20), (3000, 7), (3000, 2000)):
        lengths = [width, width, width - 3, width, width, width, 0, -4]
        compare_entries(difficult(width), [3, 0, 10, 0, 5, 0, 0, 9], lengths, topk)


def compare_entries(values: Tensor, starts: list[int], lengths: list[int], topk: int) -> None:
    entries = values.shape[1] + 6
    rows = rows_like(starts, lengths, entries, longest=values.shape[1])
    picks = guarded((ROWS, topk), torch.int64)
    plan.select(rows, padded(values), None, few(topk), picks.tensor, "ENTRIES", 1).run()
    read = torch.tensor([max(0, min(n, entries - s)) for s, n in zip(starts, lengths, strict=True)])
    unread = torch.arange(values.shape[1]) >= read[:, None]
    wanted = reference.largest(ranks(values).masked_fill(unread, reference.UNREADABLE), topk)
    wanted = torch.where(wanted < 0, -1, wanted + torch.tensor(starts)[:, None])
    assert_same_bytes(picks.tensor, wanted)
    picks.check()


def check_ties_and_bounds() -> None:
    """What decides is spread over a row of several chunks, the last of which is partly filled."""
    width, topk, room = 7003, 20, plan.few_keys(20)
    at = torch.arange(width)
    values = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    values[0, 1::4] = NAN
    values[0, :2048] = NAN
    values[1] = torch.where(at % 3 == 1, NAN, -INF)  # -inf is the bound
    values[1, ::500] = 1.0
    values[2] = torch.where(at % 100 == 5, torch.where(at % 200 == 5, 0.0, -0.0), -1.0)
    values[3] = torch.where(at % 6 == 1, 1.0, 0.0)  # the last pick is one of more ties than there is room for
    values[3, ::1400] = 3.0
    for row, count in ((4, room), (5, room + 1)):  # as many as there is room for, and one more
        values[row] = 1.0
        values[row, at[6::6][:count]] = 2.0
    values[6] = 1.0  # more than there is room for reach what 20 classes do, and more than 20 exceed it
    values[6, ::2048] = torch.arange(4.0) + 2
    values[6, 3::2048] = torch.arange(4.0) + 2
    values[6, 5000:5015] = 1.5
    values[7] = torch.where(at % 2048 < 15, 8.0 + at % 2048, 1.0)  # all of the best are in few classes
    for cut in range(4):
        lengths = [width - cut] * ROWS
        compare_entries(values.masked_fill(at >= width - cut, INF), [3] * ROWS, lengths, topk)


def check_groups_and_blocks() -> None:
    sizes = ((3, 4, 2), (100, 8, 20), (2500, 2, 9), (1100, 8, 1050), (40, 1, 5000), (1100, 4, 1), (4500, 1, 4200))
    for items, size, topk in sizes:
        lengths = [items * size, items * size - size + 1, *[items * size] * 4, 1, 0]
        rows = rows_like([0] * ROWS, lengths, entries=items * size, longest=items * size)
        count = -(-torch.tensor(lengths) // size)[:, None]
        for kind, per in (("GROUPS", 1), ("BLOCKS", 1), ("BLOCKS", size)):
            values = difficult(items * per)
            of_an_entry = torch.arange(items * per) >= torch.tensor(lengths)[:, None]
            wanted = ranks(values)
            if per > 1:
                wanted = wanted.masked_fill(of_an_entry, reference.UNREADABLE).unflatten(1, (items, per)).amax(2)
            wanted = wanted.masked_fill(torch.arange(items) >= count, reference.UNREADABLE)
            if kind == "BLOCKS":
                newest = (torch.tensor(lengths) - 1).clamp_min(0)[:, None] // size
                wanted = wanted.scatter(1, newest, reference.PINNED)
            chosen, bounds = guarded((ROWS, topk), torch.int32), guarded((ROWS,), torch.float32)
            arguments = rows, padded(values), None, few(topk), chosen.tensor, kind, size, per
            plan.select(*arguments, bounds=bounds.tensor).run()
            assert_same_bytes(chosen.tensor, reference.largest(wanted, topk).int())
            chosen.check()
            bounds.check()
            readable = values if per > 1 else values.masked_fill(torch.arange(items) >= count, NAN)
            if kind == "GROUPS":
                check_bounds(bounds.tensor, readable, topk)
            if kind == "BLOCKS" and per == 1 and topk > 1:
                check_blocks_with_groups(arguments, readable, chosen.tensor)


def check_blocks_with_groups(arguments: tuple, values: Tensor, blocks: Tensor) -> None:
    """As blocks and groups apart."""
    topk = blocks.shape[1]
    for count in {1, topk // 2, topk - 1}:
        again, groups = guarded(blocks.shape, torch.int32), guarded((ROWS, count), torch.int32)
        bounds = guarded((ROWS,), torch.float32)
        plan.select(*arguments[:4], again.tensor, *arguments[5:], bounds=bounds.tensor, groups=groups.tensor).run()
        assert_same_bytes(again.tensor, blocks)
        assert_same_bytes(groups.tensor, reference.largest(ranks(values), count).int())
        check_bounds(bounds.tensor, values, count)
        again.check(), groups.check(), bounds.check()


def check_bounds(bounds: Tensor, values: Tensor, topk: int) -> None:
    """topk scores of each row reach its bound, and none that does not would be among the topk best."""
    for bound, row in zip(bounds, values, strict=True):
        row = row[~row.isnan()]
        if len(row) < topk:
            assert bound == -INF
        else:
            worst = row.sort(descending=True).values[topk - 1]
            assert bound <= worst
            assert not ((row < worst) & (row >= bound)).any()


def check_bounds_outside_of_the_keys() -> None:
    """Whatever ks and ke hold: nothing else is read, and no difference wraps."""
    least, most, entries, longest = -(2**31), 2**31 - 1, 50, 40
    starts, ends = [least, -5, most, 3, 50, 45, 60, 0], [30, 20, most, least, most, 90, 70, -1]
    rows = rows_like(starts, [0] * ROWS, entries, longest)._replace(ke=torch.tensor(ends, dtype=torch.int32))
    values = torch.randn(ROWS, longest, generator=torch.Generator().manual_seed(0))
    start, stop = (torch.tensor(t).clamp(0, entries)[:, None] for t in (starts, ends))
    wanted = ranks(values).masked_fill(torch.arange(longest) >= stop - start, reference.UNREADABLE)
    picks = guarded((ROWS, 33), torch.int64)
    plan.select(rows, padded(values), None, few(33), picks.tensor, "ENTRIES", 1).run()
    wanted = reference.largest(wanted, 33)
    assert_same_bytes(picks.tensor, torch.where(wanted < 0, -1, wanted + start))
    picks.check()


def kth_best(values: Tensor, topk: int) -> Tensor:
    """Of each row; of every other row, and where there are fewer, -inf."""
    if values.shape[1] < topk:
        return torch.full((ROWS,), -INF)
    best = values.masked_fill(values.isnan(), -INF).sort(1, descending=True).values[:, topk - 1].clone()
    best[::2] = -INF
    return best


def check_candidates() -> None:
    for blocks, size, topk in ((2, 1, 5), (25, 8, 7), (300, 8, 40), (200, 16, 1500)):
        generator = torch.Generator().manual_seed(blocks)
        listed = torch.stack([torch.randperm(blocks + 5, generator=generator)[:blocks] for _ in range(ROWS)]).int()
        rows = rows_like([3, 0, 10, 0, 5, 0, 0, 0], [blocks * size] * ROWS, 10**6, blocks * size)
        values = difficult(blocks * size)
        ordered = listed.sort(1).values
        for kind, candidates in (("UNSORTED", listed), ("UNSORTED", ordered), ("CANDIDATES", ordered)):
            if topk > 1000 and kind == "UNSORTED":
                continue  # the interpreter takes a minute to sort as many
            unique, bounds = torch.ones(1, dtype=torch.int32), kth_best(values, topk)
            entry = (candidates[:, :, None] * size + torch.arange(size, dtype=torch.int32)).flatten(1).long()
            picks = guarded((ROWS, topk), torch.int64)
            arguments = rows, padded(values), candidates, few(topk), picks.tensor, kind, size
            plan.select(*arguments, bounds=bounds, unique=unique).run()
            spread = torch.full((ROWS, (blocks + 5) * size), reference.UNREADABLE, dtype=torch.int32)
            wanted = reference.largest(spread.scatter(1, entry, ranks(values)), topk)
            wanted = torch.where(wanted < 0, -1, wanted + rows.ks[:, None])
            assert_same_bytes(picks.tensor, wanted)
            picks.check()
            assert unique.item() == 1


def check_candidates_named_twice() -> None:
    """Noticed if both are picked, of a tie or not, and whether few or many reach the bound; nothing is overwritten."""
    size = 4
    for blocks in (6, 700):  # 24 entries, and more than `few` has room for
        for name, values, topk, noticed in (
            ("the best", [9.0, 1, 2, 3, 9, 1], 6, True),
            ("a tie for the last pick", [9.0, 1, 2, 2, 2, 1], 7, True),
            ("all equal", [5.0] * 6, 5, True),
            ("not picked", [9.0, 1, 8, 7, 6, 1], 9, False),
        ):
            listed = torch.arange(blocks, dtype=torch.int32)
            listed[4 if noticed else 5] = 0 if noticed else 1
            if name == "a tie for the last pick":
                listed[4] = 2
            scores = torch.tensor(values + [values[1]] * (blocks - 6)).repeat_interleave(size).repeat(2, 1)
            rows = rows_like([0] * 2, [blocks * size] * 2, blocks * size, blocks * size)
            picks, unique = guarded((2, topk), torch.int64), torch.ones(1, dtype=torch.int32)
            plan.select(
                rows, padded(scores), listed.repeat(2, 1), few(topk), picks.tensor, "UNSORTED", size, unique=unique
            ).run()
            picks.check()
            assert unique.item() == (not noticed), name
            if not noticed:
                assert_same_bytes(picks.tensor, torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12]).repeat(2, 1), name)


CASES = {
    "quantize": check_quantize,
    "entries": check_entries,
    "ties and bounds": check_ties_and_bounds,
    "groups and blocks": check_groups_and_blocks,
    "bounds outside of the keys": check_bounds_outside_of_the_keys,
    "candidates": check_candidates,
    "candidates named twice": check_candidates_named_twice,
}

if __name__ == "__main__":
    main(CASES)
