"""FP8 launches as a user meets them on an H200: the first one in a capture, and cheap ones from then on."""

import pytest
from moe_experts import launch

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_gpu import everything
from tests.support import first_call, installed, launches

pytestmark = pytest.mark.gpu

CAPTURE_FIRST = """
import torch
from tests.moe_experts import fp8_on_gpu
from tests.support import first_call
torch.manual_seed(0)
t, dout = fp8_on_gpu.operands((70, 0, 129, 3), 9)

def check(found):
    fp8_on_gpu.assert_same(found, fp8_on_gpu.gradients(t, dout))
    fp8_on_gpu.assert_right(t, dout, fp8_on_gpu.results(t, dout))

first_call.capture(lambda: fp8_on_gpu.gradients(t, dout), check)
"""
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
SIZES = [(130, 256, 384), (300, 640, 128), (1, 128, 128)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right numbers or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, folder=tmp_path, quit_at_once=True)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """A process that trains compiles nothing then."""
    installed.precompile("moe_experts", len(launch.variants()), tmp_path)
    installed.assert_compiles_nothing(CALLS, tmp_path, quit_at_once=True)


def test_later_launches_do_without_tritons_own():
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""

    def call(sizes):
        for t, dout in on_gpu.sample_calls(fp8_on_gpu.operands, *sizes):
            everything(t, dout)

    launches.assert_later_ones_do_without_triton(call, first=SIZES[:1], later=SIZES)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes):
    calls = on_gpu.sample_calls(fp8_on_gpu.operands, *sizes)
    for t, dout in calls:
        everything(t, dout)
    fast = [everything(t, dout) for t, dout in calls]
    with launches.through_triton() as seen:
        for (t, dout), wanted in zip(calls, fast, strict=True):
            fp8_on_gpu.assert_same(everything(t, dout), wanted)
    assert len(seen) > 20
