"""The SwiGLU and its backward, quantised for the products that follow (Gluon, SM90).

Both quantise from fp32, which is not rounded to bf16.
"""

from hopper_kernels.gluon_names import barrier, reinterpret
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.language import PropagateNan

from moe_experts.fp8.kernels.casts import CAST, TILE, activation_scales, codes, magnitude, word
from moe_experts.fp8.kernels.quantize import async_load, block_of
from moe_experts.kernels.swiglu import swiglu, swiglu_backward

ALL = gl.constexpr(PropagateNan.ALL)
INPUTS = gl.constexpr(3)  # of the backward: gradient, gate, up
CHUNKS = gl.constexpr(8)  # row CHUNKS q + i of a tile is row q of its chunk i
CHUNK = gl.constexpr(16)  # rows


@gluon.jit(do_not_specialize=["experts", "columns", "pitch"])
def swiglu_kernel(gate_up, rows, row_scales, table, experts, columns, pitch, limit):
    """A program quantises a block of padded rows, 128 columns, of the SwiGLU.

    gate_up (Mp, 2 inner) bf16, inner = 128 columns; rows (Mp, inner) bytes, row_scales (columns, pitch) fp32.
    """
    block, column, owned, _first, _left = block_of(table, experts, columns)
    if owned:
        # Whole rows a warp, of which a thread has 4 neighbours, and 8 channels.
        LAYOUT: gl.constexpr = gl.BlockedLayout([4, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
        inner = columns * TILE
        first = (block * TILE).to(gl.int64)
        r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
        c = gl.arange(0, TILE, layout=gl.SliceLayout(0, LAYOUT))
        gate = gate_up + (first * (2 * inner) + column * TILE) + (r[:, None] * (2 * inner) + c[None, :])
        g = gl.load(gate).to(gl.float32)
        u = gl.load(gate + inner).to(gl.float32)
        h = swiglu(g, u, limit, ALL)
        scale, divisor, reciprocal = activation_scales(gl.max(magnitude(h), axis=1))
        to = rows + (first * inner + column * TILE) + (r[:, None] * inner + c[None, :])
        gl.store(to, codes(h, divisor[:, None], reciprocal[:, None], CAST))
        gl.store(row_scales + column.to(gl.int64) * pitch + block * TILE + r, scale)


@gluon.jit
def _tile(i, table, experts, columns):
    """Block of rows and column of the i-th tile, and whether an expert has the block."""
    count = gl.load(table)
    block = gl.minimum(i // columns, count - 1)
    return block, i % columns, (i < count * columns) & (gl.load(table + 4 * (1 + block)) < experts)


@gluon.jit
def _fetch(grad, gate_up, block, column, columns, wanted, inputs, first, PATCH: gl.constexpr):
    """Start copying a tile's inputs, chunk by chunk, to `inputs` from [first] on, as one commit group."""
    inner = columns * TILE
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, PATCH))
    r = (r % CHUNK * CHUNKS + r // CHUNK)[:, None]
    c = gl.arange(0, TILE, layout=gl.SliceLayout(0, PATCH))[None, :]
    inside = (r < TILE) & (c < TILE) & wanted
    row = (block * TILE).to(gl.int64)
    gate_up += row * (2 * inner) + column * TILE
    async_load(inputs.index(first), grad + (row * inner + column * TILE) + (r * inner + c), mask=inside)
    at = r * (2 * inner) + c
    async_load(inputs.index(first + 1), gate_up + at, mask=inside)
    async_load(inputs.index(first + 2), gate_up + inner + at, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _larger(a, b):
    return gl.maximum(a, b, propagate_nan=ALL)


@gluon.jit
def _row_maxima(v):
    """Largest magnitudes of 8 neighbouring channels."""
    return gl.reduce(gl.reshape(gl.abs(v), [v.shape[0], TILE // 8, 8]), 2, _larger)


@gluon.jit
def _put_row_maxima(maxima, v):
    """Maxima of parts of rows, a tensor (16, 16) for each of the 8 chunks, to (parts, 128) of shared memory."""
    even = gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6]))
    odd = gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))
    chunks = gl.reshape(gl.join(even, odd), [CHUNK, TILE // 8, CHUNKS])
    maxima.store(gl.reshape(gl.permute(chunks, [1, 0, 2]), [TILE // 8, TILE]).to(gl.int32, bitcast=True))


@gluon.jit
def _by_chunks(v):
    """Values of the rows of two tiles in the order of the chunks."""
    return gl.reshape(gl.permute(gl.reshape(v, [2, CHUNK, CHUNKS]), [0, 2, 1]), [2 * TILE])


@gluon.jit
def _store_rows(v, divisors, reciprocals, out, pitch, PATCH: gl.constexpr):
    """Bytes of a tile, given in chunks. divisors, reciprocals: one for each row in the order of the chunks."""
    r = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PATCH))[:, None]
    c = gl.arange(0, TILE, layout=gl.SliceLayout(0, PATCH))[None, :]
    for i in gl.static_range(8):
        divisor = divisors.slice(i * CHUNK, CHUNK).load(gl.SliceLayout(1, PATCH))
        reciprocal = reciprocals.slice(i * CHUNK, CHUNK).load(gl.SliceLayout(1, PATCH))
        to = out + i * pitch + (r * (CHUNKS * pitch) + c)
        gl.store(to, codes(v[i], divisor[:, None], reciprocal[:, None], CAST))


@gluon.jit
def _put_panel(staged, v, divisors, reciprocals, PATCH: gl.constexpr):
    """Codes of a tile, given in chunks, to (128, 32) words of shared memory, four rows of a channel each."""
    divisor = divisors.load(gl.SliceLayout(0, PATCH))[None, :]
    reciprocal = reciprocals.load(gl.SliceLayout(0, PATCH))[None, :]
    even = word(v[0], v[1], v[2], v[3], divisor, reciprocal)
    odd = word(v[4], v[5], v[6], v[7], divisor, reciprocal)
    staged.store(gl.reshape(gl.permute(gl.join(even, odd), [1, 0, 2]), [TILE, TILE // 4]))


@gluon.jit
def _store_panel(staged, out):
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, TILE, layout=gl.SliceLayout(1, LINES))[:, None]
    c = gl.arange(0, TILE // 4, layout=gl.SliceLayout(0, LINES))[None, :]
    gl.store(out + (r * (TILE // 4) + c), staged.load(LINES))


@gluon.jit(do_not_specialize=["experts", "columns", "pitch"])
def swiglu_backward_kernel(
    grad,
    gate_up,
    rows,
    row_scales,
    panels,
    panel_scales,
    h_panels,
    h_panel_scales,
    table,
    experts,
    columns,
    pitch,
    limit,
    PANELS: gl.constexpr,
):
    """A program has every num_programs(0)-th tile of 128 padded rows x 128 channels, of a block of rows first.

    From grad (Mp, inner) and gate_up (Mp, 2 inner) bf16, inner = 128 columns: the gradients of gate and then of up, as
    rows (Mp, 2 inner) with row_scales (2 columns, pitch), and with PANELS also as panels (Mp / 128, 2 inner, 128) with
    panel_scales (Mp / 128, 2 inner), and the SwiGLU as h_panels, h_panel_scales.

    All three results of a tile stay in registers until their scales are known, so one program fills an SM; meanwhile
    the next tile's inputs arrive in shared memory. A thread has a row of each chunk x 8 channels. The memory of the
    inputs, once read, holds the maxima and then the panels' bytes.
    """
    WARPS: gl.constexpr = gl.num_warps()
    gl.static_assert(WARPS == 8)
    PATCH: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    MAXIMA: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, WARPS], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    inputs = gl.allocate_shared_memory(gl.bfloat16, [2 * INPUTS, TILE, TILE], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    # Views of the two buffers of 96 KB, whose inputs are read by then: maxima of channels and of rows, and panels.
    channel_views = reinterpret(inputs, gl.int32, [6, CHUNK, 512], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    row_views = reinterpret(inputs, gl.int32, [12, 16, 2 * TILE], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    panel_views = reinterpret(inputs, gl.int32, [12, TILE, TILE // 4], gl.SwizzledSharedLayout(2, 8, 16, [1, 0]))
    divisors = gl.allocate_shared_memory(gl.float32, [2 * TILE], FLAT)
    reciprocals = gl.allocate_shared_memory(gl.float32, [2 * TILE], FLAT)
    panel_divisors = gl.allocate_shared_memory(gl.float32, [4 * TILE], FLAT)
    panel_reciprocals = gl.allocate_shared_memory(gl.float32, [4 * TILE], FLAT)

    inner = columns * TILE
    panels = panels.to(gl.pointer_type(gl.int32), bitcast=True)
    h_panels = h_panels.to(gl.pointer_type(gl.int32), bitcast=True)
    block, column, owned = _tile(gl.program_id(0), table, experts, columns)
    _fetch(grad, gate_up, block, column, columns, owned, inputs, 0, PATCH)
    buffer = gl.program_id(0) * 0
    for i in range(gl.program_id(0), gl.load(table) * columns, gl.num_programs(0)):
        next_block, next_column, next_owned = _tile(i + gl.num_programs(0), table, experts, columns)
        async_copy.wait_group(0)
        barrier()
        _fetch(grad, gate_up, next_block, next_column, columns, next_owned, inputs, (1 - buffer) * INPUTS, PATCH)
        if owned:
            dg = ()
            du = ()
            h = ()
            dg_of_row = ()
            du_of_row = ()
            for j in gl.static_range(8):
                d_j = inputs.index(buffer * INPUTS).slice(j * CHUNK, CHUNK).load(PATCH).to(gl.float32)
                g_j = inputs.index(buffer * INPUTS + 1).slice(j * CHUNK, CHUNK).load(PATCH).to(gl.float32)
                u_j = inputs.index(buffer * INPUTS + 2).slice(j * CHUNK, CHUNK).load(PATCH).to(gl.float32)
                dg_j, du_j, h_j = swiglu_backward(d_j, g_j, u_j, limit, ALL)
                dg = dg + (dg_j,)
                du = du + (du_j,)
                h = h + (h_j,)
                dg_of_row = dg_of_row + (_row_maxima(dg_j),)
                du_of_row = du_of_row + (_row_maxima(du_j),)
                if j == 0:
                    h_top, dg_top, du_top = gl.abs(h_j), gl.abs(dg_j), gl.abs(du_j)
                else:
                    h_top = _larger(h_top, gl.abs(h_j))
                    dg_top = _larger(dg_top, gl.abs(dg_j))
                    du_top = _larger(du_top, gl.abs(du_j))
            of_rows = row_views.index(4 + 2 * buffer)
            _put_row_maxima(of_rows.slice(0, TILE, dim=1), dg_of_row)
            _put_row_maxima(of_rows.slice(TILE, TILE, dim=1), du_of_row)
            if PANELS:
                of_channels = channel_views.index(buffer * 4)
                of_channels.slice(0, TILE, dim=1).store(h_top.to(gl.int32, bitcast=True))
                of_channels.slice(TILE, TILE, dim=1).store(dg_top.to(gl.int32, bitcast=True))
                of_channels.slice(2 * TILE, TILE, dim=1).store(du_top.to(gl.int32, bitcast=True))

            scale, divisor, reciprocal = activation_scales(gl.max(of_rows.load(MAXIMA), axis=0))
            divisors.store(_by_chunks(divisor))
            reciprocals.store(_by_chunks(reciprocal))
            k = gl.arange(0, 2 * TILE, layout=gl.SliceLayout(0, MAXIMA))
            to = row_scales + (column + k // TILE * columns).to(gl.int64) * pitch + block * TILE
            gl.store(to + k % TILE, scale)
            h_at = block.to(gl.int64) * inner + column * TILE
            at = block.to(gl.int64) * (2 * inner) + column * TILE
            if PANELS:
                panel_scale, divisor, reciprocal = activation_scales(gl.max(of_channels.load(MAXIMA), axis=0))
                panel_divisors.store(divisor)
                panel_reciprocals.store(reciprocal)
                k = gl.arange(0, 4 * TILE, layout=gl.SliceLayout(0, MAXIMA))
                gl.store(h_panel_scales + h_at + k, panel_scale, mask=k < TILE)
                of_half = gl.where(k < 2 * TILE, k - TILE, k - 2 * TILE + inner)
                gl.store(panel_scales + at + of_half, panel_scale, mask=(k >= TILE) & (k < 3 * TILE))

            base = rows + ((block * TILE).to(gl.int64) * (2 * inner) + column * TILE)
            s = 6 * buffer
            if PANELS:
                divisor, reciprocal = panel_divisors.slice(0, TILE), panel_reciprocals.slice(0, TILE)
                _put_panel(panel_views.index(s), h, divisor, reciprocal, PATCH)
                divisor, reciprocal = panel_divisors.slice(TILE, TILE), panel_reciprocals.slice(TILE, TILE)
                _put_panel(panel_views.index(s + 1), dg, divisor, reciprocal, PATCH)
            _store_rows(dg, divisors.slice(0, TILE), reciprocals.slice(0, TILE), base, 2 * inner, PATCH)
            if PANELS:
                divisor, reciprocal = panel_divisors.slice(2 * TILE, TILE), panel_reciprocals.slice(2 * TILE, TILE)
                _put_panel(panel_views.index(s + 2), du, divisor, reciprocal, PATCH)
            _store_rows(du, divisors.slice(TILE, TILE), reciprocals.slice(TILE, TILE), base + inner, 2 * inner, PATCH)
            if PANELS:
                _store_panel(panel_views.index(s), h_panels + h_at * (TILE // 4))
                _store_panel(panel_views.index(s + 1), panels + at * (TILE // 4))
                _store_panel(panel_views.index(s + 2), panels + (at + inner) * (TILE // 4))
        block, column, owned = next_block, next_column, next_owned
        buffer = 1 - buffer
    async_copy.wait_group(0)
