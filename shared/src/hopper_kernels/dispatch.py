"""Which implementation an operator runs: the Hopper kernel, or the definition in PyTorch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from hopper_kernels import arch, registry
from hopper_kernels.errors import KernelUnavailable

_CPU = torch.device("cpu")
_reference: ContextVar[bool] = ContextVar("hopper_kernels_reference", default=False)


@contextmanager
def reference() -> Iterator[None]:
    """Run the PyTorch definitions inside this block, on CUDA tensors of any architecture. Blocks may be nested.

    An operator looks when it is called. That includes operators inside a compiled graph, which are opaque to the
    compiler and look each time the graph runs, so put the block around the call of the compiled function, not inside
    it. It does not include work already captured in a CUDA graph: a replay repeats what was captured.

    The choice belongs to the current thread or asyncio task (a `contextvars` variable). Autograd's own threads do not
    see it: a differentiable operator therefore stores the choice of its forward for its backward.
    """
    token = _reference.set(True)
    try:
        yield
    finally:
        _reference.reset(token)


def reference_requested() -> bool:
    """Whether the caller is inside `reference()`."""
    return _reference.get()


def reference_flag() -> torch.Tensor:
    """`reference_requested()` as a 0-dim bool tensor on the CPU: a result of a forward operator, for its backward.

    A tensor, because `torch.compile` would fix a flag of the schema when it traces; this one is made and looked at when
    the graph runs, as the choice itself is. On the CPU, because reading it must not wait for the GPU.
    """
    return torch.scalar_tensor(reference_requested(), dtype=torch.bool, device=_CPU)


def use_kernel_as_forward(kernel: str, tensor: torch.Tensor, what: str, flag: torch.Tensor | None) -> bool:
    """`use_kernel` in a backward: also inside `reference()` where its forward's `reference_flag` says so."""
    if flag is not None and flag.item():
        with reference():
            return use_kernel(kernel, tensor, what)
    return use_kernel(kernel, tensor, what)


def use_kernel(kernel: str, tensor: torch.Tensor, what: str | None = None) -> bool:
    """Whether an operator of the registered `kernel` runs on `tensor`; False means its definition.

    False for a CPU tensor and inside `reference()`, True on SM90. Raises KernelUnavailable, because a silent fallback
    would be mistaken for the kernel, on any other CUDA device and where what the kernel requires is missing or out of
    range; ValueError for a tensor on neither CPU nor CUDA. Errors call the operator `what`, by default the kernel.
    """
    what = what or kernel
    device = tensor.device
    if device.type == "cpu":
        return False
    if device.type != "cuda":
        raise ValueError(f"the tensors of {what} must be on a CPU or a CUDA device, got one on {device}")
    if _reference.get():
        return False
    arch.require_sm90(what, device)
    reason = registry.software_reason(kernel)
    if reason is not None:
        raise KernelUnavailable(reason)
    return True
