"""Which implementation the operators choose, on pretended machines (fake CUDA tensors need no GPU); FP8 where alike."""

import inspect
import sys
import threading
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from hopper_kernels import KernelUnavailable, dispatch
from hopper_kernels import reference as use_definition
from moe_experts import arguments, moe_experts, operators, reference
from moe_experts.fp8 import reference as fp8_reference
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.moe_experts import fp8_on_cpu, inputs
from tests.support.compare import assert_same_bytes
from tests.support.implementations import assert_registered
from tests.support.machines import triton_version
from tests.support.process import output_of, start_python

# path: (the public function, its operands, what it calls on a CPU)
PATHS = {
    "bf16": (moe_experts, inputs.operands, reference),
    "fp8": (fp8_on_cpu.call, lambda: fp8_on_cpu.operands("separate", (5, 4), 0, 128, 128), fp8_reference),
}
each_path = pytest.mark.parametrize(("function", "operands", "definition"), PATHS.values(), ids=PATHS)
HOPPER, AMPERE = "SM90 (NVIDIA H200)", "SM80 (NVIDIA A100)"
ROWS, EXPERTS, HIDDEN, INNER = 7, 3, 16, 24


def cuda(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="cuda")


def given(packed=False):
    """The weights and the group sizes."""
    gate, up = (
        (cuda(EXPERTS, 2 * INNER, HIDDEN), None)
        if packed
        else (cuda(EXPERTS, INNER, HIDDEN), cuda(EXPERTS, INNER, HIDDEN))
    )
    return gate, up, cuda(EXPERTS, HIDDEN, INNER), cuda(EXPERTS, dtype=torch.int32)


def forward(x, **options):
    return operators._forward(x, *given(**options), 10.0)


def backward(x, *rest, dout=None, **options):
    """rest: need_x, need_gate, need_up, need_down, used_reference."""
    dout = cuda(ROWS, HIDDEN) if dout is None else dout
    return operators._backward(dout, x, *given(**options), cuda(ROWS, INNER), cuda(ROWS, INNER), 10.0, *rest)


def backward_data(x, **options):
    return operators._backward_data(x, *given(**options), cuda(ROWS, INNER), cuda(ROWS, INNER), 10.0)


def weight_grad(x, packed=False):
    return operators._weight_grad(
        cuda(ROWS, HIDDEN), x, cuda(EXPERTS, dtype=torch.int32), cuda(ROWS, 2 * INNER), cuda(ROWS, INNER), packed
    )


def each_of(calls):
    return pytest.mark.parametrize(("name", "what", "call", "launched"), [(k, *v) for k, v in calls.items()], ids=calls)


# name of the operator: (what errors call it, the call, the functions of launch)
CALLS = {
    "moe_experts_forward": ("moe_experts", forward, ["forward"]),
    "moe_experts_backward": ("the backward of moe_experts", backward, ["backward"]),
    "moe_experts_backward_data": ("moe_experts_backward_data", backward_data, ["backward_data"]),
    "moe_experts_weight_grad": ("moe_experts_weight_grad", weight_grad, ["weight_grad"]),
}
each_call = each_of(CALLS)
each_value = pytest.mark.parametrize("value", [None, "0", "1"])
RESULTS = {"forward": 3, "backward": 4, "backward_data": 3, "weight_grad": 3}


@pytest.fixture
def ran(monkeypatch):
    """The implementations asked for, as (place, function, arguments); none runs, and no memory is looked at."""
    seen = []
    launch = ModuleType("moe_experts.launch")
    monkeypatch.setitem(sys.modules, "moe_experts.launch", launch)
    for module, place, names in ((launch, "kernel", list(RESULTS)), (reference, "definition", list(RESULTS))):
        for name in names:
            record = lambda *args, p=place, n=name: seen.append((p, n, args)) or (None,) * RESULTS[n]  # noqa: E731
            monkeypatch.setattr(module, name, record, raising=False)
    monkeypatch.setattr(arguments, "memory", lambda **tensors: None)
    monkeypatch.setattr(arguments, "readable", lambda t: t)
    return seen


@each_call
def test_sm90_launches(name, what, call, launched, machine, ran):
    machine(HOPPER)
    with FakeTensorMode():
        x = cuda(ROWS, HIDDEN)
        results = call(x)
    assert [seen[:2] for seen in ran] == [("kernel", function) for function in launched]
    assert len(results) == {"moe_experts_forward": 4, "moe_experts_backward": 4}.get(name, 3)
    position = 1 if name in ("moe_experts_backward", "moe_experts_weight_grad") else 0
    assert ran[-1][2][position] is x


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_kernels_are_given(packed, machine, ran):
    """The arguments of each function of launch, in its order."""
    machine(HOPPER)
    with FakeTensorMode():
        x, dout = cuda(ROWS, HIDDEN), cuda(ROWS, HIDDEN)
        operators._forward(x, *given(packed), 7.0)
        backward(x, True, False, True, False, dout=dout, packed=packed)
        weight_grad(x, packed)
        backward_data(dout, packed=packed)
    (_, _, first), (_, _, joint), (_, _, alone), (_, _, data) = ran
    weights = [(EXPERTS, 2 * INNER, HIDDEN), None] if packed else [(EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN)]
    weights += [(EXPERTS, HIDDEN, INNER), (EXPERTS,)]
    shapes = lambda args: [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]  # noqa: E731
    rows, saved = (ROWS, HIDDEN), [(ROWS, INNER), (ROWS, INNER), 10.0]
    assert shapes(first) == [rows, *weights, 7.0]
    assert shapes(joint) == [rows, rows, *weights, *saved, True, False, True, False]
    assert (joint[0], joint[1]) == (dout, x)
    assert shapes(alone) == [rows, rows, (EXPERTS,), (ROWS, 2 * INNER), (ROWS, INNER), packed]
    assert shapes(data) == [rows, *weights, *saved]


def test_launch_has_the_functions_that_are_called():
    launch = operators._launch()
    for name, count in {"forward": 6, "backward": 13, "backward_data": 8, "weight_grad": 6}.items():
        assert len(inspect.signature(getattr(launch, name)).parameters) == count


def test_group_sizes_are_contiguous_for_the_kernels(machine, ran):
    machine(HOPPER)
    with FakeTensorMode():
        *weights, _ = given()
        operators._forward(cuda(ROWS, HIDDEN), *weights, cuda(2 * EXPERTS, dtype=torch.int64)[::2], 10.0)
    assert ran[0][2][4].stride() == (1,)


def group_sizes_looked_at(call, value, ran, monkeypatch):
    """By a call with MOE_EXPERTS_CHECK set to `value`: (shape, rows, launches before)."""
    if value is None:
        monkeypatch.delenv("MOE_EXPERTS_CHECK", raising=False)
    else:
        monkeypatch.setenv("MOE_EXPERTS_CHECK", value)
    looked = []
    monkeypatch.setattr(
        arguments, "group_sizes", lambda counts, rows: looked.append((tuple(counts.shape), rows, len(ran)))
    )
    with FakeTensorMode():
        call()
    assert ran
    return looked


@each_call
@each_value
def test_group_sizes_are_looked_at_only_if_asked(name, what, call, launched, value, machine, ran, monkeypatch):
    """With MOE_EXPERTS_CHECK=1, before anything is launched; otherwise nothing reads them, which would wait."""
    machine(HOPPER)
    looked = group_sizes_looked_at(lambda: call(cuda(ROWS, HIDDEN)), value, ran, monkeypatch)
    assert looked == ([((EXPERTS,), ROWS, 0)] if value == "1" else [])


def test_dout_is_copied_once_where_it_must_be():
    """What the kernels cannot read in place; the joint backward copies it once."""
    dout = torch.randn(ROWS, HIDDEN).bfloat16()
    assert arguments.readable(dout) is dout
    for strided in (
        dout[:1].expand(ROWS, HIDDEN),
        dout.t().contiguous().t(),
        dout.new_empty(ROWS * HIDDEN + 1)[1:].view(ROWS, HIDDEN).copy_(dout),
    ):
        copied = arguments.readable(strided)
        assert_same_bytes(copied, strided, strides=False)
        assert copied.is_contiguous()
        assert copied.data_ptr() % 16 == 0
        assert copied.data_ptr() != strided.data_ptr()


def test_the_joint_backward_reads_dout_once(machine, ran, monkeypatch):
    copies = []
    monkeypatch.setattr(arguments, "readable", lambda t: copies.append(t) or t.clone())
    machine(HOPPER)
    with FakeTensorMode():
        backward(cuda(ROWS, HIDDEN), dout=cuda(1, HIDDEN).expand(ROWS, HIDDEN))
    assert len(copies) == 1
    assert ran[0][2][0].is_contiguous()


@each_call
def test_another_card_raises(name, what, call, launched, machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(KernelUnavailable, match=rf"^{what} requires SM90, found SM80 \(NVIDIA A100"):
        call(cuda(ROWS, HIDDEN))
    assert not ran


def test_wrong_arguments_are_reported_first(machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^x must have dtype bfloat16"):
        forward(cuda(ROWS, HIDDEN, dtype=torch.float32))


@each_call
def test_a_triton_out_of_range_raises(name, what, call, launched, machine, ran):
    machine(HOPPER)
    with (
        triton_version("2.3"),
        FakeTensorMode(),
        pytest.raises(KernelUnavailable, match=r"^moe_experts requires triton.*, found 2\.3"),
    ):
        call(cuda(ROWS, HIDDEN))
    assert not ran


@each_call
@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_the_reference_context_runs_the_definition(name, what, call, launched, card, machine, ran):
    machine(card)
    with FakeTensorMode(), use_definition():
        results = call(cuda(ROWS, HIDDEN))
    assert [seen[:2] for seen in ran] == [("definition", name.removeprefix("moe_experts_"))]
    if name == "moe_experts_forward":
        assert (results[-1].dtype, results[-1].device.type, results[-1].ndim) == (torch.bool, "cpu", 0)


def assert_remembers(call, card, ran):
    """call: a backward, given what is needed and the flag of its forward."""
    needs = True, True, True, True
    with FakeTensorMode():
        call(*needs, torch.tensor(True))
        assert ran.pop()[:2] == ("definition", "backward")
        if card == HOPPER:
            call(*needs, torch.tensor(False))
            assert [seen[0] for seen in ran] == ["kernel"]
            ran.clear()
            with use_definition():
                call(*needs, torch.tensor(False))
            assert ran.pop()[:2] == ("definition", "backward")
    assert not dispatch.reference_requested()


@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_a_backward_outside_the_context_remembers_it(card, machine, ran):
    machine(card)
    assert_remembers(lambda *rest: backward(cuda(ROWS, HIDDEN), *rest), card, ran)


@each_path
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_backward_runs_what_its_forward_ran(function, operands, definition, compiled, monkeypatch):
    """In another thread, as on a GPU; also where one compiled graph runs inside, outside and inside again."""
    asked = []

    def use_kernel(kernel, tensor, what):
        asked.append((what, dispatch.reference_requested()))
        return False

    torch._dynamo.reset()
    call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    monkeypatch.setattr(dispatch, "use_kernel", use_kernel)
    for inside in (False, True, False, True):
        t = operands().requires_grad()
        with use_definition() if inside else nullcontext():
            out = call(*t)
        thread = threading.Thread(target=torch.autograd.backward, args=(out, inputs.cotangent(t)))
        thread.start()
        thread.join()
        assert all(leaf.grad is not None for leaf in t.leaves)
        assert asked == [("moe_experts", inside), ("the backward of moe_experts", inside)]
        asked.clear()
    torch._dynamo.reset()


@each_path
@pytest.mark.parametrize("names", [("x",), ("gate_proj",), ("up_proj", "down_proj")])
def test_only_what_is_needed_is_asked_for(function, operands, definition, names, monkeypatch):
    asked, right = [], definition.backward
    monkeypatch.setattr(definition, "backward", lambda *args: asked.append(args[-4:]) or right(*args))
    t = operands().requires_grad(*names)
    function(*t).backward(inputs.cotangent(t))
    assert asked == [tuple(name in names for name in t._fields[:4])]


def test_weights_that_are_not_needed_are_not_multiplied(monkeypatch):
    """Not even with each other: the definition's products, counted."""
    products = []
    right = reference.rounded
    monkeypatch.setattr(reference, "rounded", lambda t, dtype: products.append(tuple(t.shape)) or right(t, dtype))
    for names, count in (((), 0), (("gate_proj",), 1), (("down_proj",), 1), (("gate_proj", "up_proj"), 2), (("x",), 0)):
        t = inputs.operands((5, 0), 0).requires_grad(*(names or ("x",)))
        out = moe_experts(*t)
        products.clear()
        out.backward(inputs.cotangent(t))
        weights = [shape for shape in products if shape in ((40, 64), (64, 40))]
        assert len(weights) == count


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_are_registered(name):
    assert_registered(getattr(torch.ops.moe_experts, name))


def test_the_schemas_are_the_published_ones():
    """Trainers' checkpointing policies and saved graphs know them."""
    assert [str(getattr(torch.ops.moe_experts, name).default._schema) for name in CALLS] == [
        "moe_experts::moe_experts_forward(Tensor x, Tensor gate_proj, Tensor? up_proj, Tensor down_proj,"
        " Tensor num_tokens_per_expert, float swiglu_limit)"
        " -> (Tensor out, Tensor gate, Tensor up, Tensor used_reference)",
        "moe_experts::moe_experts_backward(Tensor dout, Tensor x, Tensor gate_proj, Tensor? up_proj, Tensor down_proj,"
        " Tensor num_tokens_per_expert, Tensor gate, Tensor up, float swiglu_limit, bool need_x=True,"
        " bool need_gate=True, bool need_up=True, bool need_down=True, Tensor? used_reference=None)"
        " -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor dw2)",
        "moe_experts::moe_experts_backward_data(Tensor dout, Tensor gate_proj, Tensor? up_proj, Tensor down_proj,"
        " Tensor num_tokens_per_expert, Tensor gate, Tensor up, float swiglu_limit)"
        " -> (Tensor dx, Tensor dgate_dup, Tensor h)",
        "moe_experts::moe_experts_weight_grad(Tensor dout, Tensor x, Tensor num_tokens_per_expert, Tensor dgate_dup,"
        " Tensor h, bool packed) -> (Tensor dw1, Tensor dw3, Tensor dw2)",
    ]


def test_the_package_imports_no_launcher():
    """Nothing of the kernels is looked at before the first launch."""
    code = "import sys, moe_experts; print([n for n in sys.modules if n.startswith(('moe_experts.', 'triton'))])"
    loaded = output_of(start_python(code))
    assert "moe_experts.reference" in loaded
    assert "moe_experts.fp8.reference" in loaded
    assert "triton" not in loaded
    assert "launch" not in loaded
