"""Streams, CUDA graphs, devices, repeats and processes: the bytes are always the same."""

from functools import partial

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support import first_call
from tests.support.compare import assert_same_bytes
from tests.support.device import (
    capture,
    differences_at_once,
    no_sync,
    nothing_allocated,
    other_device,
    repeat_bytes,
    side_stream,
)
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

CAPTURE_FIRST = """
import torch
from fp8_dual_cast import fp8_dual_cast
from hopper_kernels import reference
from tests.fp8_dual_cast import inputs, on_gpu
from tests.support import first_call
x = inputs.matrix(300, 512).cuda()
options = on_gpu.rotation(300, 128, 64)
with reference():
    expected = fp8_dual_cast(x, **options)
first_call.capture(
    lambda: fp8_dual_cast(x, **options), lambda found: on_gpu.assert_dual(found, expected, "replay")
)
"""
DIGEST = "from tests.fp8_dual_cast import on_gpu; print(on_gpu.digest())"


def all_casts(x, cos_sin_cache, position_ids, head_dim=128):
    """Every result of every operator, with a rotation and without."""
    rotated = fp8_dual_cast(x, cos_sin_cache=cos_sin_cache, position_ids=position_ids, head_dim=head_dim)
    return [*rotated, *fp8_dual_cast(x), *per_token_cast(x), *per_token_cast_transposed(x)]


def operands(tokens=1000, channels=1280):
    options = on_gpu.rotation(tokens, 128, 64)
    return on_gpu.matrix(tokens, channels), options["cos_sin_cache"], options["position_ids"]


def assert_all(actual, expected, what):
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert_same_bytes(got, want, f"{what}, result {index}", strides=False)


def test_side_stream():
    """The inputs are written late on a stream of their own: a launch elsewhere would see what was there before."""
    args = operands()
    expected = all_casts(*args)
    assert_all(side_stream(all_casts, *args), expected, "side stream")


@pytest.mark.parametrize("options", [{}, {"warm_up": 0}], ids=["warm", "without a call before"])
def test_graph_reads_everything_at_replay(options):
    """New values, positions and table in the captured buffers, several times; everything was compiled before."""
    args = operands()
    expected = all_casts(*args)
    graph = capture(lambda: all_casts(*args), **options)
    assert_all(graph.replay(), expected, "first replay")
    for tokens_seed in range(3):
        args[0].copy_(on_gpu.matrix(*args[0].shape))
        args[1].copy_(inputs.cos_sin_cache(301, 64, factor=0.5 + tokens_seed).to(on_gpu.DEVICE))
        args[2].copy_(torch.randint_like(args[2], 301))
        actual = graph.replay()
        assert_all(actual, all_casts(*args), f"replay {tokens_seed}")


def test_graph_with_arguments_that_are_copied():
    """A column-major x and a strided table are copied inside the graph, so the replay still reads the originals."""
    x, table, positions = operands(200, 256)
    x, table = x.t().contiguous().t(), table.repeat_interleave(2, dim=0)[::2]
    all_casts(x, table, positions)
    graph = capture(lambda: all_casts(x, table, positions))
    x.copy_(on_gpu.matrix(*x.shape))
    table.copy_(inputs.cos_sin_cache(301, 64, factor=3.0).to(on_gpu.DEVICE))
    assert_all(graph.replay(), all_casts(x.clone(), table.clone(), positions), "replay")


def test_graph_without_tokens():
    """Nothing is launched for no tokens, in a capture too; the graph runs what stands beside the calls."""
    args, counter = operands(0, 256), torch.zeros((), device=on_gpu.DEVICE)
    graph = capture(lambda: [counter.add_(1), *all_casts(*args)], warm_up=1)
    _, *results = graph.replay()
    assert_all(results, all_casts(*args), "no tokens")
    assert counter.item() == 2


def test_nothing_synchronises():
    args = operands()
    all_casts(*args)
    strided = args[0].t().contiguous().t()
    with no_sync():
        results = [all_casts(*args), all_casts(strided, *args[1:])]
    assert_all(results[0], all_casts(*args), "no synchronisation")
    assert_all(results[1], results[0], "strided")


def test_two_streams_at_once():
    """100 rounds on two streams with different data of their own give what each gives alone."""
    calls = [partial(all_casts, *operands(*sizes)) for sizes in ((1000, 1280), (640, 2304))]
    assert differences_at_once(calls, rounds=100) == [0, 0]


def test_repeats():
    """200 calls, and the first of them after calls of other shapes."""
    args = operands(515, 1280)
    fp8_dual_cast(on_gpu.matrix(128, 128))
    repeat_bytes(lambda: all_casts(*args), 200)


def test_second_device():
    """Tensors on cuda:1 while cuda:0 is current. Nothing is allocated on cuda:0."""
    other = other_device(0)
    args = operands(300, 512)
    there = [t.to(other) for t in args]
    with nothing_allocated(0):
        results = all_casts(*there)
    assert {t.device for t in results} == {other}
    assert_all([t.to("cuda:0") for t in results], all_casts(*args), "cuda:1")


@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right bytes or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_eight_processes_share_an_empty_cache(tmp_path):
    """All compile the same kernels into one empty folder at once, and all give the bytes of this process."""
    processes = [start_python(DIGEST, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    outputs = [output_of(process, timeout=160) for process in processes]
    assert outputs == [on_gpu.digest()] * 8
    assert list(tmp_path.rglob("*.cubin"))
