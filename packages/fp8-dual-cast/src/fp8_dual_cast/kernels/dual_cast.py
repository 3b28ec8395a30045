"""One-pass dual cast of a bf16 matrix: e4m3 along its rows, and transposed e4m3 along its columns (Gluon, SM90)."""

from fp8_dual_cast.kernels.assembly import (
    DIVIDE_COLUMNS,
    DIVIDE_ROWS,
    MAX_PAIRS,
    MULTIPLY_COLUMNS,
    MULTIPLY_ROWS,
    ROUND_PAIR,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Their names in Triton 3.9, and before.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

TILE = gl.constexpr(128)
PAIRS = gl.constexpr(64)  # bf16 pairs, one 32-bit word each, in a row of a tile
E4M3_MAX = gl.constexpr(448.0)
E4M3_MAX_RECIPROCAL = gl.constexpr(0.0022321429569274187)  # RN(1 / 448)
AMAX_FLOOR = gl.constexpr(1.0000000133514320e-10)  # RN(1e-10)
FLOAT_MAX = gl.constexpr(3.4028234663852886e38)


@gluon.jit
def _low(pair):
    """The first value of a bf16 pair, in fp32."""
    return (pair << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _high(pair):
    """The second value of a bf16 pair, in fp32."""
    return (pair & -0x10000).to(gl.float32, bitcast=True)


@gluon.jit
def _max_pairs(a, b):
    return gl.inline_asm_elementwise(MAX_PAIRS, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _scale(amax, UE8M0: gl.constexpr):
    """RN(max(amax, floor) / 448) without a division; Inf stays Inf, NaN (no element) gives the floor's scale."""
    amax = gl.maximum(amax, AMAX_FLOOR)
    first = amax * E4M3_MAX_RECIPROCAL
    error = gl.fma(gl.minimum(first, FLOAT_MAX), -E4M3_MAX, amax)
    scale = gl.fma(error, E4M3_MAX_RECIPROCAL, first)
    if UE8M0:
        scale = ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _cast_rows(pairs, divisor, reciprocal, UE8M0: gl.constexpr):
    """Two e4m3 bytes for each pair, as uint16."""
    if UE8M0:
        return gl.inline_asm_elementwise(
            MULTIPLY_ROWS, "=r,r,r,f,f", [pairs, reciprocal], dtype=gl.uint16, is_pure=True, pack=2
        )
    return gl.inline_asm_elementwise(
        DIVIDE_ROWS, "=r,r,r,f,f,f,f", [pairs, divisor, reciprocal], dtype=gl.uint16, is_pure=True, pack=2
    )


@gluon.jit
def _cast_columns(pairs, divisor_low, divisor_high, reciprocal_low, reciprocal_high, UE8M0: gl.constexpr):
    """The e4m3 byte of each pair's first value and that of its second, as two tensors of uint8.

    Four pairs that are neighbours in a thread's registers (four tokens) give one word of each.
    """
    if UE8M0:
        return gl.inline_asm_elementwise(
            MULTIPLY_COLUMNS,
            "=r,=r,r,r,r,r,f,f,f,f,f,f,f,f",
            [pairs, reciprocal_low, reciprocal_high],
            dtype=(gl.uint8, gl.uint8),
            is_pure=True,
            pack=4,
        )
    return gl.inline_asm_elementwise(
        DIVIDE_COLUMNS,
        "=r,=r,r,r,r,r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [pairs, divisor_low, divisor_high, reciprocal_low, reciprocal_high],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _fetch(x, t0, c0, tokens, pitch, tile, LAYOUT: gl.constexpr):
    """Start copying a tile of pairs into shared memory, as one commit group; rows past the end become zeros."""
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, LAYOUT))
    base = x + (t0.to(gl.int64) * pitch + c0 // 2)
    inside = (r < tokens - t0)[:, None] & (c < PAIRS)[None, :]
    _async_load(tile, base + (r[:, None] * pitch + c[None, :]), mask=inside)
    async_copy.commit_group()


@gluon.jit
def _rotate(
    tile,
    cache,
    positions,
    sine_sign,
    t0,
    c0,
    tokens,
    head_dim,
    rope_dim,
    FIRST: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Wait for a staged tile and rotate its channels from FIRST on in place; meanwhile the table is read."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = PAIRS - FIRST // 2
    # As many rows at a time as leave room for their cosines and sines in 80 registers.
    ROWS: gl.constexpr = TILE if FIRST > 0 else TILE // 4
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [ROWS * WIDTH // (WARPS * 128), 4], [128 // WIDTH, WIDTH // 4], [WARPS, 1], [1, 0]
    )
    channel = (c0 + FIRST + 2 * gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))) % head_dim
    pair = (channel - (head_dim - rope_dim)) // 2
    half_dim = rope_dim // 2
    if VECTOR:
        pair = gl.max_contiguous(gl.multiple_of(pair, 4), 4)
        half_dim = rope_dim // 8 * 4
    for row in gl.static_range(0, TILE, ROWS):
        t = t0 + row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
        position = gl.load(positions + t, mask=t < tokens, other=0).to(gl.int64)
        rotated = (pair >= 0)[None, :] & (t < tokens)[:, None]
        address = cache + (position * (2 * half_dim))[:, None] + pair[None, :]
        cosine = gl.load(address, mask=rotated, other=1.0)
        sine = gl.load(address + half_dim, mask=rotated, other=0.0)
        if row == 0:
            async_copy.wait_group(0)
        part = tile.slice(row, ROWS, dim=0).slice(FIRST // 2, WIDTH, dim=1)
        v = part.load(LAYOUT)
        a = _low(v)
        b = _high(v)
        y = gl.inline_asm_elementwise(
            ROUND_PAIR,
            "=r,f,f",
            [gl.fma(a, cosine, b * (sine * -sine_sign)), gl.fma(a, sine * sine_sign, b * cosine)],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
        part.store(gl.where(rotated, y, v))


@gluon.jit
def _column_pairs(values, COLUMNS: gl.constexpr, PATCHES_T: gl.constexpr):
    """One fp32 value for each column, from shared memory, as `_cast_columns` takes them: first and second of pairs."""
    both = gl.reshape(values.load(gl.SliceLayout(1, COLUMNS)), [PAIRS, 2])
    low, high = gl.split(both)
    low = gl.convert_layout(low, gl.SliceLayout(1, PATCHES_T), assert_trivial=True)
    high = gl.convert_layout(high, gl.SliceLayout(1, PATCHES_T), assert_trivial=True)
    return low[:, None], high[:, None]


@gluon.jit(
    do_not_specialize=["tokens", "pitch_over_8", "head_dim", "rope_dim"],
    do_not_specialize_on_alignment=["positions"],
)
def dual_cast_kernel(
    x,
    q,
    sf,
    q_t,
    sf_t,
    cache,
    positions,
    sine_sign,
    tokens,
    pitch_over_8,
    head_dim,
    rope_dim,
    ROPE: gl.constexpr,
    FIRST: gl.constexpr,
    VECTOR: gl.constexpr,
    UE8M0: gl.constexpr,
    BOTH: gl.constexpr,
):
    """A program casts a tile of 128 x 128: channel block program_id(0), token block from the other two grid axes.

    x is read as 32-bit pairs of channels, q written as 16-bit ones. A thread holds a patch of 8 tokens x 4 pairs and
    uses it for both casts. It owns 8 bytes of each of 8 rows of q; its 8 bytes of each of 8 rows of q_t go through
    shared memory, so that whole lines are written. The tile's memory, once read, holds the maxima and then those bytes.
    Without BOTH only the transposed half is made; q and sf are then not touched.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 8)
    PATCHES: gl.constexpr = gl.BlockedLayout([8, 4], [2, 16], [WARPS, 1], [1, 0])
    # The same ownership with tokens as the second and fastest axis.
    PATCHES_T: gl.constexpr = gl.DistributedLinearLayout(
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
    LINES_T: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    MAXIMA: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, WARPS], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, PATCHES)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    tile = gl.allocate_shared_memory(gl.int32, [TILE, PAIRS], gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
    divisors = gl.allocate_shared_memory(gl.float32, [2 * TILE], FLAT)
    reciprocals = gl.allocate_shared_memory(gl.float32, [2 * TILE], FLAT)

    x = x.to(gl.pointer_type(gl.int32), bitcast=True)
    q = q.to(gl.pointer_type(gl.uint16), bitcast=True)
    q_t = q_t.to(gl.pointer_type(gl.uint8), bitcast=True)
    block_c = gl.program_id(0)
    block_t = gl.program_id(1) + gl.program_id(2) * gl.num_programs(1)
    t0 = block_t * TILE
    if t0 >= tokens:  # the last plane of the grid may be ragged
        return
    c0 = block_c * TILE
    _fetch(x, t0, c0, tokens, pitch_over_8 * 4, tile, PATCHES)

    if ROPE:
        if c0 % head_dim + (TILE - 1) >= head_dim - rope_dim:
            _rotate(tile, cache, positions, sine_sign, t0, c0, tokens, head_dim, rope_dim, FIRST, VECTOR)
        else:
            async_copy.wait_group(0)
    else:
        async_copy.wait_group(0)
    v = tile.load(PATCHES)

    magnitude = v & 0x7FFF7FFF
    row_maxima = gl.reduce(gl.reshape(magnitude, [TILE, 16, 4]), 2, _max_pairs)
    row_maxima = gl.maximum(_low(row_maxima), _high(row_maxima))
    col_maxima = gl.reduce(gl.reshape(magnitude, [16, 8, PAIRS]), 1, _max_pairs)
    col_maxima = gl.reshape(gl.join(_low(col_maxima), _high(col_maxima)), [16, TILE])
    # 16 maxima of each row (columns 0 to 127) and of each column (128 to 255).
    maxima = _reinterpret(tile, gl.float32, [2, 16, 2 * TILE], gl.SwizzledSharedLayout(4, 1, 8, [1, 0])).index(0)
    maxima.slice(0, TILE, dim=1).store(gl.permute(row_maxima, [1, 0]))
    maxima.slice(TILE, TILE, dim=1).store(col_maxima)
    scale = _scale(gl.max(maxima.load(MAXIMA), axis=0), UE8M0)
    divisors.store(gl.minimum(scale, FLOAT_MAX))
    reciprocals.store(_reciprocal(scale))

    channels = gl.num_programs(0) * TILE
    pitch_t = gl.cdiv(tokens, TILE) * TILE
    pitch_sf = gl.cdiv(tokens, 4) * 4
    k = gl.arange(0, 2 * TILE, layout=gl.SliceLayout(0, MAXIMA))
    if BOTH:
        row_scale = gl.where(t0 + k < tokens, scale, 0.0)
        gl.store(sf + (block_c.to(gl.int64) * pitch_sf + t0) + k, row_scale, mask=(k < TILE) & (t0 + k < pitch_sf))
    gl.store(sf_t + (block_t.to(gl.int64) * channels + c0) + (k - TILE), scale, mask=k >= TILE)

    if BOTH:
        divisor = divisors.slice(0, TILE).load(ROW)
        reciprocal = reciprocals.slice(0, TILE).load(ROW)
        r = gl.arange(0, TILE, layout=ROW)
        c = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, PATCHES))
        out = _cast_rows(v, divisor[:, None], reciprocal[:, None], UE8M0)
        base = q + (t0.to(gl.int64) * (channels // 2) + c0 // 2)
        # Kept in the L2 longer than what else is written, q is written back in larger runs: 1 to 2 % of the time.
        address = base + (r[:, None] * (channels // 2) + c[None, :])
        gl.store(address, out, mask=(t0 + r < tokens)[:, None], eviction_policy="evict_last")

    v_t = gl.convert_layout(gl.permute(v, [1, 0]), PATCHES_T, assert_trivial=True)
    divisor_low, divisor_high = _column_pairs(divisors.slice(TILE, TILE), COLUMNS, PATCHES_T)
    reciprocal_low, reciprocal_high = _column_pairs(reciprocals.slice(TILE, TILE), COLUMNS, PATCHES_T)
    low, high = _cast_columns(v_t, divisor_low, divisor_high, reciprocal_low, reciprocal_high, UE8M0)
    out_t = gl.reshape(gl.permute(gl.join(low, high), [0, 2, 1]), [TILE, TILE])
    staged = _reinterpret(tile, gl.uint8, [2, TILE, TILE], gl.SwizzledSharedLayout(8, 8, 16, [1, 0])).index(0)
    staged.store(out_t)
    r_t = gl.arange(0, TILE, layout=gl.SliceLayout(1, LINES_T))
    c_t = gl.arange(0, TILE, layout=gl.SliceLayout(0, LINES_T))
    base_t = q_t + (c0.to(gl.int64) * pitch_t + t0)
    gl.store(base_t + (r_t[:, None] * pitch_t + c_t[None, :]), staged.load(LINES_T))
