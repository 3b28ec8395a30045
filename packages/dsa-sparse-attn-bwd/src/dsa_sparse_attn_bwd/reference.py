"""The definition of the operator in plain PyTorch: what a CPU runs and the oracle of the tests."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 2**24  # elements of a temporary, or those of one query where they are more


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
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq (S, H, D), dkv (N, D) and dsinks (H,) in `dtype`, in which all is computed; nothing is rounded before.

    In float64 no setting of PyTorch (TF32, autocast) enters.

    grad_out, q, out (S, H, D); kv (N, D), each row key and value; lse (S, H), natural, of the listed slots without the
    sink; indices (S, K), rows of kv, where what is negative or not below N is an empty slot; sinks (H,); out_tail
    (S, H, R) or None, in place of out's last channels. With k_j the row of slot j, o the output, g its gradient:

        p_j = exp(sm_scale q . k_j - L),  L = log(e^lse + e^sink),  delta = g . o,  ds_j = p_j (g . k_j - delta)
        dq = sm_scale sum_j ds_j k_j,  dsink = -sum_s e^(sink - L) delta
        dkv[i] = sum over slots that name i, and heads, of sm_scale ds_j q + p_j g

    A row that is named m times counts m times. A query without slots adds nothing, whatever its lse, out and grad_out
    are; an empty slot adds nothing, and no row is read for it. A sink of -inf leaves its head without one; one of +inf
    takes all of its head's weight: p = 0, and e^(sink - L) = 1.
    """
    rows = kv.shape[0]
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
    dsinks = torch.zeros(sinks.shape, dtype=dtype, device=sinks.device)
    if out_tail is not None:
        out = out.clone()  # torch.cat would be autocast
        out[..., out.shape[-1] - out_tail.shape[-1] :] = out_tail
    sinks = sinks.to(dtype)
    for part in _chunks(*q.shape, indices.shape[1]):
        index = indices[part].long()
        valid = (index >= 0) & (index < rows)
        owner, slot = valid.nonzero(as_tuple=True)  # query by query, so an order of the sums
        listed = valid.any(dim=1)
        # Numbers of queries without slots are not looked at, not even to multiply them by zero.
        q_, g, o = (t[part].to(dtype).contiguous().masked_fill(~listed[:, None, None], 0.0) for t in (q, grad_out, out))
        lse_ = lse[part].to(dtype).masked_fill(~listed[:, None], 0.0)
        k = torch.zeros(*index.shape, kv.shape[1], dtype=dtype, device=kv.device)
        k[owner, slot] = kv[index[owner, slot]].to(dtype)
        total = torch.logaddexp(lse_, sinks.expand_as(lse_))
        p = torch.exp(sm_scale * torch.einsum("shc,skc->shk", q_, k) - total[..., None])
        p = p.masked_fill(~valid[:, None], 0.0)
        delta = (g * o).sum(dim=-1)
        ds = p * (torch.einsum("shc,skc->shk", g, k) - delta[..., None])
        ds = ds.masked_fill(~valid[:, None], 0.0)
        dq[part] = sm_scale * torch.einsum("shk,skc->shc", ds, k)
        of_slots = sm_scale * torch.einsum("shk,shc->skc", ds, q_) + torch.einsum("shk,shc->skc", p, g)
        dkv.index_add_(0, index[owner, slot], of_slots[owner, slot])
        share = torch.exp(sinks - total).masked_fill(sinks.isposinf(), 1.0)
        dsinks -= (share * delta).sum(dim=0)
    return dq, dkv, dsinks


def _chunks(queries: int, heads: int, channels: int, slots: int) -> Iterator[slice]:
    """Parts of the queries for which no temporary has more than CHUNK elements."""
    size = max(1, CHUNK // max(1, slots * channels, heads * channels, heads * slots))
    return (slice(i, i + size) for i in range(0, queries, size))
