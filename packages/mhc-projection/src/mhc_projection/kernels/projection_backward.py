"""Backward of the projection: gradients of the streams, the weight and the collapse's weights, in one read (Gluon)."""

from mhc_projection.kernels.tma import barrier
from mhc_projection.kernels.tma import load as tma_load
from mhc_projection.kernels.tma import store as tma_store
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHANNELS = gl.constexpr(64)  # of a stream in a tile: 128 bytes, the widest swizzle
TOKENS = gl.constexpr(64)  # in a tile
LOGITS = gl.constexpr(32)  # of a token, padded with zeros


@gluon.jit
def _place(item, blocks, GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Chunk of tokens, block of channels and first stream of an item of work. The groups of streams are neighbours."""
    group = item % GROUPS
    block = item // GROUPS % blocks
    chunk = item // GROUPS // blocks
    return chunk, block, group * GROUP


@gluon.jit
def _announce(item, announced):
    """Leave the next item for the other warps, before this one arrives at their barrier."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    announced.store(gl.full([1], 0, gl.int32, layout) + item)
    barrier()


@gluon.jit
def _announced(announced):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(announced.load(layout), axis=0)


@gluon.jit
def _load_tiles(
    sources,
    tiles,
    sizes,
    HC: gl.constexpr,
    GROUP: gl.constexpr,
    FLAGS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp: takes items until none is left, and is ahead of the other warps by all stages."""
    PROJECTION: gl.constexpr = FLAGS[0]
    COLLAPSE: gl.constexpr = FLAGS[1]
    ADDEND: gl.constexpr = FLAGS[2]
    # 2 bytes an element: streams and addends, both parts of q, the gradient of the collapse.
    STREAMS: gl.constexpr = GROUP * (1 + ADDEND) + COLLAPSE
    PER_TOKEN: gl.constexpr = CHANNELS * STREAMS + 2 * LOGITS * PROJECTION
    NBYTES: gl.constexpr = 2 * TOKENS * PER_TOKEN
    x, weight, q, grad_collapsed, addend, taken = sources
    xs, ws, qs, gs, others, full, empty, next_item, item_full, item_empty = tiles
    tokens, _, _, chunk_size, blocks, items = sizes
    step = 0
    turn = 0
    item = gl.program_id(0)
    while item < items:
        chunk, block, stream = _place(item, blocks, HC // GROUP, GROUP)
        c0 = block * CHANNELS
        first = chunk * chunk_size
        side = turn % 2
        bar = item_full.index(side)
        mbarrier.wait(item_empty.index(side), ((turn // 2) & 1) ^ 1)
        _announce(item, next_item.index(side))
        mbarrier.expect(bar, GROUP * weight.block_type.nbytes * PROJECTION)
        if PROJECTION:
            for i in gl.static_range(GROUP):
                tma_load(weight, [0, stream + i, c0], bar, ws.index(side * GROUP + i))
        turn += 1
        for tile in range(gl.cdiv(gl.minimum(tokens - first, chunk_size), TOKENS)):
            slot = step % STAGES
            bar = full.index(slot)
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, NBYTES)
            t = first + tile * TOKENS
            for i in gl.static_range(GROUP):
                tma_load(x, [t, stream + i, c0], bar, xs.index(slot * GROUP + i))
                if ADDEND:
                    tma_load(addend, [t, stream + i, c0], bar, others.index(slot * GROUP + i))
            if PROJECTION:
                tma_load(q, [t, 0], bar, qs.index(slot * 2))
                tma_load(q, [t, LOGITS], bar, qs.index(slot * 2 + 1))
            if COLLAPSE:
                tma_load(grad_collapsed, [t, c0], bar, gs.index(slot))
            step += 1
        # Items are taken as programs get to them: SMs are not equally fast.
        item = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
    side = turn % 2
    mbarrier.wait(item_empty.index(side), ((turn // 2) & 1) ^ 1)
    _announce(items, next_item.index(side))
    mbarrier.arrive(item_full.index(side))


@gluon.jit
def _differentiate(
    results,
    tiles,
    sizes,
    HC: gl.constexpr,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
    COUNT: gl.constexpr,
    FLAGS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A warpgroup: streams FIRST to FIRST + COUNT of each group. A tile of x, once read, becomes its gradient's."""
    PROJECTION: gl.constexpr = FLAGS[0]
    COLLAPSE: gl.constexpr = FLAGS[1]
    ADDEND: gl.constexpr = FLAGS[2]
    NEED_X: gl.constexpr = FLAGS[3]
    NEED_WEIGHT: gl.constexpr = FLAGS[4]
    NEED_PRE_MIX: gl.constexpr = FLAGS[5]
    grad_x, pre_mix, coef, part_weight, part_pre_mix = results
    xs, ws, qs, gs, others, full, empty, next_item, item_full, item_empty = tiles
    tokens, channels, n, chunk_size, blocks, items = sizes
    TILE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, CHANNELS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, LOGITS, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, TILE)
    rows = gl.arange(0, TOKENS, layout=ROW)
    step = 0
    turn = 0
    mbarrier.wait(item_full.index(0), 0)
    item = _announced(next_item.index(0))
    while item < items:
        chunk, block, stream = _place(item, blocks, HC // GROUP, GROUP)
        c0 = block * CHANNELS
        first = chunk * chunk_size
        side = turn % 2
        sums = ()
        for _ in gl.static_range(COUNT):
            sums = sums + (gl.zeros([CHANNELS, LOGITS], gl.float32, SUMS),)
        for tile_t in range(gl.cdiv(gl.minimum(tokens - first, chunk_size), TOKENS)):
            slot = step % STAGES
            t0 = first + tile_t * TOKENS
            t = t0 + rows
            in_t = t < tokens
            if PROJECTION:
                factor = gl.load(coef + t, mask=in_t, other=0.0)
            mix = ()
            if COLLAPSE:
                for i in gl.static_range(COUNT):
                    address = pre_mix + t.to(gl.int64) * HC + (stream + FIRST + i)
                    mix = mix + (gl.load(address, mask=in_t, other=0.0),)
            mbarrier.wait(full.index(slot), (step // STAGES) & 1)
            # Start all products, and meanwhile read the tiles into registers.
            gradients = ()
            parts = ()
            for i in gl.static_range(COUNT):
                gradient = gl.zeros([TOKENS, CHANNELS], gl.float32, TILE)
                part = sums[i]
                if PROJECTION:
                    high = qs.index(slot * 2)
                    low = qs.index(slot * 2 + 1)
                    if NEED_X:
                        w = ws.index(side * GROUP + FIRST + i).reshape([LOGITS, CHANNELS])
                        gradient = warpgroup_mma(low, w, gradient, use_acc=False, is_async=True)
                        gradient = warpgroup_mma(high, w, gradient, is_async=True)
                    if NEED_WEIGHT:
                        x_t = xs.index(slot * GROUP + FIRST + i).reshape([TOKENS, CHANNELS]).permute((1, 0))
                        part = warpgroup_mma(x_t, high, part, is_async=True)
                        part = warpgroup_mma(x_t, low, part, is_async=True)
                gradients = gradients + (gradient,)
                parts = parts + (part,)
            if COLLAPSE:
                g = gs.index(slot).load(TILE).to(gl.float32)
            values = ()
            for i in gl.static_range(COUNT):
                value = xs.index(slot * GROUP + FIRST + i).reshape([TOKENS, CHANNELS]).load(TILE)
                values = values + (value,)
                if NEED_PRE_MIX:
                    row = block.to(gl.int64) * HC + (stream + FIRST + i)
                    dot = gl.sum(g * value.to(gl.float32), axis=1)
                    gl.store(part_pre_mix + row * tokens + t, dot, mask=in_t)
            sums = ()
            outs = ()
            for i in gl.static_range(COUNT):
                gradient, part = warpgroup_mma_wait(0, deps=[gradients[i], parts[i]])
                sums = sums + (part,)
                if NEED_X:
                    if PROJECTION:
                        gradient += factor[:, None] * values[i].to(gl.float32)
                    if COLLAPSE:
                        gradient += mix[i][:, None] * g
                    out = gradient.to(gl.bfloat16)
                    if ADDEND:
                        other = others.index(slot * GROUP + FIRST + i).reshape([TOKENS, CHANNELS]).load(TILE)
                        out = (out.to(gl.float32) + other.to(gl.float32)).to(gl.bfloat16)
                    outs = outs + (out,)
            if NEED_X:
                barrier()  # all have read the tiles
                for i in gl.static_range(COUNT):
                    xs.index(slot * GROUP + FIRST + i).reshape([TOKENS, CHANNELS]).store(outs[i])
                fence_async_shared()
                barrier()
                for i in gl.static_range(COUNT):
                    tma_store(grad_x, [t0, stream + FIRST + i, c0], xs.index(slot * GROUP + FIRST + i))
            if NEED_X:  # the slot before this one is free: its stores have read it
                tma.store_wait(COUNT)
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
            else:
                mbarrier.arrive(empty.index(slot))
            step += 1
        mbarrier.arrive(item_empty.index(side))
        turn += 1
        if NEED_WEIGHT:
            c = c0 + gl.arange(0, CHANNELS, layout=gl.SliceLayout(1, SUMS))
            j = gl.arange(0, LOGITS, layout=gl.SliceLayout(0, SUMS))
            base = part_weight + chunk.to(gl.int64) * n * HC * channels
            mask = (c < channels)[:, None] & (j < n)[None, :]
            for i in gl.static_range(COUNT):
                column = (stream + FIRST + i) * channels + c
                gl.store(base + (j[None, :] * (HC * channels) + column[:, None]), sums[i], mask=mask)
        side = turn % 2
        mbarrier.wait(item_full.index(side), (turn // 2) & 1)
        item = _announced(next_item.index(side))
    if NEED_X:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["tokens", "channels_over_8", "n", "chunk", "items"])
def projection_backward_kernel(
    x,
    weight,
    q,
    grad_collapsed,
    addend,
    grad_x,
    pre_mix,
    coef,
    part_weight,
    part_pre_mix,
    taken,
    tokens,
    channels_over_8,
    n,
    chunk,
    items,
    HC: gl.constexpr,
    GROUP: gl.constexpr,
    PROJECTION: gl.constexpr,
    COLLAPSE: gl.constexpr,
    ADDEND: gl.constexpr,
    NEED_X: gl.constexpr,
    NEED_WEIGHT: gl.constexpr,
    NEED_PRE_MIX: gl.constexpr,
    STAGES: gl.constexpr,
):
    """An item of work is `chunk` tokens of a block of CHANNELS channels of GROUP streams.

    The first six arguments are TMA descriptors: x, addend and grad_x (tokens, HC, channels), weight (n, HC, channels),
    q (tokens, 2 * LOGITS), the high and the low part of a token's q, grad_collapsed (tokens, channels). An item
    writes its part of grad_x, part_weight[item's chunk] (n, HC * channels) and part_pre_mix[block] (HC, tokens). A
    loading warp takes items, counting them in `taken`, which was 0, and fills a ring of tiles; two warpgroups share the
    streams.
    """
    channels = channels_over_8 * 8
    blocks = gl.cdiv(channels, CHANNELS)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP, TOKENS, 1, CHANNELS], x.layout)
    ws = xs
    qs = xs
    gs = xs
    others = xs
    if PROJECTION:
        ws = gl.allocate_shared_memory(gl.bfloat16, [2 * GROUP, LOGITS, 1, CHANNELS], weight.layout)
        qs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, TOKENS, LOGITS], q.layout)
    if COLLAPSE:
        gs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TOKENS, CHANNELS], grad_collapsed.layout)
    if ADDEND:
        others = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP, TOKENS, 1, CHANNELS], addend.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    next_item = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    item_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    item_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)  # one arrival for each warpgroup
    for s in gl.static_range(2):
        mbarrier.init(item_full.index(s), count=1)
        mbarrier.init(item_empty.index(s), count=2)
    fence_async_shared()  # the barriers, before TMA meets them
    HALF: gl.constexpr = (GROUP + 1) // 2
    tiles = (xs, ws, qs, gs, others, full, empty, next_item, item_full, item_empty)
    sources = (x, weight, q, grad_collapsed, addend, taken)
    results = (grad_x, pre_mix, coef, part_weight, part_pre_mix)
    sizes = (tokens, channels, n, chunk, blocks, items)
    flags: gl.constexpr = (PROJECTION, COLLAPSE, ADDEND, NEED_X, NEED_WEIGHT, NEED_PRE_MIX)
    gl.warp_specialize(
        [
            (_differentiate, (results, tiles, sizes, HC, GROUP, 0, HALF, flags, STAGES)),
            (_differentiate, (results, tiles, sizes, HC, GROUP, HALF, GROUP - HALF, flags, STAGES)),
            (_load_tiles, (sources, tiles, sizes, HC, GROUP, flags, STAGES)),
        ],
        [4, 1],  # warps of the two workers
        [240, 24],  # their registers a thread
    )
