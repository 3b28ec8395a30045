"""Which kernels there are, and why one cannot run here.

A kernel package registers an entry point `<kernel name> = "<import name>:SPEC"` in the group `hopper_kernels`. What is
installed is looked at once per process (`refresh` looks again), the device at each call.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from hopper_kernels import arch
from hopper_kernels.errors import KernelUnavailable

GROUP = "hopper_kernels"
PROJECT_KERNELS = ("dsa_indexer_topk", "moe_experts", "mhc_projection", "dsa_sparse_attn_bwd", "fp8_dual_cast")

KERNELS: tuple[str, ...]
"""Names of this project's kernels, installed or not, then of those that other distributions registered."""


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel package says of itself."""

    name: str
    """Name of the kernel and of its entry point."""
    module: str
    """Import name."""
    distribution: str
    """Name to give to pip, "mhc-projection"."""
    description: str
    """One line."""
    archs: tuple[tuple[int, int], ...] = (arch.SM90,)
    """Compute capabilities that it runs on, each exact."""
    requires: tuple[str, ...] = ()
    """Requirements, "triton>=3.5,<3.9", compared with the installed versions."""
    modules: tuple[str, ...] = ()
    """Dotted modules that must import, "triton.experimental.gluon"."""
    min_cuda: tuple[int, int] | None = None
    """CUDA version that PyTorch must be built with, at least."""
    optional: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    """Requirements of optional features by name; one that is missing never makes the kernel unavailable."""

    @property
    def version(self) -> str | None:
        """Version of the installed distribution, None where there is none."""
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


def spec(name: str) -> KernelSpec:
    """The kernel's own record.

    KeyError, which lists the known names, for an unknown one; KernelUnavailable for a kernel whose package is not
    installed or does not import.
    """
    _check_known(name)
    found = _spec_or_reason(name)
    if isinstance(found, str):
        raise KernelUnavailable(found)
    return found


def unavailable_reason(name: str, device: arch.Device = None) -> str | None:
    """Why the Hopper kernel `name` cannot run on `device` (default: the current CUDA device), or None if it can.

    A CPU device has a reason too: the package computes there, but not with its kernel. Never raises for a known name;
    KeyError for an unknown one. Compiles nothing, and is cheap from the second call on.
    """
    _check_known(name)
    return _install_reason(name) or _device_reason(_spec_or_reason(name), device)


def software_reason(name: str) -> str | None:
    """The part of `unavailable_reason` without the device: the package, what it requires, the CUDA of PyTorch.

    Looked up once per process, so that an operator can ask in each call. KeyError for an unknown name.
    """
    _check_known(name)
    return _software_reason(name)


def is_available(name: str, device: arch.Device = None) -> bool:
    """Whether the Hopper kernel `name` can run on `device`: `unavailable_reason` is None. KeyError as there."""
    return unavailable_reason(name, device) is None


def load(name: str, device: arch.Device = None) -> ModuleType:
    """The kernel's module, the very object that `import` gives, if the kernel can run on `device`.

    The device is looked at in each call. KernelUnavailable, with the reason, otherwise; KeyError for an unknown name.
    """
    reason = unavailable_reason(name, device)
    if reason is not None:
        raise KernelUnavailable(reason)
    return importlib.import_module(spec(name).module)


def status(device: arch.Device = None) -> dict[str, str]:
    """For a line in the log: "available" or the reason, for each name of `KERNELS`. Never raises."""
    return {name: unavailable_reason(name, device) or "available" for name in _names()}


def installed_version(name: str) -> str | None:
    """Version of the distribution that registers kernel `name`, without importing it; None if nothing does."""
    _check_known(name)
    claims = _claims().get(name)
    if not claims:
        return None
    return claims[0].dist.version if claims[0].dist else "unknown"


def missing_features(name: str) -> dict[str, str]:
    """Optional features of an installed kernel that cannot be used here, each with its reason. Errors as `spec`."""
    missing = {}
    for feature, requirements in spec(name).optional.items():
        fault = next(filter(None, map(_requirement_fault, requirements)), None)
        if fault:
            missing[feature] = f"{feature} of {name} {fault}"
    return missing


def refresh() -> None:
    """Forget what was found, after an installation in a running process. Modules already imported stay as they are."""
    importlib.invalidate_caches()
    for cached in (
        _claims,
        _names,
        _spec_or_reason,
        _install_reason,
        _software_reason,
        _requirement_fault,
        _module_fault,
        _index_reason,
    ):
        cached.cache_clear()
    arch.refresh()


def __getattr__(name: str):
    # Not a constant: reading the entry points at import would cost every program that only wants one operator.
    if name == "KERNELS":
        return _names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _claims() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """The entry points of each name: one, unless two distributions claim it."""
    claims: dict[str, list[importlib.metadata.EntryPoint]] = {}
    for entry_point in importlib.metadata.entry_points(group=GROUP):
        same_name = claims.setdefault(entry_point.name, [])
        if _claimant(entry_point) not in map(_claimant, same_name):
            same_name.append(entry_point)
    return claims


@functools.cache
def _names() -> tuple[str, ...]:
    return PROJECT_KERNELS + tuple(sorted(set(_claims()) - set(PROJECT_KERNELS)))


def _check_known(name: str) -> None:
    if name not in _names():
        raise KeyError(f"unknown kernel {name!r}; known: {', '.join(_names())}")


def _claimant(entry_point: importlib.metadata.EntryPoint) -> str:
    if entry_point.dist is None:
        return entry_point.value
    return f"{entry_point.dist.name} {entry_point.dist.version}"


@functools.cache
def _spec_or_reason(name: str) -> KernelSpec | str:
    claims = _claims().get(name, [])
    if not claims:
        return f"{name} is not installed: build and install the wheel {name.replace('_', '-')} of this project"
    if len(claims) > 1:
        return f"{name} is claimed by {' and by '.join(map(_claimant, claims))}: uninstall all but one of them"
    entry_point = claims[0]
    try:
        found = entry_point.load()
    except Exception as error:
        return f"{name} failed to import: {_text(error)}; repair or reinstall {_claimant(entry_point)}"
    if not isinstance(found, KernelSpec) or found.name != name:
        return (
            f"{name} is registered by {_claimant(entry_point)} as {entry_point.value}, which must be the KernelSpec "
            f"of that name, got {found!r}: reinstall or report it"
        )
    return found


@functools.cache
def _install_reason(name: str) -> str | None:
    """The reasons that do not depend on the device."""
    found = _spec_or_reason(name)
    if isinstance(found, str):
        return found
    faults = (*map(_requirement_fault, found.requires), *map(_module_fault, found.modules))
    fault = next(filter(None, faults), None)
    return fault and f"{name} {fault}"


@functools.cache
def _software_reason(name: str) -> str | None:
    return _install_reason(name) or _cuda_fault(spec(name))


def _cuda_fault(found: KernelSpec) -> str | None:
    """Why the CUDA that PyTorch was built with is too old, None if it is not, or if there is none."""
    cuda = torch.version.cuda
    if found.min_cuda is None or cuda is None or Version(cuda) >= Version("{}.{}".format(*found.min_cuda)):
        return None
    wanted = ".".join(map(str, found.min_cuda))
    return f"{found.name} requires CUDA >= {wanted}, torch was built with {cuda}: install a newer build of torch"


@functools.cache
def _requirement_fault(text: str) -> str | None:
    """What is wrong with a requirement, "requires ...", None if it is met. Never raises."""
    try:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            return None
        wanted = text.partition(";")[0].strip()
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return f'requires {requirement.name}, which is not installed: pip install "{wanted}"'
        # A pre-release of a version in the range is a choice its user made.
        if not requirement.specifier.contains(found, prereleases=True):
            return f'requires {wanted}, found {found}: pip install "{wanted}"'
    except Exception as error:
        return f"requires {text}, which could not be compared with what is installed: {_text(error)}; reinstall it"
    return None


@functools.cache
def _module_fault(module: str) -> str | None:
    """What is wrong with a module, None if it imports. Never raises.

    Importing is the test: `find_spec` raises if a parent is missing, and finds packages that do not import.
    """
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"requires the module {module}, which failed to import: {_text(error)}; install or repair it"
    return None


def _device_reason(found: KernelSpec, device: arch.Device) -> str | None:
    """The reasons that depend on the device."""
    capabilities = " or ".join(f"{major}.{minor}" for major, minor in found.archs)
    wanted = f"{found.name} requires a CUDA device of compute capability {capabilities}{_cards(found)}"
    try:
        if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
            return f"{wanted}, got device {str(device)!r}: name a CUDA device"
        if torch.version.cuda is None:
            return f"{wanted}: none is visible to this PyTorch, which is built without CUDA; install a build with it"
        index = arch.cuda_index(device)
        if index is None:
            return f"{wanted}: none is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        return _index_reason(found.name, index)
    except Exception as error:
        return f"{wanted}, but device {device!r} could not be examined: {_text(error)}"


@functools.cache
def _index_reason(name: str, index: int) -> str | None:
    found = spec(name)
    if arch.capability(index) not in found.archs:
        sm_names = " or ".join(map(arch.sm_name, found.archs))
        return (
            f"{name} requires {sm_names}, found {arch.describe(index)}: "
            f"run it on {sm_names}{_cards(found)} or {arch.REFERENCE_HINT}"
        )
    return _cuda_fault(found)


def _cards(found: KernelSpec) -> str:
    return f" ({arch.SM90_CARDS})" if found.archs == (arch.SM90,) else ""


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
