"""`tools/nightly`: its steps, and that a failed one shows. Nothing of it needs a GPU here, as `uv` is replaced."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS = sorted(path.parent.name for path in ROOT.glob("tests/*/sanitize.py"))
# Writes down what it is asked for, and fails at what has the text.
UV = """#!/bin/sh
echo "$@"
case "$*" in *"{fails}"*) exit 3 ;; esac
"""


def run(*arguments: str, root: Path = ROOT, folder: Path | None = None) -> subprocess.CompletedProcess:
    """The script in a checkout, with the programs of a folder first."""
    path = os.pathsep.join([*([str(folder)] if folder else []), os.environ["PATH"]])
    command = [str(root / "tools/nightly"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})


@pytest.fixture
def checkout(tmp_path):
    """Returns make(fails) -> a checkout of one kernel and two benches, with a `uv` in `programs`."""

    def make(fails: str) -> Path:
        for folder in ("tools", "tests/one", "benches", "programs"):
            (tmp_path / folder).mkdir(parents=True)
        shutil.copy(ROOT / "tools/nightly", tmp_path / "tools/nightly")
        (tmp_path / "tests/one/sanitize.py").write_text("sys.argv[1:] == ['--without-specialised-warps']\n")
        (tmp_path / "benches/one.py").write_text('if __name__ == "__main__":\n    sys.exit(main(BENCH))\n')
        (tmp_path / "benches/two.py").write_text('options = ["--rounds"]\nif __name__ == "__main__":\n    main()\n')
        (tmp_path / "benches/harness.py").write_text("")
        (tmp_path / "programs/uv").write_text(UV.format(fails=fails))
        (tmp_path / "programs/uv").chmod(0o755)
        return tmp_path

    return make


def test_every_kernel_and_every_bench_has_its_steps():
    lines = run("--list").stdout.splitlines()
    names = [line[:42].strip() for line in lines]
    tools = ("memcheck", "initcheck", "racecheck")
    records = sorted(path.stem for path in ROOT.glob("benches/results/*.json"))
    assert len(KERNELS) == len(list(ROOT.glob("packages/*")))
    assert names[0] == "device tests and slow tests"
    assert names[1 : 1 + 3 * len(KERNELS)] == [f"{tool} {kernel}" for kernel in KERNELS for tool in tools]
    assert {f"bench {record}" for record in records} <= set(names[1 + 3 * len(KERNELS) :])
    short = re.compile("(--quick|--rounds 2|benches.first_step) --output build/")
    assert all(short.search(line) for line in lines if line.startswith("bench "))
    assert "--without-specialised-warps" in next(line for line in lines if line.startswith("racecheck moe_experts"))
    assert "--without-specialised-warps" not in next(
        line for line in lines if line.startswith("racecheck fp8_dual_cast")
    )


def test_a_text_selects_steps():
    lines = run("--list", "racecheck").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["racecheck", kernel] for kernel in KERNELS]


def test_a_step_is_a_line(checkout):
    root = checkout("nothing of it")
    done = run(root=root, folder=root / "programs")
    assert done.returncode == 0, done.stderr
    steps = ["device tests and slow tests", "memcheck one", "initcheck one", "racecheck one", "bench one", "bench two"]
    assert re.findall(r"^(.+?) +passed +\d+ s$", done.stdout, re.MULTILINE) == steps
    logs = {path.stem: path.read_text() for path in root.glob("build/nightly/*.log")}
    assert "pytest -m gpu or slow" in logs["device_tests_and_slow_tests"]
    assert "-m tests.one.sanitize --without-specialised-warps" in logs["racecheck_one"]
    assert "--without" not in logs["memcheck_one"]
    assert "-m benches.one --quick" in logs["bench_one"]
    assert "-m benches.two --rounds 2" in logs["bench_two"]


def test_a_failed_step_shows_and_the_others_run(checkout):
    root = checkout("--tool initcheck")
    done = run(root=root, folder=root / "programs")
    assert done.returncode == 1
    assert done.stdout.count(" passed ") == 5
    assert re.search(r"^initcheck one +FAILED +\d+ s\n    .*--tool initcheck", done.stdout, re.MULTILINE)


def test_a_machine_without_hopper_runs_nothing(checkout):
    root = checkout("is_sm90")
    done = run(root=root, folder=root / "programs")
    assert done.returncode != 0
    assert not (root / "build").exists()
