"""The moe_experts bench: its loads, operation counts, verification and peers."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from benches import harness, moe_products
from benches import moe_experts as bench
from benches.peers import experts as peers

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def inputs() -> bench.Inputs:
    return bench.make_inputs(4, 200, 64, 40, CPU)


def _plain(o: peers.Operands, name: str) -> torch.Tensor:
    parts = [slice(end - n, end) for n, end in zip(o.counts.tolist(), o.counts.cumsum(0).tolist(), strict=True)]
    if name in o.sums_of_rows():
        a, b = o.sums_of_rows()[name]
        return torch.stack([(a[rows].double().T @ b[rows].double()).bfloat16() for rows in parts])
    rows, weights = o.rows_and_weights()[name]
    return torch.cat([(rows[part].double() @ w.double()).bfloat16() for part, w in zip(parts, weights, strict=True)])


@pytest.mark.parametrize(("experts", "rows"), [(4, 98304), (8, 98304), (48, 98304), (4, 192)])
def test_sizes_of_the_groups(experts, rows):
    sizes = bench.group_sizes(experts, rows)
    assert len(sizes) == experts
    assert rows <= sum(sizes) < rows + experts * bench.MULTIPLE
    assert all(size % bench.MULTIPLE == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= 2 * bench.SPREAD * rows / experts / (1 - bench.SPREAD) + bench.MULTIPLE
    assert len(set(sizes)) > 1
    assert sizes == bench.group_sizes(experts, rows)


def test_operations():
    found = {case.label: case.flops for case in bench.cases(CUDA, False)}
    rows = sum(bench.group_sizes(4, bench.ROWS))
    one = 2 * rows * 5120 * 2304
    assert found["EP=96, 4 experts, forward"] == 3 * one
    assert found["EP=96, 4 experts, forward + backward"] == 9 * one
    parts = [found[f"EP=96, {label}"] for label in moe_products.LABELS.values()]
    assert sum(parts) == 9 * one
    assert found["EP=96, gate and up with SwiGLU"] / 1e12 == pytest.approx(4.64, abs=5e-3)


def test_shares_beyond_the_limit():
    """As a trained model has them, about."""
    inputs = bench.make_inputs(2, 400, 256, 128, CPU)
    _, gate, up = bench.reference.forward(*(t.detach() for t in inputs.leaves), inputs.counts, float("inf"))
    assert (gate > bench.LIMIT).float().mean() == pytest.approx(0.08, abs=0.02)
    assert (up.abs() > bench.LIMIT).float().mean() == pytest.approx(0.15, abs=0.03)


@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_ours_and_the_unfused_way_are_right(task, inputs):
    for candidate in (bench._ours(task), *bench._peers(task, cuda=False)):
        outputs = candidate.prepare(inputs)()
        assert list(outputs) == list(bench.RESULTS[: len(outputs)])
        assert len(outputs) == (1 if task == bench.FORWARD else 5)
        (candidate.verify or (lambda *a: bench.close(*a, bench.BOUNDS)))(inputs, outputs)


@pytest.mark.parametrize("name", bench.RESULTS)
def test_a_wrong_result_is_noticed(name, inputs):
    outputs = bench._ours(bench.BOTH).prepare(inputs)()
    outputs[name] = outputs[name] * 1.03
    with pytest.raises(AssertionError, match=f"^{name} too far from the definition"):
        bench.close(inputs, outputs, bench.BOUNDS)
    with pytest.raises(AssertionError, match=rf"^{name} is \(.*float32\), expected"):
        bench.close(inputs, {**outputs, name: outputs[name].float()}, bench.BOUNDS)


def test_gate_and_up_swapped_are_noticed(inputs):
    swapped = dataclasses.replace(inputs, gate_proj=inputs.up_proj, up_proj=inputs.gate_proj)
    outputs = bench._ours(bench.BOTH).prepare(swapped)()
    with pytest.raises(AssertionError, match=r"^out, .* too far from the definition"):
        bench.close(inputs, outputs, bench.LOOSE)


@pytest.mark.parametrize("name", moe_products.SIZES)
def test_products_are_verified(name, inputs):
    o = inputs.operands
    out = _plain(o, name)
    assert moe_products.right(name, o, (out, None)).startswith(f"{name} ")
    shuffled = torch.randperm(len(out))
    if name in o.rows_and_weights():
        elsewhere = torch.empty_like(out).index_copy_(0, shuffled, out)
        assert moe_products.right(name, o, (elsewhere, shuffled)).startswith(f"{name} ")
    out[-1] *= 1.1
    out[-1, ..., :3] *= 1.5
    with pytest.raises(AssertionError, match=rf"^{name}: relative error"):
        moe_products.right(name, o, (out if out.ndim == 3 else out.roll(1, 0), None))


def test_all_six_products_are_verified(inputs):
    o = inputs.operands
    found = {name: (_plain(o, name), None) for name in moe_products.SIZES}
    assert all(name in moe_products.all_right(o, found) for name in moe_products.SIZES)
    found["grad_x"] = (found["grad_x"][0].neg(), None)
    with pytest.raises(AssertionError, match=r"^grad_x: relative error"):
        moe_products.all_right(o, found)


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == 2 * len(bench.LOADS)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]] == [True, False]
        assert case["unit"] == "flops"
    assert "sgl-deep-gemm" in record["versions"]


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    labels = [case.label for case in full]
    assert len(set(labels)) == len(labels) == len(bench.LOADS) * (2 + len(moe_products.SIZES))
    names = {case.label: [c.name for c in case.candidates] for case in full}
    unfused = ["moe_experts", "torch._grouped_mm, eager", "torch._grouped_mm, compiled"]
    assert names["EP=8, 48 experts, forward"] == unfused
    assert names["EP=8, 48 experts, forward + backward"] == [*unfused, "its six products alone"]
    assert names["EP=8, down"] == ["moe_experts", "DeepGEMM", "torch._grouped_mm"]
    assert names["EP=8, gradient of down"] == ["moe_experts", "torch._grouped_mm"]
    assert [case.label for case in bench.cases(CUDA, True)] == labels[:8]


def test_the_errors_in_the_readme_are_the_measured_ones():
    record = json.loads((ROOT / "benches/results/moe_experts.json").read_text())
    (case,) = (case for case in record["cases"] if case["label"] == "EP=96, 4 experts, forward + backward")
    readme = (ROOT / "packages/moe-experts/README.md").read_text()
    for entry in case["candidates"][:3]:
        errors = re.findall(r"\d\.\de-\d\d", entry["note"])
        assert len(errors) == len(bench.RESULTS)
        assert f"| {entry['name']} | {' | '.join(errors)} |" in readme


@pytest.mark.gpu
@pytest.mark.parametrize("name", moe_products.SIZES)
def test_products_on_the_device(name):
    o = bench.make_inputs(3, 1000, 256, 136, CUDA).operands
    moe_products.right(name, o, moe_products._ours(o, name)())
    moe_products.right(name, o, peers.by_grouped_mm(o, name)())


@pytest.mark.gpu
@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_steps_on_the_device(task):
    inputs = bench.make_inputs(3, 1000, 256, 136, CUDA)
    bench.close(inputs, bench._ours(task).prepare(inputs)(), bench.BOUNDS)
    for candidate in bench._peers(task, cuda=True)[:1]:
        candidate.verify(inputs, candidate.prepare(inputs)())
