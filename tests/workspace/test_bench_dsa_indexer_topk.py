"""The dsa_indexer_topk bench: its operation counts, its verification and its peers."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from hopper_kernels import fp8

from benches import dsa_indexer_topk as bench
from benches import harness
from benches.peers import index_topk as peers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODES = (bench.PLAIN, bench.SOURCE, bench.CONSUMER)
TOY = bench.Shape(70, 200, channels=64, topk=12, blocks=9)


def _toy(mode: str = bench.PLAIN, **options) -> bench.Arguments:
    torch.manual_seed(0)
    return bench.make_arguments(dataclasses.replace(TOY, mode=mode, **options), CPU)


def _plain_scores(o: peers.Operands, candidates: torch.Tensor | None, block_size: int) -> torch.Tensor:
    dots = torch.einsum("thd,ed->the", o.queries.double(), o.keys.double()).clamp_min(0)
    scores = (torch.einsum("the,th->te", dots, o.weights.double()) * o.scales).float()
    scores = scores.masked_fill(torch.arange(len(o.keys)) >= o.ke[:, None], peers.UNREADABLE)
    return scores if candidates is None else peers.gathered(scores, candidates, block_size)


@pytest.mark.parametrize(
    ("shape", "teraflops"),
    [
        (bench.Shape(16384, 16384), 1.10),
        (bench.Shape(16384, 16384, ratio=2), 0.55),
        (bench.LAST_RANK, 16.49),
        (dataclasses.replace(bench.LAST_RANK, mode=bench.SOURCE), 16.49),
        (dataclasses.replace(bench.LAST_RANK, mode=bench.CONSUMER), 2.20),
    ],
)
def test_operations_are_those_of_the_published_table(shape, teraflops):
    assert shape.flops() / 1e12 == pytest.approx(teraflops, abs=5e-3)


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("mode", [bench.PLAIN, bench.CONSUMER])
def test_operations_count_what_a_query_may_pick_from(mode, ratio):
    shape = dataclasses.replace(TOY, mode=mode, tokens=208, ratio=ratio)
    a = bench.make_arguments(shape, CPU)
    assert a.ke.tolist() == [(token + 1) // ratio for token in range(208 - 70, 208)]
    assert shape.flops() == 2 * 32 * 64 * int(bench._listed(a).sum())
    assert shape.flops(mode=bench.PLAIN) == 2 * 32 * 64 * int(a.ke.sum())


@pytest.mark.parametrize("mode", MODES)
def test_all_ways_are_right(mode, monkeypatch):
    monkeypatch.setattr(peers, "SCORES_BYTES", 4 * 200 * 30)  # of 30 queries
    a = _toy(mode)
    found = bench.prepare_ours(a)()
    assert bench.right(a, found, ascending=True, exact=True).startswith("66 rows compared")
    assert "100.000 % of the picks" in bench.right(a, bench.prepare_definition(a)(), exact=True)
    unfused = peers.unfused(a, fp8.per_row, _plain_scores)()
    bench.right(a, unfused, exact=True)
    assert all(torch.equal(one.sort(1).values, other.sort(1).values) for one, other in zip(found, unfused, strict=True))


def test_the_unfused_way_skips_missing_candidates():
    a = _toy(bench.CONSUMER)
    a.candidates[1, 3] = a.candidates[2] = -1
    picks, _ = peers.unfused(a, fp8.per_row, _plain_scores)()
    assert (picks[2] == -1).all()
    bench.right(a, (picks, torch.empty(0, 0)))


@pytest.mark.parametrize("values", bench.VALUES)
def test_scores_made_by_hand(values):
    a = _toy(values=values)
    scores = bench.reference.scores(a.q, a.k, a.w)
    torch.manual_seed(1)
    drawn = bench.VALUES[values](200)
    bench._give_scores(a.q, a.k, a.w, drawn)
    assert torch.equal(bench.reference.scores(a.q, a.k, a.w), drawn.float().expand(70, 200))
    assert torch.equal(scores, scores[:1].expand_as(scores))
    bench.right(a, bench.prepare_ours(a)(), ascending=True, exact=True)


def test_what_the_scores_made_by_hand_are():
    scores = {name: make(1000) for name, make in bench.VALUES.items()}
    assert max(values.abs().max() for values in scores.values()) < 16**bench.DIGITS <= 2**24
    assert scores[bench.EQUAL].unique().tolist() == [7]
    assert scores[bench.TWO_VALUES].unique().tolist() == [5, 8]
    low, high = scores[bench.BAND].unique().float()
    assert high == low.nextafter(high)
    assert torch.equal(scores[bench.SORTED].sort().values, scores[bench.SORTED])
    assert scores[bench.NEGATIVE].max() == -1
    assert (scores[bench.HUGE] > 1e6).sum() == 1


def test_another_choice_of_equal_scores_is_noticed():
    a = _toy(values=bench.EQUAL)
    picks, blocks = bench.prepare_ours(a)()
    picks[-1, -1] = 199  # as good as the picks, but not one of the first
    bench.right(a, (picks, blocks))
    with pytest.raises(AssertionError, match=r"^not the definition's choice of equal scores: 99\."):
        bench.right(a, (picks, blocks), exact=True)


def test_a_worse_pick_is_noticed():
    a = _toy(values=bench.TWO_VALUES)
    picks, blocks = bench.prepare_ours(a)()
    scores = bench.reference.scores(a.q, a.k, a.w)[-1]
    picks[-1, -1] = int((scores == 5).nonzero().max())
    with pytest.raises(AssertionError, match=r"^picks: 1 of 66 rows lack a better one"):
        bench.right(a, (picks, blocks))


@pytest.mark.parametrize(
    ("value", "message"),
    [(-2, "out of range"), (-1, "too few"), (131, "out of range"), (None, "one of them twice")],
)
def test_malformed_picks_are_noticed_in_any_row(value, message):
    a = _toy()
    picks, blocks = bench.prepare_ours(a)()
    assert a.ke[0] == 131
    picks[0, 0] = picks[0, 1] if value is None else value
    with pytest.raises(AssertionError, match=f"^picks: {message}"):
        bench.right(a, (picks, blocks))


def test_another_order_layout_or_result_is_noticed():
    a = _toy()
    picks, blocks = bench.prepare_ours(a)()
    bench.right(a, (picks.flip(1), blocks))
    with pytest.raises(AssertionError, match=r"^picks: not ascending"):
        bench.right(a, (picks.flip(1), blocks), ascending=True)
    with pytest.raises(AssertionError, match=r"^picks: .*int32, wanted"):
        bench.right(a, (picks.int(), blocks))
    with pytest.raises(AssertionError, match="nobody asked for"):
        bench.right(a, (picks, torch.zeros(70, 9)))


@pytest.mark.parametrize("mode", MODES)
def test_the_last_row_is_compared(mode):
    a = _toy(mode)
    picks, blocks = bench.prepare_ours(a)()
    stranger = next(e for e in range(int(a.ke[-1])) if e not in picks[-1])
    picks[-1, 5] = stranger
    message = "not allowed|1 of 66 rows lack a better one" if mode == bench.CONSUMER else "1 of 66 rows lack a better"
    with pytest.raises(AssertionError, match=f"^picks: ({message})"):
        bench.right(a, (picks, blocks))


def test_the_newest_block_must_be_there():
    a = _toy(bench.SOURCE)
    picks, blocks = bench.prepare_ours(a)()
    assert blocks[-1].max() == 199 // 8
    blocks[-1, -1] = next(b for b in range(24) if b not in blocks[-1])
    with pytest.raises(AssertionError, match=r"^blocks: 1 of 66 rows lack a better one"):
        bench.right(a, (picks, blocks))
    with pytest.raises(AssertionError, match=r"^blocks: .*, wanted"):
        bench.right(a, (picks, blocks.long()))


def test_a_difference_within_the_rounding_is_allowed():
    scores = torch.tensor([[4.0, 3.0, 2.999, 1.0]])
    allowed, slack = torch.ones(1, 4, dtype=torch.bool), torch.full((1, 4), 1e-3)
    assert bench._best("picks", torch.tensor([[0, 2]]), scores, slack, allowed) == 0.5
    with pytest.raises(AssertionError, match=r"^picks: 1 of 1 rows lack a better one"):
        bench._best("picks", torch.tensor([[0, 2]]), scores, slack / 4, allowed)


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == len(bench.SHAPES)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]] == [True, False]
        assert case["unit"] == "flops"
        assert case["work"] < 1 << 30
    assert "sgl-deep-gemm" in record["versions"]


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    labels = [case.label for case in full]
    assert len(set(labels)) == len(bench.SHAPES)
    assert labels[:3] == [
        "16384 x 16384, ratio 1, plain",
        "16384 x 8192, ratio 2, plain",
        "16384 x 131072, ratio 1, plain, last of 8 ranks",
    ]
    assert labels[-1] == "16384 x 16384, ratio 1, plain, one huge"
    names = {case.label: [c.name for c in case.candidates] for case in full}
    unfused = ["dsv41_index_topk", "DeepGEMM fp8_mqa_logits + torch.topk", "Triton scorer + torch.topk, in chunks"]
    assert names[labels[0]] == unfused
    assert names["4096 x 4096, ratio 1, plain"] == [*unfused, "definition in PyTorch"]
    consumer = full[4]
    assert "consumer" in consumer.label
    assert [c.work for c in consumer.candidates] == [None, full[2].flops, None]
    quick = bench.cases(CUDA, True)
    assert [case.label for case in quick] == labels[:5]
    assert all(len(case.candidates) == 1 for case in quick)


def test_absent_peers_fail_and_stop_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    case = bench._case(TOY, CPU, bench._unfused(TOY)[:1])
    record = harness.run(harness.Bench("toy", "Toy", lambda *_: [case]), CPU, rounds=1)
    ours, deep_gemm = record["cases"][0]["candidates"]
    assert (ours["status"], deep_gemm["status"]) == ("verified", "failed")
    assert deep_gemm["note"].startswith("ModuleNotFoundError: ")


def _on_the_device(mode: str, heads: int) -> bench.Arguments:
    return bench.make_arguments(bench.Shape(300, 2400, mode=mode, heads=heads, topk=64, blocks=100), CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("mode", MODES)
def test_on_the_device(mode, heads, monkeypatch):
    monkeypatch.setattr(peers, "SCORES_BYTES", 4 * 2400 * 101)
    a = _on_the_device(mode, heads)
    bench.right(a, bench.prepare_ours(a)(), ascending=True)
    bench.right(a, peers.triton(a)())


@pytest.mark.gpu
def test_quantized_operands_have_the_bytes_of_the_recipe():
    from benches.peers.index_scores import quantized

    x = torch.randn(77, 3, 128, device=CUDA).bfloat16()
    x[5] = 0
    (codes, scales), (wanted, wanted_scales) = quantized(x), fp8.per_row(x)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scales, wanted_scales)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", MODES)
def test_deep_gemm_on_the_device(mode):
    try:
        import deep_gemm  # noqa: F401
    except Exception as error:  # without a CUDA toolkit its import ends in an AssertionError
        pytest.skip(f"requires DeepGEMM (sgl-deep-gemm 0.1.5): {type(error).__name__}: {error}")
    a = _on_the_device(mode, 32)
    bench.right(a, peers.deep_gemm(a)())
