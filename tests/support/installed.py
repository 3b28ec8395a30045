"""What a user sees of an installed kernel: the command line and the registry, most of it in processes of their own."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import hopper_kernels
import torch
from hopper_kernels import registry

from tests.support.process import output_of, start_python

_COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
_AVAILABILITY = """
import sys, hopper_kernels
print(hopper_kernels.is_available(sys.argv[1]))
print(hopper_kernels.unavailable_reason(sys.argv[1]))
"""


def _rows(output: str, kernel: str) -> list[str]:
    """The lines that the command line prints for that kernel."""
    return [line for line in output.splitlines() if line.startswith(f"{kernel} ")]


def assert_check_passes(kernel: str, seconds: float) -> None:
    """`hopper-kernels check`: the kernel is what runs, and all of its cases are ok."""
    output = output_of(start_python(_COMMAND, "check", kernel), timeout=seconds)
    rows = _rows(output, kernel)
    assert rows
    assert all("SM90 kernel" in row and row.endswith(" ok") for row in rows), output


def assert_status_available(kernel: str) -> None:
    """`hopper-kernels status`."""
    rows = _rows(output_of(start_python(_COMMAND, "status")), kernel)
    assert [row.split()[-1] for row in rows] == ["available"]


def _compiled(folder: Path) -> set[Path]:
    return set(folder.rglob("*.cubin"))


def precompile(kernel: str, variants: int, folder: Path, seconds: float = 170) -> None:
    """`hopper-kernels precompile` into an empty folder: every variant is reported, and then is there."""
    process = start_python(_COMMAND, "precompile", "--jobs", "2", kernel, TRITON_CACHE_DIR=str(folder))
    assert len(_rows(output_of(process, seconds), kernel)) == variants
    assert len(_compiled(folder)) == variants


def assert_compiles_nothing(code: str, folder: Path, seconds: float = 60, *, quit_at_once: bool = False) -> None:
    """A process that runs `code` finds all kernels that it needs in the folder."""
    before = _compiled(folder)
    output_of(start_python(code, quit_at_once=quit_at_once, TRITON_CACHE_DIR=str(folder)), seconds)
    assert _compiled(folder) == before


def assert_available(kernel: str) -> ModuleType:
    """On the current device, and not on a CPU; the package."""
    assert hopper_kernels.is_available(kernel) is True
    assert hopper_kernels.unavailable_reason(kernel) is None
    assert registry.is_available(kernel, torch.cuda.current_device())
    assert not hopper_kernels.is_available(kernel, "cpu")
    package = hopper_kernels.load(kernel)
    assert package.__name__ == kernel
    return package


def printed_without_a_device(kernel: str, code: str) -> str:
    """The one line that `code` prints where no device is visible, and the registry says so."""
    process = start_python(_AVAILABILITY + code, kernel, CUDA_VISIBLE_DEVICES="")
    available, reason, printed = output_of(process).splitlines()
    assert available == "False"
    assert "none is visible" in reason
    return printed
