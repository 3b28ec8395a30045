"""The package's own self-check: clean as it is, and failing for each output that goes wrong."""

import pytest
import torch
from hopper_kernels.selfcheck import run_case
from moe_experts import reference, selfcheck
from moe_experts.fp8 import reference as fp8_reference

CPU = torch.device("cpu")
CASES = selfcheck.cases(CPU)
NAMES = ("out", "grad_x", "grad_gate", "grad_up", "grad_down")
each_case = pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])


def test_labels_are_unique_and_every_output_is_bounded():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    for case in CASES:
        assert case.bounds.keys() == set(NAMES)
        assert max(case.bounds.values()) <= (7.5e-2 if "FP8" in case.label else 5e-3)
    on_gpu = [case.label for case in selfcheck.cases(torch.device("cuda"))]
    assert set(labels) < set(on_gpu)
    wide = [label for label in on_gpu if "48 experts" in label and "5120 x 2304" in label]
    assert ["FP8" in label for label in wide] == [False] * 4 + [True] * 2


@each_case
def test_clean(case):
    result = run_case("moe_experts", case, CPU)
    assert result.passed, (result.message, result.errors)
    assert result.implementation == "definition"


def test_inputs_are_seeded_and_clamped():
    for case in CASES:
        for one, other in zip(case.make(), case.make(), strict=True):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        x, _, _, counts, dout = case.make()
        for rows in (x, dout):  # what no expert owns must not be read
            assert rows[counts.sum() :].isnan().all()
            assert len(rows) > counts.sum()
        if "whole" in case.label and "1 experts" not in case.label:
            x, gate_up, _, counts, _ = case.make()
            owned = int(counts[0]) or int(counts[1])
            gates = x[:owned].float() @ gate_up[0 if counts[0] else 1].float().t()
            assert (gates > selfcheck.LIMIT).any()
            assert (gates == selfcheck.LIMIT).any()


@pytest.mark.parametrize("index", range(5), ids=NAMES)
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.label)
def test_a_wrong_output_is_noticed(index, case, monkeypatch):
    """One percent off, in the operator's bf16 results and not in what they are compared with."""
    forward, backward = reference.forward, reference.backward

    def wrong_forward(x, *args):
        out, gate, up = forward(x, *args)
        return (out if x.dtype == torch.float64 else out * 1.0156), gate, up

    def wrong_backward(dout, x, gate_proj, up_proj, *args):
        grads = list(backward(dout, x, gate_proj, up_proj, *args))
        if x.dtype != torch.float64 and up_proj is not None:
            grads[index - 1] = grads[index - 1] * 1.0156
        elif x.dtype != torch.float64:
            half = args[-6].shape[1] if index in (2, 3) else 0
            part = {0: grads[0], 1: grads[1][:, :half], 2: grads[1][:, half:], 3: grads[3]}[index - 1]
            part.mul_(1.0156)
        return tuple(grads)

    if index:
        monkeypatch.setattr(reference, "backward", wrong_backward)
    else:
        monkeypatch.setattr(reference, "forward", wrong_forward)
    result = run_case("moe_experts", case, CPU)
    assert not result.passed
    assert result.errors[NAMES[index]] > result.bounds[NAMES[index]]


@pytest.mark.parametrize("index", range(5), ids=NAMES)
@pytest.mark.parametrize("case", CASES[-2:], ids=lambda case: case.label)
def test_a_wrong_fp8_output_is_noticed(index, case, monkeypatch):
    """An eighth off."""
    name = "backward" if index else "forward"
    right = getattr(fp8_reference, name)

    def wrong(*args):
        results = [r.clone() for r in right(*args)]
        if index == 0:
            results[0] *= 1.125
        elif results[2].numel():  # separate
            results[index - 1] *= 1.125
        else:
            half = results[1].shape[1] // 2
            parts = results[0], results[1][:, :half], results[1][:, half:], results[3]
            parts[index - 1].mul_(1.125)
        return tuple(results)

    monkeypatch.setattr(fp8_reference, name, wrong)
    result = run_case("moe_experts", case, CPU)
    assert not result.passed
    assert result.errors[NAMES[index]] > result.bounds[NAMES[index]]


def test_a_bound_without_its_gradient_is_noticed(monkeypatch):
    """As with a mask that says < where torch.clamp says <=."""
    right = reference.swiglu_backward

    def wrong(dh, gate, up, limit, dtype):
        dgate, dup = right(dh, gate, up, limit, dtype)
        if dtype == torch.float64:
            return dgate, dup
        return dgate.masked_fill(gate == limit, 0), dup.masked_fill(up.abs() == limit, 0)

    monkeypatch.setattr(reference, "swiglu_backward", wrong)
    outcomes = {case.label: run_case("moe_experts", case, CPU).passed for case in CASES[:4]}
    assert outcomes == {case.label: "whole" not in case.label for case in CASES[:4]}
