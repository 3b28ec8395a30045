"""Which implementation the operators choose, on machines that are pretended: fake CUDA tensors need no GPU."""

import threading
from contextlib import nullcontext

import pytest
import torch
from hopper_kernels import KernelUnavailable, dispatch
from hopper_kernels import reference as use_definition
from mhc_projection import hyper_connection, hyper_connection_streams, launch, operators, reference
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import OPTIONS
from tests.support.implementations import assert_registered
from tests.support.machines import triton_version

HOPPER, AMPERE = "SM90 (NVIDIA H200)", "SM80 (NVIDIA A100)"
FORWARD = (3, 4, 16)
FUNCTIONS = (hyper_connection, hyper_connection_streams)
each_way = pytest.mark.parametrize("function", [*FUNCTIONS, plain.two_operators], ids=lambda f: f.__name__)


def cuda(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="cuda")


def streams(*shape, dtype=torch.bfloat16):
    return cuda(*shape, dtype=dtype)


def saved(x):
    return x, cuda(24, 64), cuda(3, 4), cuda(3, 24), cuda(3)


def gate_operands():
    return cuda(3, 24), cuda(3), cuda(24), cuda(3, 4), cuda(3, 4), cuda(3, 4, 4)


def connection_operands(x):
    return x, cuda(24, 64), cuda(3), cuda(24), cuda(3, 4)


# name: (what errors call it, the call with streams and, for a backward, the flag that its forward returned)
CALLS = {
    "hyper_connection_forward": (
        "hyper_connection",
        lambda x: operators._hyper_connection_forward(*connection_operands(x), 1e-20, 1e-6, 20),
    ),
    "hyper_connection_backward": (
        "the backward of hyper_connection",
        lambda x, *flag: operators._hyper_connection_backward(
            *(*connection_operands(x), cuda(24, 3), cuda(3)),
            *(cuda(3, 4), None, None, None, None, 1e-6, 20, True, False, True, *flag),
        ),
    ),
    "projection_forward": (
        "mhc_projection",
        lambda x: operators._projection_forward(x, cuda(24, 64), cuda(3, 4), 1e-20),
    ),
    "projection_backward": (
        "the backward of mhc_projection",
        lambda x, *flag: operators._projection_backward(*saved(x), cuda(3, 24), None, None, True, False, True, *flag),
    ),
    "gates_forward": ("mhc_gates", lambda x: operators._gates_forward(*gate_operands()[:3], 4, 20, 1e-6)),
    "gates_backward": (
        "the backward of mhc_gates",
        lambda x, *flag: operators._gates_backward(*gate_operands(), 4, 20, 1e-6, *flag),
    ),
}
RESULTS = dict.fromkeys(CALLS, 3) | {"hyper_connection_forward": 6, "hyper_connection_backward": 5}
each_call = pytest.mark.parametrize(("name", "what", "call"), [(k, *v) for k, v in CALLS.items()], ids=CALLS)
each_backward = pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for name, (_, call) in CALLS.items() if "backward" in name],
    ids=[name for name in CALLS if "backward" in name],
)


@pytest.fixture
def ran(monkeypatch):
    """The implementations asked for, as (module, function, arguments); none runs."""
    seen = []
    for module, place in ((launch, "kernel"), (reference, "definition")):
        for name in CALLS:
            monkeypatch.setattr(
                module, name, lambda *args, p=place, n=name: seen.append((p, n, args)) or (None,) * RESULTS[n]
            )
    return seen


@each_call
def test_sm90_launches(name, what, call, machine, ran):
    """With the arguments of the operator, but for the flag."""
    machine(HOPPER)
    with FakeTensorMode():
        x = streams(*FORWARD)
        results = call(x)
    ((place, found, arguments),) = ran
    assert (place, found) == ("kernel", name)
    assert len(results) == RESULTS[name] + ("forward" in name)
    schema = getattr(torch.ops.mhc_projection, name).default._schema
    assert len(arguments) == len([a for a in schema.arguments if a.name != "used_reference"])
    if not name.startswith("gates"):
        assert arguments[0] is x
    if name in ("projection_backward", "hyper_connection_backward"):
        assert arguments[-3:] == (True, False, True)


@each_call
def test_another_card_raises(name, what, call, machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(KernelUnavailable, match=rf"^{what} requires SM90, found SM80 \(NVIDIA A100"):
        call(streams(*FORWARD))
    assert not ran


def test_wrong_arguments_are_reported_first(machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^x must have dtype bfloat16"):
        CALLS["projection_forward"][1](streams(*FORWARD, dtype=torch.float32))


@each_call
def test_a_triton_out_of_range_raises(name, what, call, machine, ran):
    machine(HOPPER)
    with (
        triton_version("2.3"),
        FakeTensorMode(),
        pytest.raises(KernelUnavailable, match=r"^mhc_projection requires triton.*, found 2\.3"),
    ):
        call(streams(*FORWARD))
    assert not ran


@each_call
@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_the_reference_context_runs_the_definition(name, what, call, card, machine, ran):
    machine(card)
    with FakeTensorMode(), use_definition():
        results = call(streams(*FORWARD))
    assert [seen[:2] for seen in ran] == [("definition", name)]
    if "forward" in name:
        assert (results[-1].dtype, results[-1].device.type, results[-1].ndim) == (torch.bool, "cpu", 0)


@each_backward
@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_a_backward_outside_the_context_remembers_it(name, call, card, machine, ran):
    machine(card)
    with FakeTensorMode():
        call(streams(*FORWARD), torch.tensor(True))
        assert ran.pop()[:2] == ("definition", name)
        if card == HOPPER:
            call(streams(*FORWARD), torch.tensor(False))
            assert ran.pop()[:2] == ("kernel", name)
            with use_definition():
                call(streams(*FORWARD), torch.tensor(False))
            assert ran.pop()[:2] == ("definition", name)
    assert not dispatch.reference_requested()


def backward_in_another_thread(results, cotangents):
    """As on a GPU, where autograd's threads see no context variable of the caller's."""
    thread = threading.Thread(target=torch.autograd.backward, args=(results, cotangents))
    thread.start()
    thread.join()


@each_way
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_backward_runs_what_its_forward_ran(function, compiled, monkeypatch):
    """Also when one compiled graph runs inside the context, outside, and inside again."""
    asked = []

    def use_kernel(kernel, tensor, what):
        asked.append((what, dispatch.reference_requested()))
        return False

    torch._dynamo.reset()

    def step(*t):
        return function(*t, **OPTIONS)

    call = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
    monkeypatch.setattr(dispatch, "use_kernel", use_kernel)
    for inside in (False, True, False, True):
        t = inputs.operands(5).requires_grad()
        with use_definition() if inside else nullcontext():
            results = call(*t)
        backward_in_another_thread(results, inputs.cotangents(*results))
        assert all(leaf.grad is not None for leaf in t)
        forwards = ["mhc_projection", "mhc_gates"] if function is plain.two_operators else ["hyper_connection"]
        assert [what for what, _ in asked] == forwards + [f"the backward of {what}" for what in reversed(forwards)]
        assert {chosen for _, chosen in asked} == {inside}
        asked.clear()
    torch._dynamo.reset()


@each_call
def test_the_operators_are_registered(name, what, call):
    assert_registered(getattr(torch.ops.mhc_projection, name))


def test_the_schemas_are_the_published_ones():
    """Trainers' checkpointing policies and saved graphs know them."""
    assert [str(getattr(torch.ops.mhc_projection, name).default._schema) for name in CALLS] == [
        "mhc_projection::hyper_connection_forward(Tensor x, Tensor weight, Tensor scale, Tensor base,"
        " Tensor? pre_mix, float rms_eps, float hc_eps, int iters) -> (Tensor pre, Tensor post, Tensor comb,"
        " Tensor collapsed, Tensor mixes, Tensor rstd, Tensor used_reference)",
        "mhc_projection::hyper_connection_backward(Tensor x, Tensor weight, Tensor scale, Tensor base,"
        " Tensor? pre_mix, Tensor mixes, Tensor rstd, Tensor? grad_pre, Tensor? grad_post, Tensor? grad_comb,"
        " Tensor? grad_collapsed, Tensor? grad_x_addend, float hc_eps, int iters, bool need_x=True,"
        " bool need_weight=True, bool need_pre_mix=True, Tensor? used_reference=None)"
        " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_scale, Tensor grad_base, Tensor grad_pre_mix)",
        "mhc_projection::projection_forward(Tensor x, Tensor weight, Tensor? pre_mix, float eps)"
        " -> (Tensor mixes, Tensor rstd, Tensor collapsed, Tensor used_reference)",
        "mhc_projection::projection_backward(Tensor x, Tensor weight, Tensor? pre_mix, Tensor mixes, Tensor rstd,"
        " Tensor? grad_mixes, Tensor? grad_collapsed, Tensor? grad_x_addend, bool need_x=True, bool need_weight=True,"
        " bool need_pre_mix=True, Tensor? used_reference=None)"
        " -> (Tensor grad_x, Tensor grad_weight, Tensor grad_pre_mix)",
        "mhc_projection::gates_forward(Tensor mixes, Tensor scale, Tensor base, int hc, int iters, float eps)"
        " -> (Tensor pre, Tensor post, Tensor comb, Tensor used_reference)",
        "mhc_projection::gates_backward(Tensor mixes, Tensor scale, Tensor base, Tensor grad_pre, Tensor grad_post,"
        " Tensor grad_comb, int hc, int iters, float eps, Tensor? used_reference=None)"
        " -> (Tensor grad_mixes, Tensor grad_scale, Tensor grad_base)",
    ]


@each_way
@pytest.mark.parametrize("need", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_what_is_needed_is_asked_for(function, need, monkeypatch):
    asked = []
    name = "projection_backward" if function is plain.two_operators else "hyper_connection_backward"
    backward = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: asked.append(args[-3:]) or backward(*args))
    t = inputs.operands(5).requires_grad(
        *(name for name, wanted in zip(("x", "weight", "pre_mix"), need, strict=True) if wanted)
    )
    results = [r for r in function(*t, **OPTIONS) if r.requires_grad]
    torch.autograd.backward(results, inputs.cotangents(*results))
    assert asked == [need]


@each_way
@pytest.mark.parametrize("used", [(0,), (3,), (0, 3)])
def test_a_gradient_that_flows_nowhere_is_not_asked_for(function, used, monkeypatch):
    """Of the weight from collapsed alone, of pre_mix from gates alone."""
    asked = []
    name = "projection_backward" if function is plain.two_operators else "hyper_connection_backward"
    backward = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: asked.append(args[-3:]) or backward(*args))
    results = function(*inputs.operands(5).requires_grad(), **OPTIONS)
    results = [results[i] for i in used]
    torch.autograd.backward(results, inputs.cotangents(*results))
    assert asked == [(True, 0 in used, 3 in used)]
