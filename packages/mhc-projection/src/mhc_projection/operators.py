"""The operators: schemas, argument checks, fakes, and which implementation runs. Derivatives: `autograd.py`.

The operators work on flattened tokens, x (T, hc, d), and call the function of their name in `launch` or `reference`,
which takes and returns the same, but for `used_reference`. That last result of the forward operators, a 0-dim bool on
the CPU, says whether the caller was inside `hopper_kernels.reference()`. Autograd hands it to the backward operator,
which so runs the implementation that its forward ran, although autograd's threads do not see the block. It is a tensor
because `torch.compile` would fix a flag of the schema when it traces; this one is looked at when the graph runs, as the
choice itself is. It is on the CPU because reading it must not wait for the GPU.
"""

import contextlib

import torch
from hopper_kernels import checks, dispatch
from torch import Tensor

from mhc_projection import arguments, autograd, launch, reference

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
    checks.ndim("x", x, 3)
    arguments.projection(x, weight, pre_mix, eps)
    if pre_mix is not None:
        checks.dtype("pre_mix", pre_mix, torch.float32)


@checks.remembered
def _check_projection_backward(
    x: Tensor, weight: Tensor, pre_mix: Tensor | None, mixes: Tensor, rstd: Tensor, *gradients: Tensor | None
) -> None:
    _check_projection(x, weight, pre_mix, 0.0)
    arguments.projection_gradients(x, weight, pre_mix, mixes, rstd, *gradients)


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
    checks.ndim("x", x, 3)
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
    checks.shape("mixes", mixes, (weight.shape[0], x.shape[0]))
    arguments.projection_gradients(x, weight, pre_mix, mixes.t(), rstd, None, grad_collapsed, grad_x_addend)
    arguments.gate_gradients(mixes.t(), grad_pre, grad_post, grad_comb, x.shape[1])


@checks.remembered
def _check_gates(mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float) -> None:
    checks.ndim("mixes", mixes, 2)
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
    arguments.gate_gradients(mixes, grad_pre, grad_post, grad_comb, hc)


def _run(what: str, function: str, used_reference: Tensor | None, t: Tensor, *rest):
    """The kernel's or the definition's `function` of (t, *rest). `what` names the caller's function in errors."""
    remembered = used_reference is not None and used_reference.item()
    with dispatch.reference() if remembered else contextlib.nullcontext():
        kernel = dispatch.use_kernel("mhc_projection", t, what)
    return getattr(launch if kernel else reference, function)(t, *rest)


def _used_reference() -> Tensor:
    return torch.tensor(dispatch.reference_requested(), device="cpu")


def _projection_forward(x, weight, pre_mix, eps):
    _check_projection(x, weight, pre_mix, eps)
    return *_run("mhc_projection", "projection_forward", None, x, weight, pre_mix, eps), _used_reference()


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
    operands = (x, weight, pre_mix, mixes, rstd, grad_mixes, grad_collapsed, grad_x_addend)
    _check_projection_backward(*operands)
    what = "the backward of mhc_projection"
    return _run(what, "projection_backward", used_reference, *operands, need_x, need_weight, need_pre_mix)


def _gates_forward(mixes, scale, base, hc, iters, eps):
    _check_gates(mixes, scale, base, hc, iters, eps)
    return *_run("mhc_gates", "gates_forward", None, mixes, scale, base, hc, iters, eps), _used_reference()


def _gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps, used_reference=None):
    gradients = (grad_pre, grad_post, grad_comb)
    _check_gates_backward(mixes, scale, base, *gradients, hc, iters, eps)
    what = "the backward of mhc_gates"
    return _run(what, "gates_backward", used_reference, mixes, scale, base, *gradients, hc, iters, eps)


def _hyper_connection_forward(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
    operands = (x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
    _check_hyper_connection(*operands)
    return *_run("hyper_connection", "hyper_connection_forward", None, *operands), _used_reference()


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
    operands = (x, weight, scale, base, pre_mix, mixes, rstd, grad_pre, grad_post, grad_comb)
    operands += (grad_collapsed, grad_x_addend, hc_eps, iters)
    _check_hyper_connection_backward(*operands)
    what = "the backward of hyper_connection"
    return _run(what, "hyper_connection_backward", used_reference, *operands, need_x, need_weight, need_pre_mix)


for _key in ("CPU", "CUDA"):
    _library.impl("projection_forward", _projection_forward, _key)
    _library.impl("projection_backward", _projection_backward, _key)
    _library.impl("hyper_connection_forward", _hyper_connection_forward, _key)
    _library.impl("hyper_connection_backward", _hyper_connection_backward, _key)
    _library.impl("gates_forward", _gates_forward, _key)
    _library.impl("gates_backward", _gates_backward, _key)


@torch.library.register_fake("mhc_projection::projection_forward", lib=_library)
def _(x, weight, pre_mix, eps):
    _check_projection(x, weight, pre_mix, eps)
    tokens, _, d = x.shape
    return (
        x.new_empty((tokens, weight.shape[0]), dtype=torch.float32),
        x.new_empty((tokens,), dtype=torch.float32),
        x.new_empty((0,) if pre_mix is None else (tokens, d)),
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
        x.new_empty(x.shape[:2] if need_pre_mix and pre_mix is not None else (0,), dtype=torch.float32),
    )


@torch.library.register_fake("mhc_projection::hyper_connection_forward", lib=_library)
def _(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters):
    _check_hyper_connection(x, weight, scale, base, pre_mix, rms_eps, hc_eps, iters)
    tokens, hc, d = x.shape
    shapes = (tokens, hc), (tokens, hc), (tokens, hc, hc)
    return (
        *(x.new_empty(shape, dtype=torch.float32) for shape in shapes),
        x.new_empty((0,) if pre_mix is None else (tokens, d)),
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
        x.new_empty(x.shape[:2] if need_pre_mix and pre_mix is not None else (0,), dtype=torch.float32),
    )


@torch.library.register_fake("mhc_projection::gates_forward", lib=_library)
def _(mixes, scale, base, hc, iters, eps):
    _check_gates(mixes, scale, base, hc, iters, eps)
    tokens = mixes.shape[0]
    shapes = (tokens, hc), (tokens, hc), (tokens, hc, hc)
    return *(mixes.new_empty(shape) for shape in shapes), torch.empty((), dtype=torch.bool, device="cpu")


@torch.library.register_fake("mhc_projection::gates_backward", lib=_library)
def _(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps, used_reference=None):
    _check_gates_backward(mixes, scale, base, grad_pre, grad_post, grad_comb, hc, iters, eps)
    return tuple(mixes.new_empty(shape) for shape in (mixes.shape, (3,), (mixes.shape[1],)))


autograd.register(_library)
