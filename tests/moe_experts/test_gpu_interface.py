"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import pytest
from moe_experts import launch, moe_experts, unsupported_shape_reason

from tests.moe_experts import on_gpu
from tests.support import first_call, installed, launches

pytestmark = pytest.mark.gpu

ONES = """
import torch
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
from tests.support import first_call
torch.manual_seed(0)
t, dout = on_gpu.operands()
on_gpu.definition64(t, dout)
first_call.capture(lambda: on_gpu.gradients(t, dout), lambda found: on_gpu.assert_accurate(t, dout, found))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_check():
    installed.assert_check_passes("moe_experts", seconds=170)


def test_status():
    installed.assert_status_available("moe_experts")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that trains compiles nothing."""
    installed.precompile("moe_experts", len(launch.variants()), tmp_path)
    installed.assert_compiles_nothing(CALLS, tmp_path, quit_at_once=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_first_call_in_a_capture(tmp_path):
    """A process that compiles, loads and launches inside a capture gets right numbers or a clear error."""
    first_call.assert_captured_or_refused(CAPTURE_FIRST, folder=tmp_path, quit_at_once=True)


def test_available():
    assert installed.assert_available("moe_experts").moe_experts is moe_experts


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    printed = installed.printed_without_a_device("moe_experts", ONES)
    assert printed == "[28.125, 28.125, 0.0]"  # 8 x bf(silu(2) x 2)


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


SIZES = [(130, 136, 72), (300, 264, 520), (1, 8, 8)]


def test_later_launches_do_without_tritons_own():
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""

    def call(sizes):
        for t, dout in on_gpu.sample_calls(on_gpu.operands, *sizes):
            on_gpu.everything(t, dout)
            on_gpu.assert_accurate(t, dout, on_gpu.gradients(t, dout), bound=on_gpu.FEW)

    launches.assert_later_ones_do_without_triton(call, first=SIZES[:1], later=SIZES)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes):
    calls = on_gpu.sample_calls(on_gpu.operands, *sizes)
    for t, dout in calls:
        on_gpu.everything(t, dout)
    fast = [on_gpu.everything(t, dout) for t, dout in calls]
    with launches.through_triton() as seen:
        for (t, dout), wanted in zip(calls, fast, strict=True):
            on_gpu.assert_same(on_gpu.everything(t, dout), wanted)
    assert len(seen) > 20
