"""Checks of the arguments, and the limits of their sizes, which nothing else knows.

What is checked of shapes, dtypes, devices and strides also holds while tracing. `memory` and `group_sizes` look at
addresses and contents; only implementations call them, which no tracing reaches.
"""

from collections.abc import Iterator

import torch
from hopper_kernels import checks
from hopper_kernels.fp8 import BLOCK
from torch import Tensor

TOKEN_GROUP_ALIGNMENT = 8
"""For dispatchers that pad: a multiple worth rounding group sizes up to. Only a hint: any group size is exact."""
CHANNEL_MULTIPLE = 8  # 16 bytes of bf16: the pitch of rows that TMA asks for
FP8_TERMS = 128 * BLOCK  # of an FP8 product with a weight, whose kernel has room for the scales of so many blocks
ADDRESS_MULTIPLE = 16  # bytes
_NUMBER = (int, float, torch.SymInt, torch.SymFloat)


def unsupported_shape_reason(hidden_size: int, intermediate_size: int, fp8: bool = False) -> str | None:
    """Why experts of these sizes are refused, or None if they are taken. For set-up time.

    Both must be positive multiples of 8. With fp8, of 128, and at most 16384 and 8192. The same words as the ValueError
    of the call.
    """
    try:
        sizes(hidden_size, intermediate_size, fp8)
    except ValueError as error:
        return str(error)
    return None


def experts(
    rows_name: str,
    rows: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    fp8: bool = False,
) -> None:
    """Checks what every call with the weights takes. rows: (M, H), x or its stand-in, which errors call `rows_name`."""
    _experts(rows_name, rows, gate_proj, up_proj, down_proj, num_tokens_per_expert, swiglu_limit, fp8)
    layouts_of_weights(gate_proj, up_proj, down_proj)


@checks.remembered
def _experts(
    rows_name: str,
    rows: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    fp8: bool,
) -> None:
    weights = {"gate_proj": gate_proj, "down_proj": down_proj}
    if up_proj is not None:
        weights["up_proj"] = up_proj
    operands = {rows_name: rows, **weights}
    for name, value in {**operands, "num_tokens_per_expert": num_tokens_per_expert}.items():
        checks.tensor(name, value)
    checks.ndim(rows_name, rows, 2)
    for name, weight in weights.items():
        checks.ndim(name, weight, 3)
    for name, value in operands.items():
        checks.dtype(name, value, torch.bfloat16)
    experts, hidden = number_of_experts(num_tokens_per_expert), rows.shape[1]
    inner = down_proj.shape[2]
    sizes(hidden, inner, fp8)
    shapes_of_weights(gate_proj, up_proj, down_proj, experts, hidden)
    limit(swiglu_limit)
    checks.same_device(**operands, num_tokens_per_expert=num_tokens_per_expert)


def shapes_of_weights(gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor, experts: int, hidden: int) -> None:
    """The weights, of three axes each, must be those of so many experts of H = `hidden`; down_proj says what I is."""
    inner = down_proj.shape[2]
    if up_proj is None:
        packed = "gate_proj, which is packed if up_proj is None,"
        checks.multiple(f"the number of rows 2I of {packed}", gate_proj.shape[1], 2)
        checks.shape(packed, gate_proj, (experts, 2 * inner, hidden))
    else:
        checks.shape("gate_proj", gate_proj, (experts, inner, hidden))
        checks.shape("up_proj", up_proj, (experts, inner, hidden))
    checks.shape("down_proj", down_proj, (experts, hidden, inner))


def layouts_of_weights(gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor) -> None:
    """down_proj must be contiguous, and the others have whole rows."""
    contiguous(down_proj=down_proj)
    _whole_rows("gate_proj", gate_proj)
    if up_proj is not None:
        _whole_rows("up_proj", up_proj)


def activations(rows: Tensor, **found: tuple[Tensor, int]) -> None:
    """Checks of each tensor, given with its channels, that it is bf16, has the rows of `rows` and is on its device."""
    for name, (t, channels) in found.items():
        checks.dtype(name, t, torch.bfloat16)
        checks.shape(name, t, (rows.shape[0], channels))
        on_device(name, t, rows.device)


def on_device(name: str, t: Tensor, device: torch.device) -> None:
    """t must be on this device, that of the other tensors."""
    if t.device != device:
        raise ValueError(f"{name} must be on {device}, the device of the other tensors, got {t.device}")


def weight_grad(dout: Tensor, x: Tensor, num_tokens_per_expert: Tensor, dgate_dup: Tensor, h: Tensor) -> None:
    """Checks the tensors of `moe_experts_weight_grad`."""
    tensors = {"dout": dout, "x": x, "dgate_dup": dgate_dup, "h": h}
    for name, value in {**tensors, "num_tokens_per_expert": num_tokens_per_expert}.items():
        checks.tensor(name, value)
    for name, value in tensors.items():
        checks.ndim(name, value, 2)
    checks.dtype("x", x, torch.bfloat16)
    number_of_experts(num_tokens_per_expert)
    hidden, inner = x.shape[1], h.shape[1]
    sizes(hidden, inner, False)
    checks.same_device(**tensors, num_tokens_per_expert=num_tokens_per_expert)
    activations(x, dout=(dout, hidden), dgate_dup=(dgate_dup, 2 * inner), h=(h, inner))
    contiguous(x=x, dgate_dup=dgate_dup, h=h)


def limit(value: float) -> None:
    """`value` must be a number above 0; inf is one."""
    if isinstance(value, bool) or not isinstance(value, _NUMBER) or not value > 0:
        raise ValueError(f"swiglu_limit must be a number above 0, inf for no limit, got {value!r}")


def boolean(name: str, value: bool) -> None:
    """`value` must be a bool. TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def contiguous(**tensors: Tensor) -> None:
    """Each must be contiguous: none is copied."""
    for name, t in tensors.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got shape {tuple(t.shape)} with strides {t.stride()}")


def memory(**tensors: Tensor | None) -> None:
    """Each must have its memory, at an address that is a multiple of 16 bytes. None is skipped. Real tensors only."""
    for name, t in tensors.items():
        if t is None or t.numel() == 0:
            continue
        if t.untyped_storage().nbytes() == 0:
            raise ValueError(f"{name} must have its storage, got a tensor whose storage was freed")
        if t.data_ptr() % ADDRESS_MULTIPLE:
            past = t.data_ptr() % ADDRESS_MULTIPLE
            raise ValueError(f"{name} must have an alignment of {ADDRESS_MULTIPLE} bytes, got an address {past} past")


def readable(t: Tensor) -> Tensor:
    """t where the kernels can read it, a contiguous copy of it otherwise. For upstream gradients of any strides."""
    if t.is_contiguous() and t.data_ptr() % ADDRESS_MULTIPLE == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def group_sizes(num_tokens_per_expert: Tensor, rows: int) -> list[int]:
    """The numbers of rows of the experts, which must not be negative nor add up to more than `rows`.

    Waits for the device.
    """
    sizes = num_tokens_per_expert.tolist()
    for expert, size in enumerate(sizes):
        if size < 0:
            raise ValueError(f"num_tokens_per_expert must not be negative, got {size} for expert {expert}")
    if sum(sizes) > rows:
        raise ValueError(f"num_tokens_per_expert must add up to at most the {rows} rows, got {sum(sizes)}")
    return sizes


def groups(num_tokens_per_expert: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, with its rows. Checks and waits as `group_sizes`."""
    start = 0
    for expert, size in enumerate(group_sizes(num_tokens_per_expert, rows)):
        if size:
            yield expert, slice(start, start + size)
        start += size


def number_of_experts(num_tokens_per_expert: Tensor) -> int:
    """E, after a check that these can be the sizes of as many groups."""
    checks.ndim("num_tokens_per_expert", num_tokens_per_expert, 1)
    checks.dtype("num_tokens_per_expert", num_tokens_per_expert, torch.int32, torch.int64)
    count = num_tokens_per_expert.shape[0]
    checks.in_range("num_tokens_per_expert: its number of experts E", count, 1)
    return count


def sizes(hidden: int, inner: int, fp8: bool) -> None:
    """H and I must be what `unsupported_shape_reason` says."""
    multiple = BLOCK if fp8 else CHANNEL_MULTIPLE
    found = f"got hidden_size {hidden} and intermediate_size {inner}"
    for name, size, most in (("hidden_size", hidden, FP8_TERMS), ("intermediate_size", inner, FP8_TERMS // 2)):
        checks.integer(name, size)
        if size <= 0 or size % multiple:
            raise ValueError(f"{name} must be a positive multiple of {multiple}, {found}")
        if fp8 and size > most:
            raise ValueError(f"{name} must be at most {most} with fp8, {found}")


def _whole_rows(name: str, weight: Tensor) -> None:
    """Rows must be contiguous and one after the other, and experts any number of whole rows apart."""
    experts, rows, channels = weight.shape
    pitch, row, channel = weight.stride()
    if channel != 1 or (row != channels and rows > 1) or (pitch % channels and experts > 1):
        raise ValueError(
            f"{name} must have contiguous rows, and experts that are whole rows apart,"
            f" got shape {tuple(weight.shape)} with strides {weight.stride()}"
        )
