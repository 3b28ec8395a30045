"""The gradients of the queries and of the latent rows, by products of tiles of 64 slots, 64 heads and 512 channels.

A program, one an SM, takes every so many-th query, with 64 of its heads. It has three warpgroups:

- One gathers the rows K of 64 slots, and computes S^T = K q^T and dP^T = K g^T, g the gradient of the output, in one
  product; from these P^T and the gradient dS^T of the scores, which it leaves in shared memory in bf16.
- Two have 256 channels each, of which they load q and g. A tile adds dS K to the gradient of q, which stays in
  registers until the last. Then dS^T q + P^T g, the tile's share of the gradient of its rows, is formed, 64 channels at
  a time, and added to sums in fp32 by reductions in the L2; or stored, if it is to be added in a fixed order.

The reductions are the most that is to be done: 128 KB a tile, which the L2 takes at 3.8 TB/s if each instruction
of a warp has whole lines of 128 bytes. So lanes exchange parts of the products, and the sums' channels have an order of
their own, which `passes.finish_kernel` undoes.
"""

from hopper_kernels.gluon_names import barrier, reinterpret, tma_load
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

CHANNELS = gl.constexpr(512)
TILE = gl.constexpr(64)  # slots, and heads
PANEL = gl.constexpr(64)  # channels: 128 bytes of bf16
HALF = gl.constexpr(256)  # channels of a warpgroup
PANELS = gl.constexpr(4)  # of a warpgroup

async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# A chunk of 64 slots x 64 channels. As products leave it, a thread has pairs of channels, in steps of 8. Eight lanes
# then have 32 channels of a slot, four numbers each: channels 0, 1, 8, 9 of 16.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [4, 0], [8, 0]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [0, 32]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# The gradient of a query, 64 heads x 256 channels in bf16, on the way from pairs of channels to eight in a row.
FOURS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 16], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
EIGHTS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )
)
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # 16 bytes a lane
# Of number $3 in row $2 of sums, 2,048 bytes each. In here, for the compiler would keep more of it in registers.
ADDRESS = "{ .reg .b64 to; mad.wide.s32 to, $2, 2048, $1; mad.wide.s32 to, $3, 4, to; "
ADD = gl.constexpr(ADDRESS + "red.relaxed.gpu.global.add.v4.f32 [to], {$4, $5, $6, $7}; mov.b32 $0, 0; }")
STORE = gl.constexpr(ADDRESS + "st.global.v4.f32 [to], {$4, $5, $6, $7}; mov.b32 $0, 0; }")


@gluon.jit
def _load_panel(q, grad_out, item, panel, operands, full, PARTS: gl.constexpr):
    """64 channels of a query and of the gradient of its output."""
    at = [item // PARTS, item % PARTS * TILE, panel * PANEL]
    bar = full.index(panel)
    mbarrier.expect(bar, 2 * TILE * PANEL * 2)
    tma_load(q, at, bar, operands.index(2 * panel).reshape([1, TILE, PANEL]))
    tma_load(grad_out, at, bar, operands.index(2 * panel + 1).reshape([1, TILE, PANEL]))


@gluon.jit
def _some_slots(mine, first, count, LAYOUT: gl.constexpr):
    """Rows of 64 slots, -1 behind the last."""
    n = gl.arange(0, TILE, layout=LAYOUT)
    return gl.load(mine + first + n, mask=first + n < count, other=-1)


@gluon.jit
def _gather(kv, row, keys):
    """Copies rows to panels; zeros for slots behind the last."""
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, ROWS))
    tile = reinterpret(keys, gl.bfloat16, [1, TILE, CHANNELS], keys.layout).index(0)
    inside = (row >= 0)[:, None] & (c < CHANNELS)[None, :]
    async_load(tile, kv + row.to(gl.int64)[:, None] * CHANNELS + c[None, :], mask=inside)
    async_copy.commit_group()


@gluon.jit
def _load_factors(factors, item, panel, to, other, bar, PARTS: gl.constexpr, TAIL: gl.constexpr):
    """64 channels of a query's output, and of its gradient."""
    out, tail, grad_out = factors
    mbarrier.expect(bar, 2 * TILE * PANEL * 2)
    c = panel * PANEL
    if c < CHANNELS - TAIL:
        tma_load(out, [item // PARTS, item % PARTS * TILE, c], bar, to.reshape([1, TILE, PANEL]))
    else:
        at = [item // PARTS, item % PARTS * TILE, c - (CHANNELS - TAIL)]
        tma_load(tail, at, bar, to.reshape([1, TILE, PANEL]))
    tma_load(grad_out, [item // PARTS, item % PARTS * TILE, c], bar, other.reshape([1, TILE, PANEL]))


@gluon.jit
def _sum_products(one, other, panel, full):
    """Of each of 64 heads, over 64 channels, the query's panel of that number."""
    mbarrier.wait(full, panel & 1)  # a query has an even number of panels
    return gl.sum(one.load(ROWS).to(gl.float32) * other.load(ROWS).to(gl.float32), axis=1)


@gluon.jit
def _leave_numbers(
    of_queries, delta, to, query, item, count, scale, HEADS: gl.constexpr, PARTS: gl.constexpr, DELTAS: gl.constexpr
):
    """Numbers of a query's heads, where its tiles find them: logarithms, and delta times the scale.

    DELTAS: makes shares of the sinks' gradient of the sinks' weights. Else delta is read, not taken from the arguments.
    """
    logs, deltas, shares = of_queries
    h = item % PARTS * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, ROWS))
    at = item // PARTS * HEADS + h
    log = gl.load(logs + at, mask=h < HEADS, other=float("inf"))
    if DELTAS:
        weight = gl.load(shares + at, mask=h < HEADS, other=0.0)
        gl.store(shares + at, gl.where(count > 0, -weight * delta, 0.0), mask=h < HEADS)
    else:
        delta = gl.load(deltas + at, mask=h < HEADS, other=0.0)
    to.index(2 * query).store(log)
    to.index(2 * query + 1).store(delta * scale)


@gluon.jit
def _score(
    arguments,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    TAIL: gl.constexpr,
    DELTAS: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """P^T and dS^T of each tile, and where its slots' shares of the gradient go.

    DELTAS: delta of the next query too, 64 channels of the output and of its gradient with each tile. They pass
    through the buffer of P^T and dS^T, which is free until these are there.
    """
    inputs, factors, scale_log2, scale, tiles, bars, items, pitch, nowhere, rounds = arguments
    kv, slots, counts, of_queries = inputs
    operands, keys, weights, gradients, targets, of_heads = tiles
    full, keys_empty, staged_full, staged_empty, factors_full = bars
    BOTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])
    ONE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    SLOT: gl.constexpr = gl.SliceLayout(1, ONE)
    HEAD: gl.constexpr = gl.SliceLayout(0, ONE)
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    ALL: gl.constexpr = CHANNELS // PANEL
    both = reinterpret(operands, gl.bfloat16, [ALL, 2 * TILE, PANEL], operands.layout)
    n = gl.arange(0, TILE, layout=SLOT)
    query_phase = 0
    done = 0
    item = items - 1 - gl.program_id(0)
    count = gl.load(counts + item // PARTS)
    mine = slots + (item // PARTS).to(gl.int64) * pitch
    delta = gl.zeros([TILE], gl.float32, ROW)
    if DELTAS:
        for j in range(ALL):
            barrier()
            _load_factors(factors, item, j, weights.index(0), gradients.index(0), factors_full, PARTS, TAIL)
            delta += _sum_products(weights.index(0), gradients.index(0), j, factors_full)
    _leave_numbers(of_queries, delta, of_heads, 0, item, count, scale, HEADS, PARTS, DELTAS)
    barrier()
    to_gather = _some_slots(mine, 0, count, ROW)
    row = _some_slots(mine, 0, count, SLOT)
    while item >= 0:
        t = item // PARTS
        after = item - gl.num_programs(0)
        t_after = gl.maximum(after, 0) // PARTS
        count_after = gl.load(counts + t_after)
        delta = gl.zeros([TILE], gl.float32, ROW)
        panel = gl.where(after >= 0, 0, ALL)
        for first in range(0, gl.maximum(count, 1), TILE):
            at = done & 1
            last = first + TILE >= count
            mbarrier.wait(staged_empty.index(at), (done >> 1 & 1) ^ 1)
            if DELTAS:  # noqa: SIM102 the first is decided by the compiler
                if panel < ALL:
                    barrier()
                    _load_factors(
                        factors, after, panel, weights.index(at), gradients.index(at), factors_full, PARTS, TAIL
                    )
            mbarrier.wait(keys_empty, at ^ 1)
            _gather(kv, to_gather, keys)
            if ORDERED:
                targets.index(at).store(item * pitch + first + n)
            else:
                targets.index(at).store(gl.where(row >= 0, row, nowhere + n))
            named = row >= 0
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            sums = warpgroup_mma_init(gl.zeros([TILE, 2 * TILE], gl.float32, BOTH))
            for j in range(rounds):
                if first == 0:
                    mbarrier.wait(full.index(j), query_phase)
                    mbarrier.wait(full.index(PANELS + j), query_phase)
                sums = warpgroup_mma(keys.index(j), both.index(j).permute((1, 0)), sums, is_async=True)
                k = keys.index(PANELS + j)
                sums = warpgroup_mma(k, both.index(PANELS + j).permute((1, 0)), sums, is_async=True)
            mine = slots + gl.where(last, t_after, t).to(gl.int64) * pitch
            from_slot = gl.where(last, 0, first + TILE)
            until = gl.where(last, count_after, count)
            to_gather = _some_slots(mine, from_slot, until, ROW)
            row = _some_slots(mine, from_slot, until, SLOT)
            if DELTAS:  # noqa: SIM102 the first is decided by the compiler
                if panel < ALL:
                    delta += _sum_products(weights.index(at), gradients.index(at), panel, factors_full)
                    panel += 1
                    while last & (panel < ALL):
                        barrier()
                        _load_factors(
                            factors, after, panel, weights.index(at), gradients.index(at), factors_full, PARTS, TAIL
                        )
                        delta += _sum_products(weights.index(at), gradients.index(at), panel, factors_full)
                        panel += 1
            # Read again for each tile: there are no registers to keep them in.
            log = of_heads.index(2 * query_phase).load(HEAD)
            delta_scaled = of_heads.index(2 * query_phase + 1).load(HEAD)
            sums = warpgroup_mma_wait(0, deps=[sums])
            s, dp = gl.split(sums.reshape([TILE, 2, TILE]).permute((0, 2, 1)))
            s = gl.convert_layout(s, ONE, assert_trivial=True)
            dp = gl.convert_layout(dp, ONE, assert_trivial=True)
            p = gl.where(named[:, None], gl.exp2(s * scale_log2 - log[None, :]), 0.0)
            ds = p * gl.where(named[:, None], dp * scale - delta_scaled[None, :], 0.0)
            barrier()  # all have read what was in the buffers
            weights.index(at).store(p.to(gl.bfloat16))
            gradients.index(at).store(ds.to(gl.bfloat16))
            fence_async_shared()
            mbarrier.arrive(staged_full.index(at))
            done += 1
        if after >= 0:
            _leave_numbers(
                of_queries, delta, of_heads, query_phase ^ 1, after, count_after, scale, HEADS, PARTS, DELTAS
            )
        barrier()
        query_phase ^= 1
        item = after
        count = count_after


@gluon.jit
def _send(chunk, rows, sums, channel, INSTRUCTION: gl.constexpr):
    """Adds a chunk of 64 slots x 64 channels to rows of the sums, from `channel` on, or stores it there."""
    parts = gl.convert_layout(chunk, LINES).reshape([TILE, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4))
    even, odd = gl.split(parts)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    LAYOUT: gl.constexpr = x0.type.layout
    sixteen = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    place = (sixteen // 2 * 16 + sixteen % 2 * 32)[None, :, None] + (4 * four)[None, None, :]
    row = gl.convert_layout(rows, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)), assert_trivial=True)
    args = [sums.to(gl.int64, bitcast=True), row[:, None, None], channel + place, x0, x1, x2, x3]
    gl.inline_asm_elementwise(INSTRUCTION, "=r,l,r,r,f,f,f,f", args, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _add_gradients(
    arguments,
    FIRST: gl.constexpr,
    HEADS: gl.constexpr,
    PARTS: gl.constexpr,
    ORDERED: gl.constexpr,
):
    """The gradients of channels FIRST to FIRST + 256."""
    inputs, results, tiles, bars, items = arguments
    q, grad_out, counts = inputs
    dq, sums = results
    operands, keys, weights, gradients, targets, _ = tiles
    full, keys_empty, staged_full, staged_empty, _ = bars
    CHUNK: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    QUERY: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    SLOT: gl.constexpr = gl.SliceLayout(1, LINES)
    SEND: gl.constexpr = STORE if ORDERED else ADD
    MINE: gl.constexpr = FIRST // PANEL
    k = reinterpret(keys, gl.bfloat16, [2, TILE, HALF], keys.layout).index(FIRST // HALF)
    chunk = gl.zeros([TILE, PANEL], gl.float32, CHUNK)
    done = 0
    item = items - 1 - gl.program_id(0)
    for j in range(PANELS):
        _load_panel(q, grad_out, item, MINE + j, operands, full, PARTS)
    while item >= 0:
        t = item // PARTS
        count = gl.load(counts + t)
        grad = gl.zeros([TILE, HALF], gl.float32, QUERY)
        for first in range(0, gl.maximum(count, 1), TILE):
            at = done & 1
            last = first + TILE >= count
            mbarrier.wait(staged_full.index(at), done >> 1 & 1)
            p, d_scores = weights.index(at), gradients.index(at)
            grad = warpgroup_mma(d_scores.permute((1, 0)), k, grad, is_async=True)
            grad = warpgroup_mma_wait(0, deps=[grad])
            mbarrier.arrive(keys_empty)
            for j in range(PANELS):
                chunk = warpgroup_mma(d_scores, operands.index(2 * (MINE + j)), chunk, use_acc=False, is_async=True)
                chunk = warpgroup_mma(p, operands.index(2 * (MINE + j) + 1), chunk, is_async=True)
                chunk = warpgroup_mma_wait(0, deps=[chunk])
                if j == PANELS - 1:
                    mbarrier.arrive(staged_empty.index(at))
                if last & (item >= gl.num_programs(0)):
                    barrier()
                    _load_panel(q, grad_out, item - gl.num_programs(0), MINE + j, operands, full, PARTS)
                _send(chunk, targets.index(at).load(SLOT), sums, FIRST + j * PANEL, SEND)
            done += 1
        out = gl.convert_layout(gl.convert_layout(grad.to(gl.bfloat16), FOURS), EIGHTS)
        h = gl.arange(0, TILE, layout=gl.SliceLayout(1, EIGHTS))
        c = gl.arange(0, HALF, layout=gl.SliceLayout(0, EIGHTS))
        mine = dq + ((t.to(gl.int64) * HEADS + item % PARTS * TILE) * CHANNELS + FIRST)
        gl.store(mine + (h[:, None] * CHANNELS + c[None, :]), out, mask=(h < HEADS)[:, None] & (c < HALF)[None, :])
        item -= gl.num_programs(0)


@gluon.jit(do_not_specialize=["items", "pitch", "nowhere", "rounds"])
def gradients_kernel(
    q,
    grad_out,
    out,
    tail,
    kv,
    slots,
    counts,
    logs,
    deltas,
    shares,
    dq,
    sums,
    scale_log2,
    scale,
    items,
    pitch,
    nowhere,
    rounds,
    HEADS: gl.constexpr,
    TAIL: gl.constexpr,
    DELTAS: gl.constexpr,
    ORDERED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dq of all queries, and dkv added to sums; ORDERED: parts of dkv, one row for each slot, instead.

    q, grad_out: descriptors of (S, H, 512), boxes of 64 heads and 64 channels; what is behind the last head is zero.
    items: queries times their parts of 64 heads. nowhere: row of the sums from which on 64 take what empty slots add.
    rounds: PANELS, not known to the compiler, which would write out the loop and run out of registers.
    """
    PARTS: gl.constexpr = (HEADS + TILE - 1) // TILE
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    # Panels of q and g in turn; panels of K; P^T and dS^T, of two tiles in turn, and where these are to be added;
    # logarithms and deltas, of two queries in turn.
    operands = gl.allocate_shared_memory(gl.bfloat16, [2 * CHANNELS // PANEL, TILE, PANEL], SWIZZLED)
    keys = gl.allocate_shared_memory(gl.bfloat16, [CHANNELS // PANEL, TILE, PANEL], SWIZZLED)
    weights = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    gradients = gl.allocate_shared_memory(gl.bfloat16, [2, TILE, TILE], SWIZZLED)
    targets = gl.allocate_shared_memory(gl.int32, [2, TILE], FLAT)
    of_heads = gl.allocate_shared_memory(gl.float32, [4, TILE], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [CHANNELS // PANEL, 1], BARRIER)
    keys_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    staged_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    staged_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    factors_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(CHANNELS // PANEL):
        mbarrier.init(full.index(i), count=1)
    mbarrier.init(keys_empty, count=2)
    mbarrier.init(factors_full, count=1)
    for i in gl.static_range(2):
        mbarrier.init(staged_full.index(i), count=1)
        mbarrier.init(staged_empty.index(i), count=2)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    bars = (full, keys_empty, staged_full, staged_empty, factors_full)
    tiles = (operands, keys, weights, gradients, targets, of_heads)
    inputs = (kv, slots, counts, (logs, deltas, shares))
    factors = (out, tail, grad_out)
    results = (dq, sums)
    adding = ((q, grad_out, counts), results, tiles, bars, items)
    scoring = (inputs, factors, scale_log2, scale, tiles, bars, items, pitch, nowhere, rounds)
    gl.warp_specialize(
        [
            (_add_gradients, (adding, 0, HEADS, PARTS, ORDERED)),
            (_add_gradients, (adding, HALF, HEADS, PARTS, ORDERED)),
            (_score, (scoring, HEADS, PARTS, TAIL, DELTAS, ORDERED)),
        ],
        [4, 4],
        REGISTERS,
    )
