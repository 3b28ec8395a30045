"""Host side of the kernels: allocates the results and the workspace, and launches. Arguments are checked before."""

import torch
from torch import Tensor

from moe_experts import plan
from moe_experts.plan import variants

_BAD_COUNTS = "num_tokens_per_expert must not be negative, and must add up to at most the rows of x"

__all__ = ["backward_data", "forward", "variants", "weight_grad"]


def forward(
    x: Tensor, gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor, counts: Tensor, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """out (M, H), gate and up (M, I); up_proj None: gate_proj is both, (E, 2I, H).

    Rows after the last expert are zeros in out, and not written in gate and up. Workspace: (M, I) bf16, and 16 bytes a
    tile of 128 rows.
    """
    rows = x.shape[0]
    inner = down_proj.shape[2]
    out, gate, up = torch.empty_like(x), x.new_empty(rows, inner), x.new_empty(rows, inner)
    if rows == 0:
        return out, gate, up
    gate_proj, up_proj = _two(gate_proj, up_proj)
    with torch.cuda.device_of(x):
        where = _groups(counts, rows)
        hidden = torch.empty_like(gate)
        plan.gate_up(x, gate_proj, up_proj, limit, where, gate, up, hidden).run()
        plan.down(hidden, down_proj, where, out).run()
    return out, gate, up


def backward_data(
    dout: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    counts: Tensor,
    gate: Tensor,
    up: Tensor,
    limit: float,
    need_x: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """dx (M, H) or None, the gradients of gate and up side by side (M, 2I), and the SwiGLU (M, I)."""
    rows, inner = gate.shape
    grad_gate_up, hidden = gate.new_empty(rows, 2 * inner), torch.empty_like(gate)
    dx = torch.empty_like(dout) if need_x else None
    if rows == 0:
        return dx, grad_gate_up, hidden
    gate_proj, up_proj = _two(gate_proj, up_proj)
    grad_gate, grad_up = grad_gate_up[:, :inner], grad_gate_up[:, inner:]
    with torch.cuda.device_of(dout):
        where = _groups(counts, rows)
        plan.grad_hidden(dout, down_proj, gate, up, limit, where, grad_gate, grad_up, hidden).run()
        if dx is not None:
            plan.grad_x(grad_gate, grad_up, gate_proj, up_proj, where, dx).run()
    return dx, grad_gate_up, hidden


def weight_grad(
    dout: Tensor,
    x: Tensor,
    counts: Tensor,
    grad_gate_up: Tensor,
    hidden: Tensor,
    packed: bool,
    need_gate: bool,
    need_up: bool,
    need_down: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the projections: gate and up (E, I, H), or both (E, 2I, H) and an empty tensor; down (E, H, I).

    What is not needed is an empty tensor.
    """
    experts, (rows, inner), channels = counts.numel(), hidden.shape, x.shape[1]
    need_up = need_up and not packed
    first = x.new_empty(experts, 2 * inner if packed else inner, channels) if need_gate else x.new_empty(0)
    second = x.new_empty(experts, inner, channels) if need_up else x.new_empty(0)
    down = x.new_empty(experts, channels, inner) if need_down else x.new_empty(0)
    if rows == 0:
        return first.zero_(), second.zero_(), down.zero_()
    with torch.cuda.device_of(x):
        where = _groups(counts, rows)
        if need_down:
            plan.weight_grad(where, hidden, (dout, down)).run()
        halves = grad_gate_up[:, :inner], grad_gate_up[:, inner:]
        outs = (first[:, :inner], first[:, inner:]) if packed and need_gate else (first, second)
        wanted = (need_gate, need_gate if packed else need_up)
        pairs = [pair for pair, want in zip(zip(halves, outs, strict=True), wanted, strict=True) if want]
        if pairs:
            plan.weight_grad(where, x, *pairs).run()
    return first, second, down


def _two(gate_proj: Tensor, up_proj: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up projection, views of the packed one if there is no other."""
    if up_proj is not None:
        return gate_proj, up_proj
    inner = gate_proj.shape[1] // 2
    return gate_proj[:, :inner], gate_proj[:, inner:]


def _groups(counts: Tensor, rows: int) -> plan.Groups:
    """Where the experts' rows are. Counts that cannot be are an error of the device, noticed when the host waits."""
    where = plan.empty_groups(counts, rows)
    plan.groups(counts, rows, where).run()
    torch._assert_async(where.valid, _BAD_COUNTS)
    return where
