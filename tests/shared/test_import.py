"""Importing the wheel needs PyTorch and packaging and touches no GPU. Each test is a process of its own."""

import subprocess
import sys

import hopper_kernels
import pytest

BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "cutlass", "deep_gemm", "quack"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""
NO_CUDA_CALLS = """
import torch
def called(*args, **kwargs):
    raise AssertionError("CUDA was initialised or asked")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = called
torch._C._cuda_init = torch._C._cuda_getDeviceCount = called
"""


def python(source):
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_optional_packages_are_not_needed():
    loaded = python(
        BLOCKER + "import hopper_kernels, hopper_kernels.cli, hopper_kernels.selfcheck, hopper_kernels.models\n"
        "hopper_kernels.status()\n"
        "print([name for name in ('triton', 'cutlass', 'deep_gemm', 'hopper_kernels.precompile',"
        "'hopper_kernels.cubin', 'hopper_kernels.fp8_device') if name in sys.modules])"
    )
    assert loaded == "[]"


def test_the_import_itself_is_light():
    loaded = python(
        "import sys, torch\nbefore = set(sys.modules)\nimport hopper_kernels\n"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))\n"
        "print(sorted(name for name in sys.modules if name.startswith('hopper_kernels.')))"
    )
    packages, modules = loaded.splitlines()
    assert packages == "['hopper_kernels', 'packaging']"
    assert modules == str([f"hopper_kernels.{name}" for name in ("arch", "dispatch", "errors", "registry")])


def test_triton_set_to_none_is_a_reason_not_an_error():
    printed = python(
        "import sys\nfor name in ('triton', 'cutlass', 'deep_gemm'): sys.modules[name] = None\n"
        "import hopper_kernels\nprint(len(hopper_kernels.status()) >= 5)"
    )
    assert printed == "True"


def test_import_does_not_touch_cuda():
    printed = python(
        NO_CUDA_CALLS + "import hopper_kernels, hopper_kernels.cli\n"
        "print('fp8_dual_cast' in hopper_kernels.KERNELS, torch.cuda.is_initialized())"
    )
    assert printed == "True False"


def test_fork_after_import():
    printed = python(
        "import os, sys, torch, hopper_kernels\n"
        "assert hopper_kernels.KERNELS\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    fine = not torch.cuda.is_initialized() and not torch.cuda._is_in_bad_fork()\n"
        "    if torch.cuda.is_available(): torch.ones(1, device='cuda')\n"
        "    os._exit(0 if fine else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    assert printed == "0"


def test_no_device_visible_in_a_subprocess():
    printed = python(
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = ''\nimport hopper_kernels\n"
        "print(any(map(hopper_kernels.is_available, hopper_kernels.KERNELS)))"
    )
    assert printed == "False"


def test_public_names():
    for name in hopper_kernels.__all__:
        assert getattr(hopper_kernels, name) is not None
        assert name in dir(hopper_kernels)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hopper_kernels.nothing  # noqa: B018
