"""The kernels in plain PyTorch, from the arguments of their launches: what the host side makes of them on a CPU."""

import torch
from dsa_sparse_attn_bwd import plan
from hopper_kernels.launcher import Launch

NAN = float("nan")
OPTIONS = {"HEADS": "heads", "TAIL": "channels", "DELTAS": "here", "ORDERED": "ordered"}  # that change the numbers


def run(one: Launch) -> None:
    """In place of `Launch.run`. Sums have their channels in order, unlike those of the kernels."""
    options = {name: one.options[option] for option, name in OPTIONS.items() if option in one.options}
    KERNELS[one.kernel.__name__](*one.args, **options)


def _prepare(
    grad_out, out, tail, lse, sinks, indices, slots, counts, logs, deltas, shares, width, rows, pitch, heads, channels,
    here,
):  # fmt: skip
    """Places behind a query's last slot are not written: they may hold anything."""
    assert indices.shape == (len(out), width)
    assert slots.shape == (len(out), pitch)
    assert out.shape[1] == heads
    slots.random_(-(2**31), 2**31 - 1)
    for t, given in enumerate(indices):
        named = given[(given >= 0) & (given < rows)]
        counts[t] = len(named)
        slots[t, : len(named)] = named
    left = counts[:, None] > 0
    log = torch.logaddexp(lse, sinks.expand_as(lse))
    logs.copy_(torch.where(left, log * plan.LOG2_E, torch.inf))
    shares.copy_(torch.where(left, torch.exp(sinks - log), 0.0))
    deltas.fill_(NAN)
    if here:
        deltas.copy_(torch.where(left, _delta(grad_out, out, tail, channels), 0.0))
        shares.mul_(-deltas)


def _delta(grad_out, out, tail, channels):
    if channels:
        out = torch.cat([out[..., :-channels], tail], dim=-1)
    return (grad_out.float() * out.float()).sum(dim=-1)


def _gradients(
    q, grad_out, out, tail, kv, slots, counts, logs, deltas, shares, dq, sums, scale_log2, scale, items, pitch, nowhere,
    rounds, heads, channels, here, ordered,
):  # fmt: skip
    """Ordered, a part that belongs to no slot is NaN."""
    q, grad_out, parts = q.base.float(), grad_out.base.float(), max(1, heads // plan.TILE)
    if here:
        assert deltas.isnan().all()
        deltas = _delta(grad_out, out.base, tail.base, channels)
        shares.copy_(torch.where(counts[:, None] > 0, -shares * deltas, 0.0))
    assert items == len(q) * parts
    assert nowhere == len(sums) - plan.SCRATCH == (items * pitch if ordered else len(kv))
    assert rounds == plan.ROUNDS
    if ordered:
        sums.fill_(NAN)
    for item in range(items):
        t, of = item // parts, slice(item % parts * plan.TILE, (item % parts + 1) * plan.TILE)
        row = slots[t, : counts[t]].long()
        k, g = kv[row].float(), grad_out[t, of]
        p = torch.exp2(q[t, of] @ k.T * scale_log2 - logs[t, of, None])
        ds = p * (g @ k.T - deltas[t, of, None]) * scale
        dq[t, of] = (ds @ k).bfloat16()
        of_slots = ds.T @ q[t, of] + p.T @ g
        if ordered:
            sums[item * pitch : item * pitch + len(row)] = of_slots
        else:
            sums.index_add_(0, row, of_slots)


def _add(parts, order, starts, sums):
    for row, total in enumerate(sums):
        total += parts[order[starts[row] : starts[row + 1]]].sum(dim=0)


def _finish(sums, dkv, rows):
    assert len(dkv) == rows
    dkv.copy_(sums[:rows])


KERNELS = {
    "prepare_kernel": _prepare,
    "gradients_kernel": _gradients,
    "add_kernel": _add,
    "finish_kernel": _finish,
}
