"""The definition against float64, against autograd, and number by number where it rounds."""

import math

import pytest
import torch
from moe_experts import reference

from tests.moe_experts import inputs, plain
from tests.support.compare import assert_bands_close_to_float64, assert_same_bytes, error64
from tests.support.device import repeat_bytes

each_shape = pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
NAMES = ("out", "dx", "dgate", "dup", "ddown")
EXACT = 1e-13  # float64 against float64


def run(t, dout, **needs):
    """out, dx, dw1, dw3, dw2."""
    out, gate, up = reference.forward(*t)
    return out, *reference.backward(dout, *t[:5], gate, up, t.swiglu_limit, **needs)


def owned(t, tensors):
    return [v[: t.owned] for v in tensors]


@each_shape
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_float64_is_the_plain_mathematics(groups, tail, hidden, inner, limit):
    """The result, and gradients by the explicit formulas against autograd's."""
    t = inputs.operands(groups, tail, hidden, inner, limit=limit).double()
    dout = inputs.cotangent(t).double()
    wanted = plain.gradients(t._replace(x=t.x.nan_to_num()), dout.nan_to_num())
    found = run(t, dout)
    assert {v.dtype for v in found} == {torch.float64}
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert error64(got, want) < EXACT, name


@each_shape
def test_errors_without_clamped_values(groups, tail, hidden, inner, poison):
    """Roundings to bf16 alone, in every band of channels; results and gradients are about 1."""
    t = inputs.operands(groups, tail, hidden, inner)
    dout = inputs.cotangent(t)
    exact = plain.gradients(t._replace(x=t.x.nan_to_num()).double(), dout.nan_to_num().double())
    for name, got, want in zip(NAMES, run(t, dout), exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert got.is_contiguous()
        assert error64(got, want) < 5e-3, name
        assert not t.owned or 0.1 < want.norm() / want.count_nonzero().sqrt() < 30, name


@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES[:2])
def test_errors_with_values_on_and_beyond_the_bounds(groups, tail, hidden, inner):
    """Whole numbers, of which none changes the side of a bound by rounding."""
    t = inputs.whole_numbers(groups, tail, hidden, inner)
    dout = inputs.cotangent(t)
    _, gate, up = reference.forward(*t)
    for value in (gate, up):
        on, beyond = ((where(value[: t.owned]).float().mean()) for where in (lambda v: v == 3, lambda v: v > 3))
        assert on > 0.02
        assert beyond > 0.1
    exact = plain.gradients(t._replace(x=t.x.nan_to_num()).double(), dout.nan_to_num().double())
    for name, got, want in zip(NAMES, run(t, dout), exact, strict=True):
        assert error64(got, want) < 5e-3, name


@pytest.mark.parametrize(("limit", "gate_std"), [(10.0, 7.0), (10.0, 1.0), (1.0, 1.0), (math.inf, 2.0)])
def test_no_worse_than_eager(limit, gate_std):
    """The published workload's clamped gates, where a rounding moves some across the bound."""
    t = inputs.operands((90, 33), 0, 136, 264, limit=limit, gate_std=gate_std)
    dout = inputs.cotangent(t)
    exact, eager = plain.gradients(t.double(), dout.double()), plain.gradients(t, dout)
    for name, got, want, their in zip(NAMES, run(t, dout), exact, eager, strict=True):
        assert error64(got, want) < 1.05 * error64(their, want) + 1e-3, name
        for dim in (-1, -2):
            assert_bands_close_to_float64(got, want, their, dim=dim, factor=2.5, floor=1e-3, name=name)


@pytest.mark.parametrize(("limit", "gate_std"), [(10.0, 1.0), (1.0, 2.0), (math.inf, 3.0)])
def test_every_number_rounds_where_the_definition_says(limit, gate_std):
    """Bit for bit, number by number."""
    t = inputs.operands((5, 9), 0, 16, 24, limit=limit, gate_std=gate_std)
    dout = inputs.cotangent(t)
    out, gate, up = reference.forward(*t)
    dx, dgate_dup, h = reference.backward_data(dout, *t[1:5], gate, up, limit)
    grads = reference.weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, False)
    for expert, rows in enumerate((slice(0, 5), slice(5, 14))):
        model = plain.Rounded(t.x[rows], *(w[expert] for w in t[1:4]), limit)
        model.backward(dout[rows])
        dgate, dup = dgate_dup[rows].chunk(2, dim=1)
        pairs = {"g": gate[rows], "u": up[rows], "h": h[rows], "out": out[rows], "dx": dx[rows]}
        pairs |= {"dgate": dgate, "dup": dup}
        pairs |= {name: grad[expert] for name, grad in zip(("dw1", "dw3", "dw2"), grads, strict=True)}
        for name, got in pairs.items():
            assert got.tolist() == getattr(model, name), name


@pytest.mark.parametrize(("also", "name"), [("silu", "h"), ("dx", "dx")])
def test_another_rounding_would_be_noticed(also, name):
    """The number-by-number model with one rounding more, as eager PyTorch has it, is another one."""
    t = inputs.operands((14,), 0, 16, 24)
    dout = inputs.cotangent(t)
    _, gate, up = reference.forward(*t)
    found = dict(zip(("dx", "dgate_dup", "h"), reference.backward_data(dout, *t[1:5], gate, up, 10.0), strict=True))
    model = plain.Rounded(t.x, *(w[0] for w in t[1:4]), 10.0, also)
    model.backward(dout)
    assert found[name].tolist() != getattr(model, name)


def test_a_wrong_band_or_swapped_operands_would_be_noticed():
    """Gates are large and ups small, so that swapping them, or a band of 16 channels, changes much."""
    t = inputs.operands((60, 30), 0, 64, 48)
    t = t._replace(gate_proj=t.gate_proj * 8, up_proj=t.up_proj * 0.125)
    dout = inputs.cotangent(t)
    exact, found = plain.gradients(t.double(), dout.double()), run(t, dout)
    assert error64(found[0], exact[0]) < 5e-3
    swapped = t._replace(gate_proj=t.up_proj, up_proj=t.gate_proj)
    assert error64(run(swapped, dout)[0], exact[0]) > 0.3
    band = slice(16, 32)
    gate, up = t.gate_proj.clone(), t.up_proj.clone()
    gate[:, band], up[:, band] = t.up_proj[:, band], t.gate_proj[:, band]
    wrong = run(t._replace(gate_proj=gate, up_proj=up), dout)
    assert error64(wrong[0], exact[0]) > 0.1


@each_shape
def test_packed_and_separate_weights_have_the_same_bytes(groups, tail, hidden, inner):
    t = inputs.operands(groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    out, dx, dw1, dw3, dw2 = run(t, dout)
    packed = run(t.packed(), dout)
    for got, want in zip(packed, (out, dx, torch.cat((dw1, dw3), dim=1), dw2.new_zeros(0), dw2), strict=True):
        assert_same_bytes(got, want)


@each_shape
def test_the_joint_backward_is_its_halves(groups, tail, hidden, inner):
    t = inputs.operands(groups, tail, hidden, inner, limit=1.0)
    dout = inputs.cotangent(t)
    for form in (t, t.packed()):
        _, gate, up = reference.forward(*form)
        dx, dgate_dup, h = reference.backward_data(dout, *form[1:5], gate, up, 1.0)
        grads = reference.weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, form.up_proj is None)
        for got, want in zip(run(form, dout)[1:], (dx, *grads), strict=True):
            assert_same_bytes(got, want)


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_not_needed_is_empty(packed):
    t = inputs.operands()
    t, dout = t.packed() if packed else t, inputs.cotangent(t)
    full = run(t, dout)[1:]
    for index, name in enumerate(("need_x", "need_gate", "need_up", "need_down")):
        for other, (got, want) in enumerate(zip(run(t, dout, **{name: False})[1:], full, strict=True)):
            assert_same_bytes(got, want.new_zeros(0) if other == index else want)


def test_int32_and_int64_group_sizes_are_the_same():
    t = inputs.operands()
    dout = inputs.cotangent(t)
    wanted = run(t, dout)
    for got, want in zip(run(t._replace(num_tokens_per_expert=t[4].int()), dout), wanted, strict=True):
        assert_same_bytes(got, want)


def test_repeats_have_the_same_bytes():
    t = inputs.operands((45, 1, 63), 5, 136, 264)
    dout = inputs.cotangent(t)
    repeat_bytes(lambda: run(t, dout), n=3)


@pytest.mark.parametrize("rows", [1, 2, 45, 63, 65, 127, 128, 129, 256, 264])
def test_any_group_size(rows):
    """Alone, and between others: neither the rows' results nor the expert's gradients change."""
    t = inputs.operands((3, rows, 5), 2, 16, 24)
    dout = inputs.cotangent(t)
    among = run(t, dout)
    part, one = slice(3, 3 + rows), slice(1, 2)
    alone = t._replace(x=t.x[part], num_tokens_per_expert=t.num_tokens_per_expert[one])
    alone = alone._replace(**{n: getattr(t, n)[one] for n in ("gate_proj", "up_proj", "down_proj")})
    found = run(alone, dout[part])
    exact = plain.gradients(alone.double(), dout[part].double())
    wanted = *(v[part] for v in among[:2]), *(v[one] for v in among[2:])
    for got, want, right in zip(found, wanted, exact, strict=True):
        assert_same_bytes(got, want, strides=False)
        assert error64(got, right) < 6e-3


def test_many_experts_with_tiny_groups():
    groups = tuple((7 * i) % 4 for i in range(160))
    t = inputs.operands(groups, 3, 16, 8)
    dout = inputs.cotangent(t)
    exact = plain.gradients(t._replace(x=t.x.nan_to_num()).double(), dout.nan_to_num().double())
    for name, got, want in zip(NAMES, run(t, dout), exact, strict=True):
        assert error64(got, want) < 5e-3, name


@pytest.mark.parametrize("rows", [1024, 65536])
def test_long_sums_do_not_drift(rows):
    """Rows of 1 +- 2^-7: the gradient of a weight keeps every bit that bf16 has, however many rows there are."""
    x = (1 + torch.randint(-1, 2, (rows, 8)) * 2.0**-7).bfloat16()
    dgate_dup, h = torch.ones(rows, 16).bfloat16(), torch.ones(rows, 8).bfloat16()
    counts = torch.tensor([rows])
    dw1, dw3, dw2 = reference.weight_grad(x, x, counts, dgate_dup, h, False)
    wanted = x.double().sum(0).bfloat16()
    for got in (dw1, dw3, dw2.mT):
        assert torch.equal(got, wanted.expand(1, 8, 8))
