"""Gate and up projection with the clamped SwiGLU at their end (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, reinterpret, tma_load, tma_store, tma_store_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import PropagateNan

from moe_experts.kernels.swiglu import swiglu
from moe_experts.kernels.tiles import (
    COLUMNS,
    DEPTH,
    HALF,
    PANEL,
    PANELS,
    ROWS,
    SWIZZLED,
    allocate_barriers,
    multiply_and_hand_on,
    next_slot,
    ragged,
    tile_of_rows,
)

WIDTH = gl.constexpr(COLUMNS // 2)  # channels of a tile, each with its gate and its up
ALL = gl.constexpr(PropagateNan.ALL)
SLICE = gl.constexpr(16)  # rows of a panel that are finished together


@gluon.jit
def _load_tiles(sources, shared, table, sizes, STAGES: gl.constexpr):
    """The loading warp: the steps of each tile."""
    x, gate_proj, up_proj = sources
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
            both = b_ring.index(slot).reshape([1, COLUMNS, DEPTH])
            tma_load(x, [row, k * DEPTH], bar, a_ring.index(slot))
            tma_load(gate_proj, [expert, n * WIDTH, k * DEPTH], bar, both.slice(0, WIDTH, dim=1))
            tma_load(up_proj, [expert, n * WIDTH, k * DEPTH], bar, both.slice(WIDTH, WIDTH, dim=1))
            step += 1


@gluon.jit
def _finish_tiles(results, targets, table, sizes, inner, limit):
    """Two warps that stores gate and up, and the SwiGLU of them, while the others multiply the next tiles."""
    panels, full, empty = results
    gate, up, hidden = targets
    experts, width, _depth = sizes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    r = gl.arange(0, SLICE, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    slices = reinterpret(panels, gl.bfloat16, [2 * PANELS * HALF // SLICE, SLICE, PANEL], SWIZZLED)
    count = gl.load(table)
    turn = 0
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, row, left, n = tile_of_rows(i, table, count, width)
        if expert < experts:
            for half in range(2):
                mbarrier.wait(full.index(half), turn & 1)
                first = row + half * HALF
                inside = gl.maximum(left - half * HALF, 0)
                for j in gl.static_range(PANELS // 2):
                    at = ragged(first, inside, n * WIDTH + j * PANEL)
                    tma_store(gate, at, panels.index(PANELS * half + j))
                    tma_store(up, at, panels.index(PANELS * half + PANELS // 2 + j))
                for j in range(PANELS // 2 * HALF // SLICE):
                    one = PANELS * half * (HALF // SLICE) + j
                    g = slices.index(one).load(LAYOUT).to(gl.float32)
                    u = slices.index(one + PANELS // 2 * HALF // SLICE).load(LAYOUT).to(gl.float32)
                    h = swiglu(g, u, limit, ALL).to(gl.bfloat16)
                    local = j % (HALF // SLICE) * SLICE + r
                    column = n * WIDTH + j // (HALF // SLICE) * PANEL + c
                    address = hidden + (first + local).to(gl.int64) * inner + column
                    gl.store(address, h, mask=(local < inside) & (column < inner))
                tma_store_wait(0)
                mbarrier.arrive(empty.index(half))
            turn += 1


@gluon.jit(do_not_specialize=["experts", "width", "depth", "inner_over_8"])
def gate_up_kernel(
    x,
    gate_proj,
    up_proj,
    gate,
    up,
    hidden,
    table,
    experts,
    width,
    depth,
    inner_over_8,
    limit,
    STAGES: gl.constexpr,
):
    """gate = x gate_proj^T, up = x up_proj^T, and hidden, the SwiGLU of what these are in bf16.

    Each is (rows, inner) bf16, written in the experts' rows.

    TMA descriptors of bf16: x (rows, channels), the projections (experts, inner, channels), gate and up, which end with
    their expert (`tiles.ragged`). hidden: a pointer, to rows of inner_over_8 * 8. Others as for `product_kernel`.

    A loading warp fills a ring by TMA; two warpgroups multiply 64 rows of each tile, whose columns are 128 of gate and
    the same of up; two more warps finish a tile while these multiply the next.
    """
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], SWIZZLED)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], SWIZZLED)
    panels = gl.allocate_shared_memory(gl.bfloat16, [2 * PANELS, 1, 1, HALF, PANEL], gate.layout)
    full, empty = allocate_barriers(STAGES, 1, 2)
    result_full, result_empty = allocate_barriers(2, 1, 1)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    shared = (a_ring, b_ring, full, empty)
    results = (panels, result_full, result_empty)
    sizes = (experts, width, depth)
    gl.warp_specialize(
        [
            (multiply_and_hand_on, (shared, results, table, sizes, 0, True, True, STAGES)),
            (multiply_and_hand_on, (shared, results, table, sizes, HALF, True, True, STAGES)),
            (_finish_tiles, (results, (gate, up, hidden), table, sizes, inner_over_8 * 8, limit)),
            (_load_tiles, ((x, gate_proj, up_proj), shared, table, sizes, STAGES)),
        ],
        [4, 2, 1],  # warps of the workers: the last two are of one warpgroup
        [200, 104, 104],  # their registers a thread
    )
