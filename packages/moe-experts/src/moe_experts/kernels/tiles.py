"""What the products share: the order of the tiles, TMA of rows that end with their expert, the main loop (Gluon).

Functions here have the constants that they need in themselves: with a global, what is compiled ahead would not be found
(`tests/workspace/test_ahead_of_time.py` says why).
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

ROWS = gl.constexpr(128)  # of a tile of the result, 64 for each warpgroup
HALF = gl.constexpr(64)
COLUMNS = gl.constexpr(256)  # of a tile of the result
DEPTH = gl.constexpr(64)  # of a step: terms of each sum
PANEL = gl.constexpr(64)  # columns of the result that lie together in shared memory
PANELS = gl.constexpr(4)  # of a tile
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16))


@gluon.jit
def in_band(i, height, width):
    """Row and column of the i-th of height x width tiles, in bands of 16 rows: down each column of a band, then the
    next one, so that tiles which run together read few different rows and columns."""
    BAND: gl.constexpr = 16
    per_band = BAND * width
    first = i // per_band * BAND
    rows = gl.minimum(height - first, BAND)
    rest = i % per_band
    return first + rest % rows, rest // rows


@gluon.jit
def tile_of_rows(i, table, count, width):
    """The i-th of count x width tiles: expert, first row, rows left in the expert, and its column of tiles."""
    m, n = in_band(i, count, width)
    entry = table + 4 * (1 + m)
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), n


@gluon.jit
def ragged(row, left, column):
    """Coordinates of a tile of a descriptor of four dimensions that has only `left` rows from `row` on.

    Its outer dimensions have strides so that the row counted from the end in the third one decides what is inside,
    and the address is that of the row all the same: addresses are modulo 2^64 (`plan.ragged`).
    """
    BEYOND: gl.constexpr = 0x40000000
    return [BEYOND, row + left, BEYOND - left, column]


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Barriers of a ring: FULL arrivals say that a slot is full, EMPTY that it is empty."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(COUNT):
        mbarrier.init(full.index(s), count=FULL)
        mbarrier.init(empty.index(s), count=EMPTY)
    return full, empty


@gluon.jit
def next_slot(shared, step, STAGES: gl.constexpr):
    """The loading warp: wait until the slot of this step is empty, and announce what will be loaded."""
    a_ring, b_ring, full, empty = shared
    NBYTES: gl.constexpr = 2 * (a_ring.shape[1] * a_ring.shape[2] + b_ring.shape[1] * b_ring.shape[2])
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), NBYTES)
    return slot


@gluon.jit
def multiply(shared, step, steps, MINE: gl.constexpr, B_BY_COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup: sums (64, 256) over the next steps, for the rows from MINE on. Also returns the step after them.

    B_BY_COLUMNS: b has a row of DEPTH terms for each column of the result, else a row of columns for each term.
    """
    a_ring, b_ring, full, empty = shared
    width: gl.constexpr = b_ring.shape[1] if B_BY_COLUMNS else b_ring.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    half: gl.constexpr = a_ring.shape[1] // 2
    sums = gl.zeros([half, width], gl.float32, layout)
    for k in range(steps):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        b_tile = b_ring.index(slot)
        if B_BY_COLUMNS:
            b_tile = b_tile.permute((1, 0))
        a_tile = a_ring.index(slot).slice(MINE, half)
        sums = warpgroup_mma(a_tile, b_tile, sums, use_acc=k > 0, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=steps > 0)
    return sums, step


@gluon.jit
def _halves(x):
    """The left and the right half of the columns of a result, each in the layout of such a result."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1] // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16])
    left, right = gl.split(x.reshape([rows, 2, width]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def panels_of(sums):
    """The four panels (64, 64) of a result, in bf16."""
    left, right = _halves(sums.to(gl.bfloat16))
    return _halves(left) + _halves(right)


@gluon.jit
def put(panel, target, at, staging, turn):
    """Store a panel by TMA; two places in shared memory, `turn` and `turn ^ 1`, take turns. Returns the other one."""
    tma_store_wait(1)  # the store before the last one has read this place
    barrier()
    place = staging.index(turn)
    place.reshape(panel.shape).store(panel)
    fence_async_shared()
    barrier()
    tma_store(target, at, place)
    return turn ^ 1


@gluon.jit
def multiply_and_hand_on(
    shared,
    results,
    table,
    sizes,
    MINE: gl.constexpr,
    B_BY_COLUMNS: gl.constexpr,
    BY_TMA: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup, for the 64 rows of each tile of an expert from MINE on: hands the tile's panels on to the warps that
    finish it. BY_TMA: TMA reads them there."""
    panels, full, empty = results
    experts, width, depth = sizes
    count = gl.load(table)
    half: gl.constexpr = MINE // 64
    step = 0
    turn = 0
    for i in range(gl.program_id(0), count * width, gl.num_programs(0)):
        expert, _row, _left, _n = tile_of_rows(i, table, count, width)
        if expert < experts:
            sums, step = multiply(shared, step, depth, MINE, B_BY_COLUMNS, STAGES)
            parts = panels_of(sums)
            mbarrier.wait(empty.index(half), (turn & 1) ^ 1)
            for j in gl.static_range(4):
                panels.index(4 * half + j).reshape(parts[j].shape).store(parts[j])
            if BY_TMA:
                fence_async_shared()
            mbarrier.arrive(full.index(half))
            turn += 1
