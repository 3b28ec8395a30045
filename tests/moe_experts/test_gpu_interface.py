"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import hopper_kernels
import pytest
import torch
from hopper_kernels import launcher, registry
from moe_experts import launch, moe_experts, unsupported_shape_reason

from tests.moe_experts import on_gpu
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
AVAILABILITY = """
import hopper_kernels, torch
print(hopper_kernels.is_available("moe_experts"))
print(hopper_kernels.unavailable_reason("moe_experts"))
from moe_experts import moe_experts
x, weight, down = torch.ones(3, 8).bfloat16(), torch.ones(1, 16, 8).bfloat16(), torch.ones(1, 8, 8).bfloat16()
print(moe_experts(x, weight, None, down, torch.tensor([2]), 2.0)[:, 0].tolist())
"""
# As a trainer calls: V4.1's sizes, counts of either type, gradients of everything, then with frozen operands.
CALLS = """
import torch
from tests.moe_experts import on_gpu
for groups, tail in (((300, 0, 45, 130), 7), ((1, 0, 0, 0), 0)):
    for packed in (False, True):
        t, dout = on_gpu.operands(groups, tail, on_gpu.HIDDEN, on_gpu.INNER, packed=packed)
        for counts in (t.num_tokens_per_expert, t.num_tokens_per_expert.int()):
            on_gpu.everything(t._replace(num_tokens_per_expert=counts), dout)
        for name in on_gpu.names_of(t):
            on_gpu.gradients(t, dout, [name])
torch.cuda.synchronize()
"""
CAPTURE_FIRST = """
import torch
from tests.moe_experts import on_gpu
torch.manual_seed(0)
t, dout = on_gpu.operands()
on_gpu.definition64(t, dout)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        found = on_gpu.gradients(t, dout)
except Exception as error:
    assert "captur" in str(error), f"the error must mention the capture: {type(error).__name__}: {error}"
    print("refused")
else:
    graph.replay()
    torch.cuda.synchronize()
    on_gpu.assert_accurate(t, dout, found)
    print("works")
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_check():
    output = output_of(start_python(COMMAND, "check", "moe_experts"), timeout=170)
    found = [line for line in output.splitlines() if line.startswith("moe_experts ")]
    assert found
    assert all("SM90 kernel" in row and row.endswith(" ok") for row in found), output


def test_status():
    output = output_of(start_python(COMMAND, "status"))
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("moe_experts ")] == ["available"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that trains compiles nothing."""
    process = start_python(COMMAND, "precompile", "moe_experts", TRITON_CACHE_DIR=str(tmp_path))
    found = [line for line in output_of(process, 170).splitlines() if line.startswith("moe_experts ")]
    assert len(found) == len(launch.variants())
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) == len(found)
    output_of(start_python(CALLS, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path)), 60)
    assert sorted(path.name for path in set(tmp_path.rglob("*.cubin")) - compiled) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right numbers or a clear error."""
    process = start_python(CAPTURE_FIRST, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path))
    assert output_of(process, timeout=100).splitlines()[-1] in ("works", "refused")


def test_available():
    assert hopper_kernels.is_available("moe_experts") is True
    assert hopper_kernels.unavailable_reason("moe_experts") is None
    assert registry.is_available("moe_experts", torch.cuda.current_device())
    assert hopper_kernels.load("moe_experts").__name__ == "moe_experts"
    assert hopper_kernels.load("moe_experts").moe_experts is moe_experts
    assert not hopper_kernels.is_available("moe_experts", "cpu")


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    process = start_python(AVAILABILITY, CUDA_VISIBLE_DEVICES="")
    available, reason, values = output_of(process).splitlines()
    assert available == "False"
    assert "none is visible" in reason
    assert values == "[28.125, 28.125, 0.0]"  # 8 x bf(silu(2) x 2)


@pytest.mark.parametrize("hidden", [4, 8, 12, 24, 264])
def test_shapes_said_to_be_taken_are_taken(hidden):
    """And the others raise, with that reason."""
    for inner in (4, 8, 20, 40, 136):
        t, dout = on_gpu.operands((3, 0, 9), 2, hidden, inner)
        if (reason := unsupported_shape_reason(hidden, inner)) is None:
            on_gpu.assert_accurate(t, dout, on_gpu.gradients(t, dout), f"{hidden} x {inner}", on_gpu.FEW)
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                moe_experts(*t)


def sample_calls(rows, hidden, inner):
    """Operands and cotangents: separate and packed weights, counts of either type."""
    found = []
    for packed in (False, True):
        t, dout = on_gpu.operands((rows, 0, rows // 2, 1), 5, hidden, inner, packed=packed)
        for counts in (t.num_tokens_per_expert, t.num_tokens_per_expert.int()):
            found.append((t._replace(num_tokens_per_expert=counts), dout))
    return found


def test_later_launches_do_without_tritons_own(monkeypatch):
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""
    from triton.runtime.jit import JITFunction

    for t, dout in sample_calls(130, 136, 72):
        on_gpu.everything(t, dout)
    others = [call for sizes in ((130, 136, 72), (300, 264, 520), (1, 8, 8)) for call in sample_calls(*sizes)]

    def refuse(*args, **options):
        raise AssertionError("a launch went through Triton's own")

    monkeypatch.setattr(JITFunction, "run", refuse)
    for t, dout in others:
        on_gpu.everything(t, dout)
        on_gpu.assert_accurate(t, dout, on_gpu.gradients(t, dout), bound=on_gpu.FEW)
    kept = dict(launcher._compiled)
    launcher._compiled.clear()
    try:
        with pytest.raises(AssertionError, match="went through"):
            on_gpu.everything(t, dout)
    finally:
        launcher._compiled.update(kept)


@pytest.mark.parametrize("sizes", [(130, 136, 72), (300, 264, 520), (1, 8, 8)], ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes, monkeypatch):
    from triton.runtime.jit import JITFunction

    calls = sample_calls(*sizes)
    for t, dout in calls:
        on_gpu.everything(t, dout)
    fast = [on_gpu.everything(t, dout) for t, dout in calls]
    count = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: count.append(1) or run(*args, **options))
    monkeypatch.setattr(launcher.Launch, "_key", lambda self: (None, []))
    for (t, dout), wanted in zip(calls, fast, strict=True):
        on_gpu.assert_same(on_gpu.everything(t, dout), wanted)
    assert len(count) > 20
