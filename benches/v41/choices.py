"""What a step decides, to be decided alike in another one: experts of each token, entries of each query, blocks.

Two steps that round differently choose differently where two scores nearly tie, and their gradients then differ by far
more than rounding. With the same choices, they can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Choices:
    """Keeps a step's choices, or, given those of another step, replays them and notes what share was the same.

    shares: by what was chosen, the least share that any layer has in common with the other step.
    """

    def __init__(self, replayed: Choices | None = None) -> None:
        self._replayed = None if replayed is None else replayed._kept
        self._kept: dict[tuple[str, int], Tensor] = {}
        self.shares: dict[str, float] = {}

    def rows(self, rows: slice) -> Choices:
        """Those of some rows, to be replayed."""
        part = Choices()
        part._kept = {key: kept[rows] for key, kept in self._kept.items()}
        return part

    def __call__(self, what: str, layer: int, found: Tensor) -> Tensor:
        """What the step goes on with: found (rows, choices), distinct in a row but for -1, in any order."""
        if self._replayed is None:
            self._kept[what, layer] = found
            return found
        other = self._replayed[what, layer]
        self.shares[what] = min(self.shares.get(what, 1.0), share_in_common(found, other))
        return other


def share_in_common(a: Tensor, b: Tensor) -> float:
    """Of what is chosen in rows of b, -1 aside, the share that is chosen in the same row of a too."""
    a = a.sort(dim=1).values
    place = torch.searchsorted(a, b.to(a.dtype)).clamp_max(a.shape[1] - 1)
    chosen = b >= 0
    same = (a.gather(1, place) == b) & chosen
    return same.sum().item() / max(1, int(chosen.sum()))
