"""Host side of the kernels: results and workspace, and the launches that `plan` describes.

Tensors come and go with any leading dimensions, as in the operators: the kernels see addresses and numbers of tokens.
"""

import math

import torch
from torch import Tensor

from mhc_projection import plan
from mhc_projection.arguments import MAX_LOGITS

variants = plan.variants


def projection_forward(x: Tensor, weight: Tensor, pre_mix: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes, rstd and collapsed, as `reference.projection_forward`, on the current stream of the device of x.

    Workspace: 4 (n + 1) bytes a token for about every 640 channels of a stream; a bf16 copy of the weight; a copy of an
    x or pre_mix that is not contiguous and aligned to 16 bytes.
    """
    *lead, hc, d = x.shape
    tokens = math.prod(lead)
    mixes, rstd = plan.fp32(x, *lead, weight.shape[0]), plan.fp32(x, tokens)
    collapsed = x.new_empty(0) if pre_mix is None else x.new_empty(*lead, d)
    if tokens:
        with torch.cuda.device_of(x):
            parts = _project(x, weight, pre_mix, collapsed)
            plan.finish(parts, mixes, rstd, eps, hc * d).run()
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
    """Gradients of x, weight (fp32) and pre_mix, as `reference.projection_backward`.

    Workspace: 132 bytes a token and 4 more; 4 n hc d bytes for each chunk of 512 to 2048 tokens (`plan.chunk_size`), if
    it is not the only one; 4 hc bytes a token for each block of 64 channels; copies of what is not contiguous, and of
    the weight in bf16.
    """
    tokens = rstd.shape[0]
    prepared = None
    with torch.cuda.device_of(x):
        if grad_mixes is not None and tokens:
            prepared = _prepared(x, weight, tokens)
            saved = _readable(mixes), _readable(rstd)
            plan.prepare(*saved, _readable(grad_mixes), *prepared, x.shape[-2] * x.shape[-1]).run()
        return _backward(x, weight, pre_mix, prepared, grad_collapsed, grad_x_addend, need_x, need_weight, need_pre_mix)


def gates_forward(
    mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre, post and comb, as `reference.gates_forward`. No workspace."""
    lead = mixes.shape[:-1]
    gates = mixes.new_empty(*lead, hc), mixes.new_empty(*lead, hc), mixes.new_empty(*lead, hc, hc)
    if mixes.numel():
        with torch.cuda.device_of(mixes):
            plan.gates(None, _readable(mixes), None, _readable(scale), _readable(base), gates, 0, eps, 1, iters).run()
    return gates


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
    """Gradients of mixes, scale and base, as `reference.gates_backward`.

    Workspace: 8 hc (iters - 1) bytes a token, and 8 n bytes for each 32 tokens.
    """
    *lead, n = mixes.shape
    tokens = math.prod(lead)
    grad_mixes = mixes.new_empty(*lead, n)
    if tokens == 0:
        return grad_mixes, mixes.new_zeros(3), mixes.new_zeros(n)
    with torch.cuda.device_of(mixes):
        parameters = _readable(scale), _readable(base)
        grads = _readable(grad_pre), _readable(grad_post), _readable(grad_comb)
        workspace = plan.gate_workspace(mixes, tokens, hc, iters)
        plan.gates_backward(_readable(mixes), None, *parameters, grads, (grad_mixes,), workspace, eps, 1, iters).run()
        grad_scale, grad_base = mixes.new_empty(3), mixes.new_empty(n)
        plan.sums(hc, tokens, gates=(workspace[:2], (grad_base, grad_scale))).run()
    return grad_mixes, grad_scale, grad_base


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
    """Pre, post, comb, collapsed, mixes (n, T) and rstd, as `reference.hyper_connection_forward`.

    Workspace as for `projection_forward`.
    """
    *lead, hc, d = x.shape
    tokens = math.prod(lead)
    rstd = plan.fp32(x, tokens)
    fp32 = rstd.new_empty  # quicker than to name the dtype each time
    gates, mixes = (fp32(*lead, hc), fp32(*lead, hc), fp32(*lead, hc, hc)), fp32(weight.shape[0], tokens)
    collapsed = x.new_empty(0) if pre_mix is None else x.new_empty(*lead, d)
    if tokens:
        with torch.cuda.device_of(x):
            parts = _project(x, weight, pre_mix, collapsed)
            parameters = _readable(scale), _readable(base)
            plan.gates(parts, mixes, rstd, *parameters, gates, rms_eps, hc_eps, hc * d, iters).run()
    return *gates, collapsed, mixes, rstd


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
    """Gradients of x, weight, scale, base and pre_mix, as `reference.hyper_connection_backward`.

    Workspace: that of `projection_backward` and of `gates_backward`.
    """
    *lead, hc, d = x.shape
    tokens = math.prod(lead)
    grads = [grad_pre, grad_post, grad_comb]
    prepared = sums = None
    grad_scale, grad_base = plan.fp32(x, 3), plan.fp32(x, weight.shape[0])
    with torch.cuda.device_of(x):
        if tokens == 0 or all(grad is None for grad in grads):
            grad_scale.zero_(), grad_base.zero_()
        else:
            for i, grad in enumerate(grads):
                shape = (*lead, hc) if i < 2 else (*lead, hc, hc)
                grads[i] = x.new_zeros(shape, dtype=torch.float32) if grad is None else _readable(grad)
            prepared, workspace = _prepared(x, weight, tokens), plan.gate_workspace(x, tokens, hc, iters)
            saved = _readable(mixes), _readable(rstd), _readable(scale), _readable(base)
            plan.gates_backward(*saved, grads, prepared, workspace, hc_eps, hc * d, iters).run()
            sums = workspace[:2], (grad_base, grad_scale)
        grad_x, grad_weight, grad_pre_mix = _backward(
            x, weight, pre_mix, prepared, grad_collapsed, grad_x_addend, need_x, need_weight, need_pre_mix, sums
        )
    return grad_x, grad_weight, grad_scale, grad_base, grad_pre_mix


def _project(x: Tensor, weight: Tensor, pre_mix: Tensor | None, collapsed: Tensor) -> Tensor:
    """Run the forward's kernel: parts (splits, n + 1, T) of the products and, last, of the scaled sums of squares."""
    tokens = math.prod(x.shape[:-2])
    parts = plan.fp32(x, plan.splits(x.shape[-1]), weight.shape[0] + 1, tokens)
    pre_mix = None if pre_mix is None else _readable(pre_mix)
    plan.projection(_readable(x), _readable(weight.bfloat16()), pre_mix, parts, collapsed).run()
    return parts


def _prepared(x: Tensor, weight: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """What is prepared for the backward's kernel, to be written: q, coef, (the weight,) it in bf16, items taken."""
    q, coef = x.new_empty(tokens, 2 * MAX_LOGITS), plan.fp32(x, tokens)
    narrow = None if weight.dtype == torch.bfloat16 else x.new_empty(weight.shape)
    return q, coef, _readable(weight), narrow, x.new_empty(1, dtype=torch.int32)


def _backward(
    x: Tensor,
    weight: Tensor,
    pre_mix: Tensor | None,
    prepared: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor] | None,
    grad_collapsed: Tensor | None,
    addend: Tensor | None,
    need_x: bool,
    need_weight: bool,
    need_pre_mix: bool,
    gate_sums: tuple | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward's kernel on what was prepared (None: no gradient of the logits), and add all parts."""
    *lead, hc, d = x.shape
    tokens, n = math.prod(lead), weight.shape[0]
    need_pre_mix = need_pre_mix and pre_mix is not None
    flow_weight, flow_pre_mix = need_weight and prepared is not None, need_pre_mix and grad_collapsed is not None
    grad_x = x.new_empty(x.shape) if need_x else x.new_empty(0)
    grad_weight = _parameter_gradient(x, weight.shape, need_weight, flow_weight)
    grad_pre_mix = _parameter_gradient(x, (*lead, hc), need_pre_mix, flow_pre_mix)
    weight_sum = pre_mix_sum = None
    if tokens == 0 or (prepared is None and grad_collapsed is None):
        if need_x:
            grad_x.zero_() if addend is None else grad_x.copy_(addend)
    elif need_x or flow_weight or flow_pre_mix:
        chunk = plan.chunk_size(tokens, hc, d)
        part_weight = part_pre_mix = None
        if flow_weight:
            chunks = -(-tokens // chunk)
            part_weight = grad_weight if chunks == 1 else plan.fp32(x, chunks, n, hc * d)
            weight_sum = None if chunks == 1 else (part_weight, grad_weight)
        if flow_pre_mix:
            part_pre_mix = plan.fp32(x, -(-d // plan.CHANNELS), hc, tokens)
            pre_mix_sum = part_pre_mix, grad_pre_mix
        q = coef = None
        if prepared is None:
            taken = x.new_zeros(1, dtype=torch.int32)
        else:
            q, coef, weight, narrow, taken = prepared
            weight = weight if narrow is None else narrow
            if not (need_x or flow_weight):
                q = coef = None
        plan.projection_backward(
            _readable(x),
            weight,
            None if grad_collapsed is None else _readable(pre_mix),
            q,
            coef,
            None if grad_collapsed is None else _readable(grad_collapsed),
            _readable(addend) if need_x and addend is not None else None,
            grad_x if need_x else None,
            part_weight,
            part_pre_mix,
            taken,
            chunk,
        ).run()
    if gate_sums or weight_sum or pre_mix_sum:
        plan.sums(hc, tokens, gate_sums, weight_sum, pre_mix_sum).run()
    return grad_x, grad_weight, grad_pre_mix


def _parameter_gradient(x: Tensor, shape: tuple[int, ...], needed: bool, flows: bool) -> Tensor:
    """An fp32 result to be written, zeros where nothing flows, empty where it is not needed."""
    if not needed:
        return plan.fp32(x, 0)
    return plan.fp32(x, *shape) if flows else x.new_zeros(shape, dtype=torch.float32)


def _readable(t: Tensor) -> Tensor:
    """t itself where the kernels can read it: contiguous and aligned to 16 bytes. Else a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
