"""Public functions: argument checks, and the operators behind them, which are in `operators.py`."""

import torch
from torch import Tensor

from moe_experts import arguments, operators
from moe_experts.fp8 import ops as fp8_ops


def moe_experts(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    fp8: bool = False,
) -> Tensor:
    """The MLPs of one rank's experts, on rows that are grouped by expert.

    x: (M, H) bf16, contiguous; M may be 0.
    gate_proj, up_proj: (E, I, H) bf16; with up_proj None, gate_proj holds both, (E, 2I, H), gate rows first. Rows must
        be contiguous and follow one another; experts may be any number of whole rows apart. So the halves of a packed
        weight and slices of experts are read in place, and a transposed weight is refused.
    down_proj: (E, H, I) bf16, contiguous.
    num_tokens_per_expert: (E,) int32 or int64: expert e owns the n_e rows that follow those of the experts before it.
        Any numbers whose sum is at most M, also 0; see `TOKEN_GROUP_ALIGNMENT`.
    swiglu_limit: above 0; inf for no clamping.
    fp8: whether the products are of e4m3 numbers, see below.
    H and I are multiples of 8, with fp8 of 128 and at most 16384 and 8192. All tensors are on one device, at addresses
    that are multiples of 16 bytes. None is modified or copied.

    Returns out (M, H) bf16. With an expert's rows X, weights Wg, Wu, Wd and l = swiglu_limit,
        G = X Wg^T,  U = X Wu^T,  h = silu(min(G, l)) * min(max(U, -l), l),  out = h Wd^T
    where each sum is fp32 and G, U, h and out are rounded to bf16 once. Rows past the last group are +0, and what x
    holds there is not read. NaN and Inf stay in their row and, in the gradients, in their expert's weights.

    With fp8 the operands of the products are e4m3 numbers with fp32 scales, RN(max(amax, floor) / 448). A scale is that
    of 128 channels of a row or of a block of 128 x 128 of a weight, and in the weights' gradients of 128 rows of a
    channel, counted from the expert's first. h and the gradients of G and U are quantised from fp32 instead of being
    rounded to bf16. Each call quantises the weights; `moe_experts_fp8_quantize_weights` does it for many calls. Sums
    are fp32 of blocks of 128 products, which the tensor cores add up with about 14 bits.

    Differentiable in x and the weights; only the gradients that are asked for are computed. A clamp's bound itself has
    a gradient, as with torch.clamp before 2.14. The gradient of x is 0 past the last group, those of the weights of
    an expert without rows are 0. `forward` and `backward` of `reference` and, with fp8, of `fp8.reference` are the
    exact definitions. Kept for the backward: the inputs, and G and U, 4 I bytes a row; with fp8, if a gradient can be
    asked for, none of the inputs, but G and U, x in FP8, H bytes a row of `padded_rows`, and the weights in FP8.
    Bitwise repeatable; a row's results do not depend on other rows. Second-order gradients raise RuntimeError. Autocast
    changes nothing, and converts nothing.

    Raises TypeError or ValueError that names the argument before anything is launched, and
    `hopper_kernels.KernelUnavailable` on a CUDA device that is not SM90 or with a Triton or a PyTorch that the kernels
    cannot be built with. CPU tensors, and CUDA tensors inside `hopper_kernels.reference()`, get the definition, in the
    backward too. Group sizes that are negative or add up to more than M are a ValueError on a CPU, and an assertion of
    the device on a GPU, after which its CUDA context is unusable; with MOE_EXPERTS_CHECK=1 in the environment each call
    waits for the GPU and raises the ValueError there too.

    Source: the experts of deepseek-ai/DeepSeek-V4.1-Flash, with the arguments of the function of this name in
    PrimeIntellect-ai's trainers. Scores of the routing are applied by the caller, to out.
    """
    arguments.boolean("fp8", fp8)
    arguments.experts("x", x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit, fp8)
    arguments.contiguous(x=x)
    weights = gate_proj, up_proj, down_proj
    if fp8:
        return fp8_ops.forward(x, *weights, num_tokens_per_expert, swiglu_limit)
    return torch.ops.moe_experts.moe_experts_forward(x, *weights, num_tokens_per_expert, swiglu_limit)[0]


def moe_experts_forward(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_experts`, with what its backward reads: out (M, H), and gate = G and up = U, (M, I) bf16 each.

    For callers that schedule the backward themselves. out is differentiable as in `moe_experts`, gate and up are not.
    Rows of gate and up past the last group are unspecified.
    """
    arguments.experts("x", x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit)
    arguments.contiguous(x=x)
    weights = gate_proj, up_proj, down_proj
    out, gate, up, _ = torch.ops.moe_experts.moe_experts_forward(x, *weights, num_tokens_per_expert, swiglu_limit)
    return out, gate, up


def moe_experts_backward(
    dout: Tensor,
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    gate: Tensor,
    up: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All gradients of `moe_experts`, from that of its result.

    dout: (M, H) bf16, any strides; copied if it is not contiguous or not at a multiple of 16 bytes.
    gate, up: what `moe_experts_forward` returned; the others as there.
    Returns bf16, contiguous: dx (M, H), dw1 (E, I, H), dw3 (E, I, H), dw2 (E, H, I), of x, gate_proj, up_proj and
    down_proj; for packed weights dw1 is (E, 2I, H) and dw3 empty. The very bits of autograd, and of the two halves
    `moe_experts_backward_data` and `moe_experts_weight_grad`.
    """
    operands = dout, x, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit
    operators.check_backward(*operands)
    return torch.ops.moe_experts.moe_experts_backward(*operands)


def moe_experts_backward_data(
    dout: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    gate: Tensor,
    up: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """First half of `moe_experts_backward`: dx, and what the second half multiplies.

    Arguments as there. Returns bf16, contiguous: dx (M, H), dgate_dup (M, 2I), the gradients of G and then of U, and
    h (M, I). When it returns, dx is complete on the current stream, and nothing of the weights' gradients is launched.
    Rows of dgate_dup and h past the last group are unspecified.
    """
    operands = dout, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit
    operators.check_backward_data(*operands)
    return torch.ops.moe_experts.moe_experts_backward_data(*operands)


def moe_experts_weight_grad(
    dout: Tensor, x: Tensor, num_tokens_per_expert: Tensor, dgate_dup: Tensor, h: Tensor, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Second half of `moe_experts_backward`: dw1, dw3, dw2 as there, dw1 of both weights and dw3 empty if `packed`.

    dout, x and num_tokens_per_expert are those of the first half, dgate_dup and h its results.
    """
    arguments.weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h)
    arguments.boolean("packed", packed)
    return torch.ops.moe_experts.moe_experts_weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h, packed)
