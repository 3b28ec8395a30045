"""What comes before and after the products: slots without the empty ones, the softmax's sums, dkv in bf16 (Triton)."""

import triton
import triton.language as tl

CHANNELS = tl.constexpr(512)
BLOCK = tl.constexpr(64)  # channels at a time
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["width", "rows", "pitch"])
def prepare_kernel(
    grad_out,
    out,
    tail,
    lse,
    sinks,
    indices,
    slots,
    counts,
    logs,
    deltas,
    shares,
    width,
    rows,
    pitch,
    HEADS: tl.constexpr,
    TAIL: tl.constexpr,
    DELTAS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Of a query: its slots but for the empty ones, in their order, and their number; of each head the logarithm to
    base 2 of the softmax's sum, and, if DELTAS, delta and the share of the sink's gradient: if not, in place of that
    share, the sink's weight. Zeros, and +inf, where no slot is left.

    TAIL: channels of the output that are in `tail`, whole blocks. SLOTS: so many at a time, a power of two.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SLOTS)
    count = 0
    for first in range(0, width, SLOTS):
        row = tl.load(indices + t * width + first + n, mask=first + n < width, other=-1)
        named = (row >= 0) & (row < rows)
        place = count + tl.cumsum(named.to(tl.int32), 0) - 1
        tl.store(slots + t * pitch + place, row, mask=named)
        count += tl.sum(named.to(tl.int32), 0)
    tl.store(counts + t, count)

    h = tl.arange(0, HEADS)
    at = t * HEADS + h
    keys = tl.load(lse + at)
    sink = tl.load(sinks + h)
    top = tl.maximum(keys, sink, propagate_nan=tl.PropagateNan.ALL)
    finite = tl.abs(top) < float("inf")
    rest = tl.where(finite, tl.exp(tl.minimum(keys, sink) - tl.where(finite, top, 0.0)), 0.0)
    # log(1 + x) of small x, without the digits that 1 + x has lost
    above = 1.0 + rest
    log = top + tl.where(above == 1.0, rest, tl.log(above) * tl.div_rn(rest, above - 1.0))
    log = tl.where(finite, log, top)
    share = tl.where(sink == float("inf"), 1.0, tl.div_rn(tl.exp(sink - top), above))
    share = tl.where(sink == -float("inf"), 0.0, share)
    tl.store(logs + at, tl.where(count > 0, log * LOG2_E, float("inf")))
    share = tl.where(count > 0, share, 0.0)
    if DELTAS:
        c = tl.arange(0, BLOCK)
        products = tl.zeros([HEADS, BLOCK], tl.float32)
        for first in tl.static_range(0, CHANNELS, BLOCK):
            place = t * (HEADS * CHANNELS) + h[:, None] * CHANNELS + (first + c)[None, :]
            g = tl.load(grad_out + place).to(tl.float32)
            if first < CHANNELS - TAIL:
                o = tl.load(out + place)
            else:
                in_tail = first - (CHANNELS - TAIL) + c
                o = tl.load(tail + t * (HEADS * TAIL) + h[:, None] * TAIL + in_tail[None, :])
            products += g * o.to(tl.float32)
        delta = tl.where(count > 0, tl.sum(products, 1), 0.0)
        tl.store(deltas + at, delta)
        share = -share * delta
    tl.store(shares + at, share)


@triton.jit
def _channels(x, ROWS: tl.constexpr):
    """Rows of sums (ROWS, 512) in the order of their channels: place 1 + 2 + 4 * 3 + 16 + 32 is channel 1 + 8 + ..."""
    # Bits of a place, from the highest: channels 32 x 8 of them, then 16, 32, 4 and 2, 8, 1.
    x = tl.reshape(x, [ROWS, 8, 2, 2, 4, 2, 2])
    x = tl.permute(x, [0, 1, 3, 2, 5, 4, 6])
    return tl.reshape(x, [ROWS, 512])


@triton.jit(do_not_specialize=["rows"])
def finish_kernel(sums, dkv, rows, ROWS: tl.constexpr):
    """Sums in fp32, rounded to bf16, with channels in their order."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    inside = (row < rows)[:, None] & (tl.arange(0, CHANNELS) < CHANNELS)[None, :]
    x = tl.load(sums + at, mask=inside, other=0.0)
    tl.store(dkv + at, _channels(x, ROWS).to(tl.bfloat16), mask=inside)


@triton.jit
def add_kernel(parts, order, starts, sums, ROWS: tl.constexpr):
    """Adds to a row of the sums its parts order[starts[row]] and on, up to the next row's first, in this order."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if end > first:
        c = tl.arange(0, CHANNELS)
        total = tl.load(sums + row * CHANNELS + c)
        while first < end:
            for i in tl.static_range(ROWS):  # read together, and added one after the other
                inside = first + i < end
                part = tl.load(order + first + i, mask=inside, other=0)
                total += tl.load(parts + part * CHANNELS + c, mask=inside & (c < CHANNELS), other=0.0)
            first += ROWS
        tl.store(sums + row * CHANNELS + c, total)
