"""FP8, where it is not as bf16 in `test_gpu_invariance.py`: shared memory, streams, another device; memory."""

from functools import partial

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
from tests.support.device import (
    assert_same_at_once,
    capture,
    deterministic_algorithms,
    halves_on_two_streams,
    nothing_allocated,
    other_device,
)

pytestmark = pytest.mark.gpu
SHAPES = {"small": ((70, 0, 129, 3), 9, 256, 384), "wide": ((300, 500, 0, 257), 20, HIDDEN, INNER)}
each_shape = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))


def test_shared_memory_is_not_seen():
    """What a program finds there is what an earlier one left: NaN in every slot of the rings and every panel."""
    for hidden in (128, 256, 384, 2560):  # 1, 2, 3 and 20 steps
        t, dout = fp8_on_gpu.operands((130, 0, 300), 1, hidden, 256)
        bad = Operands(*(torch.full_like(v, float("nan")) for v in t[:4]), *t[4:])
        wanted = results(t, dout)
        for _ in range(100):
            results(bad, bad.x)
            fp8_on_gpu.assert_same(results(t, dout), wanted, f"{hidden} channels")


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
    calls = [partial(gradients, *fp8_on_gpu.operands(*shape)) for _ in range(2)]
    wanted = [call() for call in calls]
    assert_same_at_once(calls, wanted, fp8_on_gpu.assert_same, rounds=20)


@pytest.mark.parametrize("deterministic", [False, True])
def test_weight_gradients_go_on_another_stream(deterministic):
    """The forward and the first half of the backward on a stream where x comes late, the second half on another one."""
    t, dout = fp8_on_gpu.operands(*SHAPES["wide"])
    wanted = results(t, dout)
    late = t._replace(x=torch.full_like(t.x, float("nan")))
    dw13, dw2 = sums(t)

    def first():
        late.x.copy_(t.x)
        s = step(late)
        return s, *moe_experts_fp8_backward_data(dout, *s.data)

    def second(made):
        s, _, *columns = made
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=False)

    with deterministic_algorithms(deterministic):
        (s, dx, *_), _ = halves_on_two_streams(first, second)
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
    other = other_device(current)
    t, dout = fp8_on_gpu.operands(*SHAPES["small"])
    wanted = gradients(t, dout) | {f"halves {name}": r for name, r in results(t, dout).items()}
    *there, dout = (v.to(other) for v in (*t[:5], dout))
    moved, buffers = Operands(*there), [v.to(other) for v in sums(t)]
    with nothing_allocated(current):
        found, s = gradients(moved, dout), step(moved)
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *buffers, accumulate=False)
    found |= {"halves out": s.out, "halves dx": dx, "halves dw13": buffers[0], "halves dw2": buffers[1]}
    assert {r.device for r in (*found.values(), *columns)} == {other}
    for name, r in found.items():
        assert_same_bytes(r.to("cuda:0"), wanted[name], name)
