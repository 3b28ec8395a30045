"""What tests of traced calls share: opcheck's parts, fake results beside real ones, compilation in one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.compare import tensors_of

UTILITIES = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic", "test_autograd_registration")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled when the test starts, nor when it has ended."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def facts(t: Tensor) -> tuple:
    """What a fake tensor promises of the real one."""
    return t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.requires_grad, t.layout, t.device


def facts_of_elements(t: Tensor) -> tuple:
    """As `facts`, without the strides of a tensor that has no elements: they are of no consequence."""
    found = facts(t)
    return found if t.numel() else (*found[:2], None, *found[3:])


def assert_fake_like_real(
    operator: Callable, arguments: tuple, facts: Callable[[Tensor], tuple] = facts
) -> tuple[list[Tensor], list[Tensor]]:
    """The operator's results for fake copies of the arguments promise what the real ones are. Returns (fake, real)."""
    real, mode = tensors_of(operator(*arguments)), FakeTensorMode()
    with mode:
        given = (mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
        fake = tensors_of(operator(*given))
    assert [facts(f) for f in fake] == [facts(r) for r in real], operator
    return fake, real


@contextlib.contextmanager
def compiled(function: Callable, backend: str, **options) -> Iterator[tuple[Callable, CompileCounterWithBackend]]:
    """The function compiled in one graph, without a break, and the counter: `frame_count` compilations until then."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    try:
        yield torch.compile(function, fullgraph=True, backend=counter, **options), counter
    finally:
        torch._dynamo.reset()
