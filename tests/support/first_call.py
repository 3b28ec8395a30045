"""The first call ever of an operator inside a CUDA graph's capture: it compiles, loads and launches there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tests.support.process import output_of, start_python


def capture(call: Callable[[], object], check: Callable[[object], None]) -> None:
    """Capture call() and pass its results to check() after a replay: prints "works".

    Prints "refused" if the capture raises an error that mentions it; any other error fails.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            found = call()
    except Exception as error:
        if "captur" not in str(error):
            raise AssertionError(f"the error must mention the capture: {type(error).__name__}: {error}") from error
        print("refused")
    else:
        graph.replay()
        torch.cuda.synchronize()
        check(found)
        print("works")


def assert_captured_or_refused(code: str, *arguments: str, folder: Path, quit_at_once: bool = False) -> None:
    """Run `code`, which ends with a call of `capture`, in a process whose kernels are compiled into an empty folder."""
    process = start_python(code, *arguments, quit_at_once=quit_at_once, TRITON_CACHE_DIR=str(folder))
    assert output_of(process, timeout=100).splitlines()[-1] in ("works", "refused")
