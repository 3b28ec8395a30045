"""Host side of the kernels: results and workspace, and the launches that `plan` describes."""

import torch
from torch import Tensor

from dsa_sparse_attn_bwd import plan
from dsa_sparse_attn_bwd.arguments import CHANNELS

variants = plan.variants


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
    ordered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq and dkv in bf16, dsinks in the dtype of sinks; arguments as `reference.backward`, on the current stream.

    ordered: shares of the gradient of a row are added in an order that is always the same.

    Workspace: sums, 2,048 bytes a row; of a query, 4 bytes for each slot (in whole tiles of 64) and 12 for each head,
    and a copy of out if out_tail has other than whole panels of 64 channels;
    ordered, `plan.queries_at_a_time` times 2,048 bytes for each slot and 64 heads, and 28 for sorting them.
    """
    queries, heads, _ = q.shape
    rows, width = kv.shape[0], indices.shape[1]
    dq, dkv = q.new_empty(q.shape), kv.new_empty(kv.shape)
    if queries == 0 or rows == 0 or width == 0:
        return dq.zero_(), dkv.zero_(), torch.zeros_like(sinks)
    with torch.cuda.device_of(q):
        pitch = plan.pitch(width)
        # To be added in order, all slots are sorted, those behind a query's last too.
        make = torch.zeros if ordered else torch.empty
        slots = make(queries, pitch, dtype=torch.int32, device=q.device)
        counts = torch.empty(queries, dtype=torch.int32, device=q.device)
        of_heads = (_fp32(q, queries, heads) for _ in range(3))
        if out_tail is not None and out_tail.shape[2] % plan.PANEL:
            out, out_tail = torch.cat([out[..., : -out_tail.shape[2]], out_tail], dim=2), None
        tail = None if out_tail is None else _readable(out_tail)
        of = plan.Queries(_readable(q), _readable(grad_out), _readable(out), tail, slots, counts, *of_heads)
        if indices.dtype != torch.int32:
            indices = indices.clamp(-1, rows).int()
        plan.prepare(of, _readable(lse), _readable(sinks.float()), _readable(indices), rows).run()
        kv = _readable(kv)
        if ordered:
            sums = _add_in_order(of, kv, sm_scale, dq)
        else:
            sums = torch.zeros(rows + plan.SCRATCH, CHANNELS, dtype=torch.float32, device=q.device)
            plan.gradients(of, kv, sm_scale, dq, sums, ordered=False).run()
        plan.finish(sums, dkv).run()
        return dq, dkv, of.shares.sum(dim=0).to(sinks.dtype)


def _add_in_order(of: plan.Queries, kv: Tensor, sm_scale: float, dq: Tensor) -> Tensor:
    """The sums of the rows' gradients: those of a row by its queries, and by the slots of one."""
    queries, heads, _ = of.q.shape
    rows, pitch = kv.shape[0], of.slots.shape[1]
    of_query = pitch * max(1, heads // plan.TILE)
    size = min(queries, plan.queries_at_a_time(pitch, heads))
    sums = torch.zeros(rows, CHANNELS, dtype=torch.float32, device=kv.device)
    parts = _fp32(kv, size * of_query + plan.SCRATCH, CHANNELS)
    slot = torch.arange(pitch, device=kv.device)
    row = torch.arange(rows + 1, dtype=torch.int32, device=kv.device)
    for first in range(0, queries, size):
        which = slice(first, first + size)
        some = of.part(which)
        count = some.q.shape[0] * of_query
        plan.gradients(some, kv, sm_scale, dq[which], parts[: count + plan.SCRATCH], ordered=True).run()
        named = some.slots.masked_fill(slot >= some.counts[:, None], rows)
        keys, order = named.repeat_interleave(of_query // pitch, dim=0).view(-1).sort(stable=True)
        plan.add(parts, order, torch.searchsorted(keys, row), sums).run()
    return sums


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _readable(t: Tensor) -> Tensor:
    """t itself where the kernels can read it: contiguous and aligned to 16 bytes. Else a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
