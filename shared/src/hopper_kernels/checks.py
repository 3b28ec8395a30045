"""Argument checks with one style of message: the argument's name, what it must be, what was given.

TypeError for something that should be a tensor and is not, ValueError for everything else. No check reads a tensor's
data, so none synchronises. All work on FakeTensors and SymInts: on success they only compare, because `int()`,
`math.isfinite` and formatting would fix a dynamic size to the value at hand.
"""

import functools
from collections.abc import Callable

import torch

_INF = float("inf")
_INTEGER = (int, torch.SymInt)
_NUMBER = (int, float, torch.SymInt, torch.SymFloat)
_TENSOR, _PARAMETER = torch.Tensor, torch.nn.Parameter
_AXIS_NAMES = "nmkjihgf"
_REMEMBERED = 4096  # signatures of calls: as many as there may be lengths of packed documents in a while


def remembered(check: Callable[..., None]) -> Callable[..., None]:
    """A check of tensors, numbers and None that remembers what it has accepted.

    It may depend on nothing but the tensors' shapes, dtypes and devices and the other arguments' types and values. A
    call like one that was accepted then costs a fraction. While compiling, of symbolic sizes and of tensors of a
    subclass it remembers nothing.
    """
    accepted: set[tuple] = set()

    @functools.wraps(check)
    def checked(*arguments) -> None:
        if torch.compiler.is_compiling():
            check(*arguments)
            return
        key = _signature(arguments)
        try:
            if key in accepted:
                return
        except TypeError:  # symbolic sizes
            key = None
        check(*arguments)
        if key is not None:
            if len(accepted) >= _REMEMBERED:
                accepted.clear()
            accepted.add(key)

    return checked


def _signature(arguments: tuple) -> tuple | None:
    """What a remembered check may depend on, None if that is not known."""
    found: list = []
    for value in arguments:
        kind = type(value)
        if kind is _TENSOR or kind is _PARAMETER:
            found.append((value.shape, value.dtype, value.device))
        elif kind is float or kind is int or value is None or kind is bool or kind is str:
            found += kind, value
        else:
            return None
    return tuple(found)


def tensor(name: str, value: object) -> None:
    """`value` must be a torch.Tensor. TypeError otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def dtype(name: str, t: torch.Tensor, *allowed: torch.dtype) -> None:
    """`t` must have one of the dtypes `allowed`."""
    tensor(name, t)
    if t.dtype not in allowed:
        raise ValueError(f"{name} must have dtype {_either(map(_dtype_name, allowed))}, got {_dtype_name(t.dtype)}")


def ndim(name: str, t: torch.Tensor, *allowed: int) -> None:
    """`t` must have one of the numbers of dimensions `allowed`."""
    tensor(name, t)
    if t.ndim not in allowed:
        raise ValueError(f"{name} must have {_either(map(str, allowed))} dimensions, got shape {tuple(t.shape)}")


def shape(name: str, t: torch.Tensor, expected: tuple[int | None, ...]) -> None:
    """`t` must have the shape `expected`, in which None stands for any size."""
    tensor(name, t)
    matches = t.ndim == len(expected)
    if matches:
        for size, wanted in zip(t.shape, expected, strict=True):
            if wanted is not None and size != wanted:
                matches = False
                break
    if not matches:
        raise ValueError(f"{name} must have shape {_shape_text(expected)}, got {tuple(t.shape)}")


def multiple(name: str, value: int, of: int) -> None:
    """`value` must be a multiple of `of`; 0 is one."""
    if value % of != 0:
        raise ValueError(f"{name} must be a multiple of {of}, got {value}")


def in_range(name: str, value: float, lo: float | None = None, hi: float | None = None) -> None:
    """`value` must be within `lo` and `hi`, both included; None leaves that end open. NaN is in no range."""
    if (lo is not None and not value >= lo) or (hi is not None and not value <= hi):
        raise ValueError(f"{name} must be {_range_text(lo, hi)}, got {value}")


def finite(name: str, value: float) -> None:
    """`value` must be a Python number, neither infinite nor NaN."""
    if not isinstance(value, _NUMBER) or not -_INF < value < _INF:
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def integer(name: str, value: int, lo: int | None = None, hi: int | None = None) -> None:
    """`value` must be a Python integer, not a bool, within `lo` and `hi` (both included)."""
    if isinstance(value, bool) or not isinstance(value, _INTEGER):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    in_range(name, value, lo, hi)


def same_device(**tensors: torch.Tensor | None) -> None:
    """All tensors must be on one device; None (an optional argument left out) is skipped.

    0-dim CPU tensors are not exempt: the kernels take pointers, so nothing would move one to the device.
    """
    first = None
    for name, t in tensors.items():
        if t is None:
            continue
        tensor(name, t)
        if first is None:
            first = t.device
        elif t.device != first:
            found = ", ".join(f"{other} on {given.device}" for other, given in tensors.items() if given is not None)
            raise ValueError(f"{', '.join(tensors)} must be on one device, got {found}")


def _dtype_name(value: torch.dtype) -> str:
    return str(value).removeprefix("torch.")


def _either(words) -> str:
    return " or ".join(words)


def _shape_text(expected: tuple[int | None, ...]) -> str:
    letters = iter(_AXIS_NAMES)
    sizes = [next(letters, "any") if size is None else str(size) for size in expected]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _range_text(lo: float | None, hi: float | None) -> str:
    if hi is None:
        return f"at least {lo}"
    if lo is None:
        return f"at most {hi}"
    return f"between {lo} and {hi}"
