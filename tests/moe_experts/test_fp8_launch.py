"""What the host side of the FP8 path launches, with which tensors, on CPU tensors: recorded and not run."""

import itertools

import pytest
import torch
from hopper_kernels.models import V41_FLASH
from moe_experts.fp8 import launch, plan
from moe_experts.fp8.layout import padded_rows

from tests.moe_experts.inputs import operands
from tests.moe_experts.test_launch import EMPTY, descriptors, names
from tests.support.launches import assert_compiled_ahead

pytest.importorskip("triton.experimental.gluon")
HIDDEN, INNER, EXPERTS = 256, 128, 3
QUANTIZE_WEIGHTS = ["quantize_weights"] * 2
FORWARD = ["groups", "quantize", "product", "swiglu", "product"]
GRADIENTS = ["groups", "quantize", "product", "swiglu_backward"]


@pytest.fixture(autouse=True)
def asserted(monkeypatch):
    """What the device is asked to assert, which no kernel has written here."""
    found = []
    monkeypatch.setattr(torch, "_assert_async", lambda flag, message: found.append((flag, message)))
    return found


def numbers(groups=(30, 0, 17), tail=3, hidden=HIDDEN, inner=INNER):
    return operands(groups, tail, hidden, inner)


def quantized(t, transposed=True):
    return launch.quantize_weights(t.gate_proj, t.up_proj, t.down_proj, transposed)


def forward(t, weights, keep=True):
    return launch.forward(t.x, t.num_tokens_per_expert, t.swiglu_limit, *weights[:4], keep)


def backward(t, kept, weights, *needs, packed=False):
    """needs: of x, gate, up and down."""
    dout, limit = torch.zeros_like(t.x), t.swiglu_limit
    return launch.backward(dout, t.num_tokens_per_expert, *kept, *weights[4:], limit, packed, *needs)


def backward_data(t, kept, weights):
    counts, limit = t.num_tokens_per_expert, t.swiglu_limit
    return launch.backward_data(torch.zeros_like(t.x), counts, kept[0], *weights[4:], limit)


def sums(t):
    experts, hidden, inner = t.down_proj.shape
    return torch.ones(experts, 2 * inner, hidden), torch.ones(experts, hidden, inner)


def address(argument):
    return getattr(argument, "base", argument).data_ptr()


def test_a_step(launches):
    t = numbers()
    weights = quantized(t)
    assert names(launches) == QUANTIZE_WEIGHTS
    launches.clear()
    out, *kept = forward(t, weights)
    assert names(launches) == FORWARD
    assert [one.options.get("PADDED") for one in launches] == [None, None, True, None, False]
    padded = padded_rows(len(t.x), EXPERTS)
    shapes = [t.x.shape, (padded, 2 * INNER), (padded * HIDDEN,), (padded // 128, HIDDEN)]
    assert [r.shape for r in (out, *kept)] == shapes
    launches.clear()
    dx, *operands = backward_data(t, kept, weights)
    assert names(launches) == [*GRADIENTS, "product"]
    assert [one.options.get("PANELS") for one in launches] == [None, True, None, True, None]
    assert dx.shape == t.x.shape
    launches.clear()
    counts, rows = t.num_tokens_per_expert, len(t.x)
    launch.weight_grad_accumulate(counts, *operands, *kept[1:], rows, *sums(t), True)
    assert names(launches) == ["groups", "weight_grad", "weight_grad"]
    assert [one.options["MODE"] for one in launches[1:]] == [plan.ADD] * 2
    launches.clear()
    launch.backward_accumulate(torch.zeros_like(t.x), counts, *kept, *weights[4:], t.swiglu_limit, *sums(t), False)
    assert names(launches) == [*GRADIENTS, "product", "weight_grad", "weight_grad"]
    assert [one.options["MODE"] for one in launches[-2:]] == [plan.OVERWRITE] * 2


def test_grids_have_one_axis(launches):
    """The others end at 65,535 programs."""
    t = numbers()
    weights = quantized(t)
    _, *kept = forward(t, weights)
    backward_data(t, kept, weights)
    assert {len(one.grid) for one in launches} == {1}
    blocks = padded_rows(len(t.x), EXPERTS) // 128
    grids = {one.kernel.__name__: one.grid[0] for one in launches}
    assert grids["quantize_kernel"] == blocks * HIDDEN // 128
    assert grids["swiglu_kernel"] == blocks * INNER // 128
    of_weights = [one.grid[0] for one in launches if one.kernel.__name__ == "quantize_weights_kernel"]
    assert of_weights == [EXPERTS * 2 * INNER * HIDDEN // 128**2, EXPERTS * HIDDEN * INNER // 128**2]


def test_one_row_with_odd_strides(launches):
    t = numbers((1,), 0)
    weights = quantized(t)
    out, *kept = forward(t._replace(x=t.x.as_strided(t.x.shape, (1, 1))), weights)
    dout = torch.zeros_like(t.x).as_strided(t.x.shape, (1, 1))
    dx, *_ = launch.backward_data(dout, t.num_tokens_per_expert, kept[0], *weights[4:], t.swiglu_limit)
    assert [r.stride() for r in (out, dx)] == [(HIDDEN, 1)] * 2
    found = [d.strides for one in launches for d in descriptors(one)]
    assert all(stride % 8 == 0 for strides in found for stride in strides[:-1])


def test_nothing_is_kept_that_no_backward_reads(launches):
    t = numbers()
    weights = quantized(t, transposed=False)
    out, *kept = forward(t, weights, keep=False)
    assert names(launches) == QUANTIZE_WEIGHTS + FORWARD
    assert out.shape == t.x.shape
    assert [r.numel() for r in (*kept, *weights[4:])] == [0] * 7
    assert [one.options.get("TURNED") for one in launches[:2]] == [False] * 2
    assert launches[3].options["PANELS"] is False


def test_without_rows_no_rows_are_read(launches):
    t = numbers((0, 0, 0), 0)
    weights = quantized(t)
    launches.clear()
    out, *kept = forward(t, weights)
    dx, *operands = backward_data(t, kept, weights)
    assert [len(r) for r in (out, dx)] == [0, 0]
    joint = backward(t, kept, weights, True, True, True, True)
    assert [g.shape for g in joint[1:]] == [t.gate_proj.shape, t.up_proj.shape, t.down_proj.shape]
    assert not any(g.any() for g in joint[1:])
    counts = t.num_tokens_per_expert
    for accumulate in (True, False):
        buffers = sums(t)
        launch.weight_grad_accumulate(counts, *operands, *kept[1:], 0, *buffers, accumulate)
        assert all(b.eq(float(accumulate)).all() for b in buffers)
        buffers = sums(t)
        rest = t.swiglu_limit, *buffers, accumulate
        assert len(launch.backward_accumulate(torch.zeros_like(t.x), counts, *kept, *weights[4:], *rest)) == 0
        assert all(b.eq(float(accumulate)).all() for b in buffers)
    assert launches == []


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_only_what_is_needed_is_launched(needs, packed, launches):
    """Panels are made if a weight's gradient is wanted; what reads h's comes before what else takes memory."""
    t = numbers()
    weights = quantized(t)
    _, *kept = forward(t, weights)
    launches.clear()
    need_x, need_gate, need_up, need_down = needs
    dx, dw1, dw3, dw2 = backward(t, kept, weights, *needs, packed=packed)
    gate = (EXPERTS, 2 * INNER, HIDDEN) if packed else tuple(t.gate_proj.shape)
    need_up = need_up and not packed
    wanted = [t.x.shape if need_x else EMPTY, gate if need_gate else EMPTY]
    wanted += [t.up_proj.shape if need_up else EMPTY, t.down_proj.shape if need_down else EMPTY]
    assert [tuple(g.shape) for g in (dx, dw1, dw3, dw2)] == [tuple(shape) for shape in wanted]
    both = need_gate or need_up
    order = [("weight_grad", need_down), ("product", need_x), ("weight_grad", both)]
    assert names(launches) == [*GRADIENTS, *(name for name, asked in order if asked)]
    panels = both or need_down
    assert [launches[i].options["PANELS"] for i in (1, 3)] == [panels, panels]
    if both:
        last = launches[-1]
        found = [address(a) for a in last.args[4:6]]
        outs = [g for g, asked in ((dw1, need_gate), (dw3, need_up)) if asked]
        assert found == [outs[0].data_ptr(), outs[-1].data_ptr()]
        first, split = last.args[10:12]  # in blocks of channels
        assert (first, split) == (0 if need_gate else INNER // 128, outs[0].shape[1] // 128)


@pytest.mark.parametrize("what", ["packed", "halves", "slices"])
def test_weights_are_read_in_place(what, launches):
    """Both of a packed weight, its halves as two weights, and every second expert: no copy, and its own pitch."""
    t = numbers()
    packed = torch.randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16()
    gate_proj, up_proj = packed[:, :INNER], packed[:, INNER:]
    if what == "packed":
        t = t._replace(gate_proj=packed, up_proj=None)
    else:
        if what == "slices":
            every = torch.randn(2 * EXPERTS, INNER, HIDDEN).bfloat16()
            gate_proj, up_proj = every[::2], every[1::2]
        t = t._replace(gate_proj=gate_proj, up_proj=up_proj)
    quantized(t)
    gate, up, *_, rows, half, columns, gate_pitch, up_pitch = launches[0].args
    assert (gate.data_ptr(), up.data_ptr()) == (gate_proj.data_ptr(), up_proj.data_ptr())
    assert (rows, half, columns) == (2 * INNER // 128, INNER // 128, HIDDEN // 128)
    assert (gate_pitch, up_pitch) == (gate_proj.stride(0) // HIDDEN, up_proj.stride(0) // HIDDEN)


def test_sums_are_written_where_they_are(launches):
    """Strided views of a larger buffer, in numbers over 4."""
    t = numbers()
    weights = quantized(t)
    _, *kept = forward(t, weights)
    _, *operands = backward_data(t, kept, weights)
    flat = torch.zeros(EXPERTS, 2 * INNER + 8, HIDDEN + 4)
    dw13, dw2 = flat[:, 4:-4, :-4], torch.zeros(EXPERTS, HIDDEN, INNER)
    launches.clear()
    counts = t.num_tokens_per_expert
    launch.weight_grad_accumulate(counts, *operands, *kept[1:], len(t.x), dw13, dw2, True)
    down, gate_up = (one.args for one in launches[1:])
    assert (gate_up[4].data_ptr(), down[4].data_ptr()) == (dw13.data_ptr(), dw2.data_ptr())
    columns, pitch, expert_pitch = gate_up[12:15]
    assert (columns, 4 * pitch, 4 * expert_pitch) == (HIDDEN, HIDDEN + 4, flat.stride(0))
    assert down[12:15] == (INNER, INNER // 4, HIDDEN * INNER // 4)


def test_counts_that_cannot_be_are_left_to_the_device(launches, asserted):
    t = numbers()
    weights = quantized(t)
    launches.clear()
    forward(t, weights)
    ((flag, message),) = asserted
    assert flag.data_ptr() == launches[0].args[4].data_ptr()
    assert "num_tokens_per_expert" in message


def test_operands_of_products(launches):
    """Boxes of the halves of a step's rows and of all columns of a tile, with scales in rings beside them."""
    t = numbers()
    weights = quantized(t)
    _, *kept = forward(t, weights)
    backward_data(t, kept, weights)
    products = [one for one in launches if one.kernel.__name__ == "product_kernel"]
    assert len(products) == 4
    for one in products:
        a, b, out, scales = descriptors(one)
        assert [d.block_shape for d in (a, b, scales)] == [[64, 128], [1, 256, 128], [1, 128]]
        assert (a.shape[1], b.shape[0], b.shape[2]) == (b.shape[2], EXPERTS, a.shape[1])
        assert scales.shape == [a.shape[1] // 128, a.shape[0]]
        experts, width, depth, blocks = one.args[6:]
        assert (experts, width, depth, blocks) == (EXPERTS, -(-b.shape[1] // 256), b.shape[2] // 128, b.shape[1] // 128)
        rows = padded_rows(len(t.x), EXPERTS) if one.options["PADDED"] else len(t.x)
        assert (out.base.shape[0], out.base.shape[1]) == (rows, b.shape[1])


def test_what_is_compiled_ahead_is_what_a_model_launches(launches):
    """With and without gradients: nothing else, and nothing in vain."""
    hidden, inner = V41_FLASH.hidden, V41_FLASH.moe_intermediate
    t = numbers((2, 0, 1, 1), 1, hidden, inner)
    weights = quantized(t)
    _, *kept = forward(t, weights)
    forward(t, quantized(t, transposed=False), keep=False)
    _, *operands = backward_data(t, kept, weights)
    backward(t, kept, weights, True, True, True, True)
    backward(t, kept, weights, True, False, False, False)
    counts, rows = t.num_tokens_per_expert, len(t.x)
    for accumulate in (False, True):
        launch.weight_grad_accumulate(counts, *operands, *kept[1:], rows, *sums(t), accumulate)
    assert_compiled_ahead(plan.variants(), [one for one in launches if one.kernel.__name__ != "groups_kernel"])


def test_the_kernels_know_the_constants_of_the_plan():
    tiles = pytest.importorskip("moe_experts.fp8.kernels.tiles")
    for name in ("BLOCK", "COLUMNS", "HALF", "PANEL"):
        assert getattr(tiles, name).value == getattr(plan, name), name
    sums_of = pytest.importorskip("moe_experts.fp8.kernels.weight_grad")
    for name in ("BF16", "OVERWRITE", "ADD"):
        assert getattr(sums_of, name).value == getattr(plan, name), name


def test_the_table_of_scales_holds_those_of_the_largest_sizes():
    from moe_experts.arguments import FP8_TERMS

    products = pytest.importorskip("moe_experts.fp8.kernels.products")
    assert products.TABLE.value * plan.BLOCK == FP8_TERMS
