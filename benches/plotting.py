"""Draws a bench's plot from its JSON and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATES = {"flushed": "L2 flushed before each call", "warm": "L2 warm: the same call just ran", "host": "host clock"}
_UNITS = {"gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
_OURS, _PEERS = "#1b6ca8", ["#8f9aa3", "#c9a227", "#6a8d5b", "#a65a5a", "#7b6aa8", "#4f9c9c"]


def draw_file(path: Path, folder: Path, drawn: Callable[[dict[str, Any], Path], None] | None = None) -> Path:
    """Draw the JSON at `path` into `folder`/<bench>.svg and return that path, by `drawn` or else by `draw`.

    Needs matplotlib.
    """
    record = json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{record['bench']}.svg"
    (drawn or draw)(record, target)
    return target


def draw(record: dict[str, Any], target: Path) -> None:
    """One panel for each state and unit: for each case the least work over each candidate's time, with the 10 to 90 %
    spread.

    Counting the same work for everybody makes bars comparable: twice the height is half the time.
    """
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    matplotlib.rcParams["svg.hashsalt"] = record["bench"]  # the same JSON gives the same file
    from matplotlib.figure import Figure

    panels = [(state, unit) for state in _STATES for unit in _UNITS if _cases(record, state, unit)]
    width = 3 + 1.3 * max((len(_cases(record, *panel)) for panel in panels), default=0)
    figure = Figure(figsize=(width, 3.4 * max(1, len(panels)) + 0.8), layout="constrained")
    for row, panel in enumerate(panels):
        _panel(figure.add_subplot(len(panels), 1, row + 1), record, *panel)
    name = "CPU toy sizes: no measurement" if record["toy"] else record["device"]["name"]
    figure.suptitle(f"{record['title']}\n{name}", fontsize=11)
    if panels:
        handles = {}
        for axes in figure.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


def _cases(record: dict[str, Any], state: str, unit: str) -> list[dict[str, Any]]:
    """Those of that unit with a candidate that was timed in that state."""
    return [
        case
        for case in record["cases"]
        if case["rate_unit"] == unit and any(state in entry for entry in case["candidates"])
    ]


def _colours(record: dict[str, Any]) -> dict[str, str]:
    """Of each candidate, the same in all panels."""
    entries = [entry for case in record["cases"] for entry in case["candidates"]]
    ours = {entry["name"] for entry in entries if entry["ours"]}
    peers = iter(_PEERS * len(entries))
    return {name: _OURS if name in ours else next(peers) for name in dict.fromkeys(e["name"] for e in entries)}


def _panel(axes, record: dict[str, Any], state: str, unit: str) -> None:
    cases, colours = _cases(record, state, unit), _colours(record)
    names = list(dict.fromkeys(entry["name"] for case in cases for entry in case["candidates"]))
    bar = 0.8 / len(names)
    for index, name in enumerate(names):
        points = [_point(case, name, state) for case in cases]
        at = [place + (index - (len(names) - 1) / 2) * bar for place, point in enumerate(points) if point]
        points = [point for point in points if point]
        heights = [point[1] for point in points]
        spread = [[point[1] - point[0] for point in points], [point[2] - point[1] for point in points]]
        axes.bar(at, heights, bar * 0.92, yerr=spread, color=colours[name], label=name, error_kw={"lw": 0.8})
    ceiling = record["ceilings"].get(unit)
    if ceiling:
        axes.axhline(ceiling["mean"], color="black", lw=0.8, ls="--", label="ceiling measured in this run")
    axes.set_xticks(range(len(cases)), [case["label"].replace(", ", "\n") for case in cases], fontsize=8)
    axes.set_ylabel(f"least work / time, {_UNITS[unit]}", fontsize=9)
    axes.set_title(_STATES[state], fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _point(case: dict[str, Any], name: str, state: str) -> tuple[float, float, float] | None:
    """Low, middle and high rate of a candidate: from the 90th percentile, the median, the 10th percentile."""
    for entry in case["candidates"]:
        if entry["name"] == name and state in entry:
            scale = 1e6 if case["unit"] == "bytes" else 1e9
            return tuple(case["work"] / entry[state][which] / scale for which in ("p90_ms", "median_ms", "p10_ms"))
    return None
