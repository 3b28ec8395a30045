"""Gradients of the weights in the caller's fp32 buffers: what is added, where, and what stays as it was."""

import math

import pytest
import torch
from moe_experts import (
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_weight_grad_accumulate,
)

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import operands, step
from tests.support.compare import assert_same_bytes

EXPERTS, HIDDEN, INNER = 3, 256, 128
SHAPES = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
EMPTY = 1  # the expert without rows


@pytest.fixture
def call():
    """A forward with quantised weights, the gradient of its result, and both halves' results from zeros."""
    t = operands(limit=1.0)
    s, dout = step(t), inputs.cotangent(t)
    dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    zeros = s.sums()
    moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *zeros)
    assert all(w[EMPTY - 1].any() and not w[EMPTY].any() for w in zeros)
    return s, dout, dx, columns, zeros


def joint(call, *sums, **options):
    s, dout, dx, *_ = call
    assert_same_bytes(moe_experts_fp8_backward_accumulate(dout, *s.joint, *sums, **options), dx)


def split(call, *sums, **options):
    s, _, _, columns, _ = call
    assert moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *sums, **options) is None


each_way = pytest.mark.parametrize("way", [joint, split])


def contiguous():
    return [torch.empty(shape) for shape in SHAPES]


def parts_of_a_flat_buffer():
    flat = torch.empty(8 + sum(math.prod(shape) for shape in SHAPES) + 12)
    first = math.prod(SHAPES[0])
    return [flat[8 : 8 + first].view(SHAPES[0]), flat[8 + first : -12].view(SHAPES[1])]


def rows_and_experts_apart():
    return [torch.empty(e + 1, r + 3, c + 20)[1:, 2 : r + 2, 4 : c + 4] for e, r, c in SHAPES]


def an_experts_weights_together():
    """As a sharded trainer may have them: all of an expert's weights, then those of the next."""
    sizes = [r * c for _, r, c in SHAPES]
    flat = torch.empty(EXPERTS, sum(sizes) + 4)
    return [part.view(shape) for part, shape in zip(flat[:, :-4].split(sizes, dim=1), SHAPES, strict=True)]


def experts_that_touch():
    """The next expert begins where the last row of the one before ends, within the pitch of the rows."""
    found = []
    for e, r, c in SHAPES:
        pitch = (r - 1) * (c + 8) + c
        found.append(torch.empty(e * pitch).as_strided((e, r, c), (pitch, c + 8, 1)))
    return found


each_layout = pytest.mark.parametrize(
    "layout",
    [contiguous, parts_of_a_flat_buffer, rows_and_experts_apart, an_experts_weights_together, experts_that_touch],
)


def whole(t):
    """Everything in the storage of t."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


@each_way
@each_layout
@pytest.mark.parametrize("accumulate", [True, False])
def test_one_addition_or_none(way, layout, accumulate, call):
    """RN(old + dW) or dW, and an expert without rows as it was, or zeros; bytes around the rows stay."""
    sums = layout()
    buffers = {t.untyped_storage().data_ptr(): whole(t) for t in sums}
    for buffer in buffers.values():
        buffer.copy_(torch.randn(buffer.shape) * 10)
    for t in sums:
        t[EMPTY, 3, 5] = math.nan
    expected = {pointer: buffer.clone() for pointer, buffer in buffers.items()}
    for t, dw in zip(sums, call[-1], strict=True):
        place = expected[t.untyped_storage().data_ptr()].as_strided(t.shape, t.stride(), t.storage_offset())
        for expert in range(EXPERTS):
            if not accumulate:
                place[expert] = dw[expert]
            elif expert != EMPTY:
                place[expert] = (place[expert].double() + dw[expert].double()).float()
    way(call, *sums, accumulate=accumulate)
    for pointer, buffer in buffers.items():
        assert_same_bytes(buffer, expected[pointer])


@each_way
def test_it_adds_unless_told_otherwise(way, call):
    once, twice = call[0].sums(), call[0].sums()
    way(call, *once)
    for _ in range(2):
        way(call, *twice)
    for one, two, dw in zip(once, twice, call[-1], strict=True):
        assert_same_bytes(one, dw)
        assert_same_bytes(two, dw + dw)


@each_way
def test_micro_batches_add_in_their_order(way):
    """Of different routings, each rounded once."""
    batches = []
    for groups in ((130, 0, 5), (1, 60, 9), (0, 3, 200)):
        t = operands("separate", groups, 2)
        s, dout = step(t), inputs.cotangent(t)
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        alone = s.sums()
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *alone)
        batches.append((s, dout, dx, columns, alone))
    sums, wanted = batches[0][0].sums(3.0), batches[0][0].sums(3.0)
    for batch in batches:
        way(batch, *sums)
        for want, dw in zip(wanted, batch[-1], strict=True):
            want += dw
    for got, want in zip(sums, wanted, strict=True):
        assert_same_bytes(got, want)


@each_way
@pytest.mark.parametrize("accumulate", [True, False])
def test_memory_between_sentinels(way, accumulate, call, guarded):
    buffers = [guarded(shape, torch.float32) for shape in SHAPES]
    for buffer in buffers:
        buffer.tensor.zero_()
    way(call, *(buffer.tensor for buffer in buffers), accumulate=accumulate)
    for buffer, dw in zip(buffers, call[-1], strict=True):
        assert_same_bytes(buffer.tensor, dw)


@each_way
def test_old_values_that_are_not_finite_stay_where_they_are(way, call):
    sums = call[0].sums()
    for t, value in zip(sums, (math.nan, math.inf), strict=True):
        t[0, 3, 5] = value
    way(call, *sums)
    for t, dw in zip(sums, call[-1], strict=True):
        assert not t[0, 3, 5].isfinite()
        t[0, 3, 5] = dw[0, 3, 5]
        assert_same_bytes(t, dw)


@each_way
def test_autograd_knows_that_the_buffers_changed(way, call):
    """Whoever saved one for a backward is told."""
    dw13, dw2 = call[0].sums()
    leaf = torch.ones(1, requires_grad=True)
    products = [(leaf * t).sum() for t in (dw13, dw2)]
    way(call, dw13, dw2)
    for product in products:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@each_way
def test_under_no_grad_a_parameter_may_be_the_buffer(way, call):
    """Where autograd looks on, a leaf that requires grad cannot be changed in place."""
    sums = [t.requires_grad_() for t in call[0].sums()]
    with pytest.raises(ValueError, match=r"^dw13 must not require grad"):
        way(call, *sums)
    with torch.no_grad():
        way(call, *sums)
    for t, dw in zip(sums, call[-1], strict=True):
        assert_same_bytes(t.detach(), dw)


def test_a_single_expert_may_have_any_pitch():
    t = operands("separate", (130,), 3)
    s, dout = step(t), inputs.cotangent(t)
    wanted, sums = s.sums(), [torch.zeros(v.shape).as_strided(v.shape, (3, v.shape[2], 1)) for v in s.sums()]
    for pair in (wanted, sums):
        moe_experts_fp8_backward_accumulate(dout, *s.joint, *pair)
    for got, want in zip(sums, wanted, strict=True):
        assert_same_bytes(got, want, strides=False)


def test_without_rows():
    """M = 0, and rows that no expert owns: the buffers stay, or are overwritten with zeros."""
    for tail in (0, 5):
        t = operands("separate", (0, 0, 0), tail)
        s, dout = step(t), inputs.cotangent(t)
        sums = s.sums(math.nan)
        dx = moe_experts_fp8_backward_accumulate(dout, *s.joint, *sums)
        assert dx.shape == (tail, HIDDEN)
        assert not dx.any()
        assert all(t.isnan().all() for t in sums)
        moe_experts_fp8_backward_accumulate(dout, *s.joint, *sums, accumulate=False)
        assert all(t.view(torch.int32).eq(0).all() for t in sums)
