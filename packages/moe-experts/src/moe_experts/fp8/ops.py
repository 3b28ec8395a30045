"""The public functions of the FP8 path: argument checks, and the operators behind them, which are in `operators.py`."""

import torch
from hopper_kernels import registry
from torch import Tensor

from moe_experts.fp8 import arguments as fp8_arguments
from moe_experts.fp8 import operators  # noqa: F401


def fp8_unavailable_reason() -> str | None:
    """Why the FP8 kernels cannot run on the current CUDA device, or None if they can. For set-up time.

    What `hopper_kernels.unavailable_reason("moe_experts")` has: nothing else is needed. A CPU computes the definition
    whatever this says.
    """
    return registry.unavailable_reason("moe_experts")


def forward(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
) -> Tensor:
    """`moe_experts` with fp8=True, its arguments checked: keeps what a backward needs if there can be one."""
    operands = x, gate_proj, up_proj, down_proj
    save = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands)
    return torch.ops.moe_experts.moe_experts_fp8_forward(*operands, num_tokens_per_expert, swiglu_limit, save)[0]


def moe_experts_fp8_quantize_weights(gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor) -> list[Tensor]:
    """The weights in FP8, for as many forwards and backwards as see these weights.

    gate_proj, up_proj, down_proj: as in `moe_experts` with fp8=True.
    Returns, contiguous:
        w13_q   (E, 2I, H)  e4m3fn      w13_sf    (E, 2I / 128, H / 128)  fp32
        w2_q    (E, H, I)   e4m3fn      w2_sf     (E, H / 128, I / 128)   fp32
        w13_t   (E, H, 2I)  e4m3fn      w13_t_sf  (E, H / 128, 2I / 128)  fp32
        w2_t    (E, I, H)   e4m3fn      w2_t_sf   (E, I / 128, H / 128)   fp32
    of [gate; up] and down, and the exact transposes of these. A block of 128 x 128 shares a scale,
    RN(max(amax, 1e-4) / 448), a code is e4m3(RN(w / scale)); NaN makes its block's scale NaN. The bytes are the same
    for packed and for separate weights. A snapshot: it shares no memory with the weights, and no gradient flows.

    Raises as `moe_experts`.
    """
    fp8_arguments.weights(gate_proj, up_proj, down_proj)
    return list(torch.ops.moe_experts.moe_experts_fp8_quantize_weights(gate_proj, up_proj, down_proj))


def moe_experts_fp8_forward_quantized(
    x: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    w13_q: Tensor,
    w13_sf: Tensor,
    w2_q: Tensor,
    w2_sf: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`moe_experts` with fp8=True from weights in FP8, with what the backward reads.

    x, num_tokens_per_expert, swiglu_limit: as there. The weights: the first four of `moe_experts_fp8_quantize_weights`.
    Returns, with Mp = `padded_rows(M, E)`: out (M, H) bf16, the very bits of `moe_experts`; gate_up (Mp, 2I) bf16,
    G and then U in padded rows; x_t (Mp H,) e4m3fn and x_t_sf (Mp / 128, H) fp32, x quantised along its columns, in
    panels. `moe_experts.fp8.layout` says what padded rows and panels are.
    It has no derivative: the backward of a result that requires grad raises RuntimeError. Raises as `moe_experts`.
    """
    operands = x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf
    fp8_arguments.forward_quantized(*operands)
    return torch.ops.moe_experts.moe_experts_fp8_forward_quantized(*operands)


def moe_experts_fp8_backward(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All gradients of `moe_experts` with fp8=True, from that of its result.

    dout: (M, H) bf16, any strides; copied if it is not contiguous or not at a multiple of 16 bytes.
    gate_up, x_t, x_t_sf: of `moe_experts_fp8_forward_quantized`, for the same num_tokens_per_expert and limit.
    w13_t, w13_t_sf, w2_t, w2_t_sf: the last four of `moe_experts_fp8_quantize_weights`.
    Returns bf16, contiguous: dx (M, H), dw1 (E, I, H), dw3 (E, I, H), dw2 (E, H, I), of x, gate_proj, up_proj and
    down_proj; if `packed` dw1 is (E, 2I, H) and dw3 empty. The very bits of autograd. Raises as `moe_experts`, also
    for kept tensors of another M.
    """
    operands = dout, num_tokens_per_expert, gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit, packed
    fp8_arguments.backward(*operands)
    return torch.ops.moe_experts.moe_experts_fp8_backward(*operands)


def moe_experts_fp8_backward_accumulate(
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
) -> Tensor:
    """`moe_experts_fp8_backward` with the gradients of the weights added to fp32 buffers: dx (M, H).

    dw13: (E, 2I, H) fp32, of gate and then of up; dw2: (E, H, I) fp32. Changed in place. Channels are contiguous; rows
        and experts may be any multiples of 4 elements apart, so that parts of a flat buffer and pitched views will do,
        as long as no expert's rows reach into another's or into the other buffer. What lies between is not touched.
    accumulate: True adds, new = RN(old + dW) with dW the sum over the expert's rows in fp32, which rounded to bf16 is
        the gradient of `moe_experts_fp8_backward`; on a GPU denormal numbers may count as zeros. An expert without rows
        keeps its bytes. False overwrites with dW, and with zeros for such an expert.
    The others are as there.
    """
    operands = dout, num_tokens_per_expert, gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit
    fp8_arguments.backward_accumulate(*operands, dw13, dw2, accumulate)
    return torch.ops.moe_experts.moe_experts_fp8_backward_accumulate(*operands, dw13, dw2, accumulate)


def moe_experts_fp8_backward_data(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """First half of `moe_experts_fp8_backward`: dx, and what the second half multiplies.

    Arguments as there. Returns dx (M, H) bf16, and codes and scales, quantised along the columns and in panels as x_t,
        dout_t (Mp H,) and dout_t_sf (Mp / 128, H)     of dout
        h_t    (Mp I,) and h_t_sf    (Mp / 128, I)     of h
        dgu_t (Mp 2I,) and dgu_t_sf  (Mp / 128, 2I)    of the gradients of G and then of U
    When it returns, dx is complete on the current stream, and nothing of the weights' gradients is launched.
    """
    operands = dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit
    fp8_arguments.backward_data(*operands)
    return torch.ops.moe_experts.moe_experts_fp8_backward_data(*operands)


def moe_experts_fp8_weight_grad_accumulate(
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
    """Second half of `moe_experts_fp8_backward_accumulate`: adds to dw13 and dw2, or overwrites them, as there.

    num_rows: M. x_t and x_t_sf are those of the forward, the other operands results of the first half.
    """
    columns = dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf
    operands = num_tokens_per_expert, *columns, num_rows, dw13, dw2, accumulate
    fp8_arguments.weight_grad_accumulate(*operands)
    torch.ops.moe_experts.moe_experts_fp8_weight_grad_accumulate(*operands)
