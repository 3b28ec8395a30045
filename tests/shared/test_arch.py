"""Facts of the device, on machines that are not here."""

import pytest
import torch
from hopper_kernels import KernelUnavailable, arch


@pytest.mark.parametrize(
    ("card", "capability", "sm90", "ue8m0", "sms", "description"),
    [
        ("A100", (8, 0), False, False, 108, "SM80 (NVIDIA A100-SXM4-80GB)"),
        ("H200", (9, 0), True, False, 132, "SM90 (NVIDIA H200)"),
        ("H100 PCIe", (9, 0), True, False, 114, "SM90 (NVIDIA H100 PCIe)"),
        ("B200", (10, 0), False, True, 148, "SM100 (NVIDIA B200)"),
    ],
)
def test_facts_of_a_card(machine, card, capability, sm90, ue8m0, sms, description):
    machine(card)
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda:0")):
        assert arch.capability(device) == capability
        assert arch.is_sm90(device) is sm90
        assert arch.ue8m0_for_device(device) is ue8m0
        assert arch.num_sms(device) == sms
        assert arch.describe(device) == description
        assert arch.device_name(device) in description


def test_shared_memory_limit_of_sm90(machine):
    machine("H200")
    assert arch.smem_limit() == 232448


def test_without_cuda(machine):
    machine()
    for device in (None, 0, "cuda:3", "cpu"):
        assert arch.capability(device) is None
        assert not arch.is_sm90(device)
        assert not arch.ue8m0_for_device(device)
        assert arch.describe(device) == arch.device_name(device) == "no CUDA device"
        with pytest.raises(KernelUnavailable, match=r"number of SMs .* no CUDA device"):
            arch.num_sms(device)
        with pytest.raises(KernelUnavailable, match=r"shared memory limit .* no CUDA device"):
            arch.smem_limit(device)


def test_a_cpu_device_beside_a_gpu_has_no_capability(machine):
    machine("H200")
    assert arch.capability("cpu") is None
    assert arch.capability(torch.device("cpu")) is None


def test_rocm_is_not_cuda(machine):
    # An MI200 reports the capability (9, 0).
    machine("H200", cuda=None, hip="6.4")
    assert arch.capability() is None
    assert not arch.is_sm90(0)


def test_the_device_argument_is_honoured(machine):
    state = machine("A100", "H200")
    assert [arch.is_sm90(index) for index in (None, 0, 1)] == [False, False, True]
    state.current = 1
    assert [arch.is_sm90(index) for index in (None, 0, 1)] == [True, False, True]
    assert arch.describe("cuda") == "SM90 (NVIDIA H200)"
    assert arch.describe("cuda:0") == "SM80 (NVIDIA A100-SXM4-80GB)"


@pytest.mark.parametrize("device", [2, -1, "cuda:2"])
def test_an_index_that_is_not_visible(machine, device):
    machine("H200", "H200")
    with pytest.raises(ValueError, match=r"visible CUDA device, 0 to 1, got"):
        arch.capability(device)


def test_that_cuda_is_missing_is_not_cached(machine):
    machine()
    assert arch.capability(0) is None
    machine("H200")
    assert arch.capability(0) == (9, 0)


def test_facts_are_asked_for_once(machine, monkeypatch):
    machine("H200")
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: asked.append(index) or (9, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asked.append("available") or True)
    for _ in range(3):
        arch.require_sm90("the kernel", torch.device("cuda:0"))
    assert asked == ["available", 0]


def test_require_sm90(machine):
    machine("A100", "H200")
    arch.require_sm90("fp8_dual_cast", 1)
    with pytest.raises(KernelUnavailable) as caught:
        arch.require_sm90("fp8_dual_cast", 0)
    assert str(caught.value).startswith("fp8_dual_cast requires SM90, found SM80 (NVIDIA A100-SXM4-80GB): run it on ")
    assert "hopper_kernels.reference()" in str(caught.value)
    machine()
    with pytest.raises(KernelUnavailable, match=r"^x requires SM90, found no CUDA device: "):
        arch.require_sm90("x")


@pytest.mark.gpu
def test_the_device_of_this_machine():
    properties = torch.cuda.get_device_properties(0)
    assert arch.is_sm90(0)
    assert arch.num_sms(0) == properties.multi_processor_count
    assert arch.smem_limit(0) == 232448
    assert arch.describe(0) == f"SM90 ({properties.name})"
