"""The package's own self-check: clean as it is, and failing for each output that goes wrong."""

import dataclasses

import pytest
import torch
from fp8_dual_cast import reference, selfcheck
from hopper_kernels.selfcheck import run_case

CPU = torch.device("cpu")
OUTPUTS = ("q", "sf", "q_t", "sf_t")
CASES = selfcheck.cases(CPU)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])


def test_the_cases_cover_both_modes_and_the_rotation():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    assert any("power-of-two" in label for label in labels)
    assert any("RoPE" in label for label in labels)
    assert all(set(case.bounds) == set(OUTPUTS) and not any(case.bounds.values()) for case in CASES)


@each_case
def test_clean(case):
    result = run_case("fp8_dual_cast", case, CPU)
    assert result.passed, result.message
    assert result.errors == dict.fromkeys(OUTPUTS, 0.0)
    assert result.implementation == "definition"
    assert result.peak_bytes is None


@each_case
def test_inputs_are_seeded(case):
    for one, other in zip(case.make(), case.make(), strict=True):
        assert torch.equal(one, other)


@each_case
@pytest.mark.parametrize("index", range(4), ids=OUTPUTS)
def test_one_wrong_element_is_noticed(case, index, monkeypatch):
    """A byte one code up, or a scale one ulp up, in the operator's results."""
    right = reference.dual_cast

    def wrong(*args):
        results = right(*args)
        broken = results[index]
        bits = broken.view(torch.int32 if broken.dtype == torch.float32 else torch.uint8)
        bits[0, 1] += 1 if bits[0, 1] & 0x7F < 0x7E else -1
        return results

    monkeypatch.setattr(reference, "dual_cast", wrong)
    result = run_case("fp8_dual_cast", case, CPU)
    assert not result.passed
    assert result.errors == {name: float(name == OUTPUTS[index]) for name in OUTPUTS}


@each_case
def test_an_operator_that_raises_fails(case, monkeypatch):
    def broken(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(reference, "dual_cast", broken)
    result = run_case("fp8_dual_cast", case, CPU)
    assert not result.passed
    assert "no such kernel" in result.message


def test_the_wrong_direction_of_the_rotation_is_noticed(monkeypatch):
    (case,) = (case for case in CASES if "RoPE" in case.label)
    right = reference.dual_cast
    monkeypatch.setattr(reference, "dual_cast", lambda *args: right(*args[:-1], not args[-1]))
    result = run_case("fp8_dual_cast", case, CPU)
    assert not result.passed
    assert min(result.errors.values()) > 0


@pytest.mark.parametrize("case", [case for case in CASES if "RoPE" not in case.label], ids=lambda case: case.label)
def test_the_wrong_scale_mode_is_noticed(case, monkeypatch):
    right = reference.dual_cast
    monkeypatch.setattr(reference, "dual_cast", lambda x, use_ue8m0, *rest: right(x, not use_ue8m0, *rest))
    result = run_case("fp8_dual_cast", case, CPU)
    assert not result.passed
    assert min(result.errors.values()) > 0


def test_other_strides_are_noticed():
    """A scale tensor with the right numbers that a GEMM would have to transpose."""
    case = CASES[0]

    def run(*args):
        results = case.run(*args)
        return results | {"sf": results["sf"].contiguous()}

    result = run_case("fp8_dual_cast", dataclasses.replace(case, run=run), CPU)
    assert not result.passed
    assert result.errors["sf"] == float("inf")
