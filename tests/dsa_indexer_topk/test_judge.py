"""The judge of the kernels takes what rounding may change, and nothing else."""

import pytest
import torch
from dsa_indexer_topk import reference
from hopper_kernels import fp8

from tests.dsa_indexer_topk import inputs, judge
from tests.dsa_indexer_topk.inputs import MODES

SHARE = 2.0**-13  # what a matrix instruction that keeps 13 bits may lose of its largest term
each_mode = pytest.mark.parametrize("mode", MODES)


def call(mode="both", **options):
    options = {"heads": 32, "head_dim": 128, "topk": 30, "topk_blocks": 12, "block_size": 2} | options
    a = inputs.arguments((200, 1, 90), mode=mode, **options)
    if a.candidates is not None:
        a = a._replace(candidates=inputs.blocks(len(a.q), len(a.k), 2, 90))
    return a


def run(a, scores, monkeypatch):
    """The operator with other scores."""
    with monkeypatch.context() as patch:
        patch.setattr(reference, "scores", scores)
        return reference.index_topk(*a)


@each_mode
@pytest.mark.parametrize("numbers", [torch.randn, inputs.whole_numbers], ids=["normal", "whole"])
def test_the_definition_is_right(mode, numbers):
    a = call(mode, numbers=numbers)
    for share in (0.0, SHARE):
        assert judge.assert_right(reference.index_topk(*a), a, share) == 1


def test_special_rows_are_taken():
    a = call()
    a.k[3], a.k[200], a.q[7], a.w[250] = float("nan"), float("inf"), float("nan"), float("nan")
    judge.assert_right(reference.index_topk(*a), a, SHARE)
    for documents in ((1,), (1, 1), ()):
        a = inputs.arguments(documents, 2, mode="both")
        judge.assert_right(reference.index_topk(*a), a, SHARE)


@each_mode
def test_rounding_is_taken_if_stated(mode, monkeypatch):
    """Noise below the tolerance passes and moves few picks; with no tolerance it fails."""
    a, right = call(mode), reference.scores

    def noisy(q, k, w):
        slack = judge.tolerance(q, k, w, SHARE)
        return right(q, k, w) + slack * (2 * torch.rand(slack.shape) - 1)

    found = run(a, noisy, monkeypatch)
    assert 0.97 < judge.assert_right(found, a, SHARE) < 1
    with pytest.raises(AssertionError, match="lack a better one"):
        judge.assert_right(found, a)


def unquantised(q, k, w):
    dots = torch.einsum("thd,ed->the", q.float(), k.float()).relu()
    return torch.einsum("the,th->te", dots, w.float())


def with_bytes(change):
    """The definition's scores of other bytes and scales: change(rows) -> (bytes, scales) as float64."""

    def scores(q, k, w):
        (q8, q_scale), (k8, k_scale) = change(q), change(k)
        dots = torch.einsum("thd,ed->the", q8.double(), k8.double()).relu()
        return (torch.einsum("the,th->te", dots, w.double() * q_scale) * k_scale).float()

    return scores


def truncated(x):
    _, s = fp8.per_row(x)
    v = x.double() / s[..., None]
    step = (v.abs().clamp_min(2.0**-6).log2().floor() - 3).exp2()
    return (v / step).trunc() * step, s


def exact_scale(x):
    s = x.abs().amax(-1).double() / 448
    return fp8.quantize(x, s[..., None].float()).double(), s


def half_the_scale(x):
    s = fp8.per_row(x)[1] / 2
    return fp8.quantize(x, s[..., None]), s


def no_scale(x):
    q8, s = fp8.per_row(x)
    return q8, torch.ones_like(s)


WRONG = {
    "no quantisation": unquantised,
    "no scales": with_bytes(no_scale),
    "half the scale": with_bytes(half_the_scale),
    "a scale that is no power of two": with_bytes(exact_scale),
    "bytes cut off": with_bytes(truncated),
}


def test_the_same_mathematics_passes(monkeypatch):
    """What the wrong recipes are built on is right with the right bytes."""
    a = call()
    assert judge.assert_right(run(a, with_bytes(fp8.per_row), monkeypatch), a, SHARE) > 0.999


@pytest.mark.parametrize("name", WRONG)
def test_another_recipe_fails(name, monkeypatch):
    a = call("plain")
    a = a._replace(q=a.q * (1 + torch.rand(a.q.shape[:2])[..., None]), k=a.k * (1 + torch.rand(len(a.k), 1)))
    a = a._replace(q=a.q.bfloat16(), k=a.k.bfloat16())
    with pytest.raises(AssertionError, match="lack a better one"):
        judge.assert_right(run(a, WRONG[name], monkeypatch), a, SHARE)


def swapped(t):
    """The last pick of the fullest row gives way to the first entry that was left out."""
    row = (t >= 0).sum(1).argmax()
    t[row, -1] = next(i for i in range(10**6) if i not in t[row].tolist())
    t[row] = t[row].sort().values
    return t


def lost(t):
    t[150, (t[150] >= 0).sum() - 1] = -1
    return t


def twice(t):
    t[150, 1] = t[150, 0]
    return t


def beyond(t):
    t[150, (t[150] >= 0).sum() - 1] = 10**6
    return t


def foreign(t):
    t[-1, 0] = 0 if t.dtype == torch.int64 else t[-1, -1] + 1
    return t


def reversed_(t):
    return torch.cat((t[:, 1:2], t[:, :1], t[:, 2:]), 1)


def minus_one_first(t):
    return t.roll(1, 1)


FAULTS = {
    lost: "as many as there are",
    twice: "ascending, once each",
    beyond: "out of range",
    reversed_: "ascending, once each",
    minus_one_first: "ascending|-1 before",
    foreign: "ascending|not allowed",
    swapped: "lack a better one|not allowed",
}


@pytest.mark.parametrize("index", [0, 1], ids=["picks", "blocks"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_other_faults_fail(fault, index):
    a = call("source")
    found = list(reference.index_topk(*a))
    found[index] = fault(found[index].clone())
    name = ("picks", "blocks")[index]
    with pytest.raises(AssertionError, match=f"^{name}: ({FAULTS[fault]})"):
        judge.assert_right(tuple(found), a, SHARE)


def test_a_block_that_is_not_the_newest_fails():
    a = call("source", topk_blocks=1)
    picks, blocks = reference.index_topk(*a)
    with pytest.raises(AssertionError, match=r"^blocks: .* lack a better one"):
        judge.assert_right((picks, torch.where(blocks > 0, blocks - 1, blocks)), a, SHARE)
