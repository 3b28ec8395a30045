"""Operands of the sparse attention's backward, under all strides, and its forward in plain PyTorch."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.compare import assert_same_bytes, error64

NAMES = ("dq", "dkv", "dsinks")


class Operands(NamedTuple):
    """grad_out, q, out (S, H, D) bf16, kv (N, D) bf16, lse (S, H) fp32, indices (S, K) int32, sinks (H,) fp32."""

    grad_out: Tensor
    q: Tensor
    kv: Tensor
    out: Tensor
    lse: Tensor
    indices: Tensor
    sinks: Tensor
    sm_scale: float
    out_tail: Tensor | None = None

    def batched(self) -> dict[str, Tensor | float | None]:
        """Arguments of `dsa_sparse_attn_backward`, in its order."""
        return {name: _batched(name, value) for name, value in self._asdict().items()}

    def flat(self) -> dict[str, Tensor | float | None]:
        """Arguments of `sparse_attn_backward_flat`, in its order."""
        order = ("q", "kv", "out", "grad_out", *self._fields[4:])
        return {name: getattr(self, name) for name in order}

    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._asdict().items() if isinstance(t, Tensor)}

    def each(self, change: Callable[[Tensor], Tensor]) -> "Operands":
        """With every tensor changed."""
        return self._replace(**{name: change(t) for name, t in self.tensors().items()})


def _batched(name: str, value):
    if name == "sinks" or not isinstance(value, Tensor):
        return value
    return value[None, :, None] if name in ("kv", "indices") else value[None]


def forward(q: Tensor, kv: Tensor, indices: Tensor, sinks: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
    """out (S, H, D) with the sink, lse (S, H) without it, as FlashMLA returns them: +inf and zeros without slots."""
    valid = (indices >= 0) & (indices < len(kv))
    rows = kv[indices.clamp(0, max(0, len(kv) - 1)).long()] if len(kv) else kv.new_zeros(*indices.shape, kv.shape[1])
    rows = torch.where(valid[..., None], rows, 0.0)
    scores = sm_scale * torch.einsum("shc,skc->shk", q, rows)
    scores = scores.masked_fill(~valid[:, None], -torch.inf)
    whole = torch.cat([scores, sinks.to(q.dtype).expand(len(q), -1)[..., None]], dim=-1)
    p = torch.softmax(whole, dim=-1)[..., :-1].masked_fill(~valid.any(dim=1)[:, None, None], 0.0)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    lse = lse.masked_fill(~valid.any(dim=1)[:, None], torch.inf)
    return torch.einsum("shk,skc->shc", p, rows), lse


def operands(
    queries: int = 13, slots: int = 9, rows: int = 24, heads: int = 4, channels: int = 32, empty: float = 0.2
) -> Operands:
    """Random numbers; a share of the slots is empty, in some queries all."""
    q, grad_out = (torch.randn(queries, heads, channels).bfloat16() for _ in range(2))
    kv = torch.randn(rows, channels).bfloat16()
    indices = torch.randint(0, max(1, rows), (queries, slots), dtype=torch.int32)
    indices[torch.rand(queries, slots) < empty] = -1
    if not rows:
        indices.fill_(-1)
    indices[1::5] = -1
    sinks = torch.randn(heads)
    scale = channels**-0.5
    out, lse = forward(*(t.double() for t in (q, kv)), indices, sinks.double(), scale)
    return Operands(grad_out, q, kv, out.bfloat16(), lse.float(), indices, sinks, scale)


def small(queries: int = 5, slots: int = 9, rows: int = 7, heads: int = 16, **options) -> Operands:
    """What the public functions take, and little of it: queries 1, 6, ... have no slots."""
    return operands(queries, slots, rows, heads=heads, channels=512, **options)


def with_tail(t: Operands, channels: int, left: float = float("nan")) -> Operands:
    """The last channels of the output apart, and something else where they were."""
    out = t.out.clone()
    out[..., -channels:] = left
    return t._replace(out=out, out_tail=t.out[..., -channels:].clone())


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Gradients of the same bytes, dtypes, shapes and strides."""
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert_same_bytes(got, want, name)


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """The same but for the order of fp32 sums, which strides may change in the definition."""
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert (got.dtype, got.stride()) == (want.dtype, want.stride()), name
        assert error64(got, want.double()) < 1e-4, name


def _inside(t: Tensor) -> Tensor:
    """A slice along the last axis, other numbers around it."""
    wide = t.new_full((*t.shape[:-1], t.shape[-1] + 5), 77)
    wide[..., 3:-2] = t
    return wide[..., 3:-2]


# Each takes a contiguous tensor and returns the same values with other strides.
STRIDES = {
    "slice": _inside,
    "base off by one element": lambda t: t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t),
    "every second of the first axis": lambda t: t.repeat_interleave(2, 0)[::2],
    "every second of the last axis": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "last axis outermost": lambda t: t.movedim(-1, 0).contiguous().movedim(0, -1),
}
