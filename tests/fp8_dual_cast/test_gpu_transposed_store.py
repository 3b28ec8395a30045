"""The transposed FP8 store, which ptxas 12.9 corrupts in kernels that store the plain copy too.

The data are powers of two and every scale is 1, so both copies are the matrix itself and a foreign byte shows.
"""

import os
import warnings
from pathlib import Path

import pytest
import torch
from fp8_dual_cast import launch, reference

from tests.fp8_dual_cast import on_gpu
from tests.support.compare import assert_same_bytes
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

SHAPES = [(128, 128), (256, 640), (1, 128), (127, 384), (129, 256), (515, 1280), (1024, 2304)]
IN_A_PROCESS = """
import torch, triton
from tests.fp8_dual_cast import on_gpu
from tests.fp8_dual_cast.test_gpu_transposed_store import check_all
torch.manual_seed(5)
check_all()
print(triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.ptxas.version)
"""


def identity(tokens, head_dim, rope_dim):
    """A rotation by nothing, which takes the path of rotated tiles."""
    options = on_gpu.rotation(tokens, head_dim, rope_dim)
    options["position_ids"].zero_()
    return options


def check_all(shapes=SHAPES):
    for tokens, channels in shapes:
        for use_ue8m0 in (False, True):
            on_gpu.assert_copies_are_equal(tokens, channels, use_ue8m0=use_ue8m0)
        for head_dim, rope_dim in ((128, 64), (64, 64), (32, 4)):
            on_gpu.assert_copies_are_equal(tokens, channels, **identity(tokens, head_dim, rope_dim))


@pytest.mark.parametrize(("tokens", "channels"), SHAPES)
def test_both_copies_hold_the_same_bytes(tokens, channels):
    check_all([(tokens, channels)])


def test_wide_matrix():
    on_gpu.assert_copies_are_equal(1111, 32768)


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [32, 64, 128])
def test_tile_shapes_of_the_transposed_peer(columns, num_warps, monkeypatch):
    """The fused kernel has one tile shape; the Triton kernel that the benches compare with may have any of these."""
    from benches.peers import column_cast

    monkeypatch.setitem(column_cast.OPTIONS, "COLUMNS", columns)
    monkeypatch.setitem(column_cast.OPTIONS, "num_warps", num_warps)
    for tokens, channels in ((129, 640), (1, 128), (300, 1280)):
        x = on_gpu.matrix(tokens, channels)
        for got, want in zip(column_cast.column_cast(x), reference.column_cast(x), strict=True):
            assert_same_bytes(got, want, f"{tokens} x {channels}")


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
@pytest.mark.parametrize("rows", [16, 32, 64])
def test_tile_shapes_of_the_row_store(rows, num_warps, monkeypatch):
    monkeypatch.setitem(launch.ROW_OPTIONS, "ROWS", rows)
    monkeypatch.setitem(launch.ROW_OPTIONS, "num_warps", num_warps)
    on_gpu.assert_copies_are_equal(129, 640)


@pytest.mark.parametrize("registers", [64, 128, 255])
def test_register_limits_of_the_fused_kernel(registers, monkeypatch):
    """ptxas orders the same instructions anew for each, spills included; the bytes stay."""
    assert launch.DUAL_OPTIONS["maxnreg"] != registers
    monkeypatch.setitem(launch.DUAL_OPTIONS, "maxnreg", registers)
    for tokens, channels in ((129, 640), (300, 1280)):
        check_all([(tokens, channels)])
        on_gpu.check_casts(on_gpu.matrix(tokens, channels), pattern="nan")


def triton_tool(name):
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def system_ptxas():
    return Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda") / "bin" / "ptxas"


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("which", ["bundled", "bundled for Blackwell", "system"])
def test_every_ptxas_at_hand(which, tmp_path):
    """All variants compiled anew by this assembler, in a process of its own."""
    path = {
        "bundled": lambda: triton_tool("ptxas"),
        "bundled for Blackwell": lambda: triton_tool("ptxas-blackwell"),
        "system": system_ptxas,
    }[which]()
    if not path.is_file():
        pytest.skip(f"requires the assembler {path}")
    process = start_python(IN_A_PROCESS, TRITON_CACHE_DIR=str(tmp_path), TRITON_PTXAS_PATH=str(path))
    output = output_of(process, timeout=160)
    assert output.splitlines()[-1].startswith(f"{path} ")
    assert list(tmp_path.rglob("dual_cast_kernel.cubin"))


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_pattern_of_the_issue(num_warps):
    """Informative: in plain Triton the transposed copy may be wrong, which is worth a warning; the plain copy not."""
    from tests.fp8_dual_cast.plain_store_kernel import store_twice

    x = on_gpu.powers_of_two(64, 64)
    plain = torch.zeros(64, 64, dtype=torch.float8_e4m3fn, device=on_gpu.DEVICE)
    transposed = torch.zeros_like(plain)
    store_twice[(1,)](x, plain, transposed, 64, 64, num_warps=num_warps)
    expected = x.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(plain.view(torch.uint8), expected)
    wrong = (transposed.view(torch.uint8).t() != expected).sum().item()
    if wrong:
        warnings.warn(f"triton#11111 is in this toolchain: {wrong} wrong bytes with {num_warps} warps", stacklevel=1)
