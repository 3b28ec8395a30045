"""Python in processes of its own: what one process compiled, cached or patched is not there in another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


_QUIT = "\nimport os, sys\nsys.stdout.flush()\nos._exit(0)\n"


def start_python(code: str, *arguments: str, quit_at_once: bool = False, **environment: str) -> subprocess.Popen:
    """A new process that runs `code` at the root of the repository, with further environment variables.

    quit_at_once: leave out what Python does at its end. For code with a backward on a GPU: PyTorch's thread for it may
    still be busy then, and abort the process (pytorch/pytorch#38228).
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        [sys.executable, "-c", code + _QUIT * quit_at_once, *arguments],
        cwd=ROOT,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen, timeout: float = 50) -> str:
    """What the process printed, stripped; AssertionError with all of its output if it failed or took too long."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        raise AssertionError(f"no end after {timeout} s\n{output}\n{errors}") from None
    assert process.returncode == 0, f"exit status {process.returncode}\n{output}\n{errors}"
    return output.strip()
