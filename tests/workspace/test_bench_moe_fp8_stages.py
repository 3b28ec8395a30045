"""The stages of an FP8 step in its bench: launches, bytes, operands and verification, with stand-ins for a GPU."""

from __future__ import annotations

import inspect

import moe_experts
import pytest
import torch
from torch import Tensor

from benches import moe_experts_fp8 as bench
from benches import moe_fp8_stages as stages
from benches.moe_products import SIZES
from benches.peers import experts_fp8 as peers
from tests.support import fp8_experts
from tests.support.fp8_experts import Plan, needs_deep_gemm

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PASSES = [name for name in stages.LABELS if name not in SIZES]
SWIGLUS = "swiglu", "swiglu_backward"
SHAPE = 3, 450, 256, 384  # experts, rows, hidden, inner


@pytest.fixture
def inputs() -> stages.Inputs:
    return bench.make_inputs(*SHAPE, CPU)


@pytest.fixture
def deep_gemm(monkeypatch) -> None:
    fp8_experts.replace_deep_gemm(monkeypatch)


@pytest.fixture
def plan(monkeypatch) -> None:
    fp8_experts.replace_plan(monkeypatch)


def test_the_stand_in_takes_what_the_plan_takes():
    real = pytest.importorskip("moe_experts.fp8.plan", reason="requires the FP8 kernels' plan")
    for name in ("quantize", "quantize_weights", "swiglu", "product", "swiglu_backward", "weight_grad"):
        names = [list(inspect.signature(getattr(one, name)).parameters) for one in (Plan, real)]
        assert names[0] == names[1]
    assert (Plan.BF16, Plan.ADD) == (real.BF16, real.ADD)


def seen(launches):
    """Of all but the search for the groups: the kernel with its grid, options, and shapes of its arguments."""
    return [
        (one.kernel.__name__, one.grid, one.options, [_seen(arg) for arg in one.args])
        for one in launches
        if one.kernel.__name__ != "groups_kernel"
    ]


def _seen(arg):
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.dtype
    return (_seen(arg.base), arg.shape, arg.block_shape) if hasattr(arg, "block_shape") else arg


@pytest.fixture
def backward_operands(inputs, launches, monkeypatch):
    """What both backwards of `launch` take first. The launches of the weights' quantisation and of a forward are those
    in `launches`; like all in these tests, they do not run."""
    pytest.importorskip("triton.experimental.gluon")
    from moe_experts.fp8 import launch

    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)  # of counts that no kernel has looked at
    x, *weights = (t.detach() for t in inputs.leaves)
    w = launch.quantize_weights(*weights)
    _, *kept = launch.forward(x, inputs.counts, bench.LIMIT, *w[:4], keep=True)
    return inputs.dout, inputs.counts, *kept, *w[4:], bench.LIMIT


def test_the_stages_launch_what_a_step_does(inputs, backward_operands, launches):
    """In its order, but the weights, of two launches, last."""
    from moe_experts.fp8 import launch

    needs = {f"need_{name}": True for name in ("x", "gate", "up", "down")}
    launch.backward(*backward_operands, packed=False, **needs)
    step = seen(launches)
    launches.clear()
    calls = [stages.by_us(name, inputs) for name in stages.LABELS]
    assert not seen(launches)
    for call in calls:
        call()
    assert seen(launches) == step[2:] + step[:2]


def test_sums_launch_what_a_step_does(inputs, backward_operands, launches):
    from moe_experts.fp8 import launch

    experts, _, hidden, inner = SHAPE
    sums = torch.zeros(experts, 2 * inner, hidden), torch.zeros(experts, hidden, inner)
    launch.backward_accumulate(*backward_operands, *sums, accumulate=True)
    step = seen(launches)
    launches.clear()
    for name in ("down_grad", "gate_up_grad"):
        stages.by_us(name, inputs, sums=True)()
    assert seen(launches) == step[-2:]


def test_bytes_of_the_passes():
    found = {case.label: case.bytes for case in bench.cases(CUDA, False)}
    expected = {"quantise x": 2.05, "quantise dout": 2.05, "SwiGLU": 1.14, "SwiGLU backward": 2.53}
    expected["quantise weights"] = 0.566
    for label, gigabytes in expected.items():
        assert found[f"EP=96, {label}"] / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert found["EP=8, quantise weights"] == 12 * found["EP=96, quantise weights"]
    copy = 384 + 4 * 384 / 128
    assert stages.pass_bytes("quantize_x", [8, 130], 256, 512) == 256 * (2 * 138 + 2 * copy)
    assert stages.pass_bytes("swiglu", [8, 130], 256, 512) == 512 * (4 * 384 + copy)
    assert stages.pass_bytes("swiglu_backward", [8, 130], 256, 512) == 512 * (6 * 384 + 5 * copy)
    assert stages.pass_bytes("quantize_weights", [8, 130], 256, 512) == 6 * (4 * 256 * 512 + 8 * 2 * 4)


def test_operands_are_those_of_the_definition(inputs):
    x, *weights = (t.detach() for t in inputs.leaves)
    quantized = moe_experts.moe_experts_fp8_quantize_weights(*weights)
    _, _, x_t, x_t_sf = moe_experts.moe_experts_fp8_forward_quantized(x, inputs.counts, bench.LIMIT, *quantized[:4])
    codes, scales = inputs.copies["x"].panels
    blocks = len(inputs.where.source) // 128
    assert codes.shape == (inputs.padded // 128, x.shape[1], 128)
    assert torch.equal(codes.view(torch.uint8).flatten(), x_t.view(torch.uint8))
    assert torch.equal(scales[:blocks], x_t_sf[:blocks])
    flat = [t for pair in inputs.weights.values() for t in pair]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(flat, quantized, strict=True))
    assert (inputs.gate_up[inputs.where.own].float().std() - 7).abs() < 0.1


@pytest.mark.parametrize("sizes", [(5, 0, 128, 129), (0, 0, 1), (256,)])
def test_packing(sizes):
    where = peers.Packing.of(torch.tensor(sizes, dtype=torch.int32))
    assert where.sizes == where.lengths.tolist() == [-(-size // 128) * 128 for size in sizes]
    rows = 1 + torch.arange(2 * sum(sizes)).view(-1, 2)
    packed = where.pack(rows.bfloat16())
    start = place = 0
    for expert, (size, length) in enumerate(zip(sizes, where.sizes, strict=True)):
        assert torch.equal(packed[place : place + size], rows[start : start + size].bfloat16())
        assert not packed[place + size : place + length].any()
        assert (where.experts[place : place + length] == expert).all()
        start, place = start + size, place + length
    assert len(packed) == place
    assert torch.equal(where.unpack(packed), rows.bfloat16())


@pytest.mark.parametrize("name", SIZES)
def test_products_are_verified(name, inputs, plan, deep_gemm):
    ours = stages.by_us(name, inputs)()
    found = [ours, peers.product_alone(name, inputs)()]
    if name.endswith("_grad"):
        found.append(stages.by_us(name, inputs, sums=True)())
        assert [one[0].dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
    for one in found:
        assert stages.right(name, inputs, one).startswith(f"{name} ")
    for out, own in found:
        wrong = out.clone()
        wrong[..., -16:] *= 1.1  # a band
        with pytest.raises(AssertionError, match=rf"^{name}: relative error"):
            stages.right(name, inputs, (wrong, own))
        with pytest.raises(AssertionError, match=rf"^{name}: relative error"):
            stages.right(name, inputs, (out.roll(1, 0), own))


def test_all_six_products_are_verified(inputs, deep_gemm):
    found = stages.six_alone(inputs)()
    assert all(f"{name} " in stages.all_right(inputs, found) for name in SIZES)
    found["grad_x"] = (found["grad_x"][0].neg(), found["grad_x"][1])
    with pytest.raises(AssertionError, match=r"^grad_x: relative error"):
        stages.all_right(inputs, found)


@pytest.mark.parametrize("name", PASSES)
def test_passes_are_verified(name, inputs, plan):
    (case,) = (case for case in bench.cases(CUDA, True) if case.label == f"EP=96, {stages.LABELS[name]}")
    _, compiled, _ = case.candidates
    found = stages.by_us(name, inputs)()
    peer = peers.pass_alone(name, inputs, bench.LIMIT, compiled=False)()
    assert found.keys() == peer.keys()
    for verify, outputs in ((case.verify, found), (compiled.verify, peer)):
        assert "codes differ" in verify(inputs, outputs)
        for key, (codes, scales) in outputs.items():
            turned = codes.view(torch.uint8).clone()
            turned.view(-1)[: 128 * 256] ^= 0x80
            wrong = {"codes": (turned.view(codes.dtype), scales), "scales": (codes, scales * 1.01)}
            for operand in wrong.values():
                with pytest.raises(AssertionError, match=f"^{key} too far from the definition"):
                    verify(inputs, {**outputs, key: operand})
    if name not in SWIGLUS:
        assert case.verify(inputs, found).startswith("0.0e+00 of the codes differ, scales by up to 0.0e+00")
    for key, (codes, scales) in found.items():
        few = codes.view(torch.uint8).clone()
        few.view(-1)[:: 500 if name in SWIGLUS else few.numel()] ^= 1
        for wrong in ((few.view(codes.dtype), scales), (codes, scales * 1.0001)):
            with pytest.raises(AssertionError, match=f"^{key} too far"):
                case.verify(inputs, {**found, key: wrong})
    with pytest.raises(AssertionError, match="expected"):
        case.verify(inputs, dict(list(found.items())[1:]))
    key, (codes, scales) = next(iter(found.items()))
    with pytest.raises(AssertionError, match=rf"^{key} is .*float64.* expected"):
        case.verify(inputs, {**found, key: (codes, scales.double())})


@pytest.fixture
def on_gpu() -> stages.Inputs:
    return bench.make_inputs(3, 1000, 256, 384, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("name", stages.LABELS)
def test_our_stages_on_the_device(name, on_gpu):
    (case,) = (case for case in bench.cases(CUDA, True) if case.label == f"EP=96, {stages.LABELS[name]}")
    for candidate in case.candidates:
        if candidate.ours:
            (candidate.verify or case.verify)(on_gpu, candidate.prepare(on_gpu)())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_products_by_deep_gemm_on_the_device(name, on_gpu):
    needs_deep_gemm()
    stages.right(name, on_gpu, peers.product_alone(name, on_gpu)())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_compiled_passes_on_the_device(name, on_gpu):
    bounds = stages.ROUNDED if name in SWIGLUS else stages.CASTS
    found = peers.pass_alone(name, on_gpu, bench.LIMIT, compiled=True)()
    stages.pass_right(name, on_gpu, found, bounds, packed=True)
