"""Host side of the kernels: tiles, workspace, and the launches."""

import functools
from typing import TYPE_CHECKING

import torch
from hopper_kernels.launcher import Launch
from torch import Tensor

from mhc_projection.arguments import MAX_LOGITS, logits

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

# Tokens whose contributions to the weight's gradient are summed in one go: part of the definition of its bits.
CHUNK = 1024
CHANNELS = 64  # of a stream in a tile
WIDTH = 1  # tiles side by side that a program of the backward takes
SQUARES_SCALE = 2.0**-10  # of the sums of squares that the forward's kernel writes
SPLIT_CHANNELS = 640  # channels that one program of the forward takes, about

FORWARD_TOKENS, BACKWARD_TOKENS = 64, 64
FINISH = {"TOKENS": 32, "num_warps": 4}
PREPARE = {"TOKENS": 32, "num_warps": 4}
GATES = {"TOKENS": 128, "num_warps": 4}
SUM = {"PARTS": 8, "BLOCK": 256, "num_warps": 4}
PARAMETERS = {"LOGITS": MAX_LOGITS, "BLOCK": 128, "num_warps": 8}


def projection_forward(x: Tensor, weight: Tensor, pre_mix: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes, rstd and collapsed, as `reference.projection_forward`, on the current stream of the device of x.

    Workspace: (n + 1) fp32 numbers a token for each split of the channels, and a bf16 copy of the weight; a copy of an
    x or pre_mix that is not contiguous and aligned to 16 bytes.
    """
    tokens, hc, d = x.shape
    mixes, rstd = _float(x, tokens, weight.shape[0]), _float(x, tokens)
    collapsed = x.new_empty((0,) if pre_mix is None else (tokens, d))
    if tokens:
        with torch.cuda.device_of(x):
            products, squares = _project(x, weight, pre_mix, collapsed)
            _finish(products, squares, mixes, rstd, eps, hc * d).run()
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

    Workspace: 132 bytes a token; 4 n hc d bytes for each CHUNK tokens if there are more than one CHUNK; 4 hc bytes a
    token for each block of 64 channels; copies of what is not contiguous, and of the weight in bf16.
    """
    tokens, hc, d = x.shape
    q = coef = None
    if grad_mixes is not None and tokens:
        with torch.cuda.device_of(x):
            q, coef = x.new_empty(tokens, 2 * MAX_LOGITS), _float(x, tokens)
            _prepare(_readable(mixes), _readable(rstd), _readable(grad_mixes), q, coef, hc * d).run()
    return _backward(x, weight, pre_mix, q, coef, grad_collapsed, grad_x_addend, need_x, need_weight, need_pre_mix)


def gates_forward(
    mixes: Tensor, scale: Tensor, base: Tensor, hc: int, iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Pre, post and comb, as `reference.gates_forward`. No workspace."""
    tokens = mixes.shape[0]
    gates = _float(mixes, tokens, hc), _float(mixes, tokens, hc), _float(mixes, tokens, hc, hc)
    if tokens:
        with torch.cuda.device_of(mixes):
            _gates(None, None, _readable(mixes), None, _readable(scale), _readable(base), gates, 0, eps, 1, iters).run()
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
    """Gradients of mixes, scale and base, as `reference.gates_backward`. Workspace: 8 n bytes for each 128 tokens."""
    tokens, n = mixes.shape
    grad_mixes = _float(mixes, tokens, n)
    if tokens == 0:
        return grad_mixes, mixes.new_zeros(3), mixes.new_zeros(n)
    with torch.cuda.device_of(mixes):
        parameters = _readable(scale), _readable(base)
        grads = _readable(grad_pre), _readable(grad_post), _readable(grad_comb)
        parts = _parts(mixes, tokens, n)
        _gates_backward(_readable(mixes), None, *parameters, grads, grad_mixes, None, None, parts, eps, 1, iters).run()
        grad_scale, grad_base = _float(mixes, 3), _float(mixes, n)
        _parameters(*parts, grad_base, grad_scale, hc).run()
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
    tokens, hc, d = x.shape
    n = weight.shape[0]
    gates = _float(x, tokens, hc), _float(x, tokens, hc), _float(x, tokens, hc, hc)
    collapsed = x.new_empty((0,) if pre_mix is None else (tokens, d))
    mixes, rstd = _float(x, n, tokens), _float(x, tokens)
    if tokens:
        with torch.cuda.device_of(x):
            parts = _project(x, weight, pre_mix, collapsed)
            parameters = _readable(scale), _readable(base)
            _gates(*parts, mixes, rstd, *parameters, gates, rms_eps, hc_eps, hc * d, iters).run()
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
    tokens, hc, d = x.shape
    n = weight.shape[0]
    grads = [grad_pre, grad_post, grad_comb]
    q = coef = None
    grad_scale, grad_base = _float(x, 3), _float(x, n)
    if tokens == 0 or all(grad is None for grad in grads):
        grad_scale.zero_(), grad_base.zero_()
    else:
        for i, shape in enumerate(((tokens, hc), (tokens, hc), (tokens, hc, hc))):
            grads[i] = x.new_zeros(shape, dtype=torch.float32) if grads[i] is None else _readable(grads[i])
        with torch.cuda.device_of(x):
            q, coef, parts = x.new_empty(tokens, 2 * MAX_LOGITS), _float(x, tokens), _parts(x, tokens, n)
            parameters = _readable(scale), _readable(base)
            saved = _readable(mixes), _readable(rstd)
            _gates_backward(*saved, *parameters, grads, None, q, coef, parts, hc_eps, hc * d, iters).run()
            _parameters(*parts, grad_base, grad_scale, hc).run()
    grad_x, grad_weight, grad_pre_mix = _backward(
        x, weight, pre_mix, q, coef, grad_collapsed, grad_x_addend, need_x, need_weight, need_pre_mix
    )
    return grad_x, grad_weight, grad_scale, grad_base, grad_pre_mix


def _project(x: Tensor, weight: Tensor, pre_mix: Tensor | None, collapsed: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward's kernel: the parts of the products (splits, n, T) and of the scaled sums of squares."""
    tokens, _, d = x.shape
    splits = _splits(d)
    products, squares = _float(x, splits, weight.shape[0], tokens), _float(x, splits, tokens)
    pre_mix = None if pre_mix is None else _readable(pre_mix)
    _projection(_readable(x), _readable(weight.bfloat16()), pre_mix, products, squares, collapsed).run()
    return products, squares


def _backward(
    x: Tensor,
    weight: Tensor,
    pre_mix: Tensor | None,
    q: Tensor | None,
    coef: Tensor | None,
    grad_collapsed: Tensor | None,
    addend: Tensor | None,
    need_x: bool,
    need_weight: bool,
    need_pre_mix: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward's kernel on what was prepared (None: no gradient of the logits), and add its parts."""
    tokens, hc, d = x.shape
    n = weight.shape[0]
    need_pre_mix = need_pre_mix and pre_mix is not None
    flow_weight, flow_pre_mix = need_weight and q is not None, need_pre_mix and grad_collapsed is not None
    grad_x = x.new_empty(x.shape if need_x else (0,))
    grad_weight = torch.zeros if need_weight and not flow_weight else torch.empty
    grad_weight = grad_weight(weight.shape if need_weight else (0,), dtype=torch.float32, device=x.device)
    grad_pre_mix = torch.zeros if need_pre_mix and not flow_pre_mix else torch.empty
    grad_pre_mix = grad_pre_mix((tokens, hc) if need_pre_mix else (0,), dtype=torch.float32, device=x.device)
    if tokens == 0 or (q is None and grad_collapsed is None):
        if need_x:
            grad_x.zero_() if addend is None else grad_x.copy_(addend)
        return grad_x, grad_weight.zero_(), grad_pre_mix
    if not (need_x or flow_weight or flow_pre_mix):
        return grad_x, grad_weight, grad_pre_mix

    chunks = -(-tokens // CHUNK)
    part_weight = part_pre_mix = None
    if flow_weight:
        part_weight = grad_weight if chunks == 1 else _float(x, chunks, n, hc * d)
    if flow_pre_mix:
        part_pre_mix = _float(x, -(-d // (WIDTH * CHANNELS)), hc, tokens)
    with torch.cuda.device_of(x):
        _projection_backward(
            _readable(x),
            _readable(weight.bfloat16()),
            None if grad_collapsed is None else _readable(pre_mix),
            q,
            coef,
            None if grad_collapsed is None else _readable(grad_collapsed),
            _readable(addend) if need_x and addend is not None else None,
            grad_x if need_x else None,
            part_weight,
            part_pre_mix,
        ).run()
        if flow_weight and chunks > 1:
            _sum(part_weight, grad_weight, transpose=False).run()
        if flow_pre_mix:
            _sum(part_pre_mix, grad_pre_mix, transpose=True).run()
    return grad_x, grad_weight, grad_pre_mix


def _float(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


def _parts(like: Tensor, tokens: int, n: int) -> tuple[Tensor, Tensor]:
    """Sums over each program's tokens for base and scale."""
    shape = n, -(-tokens // GATES["TOKENS"])
    return _float(like, *shape), _float(like, *shape)


def _readable(t: Tensor) -> Tensor:
    """t itself where the kernels can read it: contiguous and aligned to 16 bytes. Else a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _splits(d: int) -> int:
    return max(1, round(d / SPLIT_CHANNELS))


def _blocks(size: int, block: int) -> tuple[int]:
    return (-(-size // block),)


def _group(hc: int, largest: int = 4) -> int:
    """Streams that are in shared memory together: at most `largest`, and a divisor of hc."""
    return max(size for size in range(1, largest + 1) if hc % size == 0)


def _descriptor(t: Tensor, block: tuple[int, ...]):
    """A TMA descriptor of a contiguous tensor, for tiles with rows of one swizzle.

    The strides are those of the shape: a tensor is contiguous whatever the stride of an axis of length 1.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [1]
    for size in reversed(t.shape[1:]):
        strides.insert(0, strides[0] * size)
    return TensorDescriptor(t, t.shape, strides, list(block), _layout(block))


@functools.cache
def _layout(block: tuple[int, ...]):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=2 * block[-1], element_bitwidth=16, rank=len(block))


def _projection(x, weight, pre_mix, products, squares, collapsed) -> Launch:
    from mhc_projection.kernels.projection import projection_kernel

    tokens, hc, d = x.shape
    n, splits, group = weight.shape[0], squares.shape[0], _group(hc)
    tile = FORWARD_TOKENS, 1, CHANNELS
    args = (
        _descriptor(x, tile),
        _descriptor(weight.view(n, hc, d), (MAX_LOGITS, 1, CHANNELS)),
        squares if pre_mix is None else pre_mix,
        products,
        squares,
        collapsed,
        tokens,
        d // 8,
        n,
        splits,
    )
    options = {"HC": hc, "GROUP": group, "COLLAPSE": pre_mix is not None, "TOKENS": FORWARD_TOKENS, "STAGES": 3}
    grid = (-(-tokens // FORWARD_TOKENS) * splits,)
    return Launch(projection_kernel, grid, args, {**options, "num_warps": 4})


def _projection_backward(
    x, weight, pre_mix, q, coef, grad_collapsed, addend, grad_x, part_weight, part_pre_mix
) -> Launch:
    from mhc_projection.kernels.projection_backward import projection_backward_kernel

    tokens, hc, d = x.shape
    # With an addend, half as many streams at a time leave room for as many stages.
    n, group = weight.shape[0], _group(hc, 4 if addend is None else 2)
    tile = BACKWARD_TOKENS, 1, CHANNELS
    streams = _descriptor(x, tile)
    descriptors = (
        streams,
        _descriptor(weight.view(n, hc, d), (MAX_LOGITS, 1, CHANNELS)),
        streams if q is None else _descriptor(q, (BACKWARD_TOKENS, MAX_LOGITS)),
        streams if grad_collapsed is None else _descriptor(grad_collapsed, (BACKWARD_TOKENS, CHANNELS)),
        streams if addend is None else _descriptor(addend, tile),
        streams if grad_x is None else _descriptor(grad_x, tile),
    )
    tensors = (x if t is None else t for t in (pre_mix, coef, part_weight, part_pre_mix))  # what is None is not touched
    options = {
        "HC": hc,
        "GROUP": group,
        "PROJECTION": q is not None,
        "COLLAPSE": grad_collapsed is not None,
        "ADDEND": addend is not None,
        "NEED_X": grad_x is not None,
        "NEED_WEIGHT": part_weight is not None,
        "NEED_PRE_MIX": part_pre_mix is not None,
        "WIDTH": WIDTH,
        "CHUNK": CHUNK,
        "STAGES": 4,
        "num_warps": 4,
    }
    items = -(-tokens // CHUNK) * -(-d // (WIDTH * CHANNELS)) * (hc // group)
    args = (*descriptors, *tensors, tokens, d // 8, n, items)
    return Launch(projection_backward_kernel, (min(items, 132),), args, options)


def _finish(products, squares, mixes, rstd, eps, width) -> Launch:
    from mhc_projection.kernels.reductions import finish_kernel

    tokens, n = mixes.shape
    args = (products, squares, mixes, rstd, float(eps), width * SQUARES_SCALE, tokens, n, squares.shape[0])
    return Launch(finish_kernel, _blocks(tokens, FINISH["TOKENS"]), args, FINISH)


def _prepare(mixes, rstd, grad_mixes, q, coef, width) -> Launch:
    from mhc_projection.kernels.reductions import prepare_kernel

    tokens, n = mixes.shape
    args = (mixes, rstd, grad_mixes, q, coef, float(width), tokens, n)
    return Launch(prepare_kernel, _blocks(tokens, PREPARE["TOKENS"]), args, PREPARE)


def _sum(part, out, *, transpose: bool) -> Launch:
    from mhc_projection.kernels.reductions import sum_kernel

    args = (part, out, *part.shape)
    return Launch(sum_kernel, _blocks(out.numel(), SUM["BLOCK"]), args, {"TRANSPOSE": transpose, **SUM})


def _gates(products, squares, mixes, rstd, scale, base, gates, rms_eps, eps, width, iters) -> Launch:
    from mhc_projection.kernels.gates import gates_kernel

    finish = products is not None
    tokens, hc = gates[0].shape
    parts = (products, squares) if finish else (mixes, mixes)
    rstd = rstd if finish else mixes
    numbers = (float(rms_eps), float(eps), width * SQUARES_SCALE, tokens, squares.shape[0] if finish else 0)
    args = (*parts, mixes, rstd, scale, base, *gates, *numbers)
    options = {"HC": hc, "ITERS": iters, "FINISH": finish, **GATES}
    return Launch(gates_kernel, _blocks(tokens, GATES["TOKENS"]), args, options)


def _gates_backward(mixes, rstd, scale, base, grads, grad_mixes, q, coef, parts, eps, width, iters) -> Launch:
    from mhc_projection.kernels.gates import gates_backward_kernel

    prepare = q is not None
    tokens, hc = grads[0].shape
    results = (mixes, q, coef) if prepare else (grad_mixes, mixes, mixes)  # what is not written to is not touched
    numbers = (float(eps), float(width), tokens, parts[0].shape[1])
    args = (mixes, rstd if prepare else mixes, scale, base, *grads, *results, *parts, *numbers)
    options = {"HC": hc, "ITERS": iters, "PREPARE": prepare, **GATES}
    return Launch(gates_backward_kernel, _blocks(tokens, GATES["TOKENS"]), args, options)


def _parameters(part_base, part_scale, grad_base, grad_scale, hc) -> Launch:
    from mhc_projection.kernels.gates import gate_parameters_kernel

    args = (part_base, part_scale, grad_base, grad_scale, part_base.shape[1])
    return Launch(gate_parameters_kernel, (1,), args, {"HC": hc, **PARAMETERS})


def variants() -> "list[Variant]":
    """What launches compile, for `hopper_kernels.precompile`: for hc = 4, 20 iterations and fp32 parameters."""
    from hopper_kernels.precompile import Variant

    hc, d, tokens, iters = 4, 5120, 2 * CHUNK, 20
    n = logits(hc)

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = meta(tokens, hc, d, dtype=torch.bfloat16), meta(n, hc * d, dtype=torch.bfloat16)
    collapsed, q = meta(tokens, d, dtype=torch.bfloat16), meta(tokens, 2 * MAX_LOGITS, dtype=torch.bfloat16)
    pre, comb, mixes, rstd = meta(tokens, hc), meta(tokens, hc, hc), meta(tokens, n), meta(tokens)
    products, squares = meta(_splits(d), n, tokens), meta(_splits(d), tokens)
    part_weight, part_pre_mix = meta(2, n, hc * d), meta(d // (WIDTH * CHANNELS), hc, tokens)
    parts, gates = _parts(x, tokens, n), (pre, pre, comb)
    scale, base = meta(3), meta(n)
    found = [
        Variant("finish", _finish(products, squares, mixes, rstd, 1e-20, hc * d).compile),
        Variant("prepare", _prepare(mixes, rstd, mixes, q, rstd, hc * d).compile),
        Variant("sum", _sum(part_weight, meta(n, hc * d), transpose=False).compile),
        Variant("sum[transpose=1]", _sum(part_pre_mix, pre, transpose=True).compile),
        Variant("gate_parameters", _parameters(*parts, base, scale, hc).compile),
    ]
    for together in (False, True):
        flag = f"together={int(together)}"
        forward = (products, squares) if together else (None, None)
        launch = _gates(*forward, mixes, rstd, scale, base, gates, 1e-20, 1e-6, hc * d, iters)
        found.append(Variant(f"gates[{flag}]", launch.compile))
        results = (None, q, rstd) if together else (mixes, None, None)
        launch = _gates_backward(mixes, rstd, scale, base, gates, *results, parts, 1e-6, hc * d, iters)
        found.append(Variant(f"gates_backward[{flag}]", launch.compile))
    tensor_cores = ("HGMMA", "UTMALDG")
    for collapse in (False, True):
        flag = f"collapse={int(collapse)}"
        launch = _projection(x, weight, pre if collapse else None, products, squares, collapsed)
        found.append(Variant(f"projection[{flag}]", launch.compile, tensor_cores))
        for addend in (None, x):
            gradients = (q, rstd, collapsed if collapse else None, addend, x, part_weight)
            part = part_pre_mix if collapse else None
            launch = _projection_backward(x, weight, pre if collapse else None, *gradients, part)
            label = f"projection_backward[{flag},addend={int(addend is not None)}]"
            found.append(Variant(label, launch.compile, (*tensor_cores, "UTMASTG")))
    return found
