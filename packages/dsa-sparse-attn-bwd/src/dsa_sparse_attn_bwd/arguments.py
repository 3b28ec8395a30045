"""Checks of the arguments, and the sizes that are taken, which nothing else knows."""

import torch
from hopper_kernels import checks
from torch import Tensor

HEADS = (16, 32, 64, 128)
CHANNELS = 512
TAIL_STEP = 16  # channels


def unsupported_shape_reason(num_heads: int, head_dim: int) -> str | None:
    """Why queries of these sizes are refused, or None if they are taken. For set-up time.

    num_heads: query heads, 16, 32, 64 or 128. head_dim: channels of a head and of a row, 512. The same words as the
    ValueError of the call.
    """
    try:
        _sizes(num_heads, head_dim)
    except ValueError as error:
        return str(error)
    return None


@checks.remembered
def backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None,
    deterministic: bool,
) -> None:
    """Checks all arguments of `dsa_sparse_attn_backward`."""
    checks.ndim("q", q, 4)
    _batch("q", q)
    _all(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic, (1,), (1,))


@checks.remembered
def backward_flat(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None,
    deterministic: bool,
) -> None:
    """Checks all arguments of `sparse_attn_backward_flat`."""
    checks.ndim("q", q, 3)
    _all(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic, (), ())


def _all(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None,
    deterministic: bool,
    batch: tuple[int, ...],
    kv_head: tuple[int, ...],
) -> None:
    """batch: leading dimensions of all but sinks. kv_head: the dimension of the one head that indices and kv have."""
    for name, value in {"q": q, "kv": kv, "out": out, "grad_out": grad_out}.items():
        checks.dtype(name, value, torch.bfloat16)
    queries, heads, channels = q.shape[-3:]
    _sizes(heads, channels)
    checks.shape("kv", kv, (*batch, None, *kv_head, channels))
    checks.shape("out", out, (*batch, queries, heads, channels))
    checks.shape("grad_out", grad_out, (*batch, queries, heads, channels))
    checks.dtype("lse", lse, torch.float32)
    checks.shape("lse", lse, (*batch, queries, heads))
    checks.dtype("indices", indices, torch.int32, torch.int64)
    checks.shape("indices", indices, (*batch, queries, *kv_head, None))
    checks.dtype("sinks", sinks, torch.float32, torch.float64, torch.bfloat16, torch.float16)
    checks.shape("sinks", sinks, (heads,))
    checks.finite("sm_scale", sm_scale)
    if out_tail is not None:
        checks.dtype("out_tail", out_tail, torch.bfloat16)
        checks.shape("out_tail", out_tail, (*batch, queries, heads, None))
        checks.in_range("the number of channels of out_tail", out_tail.shape[-1], TAIL_STEP, channels)
        checks.multiple("the number of channels of out_tail", out_tail.shape[-1], TAIL_STEP)
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool, got {type(deterministic).__name__}")
    checks.same_device(grad_out=grad_out, q=q, kv=kv, out=out, lse=lse, indices=indices, sinks=sinks, out_tail=out_tail)


def _batch(name: str, t: Tensor) -> None:
    if t.shape[0] != 1:
        raise ValueError(f"{name} must have a batch of 1, as all packed documents are one, got shape {tuple(t.shape)}")


def _sizes(heads: int, channels: int) -> None:
    if heads not in HEADS:
        raise ValueError(f"the number of heads of q must be one of {', '.join(map(str, HEADS))}, got {heads}")
    if channels != CHANNELS:
        raise ValueError(f"the number of channels of q must be {CHANNELS}, got {channels}")
