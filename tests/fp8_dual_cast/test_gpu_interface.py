"""What a user sees on an H200: the command line and the registry, in processes of their own."""

import pytest
from fp8_dual_cast import fp8_dual_cast, launch

from tests.support import installed

pytestmark = pytest.mark.gpu

ONES = """
import torch
from fp8_dual_cast import fp8_dual_cast
print(fp8_dual_cast(torch.ones(3, 128).bfloat16()).q.float().unique().tolist())
"""
CALLS = """
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed
for use_ue8m0 in (False, True):
    for tokens in (1, 128, 300):
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        fp8_dual_cast(x, use_ue8m0=use_ue8m0)
        per_token_cast(x, use_ue8m0=use_ue8m0)
        per_token_cast_transposed(x, use_ue8m0=use_ue8m0)
        for head_dim, rope_dim in ((512, 64), (128, 4), (64, 64), (16, 10)):
            for dtype in (torch.int32, torch.int64):
                table = torch.randn(300, rope_dim, device="cuda")
                positions = torch.arange(tokens, device="cuda", dtype=dtype)
                options = {"cos_sin_cache": table, "position_ids": positions, "head_dim": head_dim}
                fp8_dual_cast(x, use_ue8m0=use_ue8m0, **options)
torch.cuda.synchronize()
"""


@pytest.mark.timeout(120)
def test_check():
    installed.assert_check_passes("fp8_dual_cast", seconds=100)


def test_status():
    installed.assert_status_available("fp8_dual_cast")


@pytest.mark.timeout(180)
def test_precompile_fills_the_cache(tmp_path):
    """On this machine it compiles with the device's own driver; the variants then are on disk."""
    installed.precompile("fp8_dual_cast", len(launch.variants()), tmp_path, seconds=100)
    installed.assert_compiles_nothing(CALLS, tmp_path, seconds=100)


def test_available():
    assert installed.assert_available("fp8_dual_cast").fp8_dual_cast is fp8_dual_cast


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    assert installed.printed_without_a_device("fp8_dual_cast", ONES) == "[448.0]"
