"""Fake machines and fake kernel packages, for the tests of what the shared wheel says about both."""

from __future__ import annotations

import importlib.metadata
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hopper_kernels import registry

CARDS = {
    "A100": ((8, 0), "NVIDIA A100-SXM4-80GB", 108, 166912),
    "H200": ((9, 0), "NVIDIA H200", 132, 232448),
    "H100 PCIe": ((9, 0), "NVIDIA H100 PCIe", 114, 232448),
    "B200": ((10, 0), "NVIDIA B200", 148, 232448),
}


@pytest.fixture(autouse=True)
def nothing_cached():
    """Each test finds and leaves the caches of the registry empty."""
    registry.refresh()
    yield
    registry.refresh()


@pytest.fixture
def machine(monkeypatch):
    """machine("A100", "H200", current=1, cuda="13.0"): torch.cuda shows these cards; machine() shows none."""

    def show(*cards: str, current: int = 0, cuda: str | None = "13.0", hip: str | None = None):
        facts = [CARDS[card] for card in cards]
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        state = SimpleNamespace(current=current)
        replacements = {
            "is_available": lambda: bool(facts),
            "device_count": lambda: len(facts),
            "current_device": lambda: state.current,
            "get_device_capability": lambda index: facts[index][0],
            "get_device_name": lambda index: facts[index][1],
            "get_device_properties": lambda index: SimpleNamespace(
                multi_processor_count=facts[index][2], shared_memory_per_block_optin=facts[index][3]
            ),
        }
        for name, replacement in replacements.items():
            monkeypatch.setattr(torch.cuda, name, replacement)
        registry.refresh()
        return state

    return show


class Packages:
    """Installs small distributions into a folder on sys.path, with real metadata; no other kernel is installed."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.monkeypatch, self.modules = folder, monkeypatch, []
        installed = importlib.metadata.entry_points

        def entry_points(**selection):
            found = installed(**selection)
            if selection.get("group") != registry.GROUP:
                return found
            return [one for one in found if one.dist.locate_file("").is_relative_to(folder)]

        monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
        registry.refresh()

    def install(self, distribution: str, version: str = "1.0", entry_points: str = "", **modules: str) -> None:
        """Each keyword is a module and its source; `a__b` is module b of package a."""
        site = self.folder / f"{distribution}-{version}"
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        if entry_points:
            (info / "entry_points.txt").write_text(f"[hopper_kernels]\n{entry_points}\n")
        for name, source in modules.items():
            package, _, submodule = name.partition("__")
            (site / package).mkdir(exist_ok=True)
            (site / package / f"{submodule or '__init__'}.py").write_text(textwrap.dedent(source))
            self.modules.append(package)
        self.monkeypatch.syspath_prepend(site)
        registry.refresh()

    def install_kernel(self, name: str, *, fields: str = "", version: str = "1.0", cases: str | None = None) -> None:
        """A kernel package named `name`; `fields` are further arguments of its KernelSpec, `cases` its self-check."""
        distribution = name.replace("_", "-")
        source = f"""
            from hopper_kernels import KernelSpec
            SPEC = KernelSpec("{name}", "{name}", "{distribution}", "a fake kernel", {fields})
        """
        modules = {name: source} if cases is None else {name: source, f"{name}__selfcheck": cases}
        self.install(distribution, version, f"{name} = {name}:SPEC", **modules)

    def forget(self) -> None:
        for name in list(sys.modules):
            if name.partition(".")[0] in self.modules:
                del sys.modules[name]


@pytest.fixture
def packages(tmp_path, monkeypatch):
    made = Packages(tmp_path, monkeypatch)
    yield made
    made.forget()
