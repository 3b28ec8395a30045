"""How far a tensor is from what a definition in float64 says, as a whole and in its worst element."""

from __future__ import annotations

import math

from torch import Tensor

_TINY = 1e-300  # an element of a row of zeros that differs from 0 is infinitely far


class Difference:
    """The difference of a tensor from the expected one, which may come a few rows at a time.

    relative(): ||actual - expected|| / ||expected||. `worst`: the largest difference of an element, relative to the
    expected element or to the root mean square of its row, whichever is larger. NaN stays NaN in both.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._squares = [0.0, 0.0]

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Compare these rows, of at least one element; all dimensions after the first, or a whole vector, are a row."""
        difference = (actual.double() - expected).abs()
        rows = expected.flatten(1) if expected.ndim > 1 else expected[None]
        size = rows.square().mean(1).sqrt().view(-1, *[1] * (expected.ndim - 1))
        worst = (difference / expected.abs().maximum(size).clamp_min(_TINY)).max().item()
        self.worst = math.nan if math.isnan(worst) or math.isnan(self.worst) else max(worst, self.worst)
        squares = (t.square().sum().item() for t in (difference, expected))
        self._squares = [sum(pair) for pair in zip(self._squares, squares, strict=True)]

    def relative(self) -> float:
        error, size = self._squares
        if size:
            return (error / size) ** 0.5
        return 0.0 if error == 0.0 else float("inf")
