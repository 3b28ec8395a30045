"""Gates of a hyper-connection: sigmoids and Sinkhorn iterations, forward and backward (Triton, SM90).

A thread has all numbers of its tokens: a vector over tokens for each logit, and tuples of those for sections and for
matrices, row by row.
"""

import triton
import triton.language as tl
from mhc_projection.kernels.reductions import LOGITS, round_weight, store_q


@triton.jit
def _sigmoid(z):
    return 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def _load(pointer, t, in_t, tokens, SIZE: tl.constexpr, BY_LOGIT: tl.constexpr):
    """A tuple of the SIZE numbers of each token, from (SIZE, tokens) if BY_LOGIT, else (tokens, SIZE)."""
    values = ()
    for j in tl.static_range(SIZE):
        if BY_LOGIT:
            address = pointer + tokens.to(tl.int64) * j + t
        else:
            address = pointer + t * SIZE + j
        values = values + (tl.load(address, mask=in_t, other=0.0),)
    return values


@triton.jit
def _store(
    pointer,
    values,
    t,
    in_t,
    tokens,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    BY_LOGIT: tl.constexpr,
):
    """Store COUNT of the SIZE numbers of each token, from FIRST on."""
    for j in tl.static_range(COUNT):
        if BY_LOGIT:
            address = pointer + tokens.to(tl.int64) * (FIRST + j) + t
        else:
            address = pointer + t * SIZE + (FIRST + j)
        tl.store(address, values[j], mask=in_t)


@triton.jit
def _affine(mixes, scale, base, SECTION: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """z = mixes * scale + base of the logits of a section."""
    s = tl.load(scale + SECTION).to(tl.float32)
    z = ()
    for j in tl.static_range(COUNT):
        z = z + (mixes[FIRST + j] * s + tl.load(base + FIRST + j).to(tl.float32),)
    return z


@triton.jit
def _sums(s, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """The HC sums of the columns of a matrix, or of its rows."""
    sums = ()
    for a in tl.static_range(HC):
        total = s[a if COLUMNS else a * HC]
        for b in tl.static_range(1, HC):
            total += s[b * HC + a if COLUMNS else a * HC + b]
        sums = sums + (total,)
    return sums


@triton.jit
def _products(a, b, COUNT: tl.constexpr):
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (a[j] * b[j],)
    return values


@triton.jit
def _softmax(z, HC: tl.constexpr):
    """Of each row."""
    exponentials = ()
    for i in tl.static_range(HC):
        largest = z[i * HC]
        for j in tl.static_range(1, HC):
            largest = tl.maximum(largest, z[i * HC + j], propagate_nan=tl.PropagateNan.ALL)
        for j in tl.static_range(HC):
            exponentials = exponentials + (tl.exp(z[i * HC + j] - largest),)
    sums = _sums(exponentials, HC, False)
    soft = ()
    for i in tl.static_range(HC):
        for j in tl.static_range(HC):
            soft = soft + (exponentials[i * HC + j] / sums[i],)
    return soft


@triton.jit
def _add(values, number, COUNT: tl.constexpr):
    new = ()
    for j in tl.static_range(COUNT):
        new = new + (values[j] + number,)
    return new


@triton.jit
def _divide(s, denominators, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """Each column of a matrix, or each row, by its denominator."""
    inverse = ()
    for a in tl.static_range(HC):
        inverse = inverse + (1.0 / denominators[a],)
    return _multiply(s, inverse, HC, COLUMNS)


@triton.jit
def _multiply(s, factors, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """Each column of a matrix, or each row, by its factor."""
    new = ()
    for i in tl.static_range(HC):
        for j in tl.static_range(HC):
            new = new + (s[i * HC + j] * factors[j if COLUMNS else i],)
    return new


@triton.jit
def _subtract_sums(h, s, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """h less the sum of its column, or its row, times s."""
    sums = _sums(h, HC, COLUMNS)
    new = ()
    for i in tl.static_range(HC):
        for j in tl.static_range(HC):
            new = new + (h[i * HC + j] - sums[j if COLUMNS else i] * s[i * HC + j],)
    return new


@triton.jit
def _iterate(s, eps, HC: tl.constexpr):
    """One normalisation of the rows and one of the columns."""
    s = _divide(s, _add(_sums(s, HC, False), eps, HC), HC, False)
    return _divide(s, _add(_sums(s, HC, True), eps, HC), HC, True)


@triton.jit(do_not_specialize=["rms_eps", "eps", "width", "iters", "tokens", "splits"])
def gates_kernel(
    parts,
    mixes,
    rstd,
    scale,
    base,
    pre,
    post,
    comb,
    rms_eps,
    eps,
    width,
    iters,
    tokens,
    splits,
    HC: tl.constexpr,
    FINISH: tl.constexpr,
    TOGETHER: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The gates of mixes (tokens, n); with FINISH, first mixes (n, tokens) and rstd from the projection's parts.

    The parts are (splits, n + 1, tokens); see `finish_kernel`.
    """
    N: tl.constexpr = HC * (HC + 2)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_t = t < tokens
    if FINISH:
        row = tokens.to(tl.int64)
        m = _load(parts, t, in_t, tokens, N, True)
        square = tl.load(parts + row * N + t, mask=in_t, other=0.0)
        for first in range(1, splits, TOGETHER):
            for k in tl.static_range(TOGETHER):  # their loads are under way together
                inside = in_t & (first + k < splits)
                part = parts + row * (N + 1) * (first + k)
                m = _sum_of(m, _load(part, t, inside, tokens, N, True), N)
                square += tl.load(part + row * N + t, mask=inside, other=0.0)
        r = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, width) + rms_eps))
        m = _times(m, r, N)
        _store(mixes, m, t, in_t, tokens, 0, N, N, True)
        tl.store(rstd + t, r, mask=in_t)
    else:
        m = _load(mixes, t, in_t, tokens, N, False)
    z_pre = _affine(m, scale, base, 0, 0, HC)
    z_post = _affine(m, scale, base, 1, HC, HC)
    for i in tl.static_range(HC):
        tl.store(pre + t * HC + i, _sigmoid(z_pre[i]) + eps, mask=in_t)
        tl.store(post + t * HC + i, 2.0 * _sigmoid(z_post[i]), mask=in_t)
    s = _add(_softmax(_affine(m, scale, base, 2, 2 * HC, HC * HC), HC), eps, HC * HC)
    s = _divide(s, _add(_sums(s, HC, True), eps, HC), HC, True)
    for _ in range(1, iters):
        s = _iterate(s, eps, HC)
    _store(comb, s, t, in_t, tokens, 0, HC * HC, HC * HC, False)


@triton.jit
def _sum_of(a, b, COUNT: tl.constexpr):
    values = ()
    for j in tl.static_range(COUNT):
        values = values + (a[j] + b[j],)
    return values


@triton.jit
def _times(values, factor, COUNT: tl.constexpr):
    new = ()
    for j in tl.static_range(COUNT):
        new = new + (values[j] * factor,)
    return new


@triton.jit
def _gate_slopes(g, z, factor, COUNT: tl.constexpr):
    """Gradients of the logits of factor * sigmoid."""
    dz = ()
    for i in tl.static_range(COUNT):
        dz = dz + (factor * g[i] * _sigmoid(z[i]) * _sigmoid(-z[i]),)
    return dz


@triton.jit
def _comb_slopes(g, z, denominators, t, in_t, tokens, eps, iters, HC: tl.constexpr):
    """Gradients of the logits of the mixing matrix.

    All denominators of a token are kept in `denominators` (iters - 1, 2 * HC, tokens), those of the rows first; the
    iterates S are rebuilt from the last one. For one step S' = S / D the gradient G of S' gives (G - sum(G S')) / D for
    S, so H = G S' becomes H - sum(H) S'.
    """
    soft = _softmax(z, HC)
    s = _add(soft, eps, HC * HC)
    s = _divide(s, _add(_sums(s, HC, True), eps, HC), HC, True)
    for k in range(iters - 1):
        rows = _add(_sums(s, HC, False), eps, HC)
        s = _divide(s, rows, HC, False)
        columns = _add(_sums(s, HC, True), eps, HC)
        s = _divide(s, columns, HC, True)
        place = denominators + tokens.to(tl.int64) * (k * 2 * HC)
        _store(place, rows + columns, t, in_t, tokens, 0, 2 * HC, 2 * HC, True)
    tl.debug_barrier()  # another thread of the program may be the one that reads them
    h = _products(g, s, HC * HC)
    last = denominators + tokens.to(tl.int64) * ((iters - 2) * 2 * HC)
    kept = _load(last, t, in_t & (iters > 1), tokens, 2 * HC, True)
    for k in range(iters - 1):
        last -= tokens.to(tl.int64) * (2 * HC)
        next = _load(last, t, in_t & (k < iters - 2), tokens, 2 * HC, True)
        h = _subtract_sums(h, s, HC, True)
        s = _multiply(s, kept[HC:], HC, True)
        h = _subtract_sums(h, s, HC, False)
        s = _multiply(s, kept[:HC], HC, False)
        kept = next
    h = _subtract_sums(h, s, HC, True)
    shares = ()
    for k in tl.static_range(HC * HC):  # of the softmax in softmax + eps; 0 where both are
        shares = shares + (tl.where(soft[k] == 0.0, 0.0, soft[k] / (soft[k] + eps)),)
    return _subtract_sums(_products(h, shares, HC * HC), soft, HC, False)


@triton.jit
def _matrix(values, COUNT: tl.constexpr):
    """COUNT vectors over tokens, padded with zeros to LOGITS = 32, as a matrix (tokens, LOGITS)."""
    row = values
    for _ in tl.static_range(LOGITS - COUNT):
        row = row + (tl.zeros_like(values[0]),)
    for level in tl.static_range(5):
        joined = ()
        for k in tl.static_range(16 >> level):
            joined = joined + (tl.join(row[k], row[k + (16 >> level)]),)
        row = joined
    return tl.reshape(row[0], [values[0].shape[0], LOGITS])


@triton.jit(do_not_specialize=["eps", "width", "iters", "tokens", "parts", "programs", "size"])
def gates_backward_kernel(
    mixes,
    rstd,
    scale,
    base,
    grad_pre,
    grad_post,
    grad_comb,
    grad_mixes,
    q,
    coef,
    part_base,
    part_scale,
    denominators,
    weight,
    narrow,
    taken,
    eps,
    width,
    iters,
    tokens,
    parts,
    programs,
    size,
    HC: tl.constexpr,
    PREPARE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """From mixes (tokens, n), grad_mixes (tokens, n). With PREPARE from mixes (n, tokens) q and coef instead.

    Those are what the projection's backward takes, and so are narrow, the weight (size,) in bf16, and taken = 0; see
    `prepare_kernel`. The sums over every 32 tokens of dz and of dz * mixes go to part_base and part_scale (n, parts);
    denominators is workspace, see `_comb_slopes`. `programs` programs are for tokens.
    """
    program = tl.program_id(0)
    if program >= programs:
        round_weight(weight, narrow, program - programs, size, BLOCK)
        return
    N: tl.constexpr = HC * (HC + 2)
    t = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_t = t < tokens
    m = _load(mixes, t, in_t, tokens, N, PREPARE)
    dz = _gate_slopes(_load(grad_pre, t, in_t, tokens, HC, False), _affine(m, scale, base, 0, 0, HC), 1.0, HC)
    dz = dz + _gate_slopes(_load(grad_post, t, in_t, tokens, HC, False), _affine(m, scale, base, 1, HC, HC), 2.0, HC)
    g = _load(grad_comb, t, in_t, tokens, HC * HC, False)
    z = _affine(m, scale, base, 2, 2 * HC, HC * HC)
    dz = dz + _comb_slopes(g, z, denominators, t, in_t, tokens, eps, iters, HC)
    # Sums over the 32 tokens of a warp, so that warps need not wait for each other.
    base_sums = ()
    scale_sums = ()
    for k in tl.static_range(N):
        base_term = tl.where(in_t, dz[k], 0.0)
        scale_term = tl.where(in_t, dz[k] * m[k], 0.0)
        base_sums = base_sums + (tl.sum(tl.reshape(base_term, [TOKENS // 32, 32]), axis=1),)
        scale_sums = scale_sums + (tl.sum(tl.reshape(scale_term, [TOKENS // 32, 32]), axis=1),)
    part = program * (TOKENS // 32) + tl.arange(0, TOKENS // 32)
    j = tl.arange(0, LOGITS)
    address = j[None, :] * parts + part[:, None]
    inside = (j < N)[None, :] & (part < parts)[:, None]
    tl.store(part_base + address, _matrix(base_sums, N), mask=inside)
    tl.store(part_scale + address, _matrix(scale_sums, N), mask=inside)
    g = ()
    for k in tl.static_range(N):
        g = g + (dz[k] * tl.load(scale + min(k // HC, 2)).to(tl.float32),)
    if PREPARE:
        tl.store(taken, 0, mask=program == 0)
        r = tl.load(rstd + t, mask=in_t, other=0.0)
        dot = g[0] * m[0]
        for k in tl.static_range(1, N):
            dot += g[k] * m[k]
        tl.store(coef + t, -tl.div_rn(r * r, width) * dot, mask=in_t)
        store_q(q, _matrix(_times(g, r, N), N), t, in_t, LOGITS)
    else:
        _store(grad_mixes, g, t, in_t, tokens, 0, N, N, False)
