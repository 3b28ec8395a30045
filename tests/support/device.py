"""Ways to run an operator: many times, on other streams, in a CUDA graph, on another device, not synchronising."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from tests.support import memory
from tests.support.compare import assert_same_bytes, different_elements, tensors_of

_SLEEP_CYCLES = 20_000_000  # about 10 ms on a Hopper GPU: longer than any launch takes on the host


def repeat_bytes(fn: Callable[[], object], n: int = 5) -> object:
    """Call `fn` n times, require the same bytes in every output of every call, return the first call's outputs."""
    first = fn()
    wanted = [tensor.clone() for tensor in tensors_of(first)]
    for call in range(2, n + 1):
        again = tensors_of(fn())
        assert len(again) == len(wanted), f"call {call} of {n} returned {len(again)} tensors, expected {len(wanted)}"
        for index, (got, want) in enumerate(zip(again, wanted, strict=True)):
            assert_same_bytes(got, want, f"call {call} of {n}, output {index}", strides=False)
    return first


def side_stream(fn: Callable[..., object], *args: object) -> object:
    """Run fn(*args) on a new stream whose inputs are written late: a sleep kernel, then the copies, then `fn`.

    Each tensor argument is replaced by a buffer that holds NaN (0 for integers) until the copy on the side stream has
    run. A kernel launched on any other stream, or a host-side look at the data, sees the stale contents.
    Returns the outputs after synchronising the side stream.
    """
    device = next(tensor.device for tensor in tensors_of([a for a in args if isinstance(a, Tensor)]))
    stale = [_stale_like(a) if isinstance(a, Tensor) else a for a in args]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        for buffer, source in zip(stale, args, strict=True):
            if isinstance(source, Tensor):
                buffer.copy_(source)
        result = fn(*stale)
    stream.synchronize()
    return result


def _stale_like(source: Tensor) -> Tensor:
    buffer = torch.empty_like(source.detach())
    return buffer.fill_(float("nan")) if source.is_floating_point() else buffer.zero_()


def halves_on_two_streams(first: Callable[[], object], second: Callable[[object], object]) -> tuple[object, object]:
    """first() on a new stream behind a sleep kernel, and second(its results) on another stream that waits for it.

    Returns the results of both after synchronising.
    """
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_SLEEP_CYCLES)
        made = first()
    other.wait_stream(stream)
    with torch.cuda.stream(other):
        results = second(made)
    torch.cuda.synchronize()
    return made, results


def assert_same_at_once(
    calls: Sequence[Callable[[], object]],
    wanted: Sequence[object],
    assert_same: Callable[[object, object], None],
    rounds: int,
) -> None:
    """Run the calls at once, each on a stream of its own; in every round assert_same(results, wanted) of each."""
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(rounds):
        found = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
        torch.cuda.synchronize()
        for got, want in zip(found, wanted, strict=True):
            assert_same(got, want)


def differences_at_once(calls: Sequence[Callable[[], object]], rounds: int) -> list[int]:
    """How many elements of each call's results differ from what it gives alone, in all rounds together.

    The calls run at once, each on a stream of its own, and nothing waits between the rounds.
    """
    wanted = [[tensor.clone() for tensor in tensors_of(call())] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    counts = [torch.zeros((), dtype=torch.int64, device=alone[0].device) for alone in wanted]
    torch.cuda.synchronize()
    for _ in range(rounds):
        for call, alone, stream, count in zip(calls, wanted, streams, counts, strict=True):
            with torch.cuda.stream(stream):
                for got, want in zip(tensors_of(call()), alone, strict=True):
                    count += different_elements(got, want)
    torch.cuda.synchronize()
    return [count.item() for count in counts]


class Captured:
    """A captured call: `replay()` runs the graph and returns the (static) outputs."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: object) -> None:
        self._graph, self.outputs = graph, outputs

    def replay(self) -> object:
        """Replay on the current stream. The outputs are overwritten in place."""
        self._graph.replay()
        return self.outputs


def capture(fn: Callable[[], object], *, warm_up: int = 2) -> Captured:
    """Capture fn() into a CUDA graph, after `warm_up` calls on a side stream (0: the first call ever is captured).

    `fn` closes over its input tensors: write new contents into them before each replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = fn()
    return Captured(graph, outputs)


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    """Within the block, a call of PyTorch that synchronises with the GPU raises RuntimeError. Nothing on a CPU."""
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def deterministic_algorithms(on: bool = True) -> Iterator[None]:
    """Within the block PyTorch refuses what is not deterministic, and fills what is uninitialised with NaN."""
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def other_defaults() -> Iterator[None]:
    """Within the block tensors of which nothing else is said are float64, on the meta device."""
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def other_device(current: int) -> torch.device:
    """Of two CUDA devices the one that is not current; skips the test where there is only one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two CUDA devices")
    return torch.device("cuda", 1 - current)


@contextlib.contextmanager
def nothing_allocated(current: int) -> Iterator[None]:
    """Within the block that device is current; it must stay so, and no more may be allocated there than before."""
    torch.cuda.synchronize()
    with torch.cuda.device(current):
        before = memory.allocated(current)
        yield
        assert torch.cuda.memory_allocated(current) == before
        assert torch.cuda.current_device() == current
