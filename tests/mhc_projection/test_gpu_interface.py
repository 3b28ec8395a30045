"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import hopper_kernels
import pytest
import torch
from hopper_kernels import launcher, registry
from mhc_projection import MAX_LOGITS, hyper_connection, launch, unsupported_shape_reason

from tests.mhc_projection import inputs, on_gpu
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
AVAILABILITY = """
import hopper_kernels, torch
print(hopper_kernels.is_available("mhc_projection"))
print(hopper_kernels.unavailable_reason("mhc_projection"))
from mhc_projection import mhc_projection
print(mhc_projection(torch.ones(3, 4, 8).bfloat16(), torch.ones(2, 32))[0].unique().tolist())
"""
# As a trainer calls: fp32 parameters, 4 streams, 20 iterations, gradients of everything.
CALLS = """
import torch
from tests.mhc_projection import on_gpu
for tokens in (1, 300, 2100):
    t = on_gpu.operands(tokens, 4, 200)
    on_gpu.everything(t, on_gpu.all_cotangents(t))
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_check():
    output = output_of(start_python(COMMAND, "check", "mhc_projection"), timeout=170)
    found = [line for line in output.splitlines() if line.startswith("mhc_projection ")]
    assert found
    assert all("SM90 kernel" in row and row.endswith(" ok") for row in found), output


def test_status():
    output = output_of(start_python(COMMAND, "status"))
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("mhc_projection ")] == ["available"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that trains compiles nothing."""
    process = start_python(COMMAND, "precompile", "mhc_projection", TRITON_CACHE_DIR=str(tmp_path))
    found = [line for line in output_of(process, 170).splitlines() if line.startswith("mhc_projection ")]
    assert len(found) == len(launch.variants())
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) == len(found)
    output_of(start_python(CALLS, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path)), 60)
    assert sorted(path.name for path in set(tmp_path.rglob("*.cubin")) - compiled) == []


def test_available():
    assert hopper_kernels.is_available("mhc_projection") is True
    assert hopper_kernels.unavailable_reason("mhc_projection") is None
    assert registry.is_available("mhc_projection", torch.cuda.current_device())
    assert hopper_kernels.load("mhc_projection").__name__ == "mhc_projection"
    assert hopper_kernels.load("mhc_projection").hyper_connection is hyper_connection
    assert not hopper_kernels.is_available("mhc_projection", "cpu")


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    process = start_python(AVAILABILITY, CUDA_VISIBLE_DEVICES="")
    available, reason, values = output_of(process).splitlines()
    assert available == "False"
    assert "none is visible" in reason
    assert values == "[32.0]"


@pytest.mark.parametrize("hc", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("d", [4, 8, 12, 24])
def test_shapes_said_to_be_taken_are_taken(hc, d):
    """And the others raise, with that reason."""
    for n in (1, 24, MAX_LOGITS, MAX_LOGITS + 1):
        t = on_gpu.operands(3, hc, d, n=n)
        c = on_gpu.cotangents(t, *on_gpu.PROJECTION)
        if (reason := unsupported_shape_reason(hc, d, n)) is None:
            on_gpu.assert_accurate(on_gpu.projection(t, c), on_gpu.exact(t, c), t)
        else:
            with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                on_gpu.projection(t, c)
    t = on_gpu.operands(3, hc, d)
    if (reason := unsupported_shape_reason(hc, d)) is None:
        assert hyper_connection(*t, **inputs.OPTIONS)[3].shape == (3, d)
    else:
        with pytest.raises(ValueError, match=r"hc|multiple of 8|rows n"):
            hyper_connection(*t, **inputs.OPTIONS)


def test_later_launches_do_without_tritons_own(monkeypatch):
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""
    from triton.runtime.jit import JITFunction

    for tokens in (1100, 300):
        t = on_gpu.operands(tokens, 4, 200)
        on_gpu.everything(t, on_gpu.all_cotangents(t))

    def refuse(*args, **options):
        raise AssertionError("a launch went through Triton's own")

    monkeypatch.setattr(JITFunction, "run", refuse)
    for sizes in ((1100, 4, 200), (2500, 4, 72), (1, 4, 8)):
        t = on_gpu.operands(*sizes)
        c = on_gpu.all_cotangents(t)
        found = on_gpu.everything(t, c)
        on_gpu.assert_accurate(on_gpu.connection(t, c), on_gpu.exact(t, c), t)
        assert all(r.isfinite().all() for r in found.values())
    launcher._compiled.clear()
    with pytest.raises(AssertionError, match="went through"):
        on_gpu.everything(t, c)


@pytest.mark.parametrize("sizes", [(1100, 4, 200), (70, 2, 8), (3, 1, 5120)], ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes, monkeypatch):
    from triton.runtime.jit import JITFunction

    t = on_gpu.operands(*sizes)
    c = on_gpu.all_cotangents(t)
    on_gpu.everything(t, c)
    fast = on_gpu.everything(t, c)
    count = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: count.append(1) or run(*args, **options))
    monkeypatch.setattr(launcher.Launch, "_key", lambda self: (None, []))
    on_gpu.assert_same(on_gpu.everything(t, c), fast)
    assert len(count) > 20
