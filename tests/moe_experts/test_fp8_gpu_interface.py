"""FP8 launches as a user meets them on an H200: the first one in a capture, and cheap ones from then on."""

import pytest
from hopper_kernels import launcher

from tests.moe_experts import fp8_on_gpu
from tests.moe_experts.fp8_on_gpu import everything
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

CAPTURE_FIRST = """
import torch
from tests.moe_experts import fp8_on_gpu
torch.manual_seed(0)
t, dout = fp8_on_gpu.operands((70, 0, 129, 3), 9)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        found = fp8_on_gpu.gradients(t, dout)
except Exception as error:
    assert "captur" in str(error), f"the error must mention the capture: {type(error).__name__}: {error}"
    print("refused")
else:
    graph.replay()
    torch.cuda.synchronize()
    fp8_on_gpu.assert_same(found, fp8_on_gpu.gradients(t, dout))
    fp8_on_gpu.assert_right(t, dout, fp8_on_gpu.results(t, dout))
    print("works")
"""
COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
# As a trainer calls: V4.1's sizes, counts of either type, gradients of everything and of x alone, buffers, inference.
CALLS = """
import torch
from tests.moe_experts import fp8_on_gpu, on_gpu
for groups, tail in (((300, 0, 45, 130), 7), ((1, 0, 0, 0), 0)):
    for packed in (False, True):
        t, dout = fp8_on_gpu.operands(groups, tail, on_gpu.HIDDEN, on_gpu.INNER, packed=packed)
        for counts in (t.num_tokens_per_expert, t.num_tokens_per_expert.int()):
            fp8_on_gpu.everything(t._replace(num_tokens_per_expert=counts), dout)
torch.cuda.synchronize()
"""
SIZES = [((130, 0, 65, 1), 256, 384), ((300, 0, 150, 1), 640, 128), ((1, 0, 0, 1), 128, 128)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right numbers or a clear error."""
    process = start_python(CAPTURE_FIRST, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path))
    assert output_of(process, timeout=100).splitlines()[-1] in ("works", "refused")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """A process that trains compiles nothing then."""
    output_of(start_python(COMMAND, "precompile", "moe_experts", TRITON_CACHE_DIR=str(tmp_path)), 170)
    compiled = set(tmp_path.rglob("*.cubin"))
    assert compiled
    output_of(start_python(CALLS, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path)), 60)
    assert sorted(path.name for path in set(tmp_path.rglob("*.cubin")) - compiled) == []


def sample_calls(groups, hidden, inner):
    """Operands and cotangents: separate and packed weights, counts of either type."""
    found = []
    for packed in (False, True):
        t, dout = fp8_on_gpu.operands(groups, 5, hidden, inner, packed=packed)
        for counts in (t.num_tokens_per_expert, t.num_tokens_per_expert.int()):
            found.append((t._replace(num_tokens_per_expert=counts), dout))
    return found


def test_later_launches_do_without_tritons_own(monkeypatch):
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""
    from triton.runtime.jit import JITFunction

    for t, dout in sample_calls(*SIZES[0]):
        everything(t, dout)
    others = [call for sizes in SIZES for call in sample_calls(*sizes)]

    def refuse(*args, **options):
        raise AssertionError("a launch went through Triton's own")

    monkeypatch.setattr(JITFunction, "run", refuse)
    for t, dout in others:
        everything(t, dout)
    kept = dict(launcher._compiled)
    launcher._compiled.clear()
    try:
        with pytest.raises(AssertionError, match="went through"):
            everything(t, dout)
    finally:
        launcher._compiled.update(kept)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes, monkeypatch):
    from triton.runtime.jit import JITFunction

    calls = sample_calls(*sizes)
    for t, dout in calls:
        everything(t, dout)
    fast = [everything(t, dout) for t, dout in calls]
    count = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: count.append(1) or run(*args, **options))
    monkeypatch.setattr(launcher.Launch, "_key", lambda self: (None, []))
    for (t, dout), wanted in zip(calls, fast, strict=True):
        fp8_on_gpu.assert_same(everything(t, dout), wanted)
    assert len(count) > 20
