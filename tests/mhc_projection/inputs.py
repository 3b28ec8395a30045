"""Inputs of the tests: operands of a hyper-connection, and streams under every kind of strides."""

from typing import NamedTuple

import torch
from torch import Tensor

ITERS, RMS_EPS, HC_EPS = 20, 1e-20, 1e-6
OPTIONS = {"rms_eps": RMS_EPS, "hc_eps": HC_EPS, "sinkhorn_iters": ITERS}
# (tokens, hc, d): no tile is full in any, several are odd in every way.
SIZES = [(37, 4, 320), (130, 4, 200), (77, 2, 192), (1, 4, 64), (5, 1, 8), (3, 4, 5128)]


class Operands(NamedTuple):
    """Arguments of `hyper_connection` in its order."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    base: Tensor
    pre_mix: Tensor

    def requires_grad(self, *names: str) -> "Operands":
        """The same values as new leaves; those named (all by default) require grad."""
        return Operands(
            *(t.detach().clone().requires_grad_(not names or f in names) for f, t in self._asdict().items())
        )


def logits(hc: int) -> int:
    return (2 + hc) * hc


def operands(
    tokens: int, hc: int = 4, d: int = 64, *, lead: tuple[int, ...] | None = None, n: int | None = None
) -> Operands:
    """As the published workload has them; `lead` replaces the leading dimension, `n` the number of logits."""
    lead = (tokens,) if lead is None else lead
    n = n or logits(hc)
    return Operands(
        torch.randn(*lead, hc, d).bfloat16(),
        torch.randn(n, hc * d) * 0.02,
        torch.rand(3) + 0.5,
        torch.randn(logits(hc)) * 0.5,
        torch.rand(*lead, hc),
    )


def cotangents(*results: Tensor | None) -> list[Tensor]:
    """Random gradients of these results; None is left out."""
    return [torch.randn(t.shape).to(t.dtype) for t in results if t is not None]


def _inside(x: Tensor, left: int, right: int) -> Tensor:
    """The values of x as a slice of wider streams, NaN around it."""
    wide = x.new_full((*x.shape[:-1], left + x.shape[-1] + right), float("nan"))
    view = wide[..., left : left + x.shape[-1]]
    view.copy_(x)
    return view


def _misaligned(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)


# Each takes contiguous streams (T, hc, d) and returns the same values with other strides.
STRIDES = {
    "aligned slice": lambda x: _inside(x, 8, 16),
    "unaligned slice": lambda x: _inside(x, 3, 5),
    "base off by one element": _misaligned,
    "every second token": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second channel": lambda x: x.repeat_interleave(2, 2)[..., ::2],
    "streams outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels outermost": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
}


def broadcasts(tokens: int, hc: int, d: int) -> dict[str, Tensor]:
    """Streams with strides 0; "all streams alike" is what the first layer of the model gets."""
    return {
        "all streams alike": torch.randn(tokens, 1, d).bfloat16().expand(tokens, hc, d),
        "all tokens alike": torch.randn(1, hc, d).bfloat16().expand(tokens, hc, d),
        "one value": torch.tensor(-1.5).bfloat16().expand(tokens, hc, d),
    }
