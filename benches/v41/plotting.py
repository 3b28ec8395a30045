"""Draws the layers' plot from their record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OURS, OTHERS = "#1b6ca8", "#8f9aa3"


def draw(record: dict[str, Any], target: Path) -> None:
    """For each setting the time of a step, and its peak memory beside it."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    matplotlib.rcParams["svg.hashsalt"] = record["bench"]  # the same JSON gives the same file
    from matplotlib.figure import Figure

    settings = record["settings"]
    figure = Figure(figsize=(11, 3.2 * len(settings) + 0.6), layout="constrained")
    axes = figure.subplots(len(settings), 2, squeeze=False, width_ratios=(2, 1))
    for (left, right), setting in zip(axes, settings, strict=True):
        entries = [entry for entry in reversed(setting["variants"]) if "step" in entry]
        colours = [OURS if entry.get("shares") else OTHERS for entry in entries]
        names = [entry["name"] for entry in entries]
        times = [entry["step"]["median_ms"] for entry in entries]
        left.barh(names, times, color=colours)
        left.bar_label(left.containers[0], fmt="%.0f", padding=2, fontsize=7)
        left.set_title(setting["label"], fontsize=9)
        left.set_xlabel("ms a step", fontsize=8)
        right.barh(names, [entry.get("peak_bytes", 0) / 1e9 for entry in entries], color=colours)
        right.set_yticklabels([])
        right.set_xlabel("GB at the peak", fontsize=8)
        for one in (left, right):
            one.tick_params(labelsize=7)
            one.spines[["top", "right"]].set_visible(False)
    name = "CPU toy sizes: no measurement" if record["toy"] else record["device"]["name"]
    figure.suptitle(f"{record['title']}\n{name}", fontsize=11)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
