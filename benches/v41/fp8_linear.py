"""A linear layer with FP8 products, as DeepSeek-V3's report describes them, around a cast that can be chosen.

Activations and gradients have a scale for each row's 128 channels, or for each column's 128 tokens where tokens are
summed over, weights one for each block of 128 x 128. On a GPU the products are cuBLAS's, by
`torch.nn.functional.scaled_mm`; on a CPU numbers are taken back to fp32 and multiplied.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from hopper_kernels import fp8
from torch import Tensor
from torch.nn import functional

Cast = Callable[[Tensor, Tensor | None, Tensor | None, int], tuple[Tensor, Tensor, Tensor, Tensor]]
"""(x, table, positions, head_dim) -> what `fp8_dual_cast` returns; with a table, x is rotated back first."""


class FP8Linear(torch.autograd.Function):
    """x (T, C) bf16, weight (N, C) bf16 -> (T, N) bf16, C and N multiples of 128.

    With a table the caller rotates the result's heads, and says so for the gradient: what arrives is that of the
    rotated result, and `cast` takes the rotation back while casting.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, cast: Cast, table: Tensor | None, positions: Tensor | None, head_dim: int
    ) -> Tensor:
        q, sf, q_t, sf_t = cast(x, None, None, 0)
        w, w_sf = fp8.per_block(weight, floor_on="scale")
        ctx.save_for_backward(q_t, sf_t, w, w_sf, table, positions)
        ctx.cast, ctx.head_dim = cast, head_dim
        return rows_by_blocks(q, sf, w, w_sf)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x_t, x_sf, w, w_sf, table, positions = ctx.saved_tensors
        q, sf, q_t, sf_t = ctx.cast(grad, table, positions, ctx.head_dim)
        grad_x = rows_by_blocks(q, sf, w.t().contiguous(), w_sf.t())
        return grad_x, columns_by_columns(q_t, sf_t, x_t, x_sf), None, None, None, None


def plain_cast(
    x: Tensor, table: Tensor | None, positions: Tensor | None, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both casts by PyTorch's operations, with the bytes of `fp8_dual_cast`."""
    if table is not None:
        from fp8_dual_cast import reference

        x = reference.rotate(x, table, positions, head_dim)
    return *fp8.per_token(x), *fp8.per_token_transposed(x)


def rows_by_blocks(q: Tensor, sf: Tensor, w: Tensor, w_sf: Tensor) -> Tensor:
    """(M, K) times the transpose of (N, K), of which sf (M, K / 128) and w_sf (N / 128, K / 128) are the scales."""
    if not q.is_cuda:
        return (fp8.dequantize(q, sf) @ fp8.dequantize(w, w_sf, (fp8.BLOCK, fp8.BLOCK)).t()).bfloat16()
    blocks = w_sf.shape[1]
    padded = functional.pad(w_sf, (0, fp8.align(blocks, 4) - blocks)).contiguous()  # as cuBLAS reads them
    kinds = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    return functional.scaled_mm(q, w.t(), sf, kinds[0], padded.t(), kinds[1], output_dtype=torch.bfloat16)


def columns_by_columns(a_t: Tensor, a_sf: Tensor, b_t: Tensor, b_sf: Tensor) -> Tensor:
    """(M, K) times the transpose of (N, K), with scales (M, K / 128) and (N, K / 128)."""
    if not a_t.is_cuda:
        return (fp8.dequantize(a_t, a_sf) @ fp8.dequantize(b_t, b_sf).t()).bfloat16()
    kind = functional.ScalingType.BlockWise1x128
    return functional.scaled_mm(a_t, b_t.t(), a_sf, kind, b_sf, kind, output_dtype=torch.bfloat16)
