"""Times calls on a GPU with events whose queue never runs dry, or on a CPU with the host's clock."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

Call = Callable[[], object]

GRAPH_BELOW_MS = 0.03  # shorter calls are timed inside a CUDA graph: launch gaps would count
_MAX_LEAD_S = 0.1
_CYCLES_PER_S = 2.0e9  # at or above a Hopper GPU's clock, so a sleep lasts at least as long as asked for


def percentile(values: list[float], share: float) -> float:
    """The `share` (0 to 1) quantile of `values`, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def statistics_of(milliseconds: list[float]) -> dict[str, float | int]:
    """Median, 10th and 90th percentile and the number of samples."""
    quantiles = {"p10_ms": 0.1, "median_ms": 0.5, "p90_ms": 0.9}
    figures: dict[str, float | int] = {name: percentile(milliseconds, share) for name, share in quantiles.items()}
    return {**figures, "samples": len(milliseconds)}


class L2Flush:
    """Empties the L2 of anything useful by writing a buffer of at least twice its size; its lines stay there, dirty."""

    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.nbytes = max(2 * l2, 128 << 20)
        self._buffer = torch.empty(self.nbytes, dtype=torch.uint8, device=device)

    def __call__(self) -> None:
        self._buffer.zero_()


class HostTimer:
    """Times `call` with the host's clock, after an untimed `before`."""

    graph = False

    def __init__(self, call: Call, before: Call, inner: int) -> None:
        self._call, self._before, self._inner = call, before, inner
        self._times: list[float] = []

    def enqueue(self) -> None:
        for _ in range(self._inner):
            self._before()
            start = time.perf_counter()
            self._call()
            self._times.append(1e3 * (time.perf_counter() - start))

    def read(self) -> list[float]:
        """The times in ms since the last read."""
        times, self._times = self._times, []
        return times


class EventTimer:
    """Queues `before`, an event, `call`, an event; `read` after synchronising."""

    graph = False

    def __init__(self, call: Call, before: Call, inner: int) -> None:
        self._call, self._before, self._inner = call, before, inner
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def enqueue(self) -> None:
        for _ in range(self._inner):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._before()
            start.record()
            self._call()
            end.record()
            self._events.append((start, end))

    def read(self) -> list[float]:
        """The times in ms since the last read."""
        events, self._events = self._events, []
        return [start.elapsed_time(end) for start, end in events]


class GraphTimer:
    """As EventTimer, all of it captured once, events included: one launch replays `inner` timed calls.

    `read` before the next `enqueue`: a replay records the same events again. The constructor raises what the capture
    raises.
    """

    graph = True

    def __init__(self, call: Call, before: Call, inner: int) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # External events become nodes of the graph, which is what gives them a time at every replay.
        self._events = [
            tuple(torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)) for _ in range(inner)
        ]
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            for start, end in self._events:
                before()
                start.record()
                call()
                end.record()

    def enqueue(self) -> None:
        self._graph.replay()

    def read(self) -> list[float]:
        """The times in ms of the last replay."""
        return [start.elapsed_time(end) for start, end in self._events]


Timer = HostTimer | EventTimer | GraphTimer


class Sampler:
    """Runs timers round-robin, each round starting with another one, `per_batch` rounds between synchronisations.

    On a GPU every batch begins with a sleep kernel long enough for the host to queue the whole batch behind it, so
    that no event waits for the host. A batch during which the sleep ended too early is measured again with a longer
    one; if that does not help, batches get shorter, since a stream takes only about a thousand launches ahead and a
    call in plain PyTorch may have hundreds. `starved` counts, by name, the calls whose times were kept although they
    waited even when alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._lead_s = 0.005
        self._most: int | None = None  # calls in a batch that the host can queue, once that is known
        self.starved: Counter[str] = Counter()

    def sample(self, timers: dict[str, Timer], rounds: int, per_batch: int = 1) -> dict[str, list[float]]:
        """Times in ms by name, at least `rounds` enqueues of each timer. `per_batch` must be 1 with a GraphTimer."""
        times: dict[str, list[float]] = {name: [] for name in timers}
        names = list(timers)
        for first in range(0, rounds, per_batch):
            rotations = (r % len(names) for r in range(first, first + per_batch))
            queue = [name for shift in rotations for name in names[shift:] + names[:shift]]
            while queue:
                part = queue[: self._most]
                measured, starved = self._measure(part, timers)
                if starved and len(part) > 1:
                    self._most = len(part) // 2
                    continue
                if starved:
                    self.starved.update(part)
                for name, values in measured.items():
                    times[name] += values
                del queue[: len(part)]
        return times

    def _measure(self, batch: list[str], timers: dict[str, Timer]) -> tuple[dict[str, list[float]], bool]:
        """Times of these calls, and whether the host fell behind in all of three attempts."""
        for _ in range(3):
            starved = self._run([timers[name] for name in batch])
            measured = {name: timers[name].read() for name in dict.fromkeys(batch)}
            if not starved:
                break
        return measured, starved

    def _run(self, queue: list[Timer]) -> bool:
        if not self._cuda:
            for timer in queue:
                timer.enqueue()
            return False
        awake = torch.cuda.Event()
        torch.cuda._sleep(int(self._lead_s * _CYCLES_PER_S))
        awake.record()
        start = time.perf_counter()
        for timer in queue:
            timer.enqueue()
        starved = awake.query()
        host_s = time.perf_counter() - start
        torch.cuda.synchronize()
        needed = 1.5 * host_s + 0.0005
        self._lead_s = min(_MAX_LEAD_S, max(needed, 2 * self._lead_s if starved else 0.0))
        return starved


def median_ms(device: torch.device, call: Call) -> float:
    """Median GPU time of a call in ms, of 20 after 5 more."""
    timers = {"call": EventTimer(call, lambda: None, inner=1)}
    sampler = Sampler(device)
    sampler.sample(timers, rounds=5, per_batch=5)
    return percentile(sampler.sample(timers, rounds=20, per_batch=20)["call"], 0.5)


def host_microseconds(call: Call, rounds: int = 10, calls: int = 5) -> float:
    """Median time that the host spends in `call`, in microseconds.

    Calls follow each other behind a sleep kernel of 20 ms: neither the GPU nor a full queue holds them up. The first
    of each round does not count if there are more: it finds the host's caches cold.
    """
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(0.02 * _CYCLES_PER_S))
        found: list[float] = []
        while len(found) < calls and sum(found) < 1e4:  # calls of many launches could fill the queue
            start = time.perf_counter()
            call()
            found.append(1e6 * (time.perf_counter() - start))
        times += found[1:] or found
    torch.cuda.synchronize()
    return percentile(times, 0.5)


def peak_bytes(call: Call) -> int:
    """Bytes that PyTorch is asked for during `call` at its peak, beyond what was there: results and workspace."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
