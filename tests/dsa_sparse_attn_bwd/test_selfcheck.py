"""The package's own self-check: clean as it is, and failing for each gradient that goes wrong."""

import pytest
import torch
from dsa_sparse_attn_bwd import reference, selfcheck
from hopper_kernels.selfcheck import run_case

from tests.dsa_sparse_attn_bwd import inputs

CPU = torch.device("cpu")
CASES = selfcheck.cases(CPU)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])


def run(case):
    return run_case("dsa_sparse_attn_bwd", case, CPU)


def test_labels_are_unique_and_those_of_a_gpu_have_the_models_sizes():
    labels = [case.label for case in CASES]
    on_gpu = [case.label for case in selfcheck.cases(torch.device("cuda"))]
    assert len(set(on_gpu)) == len(on_gpu)
    assert set(labels) < set(on_gpu)
    assert any("x 640 slots" in label and "64 heads, deterministic" in label for label in on_gpu)


@each_case
def test_clean(case):
    result = run(case)
    assert result.passed, result.message
    assert result.implementation == "definition"


@each_case
def test_inputs_are_seeded_and_have_queries_without_slots(case):
    for one, other in zip(case.make(), case.make(), strict=True):
        assert torch.equal(one, other)
    *_, indices, _ = case.make()
    rows = case.make()[2].shape[1]
    named = (indices >= 0) & (indices < rows)
    assert not named.all()
    assert not named.any(dim=3).all()


@pytest.mark.parametrize("which", range(3))
def test_a_wrong_gradient_fails(which, monkeypatch):
    right = reference.backward

    def wrong(*arguments):
        found = list(right(*arguments))
        if arguments[-1] is not None:  # a tail: what the operator runs, and not what it is compared with
            found[which] = found[which] * 1.01
        return tuple(found)

    monkeypatch.setattr(reference, "backward", wrong)
    assert not run(CASES[0]).passed


def test_the_forward_is_that_of_the_tests():
    t = inputs.operands(70, 9, 24, heads=16, channels=512)
    out, lse = selfcheck.forward(t.q, t.kv, t.indices, t.sinks, t.sm_scale)
    torch.testing.assert_close(lse, t.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.float(), t.out.float(), rtol=1e-2, atol=1e-3)
