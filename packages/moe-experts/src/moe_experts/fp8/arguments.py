"""Checks of the arguments of the FP8 operators. What of them holds while tracing is said in `moe_experts.arguments`."""

from itertools import pairwise

import torch
from hopper_kernels import checks
from torch import Tensor

from moe_experts import arguments
from moe_experts.fp8 import layout
from moe_experts.fp8.layout import CODES

PITCH_MULTIPLE = 4  # 16 bytes of fp32: what the kernels' vector accesses and TMA ask for


def weights(gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor) -> None:
    """Checks the weights that are to be quantised."""
    _weights(gate_proj, up_proj, down_proj)
    arguments.layouts_of_weights(gate_proj, up_proj, down_proj)


@checks.remembered
def _weights(gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor) -> None:
    found = {"gate_proj": gate_proj, "down_proj": down_proj}
    if up_proj is not None:
        found["up_proj"] = up_proj
    for name, weight in found.items():
        checks.tensor(name, weight)
    for name, weight in found.items():
        checks.ndim(name, weight, 3)
        checks.dtype(name, weight, torch.bfloat16)
    experts, hidden, inner = down_proj.shape
    checks.in_range("down_proj: its number of experts E", experts, 1)
    arguments.sizes(hidden, inner, True)
    arguments.shapes_of_weights(gate_proj, up_proj, down_proj, experts, hidden)
    checks.same_device(**found)


def forward_quantized(
    x: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    w13_q: Tensor,
    w13_sf: Tensor,
    w2_q: Tensor,
    w2_sf: Tensor,
) -> None:
    """Checks the arguments of `moe_experts_fp8_forward_quantized`."""
    _forward_quantized(x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf)
    arguments.contiguous(x=x, w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf)


@checks.remembered
def _forward_quantized(x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf) -> None:
    given = {"x": x, "w13_q": w13_q, "w13_sf": w13_sf, "w2_q": w2_q, "w2_sf": w2_sf}
    experts = _common(given, num_tokens_per_expert)
    _rows("x", x)
    checks.ndim("w2_q", w2_q, 3)
    hidden, inner = x.shape[1], w2_q.shape[2]
    arguments.sizes(hidden, inner, True)
    _blocks("w13_q", w13_q, "w13_sf", w13_sf, (experts, 2 * inner, hidden))
    _blocks("w2_q", w2_q, "w2_sf", w2_sf, (experts, hidden, inner))
    arguments.limit(swiglu_limit)


def backward_data(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
) -> None:
    """Checks the arguments of `moe_experts_fp8_backward_data`. dout may have any strides."""
    _backward_data(dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit)
    arguments.contiguous(gate_up=gate_up, w13_t=w13_t, w13_t_sf=w13_t_sf, w2_t=w2_t, w2_t_sf=w2_t_sf)


@checks.remembered
def _backward_data(dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit) -> None:
    given = {"dout": dout, "gate_up": gate_up}
    given |= {"w13_t": w13_t, "w13_t_sf": w13_t_sf, "w2_t": w2_t, "w2_t_sf": w2_t_sf}
    experts = _common(given, num_tokens_per_expert)
    _rows("dout", dout)
    checks.ndim("w2_t", w2_t, 3)
    hidden, inner = dout.shape[1], w2_t.shape[1]
    arguments.sizes(hidden, inner, True)
    _blocks("w13_t", w13_t, "w13_t_sf", w13_t_sf, (experts, hidden, 2 * inner))
    _blocks("w2_t", w2_t, "w2_t_sf", w2_t_sf, (experts, inner, hidden))
    checks.dtype("gate_up", gate_up, torch.bfloat16)
    checks.shape("gate_up", gate_up, (layout.padded_rows(dout.shape[0], experts), 2 * inner))
    arguments.limit(swiglu_limit)


def backward(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
    packed: bool,
) -> None:
    """Checks the arguments of `moe_experts_fp8_backward`."""
    kept = gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf
    _joint(dout, num_tokens_per_expert, *kept, swiglu_limit)
    arguments.boolean("packed", packed)


def backward_accumulate(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
    dw13: Tensor,
    dw2: Tensor,
    accumulate: bool = True,
) -> None:
    """Checks the arguments of `moe_experts_fp8_backward_accumulate`."""
    kept = gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf
    _joint(dout, num_tokens_per_expert, *kept, swiglu_limit)
    experts, inner, hidden = w2_t.shape
    _sums(dw13, dw2, dout.device, experts, hidden, inner)
    arguments.boolean("accumulate", accumulate)


def _joint(dout, num_tokens_per_expert, gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit) -> None:
    checks.tensor("x_t", x_t)
    checks.tensor("x_t_sf", x_t_sf)
    backward_data(dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit)
    _kept_rows(dout, num_tokens_per_expert, x_t, x_t_sf)
    arguments.contiguous(x_t=x_t, x_t_sf=x_t_sf)


@checks.remembered
def _kept_rows(dout, num_tokens_per_expert, x_t, x_t_sf) -> None:
    padded = layout.padded_rows(dout.shape[0], num_tokens_per_expert.shape[0])
    _columns("x_t", x_t, x_t_sf, padded, dout.shape[1])
    checks.same_device(dout=dout, x_t=x_t, x_t_sf=x_t_sf)


def weight_grad_accumulate(
    num_tokens_per_expert: Tensor,
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
    accumulate: bool = True,
) -> None:
    """Checks the arguments of `moe_experts_fp8_weight_grad_accumulate`."""
    operands = dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf
    _weight_grad(num_tokens_per_expert, *operands, num_rows)
    arguments.contiguous(**named_columns(*operands))
    _sums(dw13, dw2, x_t.device, num_tokens_per_expert.shape[0], x_t_sf.shape[1], h_t_sf.shape[1])
    arguments.boolean("accumulate", accumulate)


@checks.remembered
def _weight_grad(num_tokens_per_expert, dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf, num_rows) -> None:
    given = named_columns(dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf)
    experts = _common(given, num_tokens_per_expert)
    checks.integer("num_rows", num_rows, 0)
    checks.ndim("x_t_sf", x_t_sf, 2)
    checks.ndim("h_t_sf", h_t_sf, 2)
    hidden, inner = x_t_sf.shape[1], h_t_sf.shape[1]
    arguments.sizes(hidden, inner, True)
    padded = layout.padded_rows(num_rows, experts)
    _columns("dout_t", dout_t, dout_t_sf, padded, hidden)
    _columns("h_t", h_t, h_t_sf, padded, inner)
    _columns("dgu_t", dgu_t, dgu_t_sf, padded, 2 * inner)
    _columns("x_t", x_t, x_t_sf, padded, hidden)


def _sums(dw13: Tensor, dw2: Tensor, device: torch.device, experts: int, hidden: int, inner: int) -> None:
    """Checks the buffers of the weights' gradients."""
    for name, t, shape in (("dw13", dw13, (experts, 2 * inner, hidden)), ("dw2", dw2, (experts, hidden, inner))):
        checks.tensor(name, t)
        checks.dtype(name, t, torch.float32)
        checks.shape(name, t, shape)
        arguments.on_device(name, t, device)
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(f"{name} must not require grad: it is changed in place")
        _pitches(name, t)


def _pitches(name: str, t: Tensor) -> None:
    experts, rows, channels = t.shape
    pitch, row, channel = t.stride()
    apart = row >= channels and row % PITCH_MULTIPLE == 0
    if experts > 1:
        apart = apart and pitch >= (rows - 1) * row + channels and pitch % PITCH_MULTIPLE == 0
    if channel != 1 or not apart:
        raise ValueError(
            f"{name} must have contiguous channels, and rows and experts that do not overlap and are multiples of"
            f" {PITCH_MULTIPLE} elements apart, got shape {tuple(t.shape)} with strides {t.stride()}"
        )


def memory_of_sums(dw13: Tensor, dw2: Tensor) -> None:
    """The buffers must have their memory, aligned, and share none. Real tensors only.

    Pitched experts of one may lie between those of the other, as in a buffer of all weights of each expert.
    """
    arguments.memory(dw13=dw13, dw2=dw2)
    (first, end_of_first), (second, end_of_second) = _span(dw13), _span(dw2)
    if end_of_first <= second or end_of_second <= first:
        return
    spans = sorted(_span(expert.unsqueeze(0)) for t in (dw13, dw2) for expert in t.detach().unbind())
    if any(later < end for (_, end), (later, _) in pairwise(spans)):
        raise ValueError("dw13 and dw2 must not overlap, got buffers that share memory")


def _span(t: Tensor) -> tuple[int, int]:
    """The first address of experts' rows, and the one past the last."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + t.element_size() * (last + 1)


def named_kept(gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf) -> dict[str, Tensor]:
    """What a forward keeps, by the names that errors call it."""
    rows = {"gate_up": gate_up, "x_t": x_t, "x_t_sf": x_t_sf}
    return rows | {"w13_t": w13_t, "w13_t_sf": w13_t_sf, "w2_t": w2_t, "w2_t_sf": w2_t_sf}


def named_columns(dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf) -> dict[str, Tensor]:
    """The operands of the weights' gradients, by the names that errors call them."""
    found = {"dout_t": dout_t, "dout_t_sf": dout_t_sf, "h_t": h_t, "h_t_sf": h_t_sf}
    return found | {"dgu_t": dgu_t, "dgu_t_sf": dgu_t_sf, "x_t": x_t, "x_t_sf": x_t_sf}


def _common(given: dict[str, Tensor], num_tokens_per_expert: Tensor) -> int:
    """All must be tensors on one device; the number of experts."""
    for name, value in {**given, "num_tokens_per_expert": num_tokens_per_expert}.items():
        checks.tensor(name, value)
    experts = arguments.number_of_experts(num_tokens_per_expert)
    checks.same_device(**given, num_tokens_per_expert=num_tokens_per_expert)
    return experts


def _rows(name: str, t: Tensor) -> None:
    checks.ndim(name, t, 2)
    checks.dtype(name, t, torch.bfloat16)


def _blocks(name: str, codes: Tensor, scales_name: str, scales: Tensor, shape: tuple[int, int, int]) -> None:
    """A weight of this shape in FP8, with a scale for each block."""
    checks.dtype(name, codes, CODES)
    checks.shape(name, codes, shape)
    checks.dtype(scales_name, scales, torch.float32)
    checks.shape(scales_name, scales, layout.scales_of_blocks(shape))


def _columns(name: str, codes: Tensor, scales: Tensor, padded: int, channels: int) -> None:
    """A transposed operand with so many padded rows and channels; its scales are called `name` with _sf."""
    shape, shape_of_scales = layout.transposed_shapes(padded, channels)
    checks.dtype(name, codes, CODES)
    checks.shape(name, codes, shape)
    checks.dtype(f"{name}_sf", scales, torch.float32)
    checks.shape(f"{name}_sf", scales, shape_of_scales)
