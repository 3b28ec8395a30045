"""Scores of the entries in each query's own candidate blocks (Gluon, SM90)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsa_indexer_topk.kernels.heads import BLOCK, OCTET, add_apart, barrier, clamp_bounds, lane, tma_load, weigh

TILE = gl.constexpr(BLOCK // OCTET)  # octets of a tile
LANES = gl.constexpr(32)


@gluon.jit
def _octets(candidates, start, count, first, number, GROUP: gl.constexpr):
    """First entries of 32 octets from `first` on, one in each lane: anywhere, for those past the last."""
    PER: gl.constexpr = (GROUP + OCTET - 1) // OCTET
    octet = first + number
    block = gl.load(candidates + gl.minimum(octet // PER, count - 1))
    return start + gl.maximum(block, 0) * GROUP + octet % PER * OCTET


@gluon.jit
def _of_lane(x, number):
    """x as the lane of this number has it."""
    code: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_tiles(keys, ring, full, empty, candidates, start, count, pairs, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp: eight octets a tile, the first 8 entries of a block of at most 8, or all of one of 16.

    The lanes read what two pairs of tiles need, and the next two's while these are loaded.
    """
    number = lane()
    entries = _octets(candidates, start, count, 0, number, GROUP)
    for first in range(0, pairs, 2):
        following = _octets(candidates, start, count, first * (2 * TILE) + LANES, number, GROUP)
        for i in range(first, gl.minimum(first + 2, pairs)):
            slot = i % STAGES
            mbarrier.wait(empty.index(slot), ((i // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * TILE * keys.block_type.nbytes)
            for j in gl.static_range(2 * TILE):
                entry = _of_lane(entries, (i - first) * (2 * TILE) + j)
                part = ring.index(2 * slot + j // TILE).slice(j % TILE * OCTET, OCTET)
                tma_load(keys, [entry, 0], full.index(slot), part)
        entries = following


@gluon.jit
def _scale(block, scales, size, r, GROUP: gl.constexpr):
    """The scale of the r-th entry of a block; NaN if the query does not read it."""
    inside = (block >= 0) & (block < gl.cdiv(size, GROUP)) & (r < GROUP)  # so the product below does not wrap
    local = gl.where(inside, block, 0) * GROUP + r
    return gl.load(scales + local, mask=inside & (local < size), other=float("nan"))


@gluon.jit
def _sum_heads(dots, weight, number, H: gl.constexpr, ROWS: gl.constexpr):
    """(BLOCK,) sums over the heads, in the order of the other kernel."""
    x = weigh(dots, weight, 1, H)
    a, b = gl.split(x.reshape([BLOCK // 16, 2, 8, 4]).permute((0, 2, 3, 1)))
    x = add_apart(a, b, number, 2)  # (4, 8, 4 lanes), the lanes' upper half for entries 8 further
    x = gl.sum(x.reshape([BLOCK // 16, 8, 2, 2]), axis=3)
    return gl.convert_layout(x.permute((0, 2, 1)).reshape([BLOCK]), ROWS, assert_trivial=True)


@gluon.jit
def _score_tiles(
    query,
    ring,
    full,
    empty,
    weights,
    scales,
    candidates,
    out,
    size,
    count,
    pairs,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Two tiles at a time. Their scales are read a step before, and the blocks that tell which two steps before."""
    DOTS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, H, 32])
    # Two lanes have the same entry.
    ROWS: gl.constexpr = gl.DistributedLinearLayout([], [[0], [8], [1], [2], [4]], [[16], [32]], [], [BLOCK])
    PER: gl.constexpr = (GROUP + OCTET - 1) // OCTET
    number = lane()
    weight = gl.load(weights + gl.arange(0, H, layout=gl.SliceLayout(0, DOTS)))
    row = gl.arange(0, BLOCK, layout=ROWS)
    octet = row // OCTET
    r = row % OCTET + octet % PER * OCTET  # of its block
    block_at = candidates + octet // PER
    out_at = out + octet // PER * GROUP + r
    left = count * PER - octet  # octets from this one on
    operand = query.permute((1, 0))
    zeros = gl.zeros([BLOCK, H], gl.float32, DOTS)
    block = gl.load(block_at, mask=left > 0, other=-1)
    other_block = gl.load(block_at + TILE // PER, mask=left > TILE, other=-1)
    scale = _scale(block, scales, size, r, GROUP)
    other_scale = _scale(other_block, scales, size, r, GROUP)
    block_at += 2 * TILE // PER
    block = gl.load(block_at, mask=left > 2 * TILE, other=-1)
    other_block = gl.load(block_at + TILE // PER, mask=left > 3 * TILE, other=-1)
    for i in range(pairs):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        dots = warpgroup_mma(ring.index(2 * slot), operand, zeros, use_acc=False, is_async=True)
        others = warpgroup_mma(ring.index(2 * slot + 1), operand, zeros, use_acc=False, is_async=True)
        next_scale = _scale(block, scales, size, r, GROUP)
        next_other = _scale(other_block, scales, size, r, GROUP)
        block_at += 2 * TILE // PER
        block = gl.load(block_at, mask=left > 4 * TILE, other=-1)
        other_block = gl.load(block_at + TILE // PER, mask=left > 5 * TILE, other=-1)
        dots = warpgroup_mma_wait(1, deps=[dots])
        s = _sum_heads(dots, weight, number, H, ROWS) * scale
        others = warpgroup_mma_wait(0, deps=[others])
        mbarrier.arrive(empty.index(slot))
        other = _sum_heads(others, weight, number, H, ROWS) * other_scale
        gl.store(out_at, s, mask=(left > 0) & (r < GROUP))
        gl.store(out_at + TILE // PER * GROUP, other, mask=(left > TILE) & (r < GROUP))
        out_at += 2 * TILE // PER * GROUP
        left -= 2 * TILE
        scale, other_scale = next_scale, next_other


@gluon.jit(do_not_specialize=["entries", "longest", "count", "pitch"])
def candidate_kernel(
    queries,
    keys,
    weights,
    scales,
    ks,
    ke,
    candidates,
    out,
    entries,
    longest,
    count,
    pitch,
    H: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out (queries, pitch): scores of the entries in candidates (queries, count), blocks of GROUP entries.

    NaN for an entry that the query does not read. Other arguments as for `score_kernel`; count is at least 1. A program
    has one query; a tile's rows are entries of eight octets, and its columns the heads.
    """
    PER: gl.constexpr = (GROUP + OCTET - 1) // OCTET
    t = gl.program_id(0)
    start, stop = clamp_bounds(gl.load(ks + t), gl.load(ke + t), entries, longest)
    size = stop - start
    tile = gl.allocate_shared_memory(gl.float8e4nv, [H, D], queries.layout)
    ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK, D], keys.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = full.index(STAGES)  # not apart: what is passed to the loading warp would take its place
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    mbarrier.init(ready, count=1)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    mbarrier.expect(ready, queries.block_type.nbytes)
    tma_load(queries, [t * H, 0], ready, tile)
    mbarrier.wait(ready, 0)
    pairs = gl.cdiv(count * PER, 2 * TILE)
    candidates += t.to(gl.int64) * count
    out += t.to(gl.int64) * pitch
    weights += t * H
    scales += start
    gl.warp_specialize(
        [
            (
                _score_tiles,
                (tile, ring, full, empty, weights, scales, candidates, out, size, count, pairs, H, GROUP, STAGES),
            ),
            (_load_tiles, (keys, ring, full, empty, candidates, start, count, pairs, GROUP, STAGES)),
        ],
        [1],  # warp of the worker
        [40],  # its registers a thread
    )
