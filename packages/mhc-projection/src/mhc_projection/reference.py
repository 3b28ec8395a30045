"""The definition of every operator of this package, in plain PyTorch: what a CPU runs and the oracle of the tests.

Streams in float64 give every result in float64, without any rounding but that of the weight to bf16: the oracle. With
bf16 streams all arithmetic is fp32 and rounds where the functions say so. Contractions over the channels or the tokens,
roots and exponentials are formed in float64 and rounded once to fp32, so no setting of PyTorch (TF32) enters.

Results repeat bit for bit. A token's bits may depend on its batch only where the last bits of a float64 intermediate
change a rounding to fp32, about one time in 1e7; `collapsed` has no such intermediate.
"""

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK = 2**22  # stream elements, or 64 times the logits, that are expanded at a time: temporaries of some 32 MiB each


def projection_forward(x: Tensor, weight: Tensor, pre_mix: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gate logits of the RMS-normalised streams, and the streams' weighted sum.

    x (T, hc, d) bf16 or float64; weight (n, K) with K = hc * d, of any float dtype; pre_mix (T, hc). With X a token's K
    channels and W = bf16(weight):
        rstd = (mean(X^2) + eps)^(-1/2),  the mean rounded to fp32, then fp32 operations
        mixes[j] = (sum_k X[k] W[j, k]) * rstd,  the sum rounded to fp32
        collapsed[c] = bf16(sum_i pre_mix[i] x[i, c]),  fp32 products and sums over i = 0 .. hc - 1
    Returns mixes (T, n) fp32, rstd (T,) fp32, collapsed (T, d) in the dtype of x; collapsed is (0,) without pre_mix.
    A token whose mean square overflows fp32 (streams beyond 1e19) has rstd 0 and mixes 0, or NaN where P overflows too.
    """
    compute = _compute_dtype(x)
    tokens, hc, d = x.shape
    mixes = x.new_empty((tokens, weight.shape[0]), dtype=compute)
    rstd = x.new_empty((tokens,), dtype=compute)
    collapsed = x.new_empty((tokens, d) if pre_mix is not None else (0,))
    w = weight.bfloat16().double()
    for rows in _chunks(tokens, hc * d):
        flat = x[rows].double().reshape(-1, hc * d)
        r = _rounded(torch.rsqrt, (flat.square().sum(-1) / (hc * d)).to(compute) + eps)
        rstd[rows] = r
        mixes[rows] = (flat @ w.t()).to(compute) * r[:, None]
        if pre_mix is not None:
            p = pre_mix[rows].to(compute)
            total = p[:, 0, None] * x[rows, 0].to(compute)
            for i in range(1, hc):
                total = total + p[:, i, None] * x[rows, i].to(compute)
            collapsed[rows] = total.to(x.dtype)
    return mixes, rstd, collapsed


def projection_backward(
    x: Tensor,
    weight: Tensor,
    pre_mix: Tensor | None,
    mixes: Tensor,
    rstd: Tensor,
    grad_mixes: Tensor | None,
    grad_collapsed: Tensor | None,
    grad_x_addend: Tensor | None,
    need_x: bool = True,
    need_weight: bool = True,
    need_pre_mix: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `projection_forward`, from its inputs, its results and their gradients (None: no gradient).

    With g_m = grad_mixes, g_c = grad_collapsed, r = rstd, W = bf16(weight), q[j] = r g_m[j], in fp32 unless noted:
        grad_x[i, c] = bf16(sum_j q[j] W[j, (i, c)] + coef x[i, c] + pre_mix[i] g_c[c])
            with coef = -(r^2 / K) sum_j g_m[j] mixes[j];  terms without a gradient are left out
        grad_weight[j, k] = sum_t q_t[j] X_t[k]
        grad_pre_mix[i] = sum_c g_c[c] x[i, c]
    With an addend (x.shape, the dtype of x) grad_x becomes bf16(fp32(grad_x) + fp32(addend)): two roundings, the very
    sum that autograd forms of two bf16 gradients. With neither g_m nor g_c it is the addend's own bits, -0 included.

    Returns grad_x (T, hc, d) in the dtype of x, grad_weight (n, K) fp32 and grad_pre_mix (T, hc) fp32, zeros where
    nothing flows; each is (0,) where it is not needed, grad_pre_mix also without pre_mix.
    """
    compute = _compute_dtype(x)
    tokens, hc, d = x.shape
    width = hc * d
    need_pre_mix = need_pre_mix and pre_mix is not None
    w = weight.bfloat16().double()
    grad_x = x.new_zeros(x.shape if need_x else (0,))
    grad_w = x.new_zeros(weight.shape if need_weight else (0,), dtype=torch.float64)
    grad_p = x.new_zeros((tokens, hc) if need_pre_mix else (0,), dtype=compute)
    for rows in _chunks(tokens, width):
        streams = x[rows].to(compute)
        terms = []
        if grad_mixes is not None:
            g, r = grad_mixes[rows].to(compute), rstd[rows]
            q = (r[:, None] * g).double()
            if need_weight:
                grad_w += q.t() @ streams.double().reshape(-1, width)
            if need_x:
                coef = -(r * r / width) * (g * mixes[rows]).sum(-1)
                terms = [(q @ w).to(compute).view_as(streams), coef[:, None, None] * streams]
        if grad_collapsed is not None:
            g = grad_collapsed[rows].to(compute)[:, None, :]
            if need_x:
                terms.append(pre_mix[rows].to(compute)[:, :, None] * g)
            if need_pre_mix:
                grad_p[rows] = (g * streams).sum(-1, dtype=torch.float64).to(compute)
        addend = None if grad_x_addend is None or not need_x else grad_x_addend[rows]
        if terms:
            total = functools.reduce(torch.add, terms).to(x.dtype)
            grad_x[rows] = total if addend is None else (total.to(compute) + addend.to(compute)).to(x.dtype)
        elif addend is not None:
            grad_x[rows] = addend
    return grad_x, grad_w.to(compute), grad_p


def gates_forward(
    mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The three gates of each token, in fp32 (float64 for mixes in float64).

    mixes (T, (2 + hc) * hc): hc logits of pre, hc of post, then hc x hc of comb, row by row. With z = mixes * s + base,
    s one of the three numbers of `scale` for each section:
        pre = sigmoid(z_pre) + eps,  post = 2 sigmoid(z_post)
        S = softmax of each row of z_comb, + eps;  then 2 iters - 1 times, columns first and last, in turn with rows:
        S = S / (sum of its column or row + eps);  comb is the last S
    So columns sum to 1 almost exactly and rows only as far as the iteration has converged. With eps = 0 a column whose
    softmax underflows in every row is 0 / 0; the kernels, which multiply by inverses, leave the numbers below 3e-39.

    Returns pre (T, hc), post (T, hc), comb (T, hc, hc), rows being the streams read and columns those written.
    """
    compute = _compute_dtype(mixes)
    tokens = mixes.shape[0]
    pre, post = (mixes.new_empty((tokens, hc), dtype=compute) for _ in range(2))
    comb = mixes.new_empty((tokens, hc, hc), dtype=compute)
    s, b = _per_logit(scale, hc).to(compute), base.to(compute)
    for rows in _chunks(tokens, 64 * mixes.shape[1]):
        z = mixes[rows].to(compute) * s + b
        z_pre, z_post, z_comb = _sections(z, hc)
        pre[rows] = _rounded(torch.sigmoid, z_pre) + eps
        post[rows] = 2 * _rounded(torch.sigmoid, z_post)
        comb[rows] = _sinkhorn(_rounded(_softmax, z_comb), iters, eps)[0][-1]
    return pre, post, comb


def gates_backward(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    hc: int,
    iters: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gates_forward`, through every iteration, from its inputs and the gradients of its results.

    With a = sigmoid(z_pre) and b = sigmoid(z_post): dz_pre = grad_pre a (1 - a), dz_post = 2 grad_post b (1 - b). For
    comb, one step S = A / D with D = (sum of A along an axis) + eps takes G = dS to dA = (G - sum of G S) / D along the
    same axis; after the first step, with Q the softmax, dz_comb = Q (G - sum of G Q along the row).
        grad_mixes = dz s;  grad_base = sum_t dz;  grad_scale = sums of dz mixes over a section and all tokens

    Returns grad_mixes (T, n), grad_scale (3,), grad_base (n,), all fp32 (float64 for mixes in float64); the sums over
    tokens are formed in float64 and rounded once.
    """
    compute = _compute_dtype(mixes)
    tokens, n = mixes.shape
    grad_mixes = mixes.new_empty((tokens, n), dtype=compute)
    grad_s, grad_b = (mixes.new_zeros((n,), dtype=torch.float64) for _ in range(2))
    s, b = _per_logit(scale, hc).to(compute), base.to(compute)
    for rows in _chunks(tokens, 64 * n):
        m = mixes[rows].to(compute)
        z_pre, z_post, z_comb = _sections(m * s + b, hc)
        dz_pre = grad_pre[rows].to(compute) * _rounded(_sigmoid_slope, z_pre)
        dz_post = 2 * grad_post[rows].to(compute) * _rounded(_sigmoid_slope, z_post)
        soft = _rounded(_softmax, z_comb)
        iterates, denominators = _sinkhorn(soft, iters, eps)
        g = grad_comb[rows].to(compute)
        for k in range(2 * iters - 1, 0, -1):
            g = (g - (g * iterates[k]).sum(_axis(k), keepdim=True)) / denominators[k - 1]
        dz_comb = soft * (g - (g * soft).sum(-1, keepdim=True))
        dz = torch.cat((dz_pre, dz_post, dz_comb.flatten(1)), dim=1)
        grad_mixes[rows] = dz * s
        grad_s += (dz.double() * m).sum(0)
        grad_b += dz.sum(0, dtype=torch.float64)
    grad_scale = torch.stack([part.sum() for part in grad_s.split((hc, hc, hc * hc))])
    return grad_mixes, grad_scale.to(compute), grad_b.to(compute)


def hyper_connection_forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`projection_forward` and `gates_forward` of its mixes.

    Returns pre, post, comb, collapsed, then what the backward needs: mixes transposed, (n, T), and rstd.
    """
    mixes, rstd, collapsed = projection_forward(x, weight, pre_mix, rms_eps)
    gates = gates_forward(mixes, scale, base, x.shape[1], iters, hc_eps)
    # Not .contiguous(): with one token that is the transpose itself, whose strides are not those of the fake.
    return *gates, collapsed, mixes.t().clone(memory_format=torch.contiguous_format), rstd


def hyper_connection_backward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None,
    mixes: Tensor,
    rstd: Tensor,
    grad_pre: Tensor | None,
    grad_post: Tensor | None,
    grad_comb: Tensor | None,
    grad_collapsed: Tensor | None,
    grad_x_addend: Tensor | None,
    hc_eps: float,
    iters: int,
    need_x: bool = True,
    need_weight: bool = True,
    need_pre_mix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `hyper_connection_forward`: `gates_backward`, then `projection_backward`. None: no gradient.

    A gate without a gradient counts as one of zeros if another gate has one. Returns grad_x, grad_weight, grad_scale,
    grad_base, grad_pre_mix; grad_scale and grad_base are zeros where nothing flows.
    """
    tokens, hc, _ = x.shape
    grads = [grad_pre, grad_post, grad_comb]
    mixes = mixes.t()
    grad_mixes = None
    grad_scale, grad_base = mixes.new_zeros(3), mixes.new_zeros(mixes.shape[1])
    if any(grad is not None for grad in grads):
        shapes = (tokens, hc), (tokens, hc), (tokens, hc, hc)
        grads = [mixes.new_zeros(s) if grad is None else grad for grad, s in zip(grads, shapes, strict=True)]
        grad_mixes, grad_scale, grad_base = gates_backward(mixes, scale, base, *grads, hc, iters, hc_eps)
    grad_x, grad_weight, grad_pre_mix = projection_backward(
        x,
        weight,
        pre_mix,
        mixes,
        rstd,
        grad_mixes,
        grad_collapsed,
        grad_x_addend,
        need_x,
        need_weight,
        need_pre_mix,
    )
    return grad_x, grad_weight, grad_scale, grad_base, grad_pre_mix


def _compute_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _chunks(tokens: int, width: int) -> Iterator[slice]:
    """Slices of the tokens, of at most CHUNK elements (one token at least)."""
    size = max(1, CHUNK // width)
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _rounded(function: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """function(t) computed in float64 and rounded to the dtype of t.

    PyTorch's own fp32 functions give an element other bits at another place of a tensor.
    """
    return function(t.double()).to(t.dtype)


def _softmax(z: Tensor) -> Tensor:
    return torch.softmax(z, dim=-1)


def _sigmoid_slope(z: Tensor) -> Tensor:
    """a (1 - a) with a = sigmoid(z), without the cancellation near a = 1."""
    return torch.sigmoid(z) * torch.sigmoid(-z)


def _per_logit(scale: Tensor, hc: int) -> Tensor:
    """`scale` (3,) repeated for the logits of its section: ((2 + hc) * hc,)."""
    return torch.cat([scale[i].expand(size) for i, size in enumerate((hc, hc, hc * hc))])


def _sections(z: Tensor, hc: int) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = z.split((hc, hc, hc * hc), dim=-1)
    return pre, post, comb.unflatten(-1, (hc, hc))


def _axis(step: int) -> int:
    """The axis that a Sinkhorn step sums: columns in odd steps, the first and last among them."""
    return -2 if step % 2 else -1


def _sinkhorn(soft: Tensor, iters: int, eps: float) -> tuple[list[Tensor], list[Tensor]]:
    """The iterates S_0 .. S_{2 iters - 1} and the denominator of each step."""
    iterates, denominators = [soft + eps], []
    for step in range(1, 2 * iters):
        denominators.append(iterates[-1].sum(_axis(step), keepdim=True) + eps)
        iterates.append(iterates[-1] / denominators[-1])
    return iterates, denominators
