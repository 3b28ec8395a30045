"""Quantised weight gradients: each expert's blocks of rows are what is summed over (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, tma_load, tma_store_wait
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
from moe_experts.kernels.tiles import in_band

BF16, OVERWRITE, ADD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


@gluon.jit
def _tile(i, blocks, sizes):
    """The i-th tile: expert, row and column of tiles, its first block of rows and the end of them."""
    height, width = sizes
    expert = i // (height * width)
    m, n = in_band(i % (height * width), height, width)
    return expert, m, n, gl.load(blocks + expert), gl.load(blocks + expert + 1)


@gluon.jit
def _load_tiles(sources, rings, b_ring_scales, blocks, tiles, sizes, first, STAGES: gl.constexpr):
    """The loading warp."""
    a, b, a_scales, b_scales = sources
    a_ring, b_ring, a_ring_scales, full, second, empty = rings
    slot = 0
    phase = 0
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _expert, m, n, begin, end = _tile(i, blocks, sizes)
        row = (first + m) * BLOCK
        for k in range(begin, end):
            mbarrier.wait(empty.index(slot), phase ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (HALF + COLUMNS) * BLOCK + 4 * (BLOCK + COLUMNS))
            tma_load(b, [k, n * COLUMNS, 0], bar, b_ring.index(slot).reshape([1, COLUMNS, BLOCK]))
            tma_load(a, [k, row, 0], bar, a_ring.index(2 * slot).reshape([1, HALF, BLOCK]))
            tma_load(a_scales, [k, row], bar, a_ring_scales.index(slot))
            tma_load(b_scales, [k, n * COLUMNS], bar, b_ring_scales.index(slot))
            bar = second.index(slot)
            mbarrier.expect(bar, HALF * BLOCK)
            tma_load(a, [k, row + HALF, 0], bar, a_ring.index(2 * slot + 1).reshape([1, HALF, BLOCK]))
            slot, phase = slot_after(slot, phase, STAGES)


@gluon.jit
def _store_panel(sums, base, pitch, ADDED: gl.constexpr):
    """sums (64, 64) fp32 to rows `pitch` apart, or added to what is there.

    Added in the L2: nothing is read back, and nobody waits. No number of such a layout is in two threads, so none is
    added twice.
    """
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    r = gl.arange(0, HALF, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, PANEL, layout=gl.SliceLayout(0, LAYOUT))
    address = base + (r.to(gl.int64) * pitch)[:, None] + c[None, :]
    if ADDED:
        add: gl.constexpr = "red.relaxed.gpu.global.add.v2.f32 [$2], {$4, $5}; mov.b32 $0, 0; mov.b32 $1, 0;"
        address = address.to(gl.int64, bitcast=True)
        gl.inline_asm_elementwise(add, "=r,=r,l,l,f,f", [address, sums], dtype=gl.int32, is_pure=False, pack=2)
    else:
        gl.store(address, sums)


@gluon.jit
def _multiply_tiles(
    rings,
    b_ring_scales,
    targets,
    staging,
    blocks,
    tiles,
    sizes,
    MINE: gl.constexpr,
    MODE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup, for the 128 columns of each tile from MINE on."""
    out, other_out, split, pitch, expert_pitch, columns = targets
    place = staging.index(MINE // BLOCK)
    slot = 0
    phase = 0
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, m, n, begin, end = _tile(i, blocks, sizes)
        upper, lower, slot, phase = multiply(
            rings, b_ring_scales, slot, phase, end - begin, MINE, True, MODE == BF16, STAGES
        )
        row = m * BLOCK
        if MODE == BF16:
            panels = halves(upper.to(gl.bfloat16)) + halves(lower.to(gl.bfloat16))
            for j in gl.static_range(4):
                below = j // 2 * HALF
                column = n * COLUMNS + MINE + j % 2 * PANEL
                if m < split:
                    put(panels[j], out, [expert, row + below, column], place)
                else:
                    put(panels[j], other_out, [expert, row + below - split * BLOCK, column], place)
        elif ((MODE == OVERWRITE) | (begin < end)) & (n * COLUMNS + MINE < columns):
            base = out + (expert.to(gl.int64) * expert_pitch + row.to(gl.int64) * pitch + n * COLUMNS + MINE)
            parts = halves(upper) + halves(lower)
            for j in gl.static_range(4):
                _store_panel(parts[j], base + (j // 2 * HALF * pitch + j % 2 * PANEL), pitch, MODE == ADD)
    if MODE == BF16:
        tma_store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "tiles",
        "height",
        "width",
        "first",
        "split",
        "columns",
        "pitch_over_4",
        "expert_pitch_over_4",
    ]
)
def weight_grad_kernel(
    a,
    b,
    a_scales,
    b_scales,
    out,
    other_out,
    blocks,
    tiles,
    height,
    width,
    first,
    split,
    columns,
    pitch_over_4,
    expert_pitch_over_4,
    MODE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out (experts, rows, columns) = a^T b over each expert's blocks of 128 rows, with the scales of both.

    a (blocks, channels, 128) and b (blocks, columns, 128) e4m3 panels with a_scales (blocks, channels) and b_scales
    (blocks, columns) fp32 are TMA descriptors. The result's rows are a's channels from 128 first on. tiles = experts x
    height x width tiles of 128 x 256. blocks: see `groups_kernel`. Blocks are added in their order.

    MODE BF16: out is a TMA descriptor, and so is other_out, which has the rows from 128 split on. Others: out is a
    pointer to fp32, whose rows and experts are so many numbers apart, and is overwritten or added to; an expert without
    rows is then left alone. Nothing between rows is written.
    """
    SCALES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32)
    rings = allocate_rings(STAGES)
    b_ring_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, COLUMNS], SCALES)
    if MODE == BF16:
        staging = gl.allocate_shared_memory(gl.bfloat16, [2, 1, HALF, PANEL], out.layout)
    else:
        staging = b_ring_scales
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    sizes = (height, width)
    targets = (out, other_out, split, pitch_over_4.to(gl.int64) * 4, expert_pitch_over_4.to(gl.int64) * 4, columns)
    gl.warp_specialize(
        [
            (_multiply_tiles, (rings, b_ring_scales, targets, staging, blocks, tiles, sizes, 0, MODE, STAGES)),
            (_multiply_tiles, (rings, b_ring_scales, targets, staging, blocks, tiles, sizes, BLOCK, MODE, STAGES)),
            (_load_tiles, ((a, b, a_scales, b_scales), rings, b_ring_scales, blocks, tiles, sizes, first, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [240, 24],  # their registers a thread
    )
