"""The same bytes in every run, whatever else is in a batch, on any stream, in graphs; memory; no waiting.

In bf16 and, where nothing but the functions are others, in FP8; the rest of FP8 is in `test_fp8_gpu_invariance.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from moe_experts import moe_experts, moe_experts_backward_data, moe_experts_forward, moe_experts_weight_grad, plan

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.inputs import Operands
from tests.moe_experts.on_gpu import HIDDEN, INNER, ROWS, WEIGHTS
from tests.support import memory
from tests.support.compare import assert_same_bytes, unchanged
from tests.support.device import (
    assert_same_at_once,
    capture,
    deterministic_algorithms,
    halves_on_two_streams,
    no_sync,
    nothing_allocated,
    other_device,
    repeat_bytes,
    side_stream,
)

pytestmark = pytest.mark.gpu
SHAPES = {"small": ((70, 0, 129, 3), 9, 136, 264), "wide": ((300, 500, 0, 257), 20, HIDDEN, INNER)}
each_shape = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))


class Path(NamedTuple):
    """bf16 or FP8: operands, all results of a step, what autograd gives; which results have rows, and which experts;
    H and I of small operands."""

    operands: Callable
    step: Callable
    gradients: Callable
    rows: tuple[str, ...]
    weights: tuple[str, ...]
    small: tuple[int, int]


PATHS = {
    "bf16": Path(on_gpu.operands, on_gpu.step, on_gpu.gradients, ROWS, WEIGHTS, (136, 264)),
    "fp8": Path(
        fp8_on_gpu.operands, fp8_on_gpu.results, fp8_on_gpu.gradients, ("out", "dx"), ("dw13", "dw2"), (256, 384)
    ),
}
each_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
each_width = pytest.mark.parametrize("wide", [False, True], ids=["small", "wide"])


def operands(path, wide):
    return path.operands(*(SHAPES["wide"] if wide else (*SHAPES["small"][:2], *path.small)))


@each_path
@each_width
def test_repeats(path, wide):
    t, dout = operands(path, wide)
    repeat_bytes(lambda: path.step(t, dout), 20)


def test_repeats_at_any_number_of_steps():
    """Few terms to many: a ring that is hardly filled, and one that goes round often."""
    for hidden in (8, 64, 128, 192, 320, 2560):
        t, dout = on_gpu.operands((130, 2, 300), 1, hidden, 72)
        on_gpu.assert_right(t, dout, repeat_bytes(lambda t=t, dout=dout: on_gpu.step(t, dout), 30))


def test_shared_memory_is_not_seen():
    """What a program finds there is what an earlier one left: NaN in every slot of the rings and every panel."""
    for hidden in (64, 128, 192, 2560):  # 1, 2, 3 and 40 steps
        t, dout = on_gpu.operands((130, 0, 300), 1, hidden, 72)
        bad = Operands(*(torch.full_like(v, float("nan")) for v in t[:4]), *t[4:])
        wanted = on_gpu.step(t, dout)
        on_gpu.assert_right(t, dout, wanted)
        for _ in range(250):
            on_gpu.step(bad, bad.x)
            found = on_gpu.step(t, dout)
            on_gpu.assert_same(found, wanted, f"{hidden} channels")


@each_path
@each_width
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_poisoned_memory_is_not_seen(path, wide, pattern, poison):
    t, dout = operands(path, wide)
    wanted, by_autograd = path.step(t, dout), path.gradients(t, dout)
    poison(pattern)
    on_gpu.assert_same(path.step(t, dout), wanted)
    poison(pattern)
    on_gpu.assert_same(path.gradients(t, dout), by_autograd)


@each_path
def test_deterministic_algorithms_with_filled_memory(path):
    t, dout = operands(path, wide=False)
    wanted = path.step(t, dout)
    with deterministic_algorithms():
        on_gpu.assert_same(path.step(t, dout), wanted)


@each_path
@each_width
def test_a_row_and_an_expert_do_not_depend_on_the_others(path, wide):
    """One expert alone, and the experts the other way round."""
    t, dout = operands(path, wide)
    whole = path.step(t, dout)
    sizes = t.num_tokens_per_expert.tolist()
    starts = [sum(sizes[:e]) for e in range(len(sizes))]
    order = list(range(len(sizes)))[::-1]
    for experts in [[e] for e in range(len(sizes))] + [order]:
        rows = torch.cat([torch.arange(starts[e], starts[e] + sizes[e], device=t.x.device) for e in experts])
        part = t._replace(
            x=t.x[rows],
            gate_proj=t.gate_proj[experts],
            up_proj=t.up_proj[experts],
            down_proj=t.down_proj[experts],
            num_tokens_per_expert=t.num_tokens_per_expert[experts],
        )
        found = path.step(part, dout[rows])
        for name in path.rows:
            assert_same_bytes(found[name], whole[name][rows], f"{experts} {name}")
        for name in path.weights:
            assert_same_bytes(found[name], whole[name][experts], f"{experts} {name}")


@each_path
def test_a_row_does_not_depend_on_its_place(path):
    """Rows of an expert in another order, or only some of them."""
    t, dout = path.operands((300,), 0, *path.small)
    whole = path.step(t, dout)
    for count in (300, 177, 1):
        rows = torch.randperm(300, device=t.x.device)[:count]
        part = t._replace(x=t.x[rows], num_tokens_per_expert=torch.tensor([count], device=t.x.device))
        found = path.step(part, dout[rows])
        for name in path.rows:
            assert_same_bytes(found[name], whole[name][rows], name)


@each_path
@each_width
def test_inputs_are_not_modified(path, wide):
    t, dout = operands(path, wide)
    with unchanged((*t, dout)):
        path.step(t, dout)


@pytest.mark.parametrize("change", ["halves of a packed weight", "every second expert", "one weight for all experts"])
def test_weights_in_place(change):
    t, dout = on_gpu.operands((70, 130), 3, 136, 264)
    gate_proj, up_proj = t.gate_proj, t.up_proj
    if change == "halves of a packed weight":
        both = torch.cat((gate_proj, up_proj), dim=1)
        gate_proj, up_proj = both[:, :264], both[:, 264:]
    elif change == "every second expert":
        both = torch.stack((gate_proj, up_proj), dim=1).flatten(0, 1)
        gate_proj, up_proj = both[::2], both[1::2]
    else:
        gate_proj, up_proj = (w[:1].expand(2, -1, -1) for w in (gate_proj, up_proj))
    views = t._replace(gate_proj=gate_proj, up_proj=up_proj)
    copies = t._replace(gate_proj=gate_proj.contiguous(), up_proj=up_proj.contiguous())
    on_gpu.assert_same(on_gpu.step(views, dout), on_gpu.step(copies, dout))


@each_path
@each_width
def test_side_stream(path, wide):
    t, dout = operands(path, wide)
    found = side_stream(lambda *late: path.gradients(Operands(*late[:-1]), late[-1]), *t, dout)
    on_gpu.assert_same(found, path.gradients(t, dout))


@each_path
@each_width
def test_graph_of_other_counts(path, wide):
    """Captured for some routing, replayed for others: all rows on one expert, none, anything between."""
    t, dout = operands(path, wide)
    counts, rows = t.num_tokens_per_expert, len(t.x)
    t.x.normal_()
    dout.normal_()
    graph = capture(lambda: path.gradients(t, dout))
    for sizes in ([rows, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, rows], counts.tolist()):
        counts.copy_(torch.tensor(sizes))
        t.x.normal_()
        on_gpu.assert_same(graph.replay(), path.gradients(t, dout), str(sizes))


@each_path
def test_graph_without_rows(path):
    """None of the kernels is launched then, in a capture too; the graph runs what stands beside the calls."""
    t, dout = path.operands((0, 0), 0)
    counter = torch.zeros((), device=on_gpu.DEVICE)
    graph = capture(lambda: [counter.add_(1), path.gradients(t, dout)], warm_up=1)
    _, found = graph.replay()
    on_gpu.assert_same(found, path.gradients(t, dout))
    assert counter.item() == 2
    assert not any(found[name].any() for name in WEIGHTS)


@each_shape
def test_two_streams_at_once(shape):
    """By autograd; alone, by the operators."""
    pairs = [on_gpu.operands(*shape) for _ in range(2)]
    wanted = [on_gpu.step(*pair) for pair in pairs]
    calls = [partial(on_gpu.gradients, *pair) for pair in pairs]
    assert_same_at_once(calls, wanted, lambda got, want: on_gpu.assert_same(got, want, names=got), rounds=20)


@each_path
@each_width
def test_nothing_synchronises(path, wide):
    t, dout = operands(path, wide)
    path.gradients(t, dout)
    with no_sync():
        path.gradients(t, dout)


@each_shape
def test_memory(shape):
    """Results, what is kept, and the stated workspace; nothing of it stays."""
    t, dout = on_gpu.operands(*shape)
    rows, inner, experts = len(t.x), t.down_proj.shape[2], len(t.down_proj)
    table = 4 * (4 * (plan.most_tiles(rows, experts) + 2) + experts + 1)
    with torch.no_grad():
        out, peak = memory.peak_of(lambda: moe_experts(*t))
    kept = 2 * 2 * rows * inner  # gate and up
    assert peak <= out.nbytes + kept + 2 * rows * inner + table + 2048
    before = memory.allocated()
    out = moe_experts(*(v.detach().requires_grad_() for v in t[:4]), *t[4:])
    now = memory.allocated()
    assert now - before <= out.nbytes + kept + 4096
    del out
    results, peak = memory.peak_of(lambda: on_gpu.gradients(t, dout))
    h, late = 2 * rows * inner, sum(results[name].nbytes for name in ("dx", "dw1", "dw3"))
    early = sum(r.nbytes for r in results.values()) - late
    assert peak <= early + kept + 2 * 2 * rows * inner + max(h, late) + table + 8192


@pytest.mark.parametrize("current", [0, 1])
def test_second_device(current):
    """Tensors on one device while the other is current. Nothing is allocated on that one."""
    other = other_device(current)
    t, dout = on_gpu.operands(*SHAPES["small"])
    wanted = on_gpu.gradients(t, dout)
    *there, dout = (v.to(other) for v in (*t[:5], dout))
    with nothing_allocated(current):
        found = on_gpu.gradients(Operands(*there), dout)
    assert {r.device for r in found.values()} == {other}
    on_gpu.assert_same({name: r.to("cuda:0") for name, r in found.items()}, wanted, "on another device")


@each_path
def test_guard_bands(path, guarded):
    """Nothing is read or written past the operands: each lies between bands of NaN."""
    t, dout = path.operands((70, 0, 129), 0, *path.small)
    fields = {}
    for name in ("x", "gate_proj", "up_proj", "down_proj"):
        source = getattr(t, name)
        fields[name] = guarded(tuple(source.shape), source.dtype, "cuda").tensor.copy_(source)
    found = path.step(t._replace(**fields), dout)
    on_gpu.assert_same(found, path.step(t, dout))


def test_a_gradient_may_be_a_view():
    """Expanded, transposed, or one element past an aligned address."""
    t, _ = on_gpu.operands((70, 60), 0, 136, 264)
    some = torch.randn(136, 130, device="cuda").bfloat16()
    offset = torch.randn(130 * 136 + 1, device="cuda").bfloat16()[1:].view(130, 136)
    for dout in (torch.ones((), device="cuda").bfloat16().expand(130, 136), some.t(), offset):
        on_gpu.assert_same(on_gpu.gradients(t, dout), on_gpu.gradients(t, dout.contiguous().clone()))


@pytest.mark.parametrize("deterministic", [False, True])
def test_weight_gradients_go_on_another_stream(deterministic):
    """The forward and the first half of the backward on a stream, where x comes late; the second half on another one,
    of the experts' rows alone. Also where PyTorch fills what is uninitialised."""
    t, dout = on_gpu.operands(*SHAPES["wide"])
    wanted = on_gpu.step(t, dout)
    late, rows = t._replace(x=torch.full_like(t.x, float("nan"))), slice(t.owned)

    def first():
        late.x.copy_(t.x)
        out, gate, up = moe_experts_forward(*late)
        return out, *moe_experts_backward_data(dout, *late[1:5], gate, up, late.swiglu_limit)

    def second(made):
        _, _, dgate_dup, h = made
        owned = dout[rows], late.x[rows], late.num_tokens_per_expert, dgate_dup[rows], h[rows]
        return moe_experts_weight_grad(*owned, False)

    with deterministic_algorithms(deterministic):
        (out, dx, *_), grads = halves_on_two_streams(first, second)
    found = {"out": out, "dx": dx} | dict(zip(WEIGHTS, grads, strict=True))
    on_gpu.assert_same(found, wanted, names=found)


def test_graph_with_weight_gradients_on_another_stream():
    """Captured with both streams, and replayed for another routing."""
    t, dout = on_gpu.operands((70, 0, 129, 3), 9, 136, 264)
    other = torch.cuda.Stream()

    def halves():
        current = torch.cuda.current_stream()
        out, gate, up = moe_experts_forward(*t)
        dx, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, t.swiglu_limit)
        other.wait_stream(current)
        with torch.cuda.stream(other):
            grads = moe_experts_weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, False)
        current.wait_stream(other)
        # What both streams use is kept until the end.
        return {"out": out, "dx": dx, "kept": (dgate_dup, h)} | dict(zip(WEIGHTS, grads, strict=True))

    graph = capture(halves)
    t.x.normal_()
    dout.normal_()
    for sizes in ([3, 129, 0, 70], [0, 0, 211, 0], [70, 0, 129, 3]):
        t.num_tokens_per_expert.copy_(torch.tensor(sizes))
        found = graph.replay()
        torch.cuda.synchronize()
        on_gpu.assert_same(found, on_gpu.step(t, dout), str(sizes), ("out", "dx", *WEIGHTS))
