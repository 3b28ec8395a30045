"""The layers' record as a plain text table and as one for a README."""

from __future__ import annotations

from typing import Any

HEAD = ("variant", "step, ms", "x plain", "peak, GB", "loss", "gradients", "worst kind")


def text(record: dict[str, Any]) -> str:
    """A block for each setting, and what it was measured on."""
    lines = [record["title"], *(f"\n{block(setting)}" for setting in record["settings"])]
    lines += [
        "",
        "x plain: times as fast as plain PyTorch. loss, gradients: relative differences, see benches.v41_layer",
    ]
    if record["toy"]:
        return "\n".join([*lines, "CPU, toy sizes, the definitions: no figures to quote."])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if version)
    return "\n".join([*lines, record["device"]["name"], versions])


def block(setting: dict[str, Any]) -> str:
    """The table of a setting, then what was found about each variant."""
    rows = [list(HEAD), *(_row(setting, entry) for entry in setting["variants"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = [f"{setting['label']}, {setting['parameters'] / 1e9:.2f} billion parameters"]
    lines += ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines + [f"{e['name']}: {e['status'].upper()}, {e['note']}" for e in setting["variants"]])


def markdown(record: dict[str, Any], label: str) -> str:
    """One setting."""
    setting = next(one for one in record["settings"] if one["label"] == label)
    rows = [list(HEAD), ["---"] * len(HEAD), *(_row(setting, entry) for entry in setting["variants"])]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(setting: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    plain = setting["variants"][0].get("step", {}).get("median_ms")
    mine = entry.get("step", {}).get("median_ms")
    time = [f"{mine:.1f}" if mine else "", f"{plain / mine:.2f}" if plain and mine else ""]
    peak = f"{entry['peak_bytes'] / 1e9:.1f}" if entry.get("peak_bytes") else ""
    differences = [f"{entry[name]:.1e}" if name in entry else "" for name in ("loss", "whole", "worst")]
    return [entry["name"], *time, peak, *differences]
