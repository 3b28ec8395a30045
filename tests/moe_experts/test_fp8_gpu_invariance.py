"""FP8: the same bytes in every run, whatever else is in a batch, on any stream, in graphs; memory; no waiting."""

import gc

import pytest
import torch
from moe_experts import (
    moe_experts_fp8_backward_data,
    moe_experts_fp8_weight_grad_accumulate,
    padded_rows,
    plan,
)

from tests.moe_experts import fp8_on_gpu
from tests.moe_experts.fp8_on_gpu import call, gradients, results, step, sums
from tests.moe_experts.inputs import Operands
from tests.moe_experts.on_gpu import HIDDEN, INNER
from tests.support import memory
from tests.support.compare import assert_same_bytes
from tests.support.device import capture, no_sync, repeat_bytes, side_stream

pytestmark = pytest.mark.gpu
SHAPES = {"small": ((70, 0, 129, 3), 9, 256, 384), "wide": ((300, 500, 0, 257), 20, HIDDEN, INNER)}
each_shape = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))


@each_shape
def test_repeats(shape):
    t, dout = fp8_on_gpu.operands(*shape)
    repeat_bytes(lambda: results(t, dout), 20)


def test_shared_memory_is_not_seen():
    """What a program finds there is what an earlier one left: NaN in every slot of the rings and every panel."""
    for hidden in (128, 256, 384, 2560):  # 1, 2, 3 and 20 steps
        t, dout = fp8_on_gpu.operands((130, 0, 300), 1, hidden, 256)
        bad = Operands(*(torch.full_like(v, float("nan")) for v in t[:4]), *t[4:])
        wanted = results(t, dout)
        for _ in range(100):
            results(bad, bad.x)
            fp8_on_gpu.assert_same(results(t, dout), wanted, f"{hidden} channels")


@each_shape
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_poisoned_memory_is_not_seen(shape, pattern, poison):
    t, dout = fp8_on_gpu.operands(*shape)
    wanted, by_autograd = results(t, dout), gradients(t, dout)
    poison(pattern)
    fp8_on_gpu.assert_same(results(t, dout), wanted)
    poison(pattern)
    fp8_on_gpu.assert_same(gradients(t, dout), by_autograd)


def test_deterministic_algorithms_with_filled_memory():
    t, dout = fp8_on_gpu.operands(*SHAPES["small"])
    wanted = results(t, dout)
    torch.use_deterministic_algorithms(True)
    try:
        fp8_on_gpu.assert_same(results(t, dout), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


@each_shape
def test_a_row_and_an_expert_do_not_depend_on_the_others(shape):
    """One expert alone, and the experts the other way round."""
    t, dout = fp8_on_gpu.operands(*shape)
    whole = results(t, dout)
    sizes = t.num_tokens_per_expert.tolist()
    starts = [sum(sizes[:e]) for e in range(len(sizes))]
    for experts in [[e] for e in range(len(sizes))] + [list(range(len(sizes)))[::-1]]:
        rows = torch.cat([torch.arange(starts[e], starts[e] + sizes[e], device=t.x.device) for e in experts])
        part = Operands(t.x[rows], *(w[experts] for w in t[1:4]), t.num_tokens_per_expert[experts], t.swiglu_limit)
        found = results(part, dout[rows])
        for name in ("out", "dx"):
            assert_same_bytes(found[name], whole[name][rows], f"{experts} {name}")
        for name in ("dw13", "dw2"):
            assert_same_bytes(found[name], whole[name][experts], f"{experts} {name}")


def test_a_row_does_not_depend_on_its_place():
    """Rows of an expert in another order, or only some of them."""
    t, dout = fp8_on_gpu.operands((300,), 0)
    whole = results(t, dout)
    for count in (300, 177, 1):
        rows = torch.randperm(300, device=t.x.device)[:count]
        part = t._replace(x=t.x[rows], num_tokens_per_expert=torch.tensor([count], device=t.x.device))
        found = results(part, dout[rows])
        for name in ("out", "dx"):
            assert_same_bytes(found[name], whole[name][rows], name)


@each_shape
def test_inputs_are_not_modified(shape):
    t, dout = fp8_on_gpu.operands(*shape)
    tensors = [v for v in (*t, dout) if isinstance(v, torch.Tensor)]
    before = [v.clone() for v in tensors]
    results(t, dout)
    for now, then in zip(tensors, before, strict=True):
        assert_same_bytes(now, then, "input")


@each_shape
def test_side_stream(shape):
    t, dout = fp8_on_gpu.operands(*shape)
    found = side_stream(lambda *late: gradients(Operands(*late[:-1]), late[-1]), *t, dout)
    fp8_on_gpu.assert_same(found, gradients(t, dout))


@each_shape
def test_graph_of_other_counts(shape):
    """Captured for some routing, replayed for others: all rows on one expert, none, anything between."""
    t, dout = fp8_on_gpu.operands(*shape)
    counts, rows = t.num_tokens_per_expert, len(t.x)
    t.x.normal_()
    dout.normal_()
    graph = capture(lambda: gradients(t, dout))
    for sizes in ([rows, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, rows], counts.tolist()):
        counts.copy_(torch.tensor(sizes))
        t.x.normal_()
        fp8_on_gpu.assert_same(graph.replay(), gradients(t, dout), str(sizes))


def test_graph_without_rows():
    """None of the kernels is launched then, in a capture too; the graph runs what stands beside the calls."""
    t, dout = fp8_on_gpu.operands((0, 0), 0)
    counter = torch.zeros((), device=t.x.device)
    graph = capture(lambda: [counter.add_(1), gradients(t, dout)], warm_up=1)
    _, found = graph.replay()
    fp8_on_gpu.assert_same(found, gradients(t, dout))
    assert counter.item() == 2
    assert not any(found[name].any() for name in ("dw1", "dw3", "dw2"))


def test_graph_with_weight_gradients_on_another_stream():
    """Captured with both streams, and replayed for another routing; each replay adds to the buffers."""
    t, dout = fp8_on_gpu.operands(*SHAPES["small"])
    other, buffers = torch.cuda.Stream(), sums(t)

    def halves():
        current = torch.cuda.current_stream()
        s = step(t)
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *buffers)
        current.wait_stream(other)
        return {"out": s.out, "dx": dx, "kept": (s, columns)}  # what both streams use is kept until the end

    graph = capture(halves)
    t.x.normal_()
    dout.normal_()
    for sizes in ([3, 129, 0, 70], [0, 0, 211, 0], [70, 0, 129, 3]):
        t.num_tokens_per_expert.copy_(torch.tensor(sizes))
        for buffer in buffers:
            buffer.zero_()
        found, wanted = graph.replay(), results(t, dout)
        torch.cuda.synchronize()
        found |= dict(zip(("dw13", "dw2"), (b + 0.0 for b in buffers), strict=True))
        wanted |= {name: wanted[name] + 0.0 for name in ("dw13", "dw2")}  # 0 + -0 is +0
        fp8_on_gpu.assert_same(found, wanted, str(sizes), ("out", "dx", "dw13", "dw2"))


@each_shape
def test_two_streams_at_once(shape):
    calls = [fp8_on_gpu.operands(*shape) for _ in range(2)]
    wanted = [gradients(*one) for one in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        for (t, dout), stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(gradients(t, dout))
        torch.cuda.synchronize()
        for got, want in zip(found, wanted, strict=True):
            fp8_on_gpu.assert_same(got, want)


@each_shape
def test_nothing_synchronises(shape):
    t, dout = fp8_on_gpu.operands(*shape)
    gradients(t, dout)
    with no_sync():
        gradients(t, dout)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weight_gradients_go_on_another_stream(deterministic):
    """The forward and the first half of the backward on a stream where x comes late, the second half on another one."""
    t, dout = fp8_on_gpu.operands(*SHAPES["wide"])
    wanted = results(t, dout)
    late = t._replace(x=torch.full_like(t.x, float("nan")))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    dw13, dw2 = sums(t)
    torch.use_deterministic_algorithms(deterministic)
    try:
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(20_000_000)
            late.x.copy_(t.x)
            s = step(late)
            dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        second.wait_stream(first)
        with torch.cuda.stream(second):
            moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=False)
        torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    found = {"out": s.out, "dx": dx, "dw13": dw13, "dw2": dw2}
    fp8_on_gpu.assert_same(found, wanted, names=found)


@each_shape
def test_memory(shape):
    """Results, what is kept, and the stated workspace; nothing of it stays."""
    t, dout = fp8_on_gpu.operands(*shape)
    hidden, inner, experts = t.x.shape[1], t.down_proj.shape[2], len(t.down_proj)
    padded = padded_rows(len(t.x), experts)
    table = 4 * (4 * (plan.most_tiles(len(t.x), experts) + 2) + 2 * experts + 16)
    per_block = 1 + 4 / 128  # bytes of a code with its share of the scale
    weights = 3 * experts * hidden * inner * (1 + 4 / 128**2)
    with torch.no_grad():
        out, peak = memory.peak_of(lambda: call(*t))
    work = padded * (4 * inner + max(hidden, inner) * per_block)
    assert peak <= out.nbytes + weights + work + table + 8192
    kept = weights + padded * (4 * inner + hidden * per_block)
    before = memory.allocated()
    out = call(*(v.detach().requires_grad_() for v in t[:4]), *t[4:])
    assert memory.allocated() - before <= out.nbytes + kept + 8192
    del out
    found, peak = memory.peak_of(lambda: gradients(t, dout))
    work = padded * (2 * hidden + 2 * inner + 5 * inner) * per_block
    assert peak <= sum(r.nbytes for r in found.values()) + kept + max(weights, work) + table + 8192


@pytest.mark.parametrize("current", [0, 1])
def test_second_device(current):
    """Tensors on one device while the other is current. Nothing is allocated on that one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two CUDA devices")
    t, dout = fp8_on_gpu.operands(*SHAPES["small"])
    wanted = gradients(t, dout) | {f"halves {name}": r for name, r in results(t, dout).items()}
    *there, dout = (v.to(f"cuda:{1 - current}") for v in (*t[:5], dout))
    buffers = [v.to(dout.device) for v in sums(t)]
    torch.cuda.synchronize()
    with torch.cuda.device(current):
        gc.collect()
        before = torch.cuda.memory_allocated(current)
        t = Operands(*there)
        found, s = gradients(t, dout), step(t)
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *buffers, accumulate=False)
        assert torch.cuda.memory_allocated(current) == before
        assert torch.cuda.current_device() == current
    found |= {"halves out": s.out, "halves dx": dx, "halves dw13": buffers[0], "halves dw2": buffers[1]}
    assert {r.device for r in (*found.values(), *columns)} == {torch.device("cuda", 1 - current)}
    for name, r in found.items():
        assert_same_bytes(r.to("cuda:0"), wanted[name], name)


def test_guard_bands(guarded):
    """Nothing is read or written past the operands: each lies between bands of NaN."""
    t, dout = fp8_on_gpu.operands((70, 0, 129), 0)
    fields = {}
    for name in ("x", "gate_proj", "up_proj", "down_proj"):
        source = getattr(t, name)
        fields[name] = guarded(tuple(source.shape), source.dtype, "cuda").tensor.copy_(source)
    fp8_on_gpu.assert_same(results(t._replace(**fields), dout), results(t, dout))
