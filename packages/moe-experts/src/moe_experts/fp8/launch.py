"""Host side of the FP8 kernels: allocates the results and the workspace, and launches. Arguments are checked before."""

from typing import NamedTuple

import torch
from hopper_kernels.fp8 import BLOCK
from torch import Tensor

from moe_experts import launch as bf16
from moe_experts.fp8 import plan
from moe_experts.fp8.layout import padded_rows
from moe_experts.plan import Groups

__all__ = [
    "backward",
    "backward_accumulate",
    "backward_data",
    "forward",
    "quantize_weights",
    "weight_grad_accumulate",
]

Quantised = tuple[Tensor, Tensor]
"""Codes and their scales."""


def quantize_weights(
    gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor, transposed: bool = True
) -> tuple[Tensor, ...]:
    """w13_q, w13_sf, w2_q, w2_sf, and the same four transposed, or (0,) each if not asked for."""
    gate_proj, up_proj = bf16.two(gate_proj, up_proj)
    experts, inner, hidden = gate_proj.shape
    w13, w2 = (_weight(down_proj, experts, *shape) for shape in ((2 * inner, hidden), (hidden, inner)))
    turned = (hidden, 2 * inner), (inner, hidden)
    w13_t, w2_t = (_weight(down_proj, experts, *shape) for shape in turned) if transposed else (None, None)
    with torch.cuda.device_of(gate_proj):
        plan.quantize_weights(gate_proj, up_proj, w13, w13_t).run()
        plan.quantize_weights(down_proj, down_proj, w2, w2_t).run()
    return *w13, *w2, *(w13_t or _nothing(down_proj)), *(w2_t or _nothing(down_proj))


def forward(
    x: Tensor,
    counts: Tensor,
    limit: float,
    w13_q: Tensor,
    w13_sf: Tensor,
    w2_q: Tensor,
    w2_sf: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (M, H); with `keep` gate_up (Mp, 2I) bf16, and x_t, x_t_sf, x in panels.

    Workspace: x and then h in e4m3 rows with their scales, H or I bytes a padded row and 4 / 128 of it; gate_up if it
    is not kept.
    """
    rows, hidden = x.shape
    inner, padded = w2_q.shape[2], padded_rows(rows, counts.numel())
    out, gate_up = x.new_empty(rows, hidden), x.new_empty((padded, 2 * inner) if keep else 0)
    x_t, x_t_sf = _panels(x, padded, hidden) if keep else _nothing(x)
    if rows == 0:
        return out, gate_up, x_t.view(-1), x_t_sf
    with torch.cuda.device_of(x):
        where = bf16.groups(counts, rows)
        x_rows = _rows(x, padded, hidden)
        plan.quantize(x, where, x_rows, (x_t, x_t_sf) if keep else None).run()
        kept = gate_up if keep else x.new_empty(padded, 2 * inner)
        plan.product(x_rows, (w13_q, w13_sf), where, kept, padded=True).run()
        del x_rows
        h = _rows(x, padded, inner)
        plan.swiglu(kept, limit, where, h).run()
        del kept
        plan.product(h, (w2_q, w2_sf), where, out, padded=False).run()
    return out, gate_up, x_t.view(-1), x_t_sf


def backward_data(
    dout: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    limit: float,
) -> tuple[Tensor, ...]:
    """dx (M, H), and dout, h and the gradients of gate and up in panels with their scales."""
    rows = dout.shape[0]
    if rows == 0:
        operands = _Operands.empty(dout, gate_up)
        return dout.new_empty(dout.shape), *operands.flat()
    with torch.cuda.device_of(dout):
        where = bf16.groups(counts, rows)
        gradients, operands = _gradients(dout, gate_up, (w2_t, w2_t_sf), limit, where, True)
        dx = _grad_x(gradients, (w13_t, w13_t_sf), where, dout)
    return dx, *operands.flat()


def backward(
    dout: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    limit: float,
    packed: bool,
    need_x: bool,
    need_gate: bool,
    need_up: bool,
    need_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (M, H), and bf16 gradients of the projections: gate and up (E, I, H), or both (E, 2I, H) and an empty tensor;
    down (E, H, I). What is not needed is an empty tensor."""
    rows, hidden = dout.shape
    experts, inner = counts.numel(), gate_up.shape[1] // 2
    need_up = need_up and not packed
    shapes = {"gate": (experts, 2 * inner if packed else inner, hidden), "up": (experts, inner, hidden)}
    needed = {"gate": need_gate, "up": need_up}
    if rows == 0:
        found = [dout.new_zeros(shapes[name] if needed[name] else 0) for name in shapes]
        dx = dout.new_empty(dout.shape if need_x else 0)
        return dx, *found, dout.new_zeros((experts, hidden, inner) if need_down else 0)
    with torch.cuda.device_of(dout):
        where = bf16.groups(counts, rows)
        weights = need_gate or need_up or need_down
        gradients, operands = _gradients(dout, gate_up, (w2_t, w2_t_sf), limit, where, weights)
        down = dout.new_empty((experts, hidden, inner) if need_down else 0)
        if need_down:
            plan.weight_grad(operands.dout, operands.h, where, 0, (down,), plan.BF16).run()
        dx = _grad_x(gradients, (w13_t, w13_t_sf), where, dout) if need_x else dout.new_empty(0)
        del gradients
        found = {name: dout.new_empty(shapes[name] if needed[name] else 0) for name in shapes}
        outs = tuple(found[name] for name in shapes if needed[name])
        if outs:
            first = 0 if need_gate else inner
            x = _as_panels(x_t, x_t_sf)
            plan.weight_grad(operands.gate_up, x, where, first, outs, plan.BF16).run()
    return dx, found["gate"], found["up"], down


def backward_accumulate(
    dout: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    limit: float,
    dw13: Tensor,
    dw2: Tensor,
    accumulate: bool,
) -> Tensor:
    """dx (M, H). dw13 (E, 2I, H) and dw2 (E, H, I) fp32 are overwritten with the gradients, or get them added."""
    rows = dout.shape[0]
    if rows == 0:
        _no_rows(dw13, dw2, accumulate)
        return dout.new_empty(dout.shape)
    with torch.cuda.device_of(dout):
        where = bf16.groups(counts, rows)
        gradients, operands = _gradients(dout, gate_up, (w2_t, w2_t_sf), limit, where, True)
        dx = _grad_x(gradients, (w13_t, w13_t_sf), where, dout)
        del gradients
        _accumulate(operands, _as_panels(x_t, x_t_sf), where, dw13, dw2, accumulate)
    return dx


def weight_grad_accumulate(
    counts: Tensor,
    dout_t: Tensor,
    dout_t_sf: Tensor,
    h_t: Tensor,
    h_t_sf: Tensor,
    dgu_t: Tensor,
    dgu_t_sf: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    num_rows: int,
    dw13: Tensor,
    dw2: Tensor,
    accumulate: bool,
) -> None:
    """The second half of `backward_accumulate`, from what `backward_data` returned and the forward kept."""
    if num_rows == 0:
        return _no_rows(dw13, dw2, accumulate)
    operands = _Operands(_as_panels(dout_t, dout_t_sf), _as_panels(h_t, h_t_sf), _as_panels(dgu_t, dgu_t_sf))
    with torch.cuda.device_of(dw13):
        where = bf16.groups(counts, num_rows)
        _accumulate(operands, _as_panels(x_t, x_t_sf), where, dw13, dw2, accumulate)
    return None


class _Operands(NamedTuple):
    """What the weight gradients multiply, besides x, in panels with their scales."""

    dout: Quantised
    h: Quantised
    gate_up: Quantised

    @classmethod
    def empty(cls, dout: Tensor, gate_up: Tensor) -> "_Operands":
        """Uninitialised, for gradients dout (M, H) and gate_up (Mp, 2I)."""
        padded, channels = gate_up.shape
        return cls(*(_panels(dout, padded, c) for c in (dout.shape[1], channels // 2, channels)))

    def flat(self) -> tuple[Tensor, ...]:
        """As the operators return them."""
        return tuple(t.view(-1) if i == 0 else t for pair in self for i, t in enumerate(pair))


def _gradients(
    dout: Tensor, gate_up: Tensor, w2_t: Quantised, limit: float, where: Groups, weights: bool
) -> tuple[Quantised, _Operands | None]:
    """The gradients of gate and up in rows, and, if those of weights are wanted, what these multiply."""
    padded, channels = gate_up.shape
    operands = _Operands.empty(dout, gate_up) if weights else None
    dout_rows = _rows(dout, padded, dout.shape[1])
    plan.quantize(dout, where, dout_rows, operands and operands.dout).run()
    grad_h = dout.new_empty(padded, channels // 2)
    plan.product(dout_rows, w2_t, where, grad_h, padded=True).run()
    del dout_rows
    gradients = _rows(dout, padded, channels)
    panels = (operands.gate_up, operands.h) if operands else (None, None)
    plan.swiglu_backward(grad_h, gate_up, limit, where, gradients, *panels).run()
    return gradients, operands


def _grad_x(gradients: Quantised, w13_t: Quantised, where: Groups, dout: Tensor) -> Tensor:
    dx = dout.new_empty(dout.shape)  # not empty_like, which keeps odd strides of a single row
    plan.product(gradients, w13_t, where, dx, padded=False).run()
    return dx


def _accumulate(operands: _Operands, x: Quantised, where: Groups, dw13: Tensor, dw2: Tensor, accumulate: bool) -> None:
    mode = plan.ADD if accumulate else plan.OVERWRITE
    plan.weight_grad(operands.dout, operands.h, where, 0, (dw2,), mode).run()
    plan.weight_grad(operands.gate_up, x, where, 0, (dw13,), mode).run()


def _no_rows(dw13: Tensor, dw2: Tensor, accumulate: bool) -> None:
    if not accumulate:
        dw13.zero_()
        dw2.zero_()


def _rows(like: Tensor, padded: int, channels: int) -> Quantised:
    codes = torch.empty(padded, channels, dtype=torch.float8_e4m3fn, device=like.device)
    return codes, torch.empty(channels // BLOCK, padded, dtype=torch.float32, device=like.device)


def _panels(like: Tensor, padded: int, channels: int) -> Quantised:
    blocks = padded // BLOCK
    codes = torch.empty(blocks, channels, BLOCK, dtype=torch.float8_e4m3fn, device=like.device)
    return codes, torch.empty(blocks, channels, dtype=torch.float32, device=like.device)


def _nothing(like: Tensor) -> Quantised:
    """What is returned in place of codes and scales that nobody needs."""
    return like.new_empty(0, dtype=torch.float8_e4m3fn), like.new_empty(0, dtype=torch.float32)


def _as_panels(codes: Tensor, scales: Tensor) -> Quantised:
    return codes.view(*scales.shape, BLOCK), scales


def _weight(like: Tensor, experts: int, rows: int, columns: int) -> Quantised:
    codes = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=like.device)
    sizes = experts, rows // BLOCK, columns // BLOCK
    return codes, torch.empty(sizes, dtype=torch.float32, device=like.device)
