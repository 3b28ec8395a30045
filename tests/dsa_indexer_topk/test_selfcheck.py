"""The package's own self-check: clean as it is, and failing for each output that goes wrong."""

from unittest import mock

import pytest
import torch
from dsa_indexer_topk import reference, selfcheck
from hopper_kernels.selfcheck import run_case

CPU = torch.device("cpu")
CASES = selfcheck.cases(CPU)
each_case = pytest.mark.parametrize("case", CASES, ids=[case.label for case in CASES])


def run(case):
    return run_case("dsa_indexer_topk", case, CPU)


def test_labels_are_unique_and_every_output_is_bounded():
    labels = [case.label for case in CASES]
    assert len(set(labels)) == len(labels)
    for case in CASES:
        assert case.bounds.keys() == ({"picks", "blocks"} if "source" in case.label else {"picks"})
        assert set(case.bounds.values()) == ({0.0} if "whole" in case.label else {1e-2})
    on_gpu = [case.label for case in selfcheck.cases(torch.device("cuda"))]
    assert len(set(on_gpu)) == len(on_gpu)
    assert set(labels) < set(on_gpu)
    assert any("20480 tokens" in label and "consumer" in label for label in on_gpu)


@each_case
def test_clean(case):
    result = run(case)
    assert result.passed, result.message
    assert result.errors == dict.fromkeys(case.bounds, 0.0)
    assert result.implementation == "definition"


@each_case
def test_inputs_are_seeded_and_have_ties_of_all_kinds(case):
    for one, other in zip(case.make(), case.make(), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    q, k, w, ks, ke, topk, candidates, *_ = case.make()
    assert (ke - ks).min() <= 1
    assert (ke - ks).max() > topk
    if "whole" in case.label:
        row = reference.scores(q[-1:], k, w[-1:])[0, ks[-1] : ke[-1]]
        assert len(row.unique()) < len(row)
    if candidates is not None:
        assert (candidates == -1).any()
        assert ((candidates >= 0) & (candidates * 4 >= (ke - ks)[:, None])).any()


def failed(monkeypatch, wrong):
    """The cases that fail if the operator runs wrong(definition, arguments); what it is compared with stays right."""
    right, found = reference.index_topk, {}
    for case in selfcheck.cases(CPU):
        calls = []

        def run_either(*arguments, calls=calls):
            calls.append(arguments)
            return right(*arguments) if len(calls) == 1 else wrong(right, arguments)

        monkeypatch.setattr(reference, "index_topk", run_either)
        found[case.label] = run(case)
        assert len(calls) > 1
    return {label: result.errors for label, result in found.items() if not result.passed}


def next_one(t):
    return torch.where(t >= 0, t + 1, t)


def one_lost(t):
    t = t.clone()
    row = (t >= 0).any(1).nonzero()[-1, 0]
    t[row, (t[row] >= 0).sum() - 1] = -1
    return t


def one_twice(t):
    t = t.clone()
    row = (t[:, 1] >= 0).nonzero()[-1, 0]
    t[row, 1] = t[row, 0]
    return t


@pytest.mark.parametrize("index", [0, 1], ids=["picks", "blocks"])
@pytest.mark.parametrize("how", [next_one, one_lost, one_twice], ids=lambda how: how.__name__)
def test_wrong_outputs_are_noticed(how, index, monkeypatch):
    def wrong(right, arguments):
        results = list(right(*arguments))
        if arguments[7] or index == 0:
            results[index] = how(results[index])
        return tuple(results)

    found = failed(monkeypatch, wrong)
    assert found.keys() == {case.label for case in CASES if index == 0 or "source" in case.label}
    for errors in found.values():
        assert errors["blocks" if index else "picks"] > 1e-2
        assert index == 0 or errors["picks"] == 0


def one_fewer(right, arguments):
    picks, blocks = right(*arguments[:5], arguments[5] - 1, *arguments[6:])
    return torch.nn.functional.pad(picks, (0, 1), value=-1), blocks


def larger_blocks(right, arguments):
    return right(*arguments[:9], 2 * arguments[9], arguments[10])


def no_candidates(right, arguments):
    return right(*arguments[:6], None, *arguments[7:])


def unquantised(right, arguments):
    def scores(q, k, w):
        dots = torch.einsum("thd,ed->the", q.float(), k.float()).relu()
        return torch.einsum("the,th->te", dots, w.float()) + 0.0

    with mock.patch.object(reference, "scores", scores):
        return right(*arguments)


def ties_to_the_larger(right, arguments):
    largest = reference.largest

    def turned(ranks, count):
        found = (ranks.shape[1] - 1 - largest(ranks.flip(1), count)).sort(1).values
        return found.masked_fill(found == ranks.shape[1], -1)

    with mock.patch.object(reference, "largest", turned):
        return right(*arguments)


SHOWS_IN = {
    one_fewer: lambda label: True,
    larger_blocks: lambda label: "plain" not in label,
    no_candidates: lambda label: "consumer" in label,
    # A consumer picks from few entries, of which rounding moves hardly one.
    unquantised: lambda label: "normal" in label and "consumer" not in label,
    ties_to_the_larger: lambda label: "whole" in label,
}


@pytest.mark.parametrize("wrong", SHOWS_IN, ids=lambda wrong: wrong.__name__)
def test_wrong_mathematics_is_noticed(wrong, monkeypatch):
    assert failed(monkeypatch, wrong).keys() == {case.label for case in CASES if SHOWS_IN[wrong](case.label)}


def test_missing():
    expected = torch.tensor([[1, 2, 3, -1], [5, 6, 7, 8]])
    assert selfcheck.missing(expected, expected) == 0
    assert selfcheck.missing(torch.tensor([[3, 1, 2, -1], [8, 7, 6, 5]]), expected) == 0
    assert selfcheck.missing(torch.tensor([[1, 2, 4, -1], [5, 6, 7, 8]]), expected) == pytest.approx(1 / 7)
    assert selfcheck.missing(expected.flip(0), expected) == float("inf")
    assert selfcheck.missing(torch.tensor([[1, 2, 2, -1], [5, 6, 7, 8]]), expected) == float("inf")
    assert selfcheck.missing(torch.tensor([[1, 2, -1, 3], [5, 6, 7, 8]]), expected) == float("inf")
    assert selfcheck.missing(expected.int(), expected) == float("inf")
    assert selfcheck.missing(expected[:, :3], expected) == float("inf")
    assert selfcheck.missing(expected[:0], expected[:0]) == 0
