"""The self-check's comparisons and what it makes of good, wrong and broken cases."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
from hopper_kernels import selfcheck
from hopper_kernels.dispatch import reference_requested
from hopper_kernels.selfcheck import Case, differing_bytes, relative_error, run_case

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")


def fp8(*values):
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e4m3fn)


def fp32(*bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_differing_bytes_of_fp8():
    # NaN of either sign is NaN; -0 is not 0; the largest number is not NaN.
    assert differing_bytes(fp8(0x7F, 0xFF, 0x7F, 0x00), fp8(0xFF, 0x7F, 0x7F, 0x00)) == 0
    assert differing_bytes(fp8(0x80, 0x7E, 0x7F, 0x01), fp8(0x00, 0x7F, 0x7E, 0x02)) == 4


def test_differing_bytes_of_the_other_fp8():
    one, other = (torch.tensor(b, dtype=torch.uint8).view(torch.float8_e5m2) for b in ([0x7D, 0x7C], [0xFF, 0x7D]))
    assert differing_bytes(one, other) == 1


def test_differing_bytes_of_fp32():
    assert differing_bytes(fp32(0x7FC00000, 0x3F800000), fp32(0xFFC00001, 0x3F800000)) == 0
    assert differing_bytes(fp32(0x80000000, 0x3F800000, 0x7F800000), fp32(0, 0x3F800001, 0x7FC00000)) == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool])
def test_differing_bytes_of_other_dtypes(dtype):
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    assert differing_bytes(one, one.clone()) == 0
    assert differing_bytes(one, one.flip(0)) == 0
    assert differing_bytes(one, one.roll(1)) == 2


def test_differing_bytes_wants_the_same_layout():
    one = torch.zeros(4, 4)
    assert differing_bytes(one, torch.zeros(4, 4).t()) == INF
    assert differing_bytes(one, torch.zeros(16)) == INF
    assert differing_bytes(one, torch.zeros(4, 4, dtype=torch.int32)) == INF
    assert differing_bytes(one, torch.zeros(4, 4, device="meta")) == INF
    # The pitch of a one-column tensor counts: a GEMM's host code reads it.
    assert differing_bytes(torch.zeros(4).as_strided((4, 1), (1, 8)), torch.zeros(4, 1)) == INF
    pitched = torch.zeros(3, 8)[:, :5]
    assert differing_bytes(pitched, torch.zeros(3, 8)[:, :5]) == 0


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_outputs_are_equal(shape):
    for dtype in (torch.float8_e4m3fn, torch.float32):
        assert differing_bytes(torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)) == 0
    assert relative_error(torch.empty(shape), torch.empty(shape)) == 0


def test_differing_bytes_of_many_elements():
    one = torch.zeros(2**24, dtype=torch.uint8).view(torch.float8_e4m3fn)
    other = one.clone()
    other.view(torch.uint8)[:: 2**20] = 1
    assert differing_bytes(one, other) == 16


def test_relative_error():
    expected = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1, rel=1e-12)
    assert relative_error(expected.bfloat16(), expected.double()) == 0
    assert relative_error(torch.tensor([3.0, NAN]), expected) == INF
    assert relative_error(torch.tensor([3.0, INF]), expected) == INF
    assert relative_error(expected, torch.tensor([3.0, NAN])) == INF
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == INF
    assert relative_error(torch.zeros(3), torch.zeros(2)) == INF
    # In float32 this difference would vanish.
    assert relative_error(torch.tensor([1.0 + 1e-12], dtype=torch.float64), torch.ones(1)) == pytest.approx(
        1e-12, rel=1e-3
    )


def case(**changes):
    made = Case(
        label="8 x 8",
        make=lambda: (torch.arange(64.0).reshape(8, 8),),
        run=lambda x: {"y": x * 2, "z": x.sum(0)},
        expected=lambda x: {"y": x + x, "z": x.sum(0)},
        error=relative_error,
        bounds={"y": 0.0, "z": 1e-6},
    )
    return dataclasses.replace(made, **changes)


def test_a_good_case_passes():
    result = run_case("k", case(), CPU)
    assert result == dataclasses.replace(
        result, kernel="k", label="8 x 8", implementation="definition", errors={"y": 0.0, "z": 0.0}
    )
    assert result.passed
    assert result.bounds == {"y": 0.0, "z": 1e-6}
    assert 0 < result.milliseconds < 1e3
    assert result.peak_bytes is None
    assert result.message == ""


def test_an_error_above_its_bound_fails():
    result = run_case("k", case(run=lambda x: {"y": x * 2, "z": x.sum(0) * 1.01}), CPU)
    assert not result.passed
    assert result.errors == {"y": 0.0, "z": pytest.approx(0.01, rel=1e-3)}


def test_an_error_at_its_bound_passes():
    assert run_case("k", case(error=lambda a, e: 0.5, bounds={"y": 0.5, "z": 0.5}), CPU).passed
    assert not run_case("k", case(error=lambda a, e: NAN, bounds={"y": 0.5, "z": 0.5}), CPU).passed


@pytest.mark.parametrize("part", ["make", "run", "expected", "error"])
def test_a_case_that_raises_is_a_result(part):
    def broken(*arguments):
        raise OSError("it broke")

    result = run_case("k", case(**{part: broken}), CPU)
    assert not result.passed
    assert result.message.startswith("OSError: it broke (")
    assert "test_selfcheck.py:" in result.message
    assert result.errors == {}
    assert math.isnan(result.milliseconds)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": lambda x: {"y": x * 2}},
        {"expected": lambda x: {"y": x * 2}},
        {"bounds": {"y": 0.0}},
        {"bounds": {"y": 0.0, "z": 0.0, "w": 0.0}},
        {"run": lambda x: {}, "expected": lambda x: {}, "bounds": {}},
    ],
)
def test_an_output_that_nothing_compares_fails(changes):
    result = run_case("k", case(**changes), CPU)
    assert not result.passed
    assert "must return, expect and bound the same outputs" in result.message


def test_a_kernel_that_spoils_its_input_is_compared_with_the_good_input():
    assert not run_case("k", case(run=lambda x: {"y": x.zero_() * 2, "z": x.sum(0)}), CPU).passed


def test_the_median_is_what_is_reported(monkeypatch):
    clock = iter([0, 1, 1, 3, 3, 13, 13, 14, 14, 16])
    monkeypatch.setattr(selfcheck.time, "perf_counter", lambda: next(clock))
    assert run_case("k", case(), CPU).milliseconds == 2000


def test_a_gpu_that_cannot_run_the_kernel_runs_the_definition(machine, packages, monkeypatch):
    machine("A100")
    packages.install_kernel("k")
    seen = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(selfcheck, "_time_cuda", lambda run, inputs: (1.0, 2))

    def run(x):
        seen.append(reference_requested())
        return {"y": x * 2, "z": x.sum(0)}

    result = run_case("k", case(run=run), torch.device("cuda:0"))
    assert (result.implementation, result.passed, result.peak_bytes) == ("definition", True, 2)
    assert result.message.startswith("k requires SM90, found SM80")
    assert seen == [True]
    machine("H200")
    result = run_case("k", case(run=run), torch.device("cuda:0"))
    assert (result.implementation, result.message) == ("SM90 kernel", "")
    assert seen == [True, False]
    assert not reference_requested()


def on_the_gpu(run):
    size = 2**20
    return case(
        make=lambda: (torch.arange(float(size), device="cuda"),),
        run=run,
        expected=lambda x: {"y": x + x},
        error=differing_bytes,
        bounds={"y": 0.0},
    )


@pytest.mark.gpu
def test_time_and_memory_on_a_gpu(packages):
    packages.install_kernel("k")
    result = run_case("k", on_the_gpu(lambda x: {"y": x * 2}), torch.device("cuda"))
    assert result.passed
    assert result.implementation == "SM90 kernel"
    assert result.peak_bytes == 4 * 2**20
    assert 0 < result.milliseconds < 100


@pytest.mark.gpu
def test_memory_that_nobody_wrote_is_seen(packages):
    packages.install_kernel("k")
    result = run_case("k", on_the_gpu(lambda x: {"y": torch.empty_like(x)}), torch.device("cuda"))
    assert not result.passed
    assert result.errors["y"] == 2**20


@pytest.mark.gpu
def test_differing_bytes_on_a_gpu():
    one = torch.zeros(2**28, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    other = one.clone()
    other.view(torch.uint8)[7 :: 2**20] = 3
    assert differing_bytes(one, other) == 256
