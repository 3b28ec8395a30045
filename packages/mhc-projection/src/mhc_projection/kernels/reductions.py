"""What comes before and after the projection's own kernels: sums of parts, in a fixed order, and q (Triton)."""

import triton
import triton.language as tl

LOGITS = tl.constexpr(32)  # of a token, padded with zeros


@triton.jit(do_not_specialize=["eps", "width", "tokens", "n", "splits"])
def finish_kernel(parts, mixes, rstd, eps, width, tokens, n, splits, TOKENS: tl.constexpr):
    """Adds the parts of the splits in their order: rstd = (mean square + eps)^(-1/2), mixes = product * rstd.

    A part is (n + 1, tokens): n products and the sum of squares. The squares are scaled down, and so is width, the
    number of channels that they are the sums over.
    """
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, LOGITS)
    in_t = t < tokens
    inside = (j < n)[:, None] & in_t[None, :]
    product = tl.zeros([LOGITS, TOKENS], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for _ in range(splits):
        product += tl.load(parts + j.to(tl.int64)[:, None] * tokens + t[None, :], mask=inside, other=0.0)
        parts += tokens.to(tl.int64) * n
        square += tl.load(parts + t, mask=in_t, other=0.0)
        parts += tokens
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, width) + eps))
    tl.store(mixes + t[None, :] * n + j[:, None], product * r[None, :], mask=inside)
    tl.store(rstd + t, r, mask=in_t)


@triton.jit
def round_weight(weight, narrow, program, size, BLOCK: tl.constexpr):
    """A block of the weight (size,) in bf16."""
    e = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(narrow + e, tl.load(weight + e, mask=e < size).to(tl.bfloat16), mask=e < size)


@triton.jit
def store_q(q, exact, t, in_t, SIZE: tl.constexpr):
    """exact (tokens, SIZE) as the sum of two bf16 numbers, to q (tokens, 2, SIZE)."""
    high = exact.to(tl.bfloat16)
    low = (exact - high.to(tl.float32)).to(tl.bfloat16)
    address = q + t[:, None] * (2 * SIZE) + tl.arange(0, SIZE)[None, :]
    tl.store(address, high, mask=in_t[:, None])
    tl.store(address + SIZE, low, mask=in_t[:, None])


@triton.jit(do_not_specialize=["width", "tokens", "n", "programs", "size"])
def prepare_kernel(
    mixes,
    rstd,
    grad_mixes,
    q,
    coef,
    weight,
    narrow,
    taken,
    width,
    tokens,
    n,
    programs,
    size,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the projection's backward takes, from the gradient of the mixes.

    q = rstd * grad_mixes as the sum of two bf16 numbers, (tokens, 2, LOGITS); coef, x's factor in grad_x; narrow, the
    weight (size,) in bf16; taken = 0, the items of work that its programs have taken. `programs` are for tokens.
    """
    program = tl.program_id(0)
    if program >= programs:
        round_weight(weight, narrow, program - programs, size, BLOCK)
        return
    tl.store(taken, 0, mask=program == 0)
    t = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    j = tl.arange(0, LOGITS)
    in_t = t < tokens
    inside = in_t[:, None] & (j < n)[None, :]
    at = t[:, None] * n + j[None, :]
    g = tl.load(grad_mixes + at, mask=inside, other=0.0)
    m = tl.load(mixes + at, mask=inside, other=0.0)
    r = tl.load(rstd + t, mask=in_t, other=0.0)
    store_q(q, r[:, None] * g, t, in_t, LOGITS)
    tl.store(coef + t, -tl.div_rn(r * r, width) * tl.sum(g * m, axis=1), mask=in_t)


@triton.jit
def _sum_block(
    part,
    out,
    program,
    parts,
    columns,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of the sum of part (parts, ROWS, columns) over its first axis, PARTS of them side by side.

    out is (columns, ROWS).
    """
    e = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    size = columns.to(tl.int64) * ROWS
    k = tl.arange(0, PARTS)
    totals = tl.zeros([PARTS, BLOCK], tl.float32)  # added up at the end: until then no load waits for another thread
    for first in range(0, parts, PARTS):
        row = first + k
        inside = (row < parts)[:, None] & (e < size)[None, :]
        totals += tl.load(part + row.to(tl.int64)[:, None] * size + e[None, :], mask=inside, other=0.0)
    total = tl.sum(totals, axis=0)
    if ROWS == 1:
        address = out + e
    else:
        address = out + e % columns * ROWS + e // columns
    tl.store(address, total, mask=e < size)


@triton.jit
def _sum_parameters(
    part_base, part_scale, grad_base, grad_scale, program, parts, HC: tl.constexpr, BLOCK: tl.constexpr
):
    """A program's sum over parts (n, parts): n programs for grad_base (n,), then one for each section of grad_scale."""
    n: tl.constexpr = HC * (HC + 2)
    if program < n:
        tl.store(grad_base + program, _sum_range(part_base + program * parts, parts, BLOCK))
    else:
        section = program - n
        size = tl.where(section < 2, HC, HC * HC) * parts
        tl.store(grad_scale + section, _sum_range(part_scale + section * HC * parts, size, BLOCK))


@triton.jit
def _sum_range(values, size, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        e = first + tl.arange(0, BLOCK)
        total += tl.load(values + e, mask=e < size, other=0.0)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["tokens", "size", "parts", "chunks", "blocks", "pre_mix_programs", "gate_programs"])
def sum_kernel(
    part_base,
    part_scale,
    part_weight,
    part_pre_mix,
    grad_base,
    grad_scale,
    grad_weight,
    grad_pre_mix,
    tokens,
    size,
    parts,
    chunks,
    blocks,
    pre_mix_programs,
    gate_programs,
    HC: tl.constexpr,
    PARAMETERS: tl.constexpr,
    PRE_MIX: tl.constexpr,
    PRE_MIX_PARTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
):
    """Adds what the backward's kernels left for blocks of tokens or channels, always in the same order.

    The first pre_mix_programs add part_pre_mix (blocks, HC, tokens) to grad_pre_mix (tokens, HC); gate_programs (n + 3
    or 0) add part_base and part_scale (n, parts); the others add part_weight (chunks, size). Those with most to add
    begin first.
    """
    program = tl.program_id(0)
    if program < pre_mix_programs:
        _sum_block(part_pre_mix, grad_pre_mix, program, blocks, tokens, HC, PRE_MIX_PARTS, PRE_MIX)
    elif program < pre_mix_programs + gate_programs:
        program -= pre_mix_programs
        _sum_parameters(part_base, part_scale, grad_base, grad_scale, program, parts, HC, PARAMETERS)
    else:
        program -= pre_mix_programs + gate_programs
        _sum_block(part_weight, grad_weight, program, chunks, size, 1, WEIGHT_PARTS, WEIGHT)
