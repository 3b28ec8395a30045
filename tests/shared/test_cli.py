"""The command line: what it prints, where, and its exit codes. Kernel packages are fakes (conftest)."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from hopper_kernels import KERNELS, cli
from hopper_kernels.cli import main

CASES = """
    import torch
    from hopper_kernels.selfcheck import Case, relative_error

    def cases(device):
        return [
            Case(
                label=label,
                make=lambda: (torch.ones(4, device=device),),
                run=lambda x: {{"y": {run}}},
                expected=lambda x: {{"y": x}},
                error=relative_error,
                bounds={{"y": 0.25}},
            )
            for label in ("4 rows", "5 rows")
        ]
"""
GOOD, WRONG, BROKEN = (CASES.format(run=run) for run in ("x", "x * 1.5", "x.no_such_method()"))


@pytest.fixture(autouse=True)
def no_gpu(machine):
    machine()


def run(capsys, *argv):
    code = main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def row(table, *words):
    """The one line that holds all words."""
    (found,) = [line for line in table.splitlines() if all(word in line for word in words)]
    return found


def test_status(capsys, packages):
    packages.install_kernel("my_kernel", version="3.2.1", fields="optional={'fp8': ('absent',)}")
    code, out, err = run(capsys, "status")
    assert (code, err) == (0, "")
    assert out.startswith("hopper_kernels: ")
    assert "device: no CUDA device" in out.splitlines()[0]
    assert "3.2.1" in row(out, "my_kernel", "requires a CUDA device of compute capability 9.0")
    assert "the wheel moe-experts" in row(out, "moe_experts")
    assert 'pip install "absent"' in row(out, "optional: fp8 of my_kernel")
    assert all(name in out for name in KERNELS)


def test_status_of_an_available_kernel(capsys, packages, machine):
    machine("H200")
    packages.install_kernel("my_kernel")
    _, out, _ = run(capsys, "status")
    assert row(out, "my_kernel").split() == ["my_kernel", "1.0", "available"]
    assert "device: SM90 (NVIDIA H200)" in out.splitlines()[0]


def test_status_json(capsys, packages):
    packages.install_kernel("my_kernel")
    packages.install("bad-kernel", entry_points="bad_kernel = no_such_module:SPEC")
    code, out, _ = run(capsys, "status", "--json")
    printed = json.loads(out)
    assert code == 0
    assert set(printed) == {"environment", "results"}
    assert set(printed["environment"]) == {"hopper_kernels", "python", "torch", "triton", "cuda", "device"}
    rows = {entry["kernel"]: entry for entry in printed["results"]}
    assert set(KERNELS) < set(rows)
    assert rows["moe_experts"]["version"] is None
    assert rows["my_kernel"]["version"] == "1.0"
    assert rows["my_kernel"]["available"] is False
    assert "No module named 'no_such_module'" in rows["bad_kernel"]["reason"]


def test_check_passes(capsys, packages):
    packages.install_kernel("my_kernel", cases=GOOD)
    code, out, err = run(capsys, "check", "my_kernel")
    assert code == 0
    assert err.splitlines() == ["[1/2] my_kernel 4 rows ...", "[2/2] my_kernel 5 rows ..."]
    line = row(out, "my_kernel", "4 rows")
    assert "definition" in line
    assert "y 0 <= 0.25" in line
    assert " ms " in line
    assert line.endswith(" ok")


def test_check_of_an_error_above_its_bound(capsys, packages):
    packages.install_kernel("my_kernel", cases=WRONG)
    code, out, _ = run(capsys, "check", "my_kernel")
    assert code == 1
    assert "y 0.5 > 0.25" in row(out, "4 rows")
    assert row(out, "4 rows").endswith("FAILED")


def test_a_case_that_raises_does_not_stop_the_others(capsys, packages):
    packages.install_kernel("a_broken", cases=BROKEN)
    packages.install_kernel("b_good", cases=GOOD)
    code, out, err = run(capsys, "check", "a_broken", "b_good")
    assert code == 1
    assert "FAILED: AttributeError: 'Tensor' object has no attribute 'no_such_method'" in row(out, "a_broken", "4 rows")
    assert row(out, "b_good", "5 rows").endswith(" ok")
    assert "[4/4] b_good 5 rows ..." in err


@pytest.mark.parametrize(
    ("cases", "message"),
    [
        (None, "has no cases to run: ModuleNotFoundError: No module named 'my_kernel.selfcheck'"),
        ("def cases(device): return []", "has no cases to run: ValueError: its list of cases is empty"),
        ("def cases(device): raise OSError('disk')", "has no cases to run: OSError: disk"),
    ],
)
def test_a_kernel_without_cases_fails(capsys, packages, cases, message):
    packages.install_kernel("my_kernel", cases=cases)
    packages.install_kernel("my_other_kernel", cases=GOOD)
    code, out, _ = run(capsys, "check", "my_kernel", "my_other_kernel")
    assert code == 1
    assert f"FAILED: {message}" in row(out, "my_kernel ")
    assert row(out, "my_other_kernel", "5 rows").endswith(" ok")


def test_an_installed_package_that_is_broken_fails_also_unnamed(capsys, packages):
    packages.install("bad-kernel", entry_points="bad_kernel = no_such_module:SPEC")
    code, out, _ = run(capsys, "check")
    assert code == 1
    assert "FAILED: has no cases to run: KernelUnavailable: bad_kernel failed to import" in row(out, "bad_kernel")


def test_a_kernel_that_is_not_installed_fails_only_if_named(capsys, packages):
    packages.install_kernel("my_kernel", cases=GOOD)
    code, out, _ = run(capsys, "check")
    assert code == 0
    assert "skipped: moe_experts is not installed: build and install the wheel moe-experts of this project" in row(
        out, "moe_experts", "not run"
    )
    assert row(out, "my_kernel", "4 rows").endswith(" ok")
    code, out, _ = run(capsys, "check", "my_kernel", "moe_experts")
    assert code == 1
    assert "FAILED: moe_experts is not installed: build and install the wheel moe-experts of this project" in row(
        out, "moe_experts", "not run"
    )


@pytest.mark.parametrize("command", ["check", "precompile"])
def test_an_unknown_name(capsys, packages, command):
    packages.install_kernel("my_kernel", cases=GOOD)
    code, out, err = run(capsys, command, "my_kernel", "mhc")
    assert code == 2
    assert out == ""
    assert err.startswith("hopper-kernels: unknown kernel 'mhc'; known: dsa_indexer_topk, ")
    assert "my_kernel" in err


def test_a_name_given_twice_runs_once(capsys, packages):
    packages.install_kernel("my_kernel", cases=GOOD)
    _, _, err = run(capsys, "check", "my_kernel", "my_kernel")
    assert len(err.splitlines()) == 2


def test_check_json(capsys, packages):
    packages.install_kernel("my_kernel", cases=GOOD)
    packages.install_kernel("wrong_kernel", cases=CASES.format(run="x * float('nan')"))
    code, out, _ = run(capsys, "check", "my_kernel", "wrong_kernel", "moe_experts", "--json")
    assert code == 1
    printed = json.loads(out, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert printed["environment"]["device"] == "no CUDA device"
    rows = {(entry["kernel"], entry["label"]): entry for entry in printed["results"]}
    good = rows["my_kernel", "4 rows"]
    assert (good["passed"], good["errors"], good["bounds"]) == (True, {"y": 0.0}, {"y": 0.25})
    assert (good["implementation"], good["peak_bytes"]) == ("definition", None)
    assert rows["wrong_kernel", "4 rows"]["errors"] == {"y": "inf"}
    absent = rows["moe_experts", "-"]
    assert (absent["implementation"], absent["passed"], absent["milliseconds"]) == ("not run", False, None)


@dataclass(frozen=True)
class FakeReport:
    kernel: str
    variant: str
    registers: int = 168
    stack_bytes: int = 16
    shared_bytes: int = 1024
    warps: int = 4
    instructions: dict = None
    seconds: float = 1.25


@pytest.fixture
def fake_precompile(monkeypatch):
    module, pools = ModuleType("hopper_kernels.precompile"), []

    def compile_kernel(name, pool):
        pools.append(pool)
        if name == "bad_kernel":
            raise RuntimeError("ptxas failed")
        if name == "empty_kernel":
            return []
        return [FakeReport(name, f"cast[rope={rope}]", instructions={"UTMALDG": 3, "F2FP": rope}) for rope in (0, 1)]

    module.compile = compile_kernel
    module.processes = lambda count: contextlib.nullcontext(f"pool of {count}")
    monkeypatch.setattr(cli, "MOST_JOBS", 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    module.write_table = lambda path, reports, keep_others: Path(path).write_text(str((len(reports), keep_others)))
    monkeypatch.setitem(sys.modules, "hopper_kernels.precompile", module)
    return pools


def test_precompile(capsys, packages, fake_precompile):
    packages.install_kernel("my_kernel")
    code, out, err = run(capsys, "precompile", "my_kernel")
    assert (code, err) == (0, "compiling my_kernel ...\n")
    cells = row(out, "cast[rope=1]").split()
    assert cells == ["my_kernel", "cast[rope=1]", "168", "16", "1024", "4", "UTMALDG", "3,", "F2FP", "1", "1.2"]


@pytest.mark.parametrize(("options", "count"), [((), 3), (("--jobs", "1"), 1), (("--jobs", "20"), 20)])
def test_precompile_side_by_side(capsys, packages, fake_precompile, options, count):
    packages.install_kernel("my_kernel")
    assert run(capsys, "precompile", "my_kernel", *options)[0] == 0
    assert fake_precompile == [f"pool of {count}"]


def test_precompile_that_fails_does_not_stop_the_others(capsys, packages, fake_precompile):
    for name in ("bad_kernel", "empty_kernel", "my_kernel"):
        packages.install_kernel(name)
    code, out, _ = run(capsys, "precompile", "bad_kernel", "empty_kernel", "my_kernel")
    assert code == 1
    assert "empty_kernel: ValueError: its list of variants is empty" in out
    assert "bad_kernel: RuntimeError: ptxas failed" in out
    assert row(out, "my_kernel", "cast[rope=0]")


@pytest.mark.parametrize(
    ("names", "written"),
    [((), (2, False)), (("my_kernel",), (2, True)), (("my_kernel", "bad_kernel"), None)],
    ids=["all", "one", "one that fails"],
)
def test_precompile_writes_a_table_only_of_success(capsys, packages, fake_precompile, tmp_path, names, written):
    packages.install_kernel("my_kernel")
    if "bad_kernel" in names:
        packages.install_kernel("bad_kernel")
    path = tmp_path / "table.json"
    path.write_text("as it was")
    code, _, _ = run(capsys, "precompile", *names, "--table", str(path))
    assert code == int(written is None)
    assert path.read_text() == ("as it was" if written is None else str(written))


def test_precompile_json_of_a_kernel_that_is_not_installed(capsys, packages, fake_precompile):
    packages.install_kernel("my_kernel")
    code, out, _ = run(capsys, "precompile", "my_kernel", "moe_experts", "--json")
    results = json.loads(out)["results"]
    assert code == 1
    assert results[0]["instructions"] == {"UTMALDG": 3, "F2FP": 0}
    assert results[2] == {
        "kernel": "moe_experts",
        "message": "moe_experts is not installed: build and install the wheel moe-experts of this project",
    }


@pytest.mark.parametrize(
    "argv", [(), ("status", "extra"), ("check", "--no-such-option"), ("other",), ("precompile", "--jobs", "0")]
)
def test_a_malformed_command_line(capsys, argv):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert "usage: hopper-kernels" in capsys.readouterr().err


def test_the_installed_command():
    commands = importlib.metadata.entry_points(group="console_scripts", name="hopper-kernels")
    if not commands:
        pytest.skip("the wheel is not installed, the sources are on the path")
    source = f"import sys; from {commands['hopper-kernels'].module} import main; sys.exit(main(['status']))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "moe_experts" in done.stdout


def test_as_a_module():
    command = [sys.executable, "-m", "hopper_kernels", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("hopper-kernels ")
