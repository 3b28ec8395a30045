"""Gradient of the SwiGLU, from that of the result, with the SwiGLU's backward at its end (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, reinterpret, tma_load
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import PropagateNan

from moe_experts.kernels.swiglu import swiglu_backward
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
    tile_of_rows,
)

ALL = gl.constexpr(PropagateNan.ALL)
SLICE = gl.constexpr(16)  # rows of a panel that are finished together
SLICES_OF_PANEL = gl.constexpr(HALF // SLICE)
SLICES_OF_HALF = gl.constexpr(PANELS * SLICES_OF_PANEL)


@gluon.jit
def _load_tiles(dout, down_proj, shared, table, sizes, STAGES: gl.constexpr):
    """The loading warp: the steps of each tile."""
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
            tma_load(dout, [row, k * DEPTH], bar, a_ring.index(slot))
            b_tile = b_ring.index(slot).reshape([1, DEPTH, COLUMNS])
            tma_load(down_proj, [expert, k * DEPTH, n * COLUMNS], bar, b_tile)
            step += 1


@gluon.jit
def _place(j, row, left, n, inner, LAYOUT: gl.constexpr):
    """Of the j-th slice of a tile, in the order of shared memory: its first row's offset, columns, what is inside."""
    r = gl.arange(0, SLICE, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    c = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    local = j // SLICES_OF_HALF * HALF + j % SLICES_OF_PANEL * SLICE + r
    column = n * COLUMNS + j % SLICES_OF_HALF // SLICES_OF_PANEL * PANEL + c
    return (row + local).to(gl.int64) * inner, column, (local < left) & (column < inner)


@gluon.jit
def _finish_tiles(results, saved, targets, table, sizes, inner, limit):
    """Two warps that read gate and up and store their gradients, while the others multiply the next tiles. Gate and up
    are read a slice ahead, of a tile's first slice before its gradient is there."""
    panels, full, empty = results
    gate, up = saved
    grad_gate, grad_up, hidden = targets
    experts, width, _depth = sizes
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    slices = reinterpret(panels, gl.bfloat16, [2 * SLICES_OF_HALF, SLICE, PANEL], SWIZZLED)
    count = gl.load(table)
    turn = 0
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, row, left, n = tile_of_rows(i, table, count, width)
        if expert < experts:
            offset, column, inside = _place(0, row, left, n, inner, LAYOUT)
            next_gate = gl.load(gate + offset + column, mask=inside, other=0.0)
            next_up = gl.load(up + offset + column, mask=inside, other=0.0)
            for j in range(2 * SLICES_OF_HALF):
                g = next_gate.to(gl.float32)
                u = next_up.to(gl.float32)
                offset, column, inside = _place(j + 1, row, left, n, inner, LAYOUT)
                inside = inside & (j + 1 < 2 * SLICES_OF_HALF)
                next_gate = gl.load(gate + offset + column, mask=inside, other=0.0)
                next_up = gl.load(up + offset + column, mask=inside, other=0.0)
                half = j // SLICES_OF_HALF
                if j % SLICES_OF_HALF == 0:
                    mbarrier.wait(full.index(half), turn & 1)
                d = slices.index(j).load(LAYOUT).to(gl.float32)
                dg, du, h = swiglu_backward(d, g, u, limit, ALL)
                offset, column, inside = _place(j, row, left, n, inner, LAYOUT)
                gl.store(grad_gate + 2 * offset + column, dg.to(gl.bfloat16), mask=inside)
                gl.store(grad_up + 2 * offset + column, du.to(gl.bfloat16), mask=inside)
                gl.store(hidden + offset + column, h.to(gl.bfloat16), mask=inside)
                mbarrier.arrive(empty.index(half), pred=j % SLICES_OF_HALF == SLICES_OF_HALF - 1)
            turn += 1


@gluon.jit(do_not_specialize=["experts", "width", "depth", "inner_over_8"])
def grad_hidden_kernel(
    dout,
    down_proj,
    gate,
    up,
    grad_gate,
    grad_up,
    hidden,
    table,
    experts,
    width,
    depth,
    inner_over_8,
    limit,
    STAGES: gl.constexpr,
):
    """With d = dout down_proj in bf16: the gradients of gate and up that the SwiGLU's backward makes of it, and hidden,
    the SwiGLU, of the experts' rows.

    dout (rows, channels) and down_proj (experts, channels, inner) are TMA descriptors of bf16, all else are pointers to
    bf16: gate, up and hidden to rows of inner_over_8 * 8, the gradients to rows twice as far apart. Others as for
    `product_kernel`.

    A loading warp fills a ring by TMA; two warpgroups multiply 64 rows of each tile of 128 x 256; two more warps finish
    a tile while these multiply the next.
    """
    a_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], SWIZZLED)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, DEPTH, COLUMNS], SWIZZLED)
    panels = gl.allocate_shared_memory(gl.bfloat16, [2 * PANELS, HALF, PANEL], SWIZZLED)
    full, empty = allocate_barriers(STAGES, 1, 2)
    result_full, result_empty = allocate_barriers(2, 1, 1)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    shared = (a_ring, b_ring, full, empty)
    results = (panels, result_full, result_empty)
    sizes = (experts, width, depth)
    targets = (grad_gate, grad_up, hidden)
    gl.warp_specialize(
        [
            (multiply_and_hand_on, (shared, results, table, sizes, 0, False, False, STAGES)),
            (multiply_and_hand_on, (shared, results, table, sizes, HALF, False, False, STAGES)),
            (_finish_tiles, (results, (gate, up), targets, table, sizes, inner_over_8 * 8, limit)),
            (_load_tiles, (dout, down_proj, shared, table, sizes, STAGES)),
        ],
        [4, 2, 1],  # warps of the workers: the last two are of one warpgroup
        [200, 104, 104],  # their registers a thread
    )
