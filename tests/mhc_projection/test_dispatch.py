"""How a call reaches the implementation: in plain eager mode once through the dispatcher, else as often as it takes."""

import warnings
from collections import Counter
from typing import ClassVar

import pytest
import torch
from hopper_kernels import derivatives
from mhc_projection import hyper_connection, hyper_connection_streams
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import OPTIONS
from tests.support.compare import assert_same_bytes

PREFIX = "mhc_projection::"
FUNCTIONS = hyper_connection, hyper_connection_streams, plain.two_operators
each_way = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)


def step(function, t):
    """Results of a call without gradients, of one with, and the gradients of all operands."""
    found = [*function(*t, **OPTIONS)]
    leaves = t.requires_grad()
    results = function(*leaves, **OPTIONS)
    torch.manual_seed(0)
    grads = torch.autograd.grad(results, leaves, inputs.cotangents(*results))
    return [*found, *(r.detach() for r in results), *grads]


def operators_of(function):
    """Those that `step` calls."""
    halves = ("projection", "gates") if function is plain.two_operators else ("hyper_connection",)
    return {f"{half}_forward": 2 for half in halves} | {f"{half}_backward": 1 for half in halves}


def same(found, wanted):
    for got, want in zip(found, wanted, strict=True):
        assert_same_bytes(got, want)


def calls(function, t):
    """How often the dispatcher passed on each operator in `step`, by what a profiler sees; and its results."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        results = step(function, t)
    # `recorded.events()` would leave out a call directly inside another of the same name.
    names = [event.name() for event in recorded.profiler.kineto_results.events()]
    return Counter(n.removeprefix(PREFIX) for n in names if n.startswith(PREFIX)), results


class Log(TorchDispatchMode):
    """Operators seen."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.seen[operator.name()] += 1
        return operator(*args, **(kwargs or {}))

    @property
    def ours(self):
        return {n.removeprefix(PREFIX): count for n, count in self.seen.items() if n.startswith(PREFIX)}


class Logged(torch.Tensor):
    """A tensor that logs the operators which meet it."""

    seen: ClassVar = Counter()

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        cls.seen[operator.name()] += 1
        return operator(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


@each_way
def test_plain_eager_calls_pass_the_dispatcher_once(function, monkeypatch):
    """The results are those of a call that passes it once more, below autograd."""
    t = inputs.operands(37)
    found, results = calls(function, t)
    assert found == operators_of(function)
    monkeypatch.setattr(derivatives, "_PLAIN", frozenset())
    found, wanted = calls(function, t)
    assert found == {name: 2 * count for name, count in operators_of(function).items()}
    same(results, wanted)


@each_way
def test_modes_see_the_operators(function):
    t = inputs.operands(37)
    wanted = step(function, t)
    with Log() as log:
        same(step(function, t), wanted)
    assert log.ours == operators_of(function)
    with FlopCounterMode(display=False), Log() as log:
        same(step(function, t), wanted)
    assert log.ours == operators_of(function)


@pytest.mark.parametrize("operand", ["x", "weight", "pre_mix"])
def test_subclasses_see_the_operator(operand):
    t = inputs.operands(37)
    Logged.seen.clear()
    found = hyper_connection(*t._replace(**{operand: Logged(getattr(t, operand))}), **OPTIONS)
    same(found, hyper_connection(*t, **OPTIONS))
    assert Logged.seen["mhc_projection::hyper_connection_forward"] == 1


@each_way
@pytest.mark.parametrize("operand", ["x", "weight", "scale", "base", "pre_mix"])
def test_a_negation_that_is_pending_is_done_first(function, operand):
    """A tensor whose memory holds the negated values, as the imaginary part of a conjugate has it."""
    t = inputs.operands(37)
    pending = torch._neg_view(-getattr(t, operand))
    assert pending.is_neg()
    same(function(*t._replace(**{operand: pending}), **OPTIONS)[:4], function(*t, **OPTIONS)[:4])
    leaves = t.requires_grad()
    results = function(*leaves._replace(**{operand: torch._neg_view(-getattr(leaves, operand))}), **OPTIONS)
    differentiable = [i for i in range(4) if results[i].requires_grad]
    results, wanted = ([r[i] for i in differentiable] for r in (results, function(*leaves, **OPTIONS)))
    cotangents, leaf = inputs.cotangents(*wanted), getattr(leaves, operand)
    same(torch.autograd.grad(results, leaf, cotangents), torch.autograd.grad(wanted, leaf, cotangents))


def test_functionalization_and_vmap_see_the_operator():
    t = inputs.operands(37)
    wanted = hyper_connection(*t, **OPTIONS)
    same(torch.func.functionalize(lambda *a: hyper_connection(*a, **OPTIONS))(*t), wanted)
    bases = torch.stack([t.base, t.base + 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a loop
        found = torch.func.vmap(lambda base: hyper_connection(*t[:3], base, t.pre_mix, **OPTIONS)[:3])(bases)
    for i, base in enumerate(bases):
        same([f[i] for f in found], hyper_connection(*t[:3], base, t.pre_mix, **OPTIONS)[:3])


def test_what_is_left_of_a_transform_is_unwrapped():
    """A tensor that outlived the transform that wrapped it."""
    t, left = inputs.operands(37), []
    torch.func.grad(lambda w: (left.append(w), w.sum())[1])(t.weight)
    assert torch._C._functorch.is_functorch_wrapped_tensor(left[0])
    same(step(hyper_connection, t._replace(weight=left[0]))[:4], hyper_connection(*t, **OPTIONS))
    scale = t.scale.clone().requires_grad_()
    results = hyper_connection(t.x, left[0], scale, *t[3:], **OPTIONS)
    wanted = hyper_connection(*t[:2], scale, *t[3:], **OPTIONS)
    cotangents = inputs.cotangents(*wanted[:3])
    same(torch.autograd.grad(results[:3], scale, cotangents), torch.autograd.grad(wanted[:3], scale, cotangents))


@each_way
def test_inference_mode(function):
    t = inputs.operands(37)
    wanted = function(*t, **OPTIONS)
    with torch.inference_mode():
        found = function(*t, **OPTIONS)
        same(function(*(v.clone() for v in t), **OPTIONS), wanted)
    same(found, wanted)


@each_way
def test_keys_of_other_versions_of_pytorch_are_not_guessed(function, monkeypatch):
    """The call then takes the longer way."""
    t = inputs.operands(37)
    wanted = step(function, t)
    monkeypatch.delattr(torch._C.DispatchKeySet, "raw_repr")
    assert derivatives._plain_keys() == frozenset()
    monkeypatch.setattr(derivatives, "_PLAIN", frozenset())
    same(step(function, t), wanted)
