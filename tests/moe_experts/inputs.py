"""Inputs of the tests: operands of experts, with groups of all kinds."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LIMIT = 10.0
# (sizes of the groups, rows past the last, H, I): tiles are larger than the tensors, nothing is a multiple of much.
SHAPES = [
    ((13, 0, 30), 7, 136, 264),
    ((1, 2, 45, 63, 65), 24, 64, 40),
    ((0, 0, 9, 0), 0, 16, 24),
    ((5, 0, 0, 3, 0), 1, 8, 8),
    ((17,), 3, 40, 16),
    ((0, 0), 6, 8, 16),
    ((0, 0, 0), 0, 16, 8),
]


class Operands(NamedTuple):
    """Arguments of `moe_experts` in its order."""

    x: Tensor
    gate_proj: Tensor
    up_proj: Tensor | None
    down_proj: Tensor
    num_tokens_per_expert: Tensor
    swiglu_limit: float = LIMIT

    @property
    def leaves(self) -> list[Tensor]:
        """What can require grad."""
        return [t for t in self[:4] if t is not None]

    @property
    def owned(self) -> int:
        """Rows that an expert owns."""
        return int(self.num_tokens_per_expert.sum())

    def requires_grad(self, *names: str) -> "Operands":
        """The same values as new leaves; those named (all by default) require grad."""
        found = {}
        for name, t in zip(self._fields[:4], self[:4], strict=True):
            if t is not None:
                found[name] = t.detach().clone().requires_grad_(not names or name in names)
        return self._replace(**found)

    def packed(self) -> "Operands":
        """With one weight for gate and up."""
        return self._replace(gate_proj=torch.cat((self.gate_proj, self.up_proj), dim=1), up_proj=None)

    def double(self) -> "Operands":
        found = {n: t.double() for n, t in zip(self._fields[:4], self[:4], strict=True) if t is not None}
        return self._replace(**found)


def operands(
    groups: tuple[int, ...] = (13, 0, 30),
    tail: int = 7,
    hidden: int = 64,
    inner: int = 40,
    *,
    limit: float = LIMIT,
    gate_std: float = 1.0,
) -> Operands:
    """Normal numbers, results about 1. Gates have the standard deviation `gate_std`, ups too; rows of the tail NaN."""
    experts, owned = len(groups), sum(groups)
    x = torch.randn(owned + tail, hidden).bfloat16()
    x[owned:] = math.nan
    gate, up = (torch.randn(experts, inner, hidden).mul(gate_std * hidden**-0.5).bfloat16() for _ in range(2))
    down = torch.randn(experts, hidden, inner).mul(inner**-0.5).bfloat16()
    return Operands(x, gate, up, down, torch.tensor(groups), limit)


def whole_numbers(groups: tuple[int, ...], tail: int, hidden: int, inner: int) -> Operands:
    """Gates and ups are whole numbers without rounding errors: many on the bounds of the clamp, many beyond."""
    t = operands(groups, tail, hidden, inner, limit=3.0)
    x, gate, up = (torch.randint(-1, 2, v.shape).bfloat16() for v in (t.x, t.gate_proj, t.up_proj))
    x[sum(groups) :] = math.nan
    return t._replace(x=x, gate_proj=gate, up_proj=up)


def cotangent(t: Operands) -> Tensor:
    """A random gradient of the result, NaN past the last group."""
    dout = torch.randn(t.x.shape).bfloat16()
    dout[t.owned :] = math.nan
    return dout
