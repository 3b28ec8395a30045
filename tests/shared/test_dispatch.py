"""reference() and the choice of the implementation."""

import asyncio
import contextvars
import re
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hopper_kernels import KernelUnavailable, reference
from hopper_kernels.dispatch import reference_flag, reference_requested, use_kernel, use_kernel_as_forward


def on(device):
    """Stands for a tensor on a device that this machine lacks."""
    return SimpleNamespace(device=torch.device(device))


def test_reference_can_be_nested():
    assert not reference_requested()
    with reference():
        assert reference_requested()
        with reference():
            assert reference_requested()
        assert reference_requested()
    assert not reference_requested()


def test_reference_ends_with_an_exception():
    with pytest.raises(RuntimeError, match="inside"), reference():
        raise RuntimeError("inside")
    assert not reference_requested()


def test_reference_is_not_seen_by_another_thread():
    seen = {}
    with reference():
        plain = threading.Thread(target=lambda: seen.update(plain=reference_requested()))
        handed = threading.Thread(
            target=contextvars.copy_context().run, args=(lambda: seen.update(handed=reference_requested()),)
        )
        for thread in (plain, handed):
            thread.start()
            thread.join()
    assert seen == {"plain": False, "handed": True}


def test_reference_is_not_seen_by_another_task():
    async def inside(entered, leave):
        with reference():
            entered.set()
            await leave.wait()
            return reference_requested()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(entered, leave))
        await entered.wait()
        outside = reference_requested()
        leave.set()
        return outside, await task

    assert asyncio.run(main()) == (False, True)


@pytest.fixture(autouse=True)
def kernel(packages):
    """A kernel named x is installed, and requires nothing."""
    packages.install_kernel("x")


def test_a_cpu_tensor_runs_the_definition(machine):
    machine("H200")
    assert use_kernel("x", torch.ones(1)) is False


def test_sm90_runs_the_kernel_unless_told_otherwise(machine):
    machine("H200")
    assert use_kernel("x", on("cuda:0")) is True
    with reference():
        assert use_kernel("x", on("cuda:0")) is False
    assert use_kernel("x", on("cuda:0")) is True


@pytest.mark.parametrize("inside", [False, True])
def test_the_flag_says_where_the_caller_was(inside):
    """As a tensor of its own on the CPU, also where tensors are made elsewhere by default."""
    with torch.device("meta"), reference() if inside else nullcontext():
        flag, other = reference_flag(), reference_flag()
    assert flag.item() is inside
    assert (flag.dtype, flag.device.type, flag.ndim) == (torch.bool, "cpu", 0)
    assert flag.data_ptr() != other.data_ptr()


def test_a_backward_runs_what_its_forward_ran(machine):
    machine("H200")
    for flag, kernel_runs in ((None, True), (torch.tensor(False), True), (torch.tensor(True), False)):
        assert use_kernel_as_forward("x", on("cuda:0"), "an operator", flag) is kernel_runs
        assert not reference_requested()
    with reference():
        assert use_kernel_as_forward("x", on("cuda:0"), "an operator", torch.tensor(False)) is False


def test_another_gpu_raises_unless_told_otherwise(machine):
    machine("H200", "A100")
    assert use_kernel("x", on("cuda:0")) is True
    with pytest.raises(KernelUnavailable, match=r"^x requires SM90, found SM80"):
        use_kernel("x", on("cuda:1"))
    with reference():
        assert use_kernel("x", on("cuda:1")) is False


def test_errors_name_the_operator(machine):
    machine("A100")
    with pytest.raises(KernelUnavailable, match=r"^an operator requires SM90, found SM80"):
        use_kernel("x", on("cuda:0"), "an operator")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            'requires=("no-such-thing>=1",)',
            'y requires no-such-thing, which is not installed: pip install "no-such-thing>=1"',
        ),
        ('requires=("torch<2",)', "y requires torch<2, found"),
        ('modules=("no_such_module",)', "y requires the module no_such_module, which failed to import"),
        ("min_cuda=(13, 1)", "y requires CUDA >= 13.1, torch was built with 13.0: install a newer build of torch"),
    ],
)
def test_what_the_kernel_requires_is_missed_before_a_launch(fields, reason, machine, packages):
    packages.install_kernel("y", fields=fields)
    machine("H200")
    with pytest.raises(KernelUnavailable, match=rf"^{re.escape(reason)}"):
        use_kernel("y", on("cuda:0"))
    with reference():
        assert use_kernel("y", on("cuda:0")) is False
    assert use_kernel("y", torch.ones(1)) is False


def test_another_device_type_is_an_error():
    meta = torch.empty(1, device="meta")
    with pytest.raises(ValueError, match=r"^the tensors of x must be on a CPU or a CUDA device, got one on meta$"):
        use_kernel("x", meta)
    with reference(), pytest.raises(ValueError, match="got one on meta"):
        use_kernel("x", meta)


def test_an_operator_in_a_compiled_graph_looks_when_it_runs():
    calls = []

    @torch.library.custom_op("hopper_kernels_test::choice", mutates_args=())
    def choice(x: torch.Tensor) -> torch.Tensor:
        calls.append(reference_requested())
        return x + 1

    choice.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: choice(x) * 2, fullgraph=True, backend="aot_eager")
    compiled(torch.ones(3))
    with reference():
        compiled(torch.ones(3))
    compiled(torch.ones(3))
    assert calls == [False, True, False]
