"""What the CUDA device is: compute capability, name, number of SMs, shared memory.

Nothing here runs at import, so a process that only imports may still fork. `device` is None (the calling thread's
current CUDA device), an index, a string or a `torch.device`. Facts are cached by device index, never by "current
device": that one is looked up at each call. That CUDA is missing is not cached at all.
"""

import functools

import torch

from hopper_kernels.errors import KernelUnavailable

SM90 = (9, 0)
Device = int | str | torch.device | None

NO_DEVICE = "no CUDA device"
SM90_CARDS = "H100, H200, GH200"
REFERENCE_HINT = "ask for the PyTorch definition with hopper_kernels.reference()"


def cuda_is_visible() -> bool:
    """Whether this PyTorch is a CUDA build that sees a device. False on ROCm, whose MI200 calls itself (9, 0) too."""
    return torch.version.cuda is not None and torch.cuda.is_available()


def cuda_index(device: Device = None) -> int | None:
    """Index of `device`, or None for a device that is not CUDA and on a machine without CUDA.

    Raises ValueError for an index that is not visible, RuntimeError (PyTorch's) for a string that is no device.
    """
    if isinstance(device, int):
        index = device
    else:
        if isinstance(device, str):
            device = torch.device(device)
        if device is not None and device.type != "cuda":
            return None
        index = None if device is None else device.index
    if index is None:
        return torch.cuda.current_device() if cuda_is_visible() else None
    # Once an index was found CUDA is there, and the launch path need not ask the driver again.
    if not _visible_index.cache_info().currsize and not cuda_is_visible():
        return None
    return _visible_index(index)


def capability(device: Device = None) -> tuple[int, int] | None:
    """Compute capability, (9, 0) on Hopper; None without CUDA or for a CPU device."""
    index = cuda_index(device)
    return None if index is None else _capability(index)


def is_sm90(device: Device = None) -> bool:
    """Whether the capability is exactly (9, 0): the kernels use instructions that no other architecture has."""
    return capability(device) == SM90


def num_sms(device: Device = None) -> int:
    """Number of SMs: 132 on H100 SXM and H200, 114 on H100 PCIe. KernelUnavailable without a CUDA device."""
    return _properties(_required_index("the number of SMs", device)).multi_processor_count


def smem_limit(device: Device = None) -> int:
    """Bytes of shared memory that a block may opt in to: 232448 on SM90. KernelUnavailable without a CUDA device."""
    return _properties(_required_index("the shared memory limit", device)).shared_memory_per_block_optin


def device_name(device: Device = None) -> str:
    """The driver's name, "NVIDIA H200"; "no CUDA device" where there is none."""
    index = cuda_index(device)
    return NO_DEVICE if index is None else _name(index)


def describe(device: Device = None) -> str:
    """For messages and logs: "SM90 (NVIDIA H200)", or "no CUDA device"."""
    index = cuda_index(device)
    if index is None:
        return NO_DEVICE
    return f"{sm_name(_capability(index))} ({_name(index)})"


def sm_name(capability: tuple[int, int]) -> str:
    """(9, 0) -> "SM90"."""
    return f"SM{capability[0]}{capability[1]}"


def require_sm90(what: str, device: Device = None) -> None:
    """Raise KernelUnavailable, "<what> requires SM90, found SM80 (NVIDIA A100-SXM4-80GB): ...", unless on SM90."""
    if not is_sm90(device):
        raise KernelUnavailable(
            f"{what} requires SM90, found {describe(device)}: run it on SM90 ({SM90_CARDS}) or {REFERENCE_HINT}"
        )


def ue8m0_for_device(device: Device = None) -> bool:
    """Whether the device's FP8 GEMMs want power-of-two scales: from SM100 on. False without CUDA.

    On SM90 the scales are exact fp32; rounding them to powers of two there only loses accuracy.
    """
    found = capability(device)
    return found is not None and found[0] >= 10


def refresh() -> None:
    """Forget every cached fact, for a process whose visible devices changed (tests do that)."""
    for cached in (_visible_index, _capability, _name, _properties):
        cached.cache_clear()


def _required_index(what: str, device: Device) -> int:
    index = cuda_index(device)
    if index is None:
        raise KernelUnavailable(f"{what} is that of a CUDA device, found {NO_DEVICE}: run it where one is visible")
    return index


@functools.cache
def _visible_index(index: int) -> int:
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise ValueError(f"device must be the index of a visible CUDA device, 0 to {count - 1}, got {index}")
    return index


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _name(index: int) -> str:
    return torch.cuda.get_device_name(index)


@functools.cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)
