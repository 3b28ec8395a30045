"""A step of DeepSeek-V4.1's layers with each kernel alone and all together: `python -m benches.v41_layer`.

The same layers, parameters and data for every choice: plain PyTorch, then one operation after the other by its kernel.
A step is forward, backward and AdamW. Before it is timed, its loss and gradients are compared with those of plain
PyTorch, with FP8 of the definitions of the same recipe. Steps alternate; memory is the peak of a step, with parameters,
gradients and the optimiser's state.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benches import machine
from benches.harness import CPU_NOTICE, HERE, write
from benches.measure import progress
from benches.plotting import draw_file
from benches.timing import statistics_of
from benches.v41 import operations, plotting, table
from benches.v41.config import FLASH, SINGLE, TOY
from benches.v41.operations import FP8_CAST, FP8_EXPERTS, FP8_LINEAR, PLAIN, Operations
from benches.v41.step import Plain, Setting, Step, compare, plain_step

NAME, TITLE = "v41_layer", "A training step of DeepSeek-V4.1 Flash's layers"
WHEELS = ("hopper-kernels", "dsa-indexer-topk", "dsa-sparse-attn-bwd", "fp8-dual-cast", "mhc-projection", "moe-experts")
ROUNDS = 5


class Variant(NamedTuple):
    """kernels: names that `operations.choose` takes. recipe: those whose definitions it is compared with."""

    name: str
    kernels: tuple[str, ...] = ()
    recipe: tuple[str, ...] = ()


VARIANTS = (
    Variant(PLAIN),
    *(Variant(f"{name} alone", (name,)) for name in operations.BF16),
    Variant("all in bf16", operations.BF16),
    Variant(FP8_LINEAR, (FP8_LINEAR,), (FP8_LINEAR,)),
    Variant(f"{FP8_CAST} alone", (FP8_CAST,), (FP8_LINEAR,)),
    Variant(f"{FP8_EXPERTS}, alone", (FP8_EXPERTS,), (FP8_EXPERTS,)),
    Variant("all, FP8", operations.FP8, (FP8_LINEAR, FP8_EXPERTS)),
)
# Relative differences that are allowed: of the loss, of all gradients together, of the worst kind of parameter. Numbers
# that round to another one of e4m3 are 6 % off, so two ways of one FP8 recipe are soon as far apart as FP8 and bf16
# are; but no way may be farther from bf16 than the definitions, by more than `excess`.
BOUNDS = {"loss": 2e-3, "whole": 5e-2, "worst": 0.3}
FP8_BOUNDS = {"loss": 1e-2, "whole": 0.3, "worst": 1.0, "excess": 1.1}


def settings(device: torch.device) -> list[Setting]:
    """One layer, the stack, and the stack on the last of eight context-parallel ranks; at toy size on a CPU."""
    config, tokens = (FLASH, 16384) if device.type == "cuda" else (TOY, 64)
    single = dataclasses.replace(config, layers=SINGLE)
    return [
        Setting(f"layer {SINGLE[0]}, {tokens} tokens", single, tokens),
        Setting(f"six layers, {tokens} tokens", config, tokens, checkpointed=True),
        Setting(f"six layers, last {tokens} of {8 * tokens} tokens", config, 8 * tokens, ranks=8, checkpointed=True),
    ]


def main(argv: list[str] | None = None) -> int:
    """The exit code is 1 if a variant was wrong or failed."""
    parser = argparse.ArgumentParser(prog=f"python -m benches.{NAME}", description=TITLE)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps of each variant")
    parser.add_argument("--output", type=Path, help="folder for the JSON and the plot, instead of results/ and plots/")
    parser.add_argument("--only", default="", help="only settings whose label contains this text")
    parser.add_argument("--plot", action="store_true", help="only draw the plot of the JSON that is there")
    options = parser.parse_args(argv)
    results, plots = (options.output, options.output) if options.output else (HERE / "results", HERE / "plots")
    if options.plot:
        progress(f"drew {draw_file(results / f'{NAME}.json', plots, plotting.draw).name}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    record = run(device, options.rounds, options.only)
    print(table.text(record))
    if device.type == "cuda" or options.output:
        path = write(record, results)
        progress(f"wrote {path.name} and {draw_file(path, plots, plotting.draw).name}")
    return int(any(one["status"] != "verified" for setting in record["settings"] for one in setting["variants"]))


def run(device: torch.device, rounds: int = ROUNDS, only: str = "") -> dict[str, Any]:
    """The record that becomes the JSON."""
    chosen = [setting for setting in settings(device) if only in setting.label]
    record: dict[str, Any] = {
        "bench": NAME,
        "title": TITLE,
        "toy": device.type != "cuda",
        "device": machine.device_facts(device),
        "versions": machine.versions(WHEELS),
        "code": machine.code_digest((*WHEELS, "moe_experts.fp8")),
        "bounds": {"bf16": BOUNDS, "fp8": FP8_BOUNDS},
    }
    if record["toy"]:
        progress(CPU_NOTICE)
    bar = Bar(len(chosen) * len(VARIANTS) * (1 + rounds))
    with machine.ClockLog(device) as clocks:
        record["settings"] = [measured(setting, device, rounds, bar) for setting in chosen]
    record["clocks"] = clocks.summary()
    return record


class Bar:
    """Progress, a line a step."""

    def __init__(self, total: int) -> None:
        self._done, self._total = 0, total

    def step(self, text: str) -> None:
        filled = 20 * self._done // self._total
        progress(f"[{'#' * filled}{'.' * (20 - filled)}] {self._done}/{self._total} {text}")
        self._done += 1


def measured(setting: Setting, device: torch.device, rounds: int, bar: Bar) -> dict[str, Any]:
    """All variants, first compared, then timed in turn."""
    step = Step(setting, device)
    plain = plain_step(step)
    entries = []
    for variant in VARIANTS:
        bar.step(f"{setting.label}: comparing {variant.name}")
        entries.append(verified(step, variant, plain))
        progress(f"{entries[-1]['status']}: {entries[-1]['note']}")
    del plain
    right = [pair for pair in zip(entries, VARIANTS, strict=True) if pair[0]["status"] == "verified"]
    step.reset()
    step(operations.choose())  # makes the optimiser's state
    times: dict[str, list[float]] = {}
    for number in range(rounds):
        shift = number % max(1, len(right))
        for entry, variant in right[shift:] + right[:shift]:
            bar.step(f"{setting.label}: timing {variant.name}")
            ms, peak = timed(step, operations.choose(*variant.kernels), device)
            times.setdefault(variant.name, []).append(ms)
            entry["peak_bytes"] = max(peak, entry.get("peak_bytes", 0))
    for entry, _ in right:
        entry["step"] = statistics_of(times[entry["name"]])
    parameters = sum(p.numel() for p in step.model.parameters())
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = {"label": setting.label, "parameters": parameters, "variants": entries}
    progress("\n" + table.block(found))
    return found


def verified(step: Step, variant: Variant, plain: Plain) -> dict[str, Any]:
    """The variant's part of the record."""
    entry: dict[str, Any] = {"name": variant.name}
    if not variant.kernels:
        return {**entry, "status": "verified", "note": f"loss {plain.loss:.6f}"}
    try:
        found = compare(step, variant.kernels, variant.recipe, plain)
    except Exception as error:  # the others can be measured all the same
        return {**entry, "status": "failed", "note": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    finally:
        step.optimiser.zero_grad(set_to_none=True)
    entry.update(dataclasses.asdict(found), note=str(found))
    bounds = FP8_BOUNDS if variant.recipe else BOUNDS
    right = all(abs(entry[name]) <= bound for name, bound in bounds.items())
    return {**entry, "status": "verified" if right else "wrong"}


def timed(step: Callable[[Operations], object], use: Operations, device: torch.device) -> tuple[float, int]:
    """Milliseconds and peak bytes of a step; 0 bytes on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        step(use)
        return 1e3 * (time.perf_counter() - start), 0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start.record()
    step(use)
    end.record()
    end.synchronize()
    return start.elapsed_time(end), torch.cuda.memory_stats()["requested_bytes.all.peak"]


if __name__ == "__main__":
    sys.exit(main())
