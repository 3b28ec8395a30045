"""Compiling ahead of time, and reading what came out, on a machine without a GPU."""

import dataclasses
import sys
import types

import pytest
import torch
from hopper_kernels import KernelUnavailable, cubin, precompile, registry
from hopper_kernels.precompile import Report, Variant

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

from triton.runtime import driver  # noqa: E402

from . import small_kernels  # noqa: E402

without_sm90 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0), reason="the real driver is used on SM90"
)


@pytest.fixture(scope="module")
def reports():
    listed = [small_kernels.SCALE, small_kernels.SPILLS, small_kernels.MATMUL]
    return {r.variant: r for r in precompile.compile("small", variants=listed)}


@pytest.fixture
def package(monkeypatch):
    """An installed kernel package `small_package`, whose launch module a test fills."""
    launch = types.ModuleType("small_package.launch")
    launch.__spec__ = types.SimpleNamespace(name="small_package.launch")
    parent = types.ModuleType("small_package")
    parent.__path__ = []
    monkeypatch.setitem(sys.modules, "small_package", parent)
    monkeypatch.setitem(sys.modules, "small_package.launch", launch)
    spec = registry.KernelSpec("small", "small_package", "small-package", "for a test")
    monkeypatch.setattr(registry, "spec", {"small": spec}.__getitem__)
    return launch


def test_a_plain_kernel(reports):
    r = reports["scale"]
    assert (r.kernel, r.warps, r.stack_bytes, r.shared_bytes) == ("small", 4, 0, 0)
    assert 8 <= r.registers <= 40
    # 1024 values, 4 warps: two vectors of 4 a thread. What is expected but absent is a 0.
    assert {k: r.instructions[k] for k in ("LDG", "STG", "FMUL", "UTMALDG")} == {
        "LDG": 2,
        "STG": 2,
        "FMUL": 8,
        "UTMALDG": 0,
    }
    assert "LDL" not in r.instructions
    assert r.seconds > 0


def test_spills_are_reported(reports):
    r = reports["spills"]
    assert r.warps == 1
    assert r.stack_bytes > 0
    assert r.instructions["STL"] > 0
    assert r.instructions["LDL"] > 0


def test_matrix_instructions_under_both_names(reports):
    r = reports["matmul"]
    # 64 x 64 x 64 in steps of 16. The operands' 16 KiB are asked for at launch, the rest is static.
    assert r.instructions["HGMMA"] == 4
    assert r.instructions["HGMMA.64x64x16.F32.BF16"] == 4
    assert 16384 <= r.shared_bytes <= 16384 + 1024


@without_sm90
def test_the_driver_is_restored():
    before = driver._active
    during = []

    def compile_and_look():
        during.append(driver.active)
        return small_kernels.SCALE.compile()

    precompile.compile("small", variants=[Variant("looks", compile_and_look)])
    assert during[0] is not before
    assert driver._active is before
    marker = object()
    driver.set_active(marker)
    try:
        precompile.compile("small", variants=[small_kernels.SCALE])
        assert driver._active is marker
        with pytest.raises(ZeroDivisionError):
            precompile.compile("small", variants=[Variant("raises", lambda: 1 // 0)])
        assert driver._active is marker
    finally:
        driver.set_active(before)


@without_sm90
def test_a_real_device_never_finds_these_kernels():
    precompile.compile("small", variants=[small_kernels.SCALE])
    assert set(small_kernels._scale_kernel.device_caches) == {-1}


def test_the_real_driver_is_used_on_sm90(monkeypatch):
    """There the context manager is the device's, so Triton's cache on disk is filled."""
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append(None)

    monkeypatch.setattr(precompile, "is_sm90", lambda device: device == "cuda:3")
    monkeypatch.setattr(precompile, "cuda_index", lambda device: 3)
    monkeypatch.setattr(precompile, "compile_only_driver", lambda: pytest.fail("compile-only driver on SM90"))
    monkeypatch.setattr(torch.cuda, "device", Device)
    assert precompile.compile("small", variants=[], device="cuda:3") == []
    assert entered == [3, None]


def test_variants_come_from_the_package(package):
    assert precompile.variants_of("small") == []
    assert precompile.compile("small") == []
    package.variants = lambda: [small_kernels.SCALE]
    assert [r.variant for r in precompile.compile("small")] == ["scale"]


def test_a_package_without_a_launch_module(package, monkeypatch):
    monkeypatch.delitem(sys.modules, "small_package.launch")
    assert precompile.variants_of("small") == []


def test_processes():
    with precompile.processes(1) as pool:
        assert pool is None
    with precompile.processes(2) as pool, pytest.raises(ValueError, match="variants must be None"):
        precompile.compile("small", variants=[small_kernels.SCALE], pool=pool)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"), precompile.processes(0):
        pass


def test_unknown_names_and_architectures():
    with pytest.raises(KeyError, match="unknown kernel"):
        precompile.compile("no_such_kernel")
    with pytest.raises(ValueError, match="arch must be 'sm_90a', got 'sm_100a'"):
        precompile.compile("small", variants=[], arch="sm_100a")


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(KernelUnavailable, match=r'pip install "triton>=3\.6"'):
        precompile.compile("small", variants=[])


def test_under_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(KernelUnavailable, match="unset TRITON_INTERPRET"):
        precompile.compile("small", variants=[])


def test_cubin_without_tools(monkeypatch):
    monkeypatch.setattr(cubin.shutil, "which", lambda *_, **__: None)
    with pytest.raises(KernelUnavailable, match="cuobjdump, which was not found: pip install nvidia-cuda-cuobjdump"):
        cubin.read(b"")


def test_tools_of_the_wheels_come_before_those_of_triton_and_path(monkeypatch, tmp_path):
    folders = [tmp_path / "site" / "nvidia" / "cu13" / "bin", tmp_path / "path"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "nvdisasm").write_text("")
        (folder / "nvdisasm").chmod(0o755)
    monkeypatch.setenv("PATH", str(folders[1]))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setattr(cubin.importlib.util, "find_spec", lambda name: None)
    assert cubin._tool("nvdisasm") == str(folders[0] / "nvdisasm")
    (folders[0] / "nvdisasm").unlink()
    assert cubin._tool("nvdisasm") == str(folders[1] / "nvdisasm")


def test_cubin_of_other_bytes():
    with pytest.raises(ValueError, match="cuobjdump cannot read the cubin"):
        cubin.read(b"not a cubin")


def test_a_table_holds_the_reports_but_for_the_times(reports, tmp_path):
    other = Report("other", "v", 32, 0, 1024, 8, {"QGMMA": 2}, 1.5)
    written = [*reports.values(), other]
    precompile.write_table(tmp_path / "table.json", written)
    version, read = precompile.read_table(tmp_path / "table.json")
    assert version == triton.__version__
    assert read == [dataclasses.replace(r, seconds=0.0) for r in written]


def test_a_table_of_one_kernel_keeps_the_others(reports, tmp_path):
    path = tmp_path / "table.json"
    mine, other = Report("mine", "v", 32, 0, 1024, 8, {}, 0.0), Report("other", "v", 40, 0, 0, 4, {}, 0.0)
    precompile.write_table(path, [mine, other])
    better = dataclasses.replace(mine, registers=24)
    precompile.write_table(path, [better], keep_others=True)
    assert precompile.read_table(path)[1] == [better, other]
    precompile.write_table(path, [better])
    assert precompile.read_table(path)[1] == [better]
    path.write_text(path.read_text().replace(triton.__version__, "2.0.0"))
    with pytest.raises(ValueError, match=r"is of triton 2\.0\.0, found .*: write it anew for all kernels"):
        precompile.write_table(path, [other], keep_others=True)
