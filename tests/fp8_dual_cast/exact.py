"""The casts of a matrix and its rotation in exact rational arithmetic, element by element: the oracle of these tests.

Floats in and out hold bf16 or fp32 values; between them are fractions, rounded by hand. Blocks come from
tests/shared/rational.py. Slow: some 100 000 elements a second if few of them are distinct, 30 000 pairs a second.
"""

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from tests.shared import rational

BLOCK = 128
NAMES = ("q", "sf", "q_t", "sf_t")


def dual_cast(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the operator must return for x (T, C): q, the storage of sf, q_t, the storage of sf_t."""
    return *row_cast(x, ue8m0), *column_cast(x, ue8m0)


def row_cast(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """q (T, C) and the storage (C / 128, ceil(T, 4)) of its scales, padding 0."""
    tokens, channels = x.shape
    q = torch.zeros(tokens, channels, dtype=torch.uint8)
    sf = torch.zeros(channels // BLOCK, -(-tokens // 4) * 4)
    for t, row in enumerate(x.double().tolist()):
        for k in range(channels // BLOCK):
            part = slice(BLOCK * k, BLOCK * (k + 1))
            s, found = _cast(row[part], ue8m0)
            sf[k, t] = s
            q[t, part] = torch.tensor(found, dtype=torch.uint8)
    return q.view(torch.float8_e4m3fn), sf


def column_cast(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    """q_t (C, ceil(T, 128)) with bytes 0 in its padding, and the storage (ceil(T / 128), C) of its scales."""
    tokens, channels = x.shape
    blocks = -(-tokens // BLOCK)
    q_t = torch.zeros(channels, blocks * BLOCK, dtype=torch.uint8)
    sf_t = torch.zeros(blocks, channels)
    for c, column in enumerate(x.t().double().tolist()):
        for k in range(blocks):
            part = column[BLOCK * k : BLOCK * (k + 1)]
            s, found = _cast(part, ue8m0)
            sf_t[k, c] = s
            q_t[c, BLOCK * k : BLOCK * k + len(part)] = torch.tensor(found, dtype=torch.uint8)
    return q_t.view(torch.float8_e4m3fn), sf_t


def _cast(values: list[float], ue8m0: bool) -> tuple[float, list[int]]:
    s = _scale(max((abs(v) for v in values if v == v), default=0.0), ue8m0)
    return s, [_byte(v, math.copysign(1.0, v), s) for v in values]


@functools.cache
def _scale(amax: float, ue8m0: bool) -> float:
    return rational.scale(amax, ue8m0=ue8m0)


@functools.cache
def _byte(v: float, sign: float, s: float) -> int:
    """`sign` is there for the cache, to which -0.0 and 0.0 would be one key."""
    return rational.byte(math.copysign(v, sign), s)


def rotate(x: Tensor, table: Tensor, positions: Tensor, head_dim: int, inverse: bool) -> Tensor:
    """The rotation of the last channels of each head of x (T, C), in bf16; see rotate_pair."""
    tokens, channels = x.shape
    half = table.shape[1] // 2
    rows, out = table.double().tolist(), x.double().tolist()
    for row, position in zip(out, positions.tolist(), strict=True):
        for end in range(head_dim, channels + 1, head_dim):
            for i in range(half):
                first = end - 2 * half + 2 * i
                c, s = rows[position][i], rows[position][half + i]
                row[first : first + 2] = rotate_pair(row[first], row[first + 1], c, s, inverse)
    return torch.tensor(out, dtype=torch.float64).reshape(tokens, channels).bfloat16()


def rotate_pair(a: float, b: float, c: float, s: float, inverse: bool) -> list[float]:
    """bf16 of fma(a, c, -RN(b s)) and of fma(a, s, RN(b c)), with s negated for the inverse."""
    s = -s if inverse else s
    return [bf16(fma(a, c, -mul(b, s))), bf16(fma(a, s, mul(b, c)))]


def fma(a: float, b: float, c: float) -> float:
    """a * b + c in fp32 with one rounding."""
    plain = a * b + c  # its NaNs, infinities and zeros are right: a float holds the product of two fp32 numbers
    if not all(map(math.isfinite, (a, b, c))):
        return plain
    total = Fraction(a) * Fraction(b) + Fraction(c)
    return nearest(total, 24) if total else plain


def mul(a: float, b: float) -> float:
    """a * b in fp32."""
    product = a * b
    return nearest(Fraction(product), 24) if math.isfinite(product) and product else product


def bf16(v: float) -> float:
    """An fp32 value rounded to bf16."""
    return nearest(Fraction(v), 8) if math.isfinite(v) and v else v


def nearest(x: Fraction, precision: int) -> float:
    """x != 0 to `precision` bits, nearest even, with fp32's exponents: gradual underflow, and Inf above the largest."""
    magnitude = abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, -126) - precision + 1)
    rounded = round(magnitude / quantum) * quantum
    return math.copysign(math.inf if rounded >= 2**128 else float(rounded), x)
