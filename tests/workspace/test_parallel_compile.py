"""Many processes compile into one empty cache folder at once, and one of them may be killed. No GPU is needed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fp8_dual_cast import launch

COMPILE = """
import dataclasses, json, sys
from fp8_dual_cast import launch
from hopper_kernels import precompile
chosen = [variant for variant in launch.variants() if variant.name in sys.argv[1:]]
reports = precompile.compile("fp8_dual_cast", variants=chosen or None)
print(json.dumps([dataclasses.asdict(report) | {"seconds": 0} for report in reports]))
"""
LIMIT_S = 300


def start(cache, variants):
    """A process that compiles variants (none: all) of fp8_dual_cast into a cache folder and prints its reports."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, *variants],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def reports_of(process):
    output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return json.loads(output)


def check_same_reports(processes, count):
    reports = [reports_of(process) for process in processes]
    assert len(reports[0]) == count
    assert all(other == reports[0] for other in reports)


def test_two_processes_share_an_empty_cache(tmp_path):
    variant = launch.variants()[0].name
    check_same_reports([start(tmp_path / "cache", [variant]) for _ in range(2)], count=1)


def test_a_killed_compilation_leaves_a_usable_cache(tmp_path):
    cache = tmp_path / "cache"
    variant = launch.variants()[0].name
    victim = start(cache, [variant])
    # Triton writes a file after each stage, so the first one to appear is in the middle of the compilation.
    deadline = time.monotonic() + LIMIT_S
    while not any(path.is_file() for path in cache.rglob("*")):
        assert victim.poll() is None, victim.communicate()
        assert time.monotonic() < deadline, "nothing was written to the cache"
        time.sleep(0.002)
    victim.kill()
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    check_same_reports([start(cache, [variant]), start(tmp_path / "untouched", [variant])], count=1)


@pytest.mark.slow
def test_four_processes_compile_everything_and_one_is_killed(tmp_path):
    cache = tmp_path / "cache"
    count = len(launch.variants())
    victim, *others = (start(cache, []) for _ in range(4))
    while victim.poll() is None and not any(cache.rglob("*.cubin")):
        time.sleep(0.01)
    victim.kill()
    victim.communicate()
    check_same_reports([*others, start(cache, [])], count)
