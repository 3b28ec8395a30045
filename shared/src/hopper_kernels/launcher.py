"""Launches Triton and Gluon kernels with little work on the host: no argument is looked at that cannot matter.

Triton's own launch looks at every argument, options included, to find the compilation that fits. Here a launch is
known by the types of its arguments and the values of its compile-time parameters alone, which is enough because the
kernels of this project specialise on nothing else: integers are marked `do_not_specialize` and pointers are aligned to
16 bytes. A launch that is not like that takes Triton's way.
"""

from typing import Any, NamedTuple

import torch

# A product and a sum become one operation, whatever TRITON_DEFAULT_FP_FUSION says: the bits depend on it.
_CODE = {"enable_fp_fusion": True}

_TENSOR = torch.Tensor

_compiled: dict[tuple, tuple[Any, tuple, Any]] = {}  # the kernel itself too: its id is in the key


class Launch(NamedTuple):
    """A kernel with its grid (one to three sizes), run-time arguments in their order, and named compile-time options.

    Run-time arguments come first in the kernel's signature. Options are its compile-time parameters, and those of
    Triton (`num_warps`, `maxnreg`).
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream; the first time, compile."""
        key, values = self._key()
        found = None if key is None else _compiled.get(key)
        if found is not None:
            compiled, constants, _ = found
            compiled[self.grid + (1,) * (3 - len(self.grid))](*values, *constants)
            return
        compiled = self.kernel[self.grid](*self.args, **self.options, **_CODE)
        if key is not None and compiled is not None and not _specialised(self.kernel, self.args):
            constants = tuple(self.options[name] for name in self.kernel.arg_names[len(self.args) :])
            _compiled[key] = compiled, constants, self.kernel

    def compile(self) -> Any:
        """Compile only: the tensors may be meta tensors. Returns Triton's compiled kernel."""
        return self.kernel.warmup(*self.args, grid=self.grid, **self.options, **_CODE)

    def _key(self) -> tuple[tuple | None, list]:
        """What the compilation depends on, None if it may depend on more; and the arguments, tensors as addresses.

        Of an address, unlike of a tensor, Triton's launcher does not ask the driver where it points.
        """
        kinds: list[Any] = []
        values: list[Any] = []
        for value in self.args:
            kind: Any = type(value)
            if kind is int:
                if not -(2**31) <= value < 2**31:  # such an integer has another type
                    return None, values
            elif kind is _TENSOR or isinstance(value, _TENSOR):
                kind, value = value.dtype, value.data_ptr()
                if value % 16:
                    return None, values
            elif kind is not float:
                if not hasattr(value, "block_shape"):
                    return None, values
                kind = value.base.dtype, *value.block_shape  # of a tensor descriptor; its layout follows from these
            kinds.append(kind)
            values.append(value)
        return (id(self.kernel), torch.cuda.current_device(), *kinds, *self.options.items()), values


def _specialised(kernel: Any, args: tuple) -> bool:
    """Whether the kernel's compilation may depend on the value of one of the integers."""
    parameters = getattr(kernel, "params", None)
    if parameters is None:
        return True
    return any(
        isinstance(value, int) and not parameter.do_not_specialize
        for value, parameter in zip(args, parameters, strict=False)
    )
