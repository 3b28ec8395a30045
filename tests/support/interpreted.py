"""Runs a package's checks of its Triton kernels under Triton's interpreter.

The interpreter is chosen when triton is imported, so the checks have a process of their own: a module
`tests.<package>.interpreted` with a dictionary CASES of functions, and `main(CASES)` at its end.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable

import pytest
import torch

from tests.support.process import ROOT


def assert_passes(package: str, case: str) -> None:
    """Require that nothing failed in this case of `tests.<package>.interpreted`. All of them run at the first call."""
    pytest.importorskip("triton")
    run = _run(package)
    assert run.returncode == 0, run.stderr
    failed = json.loads(run.stdout.splitlines()[-1])[case]
    assert not failed, failed


@functools.cache
def _run(package: str) -> subprocess.CompletedProcess:
    """The process of all cases, once: also if it does not end."""
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", f"tests.{package}.interpreted"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, -1, "", str(error))


def main(cases: dict[str, Callable[[], None]]) -> None:
    """Run the cases in this process, with TRITON_INTERPRET=1 set, and print what failed as JSON."""
    from tests.support import triton_interpreter

    triton_interpreter.install()
    torch.cuda.current_device = lambda: 0  # a launch asks for it, and there may be none
    found = {}
    for name, check in cases.items():
        try:
            check()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    print(json.dumps(found))
