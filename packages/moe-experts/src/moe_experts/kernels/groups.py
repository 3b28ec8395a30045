"""Where each expert's rows are, and the tiles that cover them (Triton)."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["experts", "rows", "most"])
def groups_kernel(
    counts,
    starts,
    blocks,
    tiles,
    valid,
    experts,
    rows,
    most,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """starts (experts + 1,) int32: each expert's first row, and the end of the last one.

    blocks (experts + 1,) int32: each expert's first tile, and the end of the last one's.
    tiles (most + 1, 4) int32: the number of tiles, then from [1] on, for each tile of up to ROWS rows, its expert, its
    first row, and how many rows of the expert there are from it on. Rows after the last expert are tiles of the expert
    `experts`, which there is not. valid: one int32, 1 if no count is negative and their sum is at most `rows`; no tile
    goes beyond `rows` even if it is 0. Program e writes what concerns expert e. EXPERTS: more than experts.
    """
    e = tl.program_id(0)
    i = tl.arange(0, EXPERTS)
    count = tl.load(counts + i, mask=i < experts, other=0).to(tl.int64)
    inside = tl.minimum(tl.maximum(count, 0), rows)
    running = tl.cumsum(inside)
    ends = tl.where(i < experts, tl.minimum(running, rows), rows)
    begins = tl.minimum(running - inside, rows)  # of the rows after the last expert too: it has no count
    size = tl.where(i <= experts, ends - begins, 0)
    tile_count = (size + ROWS - 1) // ROWS
    first_tile = tl.sum(tl.where(i < e, tile_count, 0)).to(tl.int32)
    begin = tl.sum(tl.where(i == e, begins, 0)).to(tl.int32)
    mine = tl.sum(tl.where(i == e, size, 0)).to(tl.int32)
    tl.store(starts + e, begin)
    tl.store(blocks + e, first_tile)
    for first in range(0, tl.cdiv(mine, ROWS), CHUNK):
        tile = first + tl.arange(0, CHUNK)
        inside_tiles = (tile * ROWS < mine) & (first_tile + tile < most)
        entry = tiles + 4 * (1 + first_tile + tile)
        tl.store(entry, tl.zeros([CHUNK], tl.int32) + e, mask=inside_tiles)
        tl.store(entry + 1, begin + tile * ROWS, mask=inside_tiles)
        tl.store(entry + 2, mine - tile * ROWS, mask=inside_tiles)
    if e == 0:
        tl.store(tiles, tl.sum(tile_count).to(tl.int32))
        good = (tl.min(count) >= 0) & (tl.sum(count) <= rows)
        tl.store(valid, good.to(tl.int32))
