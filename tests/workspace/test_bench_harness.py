"""The bench protocol: statistics on known numbers, wrong candidates, the JSON and its plot."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from benches import harness, machine, measure, plotting, table, timing

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ROOT = Path(__file__).resolve().parents[2]


def test_percentiles_of_known_numbers():
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    quantiles = [timing.percentile(values, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)]
    assert quantiles == pytest.approx([1, 1.4, 3, 4.6, 5])
    assert timing.percentile([7.0], 0.9) == 7.0
    assert timing.percentile([1.0, 2.0], 0.5) == 1.5
    figures = timing.statistics_of(values)
    assert figures == pytest.approx({"p10_ms": 1.4, "median_ms": 3.0, "p90_ms": 4.6, "samples": 5})


class Recorder:
    graph = False

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.pending = name, log, 0

    def enqueue(self) -> None:
        self.log.append(self.name)
        self.pending += 1

    def read(self) -> list[float]:
        times, self.pending = [float(self.pending)] * self.pending, 0
        return times


def test_rounds_interleave_and_each_starts_with_another_candidate():
    log: list[str] = []
    timers = {name: Recorder(name, log) for name in "abc"}
    times = timing.Sampler(CPU).sample(timers, rounds=4, per_batch=2)
    assert "".join(log) == "abc" + "bca" + "cab" + "abc"
    assert times == {name: [2.0] * 4 for name in "abc"}


def _fake_queue(monkeypatch, waited) -> list[int]:
    """Has `torch.cuda` answer whether a batch waited for the host; returns the list of sleeps to come."""
    sleeps: list[int] = []
    event = SimpleNamespace(record=lambda: None, query=waited)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleeps.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return sleeps


@pytest.mark.parametrize(("waited", "starved", "kept"), [([True, False], {}, 1), ([True] * 3, {"a": 1}, 1)])
def test_a_batch_that_waited_for_the_host_is_measured_again(monkeypatch, waited, starved, kept):
    answers = iter(waited)
    sleeps = _fake_queue(monkeypatch, lambda: next(answers))
    sampler = timing.Sampler(torch.device("cuda"))
    times = sampler.sample({"a": Recorder("a", [])}, rounds=1)
    assert (sampler.starved, len(times["a"]), len(sleeps)) == (starved, kept, len(waited))
    assert sleeps == sorted(set(sleeps))


def test_batches_that_the_host_cannot_queue_get_shorter(monkeypatch):
    """A queue that takes three calls, one of which ("b") is too long even when alone."""
    log: list[str] = []
    timers = {name: Recorder(name, log) for name in "abc"}
    done = 0

    def waited() -> bool:
        nonlocal done
        batch, done = log[done:], len(log)
        return len(batch) > 3 or batch == ["b"]

    _fake_queue(monkeypatch, waited)
    sampler = timing.Sampler(torch.device("cuda"))
    times = sampler.sample(timers, rounds=4, per_batch=4)
    assert "".join(log[:36]) == 3 * "abcbcacababc"
    assert "".join(log[36:54]) == 3 * "abcbca"
    assert "".join(log[54:]) == "abcbcacababc"
    assert {name: sum(values) for name, values in times.items()} == {"a": 4.0, "b": 4.0, "c": 4.0}
    assert not sampler.starved
    sampler.sample({"b": timers["b"], "c": timers["c"]}, rounds=1)
    assert sampler.sample({"b": timers["b"]}, rounds=2) == {"b": [1.0, 1.0]}
    assert sampler.starved == {"b": 2}


def _toy(verify=None, device=CPU) -> harness.Bench:
    def fails(inputs):
        raise ImportError("no peer in /some/where/site-packages/peer.py")

    candidates = (
        harness.Candidate("double", lambda inputs: lambda: inputs.x * 2, ours=True),
        harness.Candidate("add", lambda inputs: lambda: inputs.x + inputs.x, work=1200),
        harness.Candidate("triple", lambda inputs: lambda: inputs.x * 3),
        harness.Candidate("absent", fails),
        harness.copy_candidate(800),
    )

    def right(inputs, outputs):
        assert torch.equal(outputs, 2 * inputs.x), "not twice the input"
        return "equal"

    def make():
        return SimpleNamespace(x=torch.randn(100, device=device))

    case = harness.Case("100", make, candidates, verify or right, bytes=800)
    return harness.Bench("toy", "Twice", lambda *_: [case])


def test_wrong_and_absent_candidates_are_reported_and_not_timed():
    record = harness.run(_toy(), CPU)
    entries = {entry["name"]: entry for entry in record["cases"][0]["candidates"]}
    status = {name: entry["status"] for name, entry in entries.items()}
    right = dict.fromkeys(("double", "add", harness.COPY), "verified")
    assert status == {**right, "triple": "wrong", "absent": "failed"}
    assert {name for name, entry in entries.items() if "host" in entry} == {"double", "add", harness.COPY}
    assert entries["absent"]["note"] == "ImportError: no peer in <path>"
    figures = entries["add"]["host"]
    assert figures["rate"] == pytest.approx(1200 / figures["median_ms"] / 1e6)
    text = table.text(record)
    assert "100, triple: WRONG, not timed: not twice the input" in text
    assert "no figures to quote" in text


@pytest.mark.parametrize(
    ("nbytes", "buffer"),
    [(800, 4096), (16384, 8192), (16385, 12288), ((128 << 20) - 2, 64 << 20), ((128 << 20) + 2, 66 << 20)],
)
def test_a_copy_is_of_a_length_that_the_driver_copies_fast(nbytes, buffer):
    inputs = SimpleNamespace(x=torch.zeros(1))
    candidate = harness.copy_candidate(nbytes)
    assert candidate.work == 2 * buffer
    source, target, name = candidate.prepare(inputs)()
    assert (source.numel(), target.numel(), name) == (buffer, buffer, "copy_")
    assert candidate.verify(inputs, (source, target, name)) == "equal, by copy_"
    target[-1] += 1
    with pytest.raises(AssertionError, match="the copy differs"):
        candidate.verify(inputs, (source, target, name))


class FakeTimer:
    """Takes `milliseconds[call]` for every call."""

    milliseconds: ClassVar[dict[str, float]] = {}

    def __init__(self, call, before, inner):
        self.call, self.inner, self.rounds = call, inner, 0

    def enqueue(self) -> None:
        self.rounds += 1

    def read(self) -> list[float]:
        rounds, self.rounds = self.rounds, 0
        return [self.milliseconds[self.call]] * (rounds * self.inner)


class FakeGraphTimer(FakeTimer):
    graph = True

    def __init__(self, call, before, inner):
        if call == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing")
        super().__init__(call, before, inner)


class FakeEventTimer(FakeTimer):
    graph = False


@pytest.mark.parametrize("short", [False, True])
def test_short_calls_are_timed_in_graphs_where_they_can(monkeypatch, short):
    monkeypatch.setattr(FakeTimer, "milliseconds", {"quick": 0.01 if short else 0.1, "refuses": 0.2, "never": 0.3})
    monkeypatch.setattr(measure, "EventTimer", FakeEventTimer)
    monkeypatch.setattr(measure, "GraphTimer", FakeGraphTimer)
    monkeypatch.setattr(measure, "L2Flush", lambda device: None)
    monkeypatch.setattr(measure, "Sampler", lambda device: timing.Sampler(CPU))
    monkeypatch.setattr(measure, "host_microseconds", lambda call: 5.0)
    monkeypatch.setattr(measure, "peak_bytes", lambda call: 4096)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {name: name for name in FakeTimer.milliseconds}
    entries = [{"name": name} for name in calls]
    measure._time(calls, {"quick", "refuses"}, entries, torch.device("cuda"), quick=True, rounds=7)
    quick, refuses, never = entries
    assert [entry["flushed"]["graph"] for entry in entries] == [short, False, False]
    assert [entry["warm"]["graph"] for entry in entries] == [short, False, False]
    assert ("not captured: RuntimeError: operation" in refuses.get("graph_problem", "")) == short
    assert quick["flushed"]["samples"] == (35 if short else 7)
    assert never["warm"]["median_ms"] == 0.3
    assert (never["host_us"], never["peak_bytes"]) == (5.0, 4096)


def test_cpu_run_writes_nothing_unless_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(harness, "HERE", tmp_path)
    assert harness.main(_toy(), []) == 0
    captured = capsys.readouterr()
    assert "toy sizes" in captured.err
    assert "double" in captured.out
    assert not list(tmp_path.iterdir())


def test_a_wrong_candidate_of_ours_fails_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def wrong(inputs, outputs):
        raise AssertionError("no")

    assert harness.main(_toy(verify=wrong), []) == 1


def test_json_and_plot_round_trip(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.main(_toy(), ["--output", str(tmp_path), "--rounds", "4"]) == 0
    record = json.loads((tmp_path / "toy.json").read_text())
    assert record["cases"][0]["candidates"][0]["host"]["samples"] == 4
    assert "/" not in json.dumps(record)
    drawn = (tmp_path / "toy.svg").read_bytes()
    (tmp_path / "toy.svg").unlink()
    assert harness.main(_toy(), ["--output", str(tmp_path), "--plot"]) == 0
    assert (tmp_path / "toy.svg").read_bytes() == drawn


def _gpu_record() -> dict:
    """What a GPU run leaves, with round numbers: 1 GB of least work at a ceiling of 4,000 GB/s, a floor of 0.25 ms."""

    def entry(name, milliseconds, work, ours=False):
        figures = {"p10_ms": milliseconds * 0.9, "median_ms": milliseconds, "p90_ms": milliseconds * 1.2}
        states = {state: {**figures, "samples": 9, "graph": state == "warm"} for state in ("flushed", "warm")}
        return {"name": name, "ours": ours, "work": work, "status": "verified", "note": "equal", **states}

    entries = [entry("one pass", 0.5, 10**9, True), entry("two", 0.75, 1.5e9), entry(harness.COPY, 0.4, 10**9)]
    case = {"label": "8 x 8, RoPE", "work": 10**9, "unit": "bytes", "clocks": None, "candidates": entries}
    entries[0]["host_us"] = 250.4
    record = {"bench": "toy", "title": "Toy", "toy": False, "cases": [case], "device": {"name": "GPU"}, "versions": {}}
    record["clocks"] = {"during": {"sm_mhz": 1980.0, "power_w": 400.0}}
    record["ceilings"] = {"gb_per_s": {"before": 3900.0, "after": 4100.0, "mean": 4000.0}}
    measure.add_shares(record)
    return record


def test_shares_of_known_times():
    record = _gpu_record()
    ours, two, copy = (entry["flushed"] for entry in record["cases"][0]["candidates"])
    assert (ours["rate"], ours["share_of_ceiling"], ours["times_floor"]) == pytest.approx((2000, 0.5, 2.0))
    assert (two["rate"], two["share_of_ceiling"], two["times_floor"]) == pytest.approx((2000, 0.5, 3.0))
    assert copy["share_of_same_size_copy"] == pytest.approx(1.0)
    assert ours["share_of_same_size_copy"] == pytest.approx(0.8)


def test_table_and_plot_of_a_gpu_record(tmp_path):
    record = _gpu_record()
    text = table.text(record)
    assert "sm_mhz 1980" in text
    assert "8 x 8, RoPE  * one pass" in text
    line = next(line for line in text.splitlines() if "* one pass" in line and "flushed" in line)
    assert (
        " ".join(line.split("flushed")[1].split()) == "0.5000 0.4500 0.6000 2000.0 GB/s 50.0 % 80.0 % 2.00 events 250 -"
    )
    record["ceilings"]["tflop_per_s"] = {"before": 1.0, "after": 1.0, "mean": 1250.0, "product": "float8_e4m3fn"}
    assert "in this run: 4000 GB/s, 1250 TFLOP/s (float8_e4m3fn product)" in table.text(record)
    assert table.markdown(record).endswith("| 8 x 8, RoPE | 0.5000 | 0.7500 | 0.4000 | 2000 GB/s | 50.0 % | 80.0 % |")
    alone = {**record, "cases": [{**case, "candidates": case["candidates"][:2]} for case in record["cases"]]}
    assert table.markdown(alone).endswith("| 8 x 8, RoPE | 0.5000 | 0.7500 | 2000 GB/s | 50.0 % |")
    alone["cases"][0]["candidates"][0]["peak_bytes"] = 2_600_000
    assert table.markdown(alone).endswith("| 8 x 8, RoPE | 0.5000 | 0.7500 | 2000 GB/s | 50.0 % | 3 |")
    assert "events    250      2.6" in table.text(alone)
    plotting.draw(record, tmp_path / "toy.svg")
    drawn = (tmp_path / "toy.svg").read_text()
    assert drawn.startswith("<?xml")


def test_clock_readings():
    assert machine._parse_clocks("1980, 3201, 412.50, 41\n") == {
        "sm_mhz": 1980.0,
        "memory_mhz": 3201.0,
        "power_w": 412.5,
        "celsius": 41.0,
    }
    assert machine._parse_clocks("1980, [N/A], 400.0, 41") == {"sm_mhz": 1980.0, "power_w": 400.0, "celsius": 41.0}
    log = machine.ClockLog(CPU)
    with log:
        pass
    assert log.summary() is None
    log._log = [(1.0, {"sm_mhz": 100.0}), (2.0, {"sm_mhz": 200.0}), (3.0, {"sm_mhz": 300.0})]
    assert log.between(1.5, 3.5) == {"sm_mhz": 250.0}
    assert log.between(9.0, 9.1) == {"sm_mhz": 300.0}


@pytest.mark.gpu
class TestOnDevice:
    def test_timers_agree_with_a_copy_of_known_size(self):
        device = torch.device("cuda", torch.cuda.current_device())
        source = torch.empty(64 << 20, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        calls = {"copy": lambda: target.copy_(source)}
        flush = timing.L2Flush(device)
        assert flush.nbytes >= 2 * torch.cuda.get_device_properties(device).L2_cache_size
        timers = {
            "events": timing.EventTimer(calls["copy"], flush, inner=1),
            "graph": timing.GraphTimer(calls["copy"], flush, inner=5),
        }
        sampler = timing.Sampler(device)
        sampler.sample(timers, 3)
        times = sampler.sample(timers, 10)
        assert (len(times["events"]), len(times["graph"])) == (10, 50)
        events, graph = (timing.percentile(times[name], 0.5) for name in ("events", "graph"))
        assert events == pytest.approx(graph, rel=0.2)
        assert 0.01 < graph < 1.0

    def test_products_of_fewer_bits_are_faster(self):
        device = torch.device("cuda", torch.cuda.current_device())
        bf16, fp8 = (machine.matmul_ceiling(device, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn))
        assert 300 < bf16 < 1000
        assert 1.3 * bf16 < fp8 < 2000

    @pytest.mark.parametrize("nbytes", [4096, 12288, 66 << 20])
    def test_copy_kernel(self, nbytes):
        from benches.peers.plain_copy import copy_into

        source = torch.randint(256, (nbytes,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        copy_into(source, target)
        assert torch.equal(source, target)

    def test_toy_bench(self, tmp_path):
        assert harness.main(_toy(device="cuda"), ["--output", str(tmp_path), "--quick"]) == 0
        record = json.loads((tmp_path / "toy.json").read_text())
        entry = record["cases"][0]["candidates"][0]
        assert {"flushed", "warm", "host_us", "peak_bytes"} <= entry.keys()
        assert entry["flushed"]["graph"], entry.get("graph_problem")


RESULTS = sorted((ROOT / "benches/results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_committed_figures_are_those_of_the_committed_code(path):
    """After a change of a kernel, its bench must run again: `uv run python -m benches.<kernel>` on a Hopper GPU."""
    record = json.loads(path.read_text())
    bench = importlib.import_module(f"benches.{path.stem}").BENCH
    assert record["code"] == machine.code_digest(bench.wheels + bench.packages)
    assert (record["device"]["capability"], record["toy"], record["quick"]) == ("9.0", False, False)
    assert [case["label"] for case in record["cases"]] == [case.label for case in bench.cases(CUDA, False)]
    for case in record["cases"]:
        assert all(entry["status"] == "verified" for entry in case["candidates"] if entry["ours"])
    assert (path.parents[1] / "plots" / f"{path.stem}.svg").exists()
    assert table.markdown(record) in (ROOT / "packages" / bench.wheels[-1] / "README.md").read_text()


def test_the_digest_sees_code_and_nothing_else(tmp_path, monkeypatch):
    package = tmp_path / "some_wheel"
    (package / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "launch.py", "kernels/a.py"):
        (package / name).write_text('"""Words."""\n\nx = "words"  # a comment\n')
    monkeypatch.syspath_prepend(tmp_path)

    def digest():
        return machine.code_digest(("some-wheel",))

    first = digest()
    (package / "kernels/a.py").write_text('"""Other words."""\nx   = "words"\n')
    (package / "__init__.py").write_text("y = 1\n")
    assert digest() == first
    seen = {first}
    for name in ("launch.py", "kernels/a.py", "kernels/b.py", "b_device.py"):
        (package / name).write_text('x = "more words"\n')
        seen.add(digest())
    assert len(seen) == 5


def test_the_digest_of_a_package_in_a_wheel_is_its_own(tmp_path, monkeypatch):
    inner = tmp_path / "some_wheel/inner"
    (inner / "kernels").mkdir(parents=True)
    for path in (inner.parent / "plan.py", inner.parent / "__init__.py", inner / "__init__.py"):
        path.write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_wheel", raising=False)  # and what is imported here is gone after the test

    def digests():
        return machine.code_digest(("some-wheel",)), machine.code_digest(("some-wheel", "some_wheel.inner"))

    seen = [digests()]
    for name in ("plan.py", "launch.py", "kernels/a.py"):
        (inner / name).write_text("y = 2\n")
        seen.append(digests())
    assert len({outer for outer, _ in seen}) == 1
    assert len({both for _, both in seen}) == 4
    (inner.parent / "plan.py").write_text("x = 2\n")
    assert not {*digests()} & {digest for pair in seen for digest in pair}
