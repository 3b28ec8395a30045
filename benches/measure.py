"""Verifies and times the candidates of one case. The protocol is in benches.harness."""

from __future__ import annotations

import re
import sys
import time
from typing import Any

import torch

from benches.case import COPY, Candidate, Case
from benches.machine import ClockLog
from benches.timing import (
    GRAPH_BELOW_MS,
    Call,
    EventTimer,
    GraphTimer,
    HostTimer,
    L2Flush,
    Sampler,
    Timer,
    host_microseconds,
    peak_bytes,
    percentile,
    statistics_of,
)

_START = time.perf_counter()


def run_case(case: Case, device: torch.device, clocks: ClockLog, quick: bool, rounds: int | None) -> dict[str, Any]:
    """Verify all candidates of a case, time those that are right; the case's part of the record."""
    torch.manual_seed(0)
    inputs = case.make()
    entries, calls = [], {}
    for candidate in case.candidates:
        progress(f"{case.label}: verifying {candidate.name}")
        entry, call = _verified(case, candidate, inputs)
        entries.append(entry)
        if call is not None:
            calls[candidate.name] = call
    if calls:
        progress(f"{case.label}: timing {len(calls)} candidates")
        start = time.perf_counter()
        _time(calls, {c.name for c in case.candidates if c.graph}, entries, device, quick, rounds)
        clock = clocks.between(start, time.perf_counter())
        progress(f"{case.label}: {_summary(entries)}")
    else:
        clock = None
    del inputs, calls
    if device.type == "cuda":
        torch.cuda.empty_cache()
    unit = "bytes" if case.bytes is not None else "flops"
    return {"label": case.label, "work": case.work, "unit": unit, "clocks": clock, "candidates": entries}


def _summary(entries: list[dict[str, Any]]) -> str:
    """What was measured so far, in case the run is cut off."""
    state = "flushed" if any("flushed" in entry for entry in entries) else "host"
    return ", ".join(f"{entry['name']} {entry[state]['median_ms']:.4f} ms" for entry in entries if state in entry)


def _verified(case: Case, candidate: Candidate, inputs: Any) -> tuple[dict[str, Any], Call | None]:
    entry = {"name": candidate.name, "ours": candidate.ours, "work": candidate.work or case.work}
    if candidate.tolerance:
        entry["tolerance"] = candidate.tolerance
    try:
        call = candidate.prepare(inputs)
        entry["note"] = (candidate.verify or case.verify)(inputs, call())
    except AssertionError as error:
        return {**entry, "status": "wrong", "note": _one_line(error)}, None
    except Exception as error:  # a peer that cannot run here must not take the others with it
        return {**entry, "status": "failed", "note": f"{type(error).__name__}: {_one_line(error)}"}, None
    return {**entry, "status": "verified"}, call


def _one_line(error: BaseException) -> str:
    """The first line of the message without paths: it goes into a file that others read."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return re.sub(r"(?<!\w)/[\w.+-]+(/[\w.+-]+)+", "<path>", first)[:300]


def _time(
    calls: dict[str, Call],
    may_capture: set[str],
    entries: list[dict[str, Any]],
    device: torch.device,
    quick: bool,
    rounds: int | None,
) -> None:
    """Time all calls in both states of the L2 and put the figures into their entries."""
    by_name = {entry["name"]: entry for entry in entries}
    if device.type != "cuda":
        timers = {name: HostTimer(call, lambda: None, inner=1) for name, call in calls.items()}
        for name, times in Sampler(device).sample(timers, rounds or 3).items():
            by_name[name]["host"] = {**statistics_of(times), "graph": False}
        return
    flush = L2Flush(device)
    estimates = _warm_up(calls, flush, device)
    captured = may_capture if min(estimates.values()) < GRAPH_BELOW_MS else set()
    count = rounds or max(5 if quick else 15, min(20 if quick else 100, int(300 / sum(estimates.values()))))
    for name, call in calls.items():
        by_name[name]["host_us"] = host_microseconds(call)
        by_name[name]["peak_bytes"] = peak_bytes(call)
    for state in ("flushed", "warm"):
        timers = {}
        for name, call in calls.items():
            before = flush if state == "flushed" else call
            timers[name], problem = _timer(call, before, name in captured)
            if problem:
                by_name[name]["graph_problem"] = problem
        sampler = Sampler(device)
        per_batch = 1 if captured else max(1, min(count, int(50 / sum(estimates.values())), 40 // len(timers)))
        sampler.sample(timers, per_batch, per_batch)  # finds how long the host takes to queue a batch
        sampler.starved.clear()
        for name, times in sampler.sample(timers, count, per_batch).items():
            by_name[name][state] = {**statistics_of(times), "graph": timers[name].graph}
        for name, waited in sampler.starved.items():
            progress(f"{state}: {waited} calls of {name} waited for the host; their times include launches")
            by_name[name][state]["starved_calls"] = waited


def _warm_up(calls: dict[str, Call], flush: Call, device: torch.device, seconds: float = 0.3) -> dict[str, float]:
    """Run all calls for a while; the median time in ms of each one's last few."""
    timers = {name: EventTimer(call, flush, inner=1) for name, call in calls.items()}
    sampler, end = Sampler(device), time.perf_counter() + seconds
    while time.perf_counter() < end:
        times = sampler.sample(timers, rounds=5)
    return {name: percentile(values, 0.5) for name, values in times.items()}


def _timer(call: Call, before: Call, graph: bool) -> tuple[Timer, str]:
    """A timer, and why it is not the graph that was asked for."""
    if graph:
        try:
            timer = GraphTimer(call, before, inner=5)
            timer.enqueue()
            torch.cuda.synchronize()
            timer.read()
            return timer, ""
        except Exception as error:
            torch.cuda.synchronize()
            return EventTimer(call, before, inner=5), f"not captured: {type(error).__name__}: {_one_line(error)}"
    return EventTimer(call, before, inner=1), ""


def add_shares(record: dict[str, Any]) -> None:
    """Rates and shares of the ceilings. `rate` counts a candidate's own work, `times_floor` the case's least work."""
    for case in record["cases"]:
        unit, scale = ("gb_per_s", 1e6) if case["unit"] == "bytes" else ("tflop_per_s", 1e9)
        ceiling = record["ceilings"].get(unit, {}).get("mean")
        case["rate_unit"] = unit
        copy = next((entry for entry in case["candidates"] if entry["name"] == COPY), {})
        for entry in case["candidates"]:
            for state in ("flushed", "warm", "host"):
                if state not in entry:
                    continue
                figures = entry[state]
                figures["rate"] = entry["work"] / figures["median_ms"] / scale
                if ceiling:
                    figures["share_of_ceiling"] = figures["rate"] / ceiling
                    figures["times_floor"] = figures["median_ms"] * scale * ceiling / case["work"]
                if state in copy:
                    copy_rate = copy["work"] / copy[state]["median_ms"] / scale
                    figures["share_of_same_size_copy"] = figures["rate"] / copy_rate


def progress(text: str) -> None:
    """One line on stderr, after the seconds since the start."""
    print(f"{time.perf_counter() - _START:4.0f} s  {text}", file=sys.stderr, flush=True)
