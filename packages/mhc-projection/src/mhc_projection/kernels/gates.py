"""Gates of a hyper-connection: sigmoids and Sinkhorn iterations, forward and backward (Triton, SM90).

A thread has all numbers of its tokens: a vector over tokens for each logit, and tuples of those for sections and for
matrices, row by row.
"""

import triton
import triton.language as tl


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
def _subtract_dot(g, s, HC: tl.constexpr, COLUMNS: tl.constexpr):
    """g less its dot product with s along each column, or each row."""
    dots = _sums(_products(g, s, HC * HC), HC, COLUMNS)
    new = ()
    for i in tl.static_range(HC):
        for j in tl.static_range(HC):
            new = new + (g[i * HC + j] - dots[j if COLUMNS else i],)
    return new


@triton.jit(do_not_specialize=["rms_eps", "eps", "width", "tokens", "splits"])
def gates_kernel(
    products,
    squares,
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
    tokens,
    splits,
    HC: tl.constexpr,
    ITERS: tl.constexpr,
    FINISH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The gates of mixes (tokens, n); with FINISH, first mixes (n, tokens) and rstd from the projection's parts.

    The parts are products (splits, n, tokens) and squares (splits, tokens); see `finish_kernel`.
    """
    N: tl.constexpr = HC * (HC + 2)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_t = t < tokens
    if FINISH:
        m = _load(products, t, in_t, tokens, N, True)
        square = tl.load(squares + t, mask=in_t, other=0.0)
        for _ in range(1, splits):
            products += tokens.to(tl.int64) * N
            squares += tokens
            m = _sum_of(m, _load(products, t, in_t, tokens, N, True), N)
            square += tl.load(squares + t, mask=in_t, other=0.0)
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
    for _ in range(1, ITERS):
        s = _divide(s, _add(_sums(s, HC, False), eps, HC), HC, False)
        s = _divide(s, _add(_sums(s, HC, True), eps, HC), HC, True)
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
def _iterate(s, eps, HC: tl.constexpr):
    """One normalisation of the rows and one of the columns, with their denominators."""
    rows = _add(_sums(s, HC, False), eps, HC)
    s = _divide(s, rows, HC, False)
    columns = _add(_sums(s, HC, True), eps, HC)
    return _divide(s, columns, HC, True), rows, columns


@triton.jit
def _iterate_slopes(g, s, eps, HC: tl.constexpr, COUNT: tl.constexpr):
    """Gradients through COUNT iterations that start from s.

    Their denominators are kept; the iterates are rebuilt from the last one.
    """
    denominators = ()
    for _ in tl.static_range(COUNT):
        s, rows, columns = _iterate(s, eps, HC)
        denominators = denominators + ((rows, columns),)
    for k in tl.static_range(COUNT):
        rows, columns = denominators[COUNT - 1 - k]
        g = _divide(_subtract_dot(g, s, HC, True), columns, HC, True)
        s = _multiply(s, columns, HC, True)
        g = _divide(_subtract_dot(g, s, HC, False), rows, HC, False)
        s = _multiply(s, rows, HC, False)
    return g


@triton.jit
def _comb_slopes(g, z, eps, HC: tl.constexpr, ITERS: tl.constexpr):
    """Gradients of the logits of the mixing matrix.

    The registers hold the denominators of a third of the iterations; the others are computed once more for their own.
    """
    THIRD: tl.constexpr = (ITERS - 1) // 3
    soft = _softmax(z, HC)
    start = _add(soft, eps, HC * HC)
    first = _add(_sums(start, HC, True), eps, HC)
    start = _divide(start, first, HC, True)
    middle = start
    for _ in range(THIRD):  # loops, so that the compiler does not keep what it computes again below
        middle, _rows, _columns = _iterate(middle, eps, HC)
    s = middle
    for _ in range(THIRD):
        s, _rows, _columns = _iterate(s, eps, HC)
    g = _iterate_slopes(g, s, eps, HC, ITERS - 1 - 2 * THIRD)
    g = _iterate_slopes(g, middle, eps, HC, THIRD)
    g = _iterate_slopes(g, start, eps, HC, THIRD)
    g = _divide(_subtract_dot(g, start, HC, True), first, HC, True)
    return _products(soft, _subtract_dot(g, soft, HC, False), HC * HC)


@triton.jit
def _place(values, COUNT: tl.constexpr):
    """COUNT vectors over tokens, padded with zeros to 32, as a matrix (tokens, 32)."""
    row = values
    for _ in tl.static_range(32 - COUNT):
        row = row + (tl.zeros_like(values[0]),)
    for level in tl.static_range(5):
        joined = ()
        for k in tl.static_range(16 >> level):
            joined = joined + (tl.join(row[k], row[k + (16 >> level)]),)
        row = joined
    return tl.reshape(row[0], [values[0].shape[0], 32])


@triton.jit(do_not_specialize=["eps", "width", "tokens", "parts"])
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
    eps,
    width,
    tokens,
    parts,
    HC: tl.constexpr,
    ITERS: tl.constexpr,
    PREPARE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """From mixes (tokens, n), grad_mixes (tokens, n). With PREPARE from mixes (n, tokens) q and coef instead.

    Those are what the projection's backward takes; see `prepare_kernel`. This program's sums over its tokens of dz and
    of dz * mixes go to part_base and part_scale (n, parts).
    """
    N: tl.constexpr = HC * (HC + 2)
    program = tl.program_id(0)
    t = program.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_t = t < tokens
    m = _load(mixes, t, in_t, tokens, N, PREPARE)
    dz = _gate_slopes(_load(grad_pre, t, in_t, tokens, HC, False), _affine(m, scale, base, 0, 0, HC), 1.0, HC)
    dz = dz + _gate_slopes(_load(grad_post, t, in_t, tokens, HC, False), _affine(m, scale, base, 1, HC, HC), 2.0, HC)
    g = _load(grad_comb, t, in_t, tokens, HC * HC, False)
    dz = dz + _comb_slopes(g, _affine(m, scale, base, 2, 2 * HC, HC * HC), eps, HC, ITERS)
    j = tl.arange(0, 32)
    sums = tl.sum(tl.where(in_t[:, None], _place(dz, N), 0.0), axis=0)
    tl.store(part_base + j * parts + program, sums, mask=j < N)
    sums = tl.sum(tl.where(in_t[:, None], _place(_products(dz, m, N), N), 0.0), axis=0)
    tl.store(part_scale + j * parts + program, sums, mask=j < N)
    g = ()
    for k in tl.static_range(N):
        g = g + (dz[k] * tl.load(scale + min(k // HC, 2)).to(tl.float32),)
    if PREPARE:
        r = tl.load(rstd + t, mask=in_t, other=0.0)
        dot = g[0] * m[0]
        for k in tl.static_range(1, N):
            dot += g[k] * m[k]
        tl.store(coef + t, -tl.div_rn(r * r, width) * dot, mask=in_t)
        exact = _place(_times(g, r, N), N)
        high = exact.to(tl.bfloat16)
        low = (exact - high.to(tl.float32)).to(tl.bfloat16)
        address = q + t[:, None] * 64 + j[None, :]
        tl.store(address, high, mask=in_t[:, None])
        tl.store(address + 32, low, mask=in_t[:, None])
    else:
        _store(grad_mixes, g, t, in_t, tokens, 0, N, N, False)


@triton.jit(do_not_specialize=["parts"])
def gate_parameters_kernel(
    part_base, part_scale, grad_base, grad_scale, parts, HC: tl.constexpr, LOGITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Adds the programs' sums, always in the same order: grad_base (n,), and grad_scale (3,) by section."""
    j = tl.arange(0, LOGITS)
    n: tl.constexpr = HC * (HC + 2)
    base = tl.zeros([LOGITS, BLOCK], tl.float32)
    scale = tl.zeros([LOGITS, BLOCK], tl.float32)
    for first in range(0, parts, BLOCK):
        k = first + tl.arange(0, BLOCK)
        inside = (j < n)[:, None] & (k < parts)[None, :]
        base += tl.load(part_base + j[:, None] * parts + k[None, :], mask=inside, other=0.0)
        scale += tl.load(part_scale + j[:, None] * parts + k[None, :], mask=inside, other=0.0)
    tl.store(grad_base + j, tl.sum(base, axis=1), mask=j < n)
    by_logit = tl.sum(scale, axis=1)
    section = tl.minimum(j // HC, 2)
    for s in tl.static_range(3):
        tl.store(grad_scale + s, tl.sum(tl.where((section == s) & (j < n), by_logit, 0.0), axis=0))
