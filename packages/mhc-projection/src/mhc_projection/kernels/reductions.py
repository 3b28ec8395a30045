"""What comes before and after the projection's own kernels: sums of parts, in a fixed order, and q (Triton)."""

import triton
import triton.language as tl

LOGITS = tl.constexpr(32)  # of a token, padded with zeros


@triton.jit(do_not_specialize=["eps", "width", "tokens", "n", "splits"])
def finish_kernel(products, squares, mixes, rstd, eps, width, tokens, n, splits, TOKENS: tl.constexpr):
    """Adds the parts of the splits in their order: rstd = (mean square + eps)^(-1/2), mixes = product * rstd.

    The squares are scaled down, and so is width, the number of channels that they are the sums over.
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, LOGITS)
    in_t = t < tokens
    inside = (j < n)[:, None] & in_t[None, :]
    product = tl.zeros([LOGITS, TOKENS], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for _ in range(splits):
        product += tl.load(products + j.to(tl.int64)[:, None] * tokens + t[None, :], mask=inside, other=0.0)
        square += tl.load(squares + t, mask=in_t, other=0.0)
        products += tokens.to(tl.int64) * n
        squares += tokens
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, width) + eps))
    tl.store(mixes + t[None, :] * n + j[:, None], product * r[None, :], mask=inside)
    tl.store(rstd + t, r, mask=in_t)


@triton.jit(do_not_specialize=["width", "tokens", "n"])
def prepare_kernel(mixes, rstd, grad_mixes, q, coef, width, tokens, n, TOKENS: tl.constexpr):
    """q = rstd * grad_mixes as the sum of two bf16 numbers, (tokens, 2, LOGITS), and coef, x's factor in grad_x."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, LOGITS)
    in_t = t < tokens
    inside = in_t[:, None] & (j < n)[None, :]
    at = t[:, None] * n + j[None, :]
    g = tl.load(grad_mixes + at, mask=inside, other=0.0)
    m = tl.load(mixes + at, mask=inside, other=0.0)
    r = tl.load(rstd + t, mask=in_t, other=0.0)
    exact = r[:, None] * g
    high = exact.to(tl.bfloat16)
    low = (exact - high.to(tl.float32)).to(tl.bfloat16)
    row = t[:, None] * (2 * LOGITS) + j[None, :]
    tl.store(q + row, high, mask=in_t[:, None])
    tl.store(q + row + LOGITS, low, mask=in_t[:, None])
    tl.store(coef + t, -tl.div_rn(r * r, width) * tl.sum(g * m, axis=1), mask=in_t)


@triton.jit(do_not_specialize=["parts", "rows", "columns"])
def sum_kernel(part, out, parts, rows, columns, TRANSPOSE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums part (parts, rows, columns) over its first axis, PARTS at a time; out is (rows, columns), or transposed."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = rows.to(tl.int64) * columns
    k = tl.arange(0, PARTS)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        row = first + k
        inside = (row < parts)[:, None] & (e < size)[None, :]
        total += tl.sum(tl.load(part + row.to(tl.int64)[:, None] * size + e[None, :], mask=inside, other=0.0), axis=0)
    if TRANSPOSE:
        address = out + e % columns * rows + e // columns
    else:
        address = out + e
    tl.store(address, total, mask=e < size)
