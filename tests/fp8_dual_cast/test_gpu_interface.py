"""What a user sees on an H200: the command line and the registry, in processes of their own."""

import hopper_kernels
import pytest
import torch
from fp8_dual_cast import launch
from hopper_kernels import registry

from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

COMMAND = "import sys; from hopper_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
AVAILABILITY = """
import hopper_kernels, torch
print(hopper_kernels.is_available("fp8_dual_cast"))
print(hopper_kernels.unavailable_reason("fp8_dual_cast"))
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
    output = output_of(start_python(COMMAND, "check", "fp8_dual_cast"), timeout=100)
    rows = [line for line in output.splitlines() if line.startswith("fp8_dual_cast ")]
    assert rows
    assert all("SM90 kernel" in row and row.endswith(" ok") for row in rows), output


def test_status():
    output = output_of(start_python(COMMAND, "status"))
    assert [line.split()[-1] for line in output.splitlines() if line.startswith("fp8_dual_cast ")] == ["available"]


@pytest.mark.timeout(180)
def test_precompile_fills_the_cache(tmp_path):
    """On this machine it compiles with the device's own driver; the variants then are on disk."""
    process = start_python(COMMAND, "precompile", "fp8_dual_cast", TRITON_CACHE_DIR=str(tmp_path))
    rows = [line for line in output_of(process, timeout=100).splitlines() if line.startswith("fp8_dual_cast ")]
    assert len(rows) == len(launch.variants())
    assert len(list(tmp_path.rglob("*.cubin"))) == len(rows)
    # A process that then calls the operators compiles nothing.
    output_of(start_python(CALLS, TRITON_CACHE_DIR=str(tmp_path)), timeout=100)
    assert len(list(tmp_path.rglob("*.cubin"))) == len(rows)


def test_available():
    assert hopper_kernels.is_available("fp8_dual_cast") is True
    assert hopper_kernels.unavailable_reason("fp8_dual_cast") is None
    assert registry.is_available("fp8_dual_cast", torch.cuda.current_device())
    assert hopper_kernels.load("fp8_dual_cast").__name__ == "fp8_dual_cast"
    assert not hopper_kernels.is_available("fp8_dual_cast", "cpu")


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    process = start_python(AVAILABILITY, CUDA_VISIBLE_DEVICES="")
    available, reason, values = output_of(process).splitlines()
    assert available == "False"
    assert "none is visible" in reason
    assert values == "[448.0]"
