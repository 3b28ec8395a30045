"""The FP8 operators: schemas, argument checks, fakes, and which implementation runs. Derivatives: `autograd.py`.

The operators call the functions of `reference` or of `launch`, which have the same names and arguments.
`used_reference` is explained in `moe_experts.operators`.
"""

import importlib
from types import ModuleType

import torch
from hopper_kernels import derivatives, dispatch
from torch import Tensor

from moe_experts import arguments
from moe_experts.fp8 import arguments as fp8_arguments
from moe_experts.fp8 import autograd, layout, reference
from moe_experts.fp8.layout import CODES
from moe_experts.operators import OPS_NAMESPACE, for_kernels, use_kernel

_library = torch.library.Library(OPS_NAMESPACE, "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_COUNTS = "Tensor num_tokens_per_expert"
_WEIGHTS = "Tensor gate_proj, Tensor? up_proj, Tensor down_proj"
_TRANSPOSED = "Tensor w13_t, Tensor w13_t_sf, Tensor w2_t, Tensor w2_t_sf"
_KEPT = f"{_COUNTS}, Tensor gate_up, Tensor x_t, Tensor x_t_sf, {_TRANSPOSED}, float swiglu_limit"
_COLUMNS = "Tensor dout_t, Tensor dout_t_sf, Tensor h_t, Tensor h_t_sf, Tensor dgu_t, Tensor dgu_t_sf"
_SUMS = "Tensor(a!) dw13, Tensor(b!) dw2, bool accumulate=True"
_library.define(
    f"moe_experts_fp8_quantize_weights({_WEIGHTS})"
    f" -> (Tensor w13_q, Tensor w13_sf, Tensor w2_q, Tensor w2_sf, {_TRANSPOSED})",
    tags=_tags,
)
_library.define(
    f"moe_experts_fp8_forward(Tensor x, {_WEIGHTS}, {_COUNTS}, float swiglu_limit, bool save_for_backward)"
    f" -> (Tensor out, Tensor gate_up, Tensor x_t, Tensor x_t_sf, {_TRANSPOSED}, Tensor used_reference)",
    tags=_tags,
)
_library.define(
    f"moe_experts_fp8_forward_quantized(Tensor x, {_COUNTS}, float swiglu_limit,"
    " Tensor w13_q, Tensor w13_sf, Tensor w2_q, Tensor w2_sf)"
    " -> (Tensor out, Tensor gate_up, Tensor x_t, Tensor x_t_sf)",
    tags=_tags,
)
_library.define(
    f"moe_experts_fp8_backward(Tensor dout, {_KEPT}, bool packed, bool need_x=True, bool need_gate=True,"
    " bool need_up=True, bool need_down=True, Tensor? used_reference=None)"
    " -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor dw2)",
    tags=_tags,
)
_library.define(f"moe_experts_fp8_backward_accumulate(Tensor dout, {_KEPT}, {_SUMS}) -> Tensor dx", tags=_tags)
_library.define(
    f"moe_experts_fp8_backward_data(Tensor dout, {_COUNTS}, Tensor gate_up, {_TRANSPOSED}, float swiglu_limit)"
    f" -> (Tensor dx, {_COLUMNS})",
    tags=_tags,
)
_library.define(
    f"moe_experts_fp8_weight_grad_accumulate({_COUNTS}, {_COLUMNS}, Tensor x_t, Tensor x_t_sf, SymInt num_rows,"
    f" {_SUMS}) -> ()",
    tags=_tags,
)


def _implementation(what: str, t: Tensor, used_reference: Tensor | None = None) -> ModuleType:
    """`launch`, or `reference` where the definition runs on t. `what` names the caller's function in errors."""
    if not use_kernel(what, t, used_reference):
        return reference
    return importlib.import_module("moe_experts.fp8.launch")


def _group_sizes(implementation: ModuleType, num_tokens_per_expert: Tensor, rows: int) -> Tensor:
    """As the implementation reads them."""
    return num_tokens_per_expert if implementation is reference else for_kernels(num_tokens_per_expert, rows)


def _upstream(implementation: ModuleType, dout: Tensor) -> Tensor:
    """dout where the implementation can read it."""
    return dout if implementation is reference else arguments.readable(dout)


def _quantize_weights(gate_proj, up_proj, down_proj):
    fp8_arguments.weights(gate_proj, up_proj, down_proj)
    arguments.memory(gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)
    implementation = _implementation("moe_experts_fp8_quantize_weights", down_proj)
    return tuple(implementation.quantize_weights(gate_proj, up_proj, down_proj, True))


def _forward(x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit, save_for_backward):
    weights = gate_proj, up_proj, down_proj
    arguments.experts("x", x, *weights, num_tokens_per_expert, swiglu_limit, True)
    arguments.contiguous(x=x)
    arguments.memory(x=x, gate_proj=gate_proj, up_proj=up_proj, down_proj=down_proj)
    implementation = _implementation("moe_experts", x)
    counts = _group_sizes(implementation, num_tokens_per_expert, x.shape[0])
    quantized = implementation.quantize_weights(*weights, save_for_backward)
    out, *rows = implementation.forward(x, counts, swiglu_limit, *quantized[:4], save_for_backward)
    return out, *rows, *quantized[4:], dispatch.reference_flag()


def _forward_quantized(x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf):
    weights = w13_q, w13_sf, w2_q, w2_sf
    fp8_arguments.forward_quantized(x, num_tokens_per_expert, swiglu_limit, *weights)
    arguments.memory(x=x, w13_q=w13_q, w13_sf=w13_sf, w2_q=w2_q, w2_sf=w2_sf)
    implementation = _implementation("moe_experts_fp8_forward_quantized", x)
    counts = _group_sizes(implementation, num_tokens_per_expert, x.shape[0])
    return implementation.forward(x, counts, swiglu_limit, *weights, True)


def _backward(
    dout,
    num_tokens_per_expert,
    gate_up,
    x_t,
    x_t_sf,
    w13_t,
    w13_t_sf,
    w2_t,
    w2_t_sf,
    swiglu_limit,
    packed,
    need_x=True,
    need_gate=True,
    need_up=True,
    need_down=True,
    used_reference=None,
):
    kept = gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf
    fp8_arguments.backward(dout, num_tokens_per_expert, *kept, swiglu_limit, packed)
    arguments.memory(**fp8_arguments.named_kept(*kept))
    implementation = _implementation("the backward of moe_experts", dout, used_reference)
    counts = _group_sizes(implementation, num_tokens_per_expert, dout.shape[0])
    needs = need_x, need_gate, need_up, need_down
    return implementation.backward(_upstream(implementation, dout), counts, *kept, swiglu_limit, packed, *needs)


def _backward_accumulate(
    dout,
    num_tokens_per_expert,
    gate_up,
    x_t,
    x_t_sf,
    w13_t,
    w13_t_sf,
    w2_t,
    w2_t_sf,
    swiglu_limit,
    dw13,
    dw2,
    accumulate=True,
):
    kept = gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf
    sums = dw13, dw2, accumulate
    fp8_arguments.backward_accumulate(dout, num_tokens_per_expert, *kept, swiglu_limit, *sums)
    arguments.memory(**fp8_arguments.named_kept(*kept))
    fp8_arguments.memory_of_sums(dw13, dw2)
    implementation = _implementation("moe_experts_fp8_backward_accumulate", dout)
    counts = _group_sizes(implementation, num_tokens_per_expert, dout.shape[0])
    dx = implementation.backward_accumulate(_upstream(implementation, dout), counts, *kept, swiglu_limit, *sums)
    _changed(dw13, dw2)
    return dx


def _backward_data(dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit):
    kept = gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf
    fp8_arguments.backward_data(dout, num_tokens_per_expert, *kept, swiglu_limit)
    arguments.memory(gate_up=gate_up, w13_t=w13_t, w13_t_sf=w13_t_sf, w2_t=w2_t, w2_t_sf=w2_t_sf)
    implementation = _implementation("moe_experts_fp8_backward_data", dout)
    counts = _group_sizes(implementation, num_tokens_per_expert, dout.shape[0])
    return tuple(implementation.backward_data(_upstream(implementation, dout), counts, *kept, swiglu_limit))


def _weight_grad_accumulate(
    num_tokens_per_expert,
    dout_t,
    dout_t_sf,
    h_t,
    h_t_sf,
    dgu_t,
    dgu_t_sf,
    x_t,
    x_t_sf,
    num_rows,
    dw13,
    dw2,
    accumulate=True,
):
    operands = dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf, x_t, x_t_sf
    sums = dw13, dw2, accumulate
    fp8_arguments.weight_grad_accumulate(num_tokens_per_expert, *operands, num_rows, *sums)
    arguments.memory(**fp8_arguments.named_columns(*operands))
    fp8_arguments.memory_of_sums(dw13, dw2)
    implementation = _implementation("moe_experts_fp8_weight_grad_accumulate", x_t)
    counts = _group_sizes(implementation, num_tokens_per_expert, num_rows)
    implementation.weight_grad_accumulate(counts, *operands, num_rows, *sums)
    _changed(dw13, dw2)


def _changed(*tensors: Tensor) -> None:
    """Tells autograd that a kernel wrote into these, for whoever saved one of them."""
    torch.autograd.graph.increment_version(tensors)


_implementations = {
    "moe_experts_fp8_quantize_weights": _quantize_weights,
    "moe_experts_fp8_forward": _forward,
    "moe_experts_fp8_forward_quantized": _forward_quantized,
    "moe_experts_fp8_backward": _backward,
    "moe_experts_fp8_backward_accumulate": _backward_accumulate,
    "moe_experts_fp8_backward_data": _backward_data,
    "moe_experts_fp8_weight_grad_accumulate": _weight_grad_accumulate,
}
for _name, _function in _implementations.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _function, _key)


def _fake(name: str):
    return torch.library.register_fake(f"{OPS_NAMESPACE}::moe_experts_fp8_{name}", lib=_library)


def _kept_rows(x: Tensor, experts: int, inner: int) -> tuple[Tensor, Tensor, Tensor]:
    padded = layout.padded_rows(x.shape[0], experts)
    return x.new_empty((padded, 2 * inner)), *layout.new_columns(x, padded, x.shape[1])


def _blocks(like: Tensor, *shapes: tuple[int, int, int]) -> list[Tensor]:
    """Codes and scales of weights of these shapes."""
    found = []
    for shape in shapes:
        found.append(like.new_empty(shape, dtype=CODES))
        found.append(like.new_empty(layout.scales_of_blocks(shape), dtype=torch.float32))
    return found


@_fake("quantize_weights")
def _(gate_proj, up_proj, down_proj):
    fp8_arguments.weights(gate_proj, up_proj, down_proj)
    experts, hidden, inner = down_proj.shape
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    return tuple(_blocks(down_proj, *shapes, *((e, columns, rows) for e, rows, columns in shapes)))


@_fake("forward")
def _(x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit, save_for_backward):
    arguments.experts("x", x, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit, True)
    arguments.contiguous(x=x)
    experts, hidden, inner = down_proj.shape
    flag = torch.empty((), dtype=torch.bool, device="cpu")
    kept = [*_kept_rows(x, experts, inner), *_blocks(x, (experts, hidden, 2 * inner), (experts, inner, hidden))]
    if not save_for_backward:
        kept = [t.new_empty(0) for t in kept]
    return x.new_empty(x.shape), *kept, flag


@_fake("forward_quantized")
def _(x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf):
    fp8_arguments.forward_quantized(x, num_tokens_per_expert, swiglu_limit, w13_q, w13_sf, w2_q, w2_sf)
    return x.new_empty(x.shape), *_kept_rows(x, w2_q.shape[0], w2_q.shape[2])


@_fake("backward")
def _(
    dout,
    num_tokens_per_expert,
    gate_up,
    x_t,
    x_t_sf,
    w13_t,
    w13_t_sf,
    w2_t,
    w2_t_sf,
    swiglu_limit,
    packed,
    need_x=True,
    need_gate=True,
    need_up=True,
    need_down=True,
    used_reference=None,
):
    kept = gate_up, x_t, x_t_sf, w13_t, w13_t_sf, w2_t, w2_t_sf
    fp8_arguments.backward(dout, num_tokens_per_expert, *kept, swiglu_limit, packed)
    experts, inner, hidden = w2_t.shape
    return (
        dout.new_empty(dout.shape if need_x else (0,)),
        dout.new_empty((experts, 2 * inner if packed else inner, hidden) if need_gate else (0,)),
        dout.new_empty((experts, inner, hidden) if need_up and not packed else (0,)),
        dout.new_empty((experts, hidden, inner) if need_down else (0,)),
    )


@_fake("backward_accumulate")
def _(dout, *rest):
    fp8_arguments.backward_accumulate(dout, *rest)
    return dout.new_empty(dout.shape)


@_fake("backward_data")
def _(dout, num_tokens_per_expert, gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf, swiglu_limit):
    kept = gate_up, w13_t, w13_t_sf, w2_t, w2_t_sf
    fp8_arguments.backward_data(dout, num_tokens_per_expert, *kept, swiglu_limit)
    experts, inner, hidden = w2_t.shape
    padded = layout.padded_rows(dout.shape[0], experts)
    columns = [layout.new_columns(dout, padded, channels) for channels in (hidden, inner, 2 * inner)]
    return dout.new_empty(dout.shape), *(t for pair in columns for t in pair)


@_fake("weight_grad_accumulate")
def _(num_tokens_per_expert, *rest):
    fp8_arguments.weight_grad_accumulate(num_tokens_per_expert, *rest)


derivatives.register(_library, OPS_NAMESPACE, _implementations, autograd.FORMULAS)
