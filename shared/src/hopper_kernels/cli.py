"""The command `hopper-kernels`: status, check, precompile. Progress on stderr, one table or JSON object on stdout."""

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict

import torch

from hopper_kernels import __version__, arch, registry
from hopper_kernels.errors import KernelUnavailable
from hopper_kernels.selfcheck import Case, Result, run_case

UNKNOWN_NAME = 2
MOST_JOBS = 8  # each needs about a GB of memory
_OUTCOME = {True: "ok", False: "FAILED", None: "skipped"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return its exit code.

    0: fine. 1: an error above its bound, a case or a compilation that raised, or a kernel named but not installed.
    2: an unknown kernel name; argparse itself exits with 2 for a malformed command line.
    """
    arguments = _parser().parse_args(argv)
    unknown = [name for name in getattr(arguments, "names", ()) if name not in registry.KERNELS]
    if unknown:
        known = ", ".join(registry.KERNELS)
        print(f"hopper-kernels: unknown kernel {', '.join(map(repr, unknown))}; known: {known}", file=sys.stderr)
        return UNKNOWN_NAME
    return arguments.command(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hopper-kernels", description="Training kernels for Hopper GPUs.")
    parser.add_argument("--version", action="version", version=f"hopper-kernels {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, takes_names, description in (
        ("status", _status, False, "which kernels run on this machine, and why the others do not"),
        ("check", _check, True, "run kernels against their definitions on this machine"),
        ("precompile", _precompile, True, "compile kernels ahead of time and report what they use"),
    ):
        subparser = commands.add_parser(name, help=description, description=description)
        subparser.set_defaults(command=command)
        if takes_names:
            subparser.add_argument("names", nargs="*", metavar="KERNEL", help="default: all that are installed")
        subparser.add_argument("--json", action="store_true", help="write one JSON object to stdout")
        if command is _precompile:
            subparser.add_argument("--jobs", type=_count, default=_jobs(), help="processes (default: %(default)s)")
            subparser.add_argument("--table", metavar="FILE", help="also write what the variants need to this file")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def _jobs() -> int:
    """As many processes as this one may use processors, up to MOST_JOBS."""
    return min(MOST_JOBS, len(os.sched_getaffinity(0)))


def _status(arguments: argparse.Namespace) -> int:
    rows = []
    for name, state in registry.status().items():
        available = state == "available"
        try:
            features = registry.missing_features(name)
        except KernelUnavailable:
            features = {}
        rows.append(
            {
                "kernel": name,
                "version": registry.installed_version(name),
                "available": available,
                "reason": None if available else state,
                "missing_features": features,
            }
        )
    if arguments.json:
        _print_json(rows)
        return 0
    _print_environment()
    _print_table(
        ("kernel", "version", "status"),
        [(row["kernel"], row["version"] or "-", row["reason"] or "available") for row in rows],
    )
    for row in rows:
        for reason in row["missing_features"].values():
            print(f"optional: {reason}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    device = torch.device("cuda", torch.cuda.current_device()) if arch.cuda_is_visible() else torch.device("cpu")
    rows, cases = [], []
    for name in _selected(arguments.names):
        if registry.installed_version(name) is None:
            reason = registry.unavailable_reason(name, device)
            rows.append(_row(_not_run(name, reason), passed=False if arguments.names else None))
            continue
        try:
            cases += [(name, case) for case in _cases(name, device)]
        except Exception as error:
            rows.append(_row(_not_run(name, f"has no cases to run: {type(error).__name__}: {error}"), passed=False))
    for number, (name, case) in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {name} {case.label} ...", file=sys.stderr, flush=True)
        result = run_case(name, case, device)
        rows.append(_row(result, passed=result.passed))
    if arguments.json:
        _print_json(rows)
    else:
        _print_check(rows)
    return int(any(row["passed"] is False for row in rows))


def _precompile(arguments: argparse.Namespace) -> int:
    # Imported here: it needs Triton, and neither `status` nor `check` does.
    precompile = importlib.import_module("hopper_kernels.precompile")
    compiled, faults, failed = [], {}, False
    with precompile.processes(arguments.jobs) as pool:
        for name in _selected(arguments.names):
            if registry.installed_version(name) is None:
                faults[name] = registry.unavailable_reason(name)
                failed |= bool(arguments.names)
                continue
            print(f"compiling {name} ...", file=sys.stderr, flush=True)
            try:
                reports = precompile.compile(name, pool=pool)
                if not reports:
                    raise ValueError("its list of variants is empty, so nothing was compiled")
                compiled += reports
            except Exception as error:
                faults[name] = f"{type(error).__name__}: {error}"
                failed = True
    if arguments.table and not failed:
        precompile.write_table(arguments.table, compiled, keep_others=bool(arguments.names))
    rows = [asdict(report) for report in compiled]
    if arguments.json:
        _print_json(rows + [{"kernel": name, "message": fault} for name, fault in faults.items()])
    else:
        _print_precompiled(rows, faults)
    return int(failed)


def _selected(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names)) or registry.KERNELS


def _cases(name: str, device: torch.device) -> list[Case]:
    cases = importlib.import_module(f"{registry.spec(name).module}.selfcheck").cases(device)
    if not cases:
        raise ValueError("its list of cases is empty, so nothing would be checked")
    return cases


def _not_run(name: str, reason: str) -> Result:
    return Result(name, "-", "not run", {}, {}, float("nan"), None, False, reason)


def _row(result: Result, *, passed: bool | None) -> dict:
    """The result as JSON has it; `passed` is None for a kernel that nobody asked for and that is not installed."""
    return {**asdict(result), "passed": passed}


def _print_check(rows: list[dict]) -> None:
    _print_environment()
    cells = []
    for row in rows:
        errors = [
            f"{name} {error:.3g} {'<=' if error <= row['bounds'][name] else '>'} {row['bounds'][name]:.3g}"
            for name, error in row["errors"].items()
        ]
        ran = not math.isnan(row["milliseconds"])
        cells.append(
            (
                row["kernel"],
                row["label"],
                row["implementation"],
                ", ".join(errors) or "-",
                f"{row['milliseconds']:.3f} ms" if ran else "-",
                "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f} MiB",
                ": ".join(filter(None, (_OUTCOME[row["passed"]], row["message"]))),
            )
        )
    _print_table(("kernel", "shape", "implementation", "error, bound", "time", "peak memory", "result"), cells)


def _print_precompiled(rows: list[dict], faults: dict[str, str]) -> None:
    _print_environment()
    columns = ("kernel", "variant", "registers", "stack_bytes", "shared_bytes", "warps", "instructions", "seconds")
    cells = []
    for row in rows:
        counts = ", ".join(f"{opcode} {count}" for opcode, count in row["instructions"].items())
        shown = {**row, "instructions": counts or "-", "seconds": f"{row['seconds']:.1f}"}
        cells.append([str(shown[column]) for column in columns])
    _print_table([column.replace("_bytes", " bytes") for column in columns], cells)
    for name, fault in faults.items():
        print(f"{name}: {fault}")


def _environment() -> dict[str, str | None]:
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    try:
        device = arch.describe()
    except Exception as error:
        device = f"could not be examined: {type(error).__name__}: {error}"
    return {
        "hopper_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda,
        "device": device,
    }


def _print_environment() -> None:
    print(", ".join(f"{name}: {value or 'none'}" for name, value in _environment().items()))


def _print_table(header: Sequence[str], rows: list[Sequence[str]]) -> None:
    rows = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_json(rows: list[dict]) -> None:
    print(json.dumps(_plain({"environment": _environment(), "results": rows}), indent=2))


def _plain(value):
    """JSON has no infinity and no NaN: the first becomes the string "inf", the second null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
