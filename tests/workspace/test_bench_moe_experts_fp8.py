"""The FP8 bench of moe_experts: operations, bytes, verification, and its ways with stand-ins for what needs a GPU."""

from __future__ import annotations

import functools
import inspect
import sys
from types import SimpleNamespace

import moe_experts
import pytest
import torch
from torch import Tensor

from benches import harness
from benches import moe_experts as bf16
from benches import moe_experts_fp8 as bench
from benches import moe_fp8_stages as stages
from benches.moe_products import SIZES
from benches.peers import experts_fp8 as peers

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PASSES = [name for name in stages.LABELS if name not in SIZES]
SWIGLUS = "swiglu", "swiglu_backward"
SHAPE = 3, 450, 256, 384  # experts, rows, hidden, inner


@pytest.fixture
def inputs() -> stages.Inputs:
    return bench.make_inputs(*SHAPE, CPU)


@pytest.fixture
def batches() -> bench.MicroBatches:
    return bench.make_micro_batches(*SHAPE, CPU)


def wide(scales: Tensor) -> Tensor:
    """Scales of blocks, for each number."""
    return scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


# What DeepGEMM does, where its operands are as it reads them without a copy.


def m_grouped(a, b, d, experts):
    (codes, scales), (w, w_scales) = a, b
    (rows, depth), columns = codes.shape, w.shape[1]
    assert (scales.shape, scales.stride()) == ((rows, depth // 128), (1, rows))
    assert w_scales.shape == (len(w), columns // 128, depth // 128)
    assert (d.shape, d.dtype) == ((rows, columns), torch.bfloat16)
    assert (experts.shape, experts.dtype) == ((rows,), torch.int32)
    assert all(t.is_contiguous() for t in (codes, w, w_scales, d, experts))
    tiles = experts.view(-1, 128)
    assert torch.equal(tiles, tiles[:, :1].expand(-1, 128))
    values = codes.double() * scales.double().repeat_interleave(128, 1)
    for expert in range(len(w)):
        mine = experts == expert
        d[mine] = (values[mine] @ (w[expert].double() * wide(w_scales[expert])).T).bfloat16()


def k_grouped(a, b, d, sizes, lengths, c, recipe):
    assert (c is d, d.dtype, d.is_contiguous(), recipe) == (True, torch.float32, True, (1, 1, 128))
    assert (lengths.tolist(), lengths.dtype) == (sizes, torch.int32)
    assert all(size % 128 == 0 for size in sizes)
    for (codes, scales), channels in zip((a, b), d.shape[1:], strict=True):
        assert codes.shape == (sum(sizes) * channels,)
        assert (scales.shape, scales.stride()) == ((channels, sum(sizes) // 128), (1, channels))
    first = 0
    for expert, size in enumerate(sizes):
        values = []
        for (codes, scales), channels in zip((a, b), d.shape[1:], strict=True):
            part = codes[first * channels : (first + size) * channels].view(channels, size).double()
            own = scales[:, first // 128 : (first + size) // 128].double()
            values.append(part * own.repeat_interleave(128, 1))
        d[expert] += (values[0] @ values[1].T).float()
        first += size


@pytest.fixture
def deep_gemm(monkeypatch) -> None:
    functions = {"m_grouped_fp8_gemm_nt_contiguous": m_grouped, "k_grouped_fp8_gemm_nt_contiguous": k_grouped}
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**functions))


# The kernels' plan, with the definition behind it. `where` is the group sizes.


class Plan:
    BF16, ADD = 0, 2

    @staticmethod
    def quantize(x, where, rows, panels):
        copies = stages.Copies.of(_padded(x, where, len(rows[0])))
        return _writing((*rows, *panels), (*copies.rows, *copies.panels))

    @staticmethod
    def quantize_weights(gate, up, out, turned):
        joined = gate if len(gate[0]) == len(out[0][0]) else torch.cat((gate, up), dim=1)
        codes, scales = peers.casts(compiled=False).blocks(joined)
        return _writing((*out, *turned), (codes, scales, codes.mT, scales.mT))

    @staticmethod
    def swiglu(gate_up, limit, where, h):
        assert limit == bench.LIMIT
        found, _ = stages.swiglu(gate_up[:, : gate_up.shape[1] // 2], gate_up)
        return _writing(h, stages.Copies.of(found).rows)

    @staticmethod
    def product(a, b, where, out, padded):
        found = _product(a, b, where)
        return _writing((out,), (_padded(found, where, len(out)) if padded else found,))

    @staticmethod
    def swiglu_backward(grad, gate_up, limit, where, rows, panels, h_panels):
        assert limit == bench.LIMIT
        h, gradients = (stages.Copies.of(t) for t in stages.swiglu(grad, gate_up))
        return _writing((*rows, *panels, *h_panels), (*gradients.rows, *gradients.panels, *h.panels))

    @staticmethod
    def weight_grad(a, b, where, first, outs, mode):
        values = [codes.double() * scales.double().unsqueeze(-1) for codes, scales in (a, b)]
        found, begin = [], 0
        for size in where.tolist():
            end = begin + -(-size // 128)
            left, right = (v[begin:end].transpose(0, 1).flatten(1) for v in values)
            found.append((left @ right.T).to(outs[0].dtype))
            begin = end
        assert first == 0
        assert outs[0].dtype == (torch.bfloat16 if mode == Plan.BF16 else torch.float32)
        return _writing(outs, torch.stack(found).split([out.shape[1] for out in outs], dim=1))


def _padded(rows, counts, padded):
    found = rows.new_zeros(padded, rows.shape[1])
    found[peers.Packing.of(counts).own] = rows
    return found


def _product(a, b, counts):
    where = peers.Packing.of(counts)
    places = len(where.source)
    out = torch.empty(places, b[0].shape[1], dtype=torch.bfloat16)
    m_grouped((a[0][:places], a[1][:, :places].contiguous().t()), b, out, where.experts)
    return where.unpack(out)


def _writing(targets, sources):
    def run():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return SimpleNamespace(run=run)


@pytest.fixture
def plan(monkeypatch) -> None:
    groups = {"empty_groups": lambda counts, rows: counts, "groups": lambda *_: _writing((), ())}
    monkeypatch.setattr(stages, "bf16_plan", SimpleNamespace(**groups))
    monkeypatch.setattr(moe_experts.fp8, "plan", Plan, raising=False)


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


def test_operations():
    found = {case.label: case.flops for case in bench.cases(CUDA, False)}
    one = 2 * sum(bf16.group_sizes(4, bench.ROWS)) * 5120 * 2304
    assert found["EP=96, 4 experts, forward"] == 3 * one
    assert found["EP=96, 4 experts, forward + backward"] == 9 * one
    quarter = sum(bf16.group_sizes(4, bench.ROWS // 4))
    assert found["EP=96, 4 experts, 4 micro-batches"] == 4 * 9 * 2 * quarter * 5120 * 2304
    assert sum(found[f"EP=96, {stages.LABELS[name]}"] for name in SIZES) == 9 * one
    assert all(found[f"EP=96, {stages.LABELS[name]}"] is None for name in PASSES)


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


@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_steps_are_right(task, inputs, deep_gemm):
    prepared = [functools.partial(bench.prepare, task, fp8) for fp8 in (True, False)]
    for way in (*prepared, functools.partial(bench.prepare_deep_gemm, task, compiled=False)):
        outputs = way(inputs)()
        assert list(outputs) == list(bench.RESULTS[: 1 if task == bench.FORWARD else 5])
        bf16.close(inputs, outputs, bench.BOUNDS)


@pytest.mark.parametrize("name", bench.RESULTS)
def test_a_wrong_result_is_noticed(name, inputs):
    (case,) = (case for case in bench.cases(CPU, True) if case.label.endswith(bench.BOTH))
    outputs = bench.prepare(bench.BOTH, True, inputs)()
    case.verify(inputs, outputs)
    outputs[name] = outputs[name] * 1.2
    with pytest.raises(AssertionError, match=f"^{name} too far from the definition"):
        case.verify(inputs, outputs)
    with pytest.raises(AssertionError, match=rf"^{name} is \(.*float32\), expected"):
        case.verify(inputs, {**outputs, name: outputs[name].float()})


def test_micro_batches_differ_in_their_routing():
    batches = bench.make_micro_batches(5, 4000, 128, 256, CPU)
    sizes = [batch.counts.tolist() for batch in batches.batches]
    assert len({tuple(one) for one in sizes}) == len(sizes) == bench.BATCHES
    assert all(sorted(one) == sorted(bf16.group_sizes(5, 1000)) for one in sizes)
    assert all(sum(one) == len(batch.x) == len(batch.dout) for one, batch in zip(sizes, batches.batches, strict=True))
    assert not torch.equal(batches.batches[0].x, batches.batches[1].x)
    assert all(t.requires_grad for t in (*batches.weights, *(batch.x for batch in batches.batches)))
    shapes = [(4 * sum(sizes[0]), 128)] * 2 + [(5, 256, 128)] * 2 + [(5, 128, 256)]
    assert [tuple(t.shape) for t in batches.expected] == shapes


WAYS = {bench.OURS: (bench.by_autograd, torch.bfloat16), bench.CACHED: (bench.by_cached_weights, torch.float32)}


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_are_right_and_again(way, batches):
    (case,) = (case for case in bench.cases(CPU, True) if case.label.endswith(bench.MICRO))
    (candidate,) = (one for one in case.candidates if one.name == way)
    prepare, dtype = WAYS[way]
    assert candidate.prepare is prepare
    verify, call = candidate.verify or case.verify, prepare(batches)
    note, found = verify(batches, call()), call()
    assert verify(batches, found) == note
    for name in bench.RESULTS:
        value = found[name]
        wrong = value[1:] + value[:1] if isinstance(value, list) else value * 1.2
        with pytest.raises(AssertionError, match=f"^{name} too far from the definition"):
            verify(batches, {**found, name: wrong})
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    with pytest.raises(AssertionError, match=f"^grad up is {other}, expected {dtype}"):
        verify(batches, {**found, "grad up": found["grad up"].to(other)})


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


def test_toy_cases_run_through_the_harness():
    record = harness.run(bench.BENCH, CPU, rounds=1)
    assert len(record["cases"]) == 3 * len(bench.LOADS)
    for case in record["cases"]:
        assert {entry["status"] for entry in case["candidates"]} == {"verified"}, case
        assert [entry["ours"] for entry in case["candidates"]] == [True, bench.MICRO in case["label"]]
        assert all(entry["note"].startswith("relative errors: out ") for entry in case["candidates"])
        assert case["unit"] == "flops"
    assert "sgl-deep-gemm" in record["versions"]


def test_cases_of_a_gpu():
    full = bench.cases(CUDA, False)
    labels = [case.label for case in full]
    assert len(set(labels)) == len(labels) == len(bench.LOADS) * (3 + len(stages.LABELS))
    names = {case.label: [c.name for c in case.candidates] for case in full}
    steps = ["moe_experts, FP8", "moe_experts, bf16", "DeepGEMM, casts by torch.compile"]
    assert names["EP=8, 48 experts, forward"] == steps
    assert names["EP=8, 48 experts, forward + backward"] == [*steps, "its six products alone"]
    assert names["EP=8, 48 experts, 4 micro-batches"] == list(WAYS)
    for name, label in stages.LABELS.items():
        sums = ["moe_experts, FP8, fp32 sums"] if name.endswith("_grad") else []
        others = [*sums, "DeepGEMM"] if name in SIZES else ["torch.compile", harness.COPY]
        assert names[f"EP=8, {label}"] == ["moe_experts, FP8", *others]
    assert [case.label for case in bench.cases(CUDA, True)] == labels[:14]
    assert all(candidate.ours == ("FP8" in candidate.name) for case in full for candidate in case.candidates)


def needs_kernels() -> None:
    pytest.importorskip("moe_experts.fp8.plan", reason="requires the FP8 kernels")


def needs_deep_gemm() -> None:
    try:
        import deep_gemm  # noqa: F401
    except Exception as error:  # without a CUDA toolkit its import ends in an AssertionError
        pytest.skip(f"requires DeepGEMM (sgl-deep-gemm 0.1.5): {type(error).__name__}: {error}")


@pytest.fixture
def on_gpu() -> stages.Inputs:
    return bench.make_inputs(3, 1000, 256, 384, CUDA)


@pytest.mark.gpu
@pytest.mark.parametrize("name", stages.LABELS)
def test_our_stages_on_the_device(name, on_gpu):
    needs_kernels()
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


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("task", [bench.FORWARD, bench.BOTH])
def test_steps_by_deep_gemm_on_the_device(task, on_gpu):
    needs_deep_gemm()
    bf16.close(on_gpu, bench.prepare_deep_gemm(task, on_gpu, compiled=True)(), bench.BOUNDS)


@pytest.mark.gpu
def test_our_steps_on_the_device(on_gpu):
    needs_kernels()
    bf16.close(on_gpu, bench.prepare(bench.BOTH, True, on_gpu)(), bench.BOUNDS)
    batches = bench.make_micro_batches(3, 1000, 256, 384, CUDA)
    for prepare, dtype in WAYS.values():
        bench.summed(batches, prepare(batches)(), dtype)
