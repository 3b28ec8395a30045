"""The FP8 casts in exact rational arithmetic: an oracle that shares nothing with the code under test.

Numbers come in and go out as Python floats, which hold every fp32 value; in between they are fractions, and rounding to
nearest even is done by hand. A NaN's byte is 0x7F here; its sign is free.
"""

import math
from fractions import Fraction

E4M3_MAX = Fraction(448)
NAN_BYTE = 0x7F


def _exponent(x: Fraction) -> int:
    """floor(log2(x)) of a positive number."""
    e = x.numerator.bit_length() - x.denominator.bit_length()
    return e if x >= Fraction(2) ** e else e - 1


def _round(x: Fraction, precision: int, least_exponent: int) -> Fraction:
    """x >= 0 to `precision` significant bits, nearest even, with gradual underflow below 2**least_exponent."""
    if x == 0:
        return x
    quantum = Fraction(2) ** (max(_exponent(x), least_exponent) - precision + 1)
    return round(x / quantum) * quantum


def fp32(x: Fraction) -> Fraction:
    """x >= 0 rounded to fp32. None of the callers comes near its upper end."""
    return _round(x, 24, -126)


def e4m3(x: Fraction) -> int:
    """Byte of min(x, 448), x >= 0, rounded to e4m3."""
    r = _round(min(x, E4M3_MAX), 4, -6)
    if r < Fraction(1, 64):
        return int(r * 512)
    e = _exponent(r)
    return (e + 7) * 8 + int(r / Fraction(2) ** e * 8) - 8


def scale(amax: float, *, floor: str = "1e-10", floor_on: str = "amax", ue8m0: bool = False) -> float:
    """Scale of a block whose largest magnitude is `amax`, not NaN."""
    if math.isinf(amax):
        return math.inf
    low = fp32(Fraction(floor))
    s = fp32(max(Fraction(amax), low) / 448) if floor_on == "amax" else max(fp32(Fraction(amax) / 448), low)
    if ue8m0:
        e = _exponent(s)
        s = Fraction(2) ** (e if s == Fraction(2) ** e else e + 1)
    return float(s)


def byte(v: float, s: float) -> int:
    """e4m3(RN(v / s)), saturating."""
    if math.isnan(v) or math.isnan(s) or (math.isinf(v) and math.isinf(s)):
        return NAN_BYTE
    sign = 0x80 if math.copysign(1.0, v) < 0 else 0
    if math.isinf(s):
        return sign
    if math.isinf(v):
        return sign | 0x7E
    return sign | e4m3(fp32(abs(Fraction(v)) / Fraction(s)))


def cast(values: list[float], *, nan: str = "ignored", **recipe) -> tuple[float, list[int]]:
    """Scale and bytes of one block. `recipe`: the keywords of `scale`; nan="propagated" makes a NaN the scale."""
    s = scale(max((abs(v) for v in values if not math.isnan(v)), default=0.0), **recipe)
    if nan == "propagated" and any(map(math.isnan, values)):
        s = math.nan
    return s, [byte(v, s) for v in values]
