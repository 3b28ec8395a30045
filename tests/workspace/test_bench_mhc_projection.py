"""The mhc_projection bench: its byte formulas, its verification and its peers."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
import torch

from benches import harness
from benches import mhc_projection as bench
from benches.difference import Difference
from benches.peers import hyper_connection as peers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TASKS = (bench.FORWARD, bench.BACKWARD, bench.BOTH, bench.READERS)
LOOSE = dict.fromkeys(bench.BOUNDS, bench.LOOSE)
ROOT = Path(__file__).resolve().parents[2]


def _compiled_without_compiling() -> peers.Connection:
    return functools.partial(peers._plain, collapse=peers._weighted_sum)


def _outputs(task: str, tokens: int = 40, load=bench._hyper_connection) -> tuple[bench.Inputs, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    inputs = bench.make_inputs(tokens, 64, task == bench.READERS, CPU)
    return inputs, bench.prepare_connection(inputs, load, task)()


@pytest.mark.parametrize(
    ("tokens", "forward", "backward", "with_addend"),
    [
        (4096, 0.212, 0.382, 0.550),
        (8192, 0.423, 0.761, 1.096),
        (16384, 0.844, 1.518, 2.189),
        (32768, 1.687, 3.031, 4.374),
    ],
)
def test_byte_formulas_give_the_published_table(tokens, forward, backward, with_addend):
    found = {task: bench.least_bytes(task, tokens, 5120) for task in TASKS}
    assert found.pop(bench.BOTH) == found[bench.FORWARD] + found[bench.BACKWARD]
    assert [nbytes / 1e9 for nbytes in found.values()] == pytest.approx([forward, backward, with_addend], abs=6e-4)
    three_passes = 3 * 2 * tokens * 4 * 5120
    separate, alone = bench.separate_bytes(tokens, 5120), bench.least_bytes(bench.BACKWARD, tokens, 5120)
    assert separate - alone == three_passes


def test_byte_formulas_count_every_term():
    tokens, x, weight = 1, 2 * 4 * 8, 4 * 24 * 32
    small = 16 + weight + 96 + 4 + 96  # pre_mix, weight, logits, rstd, gates
    forward = x + 16 + small
    backward = x + 16 + small + x + weight + 16
    wanted = [forward, backward, forward + backward, backward + x]
    assert [bench.least_bytes(task, tokens, 8) for task in TASKS] == wanted


@pytest.mark.parametrize("task", TASKS)
def test_ours_and_plain_pytorch_are_right(task):
    names = {bench.FORWARD: bench.RESULTS, bench.BOTH: bench.RESULTS + bench.GRADIENTS}.get(task, bench.GRADIENTS)
    ours = [bench._hyper_connection] + ([bench._hyper_connection_streams] if task == bench.READERS else [])
    for load, bounds in [
        *((load, bench.BOUNDS) for load in ours),
        *((load, LOOSE) for load in (peers.eager, _compiled_without_compiling)),
    ]:
        inputs, outputs = _outputs(task, load=load)
        assert tuple(outputs) == names
        assert bench.close_to_float64(inputs, outputs, bounds).startswith("relative errors: ")


@pytest.mark.parametrize("task", [bench.BACKWARD, bench.READERS])
def test_a_backward_can_run_again(task):
    streams = [bench._hyper_connection_streams] if task == bench.READERS else []
    for load in (bench._hyper_connection, peers.eager, *streams):
        inputs = bench.make_inputs(5, 64, task == bench.READERS, CPU)
        call = bench.prepare_connection(inputs, load, task)
        first, second = call(), call()
        assert all(torch.equal(first[name], second[name]) for name in bench.GRADIENTS)


@pytest.mark.parametrize("name", [name for name in bench.BOUNDS if name not in ("grad scale", "grad base")])
@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_one_wrong_element_is_noticed(name, value):
    tokens = bench.VERIFY_TOKENS + 50
    inputs, outputs = _outputs(bench.BOTH, tokens)
    output = outputs[name].clone().detach()
    row = output[-1]  # of the second slice of tokens
    row.view(-1)[1] += max(1.0, row.double().square().mean().sqrt().item()) * value
    with pytest.raises(AssertionError, match=rf"^({name} too far|an element is wrong in {name} \()"):
        bench.close_to_float64(inputs, {**outputs, name: output}, bench.BOUNDS)


@pytest.mark.parametrize("name", ["grad scale", "grad base"])
def test_a_wrong_gradient_of_a_parameter_is_noticed(name):
    inputs, outputs = _outputs(bench.BACKWARD)
    outputs[name][1] *= 1.01
    with pytest.raises(AssertionError, match=f"^{name} too far"):
        bench.close_to_float64(inputs, outputs, bench.BOUNDS)


def test_a_missing_addend_and_another_layout_are_noticed():
    inputs, outputs = _outputs(bench.READERS)
    with pytest.raises(AssertionError, match=r"^grad x too far"):
        bench.close_to_float64(inputs, {**outputs, "grad x": outputs["grad x"] - inputs.addend}, LOOSE)
    with pytest.raises(AssertionError, match=r"grad x is .*float32"):
        bench.close_to_float64(inputs, {**outputs, "grad x": outputs["grad x"].float()}, LOOSE)
    with pytest.raises(AssertionError, match="grad weight is "):
        bench.close_to_float64(inputs, {**outputs, "grad weight": outputs["grad weight"].t()}, LOOSE)


def test_difference_of_known_numbers():
    one = Difference()
    one.add(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 5.0]], dtype=torch.float64))
    one.add(torch.tensor([[0.0, 0.0]]), torch.zeros(1, 2, dtype=torch.float64))
    assert one.relative() == pytest.approx(34**-0.5)
    assert one.worst == pytest.approx(0.2)
    one.add(torch.tensor([[1e-3, 0.0]]), torch.zeros(1, 2, dtype=torch.float64))
    assert one.worst > 1e200
    one.add(torch.tensor([float("nan")]), torch.ones(1, dtype=torch.float64))
    one.add(torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert one.worst != one.worst
    assert one.relative() != one.relative()


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == len(bench.CASES)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]].count(True) == 1
        assert case["work"] < 8 << 20
    readers = next(case for case in record["cases"] if case["label"].endswith(bench.READERS))
    names = [entry["name"] for entry in readers["candidates"]]
    assert names == ["hyper_connection_streams", "hyper_connection, then an add", "eager", harness.COPY]
    assert {"tile-kernels", "liger-kernel"} <= record["versions"].keys()


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    assert [case.label for case in full[:4]] == [f"16384 x 4 x 5120, {task}" for task in TASKS]
    sizes = {case.label.split(",")[0] for case in full}
    assert {"16384 x 4 x 4096", "16384 x 4 x 7168", "131072 x 4 x 5120", "1 x 4 x 5120"} < sizes
    peers_at = {case.label: [c.name for c in case.candidates][1:-1] for case in full}
    assert peers_at["16384 x 4 x 5120, forward"] == ["eager", "torch.compile", "TileKernels", "Liger"]
    assert peers_at["131072 x 4 x 5120, forward + backward"] == ["eager"]
    for case in full:
        captured = case.label.endswith((f", {bench.FORWARD}", f", {bench.BOTH}"))
        assert all(candidate.graph == captured for candidate in case.candidates[:-1])
    assert [case.label for case in bench.cases(CUDA, True)] == [case.label for case in full[:4]]


def test_absent_peers_fail_and_stop_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tile_kernels", None)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    case = bench._case(bench.READERS, 4, 64, ("TileKernels", "Liger"), CPU)
    record = harness.run(harness.Bench("toy", "Toy", lambda *_: [case]), CPU, rounds=1)
    status = {entry["name"]: entry["status"] for entry in record["cases"][0]["candidates"]}
    assert (status.pop("TileKernels"), status.pop("Liger")) == ("failed", "failed")
    assert set(status.values()) == {"verified"}


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_on_the_device(task):
    torch.manual_seed(0)
    inputs = bench.make_inputs(300, 640, task == bench.READERS, CUDA)
    ours = bench._hyper_connection_streams if task == bench.READERS else bench._hyper_connection
    for load, bounds in ((ours, bench.BOUNDS), (peers.eager, LOOSE), (peers.compiled, LOOSE)):
        call = bench.prepare_connection(inputs, load, task)
        bench.close_to_float64(inputs, call(), bounds)
        bench.close_to_float64(inputs, call(), bounds)


def test_the_errors_in_the_readme_are_those_of_the_record():
    record = json.loads((ROOT / "benches/results/mhc_projection.json").read_text())
    readme = (ROOT / "packages/mhc-projection/README.md").read_text()
    label = f"{bench.MAIN[0]} x {bench.HC} x {bench.MAIN[1]}, {bench.BOTH}"
    case = next(case for case in record["cases"] if case["label"] == label)
    errors = {}
    for entry in case["candidates"]:
        if entry["status"] == "verified" and entry["note"].startswith("relative errors: "):
            pairs = entry["note"].removeprefix("relative errors: ").split(", ")
            errors[entry["name"]] = dict(pair.rsplit(" ", 1) for pair in pairs)
    assert set(errors["hyper_connection"]) == {*bench.RESULTS, *bench.GRADIENTS}
    assert f"| relative error of | {' | '.join(errors)} |" in readme
    for name in errors["hyper_connection"]:
        assert f"| {name} | {' | '.join(found[name] for found in errors.values())} |" in readme
