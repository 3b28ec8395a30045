"""A bench's record as a plain text table, and as the table of a package's README."""

from __future__ import annotations

from typing import Any

from benches.case import COPY

_STATES = ("flushed", "warm", "host")
_UNITS = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}


def text(record: dict[str, Any]) -> str:
    """One line for each case, candidate and state, then what was wrong, then what it was measured on."""
    head = [
        "case",
        "candidate",
        "L2",
        "ms",
        "p10",
        "p90",
        "rate",
        "unit",
        "of ceiling",
        "of copy",
        "x floor",
        "timed by",
        "host us",
        "MB",
    ]
    lines = [head] + [
        _line(case, entry, state)
        for case in record["cases"]
        for state in _STATES
        for entry in case["candidates"]
        if state in entry
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([record["title"], "", *rows, "", *_notes(record), *_footer(record)])


def markdown(record: dict[str, Any], state: str = "flushed") -> str:
    """Median times in ms of every candidate, and rate, shares and memory of ours, one line for each case.

    The share of a copy has no column in a bench without copies, nor has memory where the record is without.
    """
    names = list(dict.fromkeys(entry["name"] for case in record["cases"] for entry in case["candidates"]))
    shown = {"share_of_ceiling": "of the ceiling"}
    if COPY in names:
        shown["share_of_same_size_copy"] = "of the copy"
    memory = any("peak_bytes" in entry for case in record["cases"] for entry in case["candidates"])
    lines = [["case", *(f"{name}, ms" for name in names), "rate", *shown.values(), *(["memory, MB"] if memory else [])]]
    lines.append(["---"] * len(lines[0]))
    for case in record["cases"]:
        entries = {entry["name"]: entry for entry in case["candidates"]}
        times = [f"{entries[name][state]['median_ms']:.4f}" if state in entries.get(name, ()) else "" for name in names]
        one = next(entry for entry in entries.values() if entry["ours"])
        ours = one[state]
        rate = f"{ours['rate']:.0f} {_UNITS[case['rate_unit']]}"
        shares = [_percent(ours.get(name)) for name in shown]
        peak = [f"{one['peak_bytes'] / 1e6:.0f}"] if memory else []
        lines.append([case["label"], *times, rate, *shares, *peak])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(case: dict[str, Any], entry: dict[str, Any], state: str) -> list[str]:
    figures = entry[state]
    times = [f"{figures[name]:.4f}" for name in ("median_ms", "p10_ms", "p90_ms")]
    shares = [_percent(figures.get(name)) for name in ("share_of_ceiling", "share_of_same_size_copy")]
    floor = f"{figures['times_floor']:.2f}" if "times_floor" in figures else "-"
    timed = {"host": "host clock"}.get(state, "graph" if figures["graph"] else "events")
    name = ("* " if entry["ours"] else "  ") + entry["name"]
    unit = _UNITS[case["rate_unit"]]
    host = f"{entry['host_us']:.0f}" if "host_us" in entry else "-"
    memory = f"{entry['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in entry else "-"
    return [case["label"], name, state, *times, f"{figures['rate']:.1f}", unit, *shares, floor, timed, host, memory]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _notes(record: dict[str, Any]) -> list[str]:
    notes = []
    for case in record["cases"]:
        for entry in case["candidates"]:
            where = f"{case['label']}, {entry['name']}"
            if entry["status"] != "verified":
                notes.append(f"{where}: {entry['status'].upper()}, not timed: {entry['note']}")
            elif entry.get("tolerance"):
                notes.append(f"{where}: not the same recipe ({entry['tolerance']}): {entry['note']}")
            if "graph_problem" in entry:
                notes.append(f"{where}: {entry['graph_problem']}")
            notes += [
                f"{where}, {state}: {entry[state]['starved_calls']} calls waited for the host, so launches count"
                for state in _STATES
                if "starved_calls" in entry.get(state, ())
            ]
    return notes


def _footer(record: dict[str, Any]) -> list[str]:
    lines = ["* ours. rate: own bytes or operations; x floor: time over the case's least work at the ceiling;"]
    lines.append("host us: what the host spends in a call, autograd included; MB: results and all else it allocates.")
    if record["toy"]:
        return [*lines, "CPU, toy sizes, the definitions: no figures to quote."]
    ceilings = ", ".join(
        f"{one['mean']:.0f} {_UNITS[unit]}" + (f" ({one['product']} product)" if "product" in one else "")
        for unit, one in record["ceilings"].items()
    )
    lines.append(f"{record['device']['name']}; ceilings measured in this run: {ceilings}")
    if record["clocks"]:
        during = record["clocks"]["during"]
        lines.append("during the run: " + ", ".join(f"{name} {value:g}" for name, value in during.items()))
    return [*lines, ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)]
