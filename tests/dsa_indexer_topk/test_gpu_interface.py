"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import hopper_kernels
import pytest
import torch
from dsa_indexer_topk import arguments, dsv41_index_topk, launch, plan, unsupported_shape_reason
from hopper_kernels import launcher, registry

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
AVAILABILITY = """
import hopper_kernels, torch
print(hopper_kernels.is_available("dsa_indexer_topk"))
print(hopper_kernels.unavailable_reason("dsa_indexer_topk"))
from tests.dsa_indexer_topk import inputs
from dsa_indexer_topk import dsv41_index_topk
print(dsv41_index_topk(*inputs.scored([[5, 1, 9, 7]]))[0].tolist())
"""
# As a model calls: V4.1's sizes, short and long documents, all modes, weights in either dtype.
CALLS = """
import torch
from dsa_indexer_topk import dsv41_index_topk, plan
from tests.dsa_indexer_topk import inputs, on_gpu
for documents in ((900, 3), (plan.LONGEST_WHOLE + 1000,)):
    for mode in inputs.MODES:
        a = on_gpu.arguments(documents, mode=mode, listed=1500, queries=70, **on_gpu.V41)
        for w in (a.w, a.w.float()):
            dsv41_index_topk(*a._replace(w=w))
torch.cuda.synchronize()
"""
LONG = plan.LONGEST_WHOLE + 500


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_check():
    output = output_of(start_python(COMMAND, "check", "dsa_indexer_topk"), timeout=230)
    found = [line for line in output.splitlines() if line.startswith("dsa_indexer_topk ")]
    assert found
    assert all("SM90 kernel" in row and row.endswith(" ok") for row in found), output


def test_status():
    output = output_of(start_python(COMMAND, "status"))
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("dsa_indexer_topk ")] == ["available"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that runs a model compiles nothing."""
    process = start_python(COMMAND, "precompile", "dsa_indexer_topk", TRITON_CACHE_DIR=str(tmp_path))
    found = [line for line in output_of(process, 170).splitlines() if line.startswith("dsa_indexer_topk ")]
    assert len(found) == len(launch.variants())
    compiled = set(tmp_path.rglob("*.cubin"))
    assert len(compiled) == len(found)
    output_of(start_python(CALLS, TRITON_CACHE_DIR=str(tmp_path)), 60)
    assert sorted(path.name for path in set(tmp_path.rglob("*.cubin")) - compiled) == []


def test_available():
    assert hopper_kernels.is_available("dsa_indexer_topk") is True
    assert hopper_kernels.unavailable_reason("dsa_indexer_topk") is None
    assert registry.is_available("dsa_indexer_topk", torch.cuda.current_device())
    assert hopper_kernels.load("dsa_indexer_topk").dsv41_index_topk is dsv41_index_topk
    assert not hopper_kernels.is_available("dsa_indexer_topk", "cpu")


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    process = start_python(AVAILABILITY, CUDA_VISIBLE_DEVICES="")
    available, reason, picks = output_of(process).splitlines()
    assert available == "False"
    assert "none is visible" in reason
    assert picks == "[[0, 2, 3]]"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("heads", [8, *arguments.HEADS, 128])
@pytest.mark.parametrize("head_dim", [32, *arguments.HEAD_DIMS])
def test_shapes_said_to_be_taken_are_taken(heads, head_dim):
    """And the others raise, with that reason."""
    for block_size in (3, *arguments.BLOCK_SIZES):
        sizes = {"heads": heads, "head_dim": head_dim, "topk": 20, "topk_blocks": 30}
        for documents in ((70,), (LONG,)):
            options = {"mode": "both", "numbers": inputs.whole_numbers, "listed": 9, "queries": 7}
            a = on_gpu.arguments(documents, block_size=block_size, **sizes, **options)
            if (reason := unsupported_shape_reason(heads, head_dim, block_size)) is None:
                on_gpu.assert_exact(a)
                on_gpu.assert_exact(a._replace(candidates=None))
            else:
                with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                    dsv41_index_topk(*a)


def test_later_launches_do_without_tritons_own(monkeypatch):
    """Once compiled, no call goes through Triton's look at every argument; other sizes and strides included."""
    from triton.runtime.jit import JITFunction

    def calls(queries):
        for documents in ((400, 3), (LONG,)):
            for mode in MODES:
                a = on_gpu.arguments(documents, mode=mode, listed=9, topk=9, queries=queries)
                dsv41_index_topk(*a)
                strided = (inputs.STRIDES["slice"](v) if isinstance(v, torch.Tensor) else v for v in a)
                dsv41_index_topk(*strided)

    def refuse(*args, **options):
        raise AssertionError("a launch went through Triton's own")

    calls(50)
    monkeypatch.setattr(JITFunction, "run", refuse)
    for queries in (50, 33, 1):
        calls(queries)
    launcher._compiled.clear()
    with pytest.raises(AssertionError, match="went through"):
        calls(50)


@pytest.mark.parametrize("documents", [(400, 3), (LONG,)], ids=str)
def test_both_ways_of_launching_give_the_same_bytes(documents, monkeypatch):
    from triton.runtime.jit import JITFunction

    made = [on_gpu.arguments(documents, mode=mode, listed=9, queries=50, **on_gpu.V41) for mode in MODES]
    for a in made:
        dsv41_index_topk(*a)
    fast = [dsv41_index_topk(*a) for a in made]
    count = []
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: count.append(1) or run(*args, **options))
    monkeypatch.setattr(launcher.Launch, "_key", lambda self: (None, []))
    for a, wanted in zip(made, fast, strict=True):
        on_gpu.assert_same(dsv41_index_topk(*a), wanted)
    assert len(count) >= 16
