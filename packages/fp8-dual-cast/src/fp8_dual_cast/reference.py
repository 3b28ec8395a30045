"""The definition of every operator of this package, in plain PyTorch: what a CPU runs and the oracle of the tests."""

import torch
from hopper_kernels import fp8
from torch import Tensor


def dual_cast(
    x: Tensor,
    use_ue8m0: bool = False,
    cos_sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    head_dim: int = 0,
    inverse: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both casts of x (T, C) bf16, after the rotation if a table is given.

    Arguments and results are those of the operator `fp8_dual_cast::dual_cast`: `head_dim` 0 means none, positions have
    shape (T,), and the scales come as their contiguous storages (C / 128, align(T, 4)) and (ceil(T / 128), C).
    """
    v = x if cos_sin_cache is None else rotate(x, cos_sin_cache, position_ids, head_dim, inverse)
    return *row_cast(v, use_ue8m0), *column_cast(v, use_ue8m0)


def row_cast(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """q (T, C) and the storage (C / 128, align(T, 4)) of its scales: the recipe `hopper_kernels.fp8.PER_TOKEN`."""
    q, sf = fp8.per_token(x, ue8m0=use_ue8m0)
    storage = fp8.row_scales_like(x.shape[0], x.shape[1], x.device).zero_()
    fp8.row_scales_view(storage, x.shape[0]).copy_(sf)
    return q, storage


def column_cast(x: Tensor, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """q_t (C, align(T, 128)) and the storage (ceil(T / 128), C) of its scales: the recipe PER_TOKEN_TRANSPOSED."""
    q_t, sf_t = fp8.per_token_transposed(x, ue8m0=use_ue8m0)
    return q_t, sf_t.t()


def rotate(x: Tensor, cos_sin_cache: Tensor, position_ids: Tensor, head_dim: int, inverse: bool = True) -> Tensor:
    """Interleaved RoPE of the last channels of each head, or its transpose with `inverse`; a new bf16 tensor.

    x (T, C) bf16; table (max_pos, R) fp32, R / 2 cosines then R / 2 sines; positions (T,); `head_dim` divides C. With
    (a, b) a pair of neighbouring channels among the last R of a head, c and s its cosine and sine (s negated for the
    transpose):  y_a = fma(a, c, -(b s)),  y_b = fma(a, s, b c),  each product in brackets rounded to fp32, each
    result rounded to fp32 and then to bf16. This placement is vLLM's and prime-rl's newest kernel's; others differ by
    a bf16 ulp in about 2e-5 of the values. A position outside the table raises IndexError on a CPU.
    """
    rope_dim = cos_sin_cache.shape[1]
    tokens, channels = x.shape
    cosine, sine = cos_sin_cache.index_select(0, position_ids).unsqueeze(1).split(rope_dim // 2, dim=-1)
    if inverse:
        sine = -sine
    heads = x.reshape(tokens, channels // head_dim, head_dim)
    a, b = heads[..., head_dim - rope_dim :].float().unflatten(-1, (rope_dim // 2, 2)).unbind(-1)
    y_a = _fma(a, cosine, -(b * sine))
    y_b = _fma(a, sine, b * cosine)
    out = heads.clone(memory_format=torch.contiguous_format)
    out[..., head_dim - rope_dim :] = torch.stack((y_a, y_b), dim=-1).flatten(-2).bfloat16()
    return out.reshape(tokens, channels)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """RN(a * b + c) for fp32 operands of which a holds bf16 values, so that the product is exact in float64.

    The float64 sum is rounded to odd before it is rounded to fp32: without that, a sum just beside the middle of two
    fp32 numbers would be rounded twice and land on the wrong one (Boldo and Melquiond, "When double rounding is odd").
    """
    product = a.double() * b.double()
    c = c.double()
    total = product + c
    other = total - product
    rest = (product - (total - other)) + (c - other)  # the exact error of the sum (Knuth's two-sum)
    even = (total.view(torch.int64) & 1) == 0
    towards = torch.where(rest > 0, torch.inf, -torch.inf)
    odd = torch.where(even & (rest != 0) & total.isfinite() & rest.isfinite(), torch.nextafter(total, towards), total)
    return odd.float()
