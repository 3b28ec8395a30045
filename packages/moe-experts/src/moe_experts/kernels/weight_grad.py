"""Weight gradients: each expert's rows are what is summed over (Gluon, SM90)."""

from hopper_kernels.gluon_names import barrier, tma_load, tma_store_wait
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from moe_experts.kernels.tiles import (
    COLUMNS,
    DEPTH,
    HALF,
    PANEL,
    PANELS,
    ROWS,
    allocate_barriers,
    in_band,
    panels_of,
    put,
    ragged,
)


@gluon.jit
def _tile(i, starts, sizes):
    """The i-th tile: expert, which of the two products, row and column of tiles, first row, number of rows."""
    products, height, width = sizes
    per_product = height * width
    expert = i // (products * per_product)
    rest = i % (products * per_product)
    m, n = in_band(rest % per_product, height, width)
    begin = gl.load(starts + expert)
    return expert, rest // per_product, m, n, begin, gl.load(starts + expert + 1) - begin


@gluon.jit
def _load_tiles(sources, shared, starts, tiles, sizes, STAGES: gl.constexpr):
    """The loading warp. Rows after the expert's last one are zeros."""
    a, other_a, b = sources
    top_ring, bottom_ring, b_ring, full, empty = shared
    step = 0
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, product, m, n, begin, rows = _tile(i, starts, sizes)
        for k in range(gl.cdiv(rows, DEPTH)):
            slot = step % STAGES
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 2 * a.block_type.nbytes + b.block_type.nbytes)
            row = begin + k * DEPTH
            left = rows - k * DEPTH
            if product == 0:
                tma_load(a, ragged(row, left, m * ROWS), bar, top_ring.index(slot))
                tma_load(a, ragged(row, left, m * ROWS + HALF), bar, bottom_ring.index(slot))
            else:
                tma_load(other_a, ragged(row, left, m * ROWS), bar, top_ring.index(slot))
                tma_load(other_a, ragged(row, left, m * ROWS + HALF), bar, bottom_ring.index(slot))
            tma_load(b, ragged(row, left, n * COLUMNS), bar, b_ring.index(slot))
            step += 1


@gluon.jit
def _multiply_tiles(a_ring, shared, targets, staging, starts, tiles, sizes, MINE: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup, for the 64 rows of each tile from `MINE` on."""
    b_ring, full, empty = shared
    out, other_out = targets
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16]
    )
    step = 0
    turn = 2 * (MINE // HALF)  # this warpgroup's places in staging
    for i in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, product, m, n, _, rows = _tile(i, starts, sizes)
        sums = gl.zeros([HALF, COLUMNS], gl.float32, LAYOUT)
        for k in range(gl.cdiv(rows, DEPTH)):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            a_tile = a_ring.index(slot).reshape([DEPTH, HALF]).permute((1, 0))
            b_tile = b_ring.index(slot).reshape([DEPTH, COLUMNS])
            sums = warpgroup_mma(a_tile, b_tile, sums, use_acc=k > 0, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
            step += 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=rows > 0)
        panels = panels_of(sums)
        for j in gl.static_range(PANELS):
            at = [expert, m * ROWS + MINE, n * COLUMNS + j * PANEL]
            if product == 0:
                turn = put(panels[j], out, at, staging, turn)
            else:
                turn = put(panels[j], other_out, at, staging, turn)
    tma_store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "products", "height", "width"])
def weight_grad_kernel(a, other_a, b, out, other_out, starts, tiles, products, height, width, STAGES: gl.constexpr):
    """out (experts, columns of a, columns of b) bf16 = a^T b over each expert's rows; zeros without rows.

    With products = 2, also other_out = other_a^T b. a, other_a, b are TMA descriptors of (rows, columns) bf16 that
    end with an expert (`tiles.ragged`), the results plain ones. starts: see `groups_kernel`. tiles = experts x products
    x height x width tiles of 128 x 256. Rows are added in their order, whatever program has the tile.
    """
    top_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, DEPTH, HALF], a.layout)
    bottom_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, DEPTH, HALF], a.layout)
    b_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, DEPTH, COLUMNS], b.layout)
    staging = gl.allocate_shared_memory(gl.bfloat16, [4, 1, HALF, PANEL], out.layout)
    full, empty = allocate_barriers(STAGES, 1, 2)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    shared = (b_ring, full, empty)
    targets = (out, other_out)
    sizes = (products, height, width)
    sources = (a, other_a, b)
    rings = (top_ring, bottom_ring, b_ring, full, empty)
    gl.warp_specialize(
        [
            (_multiply_tiles, (top_ring, shared, targets, staging, starts, tiles, sizes, 0, STAGES)),
            (_multiply_tiles, (bottom_ring, shared, targets, staging, starts, tiles, sizes, HALF, STAGES)),
            (_load_tiles, (sources, rings, starts, tiles, sizes, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [240, 24],  # their registers a thread
    )
