"""Public functions and operators: argument checks, schemas, fakes, and which implementation runs."""

from typing import NamedTuple

import torch
from hopper_kernels import checks, fp8
from hopper_kernels.dispatch import use_kernel
from torch import Tensor

from fp8_dual_cast import launch, reference
from fp8_dual_cast.launch import MAX_SIZE, TILE


class DualCast(NamedTuple):
    """Both FP8 copies of a matrix, as `fp8_dual_cast` returns them."""

    q: Tensor
    sf: Tensor
    q_t: Tensor
    sf_t: Tensor


def fp8_dual_cast(
    x: Tensor,
    *,
    use_ue8m0: bool = False,
    cos_sin_cache: Tensor | None = None,
    position_ids: Tensor | None = None,
    head_dim: int | None = None,
    inverse: bool = True,
) -> DualCast:
    """Cast a bf16 matrix to FP8 twice in one pass: along its rows, and transposed along its columns.

    SM90's FP8 GEMMs contract over the contiguous axis only, so the two GEMMs of a linear layer's backward need two
    copies of the gradient. Bytes and scales are those of `per_token_cast` and `per_token_cast_transposed`.

    x: (T, C), or (T, H, D) with C = H * D; bf16; C a positive multiple of 128; T and C at most 2**24, T may be 0. Read
        in place if channels are contiguous and base and row pitch are multiples of 16 bytes, copied first otherwise.
        Never modified. No gradient flows through the results.
    use_ue8m0: powers of two as scales. SM90's GEMMs take exact fp32 scales; see `hopper_kernels.arch.ue8m0_for_device`.
    cos_sin_cache: (max_pos, R) fp32, R / 2 cosines followed by R / 2 sines. If given, the last R channels of each head
        are rotated first (interleaved pairs, result rounded to bf16; `reference.rotate` is the exact definition).
    position_ids: (T,) or (1, T), int32 or int64, rows of the table. A GPU does not check their range: a position
        outside the table reads foreign memory. The definition raises IndexError on a CPU.
    head_dim: channels of a head, even, a divisor of C; D by default for a 3-D x, required with a table for a 2-D x.
    inverse: True applies the transpose of the rotation, which a gradient needs; False the rotation itself.

    Returns, in the layouts that DeepGEMM's SM90 kernels read without another copy:
        q     (T, C) e4m3fn, contiguous
        sf    (T, C / 128) fp32, strides (1, align(T, 4)), the storage's padding 0
        q_t   (C, align(T, 128)) e4m3fn, contiguous, columns T and up of byte 0x00
        sf_t  (C, ceil(T / 128)) fp32, strides (1, C)
    A scale is RN(max(amax, 1e-10) / 448) over its 128 elements, a byte e4m3(RN(v / scale)). NaN stays NaN and moves no
    scale; Inf makes its block's scale Inf. `hopper_kernels.fp8` defines the recipes `per_token` and
    `per_token_transposed` and names their consumers.

    No workspace beyond the results, unless x cannot be read in place or the table or the positions are not contiguous:
    then a copy of them. Bitwise repeatable; a row's results do not depend on the rest of the batch, nor do the
    transposed results of a group of 128 rows.

    Raises TypeError or ValueError that names the argument before anything is launched, and
    `hopper_kernels.KernelUnavailable` on a CUDA device that is not SM90 or with a Triton or a PyTorch that the kernel
    cannot be built with. CPU tensors get the definition.
    """
    checks.tensor("x", x)
    checks.ndim("x", x, 2, 3)
    if head_dim is not None:
        checks.integer("head_dim", head_dim)
        if x.ndim == 3 and head_dim != x.shape[2]:
            raise ValueError(f"head_dim must be {x.shape[2]}, the last axis of a 3-D x, got {head_dim}")
        checks.in_range("head_dim", head_dim, lo=2)
    elif x.ndim == 3 and cos_sin_cache is not None:
        head_dim = x.shape[2]
    if cos_sin_cache is not None:
        checks.tensor("cos_sin_cache", cos_sin_cache)
    if position_ids is not None:
        checks.tensor("position_ids", position_ids)
        if position_ids.ndim == 2 and position_ids.shape[0] == 1:
            position_ids = position_ids.squeeze(0)
    x = _matrix(x)
    q, sf, q_t, sf_t = torch.ops.fp8_dual_cast.dual_cast(
        x, _flag("use_ue8m0", use_ue8m0), cos_sin_cache, position_ids, head_dim or 0, _flag("inverse", inverse)
    )
    return DualCast(q, fp8.row_scales_view(sf, x.shape[0]), q_t, fp8.col_scales_view(sf_t))


def per_token_cast(x: Tensor, *, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """The row half of `fp8_dual_cast` alone: (q, sf). Same argument, bytes, layouts and errors."""
    x = _matrix(x)
    q, sf = torch.ops.fp8_dual_cast.row_cast(x, _flag("use_ue8m0", use_ue8m0))
    return q, fp8.row_scales_view(sf, x.shape[0])


def per_token_cast_transposed(x: Tensor, *, use_ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """The transposed half of `fp8_dual_cast` alone: (q_t, sf_t). Same argument, bytes, layouts and errors."""
    x = _matrix(x)
    q_t, sf_t = torch.ops.fp8_dual_cast.column_cast(x, _flag("use_ue8m0", use_ue8m0))
    return q_t, fp8.col_scales_view(sf_t)


def unsupported_shape_reason(channels: int, head_dim: int | None = None, rope_dim: int | None = None) -> str | None:
    """Why `fp8_dual_cast` refuses matrices of this width (and rotation), or None if it takes them. For set-up time."""
    try:
        checks.integer("channels", channels)
        if rope_dim is not None:
            checks.integer("rope_dim", rope_dim)
        if head_dim is not None:
            checks.integer("head_dim", head_dim, lo=2)
        _check_sizes(channels, head_dim or 0, rope_dim)
    except ValueError as error:
        return str(error)
    return None


def _check_sizes(channels: int, head_dim: int, rope_dim: int | None) -> None:
    """The ties between the sizes; `head_dim` 0 means none was given, `rope_dim` None that there is no rotation."""
    checks.in_range("the number of channels of x", channels, 1, MAX_SIZE)
    checks.multiple("the number of channels of x", channels, TILE)
    if head_dim != 0:
        checks.integer("head_dim", head_dim, lo=2)
        checks.multiple("head_dim", head_dim, 2)
        if channels % head_dim != 0:
            raise ValueError(f"head_dim must divide the {channels} channels of x, got {head_dim}")
    if rope_dim is not None:
        if head_dim == 0:
            raise ValueError("head_dim must be given with cos_sin_cache for a 2-D x, got None")
        checks.in_range("the width of cos_sin_cache", rope_dim, 2, head_dim)
        checks.multiple("the width of cos_sin_cache", rope_dim, 2)


def _check_matrix(x: Tensor) -> None:
    checks.ndim("x", x, 2)
    checks.dtype("x", x, torch.bfloat16)
    checks.in_range("the number of tokens of x", x.shape[0], hi=MAX_SIZE)


def _check_operands(x: Tensor, cos_sin_cache: Tensor | None, position_ids: Tensor | None, head_dim: int) -> None:
    _check_matrix(x)
    if (cos_sin_cache is None) != (position_ids is None):
        missing = "cos_sin_cache" if cos_sin_cache is None else "position_ids"
        raise ValueError(f"{missing} must be given too, cos_sin_cache and position_ids go together, got None")
    if cos_sin_cache is None:
        _check_sizes(x.shape[1], head_dim, None)
        return
    checks.ndim("cos_sin_cache", cos_sin_cache, 2)
    checks.dtype("cos_sin_cache", cos_sin_cache, torch.float32)
    checks.in_range("the number of rows of cos_sin_cache", cos_sin_cache.shape[0], 1)
    checks.dtype("position_ids", position_ids, torch.int32, torch.int64)
    checks.shape("position_ids", position_ids, (x.shape[0],))
    _check_sizes(x.shape[1], head_dim, cos_sin_cache.shape[1])
    checks.same_device(x=x, cos_sin_cache=cos_sin_cache, position_ids=position_ids)


def _matrix(x: Tensor) -> Tensor:
    """x as (T, C), a view wherever its strides allow, outside of autograd."""
    checks.tensor("x", x)
    checks.ndim("x", x, 2, 3)
    x = x.detach()
    return x.flatten(1) if x.ndim == 3 else x


def _flag(name: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


_library = torch.library.Library("fp8_dual_cast", "DEF")
_library.define(
    "dual_cast(Tensor x, bool use_ue8m0, Tensor? cos_sin_cache, Tensor? position_ids, int head_dim, bool inverse)"
    " -> (Tensor q, Tensor sf_storage, Tensor q_t, Tensor sf_t_storage)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "row_cast(Tensor x, bool use_ue8m0) -> (Tensor q, Tensor sf_storage)", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.define(
    "column_cast(Tensor x, bool use_ue8m0) -> (Tensor q_t, Tensor sf_t_storage)", tags=(torch.Tag.pt2_compliant_tag,)
)


def _dual_cast(x, use_ue8m0, cos_sin_cache, position_ids, head_dim, inverse):
    _check_operands(x, cos_sin_cache, position_ids, head_dim)
    return _run("fp8_dual_cast", "dual_cast", x, use_ue8m0, cos_sin_cache, position_ids, head_dim, inverse)


def _row_cast(x, use_ue8m0):
    _check_operands(x, None, None, 0)
    return _run("per_token_cast", "row_cast", x, use_ue8m0)


def _column_cast(x, use_ue8m0):
    _check_operands(x, None, None, 0)
    return _run("per_token_cast_transposed", "column_cast", x, use_ue8m0)


def _run(what: str, function: str, x: Tensor, *arguments):
    """The kernel's or the definition's `function`. `what` names the caller's function in errors."""
    if use_kernel("fp8_dual_cast", x, what):
        return getattr(launch, function)(x, *arguments)
    with torch.no_grad():  # below, autograd is not asked (see the fallthrough), so it would look into the definition
        return getattr(reference, function)(x, *arguments)


for _key in ("CPU", "CUDA"):
    _library.impl("dual_cast", _dual_cast, _key)
    _library.impl("row_cast", _row_cast, _key)
    _library.impl("column_cast", _column_cast, _key)

# No derivative: results of an x that requires grad do not require it.
for _name in ("dual_cast", "row_cast", "column_cast"):
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")


@torch.library.register_fake("fp8_dual_cast::dual_cast", lib=_library)
def _(x, use_ue8m0, cos_sin_cache, position_ids, head_dim, inverse):
    _check_operands(x, cos_sin_cache, position_ids, head_dim)
    return *launch.row_results(x), *launch.column_results(x)


@torch.library.register_fake("fp8_dual_cast::row_cast", lib=_library)
def _(x, use_ue8m0):
    _check_operands(x, None, None, 0)
    return launch.row_results(x)


@torch.library.register_fake("fp8_dual_cast::column_cast", lib=_library)
def _(x, use_ue8m0):
    _check_operands(x, None, None, 0)
    return launch.column_results(x)
