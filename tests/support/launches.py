"""What is launched, where, and through what: recorded, counted or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from hopper_kernels import launcher
from hopper_kernels.launcher import Launch
from torch import Tensor


@contextlib.contextmanager
def none_allowed() -> Iterator[None]:
    """Within the block a launch raises AssertionError: "a kernel was launched"."""

    def refuse(self):
        raise AssertionError("a kernel was launched")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "run", refuse)
        yield


@contextlib.contextmanager
def through_triton() -> Iterator[list]:
    """Within the block every launch goes through Triton's own, and adds an element to the list."""
    from triton.runtime.jit import JITFunction

    seen, run = [], JITFunction.run
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", lambda *args, **options: seen.append(1) or run(*args, **options))
        patch.setattr(Launch, "_key", lambda self: (None, []))
        yield seen


def assert_later_ones_do_without_triton(call: Callable, first: Sequence, later: Sequence) -> None:
    """After call(x) for each x of `first`, none of those of `later` goes through Triton's look at every argument.

    The last one of them does where the launcher has forgotten what was compiled.
    """
    from triton.runtime.jit import JITFunction

    def refuse(*args, **options):
        raise AssertionError("a launch went through Triton's own")

    for one in first:
        call(one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", refuse)
        for one in later:
            call(one)
        patch.setattr(launcher, "_compiled", {})
        with pytest.raises(AssertionError, match="went through"):
            call(later[-1])


def current_tensors(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What `torch.cuda.device_of` was entered with and not yet left, outermost first; the devices need not exist."""
    entered = []

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    return entered


def compiled_for(one: Launch) -> tuple:
    """What a launch's compilation depends on."""
    kinds = [
        (t.base.dtype, *t.block_shape) if hasattr(t, "block_shape") else getattr(t, "dtype", type(t)) for t in one.args
    ]
    return one.kernel.__name__, tuple(kinds), tuple(sorted(one.options.items()))


def assert_compiled_ahead(variants: Iterable, launches: Iterable[Launch]) -> None:
    """The variants are what these launches ask for: nothing else, and nothing twice."""
    wanted = {compiled_for(one) for one in launches}
    found = [compiled_for(variant.compile.__self__) for variant in variants]
    assert len(set(found)) == len(found)
    assert set(found) == wanted
