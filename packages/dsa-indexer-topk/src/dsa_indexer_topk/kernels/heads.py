"""What the kernels of the scores share: the sum over the heads of a tile of dot products (Gluon)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Names that changed between Triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

BLOCK = gl.constexpr(64)  # entries of a tile
OCTET = gl.constexpr(8)  # entries that lie together in a candidate's tile


@gluon.jit
def lane():
    """The number of the thread in its warp."""
    return gl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def clamp_bounds(start, stop, entries, longest):
    """First entry that a query reads, and the end of what it reads, whatever ks and ke hold: no difference wraps."""
    start = gl.minimum(gl.maximum(start, 0), entries)
    return start, gl.maximum(gl.minimum(gl.minimum(stop, entries), start + longest), start)


@gluon.jit
def _exchange(x, BITS: gl.constexpr):
    """x of the lane whose number differs in BITS."""
    code: gl.constexpr = f"shfl.sync.bfly.b32 $0, $1, {BITS}, 0x1f, 0xffffffff;"
    return gl.inline_asm_elementwise(code, "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def add_apart(a, b, number, BITS: gl.constexpr):
    """Sums over two lanes whose `number` differs in BITS: of a in the lower one, of b in the other."""
    upper = (number & BITS) != 0
    return gl.where(upper, b, a) + _exchange(gl.where(upper, a, b), BITS)


@gluon.jit
def weigh(dots, weights, Q: gl.constexpr, H: gl.constexpr):
    """Of 2 ReLU(dots) * weights, (entries, Q * H), each thread's own sums: (entries, Q, 4 lanes).

    A thread has two neighbouring heads of each 8. x + |x| is exact and keeps NaN, at twice the rate of a maximum.
    """
    x = (dots + gl.abs(dots)) * weights[None, :]
    x = x.reshape([dots.shape[0], Q, H // 8, 4, 2]).permute((0, 1, 3, 2, 4))
    return gl.sum(x.reshape([dots.shape[0], Q, 4, H // 4]), axis=3)
