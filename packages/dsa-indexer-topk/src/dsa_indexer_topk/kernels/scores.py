"""Scores of all entries that a query reads, or the best of each group of them (Gluon, SM90)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsa_indexer_topk.kernels.heads import BLOCK, add_apart, barrier, clamp_bounds, lane, tma_load, weigh

COLUMNS = gl.constexpr(128)  # queries x heads of a warpgroup
END = gl.constexpr(2147483647)


@gluon.jit
def _uniform(x):
    """x, which is the same in all threads; so the compiler knows it, and keeps it in one register of the warp."""
    code: gl.constexpr = "redux.sync.min.s32 $0, $1, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def bounds(t, ks, ke, sizes):
    """First entry that the queries t read, and the end of what they read."""
    queries, entries, longest, _ = sizes
    start = gl.load(ks + t, mask=t < queries, other=0)
    stop = gl.load(ke + t, mask=t < queries, other=0)
    return clamp_bounds(start, stop, entries, longest)


@gluon.jit
def _next_document(after, first, ks, ke, sizes, QUERIES: gl.constexpr):
    """Of the documents that these queries read, the next: its first entry, and the end of what they read of it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    start, stop = bounds(first + gl.arange(0, QUERIES, layout=layout), ks, ke, sizes)
    document = gl.min(gl.where((start > after) & (stop > start), start, END), axis=0)
    return _uniform(document), _uniform(gl.max(gl.where(start == document, stop, 0), axis=0))


@gluon.jit
def _part(document, stop, sizes, GROUP: gl.constexpr):
    """What this program computes of a document: first entry, end, pairs of tiles."""
    _, _, _, length = sizes
    begin = document + gl.program_id(1) * length
    end = gl.minimum(stop, begin + length)
    groups = gl.cdiv(gl.maximum(end - begin, 0), GROUP)
    return begin, end, gl.cdiv(groups, 2 * BLOCK) if GROUP == 1 else gl.cdiv(groups, BLOCK) * (GROUP // 2)


@gluon.jit
def _first_entry(begin, tile, GROUP: gl.constexpr):
    """Of a tile, whose entries are GROUP apart: the first ones of BLOCK groups, then the second ones of these, ..."""
    return begin + tile // GROUP * (BLOCK * GROUP) + tile % GROUP


@gluon.jit
def _load_tiles(
    keys,
    shared,
    ks,
    ke,
    sizes,
    first,
    QUERIES: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: the keys of all documents that these queries read, one after the other."""
    ring, full, empty = shared
    step = 0
    document, stop = _next_document(-1, first, ks, ke, sizes, QUERIES)
    while document < END:
        begin, _, pairs = _part(document, stop, sizes, GROUP)
        for i in range(pairs):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * keys.block_type.nbytes)
            for half in gl.static_range(2):
                entry = _first_entry(begin, 2 * i + half, GROUP)
                at = [entry // GROUP, entry % GROUP * D]
                tma_load(keys, at, full.index(slot), ring.index(2 * slot + half))
            step += 1
        document, stop = _next_document(document, first, ks, ke, sizes, QUERIES)


@gluon.constexpr_function
def _layout(queries):
    """Of (BLOCK, queries) scores: a warp has 16 rows, and a thread those 8 apart, or half of them."""
    registers = {2: [], 4: [[8, 0]], 8: [[0, 4], [8, 0]]}[queries]
    lanes = [[0, 1], [8, 0] if queries == 2 else [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [BLOCK.value, queries])


@gluon.jit
def _sum_heads(dots, weights, number, Q: gl.constexpr, H: gl.constexpr, LAYOUT: gl.constexpr):
    """(BLOCK, Q) sums over the heads, in an order that is the same for all entries and queries."""
    x = weigh(dots, weights, Q, H)
    if Q == 2:
        a, b = gl.split(x.reshape([BLOCK // 16, 2, 8, Q, 4]).permute((0, 2, 3, 4, 1)))
        x = add_apart(a, b, number, 2)  # (4, 8, Q, 4 lanes), the lanes' upper half for rows 8 further
        a, b = gl.split(x.permute((0, 1, 3, 2)))
        x = add_apart(a, b, number, 1)
        x = x.reshape([BLOCK // 16, 8, 2, Q]).permute((0, 2, 1, 3)).reshape([BLOCK, Q])
    else:
        a, b = gl.split(x.reshape([BLOCK, Q // 4, 2, 2, 4]).permute((0, 1, 3, 4, 2)))
        x = add_apart(a, b, number, 2)  # (BLOCK, Q // 4, 2, 4 lanes), the lanes' upper half for queries 2 further
        a, b = gl.split(x.permute((0, 1, 3, 2)))
        x = add_apart(a, b, number, 1).reshape([BLOCK, Q])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _score_tiles(
    queries,
    shared,
    arrays,
    sizes,
    pitch,
    first,
    mine,
    H: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup, for the queries from `mine` on. The other one uses the tensor cores while this one sums up."""
    ring, full, empty = shared
    weights, scales, ks, ke, out = arrays
    Q: gl.constexpr = COLUMNS // H
    DOTS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    LAYOUT: gl.constexpr = _layout(Q)
    PAIRS: gl.constexpr = (GROUP + 1) // 2  # of tiles, which have all entries of BLOCK groups
    STEP: gl.constexpr = BLOCK if GROUP == 1 else 1  # entries from a tile to the next
    number = lane()
    column = mine * H + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, DOTS))
    weight = gl.load(weights + column, mask=column < sizes[0] * H, other=0.0)
    t = mine + gl.arange(0, Q, layout=gl.SliceLayout(0, LAYOUT))
    start, stop = bounds(t, ks, ke, sizes)
    out += t.to(gl.int64) * pitch
    r = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, LAYOUT))[:, None] + gl.zeros([BLOCK, Q], gl.int32, LAYOUT)
    operand = queries.permute((1, 0))
    zeros = gl.zeros([BLOCK, COLUMNS], gl.float32, DOTS)
    step = 0
    document, last = _next_document(-1, first, ks, ke, sizes, 2 * Q)
    while document < END:
        begin, end, pairs = _part(document, last, sizes, GROUP)
        # Entries that a query reads from each row's first on; none of another document.
        left = gl.where(start == document, gl.minimum(stop, end) - begin, 0)[None, :] - r * GROUP
        scale_at = scales + (begin + r * GROUP)
        out_at = out[None, :] + ((begin - document) // GROUP + r)
        for _ in range(0, pairs, PAIRS):
            reads = left > 0
            best = gl.full([BLOCK, Q], float("nan"), gl.float32, LAYOUT)
            for _ in range(PAIRS):
                scale = gl.load(scale_at, mask=left > 0, other=float("nan"))
                other_scale = gl.load(scale_at + STEP, mask=left > STEP, other=float("nan"))
                slot = step % STAGES
                mbarrier.wait(full.index(slot), (step // STAGES) & 1)
                dots = warpgroup_mma(ring.index(2 * slot), operand, zeros, use_acc=False, is_async=True)
                others = warpgroup_mma(ring.index(2 * slot + 1), operand, zeros, use_acc=False, is_async=True)
                dots = warpgroup_mma_wait(1, deps=[dots])
                s = _sum_heads(dots, weight, number, Q, H, LAYOUT) * scale
                others = warpgroup_mma_wait(0, deps=[others])
                mbarrier.arrive(empty.index(slot))
                other = _sum_heads(others, weight, number, Q, H, LAYOUT) * other_scale
                if GROUP == 1:
                    gl.store(out_at, s, mask=left > 0)
                    gl.store(out_at + STEP, other, mask=left > STEP)
                else:
                    best = gl.maximum(best, gl.maximum(s, other))  # NaN only if all are
                left -= 2 * STEP
                scale_at += 2 * STEP
                step += 1
            if GROUP == 1:
                out_at += 2 * BLOCK
            else:
                gl.store(out_at, best, mask=reads)
                out_at += BLOCK
                left -= (BLOCK - 1) * GROUP
                scale_at += (BLOCK - 1) * GROUP
        document, last = _next_document(document, first, ks, ke, sizes, 2 * Q)


@gluon.jit(do_not_specialize=["count", "entries", "longest", "length", "pitch"])
def score_kernel(
    queries,
    keys,
    weights,
    scales,
    ks,
    ke,
    out,
    count,
    entries,
    longest,
    length,
    pitch,
    H: gl.constexpr,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """out (count, pitch): of each query, the scores of the entries that it reads, or the best of each GROUP of them.

    queries (count * H, D) and keys, of which a row has GROUP entries, e4m3, are TMA descriptors; weights (count, H) and
    scales (entries,), halved, fp32. The entries of a query are counted from its first one, `longest` at most. Entries
    whose score is NaN are left out of the best; a group has NaN if nothing else is in it.

    A program has 256 / H queries, two warpgroups' COLUMNS, and of each document that they read `length` entries, the
    program_id(1)-th so many. The tiles' rows are entries, and their columns queries and heads.
    """
    Q: gl.constexpr = COLUMNS // H
    first = (gl.num_programs(0) - 1 - gl.program_id(0)) * (2 * Q)  # the last queries tend to read most
    tiles = gl.allocate_shared_memory(gl.float8e4nv, [2, COLUMNS, D], queries.layout)
    ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, BLOCK, D], keys.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = full.index(STAGES)  # not apart: what is passed to the other warps would take its place
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)  # one arrival for each warpgroup
    mbarrier.init(ready, count=1)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    mbarrier.expect(ready, 2 * queries.block_type.nbytes)
    tma_load(queries, [first * H, 0], ready, tiles.index(0))
    tma_load(queries, [(first + Q) * H, 0], ready, tiles.index(1))
    mbarrier.wait(ready, 0)
    sizes = (count, entries, longest, length)
    shared = (ring, full, empty)
    arrays = (weights, scales, ks, ke, out)
    gl.warp_specialize(
        [
            (_score_tiles, (tiles.index(0), shared, arrays, sizes, pitch, first, first, H, GROUP, STAGES)),
            (_score_tiles, (tiles.index(1), shared, arrays, sizes, pitch, first, first + Q, H, GROUP, STAGES)),
            (_load_tiles, (keys, shared, ks, ke, sizes, first, 2 * Q, D, GROUP, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [232, 24],  # their registers a thread
    )
