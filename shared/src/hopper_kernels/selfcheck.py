"""Runs a kernel against its definition on this machine: errors, time, memory."""

import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from hopper_kernels import registry
from hopper_kernels.dispatch import reference

REPEATS = 5
_INF = float("inf")
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One check of a kernel; its package lists them in `<package>.selfcheck.cases(device)`."""

    label: str
    """The shape, "16384 x 5120, inverse RoPE"."""
    make: Callable[[], tuple]
    """Returns the inputs, from a fixed seed, on the device."""
    run: Callable[..., Outputs]
    """Calls the public function with the inputs; outputs by name."""
    expected: Callable[..., Outputs]
    """The definition on the same inputs, on the same device."""
    error: Callable[[torch.Tensor, torch.Tensor], float]
    """Error of an output against the expected one, e.g. `differing_bytes` or `relative_error`."""
    bounds: dict[str, float]
    """Largest allowed error of each output."""


@dataclass(frozen=True)
class Result:
    """What one case gave."""

    kernel: str
    label: str
    implementation: str
    """"SM90 kernel" or "definition": what ran."""
    errors: dict[str, float]
    bounds: dict[str, float]
    milliseconds: float
    """Median of a few calls; NaN if none finished."""
    peak_bytes: int | None
    """Device memory allocated by a call, at its peak, outputs included; None on a CPU."""
    passed: bool
    message: str = ""
    """What went wrong, or why a GPU ran the definition."""


def differing_bytes(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Number of elements whose bytes differ, where a NaN equals any NaN; inf if shape, dtype, strides or device do.

    Any dtype of 1, 2, 4 or 8 bytes. Reads the result back, so it synchronises.
    """
    if any(getattr(actual, what) != getattr(expected, what) for what in ("dtype", "shape", "device")):
        return _INF
    if actual.stride() != expected.stride():
        return _INF
    integer = _INTEGER_OF_SIZE[actual.dtype.itemsize]
    differing = actual.view(integer) != expected.view(integer)
    if actual.dtype.is_floating_point:
        differing &= ~(_is_nan(actual) & _is_nan(expected))
    return float(torch.count_nonzero(differing))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; inf if the shapes differ or the quotient is no number.

    0 if both are empty or zero. Reads the result back, so it synchronises.
    """
    if actual.shape != expected.shape:
        return _INF
    wanted = expected.double()
    difference = torch.linalg.vector_norm(actual.double() - wanted).item()
    if difference == 0:
        return 0.0
    norm = torch.linalg.vector_norm(wanted).item()
    error = difference / norm if norm > 0 else _INF
    return error if error < _INF else _INF


def run_case(kernel: str, case: Case, device: torch.device) -> Result:
    """Run one case of the kernel named `kernel` on `device`. Never raises: an exception is a result that failed.

    On a CUDA device on which the kernel is unavailable all runs inside `reference()`, and the result says why.
    The outputs compared are those of the first call, made in memory that was filled with NaN.
    """
    device = torch.device(device)
    implementation, message = "definition", ""
    try:
        with ExitStack() as stack:
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                message = registry.unavailable_reason(kernel, device) or ""
                if message:
                    stack.enter_context(reference())
                else:
                    implementation = "SM90 kernel"
            errors, milliseconds, peak_bytes = _measure(case, device)
    except Exception as error:
        return Result(kernel, case.label, implementation, {}, case.bounds, float("nan"), None, False, _where(error))
    passed = all(errors[name] <= bound for name, bound in case.bounds.items())
    return Result(kernel, case.label, implementation, errors, case.bounds, milliseconds, peak_bytes, passed, message)


def _measure(case: Case, device: torch.device) -> tuple[dict[str, float], float, int | None]:
    inputs = case.make()
    # The definition first: a kernel that spoiled its inputs must not spoil what it is compared with.
    expected = case.expected(*inputs)
    _poison(expected)
    actual = case.run(*inputs)
    names = {"returned": actual.keys(), "expected": expected.keys(), "bounded": case.bounds.keys()}
    if not case.bounds or any(keys != case.bounds.keys() for keys in names.values()):
        found = ", ".join(f"{what} {sorted(keys)}" for what, keys in names.items())
        raise ValueError(f"the case must return, expect and bound the same outputs: {found}")
    errors = {name: float(case.error(actual[name], expected[name])) for name in case.bounds}
    del actual, expected
    milliseconds, peak_bytes = (_time_cuda if device.type == "cuda" else _time_cpu)(case.run, inputs)
    return errors, milliseconds, peak_bytes


def _time_cpu(run: Callable[..., Any], inputs: tuple) -> tuple[float, None]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run(*inputs)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds), None


def _time_cuda(run: Callable[..., Any], inputs: tuple) -> tuple[float, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    milliseconds = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run(*inputs)
        end.record()
        end.synchronize()
        milliseconds.append(start.elapsed_time(end))
    return statistics.median(milliseconds), torch.cuda.max_memory_allocated() - before


def _poison(outputs: Outputs) -> None:
    """Leave freed blocks of the outputs' sizes behind, full of 0xFF, so that an element nobody writes is seen."""
    sizes = [t.untyped_storage().nbytes() for t in outputs.values()]
    device = next(iter(outputs.values())).device if outputs else None
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes]
    del blocks


def _is_nan(t: torch.Tensor) -> torch.Tensor:
    if t.dtype == torch.float8_e4m3fn:
        # By the byte: float8 has no comparison, and a float32 copy of a large tensor would not always fit.
        return (t.view(torch.uint8) & 0x7F) == 0x7F
    return (t.float() if t.dtype.itemsize == 1 else t).isnan()


def _where(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
