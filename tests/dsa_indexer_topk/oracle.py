"""Brute force in exact rational arithmetic and plain Python: an oracle that shares nothing with the package.

Scales come from the exponent of the largest magnitude, bytes from tests/shared/rational.py. A row of q or k with a NaN
or an infinity has no bytes, and its scores are NaN; weights that are not finite are left to Python's floats. Slow:
about a million products a second.
"""

import functools
import math
from fractions import Fraction
from operator import mul

import torch
from torch import Tensor

from tests.dsa_indexer_topk.inputs import Arguments
from tests.shared import rational


def index_topk(a: Arguments) -> tuple[Tensor, Tensor]:
    """What the operator must return."""
    read = [range(first, last) for first, last in zip(a.ks.tolist(), a.ke.tolist(), strict=True)]
    return select(scores(a.q, a.k, a.w, read), a)


def scores(q: Tensor, k: Tensor, w: Tensor, read: list[range] | None = None) -> list[list[float]]:
    """The fp32 score of every query with every entry that it reads (default: all); else NaN."""
    keys = [_quantized(row) for row in k.double().tolist()]
    found = []
    for t, (heads, weights) in enumerate(zip(q.double().tolist(), w.double().tolist(), strict=True)):
        rows = [_quantized(head) for head in heads]
        if None in rows:
            found.append([math.nan] * len(keys))
            continue
        factors = [_factor(v, scale) for v, (scale, _) in zip(weights, rows, strict=True)]
        wanted = range(len(keys)) if read is None else read[t]
        found.append(
            [_score(rows, factors, *key) if e in wanted and key is not None else math.nan for e, key in enumerate(keys)]
        )
    return found


def select(scores: list[list[float]], a: Arguments) -> tuple[Tensor, Tensor]:
    """Picks and blocks by sorting, from scores of which NaN ones are unreadable."""
    entries = a.k.shape[0]
    picks, blocks = [], []
    for t, row in enumerate(scores):
        first, last = int(a.ks[t]), min(int(a.ke[t]), entries)
        readable = [e for e in range(first, last) if not math.isnan(row[e])]
        best: dict[int, float] = {}
        for e in readable:
            b = (e - first) // a.block_size
            best[b] = max(best.get(b, -math.inf), row[e])
        newest = max(last - first - 1, 0) // a.block_size
        best.setdefault(newest, -math.inf)
        blocks.append(_first(((b != newest, -score, b) for b, score in best.items()), a.topk_blocks))
        if a.candidates is not None:
            wanted = {b for b in a.candidates[t].tolist() if b >= 0}
            readable = [e for e in readable if (e - first) // a.block_size in wanted]
        picks.append(_first(((-row[e], e) for e in readable), a.topk))
    if not a.emit_candidates:
        blocks = torch.empty(0, 0)
    return _tensor(picks, a.topk, torch.int64), _tensor(blocks, a.topk_blocks, torch.int32)


def _first(keys, count: int) -> list[int]:
    """The indices at the end of the `count` smallest keys, ascending; then -1."""
    chosen = sorted(key[-1] for key in sorted(keys)[:count])
    return chosen + [-1] * (count - len(chosen))


def _tensor(rows, width: int, dtype: torch.dtype) -> Tensor:
    if isinstance(rows, Tensor):
        return rows.to(dtype)
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), width)


def _score(rows, factors: list[Fraction | float], scale: Fraction, key: list[int]) -> float:
    dots = [max(sum(map(mul, values, key)), 0) for _, values in rows]
    if any(isinstance(factor, float) for factor in factors):
        return sum(float(factor) * dot for factor, dot in zip(factors, dots, strict=True))  # NaN or infinite
    return float(_fp32(sum(map(mul, factors, dots)) * scale / 2**18))


def _factor(weight: float, scale: Fraction) -> Fraction | float:
    """The product in fp32; a float only where the weight is NaN or infinite."""
    return _fp32(Fraction(weight) * scale) if math.isfinite(weight) else weight


def _quantized(row: list[float]) -> tuple[Fraction, list[int]] | None:
    """Scale and e4m3 values, these in units of 2^-9; None if a value is not finite."""
    if not all(map(math.isfinite, row)):
        return None
    mantissa, exponent = math.frexp(max(*map(abs, row), 1e-10))  # mantissa in [0.5, 1)
    scale = Fraction(2) ** (exponent - 1 - (8 if 2 * mantissa <= 1.75 else 7))
    return scale, [_units(v, float(scale)) for v in row]


@functools.cache
def _units(value: float, scale: float) -> int:
    byte = rational.byte(value, scale)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    units = (8 + mantissa) << (exponent - 1) if exponent else mantissa
    return -units if byte & 0x80 else units


def _fp32(x: Fraction) -> Fraction:
    return rational.fp32(x) if x >= 0 else -rational.fp32(-x)
