"""Compiles a kernel's variants ahead of time and reports what each needs.

On an SM90 device Triton's own driver is used, so its cache on disk is filled and the first step of a training run does
not stall. Anywhere else the same code is compiled for sm_90a: registers, spills, shared memory and instructions are
known without a GPU.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from hopper_kernels import cubin
from hopper_kernels.arch import Device, cuda_index, is_sm90
from hopper_kernels.errors import KernelUnavailable

ARCH = "sm_90a"

MATRIX = ("HGMMA", "QGMMA", "IGMMA", "HMMA")
BULK_COPIES = ("UTMALDG", "UTMASTG", "UBLKCP", "LDGSTS")
SHARED_MEMORY = ("STSM", "LDSM", "STS", "LDS", "SYNCS", "BAR")
GLOBAL_MEMORY = ("LDG", "STG", "ATOM", "RED")
LOCAL_MEMORY = ("LDL", "STL")
ARITHMETIC = ("F2FP", "MUFU", "HMNMX2", "FFMA", "FADD", "FMUL", "SHFL")
WATCHED = (*MATRIX, *BULK_COPIES, *SHARED_MEMORY, *GLOBAL_MEMORY, *LOCAL_MEMORY, *ARITHMETIC, "USETMAXREG")


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel package.

    name: unique in the package, "dual_cast[rope=1,ue8m0=0]".
    compile: calls the kernel's `warmup` with meta tensors and returns Triton's compiled kernel.
    expect: SASS opcodes that must be present, such as ("UTMALDG", "F2FP").
    """

    name: str
    compile: Callable[[], object]
    expect: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a variant became.

    registers, stack_bytes: of a thread, from the cubin; a stack in use (LDL, STL) means spilled registers.
    shared_bytes: of a block, asked for at launch and static together.
    instructions: how often each watched opcode occurs, if at all; warpgroup matrix instructions also by full name;
        opcodes that the variant expects are there even with 0.
    seconds: of the compilation; next to nothing if the variant was in Triton's cache.
    """

    kernel: str
    variant: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    warps: int
    instructions: dict[str, int]
    seconds: float


def variants_of(name: str) -> list[Variant]:
    """The variants of an installed kernel, from its package's `launch.variants()`; none if it has no such function.

    KeyError for an unknown kernel, KernelUnavailable for one that is not installed or without Triton.
    """
    from hopper_kernels import registry

    module = f"{registry.spec(name).module}.launch"
    _require_triton()
    if importlib.util.find_spec(module) is None:
        return []
    listed = getattr(importlib.import_module(module), "variants", None)
    return [] if listed is None else listed()


def compile(
    name: str,
    *,
    variants: Iterable[Variant] | None = None,
    arch: str = ARCH,
    device: Device = None,
    pool: Executor | None = None,
) -> list[Report]:
    """Compile the variants of kernel `name` (default: all that its package lists), and report on each, in order.

    pool: from `processes`, to compile side by side; then `variants` are those that the package lists.
    device: whose cache to fill; None is the current CUDA device. Without an SM90 device there, a driver that can only
    compile stands in for Triton's own until this returns. Spills and missing instructions are reported, not raised.
    ValueError for another `arch` than sm_90a, or for `variants` beside a pool; KeyError and KernelUnavailable as
    `variants_of`, and KernelUnavailable without cuobjdump and nvdisasm; whatever a variant raises passes through.
    """
    if arch != ARCH:
        raise ValueError(f"arch must be {ARCH!r}, got {arch!r}")
    _require_triton()
    if pool is not None:
        if variants is not None:
            raise ValueError("variants must be None, for a pool looks them up by their names")
        tasks = [pool.submit(_compile_one, name, number, device) for number in range(len(variants_of(name)))]
        return [task.result() for task in tasks]
    chosen = variants_of(name) if variants is None else list(variants)
    with torch.cuda.device(cuda_index(device)) if is_sm90(device) else compile_only_driver():
        return [_report(name, variant) for variant in chosen]


def _compile_one(name: str, number: int, device: Device) -> Report:
    (report,) = compile(name, variants=variants_of(name)[number : number + 1], device=device)
    return report


@contextlib.contextmanager
def processes(count: int) -> Iterator[Executor | None]:
    """New processes in which to compile, and the end of them; None, for the caller's own, if `count` is 1.

    Each imports PyTorch, and where there is a GPU has a context there, about 0.5 GB. A script that uses it needs the
    usual `if __name__ == "__main__":`. ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if count == 1:
        yield None
        return
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@contextlib.contextmanager
def compile_only_driver() -> Iterator[None]:
    """In this block Triton believes in a Hopper GPU: `kernel.warmup(...)` compiles for sm_90a, nothing can be launched.

    The driver that was active before is active again afterwards. KernelUnavailable without Triton.
    """
    _require_triton()
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class CompileOnlyDriver(DriverBase):
        @classmethod
        def is_active(cls):
            return True

        def map_python_to_cpp_type(self, ty):
            return ty

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_active_torch_device(self):
            return torch.device("cpu")

        def get_benchmarker(self):
            # For autotuned kernels, which compile every configuration and then pick one of equals.
            return lambda call, quantiles=None, **_: [0.0] * len(quantiles or [0])

        def get_current_device(self):
            # The key of a kernel's cache in memory: not that of a real device, which must not find these.
            return -1

        def get_current_stream(self, device=None):
            return 0

    # Not `driver.active`: it would start a GPU's driver, and raise where there is none.
    before = driver._active
    driver.set_active(CompileOnlyDriver())
    try:
        yield
    finally:
        driver.set_active(before)


def write_table(path: str | os.PathLike, reports: Iterable[Report], *, keep_others: bool = False) -> None:
    """Write reports as JSON to keep under version control, with Triton's version. The times are left out.

    keep_others: leave the entries of kernels that no report is of; ValueError if the file is of another Triton.
    """
    triton = importlib.metadata.version("triton")
    kernels: dict[str, dict] = {}
    for report in reports:
        entry = asdict(report)
        kernel, variant = entry.pop("kernel"), entry.pop("variant")
        del entry["seconds"]
        kernels.setdefault(kernel, {})[variant] = entry
    if keep_others and Path(path).exists():
        old = json.loads(Path(path).read_text())
        if old["triton"] != triton:
            raise ValueError(f"{path} is of triton {old['triton']}, found {triton}: write it anew for all kernels")
        kernels = {**old["kernels"], **kernels}
    table = {"triton": triton, "kernels": kernels}
    Path(path).write_text(json.dumps(table, indent=2) + "\n")


def read_table(path: str | os.PathLike) -> tuple[str, list[Report]]:
    """Triton's version and the reports (with `seconds` 0) of a file that `write_table` wrote."""
    table = json.loads(Path(path).read_text())
    reports = [
        Report(kernel, variant, seconds=0.0, **entry)
        for kernel, entries in table["kernels"].items()
        for variant, entry in entries.items()
    ]
    return table["triton"], reports


def _report(kernel: str, variant: Variant) -> Report:
    start = time.perf_counter()
    compiled = variant.compile()
    seconds = time.perf_counter() - start
    found = cubin.read(compiled.asm["cubin"])
    full_names = sorted(opcode for opcode in found.opcodes if "." in opcode)
    shown = dict.fromkeys(opcode for opcode in (*WATCHED, *full_names) if found.opcodes[opcode])
    return Report(
        kernel=kernel,
        variant=variant.name,
        registers=found.registers,
        stack_bytes=found.stack_bytes,
        shared_bytes=compiled.metadata.shared + found.shared_bytes,
        warps=compiled.metadata.num_warps,
        instructions={opcode: found.opcodes[opcode] for opcode in shown | dict.fromkeys(variant.expect)},
        seconds=seconds,
    )


def _require_triton() -> None:
    try:
        from triton import knobs
    except ImportError as error:
        raise KernelUnavailable(
            f'precompilation requires triton, which does not import ({error}): pip install "triton>=3.6"'
        ) from error
    if knobs.runtime.interpret:
        raise KernelUnavailable("precompilation requires compiled kernels: unset TRITON_INTERPRET")
