"""The Triton kernels under Triton's interpreter (no GPU), against the definition in float64."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mhc_projection.interpreted import CASES


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What failed in each case, "" for nothing; one process for all, since triton is imported once in each."""
    pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.mhc_projection.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name, results):
    assert not results[name], results[name]
