"""Streams of the device, CUDA graphs, synchronisation, PyTorch's deterministic mode, and other devices."""

import pytest
import torch
from mhc_projection import hyper_connection

from tests.mhc_projection import inputs, on_gpu
from tests.mhc_projection.inputs import Operands
from tests.support import first_call
from tests.support.device import (
    capture,
    deterministic_algorithms,
    halves_on_two_streams,
    no_sync,
    nothing_allocated,
    other_device,
    side_stream,
)

pytestmark = pytest.mark.gpu

NAMES = ("mixes", *on_gpu.CONNECTION, "streams")
CAPTURE_FIRST = """
import torch
from tests.mhc_projection import on_gpu
from tests.support import first_call
torch.manual_seed(0)
t = on_gpu.operands(300, 4, 72)
c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
expected = on_gpu.exact(t, c)
first_call.capture(lambda: on_gpu.connection(t, c), lambda found: on_gpu.assert_accurate(found, expected, t))
"""


def flat_call(*tensors):
    """`everything` of operands and cotangents in one row, as harnesses take them; its results in a fixed order."""
    t, c = Operands(*tensors[:5]), dict(zip(NAMES, tensors[5:], strict=True))
    return list(on_gpu.everything(t, c).values())


def tensors(*sizes):
    t = on_gpu.operands(*(sizes or (1100, 4, 200)))
    return [*t, *on_gpu.cotangents(t, *NAMES).values()]


def refill(buffers):
    """Other values of the same kind."""
    for buffer, fresh in zip(buffers, tensors(*buffers[0].shape), strict=True):
        buffer.copy_(fresh)


def assert_all(actual, expected, what):
    named = [{str(i): r for i, r in enumerate(results)} for results in (actual, expected)]
    on_gpu.assert_same(*named, what)


def test_side_stream():
    """The inputs are written late on a stream of their own: a launch elsewhere would see what was there before."""
    args = tensors()
    expected = flat_call(*args)
    assert_all(side_stream(flat_call, *args), expected, "side stream")


def test_forward_and_backward_on_different_streams():
    """As a trainer overlaps them, with the producer behind a sleep, in the mode that fills what is uninitialised."""
    t = on_gpu.operands(1100, 4, 200)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION)
    wanted = on_gpu.connection(t, c)
    late = t._replace(x=torch.full_like(t.x, float("nan"))).requires_grad()

    def forward():
        late.x.detach().copy_(t.x)
        return hyper_connection(*late, **inputs.OPTIONS)

    with deterministic_algorithms():
        results, grads = halves_on_two_streams(forward, lambda made: torch.autograd.grad(made, late, list(c.values())))
    found = dict(
        zip((*on_gpu.CONNECTION, *(f"grad_{name}" for name in Operands._fields)), (*results, *grads), strict=True)
    )
    on_gpu.assert_same({name: r.detach() for name, r in found.items()}, wanted)


@pytest.mark.parametrize("warm_up", [2, 0], ids=["warm", "without a call before"])
def test_graph_of_forward_and_backward(warm_up):
    """New data in all captured buffers, several times; everything was compiled before."""
    args = tensors()
    expected = flat_call(*args)
    graph = capture(lambda: flat_call(*args), warm_up=warm_up)
    assert_all(graph.replay(), expected, "first replay")
    for number in range(3):
        refill(args)
        assert_all(graph.replay(), flat_call(*args), f"replay {number}")


def test_graph_of_the_collapse_alone():
    """Without a gradient of the logits nothing is prepared, yet each replay counts its work from zero."""
    t = on_gpu.operands(1100, 4, 200)
    c = on_gpu.cotangents(t, "collapsed")
    graph = capture(lambda: list(on_gpu.connection(t, c).values()))
    for number in range(3):
        fresh = *on_gpu.operands(1100, 4, 200), torch.randn_like(c["collapsed"])
        for buffer, values in zip((*t, *c.values()), fresh, strict=True):
            buffer.copy_(values)
        assert_all(graph.replay(), list(on_gpu.connection(t, c).values()), f"replay {number}")


def test_graph_with_operands_that_are_copied():
    """Strided and unaligned ones are copied inside the graph, so that a replay reads the originals."""
    args = tensors(300, 4, 72)
    args[0] = inputs.STRIDES["streams outermost"](args[0])
    args[1] = args[1].t().contiguous().t()
    args[4] = inputs.STRIDES["base off by one element"](args[4])
    args[9] = inputs.STRIDES["aligned slice"](args[9])
    flat_call(*args)
    graph = capture(lambda: flat_call(*args))
    refill(args)
    assert_all(graph.replay(), flat_call(*args), "replay")


def test_graph_without_tokens():
    """Nothing is launched for no tokens, in a capture too; the graph runs what stands beside the calls."""
    args, counter = tensors(0, 4, 64), torch.zeros((), device=on_gpu.DEVICE)
    graph = capture(lambda: [counter.add_(1), *flat_call(*args)], warm_up=1)
    _, *results = graph.replay()
    assert_all(results, flat_call(*args), "no tokens")
    assert counter.item() == 2


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right numbers or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, folder=tmp_path, quit_at_once=True)


def test_nothing_synchronises():
    """Neither forward nor backward, nor the copies of strided operands."""
    args = tensors()
    expected = flat_call(*args)
    strided = [inputs.STRIDES["streams outermost"](args[0]), *args[1:]]
    with no_sync():
        results = [flat_call(*args), flat_call(*strided)]
    for found in results:
        assert_all(found, expected, "no synchronisation")


def test_deterministic_mode():
    """PyTorch then fills what is uninitialised with NaN and refuses what is not deterministic."""
    args = tensors()
    expected = flat_call(*args)
    with deterministic_algorithms():
        assert torch.utils.deterministic.fill_uninitialized_memory
        found = flat_call(*args)
    assert_all(found, expected, "deterministic mode")


def test_tf32_and_reduced_precision_change_nothing():
    """Settings of PyTorch's own matrix products."""
    args = tensors()
    expected = flat_call(*args)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert_all(flat_call(*args), expected, "medium precision")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("current", [0, 1])
def test_second_device(current):
    """Tensors on one device while the other is current. Nothing is allocated on that one."""
    other = other_device(current)
    args = [t.to("cuda:0") for t in tensors(300, 4, 72)]
    there = [t.to(other) for t in args]
    expected = flat_call(*args)
    with nothing_allocated(current):
        results = flat_call(*there)
    assert {t.device for t in results} == {other}
    assert_all([t.to("cuda:0") for t in results], expected, "the other device")
