"""The operators: schemas, argument checks, fakes, and which implementation runs. Derivatives: `autograd.py`.

The operators call the function of their name in `reference` or in `launch`: `forward`, `backward`, `backward_data` and
`weight_grad`.

The last result of the forward operator, `used_reference`, a 0-dim bool on the CPU, says whether the caller was inside
`hopper_kernels.reference()`. Autograd hands it to the backward operator, which so runs the implementation that its
forward ran, although autograd's threads do not see the block. Why it is a tensor is said in `dispatch.reference_flag`.
"""

import importlib
import os
from types import ModuleType

import torch
from hopper_kernels import derivatives, dispatch
from torch import Tensor

from moe_experts import arguments, autograd, reference

OPS_NAMESPACE = "moe_experts"
"""Namespace of the operators, `torch.ops.moe_experts`."""

_library = torch.library.Library(OPS_NAMESPACE, "DEF")
_tags = (torch.Tag.pt2_compliant_tag,)
_WEIGHTS = "Tensor gate_proj, Tensor? up_proj, Tensor down_proj, Tensor num_tokens_per_expert"
_library.define(
    f"moe_experts_forward(Tensor x, {_WEIGHTS}, float swiglu_limit)"
    " -> (Tensor out, Tensor gate, Tensor up, Tensor used_reference)",
    tags=_tags,
)
_library.define(
    f"moe_experts_backward(Tensor dout, Tensor x, {_WEIGHTS}, Tensor gate, Tensor up, float swiglu_limit,"
    " bool need_x=True, bool need_gate=True, bool need_up=True, bool need_down=True, Tensor? used_reference=None)"
    " -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor dw2)",
    tags=_tags,
)
_library.define(
    f"moe_experts_backward_data(Tensor dout, {_WEIGHTS}, Tensor gate, Tensor up, float swiglu_limit)"
    " -> (Tensor dx, Tensor dgate_dup, Tensor h)",
    tags=_tags,
)
_library.define(
    "moe_experts_weight_grad(Tensor dout, Tensor x, Tensor num_tokens_per_expert, Tensor dgate_dup, Tensor h,"
    " bool packed) -> (Tensor dw1, Tensor dw3, Tensor dw2)",
    tags=_tags,
)


def _launch() -> ModuleType:
    """The kernels' host side, which nothing else needs."""
    return importlib.import_module("moe_experts.launch")


def use_kernel(what: str, t: Tensor, used_reference: Tensor | None = None) -> bool:
    """Whether the kernel runs on t, not the definition. `what` names the caller's function in errors."""
    return dispatch.use_kernel_as_forward("moe_experts", t, what, used_reference)


def for_kernels(num_tokens_per_expert: Tensor, rows: int) -> Tensor:
    """The group sizes as the kernels read them, looked at here only if the environment asks for that."""
    if os.environ.get("MOE_EXPERTS_CHECK") == "1":
        arguments.group_sizes(num_tokens_per_expert, rows)
    return num_tokens_per_expert.contiguous()


def check_backward_data(dout, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit):
    weights = gate_proj, up_proj, down_proj
    arguments.experts("dout", dout, *weights, num_tokens_per_expert, swiglu_limit)
    arguments.activations(dout, gate=(gate, down_proj.shape[2]), up=(up, down_proj.shape[2]))
    arguments.contiguous(gate=gate, up=up)


def check_backward(dout, x, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit):
    arguments.experts("x", x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit)
    arguments.activations(x, dout=(dout, x.shape[1]), gate=(gate, down_proj.shape[2]), up=(up, down_proj.shape[2]))
    arguments.contiguous(x=x, gate=gate, up=up)


def _forward(x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit):
    weights = gate_proj, up_proj, down_proj
    arguments.experts("x", x, *weights, num_tokens_per_expert, swiglu_limit)
    arguments.contiguous(x=x)
    arguments.memory(x=x, gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)
    if use_kernel("moe_experts", x):
        counts = for_kernels(num_tokens_per_expert, x.shape[0])
        return *_launch().forward(x, *weights, counts, swiglu_limit), dispatch.reference_flag()
    return *reference.forward(x, *weights, num_tokens_per_expert, swiglu_limit), dispatch.reference_flag()


def _backward(
    dout,
    x,
    gate_proj,
    up_proj,
    down_proj,
    num_tokens_per_expert,
    gate,
    up,
    swiglu_limit,
    need_x=True,
    need_gate=True,
    need_up=True,
    need_down=True,
    used_reference=None,
):
    weights = gate_proj, up_proj, down_proj
    check_backward(dout, x, *weights, num_tokens_per_expert, gate, up, swiglu_limit)
    arguments.memory(x=x, gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj, gate=gate, up=up)
    rest = gate, up, swiglu_limit, need_x, need_gate, need_up, need_down
    if not use_kernel("the backward of moe_experts", x, used_reference):
        return reference.backward(dout, x, *weights, num_tokens_per_expert, *rest)
    counts = for_kernels(num_tokens_per_expert, x.shape[0])
    return _launch().backward(arguments.readable(dout), x, *weights, counts, *rest)


def _backward_data(dout, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit):
    weights = gate_proj, up_proj, down_proj
    check_backward_data(dout, *weights, num_tokens_per_expert, gate, up, swiglu_limit)
    arguments.memory(gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj, gate=gate, up=up)
    if not use_kernel("moe_experts_backward_data", dout):
        return reference.backward_data(dout, *weights, num_tokens_per_expert, gate, up, swiglu_limit)
    counts = for_kernels(num_tokens_per_expert, dout.shape[0])
    return _launch().backward_data(arguments.readable(dout), *weights, counts, gate, up, swiglu_limit)


def _weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h, packed):
    arguments.weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h)
    arguments.memory(x=x, dgate_dup=dgate_dup, h=h)
    if not use_kernel("moe_experts_weight_grad", x):
        return reference.weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h, packed)
    counts = for_kernels(num_tokens_per_expert, x.shape[0])
    return _launch().weight_grad(arguments.readable(dout), x, counts, dgate_dup, h, packed)


_implementations = {
    "moe_experts_forward": _forward,
    "moe_experts_backward": _backward,
    "moe_experts_backward_data": _backward_data,
    "moe_experts_weight_grad": _weight_grad,
}
for _name, _implementation in _implementations.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)


@torch.library.register_fake("moe_experts::moe_experts_forward", lib=_library)
def _(x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit):
    arguments.experts("x", x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit)
    arguments.contiguous(x=x)
    inner = x.shape[0], down_proj.shape[2]
    flag = torch.empty((), dtype=torch.bool, device="cpu")
    return x.new_empty(x.shape), x.new_empty(inner), x.new_empty(inner), flag


@torch.library.register_fake("moe_experts::moe_experts_backward", lib=_library)
def _(
    dout,
    x,
    gate_proj,
    up_proj,
    down_proj,
    num_tokens_per_expert,
    gate,
    up,
    swiglu_limit,
    need_x=True,
    need_gate=True,
    need_up=True,
    need_down=True,
    used_reference=None,
):
    check_backward(dout, x, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit)
    return (
        x.new_empty(x.shape if need_x else (0,)),
        x.new_empty(gate_proj.shape if need_gate else (0,)),
        x.new_empty(up_proj.shape if need_up and up_proj is not None else (0,)),
        x.new_empty(down_proj.shape if need_down else (0,)),
    )


@torch.library.register_fake("moe_experts::moe_experts_backward_data", lib=_library)
def _(dout, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit):
    check_backward_data(dout, gate_proj, up_proj, down_proj, num_tokens_per_expert, gate, up, swiglu_limit)
    rows, inner = dout.shape[0], down_proj.shape[2]
    return dout.new_empty(dout.shape), dout.new_empty((rows, 2 * inner)), dout.new_empty((rows, inner))


@torch.library.register_fake("moe_experts::moe_experts_weight_grad", lib=_library)
def _(dout, x, num_tokens_per_expert, dgate_dup, h, packed):
    arguments.weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h)
    experts, hidden, inner = num_tokens_per_expert.shape[0], x.shape[1], h.shape[1]
    return (
        x.new_empty((experts, 2 * inner if packed else inner, hidden)),
        x.new_empty((0,) if packed else (experts, inner, hidden)),
        x.new_empty((experts, hidden, inner)),
    )


derivatives.register(_library, OPS_NAMESPACE, _implementations, autograd.FORMULAS)
