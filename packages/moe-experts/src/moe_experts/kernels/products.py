"""Products of rows with their expert's matrices, one or the sum of two (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, tma_load, tma_store_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from moe_experts.kernels.tiles import (
    COLUMNS,
    DEPTH,
    HALF,
    PANEL,
    PANELS,
    ROWS,
    SWIZZLED,
    allocate_barriers,
    multiply,
    next_slot,
    panels_of,
    put,
    ragged,
    tile_of_rows,
)


@gluon.jit
def _load_tiles(sources, shared, table, sizes, PRODUCTS: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp: the steps of each tile."""
    a, b, other_a, other_b = sources
    a_ring, b_ring, full, _empty = shared
    experts, width, depth = sizes
    count = gl.load(table)
    step = 0
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, row, _left, n = tile_of_rows(i, table, count, width)
        steps = gl.where(expert < experts, depth, 0)
        for k in range(steps):
            slot = next_slot(shared, step, STAGES)
            bar = full.index(slot)
            if PRODUCTS == 1:
                tma_load(a, [row, k * DEPTH], bar, a_ring.index(slot))
                tma_load(b, [expert, n * COLUMNS, k * DEPTH], bar, b_ring.index(slot).reshape([1, COLUMNS, DEPTH]))
            else:
                tma_load(a, [row, k * DEPTH], bar, a_ring.index(slot))
                tma_load(b, [expert, k * DEPTH, n * COLUMNS], bar, b_ring.index(slot).reshape([1, DEPTH, COLUMNS]))
            step += 1
        if PRODUCTS == 2:
            for k in range(steps):
                slot = next_slot(shared, step, STAGES)
                bar = full.index(slot)
                tma_load(other_a, [row, k * DEPTH], bar, a_ring.index(slot))
                b_tile = b_ring.index(slot).reshape([1, DEPTH, COLUMNS])
                tma_load(other_b, [expert, k * DEPTH, n * COLUMNS], bar, b_tile)
                step += 1


@gluon.jit
def _multiply_tiles(
    shared, out, staging, table, sizes, MINE: gl.constexpr, PRODUCTS: gl.constexpr, STAGES: gl.constexpr
):
    """A warpgroup, for the 64 rows of each tile from MINE on."""
    experts, width, depth = sizes
    count = gl.load(table)
    step = 0
    turn = 2 * (MINE // HALF)  # this warpgroup's places in staging
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, row, left, n = tile_of_rows(i, table, count, width)
        steps = gl.where(expert < experts, PRODUCTS * depth, 0)
        sums, step = multiply(shared, step, steps, MINE, PRODUCTS == 1, STAGES)
        panels = panels_of(sums)
        left = gl.maximum(left - MINE, 0)
        for j in gl.static_range(PANELS):
            turn = put(panels[j], out, ragged(row + MINE, left, n * COLUMNS + j * PANEL), staging, turn)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["experts", "width", "depth"])
def product_kernel(
    a,
    b,
    other_a,
    other_b,
    out,
    table,
    experts,
    width,
    depth,
    PRODUCTS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out (rows, columns) bf16: with PRODUCTS 1, a b^T of each row with its expert's b (columns, terms); with 2,
    a b + other_a other_b, in one sum, of (terms, columns). Zeros after the last expert.

    All are TMA descriptors of bf16: a (rows, terms), b (experts, ...), out of rows that end with their expert
    (`tiles.ragged`). table: see `groups_kernel`; width: tiles side by side; depth: steps of 64 terms of a product.

    A loading warp fills a ring by TMA; two warpgroups have 64 rows of each tile of 128 x 256. Programs take the tiles
    in turn, in the order of `in_band`.
    """
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], SWIZZLED)
    if PRODUCTS == 1:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], SWIZZLED)
    else:
        b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, DEPTH, COLUMNS], SWIZZLED)
    staging = gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, HALF, PANEL], out.layout)
    full, empty = allocate_barriers(STAGES, 1, 2)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    shared = (a_ring, b_ring, full, empty)
    sizes = (experts, width, depth)
    gl.warp_specialize(
        [
            (_multiply_tiles, (shared, out, staging, table, sizes, 0, PRODUCTS, STAGES)),
            (_multiply_tiles, (shared, out, staging, table, sizes, HALF, PRODUCTS, STAGES)),
            (_load_tiles, ((a, b, other_a, other_b), shared, table, sizes, PRODUCTS, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [240, 24],  # their registers a thread
    )
