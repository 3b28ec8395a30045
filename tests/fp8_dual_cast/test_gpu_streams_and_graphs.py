"""Streams, CUDA graphs, devices, repeats and processes: the bytes are always the same."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support import memory
from tests.support.compare import assert_same_bytes
from tests.support.device import capture, no_sync, repeat_bytes, side_stream
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

CAPTURE_FIRST = """
import torch
from fp8_dual_cast import fp8_dual_cast
from hopper_kernels import reference
from tests.fp8_dual_cast import inputs, on_gpu
x = inputs.matrix(300, 512).cuda()
options = on_gpu.rotation(300, 128, 64)
with reference():
    expected = fp8_dual_cast(x, **options)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        actual = fp8_dual_cast(x, **options)
except Exception as error:
    assert "captur" in str(error), f"the error must mention the capture: {type(error).__name__}: {error}"
    print("refused")
else:
    graph.replay()
    torch.cuda.synchronize()
    on_gpu.assert_dual(actual, expected, "replay")
    print("works")
"""
DIGEST = "from tests.fp8_dual_cast import on_gpu; print(on_gpu.digest())"


def all_casts(x, cos_sin_cache, position_ids, head_dim=128):
    """Every result of every operator, with a rotation and without."""
    rotated = fp8_dual_cast(x, cos_sin_cache=cos_sin_cache, position_ids=position_ids, head_dim=head_dim)
    return [*rotated, *fp8_dual_cast(x), *per_token_cast(x), *per_token_cast_transposed(x)]


def operands(tokens=1000, channels=1280):
    options = on_gpu.rotation(tokens, 128, 64)
    return on_gpu.matrix(tokens, channels), options["cos_sin_cache"], options["position_ids"]


def copies(results):
    return [t.clone() for t in results]


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
    arguments = [operands(1000, 1280), operands(640, 2304)]
    expected = [copies(all_casts(*args)) for args in arguments]
    streams = [torch.cuda.Stream() for _ in arguments]
    wrong = [torch.zeros((), dtype=torch.int64, device=on_gpu.DEVICE) for _ in arguments]
    torch.cuda.synchronize()
    for _ in range(100):
        for args, wanted, stream, count in zip(arguments, expected, streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                for got, want in zip(all_casts(*args), wanted, strict=True):
                    bits = torch.int32 if got.dtype == torch.float32 else torch.uint8
                    count += torch.count_nonzero(got.view(bits) != want.view(bits))
    torch.cuda.synchronize()
    assert [count.item() for count in wrong] == [0, 0]


def test_repeats():
    """200 calls, and the first of them after calls of other shapes."""
    args = operands(515, 1280)
    fp8_dual_cast(on_gpu.matrix(128, 128))
    repeat_bytes(lambda: all_casts(*args), 200)


def test_second_device():
    """Tensors on cuda:1 while cuda:0 is current. Nothing is allocated on cuda:0."""
    if torch.cuda.device_count() < 2:
        pytest.skip("requires two CUDA devices")
    args = operands(300, 512)
    there = [t.to("cuda:1") for t in args]
    torch.cuda.synchronize()
    before = memory.allocated(0)
    results = all_casts(*there)
    assert torch.cuda.memory_allocated(0) == before
    assert {t.device for t in results} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    assert_all([t.to("cuda:0") for t in results], all_casts(*args), "cuda:1")


@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right bytes or a clear error."""
    process = start_python(CAPTURE_FIRST, TRITON_CACHE_DIR=str(tmp_path))
    assert output_of(process, timeout=100).splitlines()[-1] in ("works", "refused")


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_eight_processes_share_an_empty_cache(tmp_path):
    """All compile the same kernels into one empty folder at once, and all give the bytes of this process."""
    processes = [start_python(DIGEST, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(8)]
    outputs = [output_of(process, timeout=160) for process in processes]
    assert outputs == [on_gpu.digest()] * 8
    assert list(tmp_path.rglob("*.cubin"))
