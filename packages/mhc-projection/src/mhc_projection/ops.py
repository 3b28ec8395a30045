"""Public functions: argument checks, and pre_mix in fp32. The operators behind them are in `operators.py`."""

import torch
from torch import Tensor

from mhc_projection import arguments, autograd, operators  # noqa: F401  the last registers what is called here


def mhc_projection(
    x: Tensor, weight: Tensor, pre_mix: Tensor | None = None, eps: float = 1e-20
) -> tuple[Tensor, Tensor | None]:
    """Gate logits of each token from its RMS-normalised residual streams, and the streams' weighted sum, in one read.

    x: (..., hc, d) bf16, any number of leading dimensions, also none; hc at least 1, d a multiple of 8. Read in place
        if contiguous and aligned to 16 bytes, copied first otherwise. Never modified.
    weight: (n, hc * d) fp32 or bf16, n from 1 to `MAX_LOGITS`; rounded to bf16 before use. Its gradient is the one with
        respect to the rounded weight, accumulated in fp32, in the dtype of the weight.
    pre_mix: (..., hc), weights of the streams; any float dtype, converted to fp32.
    eps: added to the mean square, finite and not negative.

    Returns
        mixes      (..., n) fp32: (sum_k X[k] W[j, k]) * (mean(X^2) + eps)^(-1/2), X a token's hc * d channels
        collapsed  (..., d) bf16: sum_i pre_mix[i] x[i], fp32 rounded once; None without pre_mix
    `reference.projection_forward` and `reference.projection_backward` are the exact definitions. An all-zero token has
    mixes 0 and, with the default eps, a finite gradient. NaN and Inf stay in their token's results; in the gradient of
    the weight they meet all tokens. So do streams beyond 1e18, whose square overflows fp32.

    Kept for the backward: x, weight, pre_mix, and (n + 1) fp32 numbers a token. Bitwise repeatable; a
    token's results do not depend on its batch (on a CPU: but for the rounding of sums, see `reference`). Second-order
    gradients raise RuntimeError. Autocast changes nothing.

    Raises TypeError or ValueError that names the argument before anything is launched, and
    `hopper_kernels.KernelUnavailable` on a CUDA device that is not SM90 or with a Triton or a PyTorch that the kernels
    cannot be built with. CPU tensors, and CUDA tensors inside `hopper_kernels.reference()`, get the definition, in the
    backward too.
    """
    arguments.projection(x, weight, pre_mix, eps)
    pre_mix = None if pre_mix is None else pre_mix.float()
    mixes, _, collapsed, _ = torch.ops.mhc_projection.projection_forward(x, weight, pre_mix, eps)
    return mixes, None if pre_mix is None else collapsed


def mhc_projection_streams(
    x: Tensor, weight: Tensor, pre_mix: Tensor | None = None, eps: float = 1e-20
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`mhc_projection`, and the streams for their other readers, whose gradient is then added inside the backward.

    Arguments, other results, errors as there. The third result is a view of x, in its shape and strides: whatever else
    reads the streams should read this view instead of x. Autograd then hands the gradient of those readers to the
    backward of the projection, which adds it while it writes the gradient of x, where it would otherwise add two
    tensors of the size of x in a pass of its own. All gradients are bit for bit those without it: the gradient of x is
    rounded to bf16 before the sum, and the sum again. If only the view received a gradient, x gets that very gradient
    (under `torch.compile`, which fills in zeros for the others, with +0 for -0).

    Writing to the view in place raises autograd's RuntimeError.
    """
    arguments.projection(x, weight, pre_mix, eps)
    pre_mix = None if pre_mix is None else pre_mix.float()
    results = autograd.ProjectionStreams.apply(x, weight, pre_mix, eps)
    return (results[0], None, results[1]) if pre_mix is None else results


def mhc_gates(
    mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gates of a hyper-connection from its logits: sigmoids, and Sinkhorn iterations for the mixing matrix.

    mixes: (..., (2 + hc) * hc) fp32: hc logits of pre, hc of post, hc x hc of comb, row by row; hc is 1, 2 or 4.
    scale, base: (3,) and ((2 + hc) * hc,), fp32 or bf16; z = mixes * s + base with one s a section.
    iters: normalisations of the columns, at least 1; rows are normalised in between.
    eps: finite, not negative; added to pre, to the softmax and to every denominator. With 0, a column whose softmax
        is below about 3e-39 in every row becomes infinite or NaN.

    Returns, in fp32,
        pre   (..., hc): sigmoid(z) + eps
        post  (..., hc): 2 sigmoid(z)
        comb  (..., hc, hc): softmax of each row + eps, then in turn divided by the sums of columns and rows, columns
              first and last. Rows are the streams read, columns those written. Columns sum to 1 within about eps,
              rows as far as the iteration has converged: after 20, often within some percent only.
    `reference.gates_forward` and `reference.gates_backward` are the exact definitions; the gradient is that of all
    iterations, which are recomputed and not stored. Kept for the backward: mixes, scale, base. Determinism, devices,
    errors as for `mhc_projection`.
    """
    arguments.gates(mixes, scale, base, hc, iters, eps)
    pre, post, comb, _ = torch.ops.mhc_projection.gates_forward(mixes, scale, base, hc, iters, eps)
    return pre, post, comb


def hyper_connection(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None = None,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What a sublayer needs of a token's residual streams: three gates, and the streams collapsed by earlier weights.

    x (..., hc, d) bf16, weight ((2 + hc) * hc, hc * d), scale (3,), base ((2 + hc) * hc,), pre_mix (..., hc); hc is 1,
    2 or 4. In DeepSeek-V4.1 pre_mix is the `pre` that the sublayer before returned (one-hot on stream 0 for the first);
    V4, where `pre` collapses the streams that it was computed from, passes None.

    Returns (pre, post, comb, collapsed): `mhc_gates` of the logits of `mhc_projection`, with eps = hc_eps and rms_eps,
    and its collapsed, (..., d) bf16 or None without pre_mix. See both for everything else.
    """
    arguments.hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, sinkhorn_iters)
    pre_mix = None if pre_mix is None else pre_mix.float()
    pre, post, comb, collapsed, *_ = torch.ops.mhc_projection.hyper_connection_forward(
        x, weight, scale, base, pre_mix, rms_eps, hc_eps, sinkhorn_iters
    )
    return pre, post, comb, None if pre_mix is None else collapsed


def hyper_connection_streams(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None = None,
    *,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """`hyper_connection`, and the streams for their other readers, as `mhc_projection_streams` returns them.

    Returns (pre, post, comb, collapsed, streams).
    """
    arguments.hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, sinkhorn_iters)
    pre_mix = None if pre_mix is None else pre_mix.float()
    results = autograd.HyperConnectionStreams.apply(x, weight, scale, base, pre_mix, rms_eps, hc_eps, sinkhorn_iters)
    return (*results[:3], None, results[3]) if pre_mix is None else results
