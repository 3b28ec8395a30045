"""Checks of the Triton kernels under Triton's interpreter; those in Gluon cannot be interpreted.

`TRITON_INTERPRET=1 python -m tests.moe_experts.interpreted` prints a JSON object: for each of CASES what failed, "" if
nothing did. The variable is read when triton is imported, hence a process of its own; test_interpreter.py starts it.
"""

import functools

import torch
from moe_experts import plan

from tests.support.interpreted import main

SENTINEL = -77
COUNTS = {
    "one": ([5], 5),
    "few rows and a tail": ([3, 0, 200, 129, 1], 380),
    "whole tiles": ([128, 256, 0], 384),
    "nothing": ([0, 0, 0], 5),
    "no tail": ([0, 130, 0], 130),
    "many tiles": ([128 * 300 + 1, 7], 128 * 300 + 10),
    "many experts": ([70, 0, 1] * 53, 4000),
    "1,023 experts": ([1] * 1023, 1030),
    "1,024 experts": ([1] * 1024, 1030),
    "negative": ([3, -2, 4], 10),
    "too many": ([300, 500], 400),
    "far too many": ([2**40, 5, -(2**40)], 400),
}


def expected(counts: list[int], rows: int) -> tuple[list[int], list[list[int]], bool]:
    """First rows and the end; tiles; whether the counts are good. Bad ones are cut off so that nothing is beyond."""
    starts, tiles, begin = [], [], 0
    sizes = [*counts, rows]
    for expert, count in enumerate(sizes):
        end = min(begin + max(count, 0), rows)
        starts.append(begin)
        tiles += [[expert, row, end - row, SENTINEL] for row in range(begin, end, plan.ROWS)]
        begin = end
    return starts, tiles, min(counts) >= 0 and sum(counts) <= rows


def check_groups(name: str, dtype: torch.dtype) -> None:
    counts, rows = COUNTS[name]
    if dtype == torch.int32:
        counts = [max(-(2**31), min(2**31 - 1, count)) for count in counts]
    where = plan.empty_groups(torch.tensor(counts), rows)
    for part in where:
        part.fill_(SENTINEL)
    plan.groups(torch.tensor(counts, dtype=dtype), rows, where).run()
    starts, tiles, good = expected(counts, rows)
    assert where.starts.tolist() == starts
    assert where.valid.tolist() == [int(good)]
    table = where.tiles.view(-1, 4)
    assert table[0].tolist() == [len(tiles), SENTINEL, SENTINEL, SENTINEL]
    assert len(tiles) <= plan.most_tiles(rows, len(counts))
    assert table[1 : 1 + len(tiles)].tolist() == tiles
    assert (table[1 + len(tiles) :] == SENTINEL).all()


CASES = {
    f"groups: {name}, {dtype}".replace("torch.", ""): functools.partial(check_groups, name, dtype)
    for name in COUNTS
    for dtype in (torch.int32, torch.int64)
}

if __name__ == "__main__":
    main(CASES)
