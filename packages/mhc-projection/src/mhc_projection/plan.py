"""Plan of the kernels: tiles, grids and arguments of each launch, and what is compiled ahead."""

import functools
import math
from typing import TYPE_CHECKING

import torch
from hopper_kernels import arch
from hopper_kernels.launcher import Launch
from torch import Tensor

from mhc_projection.arguments import MAX_LOGITS, logits

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

# The model that chooses a chunk. The device's own number of SMs does not enter: the bits depend on the choice.
CHUNKS = 512, 1024, 2048
SMS = 132
PART_TOKENS = 42  # as many move the bytes of a part of the weight's gradient, written and read again
CHANNELS = 64  # of a stream in a tile
SQUARES_SCALE = 2.0**-10  # of the sums of squares that the forward's kernel writes
SPLIT_CHANNELS = 640  # channels that one program of the forward takes, about

FORWARD_TOKENS, BACKWARD_TOKENS = 64, 64
FINISH = {"TOKENS": 32, "num_warps": 4}
PREPARE = {"TOKENS": 32, "num_warps": 4}
GATES = {"TOKENS": 64, "TOGETHER": 4, "num_warps": 2}
GATES_BACKWARD = {"TOKENS": 64, "num_warps": 2}
SUM = {"PARAMETERS": 2048, "PRE_MIX": 64, "PRE_MIX_PARTS": 32, "WEIGHT": 256, "WEIGHT_PARTS": 8, "num_warps": 4}
ROUND = 2048  # numbers of the weight that a program rounds to bf16


def fp32(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised, on the device of `like`."""
    return like.new_empty(*shape, dtype=torch.float32)


def gate_workspace(like: Tensor, tokens: int, hc: int, iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the gates' backward: sums over every 32 tokens for base and scale; the denominators of a token."""
    shape = logits(hc), -(-tokens // 32)
    return fp32(like, *shape), fp32(like, *shape), fp32(like, iters - 1, 2 * hc, tokens)


@functools.lru_cache(maxsize=4096)  # as many as there may be lengths of packed documents in a while
def chunk_size(tokens: int, hc: int, d: int) -> int:
    """Tokens whose contributions to the weight's gradient are summed in one go. Its bits follow from that.

    The choice with the shortest time by a model, the same on every device: rounds of items of work on SMS, each as long
    as its tokens and a part of the weight's gradient take, and the end, where SMs wait for the last.
    """

    def time(chunk: int) -> float:
        rounds = -(-items(tokens, hc // group_size(hc), d, chunk) // SMS)
        return rounds * (chunk + PART_TOKENS) + 0.1 * chunk

    return min(CHUNKS, key=time)


def items(tokens: int, groups: int, d: int, chunk: int) -> int:
    """Items of work of the backward: chunks of tokens of a block of channels of a group of streams."""
    return -(-tokens // chunk) * -(-d // CHANNELS) * groups


def splits(d: int) -> int:
    """Programs of the forward that share the channels of a tile of tokens."""
    return max(1, round(d / SPLIT_CHANNELS))


def _blocks(size: int, block: int) -> tuple[int]:
    return (-(-size // block),)


@functools.cache
def group_size(hc: int, largest: int = 4) -> int:
    """Streams that are in shared memory together: at most `largest`, and a divisor of hc."""
    return max(size for size in range(1, largest + 1) if hc % size == 0)


def _descriptor(t: Tensor, shape: tuple[int, ...], block: tuple[int, ...]):
    """A TMA descriptor of a contiguous tensor, looked at in this shape, for tiles with rows of one swizzle.

    The strides are those of the shape: a tensor is contiguous whatever the stride of an axis of length 1.
    """
    kind, layout = _kind_and_layout(block)
    strides = (shape[1], 1) if len(shape) == 2 else (shape[1] * shape[2], shape[2], 1)
    # Without TensorDescriptor's own checks, which cost as much as a launch. What they ask for is so: the alignment by
    # `launch._readable`, rows of a multiple of 16 bytes by `arguments`, tiles of powers of two by this module.
    descriptor = object.__new__(kind)
    descriptor.base, descriptor.shape, descriptor.strides = t, shape, strides
    descriptor.block_shape, descriptor.layout, descriptor.padding = block, layout, "zero"
    return descriptor


@functools.cache
def _kind_and_layout(block: tuple[int, ...]):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * block[-1], element_bitwidth=16, rank=len(block))
    return TensorDescriptor, layout


def projection(x, weight, pre_mix, parts, collapsed) -> Launch:
    """The forward's kernel, without the collapse if pre_mix is None."""
    from mhc_projection.kernels.projection import projection_kernel

    *_, hc, d = x.shape
    n, (splits, _, tokens) = weight.shape[0], parts.shape
    args = (
        _descriptor(x, (tokens, hc, d), (FORWARD_TOKENS, 1, CHANNELS)),
        _descriptor(weight, (n, hc, d), (MAX_LOGITS, 1, CHANNELS)),
        parts if pre_mix is None else pre_mix,
        parts,
        collapsed,
        tokens,
        d // 8,
        n,
        splits,
    )
    options = {
        "HC": hc,
        "GROUP": group_size(hc, 2),
        "COLLAPSE": pre_mix is not None,
        "TOKENS": FORWARD_TOKENS,
        "STAGES": 3,
        "num_warps": 4,
    }
    grid = (-(-tokens // FORWARD_TOKENS) * splits,)
    return Launch(projection_kernel, grid, args, options)


def projection_backward(
    x, weight, pre_mix, q, coef, grad_collapsed, addend, grad_x, part_weight, part_pre_mix, taken, chunk
) -> Launch:
    """The backward's kernel; what is None is neither read nor written. taken is 0."""
    from mhc_projection.kernels.projection_backward import projection_backward_kernel

    *lead, hc, d = x.shape
    tokens = math.prod(lead)
    # With an addend, half as many streams at a time leave room for as many stages.
    n, group = weight.shape[0], group_size(hc, 4 if addend is None else 2)
    shape, tile = (tokens, hc, d), (BACKWARD_TOKENS, 1, CHANNELS)
    streams = _descriptor(x, shape, tile)
    descriptors = (
        streams,
        streams if q is None else _descriptor(weight, (n, hc, d), (MAX_LOGITS, 1, CHANNELS)),
        streams if q is None else _descriptor(q, q.shape, (BACKWARD_TOKENS, MAX_LOGITS)),
        streams if grad_collapsed is None else _descriptor(grad_collapsed, (tokens, d), (BACKWARD_TOKENS, CHANNELS)),
        streams if addend is None else _descriptor(addend, shape, tile),
        streams if grad_x is None else _descriptor(grad_x, shape, tile),
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
        "STAGES": 4,
        "num_warps": 4,
    }
    work = items(tokens, hc // group, d, chunk)
    args = (*descriptors, *tensors, taken, tokens, d // 8, n, chunk, work)
    # A program an SM; what is computed does not depend on which takes an item.
    programs = min(work, arch.num_sms(x.device)) if x.is_cuda else work
    return Launch(projection_backward_kernel, (programs,), args, options)


def finish(parts, mixes, rstd, eps, width) -> Launch:
    """Mixes and rstd from the parts that the forward's kernel wrote."""
    from mhc_projection.kernels.reductions import finish_kernel

    tokens, n = rstd.shape[0], mixes.shape[-1]
    args = (parts, mixes, rstd, float(eps), width * SQUARES_SCALE, tokens, n, parts.shape[0])
    return Launch(finish_kernel, _blocks(tokens, FINISH["TOKENS"]), args, FINISH)


def prepare(mixes, rstd, grad_mixes, q, coef, weight, narrow, taken, width) -> Launch:
    """What the backward's kernel reads, from the gradient of the mixes; narrow is None if the weight is bf16."""
    from mhc_projection.kernels.reductions import prepare_kernel

    tokens, n = coef.shape[0], mixes.shape[-1]
    programs, rounding, size = -(-tokens // PREPARE["TOKENS"]), *_rounding(weight, narrow)
    args = (mixes, rstd, grad_mixes, q, coef, weight, q if narrow is None else narrow, taken)
    numbers = (float(width), tokens, n, programs, size)
    return Launch(prepare_kernel, (programs + rounding,), args + numbers, {**PREPARE, "BLOCK": ROUND})


def _rounding(weight, narrow) -> tuple[int, int]:
    """Programs that round the weight, and its size."""
    return (0, 0) if narrow is None else (-(-weight.numel() // ROUND), weight.numel())


def sums(hc, tokens, gates=None, weight=None, pre_mix=None) -> Launch:
    """The sums over what the backward's kernels left, each a pair of parts and results or None.

    gates: (part_base, part_scale) and (grad_base, grad_scale); weight and pre_mix: a part and a gradient.
    """
    from mhc_projection.kernels.reductions import sum_kernel

    some = next(pair for pair in (gates and (gates[0][0], gates[1][0]), weight, pre_mix) if pair is not None)
    none = some[0], some[1]  # what is None is not touched
    (part_base, part_scale), (grad_base, grad_scale) = gates or ((none[0],) * 2, (none[1],) * 2)
    (part_weight, grad_weight), (part_pre, grad_pre) = weight or none, pre_mix or none
    size, chunks = (grad_weight.numel(), part_weight.shape[0]) if weight else (0, 0)
    weight_programs = _blocks(size, SUM["WEIGHT"])[0]
    pre_mix_programs = _blocks(grad_pre.numel(), SUM["PRE_MIX"])[0] if pre_mix else 0
    parts, gate_programs = (part_base.shape[1], part_base.shape[0] + 3) if gates else (0, 0)
    tensors = (part_base, part_scale, part_weight, part_pre, grad_base, grad_scale, grad_weight, grad_pre)
    numbers = (tokens, size, parts, chunks, part_pre.shape[0], pre_mix_programs, gate_programs)
    grid = (pre_mix_programs + gate_programs + weight_programs,)
    return Launch(sum_kernel, grid, tensors + numbers, {"HC": hc, **SUM})


def gates(parts, mixes, rstd, scale, base, gates, rms_eps, eps, width, iters) -> Launch:
    """The gates from mixes (T, n), or with parts from those, writing mixes (n, T) and rstd."""
    from mhc_projection.kernels.gates import gates_kernel

    finish = parts is not None
    hc = gates[0].shape[-1]
    tokens = gates[0].numel() // hc
    numbers = (float(rms_eps), float(eps), width * SQUARES_SCALE, iters, tokens, parts.shape[0] if finish else 0)
    args = (parts if finish else mixes, mixes, rstd if finish else mixes, scale, base, *gates, *numbers)
    return Launch(gates_kernel, _blocks(tokens, GATES["TOKENS"]), args, {"HC": hc, "FINISH": finish, **GATES})


def gates_backward(mixes, rstd, scale, base, grads, results, workspace, eps, width, iters) -> Launch:
    """The gates' backward from mixes (T, n) to results = (grad_mixes,).

    Or from mixes (n, T) to results = (q, coef, weight, narrow, taken), as `prepare`.
    """
    from mhc_projection.kernels.gates import gates_backward_kernel

    prepare = len(results) > 1
    hc = grads[0].shape[-1]
    tokens = grads[0].numel() // hc
    # What a variant does not touch is given as mixes.
    grad_mixes, q, coef, weight, narrow, taken = (mixes, *results) if prepare else (*results, *(mixes,) * 5)
    rounding, size = _rounding(weight, narrow) if prepare else (0, 0)
    programs = -(-tokens // GATES_BACKWARD["TOKENS"])
    numbers = (float(eps), float(width), iters, tokens, workspace[0].shape[1], programs, size)
    tensors = (grad_mixes, q, coef, *workspace, weight, q if narrow is None else narrow, taken)
    args = (mixes, rstd if prepare else mixes, scale, base, *grads, *tensors, *numbers)
    options = {"HC": hc, "PREPARE": prepare, **GATES_BACKWARD, "BLOCK": ROUND}
    return Launch(gates_backward_kernel, (programs + rounding,), args, options)


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: all that training launches with hc = 4 and fp32 scale and base.

    A frozen weight, streams that need no gradient and the collapse alone compile when they are first met.
    """
    from hopper_kernels.precompile import Variant

    hc, d, tokens, iters = 4, 5120, 2 * CHUNKS[0], 20
    n = logits(hc)

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, weight = meta(tokens, hc, d, dtype=torch.bfloat16), meta(n, hc * d, dtype=torch.bfloat16)
    collapsed, q = meta(tokens, d, dtype=torch.bfloat16), meta(tokens, 2 * MAX_LOGITS, dtype=torch.bfloat16)
    pre, comb, mixes, rstd = meta(tokens, hc), meta(tokens, hc, hc), meta(tokens, n), meta(tokens)
    parts = meta(splits(d), n + 1, tokens)
    part_weight, part_pre_mix = meta(2, n, hc * d), meta(d // CHANNELS, hc, tokens)
    workspace, three = gate_workspace(x, tokens, hc, iters), (pre, pre, comb)
    scale, base = meta(3), meta(n)
    taken = meta(1, dtype=torch.int32)
    pairs = (workspace[:2], (base, scale)), (part_weight, meta(n, hc * d)), (part_pre_mix, pre)
    found = [
        Variant("finish", finish(parts, mixes, rstd, 1e-20, hc * d).compile),
        Variant("sum", sums(hc, tokens, *pairs).compile),
    ]
    for given in (weight, meta(n, hc * d)):
        rounded = (given, None if given is weight else weight, taken)
        flag = f"weight={str(given.dtype).removeprefix('torch.')}"
        found.append(Variant(f"prepare[{flag}]", prepare(mixes, rstd, mixes, q, rstd, *rounded, hc * d).compile))
        launch = gates_backward(mixes, rstd, scale, base, three, (q, rstd, *rounded), workspace, 1e-6, hc * d, iters)
        found.append(Variant(f"gates_backward[together=1,{flag}]", launch.compile))
    launch = gates_backward(mixes, None, scale, base, three, (mixes,), workspace, 1e-6, 1, iters)
    found.append(Variant("gates_backward[together=0]", launch.compile))
    for together in (False, True):
        launch = gates(parts if together else None, mixes, rstd, scale, base, three, 1e-20, 1e-6, hc * d, iters)
        found.append(Variant(f"gates[together={int(together)}]", launch.compile))
    tensor_cores = ("HGMMA", "UTMALDG")
    for collapse in (False, True):
        flag = f"collapse={int(collapse)}"
        launch = projection(x, weight, pre if collapse else None, parts, collapsed)
        found.append(Variant(f"projection[{flag}]", launch.compile, tensor_cores))
        for addend in (None, x):
            gradients = (q, rstd, collapsed if collapse else None, addend, x, part_weight)
            label = f"projection_backward[{flag},addend={int(addend is not None)}"
            for part, suffix in ((part_pre_mix, "]"), (None, ",constant]")) if collapse else ((None, "]"),):
                launch = projection_backward(x, weight, pre if collapse else None, *gradients, part, taken, CHUNKS[0])
                found.append(Variant(label + suffix, launch.compile, (*tensor_cores, "UTMASTG")))
    return found
