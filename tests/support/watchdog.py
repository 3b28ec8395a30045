"""Ends the process when a GPU test hangs: a kernel that never returns cannot be interrupted from Python."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading

import pytest

from tests.support import repeat

SECONDS = 60.0


def limit(item: pytest.Item) -> float:
    """Seconds for this test: its own `timeout` marker or SECONDS; a larger `--timeout` raises it, 0 switches it off."""
    marker = item.get_closest_marker("timeout")
    own = SECONDS
    if marker is not None:
        own = float(marker.args[0] if marker.args else marker.kwargs.get("timeout", SECONDS))
    given = item.config.getoption("timeout", None)
    if given is None:
        return own
    return max(own, given) if given > 0 and own > 0 else 0.0


def start(item: pytest.Item, seconds: float) -> None:
    """Arm the timer; `item.cancel_timeout()` is what pytest-timeout calls at the end of the test."""
    timer = threading.Timer(seconds, _end_process, (item, seconds))
    timer.daemon = True
    item.cancel_timeout = timer.cancel
    timer.start()


def _end_process(item: pytest.Item, seconds: float) -> None:
    import pytest_timeout

    if pytest_timeout.is_debugging():
        return
    try:
        capture = item.config.pluginmanager.getplugin("capturemanager")
        if capture:
            capture.suspend_global_capture(in_=True)
            for text in capture.read_global_capture():
                sys.stderr.write(text)
        sys.stderr.write(
            f"\n\nGPU watchdog: {item.nodeid} still runs after {seconds:g} s. A hung kernel cannot be interrupted, so "
            f"this process ends here and the tests after it did not run.\n{repeat.command(item)}\n\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
    finally:
        os._exit(1)
