"""What `hopper-kernels precompile` spares the first step: `python -m benches.first_step`, on a Hopper GPU.

Twice a new process computes a layer of DeepSeek-V4.1 in plain PyTorch, so that all else is set up, and then two steps
with all kernels, in bf16 and in FP8: once with an empty cache of compiled kernels, once after precompilation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benches import machine
from benches.harness import HERE, write
from benches.v41 import operations
from benches.v41.config import FLASH, SINGLE
from benches.v41.step import Setting, Step
from benches.v41_layer import WHEELS

NAME, TITLE = "first_step", "The first step with all kernels, by what was compiled before"
KERNELS = {"bf16": operations.BF16, "FP8": operations.FP8}
EMPTY, PRECOMPILED = "empty cache", "precompiled"


def main(argv: list[str] | None = None) -> int:
    """Needs a Hopper GPU."""
    parser = argparse.ArgumentParser(prog=f"python -m benches.{NAME}", description=TITLE)
    parser.add_argument("--output", type=Path, help="folder for the JSON, instead of results/")
    parser.add_argument("--steps", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here, so nothing to measure", file=sys.stderr)
        return 1
    if options.steps:
        print(json.dumps(steps()))
        return 0
    record: dict[str, Any] = {
        "bench": NAME,
        "title": TITLE,
        "device": machine.device_facts(torch.device("cuda")),
        "cpus": os.cpu_count(),
        "versions": machine.versions(WHEELS),
        "code": machine.code_digest((*WHEELS, "moe_experts.fp8")),
    }
    for label in (EMPTY, PRECOMPILED):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "TRITON_CACHE_DIR": cache}
            if label == PRECOMPILED:
                start = time.perf_counter()
                command = [sys.executable, "-m", "hopper_kernels", "precompile"]
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
                record["precompile_s"] = time.perf_counter() - start
            command = [sys.executable, "-m", f"benches.{NAME}", "--steps"]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            record[label] = json.loads(done.stdout.splitlines()[-1])
    print(markdown(record))
    write(record, options.output or HERE / "results")
    return 0


def steps() -> dict[str, list[float]]:
    """Seconds of the first and the second step of each choice, on the host's clock."""
    setting = Setting("layer", dataclasses.replace(FLASH, layers=SINGLE), 16384)
    step = Step(setting, torch.device("cuda"))
    for _ in range(2):
        step(operations.choose())
    return {name: [_seconds(step, operations.choose(*kernels)) for _ in range(2)] for name, kernels in KERNELS.items()}


def _seconds(step: Step, use: operations.Operations) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(use)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def markdown(record: dict[str, Any]) -> str:
    """The table of the documentation."""
    lines = ["| | first step, s | second, s |", "| --- | --- | --- |"]
    for label in (EMPTY, PRECOMPILED):
        lines += [
            f"| {name}, {label} | {first:.2f} | {second:.2f} |" for name, (first, second) in record[label].items()
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
