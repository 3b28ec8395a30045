"""Quantised copies of activations, gradients and weights (Gluon, SM90)."""

from hopper_kernels.gluon_names import reinterpret
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from moe_experts.fp8.kernels.casts import (
    TILE,
    activation_scales,
    codes,
    codes_of_columns,
    codes_of_pairs,
    magnitude,
    max_pairs,
    patches,
    scales,
)

PAIRS = gl.constexpr(64)  # bf16 pairs, one 32-bit word each, in a row of a tile
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # Triton 3.9, and before


@gluon.jit
def block_of(table, experts):
    """The program's block of padded rows: its number, whether an expert has it, its first row, and rows left there."""
    block = gl.program_id(1)
    count = gl.load(table)
    entry = table + 4 * (1 + gl.minimum(block, count - 1))
    return block, (block < count) & (gl.load(entry) < experts), gl.load(entry + 1), gl.load(entry + 2)


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
    ROWS: gl.constexpr,
    PANELS: gl.constexpr,
):
    """A program quantises block program_id(1) of padded rows, columns 128 program_id(0) on, of x (M, 128 columns) bf16.

    With ROWS: rows (Mp, channels) bytes and row_scales (columns, pitch) fp32. With PANELS: panels (Mp / 128, channels,
    128) bytes and panel_scales (Mp / 128, channels) fp32. Rows that pad a group count as zeros. table: see
    `groups_kernel`.

    A thread keeps a patch of 8 rows x 4 pairs of channels, as 32-bit words, and uses it for both casts. It owns 8 bytes
    of each of 8 rows; its 8 bytes of each of 8 channels go through shared memory, so that whole lines are written. The
    tile's memory, once read, holds the maxima and then those bytes.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 8)
    PATCHES: gl.constexpr = gl.BlockedLayout([8, 4], [2, 16], [WARPS, 1], [1, 0])
    # The same ownership with rows as the second and fastest axis.
    TURNED: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]],
        [[4, 0], [8, 0], [16, 0], [32, 0], [0, 8]],
        [[0, 16], [0, 32], [0, 64]],
        [],
        [PAIRS, TILE],
    )
    # And with single channels in place of pairs.
    COLUMNS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0], [64, 0], [0, 8]],
        [[0, 16], [0, 32], [0, 64]],
        [],
        [TILE, TILE],
    )
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    MAXIMA: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, WARPS], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, PATCHES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COUNT: gl.constexpr = 2 * TILE if ROWS and PANELS else TILE  # of scales: of rows, then of channels
    FIRST: gl.constexpr = COUNT - TILE  # that of the first channel

    block, owned, first, left = block_of(table, experts)
    if owned:
        tile = gl.allocate_shared_memory(gl.int32, [TILE, PAIRS], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
        divisors = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
        reciprocals = gl.allocate_shared_memory(gl.float32, [COUNT], FLAT)
        column = gl.program_id(0)
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
        if ROWS:
            of_row = gl.reduce(gl.reshape(bits, [TILE, 16, 4]), 2, max_pairs)
            of_row = gl.maximum(_low(of_row), _high(of_row))
        if PANELS:
            of_channel = gl.reduce(gl.reshape(bits, [16, 8, PAIRS]), 1, max_pairs)
            of_channel = gl.reshape(gl.join(_low(of_channel), _high(of_channel)), [16, TILE])
        if ROWS:
            maxima.slice(0, TILE, dim=1).store(gl.permute(of_row, [1, 0]))
        if PANELS:
            maxima.slice(FIRST, TILE, dim=1).store(of_channel)
        scale, divisor, reciprocal = activation_scales(gl.max(maxima.load(MAXIMA), axis=0))
        divisors.store(divisor)
        reciprocals.store(reciprocal)
        k = gl.arange(0, COUNT, layout=gl.SliceLayout(0, MAXIMA))
        at = block.to(gl.int64) * channels + column * TILE
        if ROWS:
            gl.store(row_scales + (column.to(gl.int64) * pitch + block * TILE) + k, scale, mask=k < TILE)
        if PANELS:
            gl.store(panel_scales + at + (k - FIRST), scale, mask=k >= FIRST)

        if ROWS:
            divisor = divisors.slice(0, TILE).load(ROW)
            reciprocal = reciprocals.slice(0, TILE).load(ROW)
            out = codes_of_pairs(v, divisor[:, None], reciprocal[:, None])
            to = rows.to(gl.pointer_type(gl.uint16), bitcast=True) + (
                block.to(gl.int64) * TILE * pairs + column * PAIRS
            )
            # Kept in the L2 longer than what else is written, rows are written back in larger runs.
            gl.store(to + (r[:, None] * pairs + c[None, :]), out, eviction_policy="evict_last")

        if PANELS:
            v_t = gl.convert_layout(gl.permute(v, [1, 0]), TURNED, assert_trivial=True)
            divisor_low, divisor_high = _column_pairs(divisors.slice(FIRST, TILE), COLUMNS, TURNED)
            reciprocal_low, reciprocal_high = _column_pairs(reciprocals.slice(FIRST, TILE), COLUMNS, TURNED)
            low, high = codes_of_columns(v_t, divisor_low, divisor_high, reciprocal_low, reciprocal_high)
            out_t = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [TILE, TILE])
            staged = reinterpret(tile, gl.uint8, [2, TILE, TILE], gl.SwizzledSharedLayout(8, 8, 16, [1, 0])).index(0)
            staged.store(out_t)
            r_t = gl.arange(0, TILE, layout=gl.SliceLayout(1, LINES))
            c_t = gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES))
            gl.store(panels + at * TILE + (r_t[:, None] * TILE + c_t[None, :]), staged.load(LINES))


@gluon.jit(do_not_specialize=["rows", "half", "gate_pitch", "up_pitch"])
def quantize_weights_kernel(gate, up, q, sf, q_t, sf_t, rows, half, gate_pitch, up_pitch, TURNED: gl.constexpr):
    """A program quantises a block of 128 x 128 of a weight (experts, 128 rows, channels), and with TURNED turns it.

    The first `half` blocks of rows are those of gate, the others those of up, whose experts are so many rows apart.
    q (experts, 128 rows, channels) bytes with sf (experts, rows, columns) fp32, and q_t, sf_t, which are the same with
    the last two axes swapped. Grid: columns of blocks, rows of blocks, experts.
    """
    WEIGHT_FLOOR: gl.constexpr = 0x38D1B717  # bits of RN(1e-4)
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 16)
    LAYOUT: gl.constexpr = patches()
    column = gl.program_id(0)
    row = gl.program_id(1)
    expert = gl.program_id(2).to(gl.int64)
    columns = gl.num_programs(0)
    channels = columns * TILE
    height = rows * TILE
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
    at = r[:, None] * channels + c[None, :]
    of_gate = gate + (expert * gate_pitch + row * TILE) * channels
    of_up = up + (expert * up_pitch + (row - half) * TILE) * channels
    v = gl.load(gl.where(row < half, of_gate, of_up) + column * TILE + at).to(gl.float32)
    amax = gl.max(gl.max(magnitude(v), axis=1), axis=0)
    scale, divisor, reciprocal = scales(r * 0 + amax, WEIGHT_FLOOR)
    gl.store(sf + (expert * rows + row) * columns + column + r * 0, scale, mask=r == 0)
    base = q + ((expert * height + row * TILE) * channels + column * TILE)
    gl.store(base + at, codes(v, divisor[:, None], reciprocal[:, None]))
    if TURNED:
        gl.store(sf_t + (expert * columns + column) * rows + row + r * 0, scale, mask=r == 0)
        # The same ownership with channels first and rows as the second and fastest axis.
        PATCHES_T: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
            [[8, 0], [16, 0], [32, 0], [64, 0], [0, 4]],
            [[0, 8], [0, 16], [0, 32], [0, 64]],
            [],
            [TILE, TILE],
        )
        LINES: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
        staged = gl.allocate_shared_memory(gl.uint8, [TILE, TILE], gl.SwizzledSharedLayout(8, 8, 16, [1, 0]))
        v_t = gl.convert_layout(gl.permute(v, [1, 0]), PATCHES_T, assert_trivial=True)
        _scale, divisor, reciprocal = scales(
            gl.full([TILE], 0, gl.int32, gl.SliceLayout(1, PATCHES_T)) + amax, WEIGHT_FLOOR
        )
        staged.store(codes(v_t, divisor[:, None], reciprocal[:, None]))
        base_t = q_t + ((expert * channels + column * TILE) * height + row * TILE)
        r_t = gl.arange(0, TILE, layout=gl.SliceLayout(1, LINES))
        c_t = gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES))
        gl.store(base_t + (r_t[:, None] * height + c_t[None, :]), staged.load(LINES))
