"""DeepSeek-V4.1's layers on two processes: expert and context parallelism, and FSDP2, against one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benches import v41_parallel as bench

ROOT = Path(__file__).resolve().parents[2]


def _run(tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], Path]:
    command = [sys.executable, "-m", "benches.v41_parallel", "--rounds", "1", "--output", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    return done, tmp_path / f"{bench.NAME}.json"


def _check(done: subprocess.CompletedProcess[str], path: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(path.read_text())
    assert record["processes"] == 2
    assert [part["status"] for part in record["parts"]] == ["verified", "verified"]
    assert {"alone", "together"} <= record["parts"][0].keys()
    # The experts' gradients are sums in fp32, of which the one process rounds each part to bf16.
    assert record["parts"][1]["whole"] < 5e-3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="toy sizes over gloo, for a machine without a GPU")
def test_two_processes_compute_what_one_does(tmp_path):
    _check(*_run(tmp_path))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_gpus_compute_what_one_does(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two GPUs")
    _check(*_run(tmp_path))
