"""The backward of sparse attention by cuDNN's frontend, which trainers call on Hopper."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

SLOTS = 128  # trainers give it a multiple of that many


class Arguments(NamedTuple):
    """The first arguments of `dsa_sparse_attn_bwd.sparse_attn_backward_flat` in its order, all contiguous.

    q, out, grad_out (S, H, 512) and kv (N, 512) bf16; lse (S, H) and sinks (H,) fp32; indices (S, K) int32.
    """

    q: Tensor
    kv: Tensor
    out: Tensor
    grad_out: Tensor
    lse: Tensor
    indices: Tensor
    sinks: Tensor
    sm_scale: float


Call = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Returns dq, dkv and dsinks."""


def cudnn(a: Arguments, compact: bool) -> Call:
    """`sparse_attention_backward_wrapper`, which allocates its results and workspace in the call.

    compact: the call moves each query's empty slots to its end first, and says how many the others are, so that none
    of the former is computed in vain. Without, it gets the slots as they are. Padding them is not in the call.
    """
    from cudnn.deepseek_sparse_attention import compactify_wrapper, sparse_attention_backward_wrapper

    missing = -a.indices.shape[1] % SLOTS
    padded = torch.nn.functional.pad(a.indices, (0, missing), value=-1)

    def call() -> tuple[Tensor, Tensor, Tensor]:
        indices, length = padded, None
        if compact:
            found = compactify_wrapper(padded)
            indices, length = found["indices"], found["topk_length"]
        grads = sparse_attention_backward_wrapper(
            a.q, a.kv, a.out, a.grad_out, a.lse, a.sinks, indices, softmax_scale=a.sm_scale, topk_length=length
        )
        return grads["dq"], grads["dkv"], grads["d_sink"]

    return call
