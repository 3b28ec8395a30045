"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import pytest
import torch
from dsa_sparse_attn_bwd import arguments, dsa_sparse_attn_backward, launch, unsupported_shape_reason

from tests.dsa_sparse_attn_bwd import inputs, on_gpu
from tests.dsa_sparse_attn_bwd.on_gpu import CHANNELS, DEVICE, MODES
from tests.support import installed, launches

pytestmark = pytest.mark.gpu

FINITE = """
from dsa_sparse_attn_bwd import sparse_attn_backward_flat
from tests.dsa_sparse_attn_bwd import inputs
print(sum(r.isfinite().all().item() for r in sparse_attn_backward_flat(**inputs.small().flat())))
"""
# As a model calls: V4.1's heads, both widths, outputs with and without a tail, in either mode, any number of queries.
CALLS = """
import torch
from dsa_sparse_attn_bwd import plan
from tests.dsa_sparse_attn_bwd import inputs, on_gpu
plan.PARTS = 1  # or one part would hold all queries
for queries, width in ((300, 640), (397, 128), (1, 640), (70, 128)):
    t = on_gpu.operands(queries, width)
    for call in (t, inputs.with_tail(t, 64)):
        for deterministic in on_gpu.MODES.values():
            on_gpu.flat(call, deterministic)
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_check():
    installed.assert_check_passes("dsa_sparse_attn_bwd", seconds=230)


def test_status():
    installed.assert_status_available("dsa_sparse_attn_bwd")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that runs a model compiles nothing."""
    installed.precompile("dsa_sparse_attn_bwd", len(launch.variants()), tmp_path)
    installed.assert_compiles_nothing(CALLS, tmp_path)


def test_available():
    package = installed.assert_available("dsa_sparse_attn_bwd")
    assert package.dsa_sparse_attn_backward is dsa_sparse_attn_backward


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    assert installed.printed_without_a_device("dsa_sparse_attn_bwd", FINITE) == "3"


@pytest.mark.parametrize("heads", [1, 8, *arguments.HEADS, 48, 256])
@pytest.mark.parametrize("channels", [256, CHANNELS, 576])
def test_shapes_said_to_be_taken_are_taken(heads, channels):
    """And the others raise, with that reason."""
    if (reason := unsupported_shape_reason(heads, channels)) is None:
        for width in (128, 640, 1152, 2176):  # slots of V4.1, and more
            on_gpu.assert_exact(on_gpu.whole(9, width, heads=heads))
        return
    of_heads = torch.zeros(5, heads, channels, device=DEVICE).bfloat16()
    indices = torch.zeros(5, 9, dtype=torch.int32, device=DEVICE)
    lse, sinks = torch.zeros(5, heads, device=DEVICE), torch.zeros(heads, device=DEVICE)
    t = inputs.Operands(of_heads, of_heads, of_heads[:, 0], of_heads, lse, indices, sinks, 1.0)
    for call in (on_gpu.flat, on_gpu.batched):
        with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
            call(t)


def calls(queries):
    for heads in (16, 64):
        for width in (70, 640):
            t = on_gpu.whole(queries, width, heads=heads)
            for call in (t, inputs.with_tail(t, 64), t.each(inputs.STRIDES["slice"])):
                for deterministic in MODES.values():
                    on_gpu.assert_exact(call, deterministic)


def test_later_launches_do_without_tritons_own():
    """Once compiled, no call goes through Triton's look at every argument; other sizes and strides included."""
    launches.assert_later_ones_do_without_triton(calls, first=[50], later=[33, 1, 300, 50])


@pytest.mark.parametrize("heads", arguments.HEADS)
def test_both_ways_of_launching_give_the_same_bits(heads):
    t = on_gpu.whole(133, 70, heads=heads)
    made = [(call, mode) for call in (t, inputs.with_tail(t, 64)) for mode in MODES.values()]
    fast = [on_gpu.assert_exact(*call) for call in made]
    with launches.through_triton() as seen:
        for call, wanted in zip(made, fast, strict=True):
            on_gpu.assert_same(on_gpu.flat(*call), wanted, ordered=True)
    assert len(seen) == 2 * 3 + 2 * 4
