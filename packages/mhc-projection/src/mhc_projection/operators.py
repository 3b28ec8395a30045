"""The operators: schemas, argument checks, fakes, and which implementation runs. Derivatives: `autograd.py`.

The operators take any leading dimensions, and call the function of their name in `launch`, which takes and returns the
same but for `used_reference`, or in `reference`, for which the tokens are one dimension. That is dealt with here, below
autograd, so that it costs autograd nothing. What only the backward reads is without leading dimensions: rstd (T,), and
in a connection the mixes (n, T).

The last result of the forward operators, `used_reference`, a 0-dim bool on the CPU, says whether the caller was inside
`hopper_kernels.reference()`. Autograd hands it to the backward operator, which so runs the implementation that its
forward ran, although autograd's threads do not see the block. Why it is a tensor is said in `dispatch.reference_flag`.
"""

import math

import torch
from hopper_kernels import checks, derivatives, dispatch
from torch import Tensor

from mhc_projection import arguments, autograd, launch, reference
from mhc_projection.arguments import flatten, unflatten

_library = torch.library.Library("mhc_projection", "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(
    "projection_forward(Tensor x, Tensor weight, Tensor? pre_mix, float eps)"
    " -> (Tensor mixes, Tensor rstd, Tensor collapsed, Tensor used_reference)",
    tags=_tags,
)
_library.define(
    "projection_backward(Tensor x, Tensor weight, Tensor? pre_mix, Tensor mixes, Tensor rstd, Tensor? grad_mixes,"
    " Tensor? grad_collapsed, Tensor? grad_x_addend, bool need_x=True, bool need_weight=True, bool need_pre_mix=True,"
    " Tensor? used_reference=None) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_pre_mix)",
    tags=_tags,
)
_library.define(
    "hyper_connection_forward(Tensor x, Tensor weight, Tensor scale, Tensor base, Tensor? pre_mix, float rms_eps,"
    " float hc_eps, int iters) -> (Tensor pre, Tensor post, Tensor comb, Tensor collapsed, Tensor mixes, Tensor rstd,"
    " Tensor used_reference)",
    tags=_tags,
)
_library.define(
    "hyper_connection_backward(Tensor x, Tensor weight, Tensor scale, Tensor base, Tensor? pre_mix, Tensor mixes,"
    " Tensor rstd, Tensor? grad_pre, Tensor? grad_post, Tensor? grad_comb, Tensor? grad_collapsed,"
    " Tensor? grad_x_addend, float hc_eps, int iters, bool need_x=True, bool need_weight=True, bool need_pre_mix=True,"
    " Tensor? used_reference=None)"
    " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_scale, Tensor grad_base, Tensor grad_pre_mix)",
    tags=_tags,
)
_library.define(
    "gates_forward(Tensor mixes, Tensor scale, Tensor base, int hc, int iters, float eps)"
    " -> (Tensor pre, Tensor post, Tensor comb, Tensor used_reference)",
    tags=_tags,
)
_library.define(
    "gates_backward(Tensor mixes, Tensor scale, Tensor base, Tensor grad_pre, Tensor grad_post, Tensor grad_comb,"
    " int hc, int iters, float eps, Tensor? used_reference=None)"
    " -> (Tensor grad_mixes, Tensor grad_scale, Tensor grad_base)",
    tags=_tags,
)


@checks.remembered
def _check_projection(x: Tensor, weight: Tensor, pre_mix: Tensor | None, eps: float) -> None:
    arguments.projection(x, weight, pre_mix, eps)
    if pre_mix is not None:
        checks.dtype("pre_mix", pre_mix, torch.float32)


@checks.remembered
def _check_projection_backward(
    x: Tensor, weight: Tensor, pre_mix: Tensor | None, mixes: Tensor, rstd: Tensor, *gradients: Tensor | None
) -> None:
    _check_projection(x, weight, pre_mix, 0.0)
    arguments.tensors(x, {"mixes": (mixes, torch.float32, (*x.shape[:-2], weight.shape[0]))})
    arguments.projection_gradients(x, weight, pre_mix, rstd, *gradients)


@checks.remembered
def _check_hyper_connection(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    base: Tensor,
    pre_mix: Tensor | None,
    rms_eps: float,
    hc_eps: float,
    iters: int,
) -> None:
    arguments.hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
    if pre_mix is not None:
        checks.dtype("pre_mix", pre_mix, torch.float32)


@checks.remembered
def _check_hyper_connection_backward(
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
) -> None:
    _check_hyper_connection(x, weight, scale, base, pre_mix, 0.0, hc_eps, iters)
    lead = x.shape[:-2]
    arguments.tensors(x, {"mixes": (mixes, torch.float32, (weight.shape[0], math.prod(lead)))})
    arguments.projection_gradients(x, weight, pre_mix, rstd, None, grad_collapsed, grad_x_addend)
    arguments.gate_gradients(x, lead, grad_pre, grad_post, grad_comb, x.shape[-2])


@checks.remembered
def _check_gates(mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float) -> None:
    arguments.gates(mixes, scale, base, hc, iters, eps)


@checks.remembered
def _check_gates_backward(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    grad_pre: Tensor,
    grad_post: Tensor,
    grad_comb: Tensor,
    hc: int,
    iters: int,
    eps: float,
) -> None:
    _check_gates(mixes, scale, base, hc, iters, eps)
    arguments.gate_gradients(mixes, mixes.shape[:-1], grad_pre, grad_post, grad_comb, hc)


def _use_kernel(what: str, t: Tensor, used_reference: Tensor | None = None) -> bool:
    """Whether the kernel runs on t, not the definition. `what` names the caller's function in errors."""
    return dispatch.use_kernel_as_forward("mhc_projection", t, what, used_reference)


def _projection_forward(x, weight, pre_mix, eps):
    _check_projection(x, weight, pre_mix, eps)
    if _use_kernel("mhc_projection", x):
        return *launch.projection_forward(x, weight, pre_mix, eps), dispatch.reference_flag()
    mixes, rstd, collapsed = reference.projection_forward(flatten(x, 2), weight, flatten(pre_mix, 1), eps)
    lead = x.shape[:-2]
    return unflatten(mixes, lead), rstd, unflatten(collapsed, lead), dispatch.reference_flag()


def _projection_backward(
    x,
    weight,
    pre_mix,
    mixes,
    rstd,
    grad_mixes,
    grad_collapsed,
    grad_x_addend,
    need_x=True,
    need_weight=True,
    need_pre_mix=True,
    used_reference=None,
):
    gradients = grad_mixes, grad_collapsed, grad_x_addend
    _check_projection_backward(x, weight, pre_mix, mixes, rstd, *gradients)
    needs = need_x, need_weight, need_pre_mix
    if _use_kernel("the backward of mhc_projection", x, used_reference):
        return launch.projection_backward(x, weight, pre_mix, mixes, rstd, *gradients, *needs)
    flat = (flatten(x, 2), weight, flatten(pre_mix, 1), flatten(mixes, 1), rstd)
    flat += (flatten(grad_mixes, 1), flatten(grad_collapsed, 1), flatten(grad_x_addend, 2))
    grad_x, grad_weight, grad_pre_mix = reference.projection_backward(*flat, *needs)
    lead = x.shape[:-2]
    return unflatten(grad_x, lead), grad_weight, unflatten(grad_pre_mix, lead)


def _gates_forward(mixes, scale, base, hc, iters, eps):
    _check_gates(mixes, scale, base, hc, iters, eps)
    if _use_kernel("mhc_gates", mixes):
        return *launch.gates_forward(mixes, scale, base, hc, iters, eps), dispatch.reference_flag()
    gates = reference.gates_forward(flatten(mixes, 1), scale, base, hc, iters, eps)
    lead = mixes.shape[:-1]
    return *(unflatten(gate, lead) for gate in gates), dispatch.reference_flag()


def _gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps, used_reference=None):
    _check_gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps)
    if _use_kernel("the backward of mhc_gates", mixes, used_reference):
        return launch.gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps)
    gradients = flatten(grad_pre, 1), flatten(grad_post, 1), flatten(grad_comb, 2)
    grad_mixes, *parameters = reference.gates_backward(flatten(mixes, 1), scale, base, *gradients, hc, iters, eps)
    return unflatten(grad_mixes, mixes.shape[:-1]), *parameters


def _hyper_connection_forward(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
    _check_hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
    if _use_kernel("hyper_connection", x):
        results = launch.hyper_connection_forward(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
        return *results, dispatch.reference_flag()
    flat = flatten(x, 2), weight, scale, base, flatten(pre_mix, 1), rms_eps, hc_eps, iters
    *results, mixes, rstd = reference.hyper_connection_forward(*flat)
    lead = x.shape[:-2]
    return *(unflatten(result, lead) for result in results), mixes, rstd, dispatch.reference_flag()


def _hyper_connection_backward(
    x,
    weight,
    scale,
    base,
    pre_mix,
    mixes,
    rstd,
    grad_pre,
    grad_post,
    grad_comb,
    grad_collapsed,
    grad_x_addend,
    hc_eps,
    iters,
    need_x=True,
    need_weight=True,
    need_pre_mix=True,
    used_reference=None,
):
    gradients = grad_pre, grad_post, grad_comb, grad_collapsed, grad_x_addend
    _check_hyper_connection_backward(x, weight, scale, base, pre_mix, mixes, rstd, *gradients, hc_eps, iters)
    rest = hc_eps, iters, need_x, need_weight, need_pre_mix
    if _use_kernel("the backward of hyper_connection", x, used_reference):
        operands = x, weight, scale, base, pre_mix, mixes, rstd
        return launch.hyper_connection_backward(*operands, *gradients, *rest)
    flat = (flatten(x, 2), weight, scale, base, flatten(pre_mix, 1), mixes, rstd)
    flat += (flatten(grad_pre, 1), flatten(grad_post, 1), flatten(grad_comb, 2))
    flat += (flatten(grad_collapsed, 1), flatten(grad_x_addend, 2))
    grad_x, *parameters, grad_pre_mix = reference.hyper_connection_backward(*flat, *rest)
    lead = x.shape[:-2]
    return unflatten(grad_x, lead), *parameters, unflatten(grad_pre_mix, lead)


_implementations = {
    "projection_forward": _projection_forward,
    "projection_backward": _projection_backward,
    "hyper_connection_forward": _hyper_connection_forward,
    "hyper_connection_backward": _hyper_connection_backward,
    "gates_forward": _gates_forward,
    "gates_backward": _gates_backward,
}
for _name, _implementation in _implementations.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)


@torch.library.register_fake("mhc_projection::projection_forward", lib=_library)
def _(x, weight, pre_mix, eps):
    _check_projection(x, weight, pre_mix, eps)
    *lead, _, d = x.shape
    return (
        x.new_empty((*lead, weight.shape[0]), dtype=torch.float32),
        x.new_empty((math.prod(lead),), dtype=torch.float32),
        x.new_empty((0,) if pre_mix is None else (*lead, d)),
        torch.empty((), dtype=torch.bool, device="cpu"),
    )


@torch.library.register_fake("mhc_projection::projection_backward", lib=_library)
def _(
    x,
    weight,
    pre_mix,
    mixes,
    rstd,
    grad_mixes,
    grad_collapsed,
    grad_x_addend,
    need_x=True,
    need_weight=True,
    need_pre_mix=True,
    used_reference=None,
):
    _check_projection_backward(x, weight, pre_mix, mixes, rstd, grad_mixes, grad_collapsed, grad_x_addend)
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(weight.shape if need_weight else (0,), dtype=torch.float32),
        x.new_empty(x.shape[:-1] if need_pre_mix and pre_mix is not None else (0,), dtype=torch.float32),
    )


@torch.library.register_fake("mhc_projection::hyper_connection_forward", lib=_library)
def _(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
    _check_hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
    *lead, hc, d = x.shape
    tokens = math.prod(lead)
    return (
        *(x.new_empty((*lead, *rest), dtype=torch.float32) for rest in ((hc,), (hc,), (hc, hc))),
        x.new_empty((0,) if pre_mix is None else (*lead, d)),
        x.new_empty((weight.shape[0], tokens), dtype=torch.float32),
        x.new_empty((tokens,), dtype=torch.float32),
        torch.empty((), dtype=torch.bool, device="cpu"),
    )


@torch.library.register_fake("mhc_projection::hyper_connection_backward", lib=_library)
def _(
    x,
    weight,
    scale,
    base,
    pre_mix,
    mixes,
    rstd,
    grad_pre,
    grad_post,
    grad_comb,
    grad_collapsed,
    grad_x_addend,
    hc_eps,
    iters,
    need_x=True,
    need_weight=True,
    need_pre_mix=True,
    used_reference=None,
):
    operands = (x, weight, scale, base, pre_mix, mixes, rstd, grad_pre, grad_post, grad_comb)
    _check_hyper_connection_backward(*operands, grad_collapsed, grad_x_addend, hc_eps, iters)
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(weight.shape if need_weight else (0,), dtype=torch.float32),
        x.new_empty((3,), dtype=torch.float32),
        x.new_empty((weight.shape[0],), dtype=torch.float32),
        x.new_empty(x.shape[:-1] if need_pre_mix and pre_mix is not None else (0,), dtype=torch.float32),
    )


@torch.library.register_fake("mhc_projection::gates_forward", lib=_library)
def _(mixes, scale, base, hc, iters, eps):
    _check_gates(mixes, scale, base, hc, iters, eps)
    lead = mixes.shape[:-1]
    shapes = (*lead, hc), (*lead, hc), (*lead, hc, hc)
    return *(mixes.new_empty(shape) for shape in shapes), torch.empty((), dtype=torch.bool, device="cpu")


@torch.library.register_fake("mhc_projection::gates_backward", lib=_library)
def _(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps, used_reference=None):
    _check_gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps)
    return tuple(mixes.new_empty(shape) for shape in (mixes.shape, (3,), (mixes.shape[-1],)))


derivatives.register(_library, "mhc_projection", _implementations, autograd.FORMULAS)
