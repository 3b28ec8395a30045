"""The FP8 bench of moe_experts: operations, cases and verification of its ways, with a stand-in for DeepGEMM."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch

from benches import harness
from benches import moe_experts as bf16
from benches import moe_experts_fp8 as bench
from benches import moe_fp8_stages as stages
from benches.moe_products import SIZES
from tests.support import fp8_experts

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPE = 3, 450, 256, 384  # experts, rows, hidden, inner


@pytest.fixture
def inputs() -> stages.Inputs:
    return bench.make_inputs(*SHAPE, CPU)


@pytest.fixture
def batches() -> bench.MicroBatches:
    return bench.make_micro_batches(*SHAPE, CPU)


@pytest.fixture
def deep_gemm(monkeypatch) -> None:
    fp8_experts.replace_deep_gemm(monkeypatch)


def test_operations():
    found = {case.label: case.flops for case in bench.cases(CUDA, False)}
    one = 2 * sum(bf16.group_sizes(4, bench.ROWS)) * 5120 * 2304
    assert found["EP=96, 4 experts, forward"] == 3 * one
    assert found["EP=96, 4 experts, forward + backward"] == 9 * one
    quarter = sum(bf16.group_sizes(4, bench.ROWS // 4))
    assert found["EP=96, 4 experts, 4 micro-batches"] == 4 * 9 * 2 * quarter * 5120 * 2304
    assert sum(found[f"EP=96, {stages.LABELS[name]}"] for name in SIZES) == 9 * one
    assert all(found[f"EP=96, {label}"] is None for name, label in stages.LABELS.items() if name not in SIZES)


@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_steps_are_right(task, inputs, deep_gemm):
    prepared = [functools.partial(bench.prepare, task, fp8) for fp8 in (True, False)]
    for way in (*prepared, functools.partial(bench.prepare_deep_gemm, task, compiled=False)):
        outputs = way(inputs)()
        assert list(outputs) == list(bench.RESULTS[: 1 if task == bench.FORWARD else 5])
        bf16.close(inputs, outputs, bench.BOUNDS)


@pytest.mark.parametrize("name", bench.RESULTS)
def test_a_wrong_result_is_noticed(name, inputs):
    (case,) = (case for case in bench.cases(CPU, True) if case.label.endswith(bench.BOTH))
    outputs = bench.prepare(bench.BOTH, True, inputs)()
    case.verify(inputs, outputs)
    outputs[name] = outputs[name] * 1.2
    with pytest.raises(AssertionError, match=f"^{name} too far from the definition"):
        case.verify(inputs, outputs)
    with pytest.raises(AssertionError, match=rf"^{name} is \(.*float32\), expected"):
        case.verify(inputs, {**outputs, name: outputs[name].float()})


def test_micro_batches_differ_in_their_routing():
    batches = bench.make_micro_batches(5, 4000, 128, 256, CPU)
    sizes = [batch.counts.tolist() for batch in batches.batches]
    assert len({tuple(one) for one in sizes}) == len(sizes) == bench.BATCHES
    assert all(sorted(one) == sorted(bf16.group_sizes(5, 1000)) for one in sizes)
    assert all(sum(one) == len(batch.x) == len(batch.dout) for one, batch in zip(sizes, batches.batches, strict=True))
    assert not torch.equal(batches.batches[0].x, batches.batches[1].x)
    assert all(t.requires_grad for t in (*batches.weights, *(batch.x for batch in batches.batches)))
    shapes = [(4 * sum(sizes[0]), 128)] * 2 + [(5, 256, 128)] * 2 + [(5, 128, 256)]
    assert [tuple(t.shape) for t in batches.expected] == shapes


WAYS = {bench.OURS: torch.bfloat16, bench.ANEW: torch.float32, bench.CACHED: torch.float32}  # of sums of gradients


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_right_and_again(way, batches):
    (case,) = (case for case in bench.cases(CPU, True) if case.label.endswith(bench.MICRO))
    (candidate,) = (one for one in case.candidates if one.name == way)
    dtype = WAYS[way]
    verify, call = candidate.verify or case.verify, candidate.prepare(batches)
    note, found = verify(batches, call()), call()
    assert verify(batches, found) == note
    for name in bench.RESULTS:
        value = found[name]
        wrong = value[1:] + value[:1] if isinstance(value, list) else value * 1.2
        with pytest.raises(AssertionError, match=f"^{name} too far from the definition"):
            verify(batches, {**found, name: wrong})
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(AssertionError, match=f"^grad up is {other}, expected {dtype}"):
        verify(batches, {**found, "grad up": found["grad up"].to(other)})


@pytest.mark.parametrize("cached", [False, True])
def test_weights_are_quantised_once_if_they_are_kept(cached, batches, monkeypatch):
    calls = []
    quantize = bench.moe_experts_fp8_quantize_weights
    monkeypatch.setattr(bench, "moe_experts_fp8_quantize_weights", lambda *w: calls.append(1) or quantize(*w))
    call = bench.with_fp32_sums(batches, cached)
    assert [len(calls), call() and len(calls), call() and len(calls)] == ([0, 1, 2] if cached else [0, 4, 8])


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == 3 * len(bench.LOADS)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]] == (
            [True] * 3 if bench.MICRO in case["label"] else [True, False]
        )
        assert all(entry["note"].startswith("relative errors: out ") for entry in case["candidates"])
        assert case["unit"] == "flops"
    assert "sgl-deep-gemm" in record["versions"]


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    labels = [case.label for case in full]
    assert len(set(labels)) == len(labels) == len(bench.LOADS) * (3 + len(stages.LABELS))
    names = {case.label: [c.name for c in case.candidates] for case in full}
    steps = ["moe_experts, FP8", "moe_experts, bf16", "DeepGEMM, casts by torch.compile"]
    assert names["EP=8, 48 experts, forward"] == steps
    assert names["EP=8, 48 experts, forward + backward"] == [*steps, "its six products alone"]
    assert names["EP=8, 48 experts, 4 micro-batches"] == list(WAYS)
    for name, label in stages.LABELS.items():
        sums = ["moe_experts, FP8, fp32 sums"] if name.endswith("_grad") else []
        others = [*sums, "DeepGEMM"] if name in SIZES else ["torch.compile", harness.COPY]
        assert names[f"EP=8, {label}"] == ["moe_experts, FP8", *others]
    assert [case.label for case in bench.cases(CUDA, True)] == labels[:14]
    assert all(candidate.ours == ("FP8" in candidate.name) for case in full for candidate in case.candidates)


def test_the_errors_in_the_readme_are_the_measured_ones():
    record = json.loads((ROOT / "benches/results/moe_experts_fp8.json").read_text())
    (case,) = (case for case in record["cases"] if case["label"] == "EP=96, 4 experts, forward + backward")
    readme = (ROOT / "packages/moe-experts/README.md").read_text()
    for entry in case["candidates"][:3]:
        errors = re.findall(r"\d\.\de-\d\d", entry["note"])
        assert len(errors) == len(bench.RESULTS)
        assert f"| {entry['name']} | {' | '.join(errors)} |" in readme


def test_micro_batches_in_the_readme_are_the_measured_ones():
    record = json.loads((ROOT / "benches/results/moe_experts_fp8.json").read_text())
    readme = (ROOT / "packages/moe-experts/README.md").read_text()
    found = [
        [candidate["flushed"]["median_ms"] for candidate in case["candidates"]]
        for case in record["cases"]
        if case["label"].endswith(bench.MICRO)
    ]
    for times in zip(*found, strict=True):
        assert f", ms | {' | '.join(f'{ms:.2f}' for ms in times)} |" in readme
    saved = [f"{anew - cached:.2f}" for _, anew, cached in found]
    assert f"| saved by the cache, ms | {' | '.join(saved)} |" in readme


@pytest.fixture
def on_gpu() -> stages.Inputs:
    return bench.make_inputs(3, 1000, 256, 384, CUDA)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_steps_by_deep_gemm_on_the_device(task, on_gpu):
    fp8_experts.needs_deep_gemm()
    bf16.close(on_gpu, bench.prepare_deep_gemm(task, on_gpu, compiled=True)(), bench.BOUNDS)


@pytest.mark.gpu
def test_our_steps_on_the_device(on_gpu):
    bf16.close(on_gpu, bench.prepare(bench.BOTH, True, on_gpu)(), bench.BOUNDS)
    batches = bench.make_micro_batches(3, 1000, 256, 384, CUDA)
    bench.summed(batches, bench.by_autograd(batches)(), torch.bfloat16)
    for cached in (False, True):
        bench.summed(batches, bench.with_fp32_sums(batches, cached)(), torch.float32)
