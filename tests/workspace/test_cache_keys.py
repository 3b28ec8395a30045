"""Triton's cache finds what was compiled before: the key of a kernel does not depend on what was launched first.

Triton 3.6 merges the globals that a function's callees read only if the callees have keys already. A callee that two
kernels share, and which reads a global of its own, then gives the second another key than it has in a process that
launches it first, and training compiles what was compiled ahead.
"""

import json

import pytest
from hopper_kernels import registry

from tests.support.process import output_of, start_python

INSTALLED = [name for name in registry.KERNELS if registry.installed_version(name)]
# The number of kernels, and the names of those with another key after all others have theirs than in a new process.
DIFFERENT = """
import importlib, json, pkgutil, sys
from triton.runtime.jit import JITCallable

package = importlib.import_module(sys.argv[1])
names = [module.name for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
members = [f for name in names for f in vars(importlib.import_module(name)).values() if isinstance(f, JITCallable)]
functions = list({id(f): f for f in members}.values())
kernels = [f for f in functions if f.__name__.endswith("_kernel")]

def key_after(kernel, others):
    for f in functions:
        f.hash, f.used_global_vals = None, {}
    return [f.cache_key for f in (*others, kernel)][-1]

different = [k.__name__ for k in kernels if key_after(k, []) != key_after(k, [f for f in kernels if f is not k])]
print(json.dumps([len(kernels), different]))
"""


@pytest.mark.parametrize("kernel", INSTALLED)
def test_keys_do_not_depend_on_the_order(kernel):
    pytest.importorskip("triton")
    count, different = json.loads(output_of(start_python(DIFFERENT, f"{kernel}.kernels")))
    assert count
    assert different == []
