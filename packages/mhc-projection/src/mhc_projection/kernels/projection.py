"""Gate logits, sums of squares and collapse of the residual streams in one read of them (Gluon, SM90)."""

from mhc_projection.kernels.tma import barrier
from mhc_projection.kernels.tma import load as tma_load
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

CHANNELS = gl.constexpr(64)  # of a stream in a step: 128 bytes, the widest swizzle
LOGITS = gl.constexpr(32)  # of a token, padded with zeros
SQUARES_SCALE = gl.constexpr(2.0**-10)  # `plan` divides the number of channels by as much


@gluon.jit
def _fetch(x, weight, xs, ws, bars, step, t0, stream, c0, wanted, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Start loading the tiles of a step: those of GROUP streams and of the weight. Nothing if it is not wanted."""
    slot = step % STAGES
    bar = bars.index(slot)
    mbarrier.expect(bar, GROUP * (x.block_type.nbytes + weight.block_type.nbytes), wanted)
    for i in gl.static_range(GROUP):
        tma_load(x, [t0, stream + i, c0], bar, xs.index(slot * GROUP + i), wanted)
        tma_load(weight, [0, stream + i, c0], bar, ws.index(slot * GROUP + i), wanted)


@gluon.jit(do_not_specialize=["tokens", "channels_over_8", "n", "splits"])
def projection_kernel(
    x,
    weight,
    pre_mix,
    parts,
    collapsed,
    tokens,
    channels_over_8,
    n,
    splits,
    HC: gl.constexpr,
    GROUP: gl.constexpr,
    COLLAPSE: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """A program takes TOKENS tokens and one of `splits` nearly equal ranges of the channels, of all streams.

    x (tokens, HC, channels) and weight (n, HC, channels) come by TMA, whose zeros fill what is past their ends. It
    writes parts[split] (n + 1, tokens), that of the products with the weight and, last, of the scaled sums of squares,
    and its channels of the collapse. Programs of the same tokens are neighbours, so that whole rows of x are read at a
    time. A step is GROUP streams of a block of channels.
    """
    WARPS: gl.constexpr = gl.num_warps()
    GROUPS: gl.constexpr = HC // GROUP
    ACC: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, LOGITS, 16]
    )
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, ROWS)
    channels = channels_over_8 * 8
    tile = gl.program_id(0) // splits
    split = gl.program_id(0) % splits
    blocks = gl.cdiv(channels, CHANNELS)
    first = split * blocks // splits
    last = (split + 1) * blocks // splits
    steps = (last - first) * GROUPS
    t0 = tile * TOKENS
    start = t0.to(gl.int64)

    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP, TOKENS, 1, CHANNELS], x.layout)
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUP, LOGITS, 1, CHANNELS], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()  # the barriers, before TMA meets them
    barrier()
    for s in gl.static_range(STAGES):
        c0 = (first + s // GROUPS) * CHANNELS
        _fetch(x, weight, xs, ws, bars, s, t0, s % GROUPS * GROUP, c0, s < steps, GROUP, STAGES)

    t = gl.arange(0, TOKENS, layout=ROW)
    c = gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, ROWS))
    in_t = t < tokens - t0
    KEPT: gl.constexpr = HC <= 4  # whether the registers hold all weights of the collapse
    weights = ()
    if COLLAPSE and KEPT:
        for i in gl.static_range(HC):
            weights = weights + (gl.load(pre_mix + start * HC + t * HC + i, mask=in_t, other=0.0),)
    total = gl.zeros([TOKENS, LOGITS], gl.float32, ACC)
    square = gl.zeros([TOKENS, CHANNELS], gl.float32, ROWS)
    step = 0
    for block in range(first, last):
        mixed = gl.zeros([TOKENS, CHANNELS], gl.float32, ROWS)
        for group in gl.static_range(GROUPS):
            slot = step % STAGES
            mbarrier.wait(bars.index(slot), (step // STAGES) & 1)
            # The matrix instructions drop low bits of long sums: GROUP * CHANNELS channels go into one.
            product = gl.zeros([TOKENS, LOGITS], gl.float32, ACC)
            for i in gl.static_range(GROUP):
                stream = xs.index(slot * GROUP + i).reshape([TOKENS, CHANNELS])
                w = ws.index(slot * GROUP + i).reshape([LOGITS, CHANNELS]).permute((1, 0))
                product = warpgroup_mma(stream, w, product, use_acc=i > 0, is_async=True)
            for i in gl.static_range(GROUP):
                value = xs.index(slot * GROUP + i).reshape([TOKENS, CHANNELS]).load(ROWS).to(gl.float32)
                square = gl.fma(value, value, square)
                if COLLAPSE:
                    if KEPT:
                        mix = weights[group * GROUP + i]
                    else:
                        mix = gl.load(pre_mix + start * HC + t * HC + (group * GROUP + i), mask=in_t, other=0.0)
                    mixed += mix[:, None] * value
            product = warpgroup_mma_wait(0, deps=[product])
            total += product
            barrier()  # all have read the slot
            ahead = step + STAGES
            c0 = (first + ahead // GROUPS) * CHANNELS
            _fetch(x, weight, xs, ws, bars, ahead, t0, ahead % GROUPS * GROUP, c0, ahead < steps, GROUP, STAGES)
            step += 1
        if COLLAPSE:
            column = block * CHANNELS + c
            address = collapsed + start * channels + (t[:, None] * channels + column[None, :])
            gl.store(address, mixed.to(gl.bfloat16), mask=in_t[:, None] & (column < channels)[None, :])

    ta = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, ACC))
    j = gl.arange(0, LOGITS, layout=gl.SliceLayout(0, ACC))
    part = parts + split.to(gl.int64) * (n + 1) * tokens + start
    mask = (ta < tokens - t0)[:, None] & (j < n)[None, :]
    gl.store(part + (ta[:, None] + j.to(gl.int64)[None, :] * tokens), total, mask=mask)
    # Scaled, exactly, so that the sums of streams up to 1e18 do not overflow.
    square = gl.sum(square * SQUARES_SCALE, axis=1)
    gl.store(part + n.to(gl.int64) * tokens + t, square, mask=in_t)
