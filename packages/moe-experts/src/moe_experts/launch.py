"""Host side of the kernels: allocates the results and the workspace, and launches. Arguments are checked before."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_experts import plan

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

_BAD_COUNTS = "num_tokens_per_expert must not be negative, and must add up to at most the rows of x"

__all__ = ["backward", "backward_data", "forward", "variants", "weight_grad"]


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: all there is, with the FP8 path."""
    from moe_experts.fp8 import plan as fp8_plan

    return plan.variants() + fp8_plan.variants()


def forward(
    x: Tensor, gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor, counts: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out (M, H), gate and up (M, I); up_proj None: gate_proj is both, (E, 2I, H).

    Rows after the last expert are zeros in out, and not written in gate and up. Workspace: (M, I) bf16, and 16 bytes a
    tile of 128 rows.
    """
    rows = x.shape[0]
    inner = down_proj.shape[2]
    # not empty_like, here and below: it keeps odd strides of a single row
    out, gate, up = x.new_empty(x.shape), x.new_empty(rows, inner), x.new_empty(rows, inner)
    if rows == 0:
        return out, gate, up
    gate_proj, up_proj = two(gate_proj, up_proj)
    with torch.cuda.device_of(x):
        where = groups(counts, rows)
        hidden = gate.new_empty(gate.shape)
        plan.gate_up(x, gate_proj, up_proj, limit, where, gate, up, hidden).run()
        plan.down(hidden, down_proj, where, out).run()
    return out, gate, up


def backward(
    dout: Tensor,
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    counts: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    need_x: bool,
    need_gate: bool,
    need_up: bool,
    need_down: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx (M, H), and the gradients of the projections as in `weight_grad`. What is not needed is an empty tensor.

    Workspace: the gradients of gate and up, (M, 2I); and, before most of the results are allocated, the SwiGLU (M, I).
    """
    packed, needs = up_proj is None, (need_gate, need_up, need_down)
    if x.shape[0] == 0:
        return x.new_empty(x.shape if need_x else 0), *_no_rows(x, counts, gate.shape[1], packed, *needs)
    gate_proj, up_proj = two(gate_proj, up_proj)
    with torch.cuda.device_of(x):
        where = groups(counts, x.shape[0])
        grad_gate_up, hidden = _grad_hidden(dout, down_proj, gate, up, limit, where)
        down = _grad_down(where, dout, hidden, counts, need_down)
        del hidden
        dx = _grad_x(grad_gate_up, gate_proj, up_proj, where, dout) if need_x else x.new_empty(0)
        return dx, *_grad_gate_up(where, x, grad_gate_up, counts, packed, need_gate, need_up), down


def backward_data(
    dout: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    counts: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (M, H), the gradients of gate and up side by side (M, 2I), and the SwiGLU (M, I)."""
    rows, inner = gate.shape
    if rows == 0:
        return dout.new_empty(dout.shape), gate.new_empty(rows, 2 * inner), gate.new_empty(gate.shape)
    gate_proj, up_proj = two(gate_proj, up_proj)
    with torch.cuda.device_of(dout):
        where = groups(counts, rows)
        grad_gate_up, hidden = _grad_hidden(dout, down_proj, gate, up, limit, where)
        return _grad_x(grad_gate_up, gate_proj, up_proj, where, dout), grad_gate_up, hidden


def weight_grad(
    dout: Tensor, x: Tensor, counts: Tensor, grad_gate_up: Tensor, hidden: Tensor, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projections: gate and up (E, I, H), or both (E, 2I, H) and an empty tensor; down (E, H, I)."""
    if x.shape[0] == 0:
        return _no_rows(x, counts, hidden.shape[1], packed, True, True, True)
    with torch.cuda.device_of(x):
        where = groups(counts, x.shape[0])
        first, second = _grad_gate_up(where, x, grad_gate_up, counts, packed, True, True)
        return first, second, _grad_down(where, dout, hidden, counts, True)


def _grad_hidden(
    dout: Tensor, down_proj: Tensor, gate: Tensor, up: Tensor, limit: float, where: plan.Groups
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up side by side, and the SwiGLU."""
    rows, inner = gate.shape
    grads, hidden = gate.new_empty(rows, 2 * inner), gate.new_empty(gate.shape)
    plan.grad_hidden(dout, down_proj, gate, up, limit, where, grads[:, :inner], grads[:, inner:], hidden).run()
    return grads, hidden


def _grad_x(grad_gate_up: Tensor, gate_proj: Tensor, up_proj: Tensor, where: plan.Groups, like: Tensor) -> Tensor:
    inner = grad_gate_up.shape[1] // 2
    dx = like.new_empty(like.shape)
    plan.grad_x(grad_gate_up[:, :inner], grad_gate_up[:, inner:], gate_proj, up_proj, where, dx).run()
    return dx


def _grad_down(where: plan.Groups, dout: Tensor, hidden: Tensor, counts: Tensor, needed: bool) -> Tensor:
    if not needed:
        return dout.new_empty(0)
    out = dout.new_empty(counts.numel(), dout.shape[1], hidden.shape[1])
    plan.weight_grad(where, hidden, (dout, out)).run()
    return out


def _grad_gate_up(
    where: plan.Groups, x: Tensor, grad_gate_up: Tensor, counts: Tensor, packed: bool, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the gate and the up projection, in one launch if both are needed."""
    inner = grad_gate_up.shape[1] // 2
    first, second = _empty(x, counts, inner, packed, need_gate, need_up)
    outs = (first[:, :inner], first[:, inner:]) if packed and need_gate else (first, second)
    halves = grad_gate_up[:, :inner], grad_gate_up[:, inner:]
    pairs = [(half, out) for half, out in zip(halves, outs, strict=True) if out.numel()]
    if pairs:
        plan.weight_grad(where, x, *pairs).run()
    return first, second


def _empty(
    x: Tensor, counts: Tensor, inner: int, packed: bool, need_gate: bool, need_up: bool
) -> tuple[Tensor, Tensor]:
    """For the gradients of the gate and the up projection; what is not needed, and the second if packed, is empty."""
    shape = counts.numel(), inner, x.shape[1]
    if packed:
        return x.new_empty((shape[0], 2 * inner, shape[2]) if need_gate else 0), x.new_empty(0)
    return x.new_empty(shape if need_gate else 0), x.new_empty(shape if need_up else 0)


def _no_rows(
    x: Tensor, counts: Tensor, inner: int, packed: bool, need_gate: bool, need_up: bool, need_down: bool
) -> tuple[Tensor, Tensor, Tensor]:
    first, second = _empty(x, counts, inner, packed, need_gate, need_up)
    down = x.new_zeros((counts.numel(), x.shape[1], inner) if need_down else 0)
    return first.zero_(), second.zero_(), down


def two(gate_proj: Tensor, up_proj: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up projection, views of the packed one if there is no other."""
    if up_proj is not None:
        return gate_proj, up_proj
    inner = gate_proj.shape[1] // 2
    return gate_proj[:, :inner], gate_proj[:, inner:]


def groups(counts: Tensor, rows: int) -> plan.Groups:
    """Where the experts' rows are. Counts that cannot be are an error of the device, noticed when the host waits."""
    where = plan.empty_groups(counts, rows)
    plan.groups(counts, rows, where).run()
    torch._assert_async(where.valid, _BAD_COUNTS)
    return where
