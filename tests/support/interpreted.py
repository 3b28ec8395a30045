"""Runs a package's checks of its Triton kernels under Triton's interpreter.

The interpreter is chosen when triton is imported, so the checks have a process of their own: a module
`tests.<package>.interpreted` with a dictionary CASES of functions, and `main(CASES)` at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


def failures(package: str) -> dict[str, str]:
    """What failed in each case of `tests.<package>.interpreted`, "" for nothing, from a new process."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", f"tests.{package}.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


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
