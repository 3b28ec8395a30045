"""The dsa_sparse_attn_bwd bench: its slots, operation counts, verification and peer."""

from __future__ import annotations

import dataclasses
import re
import sys
from types import ModuleType

import pytest
import torch
from dsa_sparse_attn_bwd import reference

from benches import dsa_sparse_attn_bwd as bench
from benches import harness
from benches.peers import sparse_attention as peers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOY = bench.Shape((37, 1, 90), heads=16, window=8, topk=6)
RANK = bench.Shape((30, 500), ranks=5, heads=16, window=8, topk=6)


@pytest.fixture
def inputs() -> bench.Inputs:
    return bench.make_inputs(TOY, CPU)


@pytest.mark.parametrize(
    ("shape", "millions", "teraflops"),
    [
        (bench.Shape((8192,)), 4.97, 1.63),
        (bench.Shape((16384,)), 10.22, 3.35),
        (bench.Shape((6000, 3000, 4384, 3000)), 9.40, 3.08),
    ],
)
def test_operations_are_those_of_the_published_workloads(shape, millions, teraflops):
    assert shape.slots() / 1e6 == pytest.approx(millions, abs=5e-3)
    assert shape.flops() / 1e12 == pytest.approx(teraflops, abs=5e-3)


def test_operations_of_the_other_workloads():
    assert bench.RANK.slots() == 16384 * 640
    assert (bench.RANK.queries, bench.RANK.rows) == (16384, 131072 + 65536)
    window = bench.SHAPES[-2]
    assert window.slots() == 8192 * 128 - 128 * 127 // 2
    assert (window.queries, window.rows) == (8192, 8192)


@pytest.mark.parametrize("picks", [bench.RANDOM, bench.LOCAL])
@pytest.mark.parametrize("shape", [TOY, RANK, dataclasses.replace(TOY, topk=0)])
def test_slots_are_the_window_and_readable_entries_of_the_document(shape, picks):
    shape = dataclasses.replace(shape, picks=picks)
    indices = bench.make_indices(shape, CPU)
    assert (indices.dtype, indices.shape) == (torch.int32, (shape.queries, 8 + shape.topk))
    assert int((indices >= 0).sum()) == shape.slots()
    token = entry = 0
    expected = []
    for tokens in shape.documents:
        for t in range(tokens):
            window = list(range(token + max(0, t - 7), token + t + 1))
            readable = range(shape.tokens + entry, shape.tokens + entry + (t + 1) // 2)
            expected.append((window, readable))
        token, entry = token + tokens, entry + tokens // 2
    for row, (window, readable) in zip(indices.tolist(), expected[-shape.queries :], strict=True):
        assert row[:8] == window + [-1] * (8 - len(window))
        count = min(len(readable), shape.topk)
        picked = row[8 : 8 + count]
        assert row[8 + count :] == [-1] * (shape.topk - count)
        assert len(set(picked)) == count
        assert set(picked) <= set(readable)
    assert indices.max() < shape.rows


def test_random_picks_are_uniform():
    shape = bench.Shape((4000,), ranks=4, topk=40)
    picks = bench.make_indices(shape, CPU)[:, 128:] - 4000
    assert picks.min() >= 0
    expected = (1500 / (torch.arange(3001, 4001) // 2)).mean()  # 1,500 to 2,000 entries are readable
    assert (picks < 1500).float().mean() == pytest.approx(expected.item(), abs=0.015)
    first, second = (set(picks[i].tolist()) for i in (500, 501))
    assert len(first & second) < 12


@pytest.mark.parametrize(("apart", "share"), [(1, 63 / 64), (16, 0.75), (32, 0.5), (64, 0.015)])
def test_neighbours_share_local_picks(apart, share):
    shape = bench.Shape((40000,), ranks=50, picks=bench.LOCAL, topk=256)
    picks = bench.make_indices(shape, CPU)[:, 128:].tolist()
    pairs = list(zip(picks, picks[apart:], strict=False))
    found = sum(len(set(one) & set(other)) for one, other in pairs) / (256 * len(pairs))
    assert found == pytest.approx(share, abs=0.02)


def test_forward(inputs):
    q, kv, out, _, lse, indices, sinks, scale = inputs.arguments
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    for t in (0, 1, 36, 37, 38, 127):
        k = kv[indices[t][indices[t] >= 0].long()].double()
        scores = scale * q[t].double() @ k.T
        assert torch.allclose(lse[t].double(), scores.logsumexp(dim=1), rtol=0, atol=1e-5)
        p = torch.softmax(torch.cat([scores, sinks.double()[:, None]], dim=1), dim=1)[:, :-1]
        assert torch.allclose(out[t].double(), p @ k, rtol=2**-8, atol=1e-5)


def test_all_ways_are_right(inputs):
    for candidate in bench._ours():
        report = (candidate.verify or bench.close)(inputs, candidate.prepare(inputs)())
        found = re.findall(r"(dq|dkv|dsinks) (\d\.\d\de[+-]\d\d)", report)
        assert [name for name, _ in found] == [*bench.RESULTS, *bench.RESULTS]
        assert [float(error) for _, error in found] == pytest.approx([1.7e-3, 1.7e-3, 0, 2.3e-3, 2.3e-3, 0], abs=6e-4)
    assert report.endswith("; the same bits again")


@pytest.mark.parametrize("name", bench.RESULTS)
def test_a_wrong_result_is_noticed(name, inputs):
    outputs = dict(zip(bench.RESULTS, bench.prepare(inputs)(), strict=True))

    def verdict(wrong: torch.Tensor) -> str:
        with pytest.raises(AssertionError) as caught:
            bench.close(inputs, tuple({**outputs, name: wrong}.values()))
        return str(caught.value)

    assert verdict(outputs[name] * 1.008).startswith(f"{name} too far from the definition; relative errors: dq ")
    assert verdict(outputs[name].clone().index_fill_(0, torch.tensor([3]), torch.nan)).startswith(f"{name} too far")
    assert re.match(rf"{name} is \(.*\) torch.float64, expected", verdict(outputs[name].double()))
    assert re.match(rf"{name} is \(.*\) torch", verdict(outputs[name][1:]))


def test_one_wrong_row_is_noticed():
    expected = torch.randn(20000, 512)
    found = expected.clone()
    found[7] *= 1.05
    whole, worst, nonzero = bench.errors(found, expected)
    assert whole == pytest.approx(0.05 / 20000**0.5, rel=0.1)
    assert (worst, nonzero) == (pytest.approx(0.05, rel=1e-3), 0)
    assert whole < bench.BOUNDS["dq"] < bench.ROW_BOUND < worst


def test_small_rows_have_no_bound_of_their_own():
    expected = torch.randn(100, 512)
    expected[:60] = 0  # such as half of the rows of a last rank: the median is of the others
    expected[98] *= 0.04
    expected[99] *= 0.06
    found = expected.clone()
    found[98] *= 2
    assert bench.errors(found, expected)[1:] == (0, 0)
    found[99] *= 2
    assert bench.errors(found, expected)[1:] == (pytest.approx(1), 0)


def test_rows_that_must_be_zero_are(inputs):
    dq, dkv, dsinks = bench.prepare(inputs)()
    named = inputs.arguments.indices[inputs.arguments.indices >= 0].long().unique()
    others = torch.ones(len(dkv), dtype=torch.bool).index_fill_(0, named, False).nonzero()[:, 0]
    assert len(others)
    bench.close(inputs, (dq, dkv, dsinks))
    for value in (1e-30, torch.nan):
        dkv[others[0], 5] = value
        with pytest.raises(AssertionError, match=r"^dkv: 1 rows that must be zero are not$"):
            bench.close(inputs, (dq, dkv, dsinks))


def test_a_deterministic_call_that_differs_is_noticed(inputs, monkeypatch):
    outputs = bench.prepare(inputs, deterministic=True)()
    flips = iter([0.0, 2.0**-12])

    def other(*args, deterministic):
        assert deterministic
        dq, dkv, dsinks = (t.clone() for t in outputs)
        dsinks[2] *= 1 + next(flips)
        return dq, dkv, dsinks

    monkeypatch.setattr(bench, "sparse_attn_backward_flat", other)
    bench.close_again(inputs, outputs)
    with pytest.raises(AssertionError, match=r"^dsinks differ from one deterministic call to the next$"):
        bench.close_again(inputs, outputs)


def test_arguments_are_those_of_the_definition(inputs):
    """Results of swapped arguments are wrong: the bench gives each to the one that wants it."""
    a = inputs.arguments
    swapped = bench.Inputs(a._replace(q=a.grad_out, grad_out=a.q))
    with pytest.raises(AssertionError, match=r"^dq, dkv, dsinks too far"):
        bench.close(inputs, bench.prepare(swapped)())


@pytest.fixture
def frontend(monkeypatch) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Stands in for cuDNN's frontend, with the definition; the indices and lengths that it was given."""
    seen = []

    def compactify_wrapper(indices):
        length = (indices >= 0).sum(dim=1).int()
        first = (indices < 0).int().argsort(dim=1, stable=True)
        return {"indices": indices.gather(1, first), "topk_length": length}

    def sparse_attention_backward_wrapper(
        q, kv, out, dout, lse, attn_sink, topk_idxs, softmax_scale=None, topk_length=None
    ):
        seen.append((topk_idxs, topk_length))
        if topk_length is not None:
            topk_idxs = topk_idxs.masked_fill(torch.arange(topk_idxs.shape[1]) >= topk_length[:, None], -1)
        found = bench.reference.backward(dout, q, kv, out, lse, topk_idxs, attn_sink, softmax_scale, None)
        dq, dkv, d_sink = (t.to(like.dtype) for t, like in zip(found, (q, kv, attn_sink), strict=True))
        return {"dq": dq, "dkv": dkv, "d_sink": d_sink}

    module = ModuleType("cudnn.deepseek_sparse_attention")
    module.compactify_wrapper = compactify_wrapper
    module.sparse_attention_backward_wrapper = sparse_attention_backward_wrapper
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return seen


def test_cudnn_gets_whole_tiles_of_slots(inputs, frontend):
    for candidate in bench._cudnn():
        bench.close(inputs, candidate.prepare(inputs)())
    (plain, nothing), (compact, length) = frontend
    assert plain.shape == compact.shape == (128, peers.SLOTS)
    assert torch.equal(plain[:, :14], inputs.arguments.indices)
    assert (plain[:, 14:] == -1).all()
    assert nothing is None
    assert length.sum() == TOY.slots()
    assert torch.equal(compact >= 0, torch.arange(128) < length[:, None])


def test_slots_of_the_model_are_not_padded(inputs, frontend):
    indices = torch.full((128, 640), -1, dtype=torch.int32)
    indices[:, 600:614] = inputs.arguments.indices
    wide = bench.Inputs(inputs.arguments._replace(indices=indices))
    bench.close(inputs, peers.cudnn(wide.arguments, compact=True)())
    assert frontend[0][0].shape == (128, 640)
    assert all((shape.window + shape.topk) % peers.SLOTS == 0 for shape in bench.SHAPES)


def test_absent_peers_fail_and_stop_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    case = bench._case(TOY, CPU, bench._cudnn())
    record = harness.run(harness.Bench("toy", "Toy", lambda *_: [case]), CPU, rounds=1)
    entries = record["cases"][0]["candidates"]
    assert [entry["status"] for entry in entries] == ["verified", "verified", "failed", "failed"]
    assert all(entry["note"].startswith("ModuleNotFoundError: ") for entry in entries[2:])


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == len(bench.SHAPES)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]] == [True, True]
        assert case["unit"] == "flops"
        assert case["work"] < 1 << 28
    assert {"nvidia-cudnn-frontend", "dsa-sparse-attn-bwd"} <= record["versions"].keys()


def test_the_definition(inputs):
    (candidate,) = bench._definition(bench.SMALL_CALL)
    outputs = candidate.prepare(inputs)()
    bench.close(inputs, outputs)
    q, kv, out, grad_out, *rest = inputs.arguments
    exact = reference.backward(grad_out, q, kv, out, *rest, None)
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(outputs, exact, strict=True))


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    assert [case.label for case in full] == [
        "8192 queries, 1 document",
        "16384 queries, 1 document",
        "16384 queries, 4 documents",
        "16384 queries, last of 8 ranks",
        "16384 queries, last of 8 ranks, local picks",
        "8192 queries, 1 document, window alone",
        "1024 queries, 1 document",
    ]
    ours = ["dsa_sparse_attn_bwd", "dsa_sparse_attn_bwd, deterministic"]
    names = [*ours, "cuDNN", "cuDNN, compacted slots"]
    assert all([c.name for c in case.candidates] == names for case in full[:-1])
    assert [c.name for c in full[-1].candidates] == [*names, "definition in PyTorch"]
    assert all(case.flops == 10 * 64 * 512 * shape.slots() for case, shape in zip(full, bench.SHAPES, strict=True))
    quick = bench.cases(CUDA, True)
    assert [case.label for case in quick] == [case.label for case in full[:3]]
    assert all([c.name for c in case.candidates] == ours for case in quick)


ON_A_DEVICE = bench.Shape((300, 1, 211, 400), topk=64)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [ON_A_DEVICE, dataclasses.replace(ON_A_DEVICE, ranks=4, picks=bench.LOCAL)])
def test_on_the_device(shape):
    inputs = bench.make_inputs(shape, CUDA)
    assert int((inputs.arguments.indices >= 0).sum()) == shape.slots()
    for candidate in bench._ours():
        (candidate.verify or bench.close)(inputs, candidate.prepare(inputs)())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("compact", [False, True])
def test_cudnn_on_the_device(compact):
    try:
        import cudnn.deepseek_sparse_attention  # noqa: F401
    except Exception as error:  # without libcudnn its import ends in other errors
        pytest.skip(f"requires cuDNN's frontend (nvidia-cudnn-frontend 1.32): {type(error).__name__}: {error}")
    inputs = bench.make_inputs(ON_A_DEVICE, CUDA)
    bench.close(inputs, peers.cudnn(inputs.arguments, compact)())
