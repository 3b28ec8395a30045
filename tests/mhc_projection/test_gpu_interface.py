"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import pytest
from mhc_projection import MAX_LOGITS, hyper_connection, launch, unsupported_shape_reason

from tests.mhc_projection import inputs, on_gpu
from tests.support import installed, launches

pytestmark = pytest.mark.gpu

ONES = """
import torch
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
    installed.assert_check_passes("mhc_projection", seconds=170)


def test_status():
    installed.assert_status_available("mhc_projection")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that trains compiles nothing."""
    installed.precompile("mhc_projection", len(launch.variants()), tmp_path)
    installed.assert_compiles_nothing(CALLS, tmp_path, quit_at_once=True)


def test_available():
    assert installed.assert_available("mhc_projection").hyper_connection is hyper_connection


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    assert installed.printed_without_a_device("mhc_projection", ONES) == "[32.0]"


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


def test_later_launches_do_without_tritons_own():
    """Once compiled, no call goes through Triton's look at every argument; other sizes included."""

    def call(sizes):
        t = on_gpu.operands(*sizes)
        c = on_gpu.all_cotangents(t)
        found = on_gpu.everything(t, c)
        on_gpu.assert_accurate(on_gpu.connection(t, c), on_gpu.exact(t, c), t)
        assert all(r.isfinite().all() for r in found.values())

    first = [(1100, 4, 200), (300, 4, 200)]
    launches.assert_later_ones_do_without_triton(call, first, later=[(1100, 4, 200), (2500, 4, 72), (1, 4, 8)])


@pytest.mark.parametrize("sizes", [(1100, 4, 200), (70, 2, 8), (3, 1, 5120)], ids=str)
def test_both_ways_of_launching_give_the_same_bytes(sizes):
    t = on_gpu.operands(*sizes)
    c = on_gpu.all_cotangents(t)
    on_gpu.everything(t, c)
    fast = on_gpu.everything(t, c)
    with launches.through_triton() as seen:
        on_gpu.assert_same(on_gpu.everything(t, c), fast)
    assert len(seen) > 20
