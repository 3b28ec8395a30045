"""PTX of the dual cast's inner loop, generated: e4m3 of v / s from bf16 pairs, with nothing but 32-bit registers.

    q0 = v r,  e = q0 s - v,  q = q0 - e r,  byte = e4m3(q)           r close to 1 / s

q is RN(v / s): the error e is exact, and one step from a reciprocal good to an ulp leaves far less than what separates
a quotient of bf16 values from the middle of two fp32 numbers (the tests go through all mantissas). Taken this way
round the error of a zero is a zero, and zeros keep their sign. An Inf scale comes with r = 0 and s = the largest
finite number, which gives zeros of v's sign, and NaN for Inf. Where s is a power of two, v r is the quotient.

No 8-bit value has a register of its own: ptxas 12.9 corrupts transposed stores of those (triton-lang/triton#11111).
"""

from triton.language import constexpr


def _cast(values: list[str], divisors: list[str] | None, reciprocals: list[str], out: str) -> str:
    """Instructions that turn the fp32 registers `values` (four) into the four bytes of the 32-bit operand `out`."""
    lines = []
    for i, (v, r) in enumerate(zip(values, reciprocals, strict=True)):
        lines.append(f"mul.rn.f32 q{i}, {v}, {r};")
        if divisors is not None:
            lines += [
                f"neg.f32 e{i}, {v};",
                f"fma.rn.f32 e{i}, q{i}, {divisors[i]}, e{i};",
                f"neg.f32 e{i}, e{i};",
                f"fma.rn.f32 q{i}, e{i}, {r}, q{i};",
            ]
    lines += [
        "cvt.rn.satfinite.e4m3x2.f32 lo, q1, q0;",
        "cvt.rn.satfinite.e4m3x2.f32 hi, q3, q2;",
        f"mov.b32 {out}, {{lo, hi}};",
    ]
    return "\n".join(lines)


def _low(value: str, pair: str) -> str:
    return f"shl.b32 {value}, {pair}, 16;"


def _high(value: str, pair: str) -> str:
    return f"and.b32 {value}, {pair}, 0xffff0000;"


def _block(*lines: str) -> constexpr:
    return constexpr("\n".join(["{", ".reg .b32 v<4>;", ".reg .f32 q<4>, e<4>;", ".reg .b16 lo, hi;", *lines, "}"]))


def _operands(first: int, count: int) -> list[str]:
    return [f"${i}" for i in range(first, first + count)]


def _twice(operands: list[str]) -> list[str]:
    return [operand for operand in operands for _ in range(2)]


_VALUES = ["v0", "v1", "v2", "v3"]


def _rows(divide: bool) -> constexpr:
    """$0 <- two pairs $1 and $2 of one row: two bytes each. Then a divisor for each pair, and a reciprocal."""
    unpack = [_low("v0", "$1"), _high("v1", "$1"), _low("v2", "$2"), _high("v3", "$2")]
    divisors, reciprocals = (_operands(3, 2), _operands(5, 2)) if divide else (None, _operands(3, 2))
    return _block(*unpack, _cast(_VALUES, divisors and _twice(divisors), _twice(reciprocals), "$0"))


def _columns(divide: bool) -> constexpr:
    """$0, $1 <- the first and the second values of four pairs $2 to $5. Then four operands each: divisors of the first
    and of the second values (if any), reciprocals of the first and of the second."""
    lines = []
    for half, unpack in enumerate((_low, _high)):
        lines += [unpack(v, pair) for v, pair in zip(_VALUES, _operands(2, 4), strict=True)]
        reciprocals = _operands((14 if divide else 6) + 4 * half, 4)
        lines.append(_cast(_VALUES, _operands(6 + 4 * half, 4) if divide else None, reciprocals, f"${half}"))
    return _block(*lines)


DIVIDE_ROWS = _rows(divide=True)
MULTIPLY_ROWS = _rows(divide=False)
DIVIDE_COLUMNS = _columns(divide=True)
MULTIPLY_COLUMNS = _columns(divide=False)
ROUND_PAIR = constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
MAX_PAIRS = constexpr("max.bf16x2 $0, $1, $2;")
