"""Plan of the kernels: tiles, grids and arguments of each launch, and what is compiled ahead."""

import functools
from typing import TYPE_CHECKING

import torch
from hopper_kernels import arch
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


def fp32(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised, on the device of `like`."""
    return like.new_empty(*shape, dtype=torch.float32)


def parameter_parts(like: Tensor, tokens: int, n: int) -> tuple[Tensor, Tensor]:
    """Sums over each program's tokens for base and scale."""
    shape = n, -(-tokens // GATES["TOKENS"])
    return fp32(like, *shape), fp32(like, *shape)


def splits(d: int) -> int:
    """Programs of the forward that share the channels of a tile of tokens."""
    return max(1, round(d / SPLIT_CHANNELS))


def _blocks(size: int, block: int) -> tuple[int]:
    return (-(-size // block),)


def group_size(hc: int, largest: int = 4) -> int:
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


def projection(x, weight, pre_mix, products, squares, collapsed) -> Launch:
    """The forward's kernel, without the collapse if pre_mix is None."""
    from mhc_projection.kernels.projection import projection_kernel

    tokens, hc, d = x.shape
    n, splits, group = weight.shape[0], squares.shape[0], group_size(hc)
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


def projection_backward(
    x, weight, pre_mix, q, coef, grad_collapsed, addend, grad_x, part_weight, part_pre_mix
) -> Launch:
    """The backward's kernel; what is None is neither read nor written."""
    from mhc_projection.kernels.projection_backward import projection_backward_kernel

    tokens, hc, d = x.shape
    # With an addend, half as many streams at a time leave room for as many stages.
    n, group = weight.shape[0], group_size(hc, 4 if addend is None else 2)
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
    # A program an SM; what it computes does not depend on how many share the items.
    programs = min(items, arch.num_sms(x.device)) if x.is_cuda else items
    return Launch(projection_backward_kernel, (programs,), args, options)


def finish(products, squares, mixes, rstd, eps, width) -> Launch:
    """Mixes and rstd from the parts that the forward's kernel wrote."""
    from mhc_projection.kernels.reductions import finish_kernel

    tokens, n = mixes.shape
    args = (products, squares, mixes, rstd, float(eps), width * SQUARES_SCALE, tokens, n, squares.shape[0])
    return Launch(finish_kernel, _blocks(tokens, FINISH["TOKENS"]), args, FINISH)


def prepare(mixes, rstd, grad_mixes, q, coef, width) -> Launch:
    """What the backward's kernel reads, from the gradient of the mixes."""
    from mhc_projection.kernels.reductions import prepare_kernel

    tokens, n = mixes.shape
    args = (mixes, rstd, grad_mixes, q, coef, float(width), tokens, n)
    return Launch(prepare_kernel, _blocks(tokens, PREPARE["TOKENS"]), args, PREPARE)


def sum_parts(part, out, *, transpose: bool) -> Launch:
    """The sum over the first axis of part, in a fixed order."""
    from mhc_projection.kernels.reductions import sum_kernel

    args = (part, out, *part.shape)
    return Launch(sum_kernel, _blocks(out.numel(), SUM["BLOCK"]), args, {"TRANSPOSE": transpose, **SUM})


def gates(products, squares, mixes, rstd, scale, base, gates, rms_eps, eps, width, iters) -> Launch:
    """The gates from mixes (T, n), or with products and squares from those, writing mixes (n, T) and rstd."""
    from mhc_projection.kernels.gates import gates_kernel

    finish = products is not None
    tokens, hc = gates[0].shape
    parts = (products, squares) if finish else (mixes, mixes)
    rstd = rstd if finish else mixes
    numbers = (float(rms_eps), float(eps), width * SQUARES_SCALE, tokens, squares.shape[0] if finish else 0)
    args = (*parts, mixes, rstd, scale, base, *gates, *numbers)
    options = {"HC": hc, "ITERS": iters, "FINISH": finish, **GATES}
    return Launch(gates_kernel, _blocks(tokens, GATES["TOKENS"]), args, options)


def gates_backward(mixes, rstd, scale, base, grads, grad_mixes, q, coef, parts, eps, width, iters) -> Launch:
    """The gates' backward: grad_mixes from mixes (T, n), or with q given q and coef from mixes (n, T)."""
    from mhc_projection.kernels.gates import gates_backward_kernel

    prepare = q is not None
    tokens, hc = grads[0].shape
    results = (mixes, q, coef) if prepare else (grad_mixes, mixes, mixes)  # what is not written to is not touched
    numbers = (float(eps), float(width), tokens, parts[0].shape[1])
    args = (mixes, rstd if prepare else mixes, scale, base, *grads, *results, *parts, *numbers)
    options = {"HC": hc, "ITERS": iters, "PREPARE": prepare, **GATES}
    return Launch(gates_backward_kernel, _blocks(tokens, GATES["TOKENS"]), args, options)


def gate_parameters(part_base, part_scale, grad_base, grad_scale, hc) -> Launch:
    """Gradients of base and scale from the parts that the gates' backward wrote."""
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
    products, squares = meta(splits(d), n, tokens), meta(splits(d), tokens)
    part_weight, part_pre_mix = meta(2, n, hc * d), meta(d // (WIDTH * CHANNELS), hc, tokens)
    parts, three = parameter_parts(x, tokens, n), (pre, pre, comb)
    scale, base = meta(3), meta(n)
    found = [
        Variant("finish", finish(products, squares, mixes, rstd, 1e-20, hc * d).compile),
        Variant("prepare", prepare(mixes, rstd, mixes, q, rstd, hc * d).compile),
        Variant("sum", sum_parts(part_weight, meta(n, hc * d), transpose=False).compile),
        Variant("sum[transpose=1]", sum_parts(part_pre_mix, pre, transpose=True).compile),
        Variant("gate_parameters", gate_parameters(*parts, base, scale, hc).compile),
    ]
    for together in (False, True):
        flag = f"together={int(together)}"
        forward = (products, squares) if together else (None, None)
        launch = gates(*forward, mixes, rstd, scale, base, three, 1e-20, 1e-6, hc * d, iters)
        found.append(Variant(f"gates[{flag}]", launch.compile))
        results = (None, q, rstd) if together else (mixes, None, None)
        launch = gates_backward(mixes, rstd, scale, base, three, *results, parts, 1e-6, hc * d, iters)
        found.append(Variant(f"gates_backward[{flag}]", launch.compile))
    tensor_cores = ("HGMMA", "UTMALDG")
    for collapse in (False, True):
        flag = f"collapse={int(collapse)}"
        launch = projection(x, weight, pre if collapse else None, products, squares, collapsed)
        found.append(Variant(f"projection[{flag}]", launch.compile, tensor_cores))
        for addend in (None, x):
            gradients = (q, rstd, collapsed if collapse else None, addend, x, part_weight)
            part = part_pre_mix if collapse else None
            launch = projection_backward(x, weight, pre if collapse else None, *gradients, part)
            label = f"projection_backward[{flag},addend={int(addend is not None)}]"
            found.append(Variant(label, launch.compile, (*tensor_cores, "UTMASTG")))
    return found
