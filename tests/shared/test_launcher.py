"""Launches of kernel objects that only record what is asked of them: what compiles, and what runs after that."""

from types import SimpleNamespace

import pytest
import torch
from hopper_kernels import launcher
from hopper_kernels.launcher import Launch


class Compiled:
    """What a kernel's first launch returns."""

    def __init__(self, log):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args: self.log.append(("compiled", grid, args))


class Kernel:
    """In place of a `triton.jit` function with these parameters; the last two are its compile-time ones."""

    def __init__(self, *run_time, specialised=(), interpreted=False):
        self.arg_names = [*run_time, "FLAG", "SIZE"]
        self.params = [SimpleNamespace(do_not_specialize=name not in specialised) for name in self.arg_names]
        self.interpreted, self.log = interpreted, []
        if interpreted:
            del self.params

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.log.append(("triton", grid, args, options))
            return None if self.interpreted else Compiled(self.log)

        return launch

    def warmup(self, *args, grid, **options):
        self.log.append(("warmup", grid, args, options))
        return "a compiled kernel"

    @property
    def ways(self):
        return [entry[0] for entry in self.log]


class Descriptor:
    """In place of Triton's TensorDescriptor."""

    def __init__(self, base, *block_shape):
        self.base, self.block_shape = base, list(block_shape)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The current device's index, in a list; nothing is compiled yet."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(launcher, "_compiled", {})
    return current


OPTIONS = {"SIZE": 64, "FLAG": True, "num_warps": 4}


def run(kernel, *args, grid=(7,), **changes):
    Launch(kernel, grid, args, OPTIONS | changes).run()


def test_the_first_launch_is_tritons_and_the_second_that_of_the_compiled_kernel():
    """With three sizes of the grid, and the compile-time values in the order of the signature, without num_warps."""
    kernel, x, other = Kernel("x", "n", "eps"), torch.zeros(4), torch.ones(8)
    run(kernel, x, 3, 1e-6)
    assert kernel.log == [("triton", (7,), (x, 3, 1e-6), OPTIONS | {"enable_fp_fusion": True})]
    run(kernel, other, 5, 0.0)
    assert kernel.ways == ["triton", "compiled"]
    _, grid, args = kernel.log[1]
    assert grid == (7, 1, 1)
    assert args[0] == other.data_ptr()
    assert args[1:] == (5, 0.0, True, 64)


@pytest.mark.parametrize(("grid", "padded"), [((5,), (5, 1, 1)), ((5, 6), (5, 6, 1)), ((5, 6, 7), (5, 6, 7))])
def test_grids_are_not_part_of_a_compilation(grid, padded):
    kernel, x = Kernel("x"), torch.zeros(4)
    run(kernel, x)
    run(kernel, x, grid=grid)
    assert kernel.log[1][:2] == ("compiled", padded)


@pytest.mark.parametrize("value", [0, 1, 16, -1, 2**31 - 1, -(2**31)])
def test_values_of_integers_do_not_compile(value):
    kernel, x = Kernel("x", "n"), torch.zeros(4)
    run(kernel, x, 3)
    run(kernel, x, value)
    assert kernel.ways == ["triton", "compiled"]


def test_another_dtype_compiles():
    kernel = Kernel("x", "y")
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)
    for args in ((x, x), (x, y), (y, x), (x, x), (x, y), (y, x)):
        run(kernel, *args)
    assert kernel.ways == ["triton"] * 3 + ["compiled"] * 3


def test_shapes_and_strides_of_tensors_do_not_compile():
    kernel = Kernel("x")
    for x in (torch.zeros(4), torch.zeros(0), torch.zeros(3, 5).t(), torch.zeros(1).expand(9)):
        run(kernel, x)
    assert kernel.ways == ["triton"] + ["compiled"] * 3


def test_another_type_of_number_compiles():
    kernel, x = Kernel("x", "n"), torch.zeros(4)
    for value in (1, 1.0, 1, 1.0):
        run(kernel, x, value)
    assert kernel.ways == ["triton", "triton", "compiled", "compiled"]


def test_another_device_compiles(device):
    kernel, x = Kernel("x"), torch.zeros(4)
    for index in (0, 1, 0, 1):
        device[0] = index
        run(kernel, x)
    assert kernel.ways == ["triton", "triton", "compiled", "compiled"]


def test_another_option_compiles():
    """A compile-time value, or one of Triton's own; each finds its own constants again."""
    kernel, x = Kernel("x"), torch.zeros(4)
    changes = ({}, {"FLAG": False}, {"SIZE": 128}, {"num_warps": 8}, {"maxnreg": 128})
    for change in (*changes, *changes):
        run(kernel, x, **change)
    assert kernel.ways == ["triton"] * 5 + ["compiled"] * 5
    assert [entry[2][1:] for entry in kernel.log[5:]] == [(True, 64), (False, 64), (True, 128), (True, 64), (True, 64)]


def test_values_of_options_are_not_mixed_up():
    """The same values under other names are another compilation."""
    kernel, x = Kernel("x"), torch.zeros(4)
    for options in ({"FLAG": 1, "SIZE": 2}, {"SIZE": 1, "FLAG": 2}, {"FLAG": 1, "SIZE": 2}):
        Launch(kernel, (1,), (x,), options).run()
    assert kernel.ways == ["triton", "triton", "compiled"]
    assert kernel.log[2][2][1:] == (1, 2)


def test_another_descriptor_compiles():
    """Another block or dtype, not another shape of the tensor."""
    kernel, x = Kernel("x"), torch.zeros(4, 8)
    wide = torch.zeros(99, 8)
    for one in (
        Descriptor(x, 2, 8),
        Descriptor(x, 4, 8),
        Descriptor(x, 2, 1, 8),
        Descriptor(x.bfloat16(), 2, 8),
        Descriptor(wide, 2, 8),
        Descriptor(x, 4, 8),
    ):
        run(kernel, one)
    assert kernel.ways == ["triton"] * 4 + ["compiled"] * 2


def test_a_tensor_is_not_taken_for_a_descriptor():
    kernel, x = Kernel("x"), torch.zeros(4, 8)
    for one in (x, Descriptor(x, 4, 8), x):
        run(kernel, one)
    assert kernel.ways == ["triton", "triton", "compiled"]


def test_kernels_do_not_share_compilations():
    x = torch.zeros(4)
    kernels = [Kernel("x"), Kernel("x")]
    for _ in range(2):
        for kernel in kernels:
            run(kernel, x)
    assert [kernel.ways for kernel in kernels] == [["triton", "compiled"]] * 2


def test_a_kernel_outlives_its_last_user():
    """Else another kernel could get its id, and its compilation."""
    for count in range(1, 4):
        kernel = Kernel("x")
        run(kernel, torch.zeros(4))
        del kernel
        assert len(launcher._compiled) == count


@pytest.mark.parametrize(
    "value", [torch.zeros(8)[1:], torch.zeros(16, dtype=torch.bfloat16)[4:], 2**31, -(2**31) - 1, 2**40], ids=repr
)
def test_a_misaligned_tensor_and_an_integer_of_64_bits_take_tritons_way(value):
    """Always, also when the kernel is compiled for others, and without spoiling it for those."""
    kernel = Kernel("x", "y")
    usual = torch.zeros_like(value) if isinstance(value, torch.Tensor) else 3
    for y in (value, value, usual, value, usual):
        run(kernel, torch.zeros(4), y)
    assert kernel.ways == ["triton", "triton", "triton", "triton", "compiled"]


@pytest.mark.parametrize("value", [True, None, "text"])
def test_an_argument_of_another_kind_takes_tritons_way(value):
    kernel = Kernel("x", "y")
    for _ in range(2):
        run(kernel, torch.zeros(4), value)
    assert kernel.ways == ["triton", "triton"]


def test_a_kernel_that_specialises_on_an_integer_takes_tritons_way():
    kernel, x = Kernel("x", "n", specialised=("n",)), torch.zeros(4)
    for _ in range(3):
        run(kernel, x, 3)
    assert kernel.ways == ["triton"] * 3


def test_what_is_specialised_besides_integers_does_not_matter():
    """Pointers, which are aligned, and numbers that Triton does not look at."""
    kernel, x = Kernel("x", "n", "eps", specialised=("x", "eps", "SIZE")), torch.zeros(4)
    for _ in range(2):
        run(kernel, x, 3, 1e-6)
    assert kernel.ways == ["triton", "compiled"]


def test_the_interpreter_is_always_asked():
    kernel = Kernel("x", interpreted=True)
    for _ in range(3):
        run(kernel, torch.zeros(4))
    assert kernel.ways == ["triton"] * 3
    assert not launcher._compiled


def test_compile_only_compiles():
    kernel, x = Kernel("x"), torch.empty(4, device="meta")
    assert Launch(kernel, (7, 2), (x,), OPTIONS).compile() == "a compiled kernel"
    assert kernel.log == [("warmup", (7, 2), (x,), OPTIONS | {"enable_fp_fusion": True})]
    assert not launcher._compiled
