"""What a compiled kernel needs and which instructions it has, read from its cubin: no GPU is involved."""

import collections
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hopper_kernels.errors import KernelUnavailable

_MATRIX_OPCODES = ("HGMMA", "QGMMA")
_RESOURCE = re.compile(r"\b(REG|STACK|SHARED|LOCAL):(\d+)")
# "        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.a-z]*)", re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    """Resources and instructions of a cubin; of several functions in it, the largest of each resource.

    registers: of a thread; with register reallocation between warpgroups, what the launch starts from.
    stack_bytes, local_bytes: of a thread. Spilled registers live in the stack.
    shared_bytes: static shared memory of a block (1 KiB may be the compiler's own); what a launch asks for is extra.
    opcodes: how often each SASS opcode occurs, by its name up to the first dot ("LDG"); warpgroup matrix instructions
        count under their full names as well ("HGMMA.64x256x16.F32.BF16").
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    opcodes: collections.Counter


def read(cubin: bytes) -> Cubin:
    """Disassemble a cubin.

    KernelUnavailable if cuobjdump or nvdisasm is not installed, ValueError if they cannot read the bytes.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _run(_tool("cuobjdump"), "-res-usage", str(path))
        sass = _run(_tool("nvdisasm"), "-c", str(path))
    most = collections.defaultdict(int)
    for resource, amount in _RESOURCE.findall(usage):
        most[resource] = max(most[resource], int(amount))
    opcodes = collections.Counter()
    for opcode in _INSTRUCTION.findall(sass):
        short = opcode.partition(".")[0]
        opcodes[short] += 1
        if short in _MATRIX_OPCODES:
            opcodes[opcode] += 1
    if "REG" not in most or not opcodes:
        raise ValueError("the cubin has no function")
    return Cubin(most["REG"], most["STACK"], most["LOCAL"], most["SHARED"], opcodes)


def _tool(name: str) -> str:
    """Path of a disassembler: NVIDIA's wheels come first, what Triton bundles is older, PATH may be anything."""
    folders = [os.path.join(entry, "nvidia", "cu13", "bin") for entry in sys.path]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(os.path.join(triton.submodule_search_locations[0], "backends", "nvidia", "bin"))
    found = shutil.which(name, path=os.pathsep.join(folders)) or shutil.which(name)
    if found is None:
        raise KernelUnavailable(f"reading a cubin requires {name}, which was not found: pip install nvidia-cuda-{name}")
    return found


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{Path(command[0]).name} cannot read the cubin: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
