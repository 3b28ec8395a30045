"""What every Hopper training kernel of this project needs, and nothing more.

Importing it needs Python, PyTorch and packaging, and initialises no CUDA. Kernels are found by the entry-point group
`hopper_kernels`; what a machine lacks is a reason in `status()`, not an import error.
"""

from hopper_kernels import registry
from hopper_kernels.dispatch import reference
from hopper_kernels.errors import KernelUnavailable
from hopper_kernels.registry import KernelSpec, is_available, load, spec, status, unavailable_reason

__version__ = "0.1.0"

__all__ = [
    "KERNELS",
    "KernelSpec",
    "KernelUnavailable",
    "__version__",
    "is_available",
    "load",
    "reference",
    "spec",
    "status",
    "unavailable_reason",
]

KERNELS: tuple[str, ...]


def __getattr__(name: str):
    # Looked up when asked for, because it depends on what is installed.
    if name == "KERNELS":
        return registry.KERNELS
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "KERNELS"})
