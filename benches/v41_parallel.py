"""DeepSeek-V4.1's layers on several processes: `python -m benches.v41_parallel`, or `torchrun -m` with that module.

On all GPUs over NCCL at full width, without any over gloo at toy size. Two ways to share the work:

- queries in context-parallel and experts in expert-parallel parts;
- whole sequences for each process, parameters in FSDP2, gradients of the experts' weights summed in fp32 over
  micro-batches by the FP8 kernels.

Every process also computes what all of them do together, alone; losses and gradients must agree.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benches import machine
from benches.harness import HERE, write
from benches.measure import progress
from benches.timing import statistics_of
from benches.v41 import operations, sharded
from benches.v41.choices import Choices
from benches.v41.config import FLASH, TOY
from benches.v41.parallel import Processes
from benches.v41.step import Setting, Step, distances
from benches.v41_layer import BOUNDS, WHEELS, timed

NAME = "v41_parallel"
ROUNDS = 5
MICRO_BATCHES = 2
PROCESSES = 2  # without GPUs


def main(argv: list[str] | None = None) -> int:
    """The exit code is 1 if losses or gradients disagree."""
    parser = argparse.ArgumentParser(prog=f"python -m benches.{NAME}", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="timed steps")
    parser.add_argument("--output", type=Path, help="folder for the JSON, instead of results/")
    options = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        return launch(sys.argv[1:] if argv is None else argv, torch.cuda.device_count() if cuda else PROCESSES)
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        record = run(device, options.rounds)
        if dist.get_rank() == 0:
            print(text(record))
            if cuda or options.output:
                write(record, options.output or HERE / "results")
        return int(any(part["status"] != "verified" for part in record["parts"]))
    finally:
        dist.destroy_process_group()


def launch(argv: list[str], processes: int) -> int:
    """This module in so many processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return subprocess.run([*launcher, "-m", f"benches.{NAME}", *argv], check=False).returncode


def run(device: torch.device, rounds: int) -> dict[str, Any]:
    """The record that becomes the JSON, the same on every process."""
    return {
        "bench": NAME,
        "toy": device.type != "cuda",
        "processes": dist.get_world_size(),
        "device": machine.device_facts(device),
        "versions": machine.versions(WHEELS),
        "code": machine.code_digest((*WHEELS, "moe_experts.fp8")),
        "parts": [queries_and_experts(device, rounds), sequences(device, rounds)],
    }


def text(record: dict[str, Any]) -> str:
    """A line for each way."""
    lines = [f"{record['processes']} processes on {record['device']['name']}"]
    for part in record["parts"]:
        times = [f"{name} {part[name]['median_ms']:.1f} ms" for name in ("alone", "together") if name in part]
        lines.append(f"{part['name']}: {part['status']}, {part['note']}; {', '.join(times)}")
    return "\n".join(lines)


def _sizes(device: torch.device) -> tuple[Any, int]:
    return (FLASH, 16384) if device.type == "cuda" else (TOY, 64)


def queries_and_experts(device: torch.device, rounds: int) -> dict[str, Any]:
    """Context- and expert-parallel: a part of the queries and of the experts on each process."""
    config, tokens = _sizes(device)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    use = operations.choose(*operations.BF16)

    choices = Choices()
    alone = Step(Setting("alone", config, tokens, checkpointed=True), device, parts=ranks)
    wanted, expected = alone.gradients(use, choices).item(), alone.found()
    times = {"alone": _times(functools.partial(timed, alone, use, device), rounds)}
    del alone

    mine = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    step = Step(Setting("together", config, tokens, ranks, True), device, Processes(dist.group.WORLD), rank)
    loss = step.gradients(use, Choices(choices.rows(mine)))
    dist.all_reduce(loss)
    found = step.found()
    local = config.experts // ranks
    for name, grad in found.items():
        if name.endswith(("experts.gate_up", "experts.down")):
            expected[name] = expected[name][rank * local : (rank + 1) * local]
        elif name == "x":
            expected[name] = expected[name][mine]
        else:
            found[name] = grad.float()
            dist.all_reduce(found[name])
    entry = _judged("context and expert parallel", loss.item(), wanted, found, expected)
    times["together"] = _times(functools.partial(timed, step, use, device), rounds)
    return {**entry, **times}


def sequences(device: torch.device, rounds: int) -> dict[str, Any]:
    """Whole sequences for each process, parameters in FSDP2, gradients added up over micro-batches."""
    config, tokens = _sizes(device)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    use = operations.choose(*operations.BF16[:3], operations.FP8_EXPERTS)
    setting = Setting("sequence", config, tokens // ranks, checkpointed=True)
    choices = [Choices() for _ in range(ranks * MICRO_BATCHES)]

    alone = Step(setting, device)
    expected: dict[str, torch.Tensor] = {}
    wanted = 0.0
    for sequence, kept in enumerate(choices):
        alone.load(sequence)
        wanted += alone.gradients(use, kept).item() / len(choices)
        for name, grad in alone.found().items():
            if name != "x":
                expected.setdefault(name, torch.zeros_like(grad, dtype=torch.float32)).add_(
                    grad, alpha=1 / len(choices)
                )
    del alone

    step = Step(setting, device)
    whole = sharded.shard(step.model)

    def backwards(replayed: bool) -> torch.Tensor:
        step.optimiser.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=device)
        for number in range(MICRO_BATCHES):
            sequence = rank * MICRO_BATCHES + number
            step.load(sequence)
            step.model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)
            loss += step.backward(use, Choices(choices[sequence]) if replayed else None)
        return loss

    loss = backwards(replayed=True) / len(choices)
    dist.all_reduce(loss)
    found = sharded.gradients(step.model, whole, MICRO_BATCHES)
    entry = _judged("FSDP2, experts summed in fp32", loss.item(), wanted, found, expected)
    del found, expected
    return {
        **entry,
        "together": _times(functools.partial(timed, lambda _: backwards(replayed=False), use, device), rounds),
    }


def _times(call: Callable[[], tuple[float, int]], rounds: int) -> dict[str, float | int]:
    """Of calls of `timed` after one more, which all processes make together."""
    found = []
    for number in range(rounds + 1):
        dist.barrier()
        ms, _ = call()
        if number:
            found.append(ms)
    return statistics_of(found)


def _judged(
    name: str, loss: float, wanted: float, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """The worst of all processes."""
    whole, worst, kind = distances(found, expected)
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (abs(loss - wanted) / wanted, whole, worst))
    difference, whole, worst = (max(values) for values in zip(*everybody, strict=True))
    entry = {"name": name, "loss": difference, "whole": whole, "worst": worst, "kind": kind}
    right = all(entry[key] <= bound for key, bound in BOUNDS.items())
    note = f"loss {loss:.6f} and {wanted:.6f} alone, gradients {whole:.1e}, of {kind} {worst:.1e}"
    progress(f"process {dist.get_rank()}: {name}: {note}")
    return {**entry, "status": "verified" if right else "wrong", "note": note}


if __name__ == "__main__":
    sys.exit(main())
