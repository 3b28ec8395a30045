"""The public functions and their operator: argument checks, schema, fake, and which implementation runs."""

import torch
from hopper_kernels import derivatives, dispatch
from torch import Tensor

from dsa_sparse_attn_bwd import arguments, launch, reference

NAMESPACE = "dsa_sparse_attn_bwd"
OPERATOR = "dsa_sparse_attn_backward"


def dsa_sparse_attn_backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of DeepSeek-V4.1's sparse attention: each query has its own list of rows, which are keys and values.

    grad_out: (1, S, H, 512) bf16, gradient of the output; H is 16, 32, 64 or 128.
    q: (1, S, H, 512) bf16, queries. S may be 0.
    kv: (1, N, 1, 512) bf16, rows that serve as keys and values, shared by the heads. N may be 0.
    out: (1, S, H, 512) bf16, what the forward returned, with the sinks in it.
    lse: (1, S, H) fp32, natural logarithm of the sum of exp(sm_scale q . k) over the query's slots, without the sink,
        as FlashMLA's forward returns it. Of a query without slots it is not looked at, nor are its other numbers.
    indices: (1, S, 1, K) int32 or int64, rows of kv in any order, any K. A number below 0 or not below N is an empty
        slot, wherever it stands. A row that is named m times counts m times.
    sinks: (H,) fp32, or any other float dtype; a logit of each head, not scaled. -inf is no sink, +inf takes all.
    sm_scale: finite, multiplies q . k.
    out_tail: None, or (1, S, H, R) bf16, R a multiple of 16 up to 512: the last R channels of the output, if those in
        `out` were overwritten since, as an inverse RoPE in place does. grad_out belongs to these.
    deterministic: add up the gradients of rows in one order always, so that all bits come back; on a GPU it takes
        longer, and more memory. On under `torch.use_deterministic_algorithms(True)` too.
    All tensors on one device, with any strides; what is not contiguous is copied. None is modified.

    With the row k_j of slot j, the output o of a query's head and its gradient g,
        p_j = exp(sm_scale q . k_j - L),  L = log(e^lse + e^sink),  delta = g . o,  ds_j = p_j (g . k_j - delta)
        dq = sm_scale sum_j ds_j k_j,  dsink = -sum over queries of e^(sink - L) delta
        dkv[i] = sum over slots that name row i, and heads, of sm_scale ds_j q + p_j g
    `reference.backward` is the exact definition. Products are of bf16 numbers, p_j and sm_scale ds_j rounded once, with
    sums in fp32.

    Returns
        dq      (1, S, H, 512) bf16; exact zeros for a query without slots
        dkv     (1, N, 1, 512) bf16, summed in fp32 and rounded once; exact zeros for a row that no slot names
        dsinks  (H,) in the dtype of sinks
    New, contiguous tensors. dq and dsinks come back bit for bit; dkv, unless deterministic, but for the order in which
    fp32 numbers are added. A query's dq does not depend on other queries. NaN and Inf stay in a query's dq and in the
    rows that it names, and in dsinks. Autocast changes nothing. Nothing waits for the GPU.

    Raises TypeError or ValueError that names the argument before anything is launched, and
    `hopper_kernels.KernelUnavailable` on a CUDA device that is not SM90 or with a Triton or a PyTorch that the kernels
    cannot be built with. CPU tensors, and CUDA tensors inside `hopper_kernels.reference()`, get the definition, whose
    sums on a GPU are repeatable under `torch.use_deterministic_algorithms(True)` alone. Second-order gradients raise
    RuntimeError.

    `_opoverload` is the operator, whose schema has these names in this order.

    Source: the attention of deepseek-ai/DeepSeek-V4.1-Flash; lse as in deepseek-ai/FlashMLA; arguments as in
    PrimeIntellect-ai/prime-rl.
    """
    operands = (grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic)
    arguments.backward(*operands)
    return torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward(*operands)


def sparse_attn_backward_flat(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`dsa_sparse_attn_backward` without the dimensions of size 1, arguments in the order of cuDNN's SM90 function.

    q, out, grad_out (S, H, 512), kv (N, 512), lse (S, H), indices (S, K), out_tail (S, H, R); sinks (H,). Returns dq
    (S, H, 512), dkv (N, 512) and dsinks (H,): the same bits.
    """
    arguments.backward_flat(q, kv, out, grad_out, lse, indices, sinks, sm_scale, out_tail, deterministic)
    dq, dkv, dsinks = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward(
        grad_out[None],
        q[None],
        kv[None, :, None],
        out[None],
        lse[None],
        indices[None, :, None],
        sinks,
        sm_scale,
        None if out_tail is None else out_tail[None],
        deterministic,
    )
    return dq[0], dkv[0, :, 0], dsinks


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    f"{OPERATOR}(Tensor grad_out, Tensor q, Tensor kv, Tensor out, Tensor lse, Tensor indices, Tensor sinks,"
    " float sm_scale, Tensor? out_tail=None, bool deterministic=False) -> (Tensor dq, Tensor dkv, Tensor dsinks)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
dsa_sparse_attn_backward._opoverload = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward.default


def _backward(
    grad_out: Tensor,
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    sm_scale: float,
    out_tail: Tensor | None = None,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    arguments.backward(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic)
    tail = None if out_tail is None else out_tail[0]
    flat = (grad_out[0], q[0], kv[0, :, 0], out[0], lse[0], indices[0, :, 0], sinks, sm_scale, tail)
    if dispatch.use_kernel(NAMESPACE, q, OPERATOR):
        ordered = deterministic or torch.are_deterministic_algorithms_enabled()
        dq, dkv, dsinks = launch.backward(*flat, ordered)
    else:
        results = reference.backward(*flat)
        dq, dkv, dsinks = (t.to(like.dtype) for t, like in zip(results, (q, kv, sinks), strict=True))
    return dq[None], dkv[None, :, None], dsinks


for _key in ("CPU", "CUDA"):
    _library.impl(OPERATOR, _backward, _key)

derivatives.register(_library, NAMESPACE, {OPERATOR: _backward}, {})


@torch.library.register_fake(f"{NAMESPACE}::{OPERATOR}", lib=_library)
def _(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail=None, deterministic=False):
    arguments.backward(grad_out, q, kv, out, lse, indices, sinks, sm_scale, out_tail, deterministic)
    return q.new_empty(q.shape), kv.new_empty(kv.shape), sinks.new_empty(sinks.shape)
