"""The package's own self-check: clean as it is, and failing for each output that goes wrong."""

import pytest
import torch
from hopper_kernels.selfcheck import run_case
from mhc_projection import reference, selfcheck

CPU = torch.device("cpu")
CASES = selfcheck.cases(CPU)
STREAMS = "hyper_connection_streams"
each_case = pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])
OUTPUTS = {
    "projection_forward": ("mixes", None, "collapsed"),
    "projection_backward": ("grad_x", "grad_weight", "grad_pre_mix"),
    "gates_forward": ("pre", "post", "comb"),
    "gates_backward": (None, "grad_scale", "grad_base"),
}
WRONG = [(function, i, name) for function, names in OUTPUTS.items() for i, name in enumerate(names) if name]


def test_labels_are_unique_and_every_output_is_bounded():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    names = {name for _, _, name in WRONG}
    for case in CASES:  # the fused operators return no mixes
        assert case.bounds.keys() == names - ({"mixes"} if STREAMS in case.label else set())
        assert max(case.bounds.values()) <= 3e-3
    sizes = {case.label.partition(",")[0] for case in selfcheck.cases(torch.device("cuda"))}
    assert {"4096 x 4 x 5120", "4096 x 4 x 7168", "1024 x 4 x 4096"} < sizes


@each_case
def test_clean(case):
    result = run_case("mhc_projection", case, CPU)
    assert result.passed, result.message
    assert result.errors.keys() == case.bounds.keys()
    assert result.implementation == "definition"


@each_case
def test_inputs_are_seeded(case):
    for one, other in zip(case.make(), case.make(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("function", "index", "name"), WRONG, ids=[name for _, _, name in WRONG])
def test_a_wrong_output_is_noticed(function, index, name, monkeypatch):
    """One percent off, in the operator's fp32 results and not in what they are compared with."""
    right = getattr(reference, function)

    def wrong(*args):
        results = list(right(*args))
        if args[0].dtype != torch.float64:
            results[index] = results[index] * 1.01
        return tuple(results)

    monkeypatch.setattr(reference, function, wrong)
    result = run_case("mhc_projection", CASES[0], CPU)
    assert not result.passed
    assert result.errors[name] > result.bounds[name]


def test_a_forgotten_addend_is_noticed(monkeypatch):
    right = reference.projection_backward
    monkeypatch.setattr(
        reference,
        "projection_backward",
        lambda *args: right(*args[:7], None if args[0].dtype == torch.bfloat16 else args[7], *args[8:]),
    )
    outcomes = {case.label: run_case("mhc_projection", case, CPU).passed for case in CASES}
    assert outcomes == {case.label: STREAMS not in case.label for case in CASES}
