"""Comparisons with float64 and byte for byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DEFAULT_FLOOR = 1e-6


def error64(actual: Tensor, expected64: Tensor) -> float:
    """||actual - expected64|| / ||expected64|| in float64, on the device of `expected64`.

    Equal infinities count as no difference; a NaN on either side, or an infinity on one side only, gives inf. If
    `expected64` is all zero (or empty), the result is 0 for an exact answer and inf otherwise.
    Raises AssertionError if the shapes differ.
    """
    difference, expected = _difference(actual, expected64)
    return _ratio(difference.norm().item(), expected.norm().item())


def assert_close_to_float64(
    actual: Tensor,
    expected64: Tensor,
    eager: Tensor,
    *,
    factor: float = 2.0,
    floor: float = _DEFAULT_FLOOR,
    name: str = "output",
) -> None:
    """Bound the error of `actual` by that of the same mathematics in eager PyTorch at the operator's dtype.

    All three have one shape; `expected64` is float64; `eager` has the dtype of `actual`, so a result of the wrong
    dtype fails. Requires error64(actual) <= factor * error64(eager) + floor, relative to the size of the whole output.
    """
    _check_operands(actual, expected64, eager, name)
    ours, theirs = error64(actual, expected64), error64(eager, expected64)
    bound = factor * theirs + floor
    if not ours <= bound or bound == float("inf"):
        raise AssertionError(f"{name}: error {ours:.3e} exceeds {factor:g} x {theirs:.3e} (eager) + {floor:g}")


def assert_bands_close_to_float64(
    actual: Tensor,
    expected64: Tensor,
    eager: Tensor,
    *,
    band: int = 16,
    dim: int = -1,
    factor: float = 2.0,
    floor: float = _DEFAULT_FLOOR,
    name: str = "output",
) -> None:
    """As assert_close_to_float64, for each band of `band` indices along `dim`, relative to that band's own size.

    One wrong band of a wide output is lost in the norm of the whole; here it fails, and the message names it. A band's
    bound uses the larger of the eager error of that band and of the whole, since a short band's own error scatters.
    A band that must be all zero is measured against the average band.
    """
    assert_close_to_float64(actual, expected64, eager, factor=factor, floor=floor, name=name)
    if expected64.numel() == 0:
        return
    ours = _band_norms(*_difference(actual, expected64), band, dim)
    theirs = _band_norms(*_difference(eager, expected64), band, dim)
    size = ours[1].square().mean().sqrt().item()
    whole = error64(eager, expected64)
    bad = []
    norms = torch.stack([ours[0], theirs[0], ours[1]], dim=1).tolist()
    for index, (mine, its, reference) in enumerate(norms):
        error, eager_error = (_ratio(norm, reference or size) for norm in (mine, its))
        bound = factor * max(eager_error, whole) + floor
        if not error <= bound:
            bad.append((error / bound, index, error, bound))
    if bad:
        _, index, error, bound = max(bad)
        first, last = index * band, min((index + 1) * band, expected64.shape[dim]) - 1
        raise AssertionError(
            f"{name}: {len(bad)} of {len(ours[0])} bands along dim {dim} are wrong; "
            f"worst {first}..{last}: error {error:.3e} exceeds {bound:.3e}"
        )


def assert_same_bytes(actual: Tensor, expected: Tensor, name: str = "output", *, strides: bool = True) -> None:
    """Require equal dtype, shape, strides and bytes; for float8 a NaN of either sign equals any NaN.

    The message has the count, the first differing index and both values there. `expected` may be on another device.
    `strides=False` leaves the strides out, for a slice compared with a fresh tensor.
    """
    pairs = {"dtype": (actual.dtype, expected.dtype), "shape": (actual.shape, expected.shape)}
    if strides:
        pairs["strides"] = (actual.stride(), expected.stride())
    for what, (got, want) in pairs.items():
        if got != want:
            raise AssertionError(f"{name}: {what} {_show(got)}, expected {_show(want)}")
    expected = expected.to(actual.device)
    bits = _BITS[actual.element_size()]
    where = (actual.view(bits) != expected.view(bits)).nonzero()
    if actual.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and len(where):
        at = where.unbind(1)
        where = where[~(_nan8(actual.view(bits)[at], actual) & _nan8(expected.view(bits)[at], expected))]
    if len(where):
        index = tuple(where[0].tolist())
        left, right = (_value(t, index) for t in (actual, expected))
        raise AssertionError(
            f"{name}: {len(where)} of {actual.numel()} elements differ, first at {index}: {left}, expected {right}"
        )


def different_elements(actual: Tensor, expected: Tensor) -> Tensor:
    """How many elements differ in a bit, as a tensor on their device: for results that nothing waits for."""
    bits = _BITS[actual.element_size()]
    return torch.count_nonzero(actual.view(bits) != expected.view(bits))


@contextlib.contextmanager
def unchanged(tensors: Iterable[object]) -> Iterator[None]:
    """The bytes of these tensors must be the same after the block; other values among them are passed over."""
    tensors = [value for value in tensors if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    yield
    for index, (now, then) in enumerate(zip(tensors, before, strict=True)):
        assert_same_bytes(now, then, f"input {index}", strides=False)


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a tensor, tuple, list, dict or None, in order."""
    if value is None:
        return []
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for part in value for tensor in tensors_of(part)]


def _difference(actual: Tensor, expected64: Tensor) -> tuple[Tensor, Tensor]:
    if actual.shape != expected64.shape:
        raise AssertionError(f"shape is {tuple(actual.shape)}, expected {tuple(expected64.shape)}")
    ours, expected = actual.detach().to(expected64.device, torch.float64), expected64.detach().double()
    same_inf = expected.isinf() & (ours == expected)
    return (ours - expected).masked_fill(same_inf, 0.0), expected.masked_fill(same_inf, 0.0)


def _ratio(error: float, size: float) -> float:
    if error == 0.0:
        return 0.0
    ratio = error / size if size else float("inf")
    return ratio if ratio == ratio else float("inf")


def _band_norms(difference: Tensor, expected: Tensor, band: int, dim: int) -> tuple[Tensor, Tensor]:
    pieces = zip(difference.split(band, dim), expected.split(band, dim), strict=True)
    norms = torch.stack([torch.stack([d.norm(), e.norm()]) for d, e in pieces])
    return norms[:, 0], norms[:, 1]


def _check_operands(actual: Tensor, expected64: Tensor, eager: Tensor, name: str) -> None:
    if expected64.dtype != torch.float64:
        raise AssertionError(f"{name}: the expected result must be float64, got {_show(expected64.dtype)}")
    if actual.dtype != eager.dtype:
        raise AssertionError(f"{name}: dtype is {_show(actual.dtype)}, the eager result has {_show(eager.dtype)}")


def _nan8(bits: Tensor, like: Tensor) -> Tensor:
    return bits.view(like.dtype).float().isnan()


def _value(tensor: Tensor, index: tuple[int, ...]) -> str:
    element = tensor[index]
    width = 2 * tensor.element_size()
    bits = element.view(_BITS[tensor.element_size()]).item() & (16**width - 1)
    return f"{element.item()!r} (0x{bits:0{width}x})"


def _show(value: object) -> str:
    return str(tuple(value) if isinstance(value, torch.Size) else value).removeprefix("torch.")
