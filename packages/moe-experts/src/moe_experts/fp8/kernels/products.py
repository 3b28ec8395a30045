"""Products of quantised rows with their expert's quantised matrix (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, reinterpret, tma_load, tma_store_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moe_experts.fp8.kernels.tiles import (
    BLOCK,
    COLUMNS,
    HALF,
    PANEL,
    allocate_rings,
    halves,
    multiply,
    put,
    slot_after,
)
from moe_experts.kernels.tiles import in_band, ragged

TABLE = gl.constexpr(128)  # steps whose scales of a weight are in shared memory, for each warpgroup
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _tile(i, table, count, width):
    """The i-th of count x width tiles: expert, first row, rows left in the expert, block of rows, column of tiles."""
    m, n = in_band(i, count, width)
    entry = table + 4 * (1 + m)
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), m, n


@gluon.jit
def _load_tiles(sources, rings, table, sizes, STAGES: gl.constexpr):
    """The loading warp: the steps of each tile."""
    a, b, scales = sources
    a_ring, b_ring, a_scales, full, second, empty = rings
    experts, width, depth = sizes
    count = gl.load(table)
    slot = 0
    phase = 0
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, _row, _left, m, n = _tile(i, table, count, width)
        steps = gl.where(expert < experts, depth, 0)
        for k in range(steps):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (HALF + COLUMNS) * BLOCK + 4 * BLOCK)
            tma_load(b, [expert, n * COLUMNS, k * BLOCK], bar, b_ring.index(slot).reshape([1, COLUMNS, BLOCK]))
            tma_load(a, [m * BLOCK, k * BLOCK], bar, a_ring.index(2 * slot))
            tma_load(scales, [k, m * BLOCK], bar, a_scales.index(slot))
            bar = second.index(slot)
            mbarrier.expect(bar, HALF * BLOCK)
            tma_load(a, [m * BLOCK + HALF, k * BLOCK], bar, a_ring.index(2 * slot + 1))
            slot, phase = slot_after(slot, phase, STAGES)


@gluon.jit
def _scales_of_tile(i, b_scales, table, count, sizes, blocks, MINE: gl.constexpr):
    """(TABLE,): b's scales at each step of the i-th tile, for the columns from MINE on.

    Of no expert, of columns past the end and of steps past the last one: some scales, which nothing uses.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    experts, width, depth = sizes
    expert, _row, _left, _m, n = _tile(i, table, count, width)
    block = gl.minimum(2 * n + MINE // BLOCK, blocks - 1)
    k = gl.minimum(gl.arange(0, TABLE, layout=LAYOUT), depth - 1)
    return gl.load(b_scales + (gl.minimum(expert, experts - 1) * blocks + block) * depth + k)


@gluon.jit
def _multiply_tiles(
    rings,
    scales,
    out,
    staging,
    table,
    sizes,
    MINE: gl.constexpr,
    PADDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup, for the 128 columns of each tile from MINE on. A tile's scales are read a tile ahead."""
    b_scales, tables, blocks = scales
    experts, width, depth = sizes
    count = gl.load(table)
    mine = reinterpret(tables, gl.float32, [2 * TABLE], FLAT).slice(MINE // BLOCK * TABLE, TABLE)
    place = staging.index(MINE // BLOCK)
    slot = 0
    phase = 0
    last = count * width - 1
    following = _scales_of_tile(gl.minimum(gl.program_id(0), last), b_scales, table, count, sizes, blocks, MINE)
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, row, left, m, n = _tile(i, table, count, width)
        steps = gl.where(expert < experts, depth, 0)
        barrier()
        mine.store(following)
        barrier()
        after = gl.minimum(i + gl.num_programs(0), last)
        following = _scales_of_tile(after, b_scales, table, count, sizes, blocks, MINE)
        upper, lower, slot, phase = multiply(rings, tables, slot, phase, steps, MINE, False, False, STAGES)
        if PADDED:
            row = m * BLOCK
            left = gl.where(expert < experts, BLOCK, 0)
        panels = halves(upper.to(gl.bfloat16)) + halves(lower.to(gl.bfloat16))
        for j in gl.static_range(4):
            below = j // 2 * HALF
            at = ragged(row + below, gl.maximum(left - below, 0), n * COLUMNS + MINE + j % 2 * PANEL)
            put(panels[j], out, at, place)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["experts", "width", "depth", "blocks"])
def product_kernel(
    a,
    b,
    out,
    a_scales,
    b_scales,
    table,
    experts,
    width,
    depth,
    blocks,
    PADDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out (rows, columns) bf16 = a b^T, of each row with its expert's b.

    a (Mp, terms) e4m3 in padded rows with a_scales (terms / 128, Mp), b (experts, columns, terms) e4m3 with the pointer
    b_scales (experts, blocks, depth): TMA descriptors but for that. out ends with an expert's rows (`tiles.ragged`).
    With PADDED its rows are padded as those of a, else the M rows, and zeros after the last expert. width: tiles side
    by side; blocks: of columns; depth: of terms, at most TABLE. table: see `groups_kernel`.
    """
    tables = gl.allocate_shared_memory(gl.float32, [2 * TABLE, 1], FLAT)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, HALF, PANEL], out.layout)
    rings = allocate_rings(STAGES)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    scales = (b_scales, tables, blocks)
    sizes = (experts, width, depth)
    gl.warp_specialize(
        [
            (_multiply_tiles, (rings, scales, out, staging, table, sizes, 0, PADDED, STAGES)),
            (_multiply_tiles, (rings, scales, out, staging, table, sizes, BLOCK, PADDED, STAGES)),
            (_load_tiles, ((a, b, a_scales), rings, table, sizes, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [240, 24],  # their registers a thread
    )
