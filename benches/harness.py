"""One protocol for all benches: verify, warm up, time all candidates interleaved, write JSON, draw it.

1. Every candidate's first answer is verified; a wrong one is reported as wrong and not timed.
2. All candidates of a case run in one process, round-robin, each round starting with another one. Calls are queued
   behind a sleep kernel, so the host's launch time is not measured. If a candidate of the case needs less than 30 us,
   the calls of all that allow it are captured in CUDA graphs, events included, and the result says so.
3. Two states of the L2: "flushed" (a buffer of at least twice its size was just written) and "warm" (the same call
   just ran, untimed).
4. Ceilings (device copy, bytes read plus written; where a case counts operations, a matrix product of the bench's
   dtype) are measured in the same run, before and after the cases.
5. Of each candidate the host's time for a call is measured too, and its memory: results, workspace and temporaries.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benches import machine, measure, plotting, table
from benches.case import COPY, Bench, Candidate, Case, copy_candidate
from benches.measure import progress
from benches.timing import L2Flush

__all__ = ["COPY", "Bench", "Candidate", "Case", "copy_candidate", "main", "run"]

HERE = Path(__file__).resolve().parent
CPU_NOTICE = "CPU: toy sizes with the definitions. This shows that the bench runs; these are no figures to quote."


def main(bench: Bench, argv: list[str] | None = None) -> int:
    """Entry point of every bench module; the exit code is 1 if a candidate of ours was wrong or failed."""
    options = _parse(bench, argv)
    results, plots = (options.output, options.output) if options.output else (HERE / "results", HERE / "plots")
    if options.plot:
        progress(f"drew {plotting.draw_file(results / f'{bench.name}.json', plots).name}")
        return 0
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    record = run(bench, device, quick=options.quick, rounds=options.rounds, only=options.only)
    print(table.text(record))
    if device.type == "cuda" or options.output:
        path = write(record, results)
        progress(f"wrote {path.name} and {plotting.draw_file(path, plots).name}")
    ours = [entry for case in record["cases"] for entry in case["candidates"] if entry["ours"]]
    return int(any(entry["status"] != "verified" for entry in ours))


def write(record: dict[str, Any], folder: Path) -> Path:
    """The record as JSON, in a file with the bench's name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['bench']}.json"
    path.write_text(json.dumps(_rounded(record), indent=1) + "\n")
    return path


def _rounded(value: Any) -> Any:
    """Floats at 6 digits: more would only be noise in the committed file."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def _parse(bench: Bench, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benches.{bench.name}", description=bench.title)
    parser.add_argument("--quick", action="store_true", help="fewer cases, peers and rounds")
    parser.add_argument("--output", type=Path, help="folder for the JSON and the plot, instead of results/ and plots/")
    parser.add_argument("--plot", action="store_true", help="only draw the plot of the JSON that is there")
    parser.add_argument("--rounds", type=int, help="rounds of each case and state (default: from the time they take)")
    parser.add_argument("--only", default="", help="only cases whose label contains this text")
    return parser.parse_args(argv)


def run(
    bench: Bench, device: torch.device, *, quick: bool = False, rounds: int | None = None, only: str = ""
) -> dict[str, Any]:
    """Run all cases; the record that becomes the JSON. Progress goes to stderr."""
    cases = [case for case in bench.cases(device, quick) if only in case.label]
    cuda = device.type == "cuda"
    record: dict[str, Any] = {
        "bench": bench.name,
        "title": bench.title,
        "quick": quick,
        "toy": not cuda,
        "device": machine.device_facts(device),
        "versions": machine.versions(bench.wheels + bench.peers),
        "code": machine.code_digest(bench.wheels + bench.packages),
        "flush_bytes": L2Flush(device).nbytes if cuda else None,
    }
    if not cuda:
        progress(CPU_NOTICE)
    with machine.ClockLog(device) as clocks:
        ceilings = [_ceilings(cases, device, bench.matmul)]
        record["cases"] = [measure.run_case(case, device, clocks, quick, rounds) for case in cases]
        ceilings.append(_ceilings(cases, device, bench.matmul))
    record["clocks"] = clocks.summary()
    record["ceilings"] = {
        unit: {"before": first, "after": ceilings[1][unit], "mean": (first + ceilings[1][unit]) / 2}
        for unit, first in ceilings[0].items()
    }
    if "tflop_per_s" in record["ceilings"]:
        record["ceilings"]["tflop_per_s"]["product"] = str(bench.matmul).removeprefix("torch.")
    measure.add_shares(record)
    return record


def _ceilings(cases: list[Case], device: torch.device, matmul: torch.dtype) -> dict[str, float]:
    if device.type != "cuda":
        return {}
    found = {"gb_per_s": machine.copy_ceiling(device)}
    if any(case.flops for case in cases):
        found["tflop_per_s"] = machine.matmul_ceiling(device, matmul)
    torch.cuda.empty_cache()
    return found
