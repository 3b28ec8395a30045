"""Checks of the arguments, the limits of their sizes, which nothing else knows, and the flattening to tokens."""

import math

import torch
from hopper_kernels import checks
from torch import Tensor

MAX_LOGITS = 32
"""Most logits of a token: one tile of the matrix instructions holds them."""
CHANNEL_MULTIPLE = 8  # 16 bytes of bf16: what one vector load reads
GATE_STREAMS = (1, 2, 4)  # powers of two whose (2 + hc) * hc logits fit in MAX_LOGITS


def unsupported_shape_reason(hc: int, d: int, n: int | None = None) -> str | None:
    """Why streams of these sizes are refused, or None if they are taken. For set-up time.

    hc: residual streams; d: channels of one. n: rows of the weight, to ask about `mhc_projection`; without it, the
    answer is about `hyper_connection`, whose weight has (2 + hc) * hc rows and whose gates take fewer hc.
    """
    try:
        for name, size in {"hc": hc, "d": d, "n": 1 if n is None else n}.items():
            checks.integer(name, size)
        if n is None:
            _gate_streams("the number of streams hc of x", hc)
        _sizes(hc, d, logits(hc) if n is None else n)
    except ValueError as error:
        return str(error)
    return None


def logits(hc: int) -> int:
    """Gate logits of a token: hc of pre, hc of post, hc * hc of comb."""
    return (2 + hc) * hc


def flatten(t: Tensor | None, kept: int) -> Tensor | None:
    """t with its leading dimensions as one, the last `kept` as they are; a view wherever the strides allow."""
    if t is None or t.ndim == kept + 1:
        return t
    return t.unsqueeze(0) if t.ndim == kept else t.flatten(0, -kept - 1)


def unflatten(t: Tensor, lead: torch.Size) -> Tensor:
    """t (T, ...), contiguous, with the leading dimensions `lead` again; what is left empty, (0,), as it is."""
    return t if len(lead) == 1 or t.shape == (0,) else t.view(*lead, *t.shape[1:])


@checks.remembered
def projection(x: Tensor, weight: Tensor, pre_mix: Tensor | None, eps: float, eps_name: str = "eps") -> None:
    """Checks the arguments of `mhc_projection`, x with any number of leading dimensions."""
    checks.tensor("x", x)
    checks.tensor("weight", weight)
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions, got shape {tuple(x.shape)}")
    checks.dtype("x", x, torch.bfloat16)
    checks.ndim("weight", weight, 2)
    checks.dtype("weight", weight, torch.float32, torch.bfloat16)
    _sizes(x.shape[-2], x.shape[-1], weight.shape[0])
    checks.shape("weight", weight, (None, x.shape[-2] * x.shape[-1]))
    if pre_mix is not None:
        checks.tensor("pre_mix", pre_mix)
        if not pre_mix.dtype.is_floating_point:
            raise ValueError(
                f"pre_mix must have a floating-point dtype, got {str(pre_mix.dtype).removeprefix('torch.')}"
            )
        checks.shape("pre_mix", pre_mix, tuple(x.shape[:-1]))
    checks.same_device(x=x, weight=weight, pre_mix=pre_mix)
    _epsilon(eps_name, eps)


@checks.remembered
def gates(mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float) -> None:
    """Checks the arguments of `mhc_gates`, mixes with any number of leading dimensions."""
    checks.tensor("mixes", mixes)
    if mixes.ndim < 1:
        raise ValueError(f"mixes must have at least 1 dimension, got shape {tuple(mixes.shape)}")
    checks.dtype("mixes", mixes, torch.float32)
    _gate_streams("hc", hc)
    checks.shape("mixes", mixes, (*mixes.shape[:-1], logits(hc)))
    gate_parameters(scale, base, hc, iters, eps)
    checks.same_device(mixes=mixes, scale=scale, base=base)


def gate_parameters(
    scale: Tensor, base: Tensor, hc: int, iters: int, eps: float, *, iters_name: str = "iters", eps_name: str = "eps"
) -> None:
    """Checks what the gates need besides the logits."""
    checks.dtype("scale", scale, torch.float32, torch.bfloat16)
    checks.shape("scale", scale, (3,))
    checks.dtype("base", base, torch.float32, torch.bfloat16)
    checks.shape("base", base, (logits(hc),))
    checks.integer(iters_name, iters, lo=1)
    _epsilon(eps_name, eps)


@checks.remembered
def hyper_connection(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None,
    rms_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> None:
    """Checks all arguments of `hyper_connection`, so that nothing is launched if one is wrong."""
    projection(x, weight, pre_mix, rms_eps, "rms_eps")
    hc = x.shape[-2]
    _gate_streams("the number of streams hc of x", hc)
    checks.shape("weight", weight, (logits(hc), hc * x.shape[-1]))
    gate_parameters(scale, base, hc, sinkhorn_iters, hc_eps, iters_name="sinkhorn_iters", eps_name="hc_eps")
    checks.same_device(x=x, scale=scale, base=base)


def projection_gradients(
    x: Tensor,
    weight: Tensor,
    pre_mix: Tensor | None,
    rstd: Tensor,
    grad_mixes: Tensor | None,
    grad_collapsed: Tensor | None,
    grad_x_addend: Tensor | None,
) -> None:
    """Checks what the backward operators take besides the forward's inputs and the mixes."""
    lead = tuple(x.shape[:-2])
    if grad_collapsed is not None and pre_mix is None:
        raise ValueError("pre_mix must be given with grad_collapsed, got None")
    found = {
        "rstd": (rstd, torch.float32, (math.prod(lead),)),
        "grad_mixes": (grad_mixes, torch.float32, (*lead, weight.shape[0])),
        "grad_collapsed": (grad_collapsed, torch.bfloat16, (*lead, x.shape[-1])),
        "grad_x_addend": (grad_x_addend, torch.bfloat16, tuple(x.shape)),
    }
    tensors(x, found)


def gate_gradients(
    t: Tensor, lead: torch.Size, grad_pre: Tensor | None, grad_post: Tensor | None, grad_comb: Tensor | None, hc: int
) -> None:
    """Checks the gradients of the gates of tokens `lead`, which must be on the device of t."""
    found = {
        "grad_pre": (grad_pre, torch.float32, (*lead, hc)),
        "grad_post": (grad_post, torch.float32, (*lead, hc)),
        "grad_comb": (grad_comb, torch.float32, (*lead, hc, hc)),
    }
    tensors(t, found)


def tensors(x: Tensor, found: dict[str, tuple[Tensor | None, torch.dtype, tuple[int, ...]]]) -> None:
    """Checks of each tensor that is given its dtype, its shape and that it is on the device of x."""
    for name, (tensor, dtype, shape) in found.items():
        if tensor is not None:
            checks.dtype(name, tensor, dtype)
            checks.shape(name, tensor, shape)
            if tensor.device != x.device:
                raise ValueError(f"{name} must be on {x.device}, the device of the input, got {tensor.device}")


def _sizes(hc: int, d: int, n: int) -> None:
    checks.in_range("the number of streams hc of x", hc, 1)
    checks.in_range("the number of channels d of x", d, 1)
    checks.multiple("the number of channels d of x", d, CHANNEL_MULTIPLE)
    checks.in_range("the number of rows n of weight", n, 1, MAX_LOGITS)


def _gate_streams(name: str, hc: int) -> None:
    checks.integer(name, hc)
    if hc not in GATE_STREAMS:
        raise ValueError(f"{name} must be one of {', '.join(map(str, GATE_STREAMS))} for the gates, got {hc}")


def _epsilon(name: str, value: float) -> None:
    checks.finite(name, value)
    checks.in_range(name, value, 0)
