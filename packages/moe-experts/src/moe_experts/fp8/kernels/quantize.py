"""Quantised copies of activations, gradients and weights (Gluon, SM90)."""

from hopper_kernels.gluon_names import reinterpret
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moe_experts.fp8.kernels.casts import (
    CAST_COLUMNS,
    CAST_PAIRS,
    TILE,
    activation_scales,
    codes_of_columns,
    codes_of_pairs,
    max_pairs,
    scales,
)

PAIRS = gl.constexpr(64)  # bf16 pairs, one 32-bit word each, in a row of a tile
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # Triton 3.9, and before


@gluon.jit
def block_of(table, experts, columns):
    """The program's block of padded rows and its column of `columns`; whether an expert has the block, its first row,
    and rows left there. The grid has one axis: the others end at 65,535 programs."""
    block = gl.program_id(0) // columns
    count = gl.load(table)
    entry = table + 4 * (1 + gl.minimum(block, count - 1))
    owned = (block < count) & (gl.load(entry) < experts)
    return block, gl.program_id(0) % columns, owned, gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _low(pair):
    """Bits of a bf16 pair's first value in fp32."""
    return pair << 16


@gluon.jit
def _high(pair):
    """Bits of a bf16 pair's second value in fp32."""
    return pair & -0x10000


@gluon.jit
def _column_pairs(values, COLUMNS: gl.constexpr, TURNED: gl.constexpr):
    """One fp32 value for each column, from shared memory, as `codes_of_columns` takes them: of pairs' two halves."""
    low, high = gl.split(gl.reshape(values.load(gl.SliceLayout(1, COLUMNS)), [PAIRS, 2]))
    low = gl.convert_layout(low, gl.SliceLayout(1, TURNED), assert_trivial=True)
    high = gl.convert_layout(high, gl.SliceLayout(1, TURNED), assert_trivial=True)
    return low[:, None], high[:, None]


@gluon.constexpr_function
def pair_patches():
    """Layout of a tile of bf16 pairs with 8 warps: 8 rows x 4 pairs a thread."""
    return gl.BlockedLayout([8, 4], [2, 16], [8, 1], [1, 0])


@gluon.constexpr_function
def turned_pairs():
    """The same ownership with rows as the second and fastest axis."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        [[4, 0], [8, 0], [16, 0], [32, 0], [0, 8]],
        [[0, 16], [0, 32], [0, 64]],
        [],
        [64, 128],
    )


@gluon.jit
def _store_turned(v, divisors, reciprocals, tile, to, pitch, CAST: gl.constexpr):
    """Codes of pairs v (128, 64) by channels: 128 lines of 128 bytes, `pitch` apart, whole lines at a time.

    They go through `tile`, which v was read from. divisors, reciprocals: of each pair's first channel and its second.
    """
    TURNED: gl.constexpr = turned_pairs()
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    size: gl.constexpr = v.shape[0]
    v_t = gl.convert_layout(gl.permute(v, [1, 0]), TURNED, assert_trivial=True)
    low, high = codes_of_columns(v_t, divisors[0], divisors[1], reciprocals[0], reciprocals[1], CAST)
    staged = reinterpret(tile, gl.uint8, [2, size, size], gl.SwizzledSharedLayout(8, 8, 16, [1, 0])).index(0)
    staged.store(gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [size, size]))
    r = gl.arange(0, size, layout=gl.SliceLayout(1, LINES))
    c = gl.arange(0, size, layout=gl.SliceLayout(0, LINES))
    gl.store(to + (r[:, None] * pitch + c[None, :]), staged.load(LINES))


@gluon.jit(do_not_specialize=["experts", "columns", "pitch"])
def quantize_kernel(
    x,
    rows,
    row_scales,
    panels,
    panel_scales,
    table,
    experts,
    columns,
    pitch,
    PANELS: gl.constexpr,
):
    """A program quantises a block of padded rows, 128 columns, of x (M, 128 columns) bf16.

    To rows (Mp, channels) bytes and row_scales (columns, pitch) fp32, and with PANELS to panels (Mp / 128, channels,
    128) bytes and panel_scales (Mp / 128, channels) fp32. Rows that pad a group count as zeros. table: see
    `groups_kernel`.

    A thread keeps a patch of 8 rows x 4 pairs of channels, as 32-bit words, and uses it for both casts. It owns 8 bytes
    of each of 8 rows; its 8 bytes of each of 8 channels go through shared memory, so that whole lines are written. The
    tile's memory, once read, holds the maxima and then those bytes.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 8)
    PATCHES: gl.constexpr = pair_patches()
    TURNED: gl.constexpr = turned_pairs()
    # The same ownership with single channels in place of pairs.
    COLUMNS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0], [64, 0], [0, 8]],
        [[0, 16], [0, 32], [0, 64]],
        [],
        [TILE, TILE],
    )
    MAXIMA: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, WARPS], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, PATCHES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = 2 * TILE if PANELS else TILE  # of scales: of rows, then of channels

    block, column, owned, first, left = block_of(table, experts, columns)
    if owned:
        tile = gl.allocate_shared_memory(gl.int32, [TILE, PAIRS], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
        divisors = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
        reciprocals = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
        channels = columns * TILE
        pairs = columns * PAIRS
        r = gl.arange(0, TILE, layout=ROW)
        c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, PATCHES))
        base = x.to(gl.pointer_type(gl.int32), bitcast=True) + (first.to(gl.int64) * pairs + column * PAIRS)
        inside = (r < left)[:, None] & (c < PAIRS)[None, :]
        async_load(tile, base + (r[:, None] * pairs + c[None, :]), mask=inside)
        async_copy.commit_group()
        async_copy.wait_group(0)
        v = tile.load(PATCHES)

        # 16 maxima of each row and of each channel meet in shared memory.
        shape: gl.constexpr = [TILE * PAIRS // (16 * COUNT), 16, COUNT]
        maxima = reinterpret(tile, gl.int32, shape, gl.SwizzledSharedLayout(4, 1, 8, [1, 0])).index(0)
        bits = v & 0x7FFF7FFF
        of_row = gl.reduce(gl.reshape(bits, [TILE, 16, 4]), 2, max_pairs)
        of_row = gl.maximum(_low(of_row), _high(of_row))
        if PANELS:
            of_channel = gl.reduce(gl.reshape(bits, [16, 8, PAIRS]), 1, max_pairs)
            of_channel = gl.reshape(gl.join(_low(of_channel), _high(of_channel)), [16, TILE])
        maxima.slice(0, TILE, dim=1).store(gl.permute(of_row, [1, 0]))
        if PANELS:
            maxima.slice(TILE, TILE, dim=1).store(of_channel)
        scale, divisor, reciprocal = activation_scales(gl.max(maxima.load(MAXIMA), axis=0))
        divisors.store(divisor)
        reciprocals.store(reciprocal)
        k = gl.arange(0, COUNT, layout=gl.SliceLayout(0, MAXIMA))
        at = block.to(gl.int64) * channels + column * TILE
        gl.store(row_scales + (column.to(gl.int64) * pitch + block * TILE) + k, scale, mask=k < TILE)
        if PANELS:
            gl.store(panel_scales + at + (k - TILE), scale, mask=k >= TILE)

        divisor = divisors.slice(0, TILE).load(ROW)
        reciprocal = reciprocals.slice(0, TILE).load(ROW)
        out = codes_of_pairs(v, divisor[:, None], reciprocal[:, None], CAST_PAIRS)
        to = rows.to(gl.pointer_type(gl.uint16), bitcast=True) + (block.to(gl.int64) * TILE * pairs + column * PAIRS)
        # Kept in the L2 longer than what else is written, rows are written back in larger runs.
        gl.store(to + (r[:, None] * pairs + c[None, :]), out, eviction_policy="evict_last")

        if PANELS:
            divisor = _column_pairs(divisors.slice(TILE, TILE), COLUMNS, TURNED)
            reciprocal = _column_pairs(reciprocals.slice(TILE, TILE), COLUMNS, TURNED)
            _store_turned(v, divisor, reciprocal, tile, panels + at * TILE, TILE, CAST_COLUMNS)


@gluon.jit(do_not_specialize=["rows", "half", "columns", "gate_pitch", "up_pitch"])
def quantize_weights_kernel(
    gate, up, q, sf, q_t, sf_t, rows, half, columns, gate_pitch, up_pitch, TURNED: gl.constexpr
):
    """A program quantises a block of 128 x 128 of a weight (experts, 128 rows, channels), and with TURNED turns it.

    The first `half` blocks of rows are those of gate, the others those of up, whose experts are so many rows apart.
    q (experts, 128 rows, channels) bytes with sf (experts, rows, columns) fp32, and q_t, sf_t, which are the same with
    the last two axes swapped. A thread keeps bf16 pairs as in `quantize_kernel`.
    """
    WEIGHT_FLOOR: gl.constexpr = 0x38D1B717  # bits of RN(1e-4)
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 8)
    PATCHES: gl.constexpr = pair_patches()
    ROW: gl.constexpr = gl.SliceLayout(1, PATCHES)
    column = gl.program_id(0) % columns
    row = gl.program_id(0) // columns % rows
    expert = (gl.program_id(0) // (columns * rows)).to(gl.int64)
    channels = columns * TILE
    height = rows * TILE
    pairs = columns * PAIRS
    r = gl.arange(0, TILE, layout=ROW)
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, PATCHES))
    of_gate = gate + (expert * gate_pitch + row * TILE) * channels
    of_up = up + (expert * up_pitch + (row - half) * TILE) * channels
    base = gl.where(row < half, of_gate, of_up).to(gl.pointer_type(gl.int32), bitcast=True) + column * PAIRS
    at = r[:, None] * pairs + c[None, :]
    tile = gl.allocate_shared_memory(gl.int32, [TILE, PAIRS], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    async_load(tile, base + at)
    async_copy.commit_group()
    async_copy.wait_group(0)
    v = tile.load(PATCHES)

    largest = gl.reduce(gl.reduce(v & 0x7FFF7FFF, 1, max_pairs), 0, max_pairs)
    amax = gl.maximum(_low(largest), _high(largest))
    scale, divisor, reciprocal = scales(r * 0 + amax, WEIGHT_FLOOR)
    gl.store(sf + (expert * rows + row) * columns + column + r * 0, scale, mask=r == 0)
    to = q.to(gl.pointer_type(gl.uint16), bitcast=True) + ((expert * height + row * TILE) * pairs + column * PAIRS)
    gl.store(to + at, codes_of_pairs(v, divisor[:, None], reciprocal[:, None], CAST_PAIRS))
    if TURNED:
        gl.store(sf_t + (expert * columns + column) * rows + row + r * 0, scale, mask=r == 0)
        TURNED_PAIRS: gl.constexpr = turned_pairs()
        of_pair = gl.full([PAIRS], 0, gl.int32, gl.SliceLayout(1, TURNED_PAIRS)) + amax
        _scale, divisor, reciprocal = scales(of_pair, WEIGHT_FLOOR)
        to_t = q_t + ((expert * channels + column * TILE) * height + row * TILE)
        divisors, reciprocals = (divisor[:, None],) * 2, (reciprocal[:, None],) * 2
        _store_turned(v, divisors, reciprocals, tile, to_t, height, CAST_COLUMNS)
