"""Both casts in plain PyTorch under torch.compile: what a trainer has without a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_BLOCK, _MAX, _FLOOR = 128, 448.0, 1e-10


def compiled_casts() -> Callable[..., tuple[Tensor, ...]]:
    """A freshly compiled function of (x, table, positions, head_dim); the last three None or an inverse RoPE.

    Returns (q, sf, q_t, sf_t) in the layouts of fp8_dual_cast for T a multiple of 128. Inductor's division is not
    IEEE's and its contraction is its own: bytes are close to the definition's, not equal.
    """
    torch._dynamo.reset()  # otherwise the shapes of the earlier cases count against the recompile limit
    return torch.compile(_casts, dynamic=False, fullgraph=True)


def _casts(x: Tensor, table: Tensor | None, positions: Tensor | None, head_dim: int | None) -> tuple[Tensor, ...]:
    if table is not None:
        x = _rotate(x, table, positions, head_dim)
    tokens, channels = x.shape
    rows = x.float().view(tokens, channels // _BLOCK, _BLOCK)
    sf = _scale(rows.abs().amax(-1))
    q = _quantize(rows / sf.unsqueeze(-1)).view(tokens, channels)
    columns = x.float().view(tokens // _BLOCK, _BLOCK, channels)
    sf_t = _scale(columns.abs().amax(1))
    q_t = _quantize(columns / sf_t.unsqueeze(1)).view(tokens, channels)
    return q, sf.t().contiguous().t(), q_t.t().contiguous(), sf_t.t()


def _rotate(x: Tensor, table: Tensor, positions: Tensor, head_dim: int) -> Tensor:
    heads = x.view(x.shape[0], -1, head_dim)
    cosine, sine = table[positions].unsqueeze(1).chunk(2, dim=-1)
    plain, rotated = heads.split([head_dim - table.shape[1], table.shape[1]], dim=-1)
    a, b = rotated.float().unflatten(-1, (-1, 2)).unbind(-1)
    pairs = torch.stack((a * cosine + b * sine, b * cosine - a * sine), dim=-1).flatten(-2)
    return torch.cat((plain, pairs.to(x.dtype)), dim=-1).view_as(x)


def _scale(amax: Tensor) -> Tensor:
    return amax.clamp(min=_FLOOR) / _MAX


def _quantize(quotient: Tensor) -> Tensor:
    return quotient.clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
