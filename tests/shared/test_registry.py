"""Reasons: each in its turn, each a sentence, none an exception. Packages and machines are fakes (conftest)."""

import dataclasses
import importlib
import pickle
import sys

import hopper_kernels
import pytest
import torch
from hopper_kernels import KERNELS, KernelSpec, KernelUnavailable, is_available, load, registry, spec, status

FIVE = ("dsa_indexer_topk", "moe_experts", "mhc_projection", "dsa_sparse_attn_bwd", "fp8_dual_cast")
reason = hopper_kernels.unavailable_reason


def test_kernels_is_a_tuple_of_the_five_names():
    assert KERNELS == FIVE
    assert isinstance(KERNELS, tuple)
    assert list(KERNELS) == list(FIVE)
    assert len(KERNELS) == 5
    assert KERNELS[0] == "dsa_indexer_topk"
    assert KERNELS[-1] == "fp8_dual_cast"
    assert "mhc_projection" in KERNELS
    assert "other" not in KERNELS


def test_third_party_kernels_are_appended(packages):
    packages.install_kernel("zz_theirs")
    packages.install_kernel("a_theirs")
    assert (*FIVE, "a_theirs", "zz_theirs") == hopper_kernels.KERNELS == registry.KERNELS
    assert spec("a_theirs").distribution == "a-theirs"
    assert set(status()) == set(hopper_kernels.KERNELS)


def test_an_unknown_name_lists_the_known_ones(packages):
    for call in (spec, reason, is_available, load, registry.installed_version, registry.missing_features):
        with pytest.raises(KeyError) as caught:
            call("dsa_indexer")
        assert f"unknown kernel 'dsa_indexer'; known: {', '.join(FIVE)}" in str(caught.value)


def test_a_kernel_that_is_not_installed(machine, packages):
    machine("H200")
    expected = "mhc_projection is not installed: build and install the wheel mhc-projection of this project"
    assert reason("mhc_projection") == expected
    assert status()["mhc_projection"] == expected
    assert not is_available("mhc_projection")
    assert registry.installed_version("mhc_projection") is None
    for call in (spec, load, registry.missing_features):
        with pytest.raises(KernelUnavailable) as caught:
            call("mhc_projection")
        assert str(caught.value) == expected


def test_an_available_kernel(machine, packages):
    machine("H200")
    packages.install_kernel("good_kernel", version="1.2.3")
    assert reason("good_kernel") is None
    assert is_available("good_kernel")
    assert status()["good_kernel"] == "available"
    assert spec("good_kernel").version == registry.installed_version("good_kernel") == "1.2.3"
    module = load("good_kernel")
    assert module is load("good_kernel", 0) is importlib.import_module("good_kernel") is sys.modules["good_kernel"]


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        (("A100",), "any_kernel requires SM90, found SM80 (NVIDIA A100-SXM4-80GB): run it on SM90 (H100, H200, GH200)"),
        (("B200",), "any_kernel requires SM90, found SM100 (NVIDIA B200): run it on SM90 (H100, H200, GH200)"),
        (
            (),
            "any_kernel requires a CUDA device of compute capability 9.0 (H100, H200, GH200): none is visible; look at",
        ),
    ],
)
def test_the_wrong_machine(machine, packages, cards, expected):
    machine(*cards)
    packages.install_kernel("any_kernel")
    assert reason("any_kernel").startswith(expected)
    assert status()["any_kernel"] == reason("any_kernel")
    with pytest.raises(KernelUnavailable) as caught:
        load("any_kernel")
    assert str(caught.value) == reason("any_kernel")


def test_torch_without_cuda(machine, packages):
    machine(cuda=None)
    packages.install_kernel("any_kernel")
    assert "none is visible to this PyTorch, which is built without CUDA; install" in reason("any_kernel")


def test_a_cpu_device_has_a_reason(machine, packages):
    machine("H200")
    packages.install_kernel("any_kernel")
    for device in ("cpu", torch.device("cpu")):
        assert reason("any_kernel", device).endswith("9.0 (H100, H200, GH200), got device 'cpu': name a CUDA device")


@pytest.mark.parametrize("device", [7, -1, "cuda:7", "nonsense", 1.5])
def test_a_device_that_does_not_exist_has_a_reason(machine, packages, device):
    machine("H200")
    packages.install_kernel("any_kernel")
    assert f"but device {device!r} could not be examined: " in reason("any_kernel", device)


def test_a_driver_that_fails_has_a_reason(machine, packages, monkeypatch):
    def broken():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    machine("H200")
    packages.install_kernel("any_kernel")
    monkeypatch.setattr(torch.cuda, "current_device", broken)
    assert "could not be examined: RuntimeError: Cannot re-initialize CUDA" in status()["any_kernel"]


def test_load_looks_at_the_device_in_each_call(machine, packages):
    state = machine("H200", "A100")
    packages.install_kernel("any_kernel")
    assert load("any_kernel") is load("any_kernel", "cuda:0")
    for device in (1, "cuda:1", torch.device("cuda:1")):
        with pytest.raises(KernelUnavailable, match="requires SM90, found SM80"):
            load("any_kernel", device)
    state.current = 1
    with pytest.raises(KernelUnavailable, match="requires SM90, found SM80"):
        load("any_kernel")
    assert is_available("any_kernel", 0)


def test_further_architectures(machine, packages):
    machine("A100", "B200", "H200")
    packages.install_kernel("any_kernel", fields="archs=((8, 0), (10, 0))")
    assert [is_available("any_kernel", index) for index in range(3)] == [True, True, False]
    assert "requires SM80 or SM100, found SM90 (NVIDIA H200): run it on SM80 or SM100 or ask" in reason("any_kernel", 2)


def test_a_package_that_does_not_import(machine, packages):
    machine("H200")
    packages.install(
        "broken-kernel", "0.3", "broken_kernel = broken_kernel:SPEC", broken_kernel="import no_such_module"
    )
    packages.install_kernel("good_kernel")
    expected = "broken_kernel failed to import: ModuleNotFoundError: No module named 'no_such_module'; repair or "
    assert reason("broken_kernel") == expected + "reinstall broken-kernel 0.3"
    assert status()["good_kernel"] == "available"
    assert registry.installed_version("broken_kernel") == "0.3"
    with pytest.raises(KernelUnavailable, match="failed to import"):
        spec("broken_kernel")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "failed to import: AttributeError"),
        ("SPEC = 3", "must be the KernelSpec of that name, got 3"),
        (
            "from hopper_kernels import KernelSpec\nSPEC = KernelSpec('other', 'm', 'd', '')",
            "got KernelSpec(name='other'",
        ),
        ("raise ValueError('at import')", "failed to import: ValueError: at import"),
    ],
)
def test_an_entry_point_that_names_no_spec(packages, source, expected):
    packages.install("odd-kernel", entry_points="odd_kernel = odd_kernel:SPEC", odd_kernel=source)
    assert expected in status()["odd_kernel"]


def test_two_distributions_that_claim_one_name(machine, packages):
    machine("H200")
    packages.install_kernel("twice")
    packages.install("impostor", "2.0", "twice = twice:SPEC")
    assert reason("twice") in (
        "twice is claimed by twice 1.0 and by impostor 2.0: uninstall all but one of them",
        "twice is claimed by impostor 2.0 and by twice 1.0: uninstall all but one of them",
    )
    assert not is_available("twice")


def test_one_distribution_found_twice_on_the_path_is_no_duplicate(machine, packages, monkeypatch, tmp_path):
    machine("H200")
    packages.install_kernel("once")
    monkeypatch.syspath_prepend(tmp_path / "once-1.0")
    registry.refresh()
    assert is_available("once")


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("needed>=3.5,<3.9", None),
        ("needed", None),
        ("Needed>=3.8.0rc1", None),
        ("needed>=4", 'k requires needed>=4, found 3.8.0: pip install "needed>=4"'),
        ("needed>=3.5,<3.8", 'k requires needed>=3.5,<3.8, found 3.8.0: pip install "needed>=3.5,<3.8"'),
        ("absent>=1", 'k requires absent, which is not installed: pip install "absent>=1"'),
        ("absent>=1; python_version < '3'", None),
        ("absent>=1; python_version > '3'", 'k requires absent, which is not installed: pip install "absent>=1"'),
        ("not a requirement", "k requires not a requirement, which could not be compared with what is installed: "),
    ],
)
def test_requirements(machine, packages, requirement, expected):
    machine("H200")
    packages.install("needed", "3.8.0")
    packages.install_kernel("k", fields=f"requires=({requirement!r},)")
    if expected is None:
        assert reason("k") is None
    else:
        assert reason("k").startswith(expected)


def test_a_nightly_of_a_requirement_counts(machine, packages):
    machine("H200")
    packages.install("needed", "3.8.0.dev20260101+git1234")
    packages.install_kernel("k", fields="requires=('needed>=3.5,<3.9',)")
    assert is_available("k")


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("parent.child", None),
        # find_spec would raise on this one: its parent is missing.
        ("missing.parent.child", "ModuleNotFoundError: No module named 'missing'"),
        ("parent.absent", "ModuleNotFoundError: No module named 'parent.absent'"),
        # find_spec would be content with this one: it is there, and broken.
        ("parent.broken", "ImportError: undefined symbol"),
    ],
)
def test_modules_must_import(machine, packages, module, expected):
    machine("H200")
    broken = "raise ImportError('undefined symbol')"
    packages.install("parent", parent="", parent__child="", parent__broken=broken)
    packages.install_kernel("k", fields=f"modules=({module!r},)")
    if expected is None:
        assert reason("k") is None
    else:
        assert reason("k").startswith(f"k requires the module {module}, which failed to import: {expected}")
        assert status()["k"] == reason("k")


@pytest.mark.parametrize(
    ("built_with", "available"), [("12.4", False), ("12.8", True), ("12.10", True), ("13.0", True)]
)
def test_min_cuda(machine, packages, built_with, available):
    machine("H200", cuda=built_with)
    packages.install_kernel("k", fields="min_cuda=(12, 8)")
    expected = "k requires CUDA >= 12.8, torch was built with 12.4: install a newer build of torch"
    assert reason("k") == (None if available else expected)


def test_the_order_of_reasons(machine, packages):
    packages.install_kernel("k", fields="requires=('absent',), modules=('missing',), min_cuda=(99, 0)")
    machine()
    assert "absent, which is not installed" in reason("k")
    packages.install("absent")
    assert "module missing" in reason("k")
    packages.install("missing", missing="")
    assert "none is visible" in reason("k")
    machine("A100")
    assert "found SM80" in reason("k")
    machine("H200")
    assert "CUDA >= 99.0" in reason("k")


def test_optional_features_do_not_make_a_kernel_unavailable(machine, packages):
    machine("H200")
    packages.install("needed", "3.8.0")
    packages.install_kernel("k", fields="optional={'fp8': ('needed', 'absent>=1'), 'fast': ('needed>=3',)}")
    assert is_available("k")
    expected = 'fp8 of k requires absent, which is not installed: pip install "absent>=1"'
    assert registry.missing_features("k") == {"fp8": expected}


def test_requirements_are_looked_at_once(machine, packages, monkeypatch):
    machine("H200")
    packages.install_kernel("k", fields="requires=('torch',), modules=('json',)")
    assert is_available("k")

    def asked(*args, **kwargs):
        raise AssertionError("asked again")

    monkeypatch.setattr(importlib.metadata, "version", asked)
    monkeypatch.setattr(importlib.metadata, "entry_points", asked)
    monkeypatch.setattr(importlib, "import_module", asked)
    monkeypatch.setattr(torch.cuda, "get_device_capability", asked)
    assert is_available("k")
    assert is_available("k", "cuda:0")


def test_refresh_sees_a_new_installation(packages):
    assert "late" not in hopper_kernels.KERNELS
    packages.install_kernel("late")
    assert hopper_kernels.KERNELS[-1] == "late"


def test_spec_is_frozen_and_hashable():
    one = KernelSpec("a", "a", "a", "", optional={"fp8": ("x",)})
    assert (one.archs, one.requires, one.modules, one.min_cuda) == (((9, 0),), (), (), None)
    assert len({one, dataclasses.replace(one, name="b")}) == 2
    assert one.version is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.name = "b"


def test_kernel_unavailable_survives_pickling():
    error = pickle.loads(pickle.dumps(KernelUnavailable("x requires SM90")))
    assert type(error) is KernelUnavailable
    assert isinstance(error, RuntimeError)
    assert str(error) == "x requires SM90"


@pytest.mark.gpu
def test_a_kernel_on_this_machine(packages):
    packages.install_kernel("k")
    for index in range(torch.cuda.device_count()):
        assert reason("k", index) is None
    assert load("k", torch.cuda.current_device()) is importlib.import_module("k")
