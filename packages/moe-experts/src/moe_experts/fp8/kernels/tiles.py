"""What the FP8 products share: rings of operands with their scales, and the loop that multiplies blocks (Gluon).

A tile of a result is 128 rows x 256 columns; a step is 128 terms, the block that has a scale. Two warpgroups have 128
columns each, and form a step's sums of the upper and of the lower 64 rows one after the other on the tensor cores: what
the tensor cores add up of a block is multiplied by the scales and added in fp32. Functions here have the constants that
they need in themselves, as in `moe_experts.kernels.tiles`.
"""

from hopper_kernels.gluon_names import barrier, tma_store, tma_store_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_experts.kernels.tiles import allocate_barriers

BLOCK = gl.constexpr(128)
HALF = gl.constexpr(64)  # rows of a step's sums
PANEL = gl.constexpr(64)  # columns of bf16 that lie together in shared memory
COLUMNS = gl.constexpr(256)


@gluon.jit
def allocate_rings(STAGES: gl.constexpr):
    """Rings of a in two halves of 64 rows, of b (256 x 128), and of the scales of a's rows, and their barriers.

    `full` says that all but the lower half of a is there, `second` that this is. There must be no barrier that is not
    used: its memory would be given to a ring, whose data the hardware then overwrites now and then.
    """
    CODES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8)
    SCALES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32)
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, 128], CODES)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 256, 128], CODES)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 128], SCALES)
    full, empty = allocate_barriers(STAGES, 1, 2)
    second = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(second.index(s), count=1)
    return a_ring, b_ring, a_scales, full, second, empty


@gluon.jit
def slot_after(slot, phase, STAGES: gl.constexpr):
    """The next slot of a ring, and the phase of its barriers."""
    slot += 1
    phase = gl.where(slot == STAGES, phase ^ 1, phase)
    return gl.where(slot == STAGES, 0, slot), phase


@gluon.jit
def multiply(
    rings,
    scales,
    slot,
    phase,
    steps,
    MINE: gl.constexpr,
    BY_COLUMNS: gl.constexpr,
    AHEAD: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup: sums (64, 128) of the upper and of the lower rows over the next steps, for the columns from MINE on.

    Also returns the slot and the phase after them. scales, in shared memory: with BY_COLUMNS those of b's columns, a
    ring of (STAGES, 1, 256), else of b's blocks, (2 * most steps, 1), each step's first for the one warpgroup.

    Each warpgroup promotes one half's sums while the other one's are on the tensor cores. So between the end of a sum
    and the start of the next there is nothing but the promotion: barriers are met while a sum is on its way. With AHEAD
    scales of columns are read as soon as those of the step before have been used, which takes registers at the end.
    """
    a_ring, b_ring, a_scales, full, second, empty = rings
    half: gl.constexpr = a_ring.shape[1]
    block: gl.constexpr = a_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block, 32])
    ROWS: gl.constexpr = gl.SliceLayout(1, layout)
    LINE: gl.constexpr = gl.SliceLayout(0, layout)
    upper = gl.zeros([half, block], gl.float32, layout)
    lower = gl.zeros([half, block], gl.float32, layout)
    sums = gl.zeros([half, block], gl.float32, layout)
    before = 0  # not `slot`: Triton would take the line in the loop for the same value, and keep this one
    mbarrier.wait(full.index(slot), phase, pred=steps > 0)
    if AHEAD:
        of_columns = scales.index(slot).reshape([2 * block]).slice(MINE, block).load(LINE)
    for k in range(steps):
        b_tile = b_ring.index(slot).slice(MINE, block).permute((1, 0))
        sums = warpgroup_mma(a_ring.index(2 * slot), b_tile, sums, use_acc=False, is_async=True)
        if not BY_COLUMNS:
            mbarrier.arrive(empty.index(before), pred=k > 0)
        of_rows = a_scales.index(slot).reshape([2 * half])
        of_upper = of_rows.slice(0, half).load(ROWS)
        of_lower = of_rows.slice(half, half).load(ROWS)
        if BY_COLUMNS and not AHEAD:
            of_columns = scales.index(slot).reshape([2 * block]).slice(MINE, block).load(LINE)
        if not BY_COLUMNS:
            of_block = scales.index(MINE // block * (scales.shape[0] // 2) + k).load(ROWS).broadcast_to(half)
            of_upper *= of_block
            of_lower *= of_block
        mbarrier.wait(second.index(slot), phase)
        sums = warpgroup_mma_wait(0, deps=[sums])
        if BY_COLUMNS:
            sums *= of_columns[None, :]
        upper = gl.fma(sums, of_upper[:, None].broadcast_to(sums.shape), upper)
        upper = warpgroup_mma_wait(0, deps=[upper])  # waits for nothing: keeps the promotion before the next sums
        sums = warpgroup_mma(a_ring.index(2 * slot + 1), b_tile, sums, use_acc=False, is_async=True)
        before = slot
        slot, phase = slot_after(slot, phase, STAGES)
        mbarrier.wait(full.index(slot), phase, pred=k + 1 < steps)
        sums = warpgroup_mma_wait(0, deps=[sums])
        if BY_COLUMNS:
            sums *= of_columns[None, :]
            if AHEAD:
                sums = warpgroup_mma_wait(0, deps=[sums])  # waits for nothing: keeps the loads behind the products
                of_columns = scales.index(slot).reshape([2 * block]).slice(MINE, block).load(LINE)  # the last: unused
            mbarrier.arrive(empty.index(before))
        lower = gl.fma(sums, of_lower[:, None].broadcast_to(sums.shape), lower)
    if not BY_COLUMNS:
        mbarrier.arrive(empty.index(before), pred=steps > 0)
    return upper, lower, slot, phase


@gluon.jit
def halves(x):
    """The left and the right half of the columns of a result, each in the layout of such a result."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32])
    left, right = gl.split(x.reshape([rows, 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def put(panel, target, at, place):
    """Store a panel by TMA from its place in shared memory, once the store before has read that."""
    tma_store_wait(0)
    barrier()
    place.reshape(panel.shape).store(panel)
    fence_async_shared()
    barrier()
    tma_store(target, at, place)
