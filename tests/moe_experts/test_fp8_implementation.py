"""Which implementation the FP8 operators choose, on machines that are pretended: fake CUDA tensors need no GPU."""

import sys
from types import ModuleType

import pytest
import torch
from hopper_kernels import KernelUnavailable
from hopper_kernels import reference as use_definition
from moe_experts import arguments, moe_experts
from moe_experts.fp8 import arguments as fp8_arguments
from moe_experts.fp8 import operators, reference
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.moe_experts.fp8_on_cpu import operands
from tests.moe_experts.on_cpu import same
from tests.moe_experts.test_implementation import (
    AMPERE,
    HOPPER,
    assert_remembers,
    cuda,
    each_of,
    each_value,
    group_sizes_looked_at,
)
from tests.support.implementations import assert_registered

FP8 = torch.float8_e4m3fn
ROWS, EXPERTS, HIDDEN, INNER, PADDED = 7, 3, 256, 128, 512


def scales(*shape):
    return cuda(*shape, dtype=torch.float32)


def counts():
    return cuda(EXPERTS, dtype=torch.int32)


def weights():
    return cuda(EXPERTS, INNER, HIDDEN), cuda(EXPERTS, INNER, HIDDEN), cuda(EXPERTS, HIDDEN, INNER)


def quantized():
    return (
        cuda(EXPERTS, 2 * INNER, HIDDEN, dtype=FP8),
        scales(EXPERTS, 2, 2),
        cuda(EXPERTS, HIDDEN, INNER, dtype=FP8),
        scales(EXPERTS, 2, 1),
    )


def transposed():
    return (
        cuda(EXPERTS, HIDDEN, 2 * INNER, dtype=FP8),
        scales(EXPERTS, 2, 2),
        cuda(EXPERTS, INNER, HIDDEN, dtype=FP8),
        scales(EXPERTS, 1, 2),
    )


def columns(channels):
    return cuda(PADDED * channels, dtype=FP8), scales(PADDED // 128, channels)


def kept():
    return cuda(PADDED, 2 * INNER), *columns(HIDDEN), *transposed()


def sums():
    return scales(EXPERTS, 2 * INNER, HIDDEN), scales(EXPERTS, HIDDEN, INNER)


def dout():
    return cuda(ROWS, HIDDEN)


def second_half():
    return counts(), *columns(HIDDEN), *columns(INNER), *columns(2 * INNER), *columns(HIDDEN), ROWS, *sums()


def backward(*rest, upstream=None):
    """rest: need_x, need_gate, need_up, need_down, used_reference."""
    upstream = dout() if upstream is None else upstream
    return operators._backward(upstream, counts(), *kept(), 10.0, False, *rest)


# name of the operator: (what errors call it, the call, the functions of launch)
CALLS = {
    "quantize_weights": (
        "moe_experts_fp8_quantize_weights",
        lambda: operators._quantize_weights(*weights()),
        ["quantize_weights"],
    ),
    "forward": (
        "moe_experts",
        lambda: operators._forward(dout(), *weights(), counts(), 10.0, True),
        ["quantize_weights", "forward"],
    ),
    "forward_quantized": (
        "moe_experts_fp8_forward_quantized",
        lambda: operators._forward_quantized(dout(), counts(), 10.0, *quantized()),
        ["forward"],
    ),
    "backward": ("the backward of moe_experts", backward, ["backward"]),
    "backward_data": (
        "moe_experts_fp8_backward_data",
        lambda: operators._backward_data(dout(), counts(), kept()[0], *transposed(), 10.0),
        ["backward_data"],
    ),
    "backward_accumulate": (
        "moe_experts_fp8_backward_accumulate",
        lambda: operators._backward_accumulate(dout(), counts(), *kept(), 10.0, *sums()),
        ["backward_accumulate"],
    ),
    "weight_grad_accumulate": (
        "moe_experts_fp8_weight_grad_accumulate",
        lambda: operators._weight_grad_accumulate(*second_half()),
        ["weight_grad_accumulate"],
    ),
}
RESULTS = {"quantize_weights": 8, "forward": 4, "backward": 4, "backward_data": 7}
NAMES = (*RESULTS, "backward_accumulate", "weight_grad_accumulate")
each_call = each_of(CALLS)


@pytest.fixture
def ran(monkeypatch):
    """The implementations asked for, as (place, function, arguments); none runs, and no memory is looked at."""
    seen = []
    launch = ModuleType("moe_experts.fp8.launch")
    monkeypatch.setitem(sys.modules, "moe_experts.fp8.launch", launch)
    for module, place in ((launch, "kernel"), (reference, "definition")):
        for name in NAMES:
            monkeypatch.setattr(module, name, record(seen, place, name), raising=False)
    monkeypatch.setattr(arguments, "memory", lambda **tensors: None)
    monkeypatch.setattr(fp8_arguments, "memory_of_sums", lambda *tensors: None)
    monkeypatch.setattr(arguments, "readable", lambda t: t)
    return seen


def record(seen, place, name):
    def call(*args):
        seen.append((place, name, args))
        if name == "quantize_weights":
            return (*quantized(), *transposed())
        return (None,) * RESULTS[name] if name in RESULTS else None

    return call


@each_call
def test_sm90_launches(name, what, call, launched, machine, ran):
    machine(HOPPER)
    with FakeTensorMode():
        call()
    assert [seen[:2] for seen in ran] == [("kernel", function) for function in launched]


def shapes(args):
    return [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in args]


def test_what_the_kernels_are_given(machine, ran):
    """The arguments of each function of launch, in its order."""
    machine(HOPPER)
    with FakeTensorMode():
        for _, call, _ in CALLS.values():
            call()
        backward(True, False, True, False)
        w13, w13_sf, w2, w2_sf = shapes(quantized())
        kept_shapes, columns_shapes, sums_shapes = shapes(kept()), shapes(second_half()[1:9]), shapes(sums())
        weight_shapes = shapes(weights())
    rows, sizes = (ROWS, HIDDEN), (EXPERTS,)
    forward = [rows, sizes, 10.0, w13, w13_sf, w2, w2_sf, True]
    needs = [True] * 4
    assert [shapes(args) for *_, args in ran] == [
        [*weight_shapes, True],
        [*weight_shapes, True],
        forward,
        forward,
        [rows, sizes, *kept_shapes, 10.0, False, *needs],
        [rows, sizes, kept_shapes[0], *kept_shapes[3:], 10.0],
        [rows, sizes, *kept_shapes, 10.0, *sums_shapes, True],
        [sizes, *columns_shapes, ROWS, *sums_shapes, True],
        [rows, sizes, *kept_shapes, 10.0, False, True, False, True, False],
    ]


def test_a_forward_without_a_backward_keeps_nothing(machine, ran):
    """Neither function of the implementation is asked for more."""
    machine(HOPPER)
    with FakeTensorMode():
        operators._forward(dout(), *weights(), counts(), 10.0, False)
    assert [args[-1] for *_, args in ran] == [False, False]


def test_weights_need_not_be_transposed():
    t = operands()
    found = reference.quantize_weights(*t[1:4], False)
    same(found[:4], reference.quantize_weights(*t[1:4])[:4])
    assert [tuple(w.shape) for w in found[4:]] == [(0,)] * 4
    assert [w.dtype for w in found[4:]] == [FP8, torch.float32] * 2


def test_group_sizes_are_contiguous_for_the_kernels(machine, ran):
    machine(HOPPER)
    with FakeTensorMode():
        strided = cuda(2 * EXPERTS, dtype=torch.int64)[::2]
        operators._forward_quantized(dout(), strided, 10.0, *quantized())
        operators._backward(dout(), strided, *kept(), 10.0, False)
    assert [seen[2][1].stride() for seen in ran] == [(1,), (1,)]


@each_call
@each_value
def test_group_sizes_are_looked_at_only_if_asked(name, what, call, launched, value, machine, ran, monkeypatch):
    """With MOE_EXPERTS_CHECK=1, before anything is launched; otherwise nothing reads them, which would wait."""
    machine(HOPPER)
    looked = group_sizes_looked_at(call, value, ran, monkeypatch)
    asked = value == "1" and name != "quantize_weights"
    assert looked == ([((EXPERTS,), ROWS, 0)] if asked else [])


def test_backwards_read_dout_once(machine, ran, monkeypatch):
    """Copied where the kernels cannot read it in place."""
    copies = []
    monkeypatch.setattr(arguments, "readable", lambda t: copies.append(t) or t.clone())
    machine(HOPPER)
    with FakeTensorMode():
        strided = cuda(1, HIDDEN).expand(ROWS, HIDDEN)
        backward(upstream=strided)
        operators._backward_data(strided, counts(), kept()[0], *transposed(), 10.0)
        operators._backward_accumulate(strided, counts(), *kept(), 10.0, *sums())
    assert len(copies) == len(ran) == 3
    assert all(seen[2][0].is_contiguous() for seen in ran)


def test_autograd_is_told_what_the_kernels_changed(machine, ran):
    """They write to addresses, which PyTorch does not see."""
    machine(HOPPER)
    with FakeTensorMode():
        buffers = [*sums(), *sums()]
        operators._backward_accumulate(dout(), counts(), *kept(), 10.0, *buffers[:2])
        operators._weight_grad_accumulate(*second_half()[:-2], *buffers[2:])
    assert [seen[:2] for seen in ran] == [("kernel", "backward_accumulate"), ("kernel", "weight_grad_accumulate")]
    assert [buffer._version for buffer in buffers] == [1] * 4


@each_call
def test_another_card_raises(name, what, call, launched, machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(KernelUnavailable, match=rf"^{what} requires SM90, found SM80 \(NVIDIA A100"):
        call()
    assert not ran


def test_wrong_arguments_are_reported_first(machine, ran):
    machine(AMPERE)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"^x must have dtype bfloat16"):
        operators._forward(scales(ROWS, HIDDEN), *weights(), counts(), 10.0, True)


@each_call
@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_the_reference_context_runs_the_definition(name, what, call, launched, card, machine, ran):
    machine(card)
    with FakeTensorMode(), use_definition():
        results = call()
    assert [seen[:2] for seen in ran] == [("definition", function) for function in launched]
    if name == "forward":
        assert (results[-1].dtype, results[-1].device.type, results[-1].ndim) == (torch.bool, "cpu", 0)


@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_a_backward_outside_the_context_remembers_it(card, machine, ran):
    machine(card)
    assert_remembers(backward, card, ran)


@pytest.mark.parametrize(("grad", "names", "saved"), [(True, ("x",), True), (True, (), False), (False, ("x",), False)])
def test_a_forward_keeps_only_what_a_backward_will_ask_for(grad, names, saved, monkeypatch):
    asked, right = [], reference.forward
    monkeypatch.setattr(reference, "forward", lambda *args: asked.append(args[-1]) or right(*args))
    t = operands("separate", (5, 4), 0, 128, 128)
    t = t.requires_grad(*names) if names else t
    with torch.set_grad_enabled(grad):
        moe_experts(*t, fp8=True)
    assert asked == [saved]


@pytest.mark.parametrize("name", CALLS)
def test_the_operators_are_registered(name):
    operator = getattr(torch.ops.moe_experts, f"moe_experts_fp8_{name}")
    assert_registered(operator, changed=["dw13", "dw2"] if name.endswith("accumulate") else ())


def test_the_schemas_are_the_published_ones():
    """Trainers' checkpointing policies and saved graphs know them."""
    sizes, weights = "Tensor num_tokens_per_expert", "Tensor gate_proj, Tensor? up_proj, Tensor down_proj"
    transposed = "Tensor w13_t, Tensor w13_t_sf, Tensor w2_t, Tensor w2_t_sf"
    rows = "Tensor gate_up, Tensor x_t, Tensor x_t_sf"
    columns = "Tensor dout_t, Tensor dout_t_sf, Tensor h_t, Tensor h_t_sf, Tensor dgu_t, Tensor dgu_t_sf"
    sums = "Tensor(a!) dw13, Tensor(b!) dw2, bool accumulate=True"
    quantized = "Tensor w13_q, Tensor w13_sf, Tensor w2_q, Tensor w2_sf"
    wanted = {
        "quantize_weights": f"({weights}) -> ({quantized}, {transposed})",
        "forward": f"(Tensor x, {weights}, {sizes}, float swiglu_limit, bool save_for_backward)"
        f" -> (Tensor out, {rows}, {transposed}, Tensor used_reference)",
        "forward_quantized": f"(Tensor x, {sizes}, float swiglu_limit, {quantized}) -> (Tensor out, {rows})",
        "backward": f"(Tensor dout, {sizes}, {rows}, {transposed}, float swiglu_limit, bool packed, bool need_x=True,"
        " bool need_gate=True, bool need_up=True, bool need_down=True, Tensor? used_reference=None)"
        " -> (Tensor dx, Tensor dw1, Tensor dw3, Tensor dw2)",
        "backward_data": f"(Tensor dout, {sizes}, Tensor gate_up, {transposed}, float swiglu_limit)"
        f" -> (Tensor dx, {columns})",
        "backward_accumulate": f"(Tensor dout, {sizes}, {rows}, {transposed}, float swiglu_limit, {sums}) -> Tensor dx",
        "weight_grad_accumulate": f"({sizes}, {columns}, Tensor x_t, Tensor x_t_sf, SymInt num_rows, {sums}) -> ()",
    }
    for name, text in wanted.items():
        full = f"moe_experts_fp8_{name}"
        assert str(getattr(torch.ops.moe_experts, full).default._schema) == f"moe_experts::{full}{text}"
