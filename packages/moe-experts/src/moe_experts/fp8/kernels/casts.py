"""e4m3 codes and scales of tiles of 128 x 128 (Gluon).

A code is that of RN(v / s), a scale RN(max(amax, floor) / 448), as in `hopper_kernels.fp8`; NaN and Inf get there.

    q0 = v r,  e = q0 s - v,  q = q0 - e r,  code = e4m3(q)           r close to 1 / s

The error e is taken this way round so that zeros keep their sign. An Inf scale has the reciprocal 0 and the largest
finite number as divisor, which gives zeros of the value's sign, and NaN for Inf. No 8-bit value has a register of its
own: ptxas 12.9 corrupts transposed stores of those (triton-lang/triton#11111).

Functions that kernels share read no global, and are given the instructions of a cast: see `moe_experts.kernels.tiles`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import constexpr

TILE = gl.constexpr(128)


def _cast(values: list[str], divisors: list[str], reciprocals: list[str], out: str) -> str:
    """Instructions that turn four fp32 operands into the four bytes of the 32-bit operand `out`."""
    quotients = [
        f"mul.rn.f32 q{i}, {v}, {r}; neg.f32 e{i}, {v}; fma.rn.f32 e{i}, q{i}, {d}, e{i}; neg.f32 e{i}, e{i};"
        f" fma.rn.f32 q{i}, e{i}, {r}, q{i};"
        for i, (v, d, r) in enumerate(zip(values, divisors, reciprocals, strict=True))
    ]
    pairs = "cvt.rn.satfinite.e4m3x2.f32 lo, q1, q0; cvt.rn.satfinite.e4m3x2.f32 hi, q3, q2;"
    return " ".join([*quotients, pairs, f"mov.b32 {out}, {{lo, hi}};"])


def _block(*lines: str) -> constexpr:
    return constexpr(" ".join(["{ .reg .b32 v<4>; .reg .f32 q<4>, e<4>; .reg .b16 lo, hi;", *lines, "}"]))


def _operands(first: int, count: int) -> list[str]:
    return [f"${i}" for i in range(first, first + count)]


def _twice(operands: list[str]) -> list[str]:
    return [operand for operand in operands for _ in range(2)]


def _low(value: str, pair: str) -> str:
    return f"shl.b32 {value}, {pair}, 16;"


def _high(value: str, pair: str) -> str:
    return f"and.b32 {value}, {pair}, 0xffff0000;"


_VALUES = ["v0", "v1", "v2", "v3"]

# $0 <- four values $1 to $4, each with its divisor and reciprocal.
CAST = _block(_cast(_operands(1, 4), _operands(5, 4), _operands(9, 4), "$0"))
# $0 <- four values $1 to $4 that share the divisor $5 and the reciprocal $6.
_CAST_WORD = _block(_cast(_operands(1, 4), ["$5"] * 4, ["$6"] * 4, "$0"))
# $0 <- two bf16 pairs $1 and $2 of a row; then a divisor for each pair, and a reciprocal.
CAST_PAIRS = _block(
    _low("v0", "$1"),
    _high("v1", "$1"),
    _low("v2", "$2"),
    _high("v3", "$2"),
    _cast(_VALUES, _twice(_operands(3, 2)), _twice(_operands(5, 2)), "$0"),
)
# $0, $1 <- the first and the second values of four pairs $2 to $5; then four operands each: divisors of the first and
# of the second values, reciprocals of the first and of the second.
CAST_COLUMNS = _block(
    *(_low(v, pair) for v, pair in zip(_VALUES, _operands(2, 4), strict=True)),
    _cast(_VALUES, _operands(6, 4), _operands(14, 4), "$0"),
    *(_high(v, pair) for v, pair in zip(_VALUES, _operands(2, 4), strict=True)),
    _cast(_VALUES, _operands(10, 4), _operands(18, 4), "$1"),
)


@gluon.jit
def magnitude(v):
    """Bits of |v|, whose order as integers has NaN above Inf."""
    return v.to(gl.int32, bitcast=True) & 0x7FFFFFFF


@gluon.jit
def max_pairs(a, b):
    """The larger of each of two magnitudes in bf16, pair by pair; NaN if one is."""
    larger: gl.constexpr = "max.NaN.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(larger, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def scales(amax, FLOOR: gl.constexpr):
    """Scale of each magnitude, both given by their bits, and what a cast divides and multiplies by.

    Without a division: a product with RN(1 / 448) and one correction is RN(amax / 448).
    """
    RECIPROCAL: gl.constexpr = 0.0022321429569274187
    LARGEST: gl.constexpr = 3.4028234663852886e38
    amax = gl.maximum(amax, FLOOR).to(gl.float32, bitcast=True)
    first = amax * RECIPROCAL
    scale = gl.fma(gl.fma(gl.minimum(first, LARGEST), -448.0, amax), RECIPROCAL, first)
    divisor = gl.minimum(scale, LARGEST)
    r = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1)
    return scale, divisor, gl.fma(gl.fma(-divisor, r, 1.0), r, r)


@gluon.jit
def activation_scales(amax):
    """`scales` with the floor of activations and gradients."""
    FLOOR: gl.constexpr = 0x2EDBE6FF  # bits of RN(1e-10)
    return scales(amax, FLOOR)


@gluon.jit
def codes(v, divisor, reciprocal, CAST: gl.constexpr):
    """Bytes of the quotients by `CAST`; four that are neighbours in a thread's registers are made together."""
    return gl.inline_asm_elementwise(
        CAST, "=r,f,f,f,f,f,f,f,f,f,f,f,f", [v, divisor, reciprocal], dtype=gl.uint8, is_pure=True, pack=4
    )


@gluon.jit
def word(a, b, c, d, divisor, reciprocal):
    """The four bytes of a, b, c and d over one divisor, elementwise, as int32."""
    return gl.inline_asm_elementwise(
        _CAST_WORD, "=r,f,f,f,f,f,f", [a, b, c, d, divisor, reciprocal], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def codes_of_pairs(pairs, divisor, reciprocal, CAST: gl.constexpr):
    """Two bytes for each bf16 pair by `CAST_PAIRS`, as uint16."""
    return gl.inline_asm_elementwise(
        CAST, "=r,r,r,f,f,f,f", [pairs, divisor, reciprocal], dtype=gl.uint16, is_pure=True, pack=2
    )


@gluon.jit
def codes_of_columns(pairs, divisor_low, divisor_high, reciprocal_low, reciprocal_high, CAST: gl.constexpr):
    """The byte of each pair's first value and that of its second by `CAST_COLUMNS`; four neighbours of a thread give a
    word of each."""
    return gl.inline_asm_elementwise(
        CAST,
        "=r,=r,r,r,r,r,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f",
        [pairs, divisor_low, divisor_high, reciprocal_low, reciprocal_high],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
