"""What the host side launches, with which tensors, on CPU tensors: the launches are recorded and not run."""

import itertools

import pytest
import torch
from hopper_kernels.models import V41_FLASH
from moe_experts import launch, plan
from torch import Tensor

from tests.moe_experts.inputs import operands
from tests.support.launches import assert_compiled_ahead

pytest.importorskip("triton.experimental.gluon")
FORWARD = ["groups", "gate_up", "product"]
BACKWARD_DATA = ["groups", "grad_hidden", "product"]
EMPTY = torch.Size([0])


@pytest.fixture(autouse=True)
def asserted(monkeypatch):
    """What the device is asked to assert, which no kernel has written here."""
    found = []
    monkeypatch.setattr(torch, "_assert_async", lambda flag, message: found.append((flag, message)))
    return found


def names(launches):
    return [one.kernel.__name__.removesuffix("_kernel") for one in launches]


def descriptors(one):
    return [a for a in one.args if hasattr(a, "block_shape")]


def bases(one):
    """Addresses and shapes of all tensors of a launch, those behind descriptors too."""
    found = [getattr(a, "base", a) for a in one.args]
    return [(t.data_ptr(), tuple(t.shape)) for t in found if isinstance(t, Tensor)]


def forward(t):
    return launch.forward(t.x, t.gate_proj, t.up_proj, t.down_proj, t.num_tokens_per_expert, t.swiglu_limit)


def backward(t, gate, up, *needs):
    """needs: of x, gate, up and down."""
    weights = t.gate_proj, t.up_proj, t.down_proj
    dout = torch.zeros_like(t.x)
    return launch.backward(dout, t.x, *weights, t.num_tokens_per_expert, gate, up, t.swiglu_limit, *needs)


def backward_data(t, gate, up, dout=None):
    weights = t.gate_proj, t.up_proj, t.down_proj
    dout = torch.zeros_like(t.x) if dout is None else dout
    return launch.backward_data(dout, *weights, t.num_tokens_per_expert, gate, up, t.swiglu_limit)


def weight_grad(t, dgate_dup, h, packed=False):
    return launch.weight_grad(torch.zeros_like(t.x), t.x, t.num_tokens_per_expert, dgate_dup, h, packed)


def test_a_step(launches):
    t = operands()
    out, gate, up = forward(t)
    assert names(launches) == FORWARD
    assert (out.shape, gate.shape, up.shape) == (t.x.shape, (50, 40), (50, 40))
    launches.clear()
    dx, dgate_dup, h = backward_data(t, gate, up)
    assert names(launches) == BACKWARD_DATA
    assert [one.options.get("PRODUCTS") for one in launches] == [None, None, 2]
    assert (dx.shape, dgate_dup.shape, h.shape) == (t.x.shape, (50, 80), (50, 40))
    launches.clear()
    grads = weight_grad(t, dgate_dup, h)
    assert names(launches) == ["groups", "weight_grad", "weight_grad"]
    assert [one.args[7] for one in launches[1:]] == [2, 1]  # products
    assert [g.shape for g in grads] == [t.gate_proj.shape, t.up_proj.shape, t.down_proj.shape]


def test_without_rows_nothing_is_launched(launches):
    t = operands((0, 0, 0), 0)
    out, gate, up = forward(t)
    dx, dgate_dup, h = backward_data(t, gate, up)
    grads = weight_grad(t, dgate_dup, h)
    joint = backward(t, gate, up, True, True, True, True)
    assert launches == []
    assert [len(r) for r in (out, gate, up, dx, dgate_dup, h)] == [0] * 6
    for dw1, dw3, dw2 in (grads, joint[1:]):
        assert (dw1.shape, dw3.shape, dw2.shape) == (t.gate_proj.shape, t.up_proj.shape, t.down_proj.shape)
        assert not any(g.any() for g in (dw1, dw3, dw2))
    assert [r.shape for r in backward(t, gate, up, False, False, True, False)] == [
        EMPTY,
        EMPTY,
        t.up_proj.shape,
        EMPTY,
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=4)))
def test_only_what_is_needed_is_launched(needs, packed, launches):
    """Groups are found once, and what reads the SwiGLU comes first, so that its memory is free for the results."""
    t = operands()
    if packed:
        t = t._replace(gate_proj=torch.zeros(3, 80, 64).bfloat16(), up_proj=None)
    need_x, need_gate, need_up, need_down = needs
    gate, up = t.x.new_zeros(50, 40), t.x.new_zeros(50, 40)
    dx, dw1, dw3, dw2 = backward(t, gate, up, *needs)
    need_up = need_up and not packed
    wanted = [t.x.shape if need_x else EMPTY, t.gate_proj.shape if need_gate else EMPTY]
    wanted += [(3, 40, 64) if need_up else EMPTY, t.down_proj.shape if need_down else EMPTY]
    assert [g.shape for g in (dx, dw1, dw3, dw2)] == wanted
    both = 2 * need_gate if packed else need_gate + need_up
    order = [("weight_grad", need_down), ("product", need_x), ("weight_grad", both)]
    assert names(launches) == ["groups", "grad_hidden", *(name for name, asked in order if asked)]
    grads = launches[1].args[4:6]  # of gate and up
    if both:
        assert launches[-1].args[7] == both  # products
        sources, targets = descriptors(launches[-1])[:2], descriptors(launches[-1])[3:]
        outs = (dw1[:, :40], dw1[:, 40:]) if packed else (dw1, dw3)
        asked = need_gate, need_gate if packed else need_up
        pairs = [(grad, out) for grad, out, wants in zip(grads, outs, asked, strict=True) if wants]
        found = [(a.base.data_ptr(), out.base.data_ptr()) for a, out in zip(sources, targets, strict=True)]
        assert found == [(a.data_ptr(), out.data_ptr()) for a, out in (pairs[0], pairs[-1])]


@pytest.mark.parametrize("what", ["packed", "halves", "slices"])
def test_weights_are_read_in_place(what, launches):
    """Both of a packed weight, its halves as two weights, and every second expert: no copy, and its own bytes."""
    t = operands((3, 2), 0)
    packed = torch.randn(2, 80, 64).bfloat16()
    gate_proj, up_proj = packed[:, :40], packed[:, 40:]
    if what == "packed":
        t = t._replace(gate_proj=packed, up_proj=None)
    elif what == "halves":
        t = t._replace(gate_proj=gate_proj, up_proj=up_proj)
    else:
        every = torch.randn(4, 40, 64).bfloat16()
        gate_proj, up_proj = every[::2], every[1::2]
        t = t._replace(gate_proj=gate_proj, up_proj=up_proj)
    _, gate, up = forward(t)
    backward_data(t, gate, up)
    for one in (launches[1], launches[5]):
        found = [d for d in descriptors(one) if len(d.shape) == 3]
        assert [d.base.data_ptr() for d in found] == [gate_proj.data_ptr(), up_proj.data_ptr()]
        assert [(d.shape, d.strides) for d in found] == [([2, 40, 64], list(gate_proj.stride()))] * 2


def test_results_of_rows_end_with_their_expert(launches):
    """The descriptors that a kernel stores by: the row is counted from the end of a long dimension, and the address
    is that of the row, modulo 2^64."""
    t = operands()
    _, gate, up = forward(t)
    _, dgate_dup, h = backward_data(t, gate, up)
    weight_grad(t, dgate_dup, h)
    ragged = [d for one in launches for d in descriptors(one) if len(d.shape) == 4]
    assert len(ragged) == 2 + 1 + 1 + 3 + 3
    for d in ragged:
        pitch = d.strides[2]
        for row, left, column in [(0, 1, 0), (17, 3, 8), (2**29, 2**20, 64)]:
            at = (plan.BEYOND, row + left, plan.BEYOND - left, column)
            elements = sum(i * stride for i, stride in zip(at, d.strides, strict=True))
            assert 2 * elements % 2**64 == 2 * (row * pitch + column)
            assert at[2] + left == d.shape[2]
        assert pitch == d.base.stride(0)
        assert d.shape[3] == d.base.shape[1]
        assert all(stride < 2**39 for stride in d.strides)  # 2^40 bytes is what TMA takes
        assert all(size <= 2**31 for size in d.shape)


def test_counts_that_cannot_be_are_left_to_the_device(launches, asserted):
    t = operands()
    forward(t)
    ((flag, message),) = asserted
    assert flag.data_ptr() == launches[0].args[4].data_ptr()
    assert "num_tokens_per_expert" in message


@pytest.mark.parametrize(("rows", "experts"), [(1, 1), (127, 3), (128, 1), (129, 160), (98304, 4), (2**29, 48)])
def test_the_groups_table_has_room(rows, experts):
    counts = torch.empty(experts, dtype=torch.int32, device="meta")
    where = plan.empty_groups(counts, rows)
    most = -(-rows // plan.ROWS) + experts + 1
    assert where.tiles.numel() == 4 * (most + 1)
    assert where.starts.numel() == experts + 1
    offsets = [part.storage_offset() for part in where]
    assert all(offset % 4 == 0 for offset in offsets)
    assert where.tiles.storage_offset() + where.tiles.numel() <= where.valid.storage_offset()
    assert where.valid.storage_offset() + 4 == where.starts.storage_offset()


def test_what_is_compiled_ahead_is_what_a_model_launches(launches):
    """Counts of either type: nothing else, and nothing in vain."""
    hidden, inner = V41_FLASH.hidden, V41_FLASH.moe_intermediate
    for dtype in (torch.int32, torch.int64):
        t = operands((2, 0, 1, 1), 1, hidden, inner)
        t = t._replace(num_tokens_per_expert=t.num_tokens_per_expert.to(dtype))
        _, gate, up = forward(t)
        _, dgate_dup, h = backward_data(t, gate, up)
        weight_grad(t, dgate_dup, h)
    assert_compiled_ahead(plan.variants(), launches)


def test_the_kernels_know_the_constants_of_the_plan():
    tiles = pytest.importorskip("moe_experts.kernels.tiles")
    for name in ("ROWS", "HALF", "COLUMNS", "DEPTH", "PANEL"):
        assert getattr(tiles, name).value == getattr(plan, name), name
    assert tiles.PANELS.value * plan.PANEL == plan.COLUMNS


def test_the_stride_of_one_index_does_not_matter():
    """PyTorch calls a tensor contiguous whatever the strides of its dimensions of size 1 are; TMA wants multiples of 16
    bytes."""
    base = torch.zeros(3 * 64 * 40).bfloat16()
    assert plan.strides(base.as_strided((1, 40, 64), (7, 64, 1))) == [2560, 64, 1]
    assert plan.strides(base.as_strided((1, 64), (3, 1))) == [64, 1]
    assert plan.strides(base.as_strided((1, 1, 64), (1, 1, 1))) == [64, 64, 1]
    assert plan.strides(base.as_strided((2, 40, 64), (5120, 64, 1))) == [5120, 64, 1]
    assert plan.strides(base.as_strided((3, 40, 64), (0, 64, 1))) == [0, 64, 1]


def test_one_expert_and_one_row_with_odd_strides(launches):
    t = operands((1,), 0)
    x = t.x.as_strided((1, 64), (1, 1))
    weights = [w.as_strided(w.shape, (1, *w.stride()[1:])) for w in t[1:4]]
    t = t._replace(x=x, gate_proj=weights[0], up_proj=weights[1], down_proj=weights[2])
    out, gate, up = forward(t)
    odd = [one.as_strided(one.shape, (1, 1)) for one in (gate, up)]
    results = out, gate, up, *backward_data(t, *odd, dout=x)
    assert all(one.stride() == (one.shape[1], 1) for one in results)
    found = [d.strides for one in launches for d in descriptors(one)]
    assert all(stride % 8 == 0 for strides in found for stride in strides[:-1])
