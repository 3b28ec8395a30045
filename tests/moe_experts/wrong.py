"""Arguments that are wrong: how the tests of errors make them, real and traced."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

real_and_fake = pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
BF16 = torch.bfloat16
COUNTS = "num_tokens_per_expert"


def ones(*shape, dtype=BF16):
    """Makes a tensor when called, inside the test's FakeTensorMode."""
    return lambda: torch.ones(shape, dtype=dtype)


def counts(*sizes, dtype=torch.int64):
    return lambda: torch.tensor(sizes, dtype=dtype)


def elsewhere(*shape, dtype=BF16):
    return lambda: torch.ones(shape, dtype=dtype, device="meta")


def transposed(*shape):
    """Contiguous but for its last two axes."""
    return lambda: torch.ones(shape, dtype=BF16).mT.contiguous().mT


def made(arguments):
    return {name: value() if callable(value) else value for name, value in arguments.items()}


def rows(names, cases):
    """Parametrises by cases whose first field is their name."""
    return pytest.mark.parametrize(names.split(), [case[1:] for case in cases], ids=[case[0] for case in cases])


def off_by_one(t):
    return t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t)


def freed(t):
    """As FSDP leaves a parameter between its uses."""
    t.untyped_storage().resize_(0)
    return t
