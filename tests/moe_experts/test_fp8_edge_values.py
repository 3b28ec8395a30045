"""NaN, infinity and zeros, huge and tiny numbers, experts and calls without rows: what the FP8 definition gives."""

import math

import pytest
import torch
from moe_experts import moe_experts_fp8_backward_data, moe_experts_fp8_quantize_weights, padded_rows

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, gradients, operands, results, step
from tests.moe_experts.on_cpu import assert_padding_adds_nothing, same
from tests.support.compare import assert_same_bytes

NAN, INF = math.nan, math.inf
HALF = 128
ROWS = ("out", "dx")


def fp32(value):
    return torch.tensor(value, dtype=torch.float32)


def floor_scale(floor):
    return (fp32(floor) / fp32(448.0)).item()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_rows_that_no_expert_owns(value, poison):
    """Results there are +0, and no byte of any other changes, whatever they hold."""
    t = operands("separate", (130, 0, 5), 9)
    dout = inputs.cotangent(t)
    t.x[t.owned :], dout[t.owned :] = 0, 0
    wanted = results(t, dout)
    t.x[t.owned :], dout[t.owned :] = value, value
    found = results(t, dout)
    for name, want in wanted.items():
        assert_same_bytes(found[name], want, name)
    for name in ROWS:
        assert found[name][t.owned :].view(torch.int16).eq(0).all()


def test_rows_of_padding_inside_a_group():
    """Zeros give zeros and add nothing to any gradient, here at the end of a group."""
    t = operands("separate", (80, 16), 0, 128, 128)
    dout = inputs.cotangent(t)
    padding = [*range(70, 80), 90, 91, 92, 93, 94, 95]
    t.x[padding], dout[padding] = 0, 0
    kept = [i for i in range(96) if i not in padding]
    alone = t._replace(x=t.x[kept], num_tokens_per_expert=torch.tensor([70, 10]))
    found, wanted = gradients(t, dout), gradients(alone, dout[kept])
    assert_padding_adds_nothing(found, wanted, padding, rows=2)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["x", "dout"])
def test_nan_and_infinity_stay_in_their_row_and_their_experts_weights(where, value):
    """Row 7 belongs to the second expert, whose other rows are in the same groups of 128 rows."""
    t = operands("separate", (4, 140, 3), 2)
    dout = inputs.cotangent(t)
    clean = results(t, dout)
    (t.x if where == "x" else dout)[7, 5] = value
    found = results(t, dout)
    others = [i for i in range(t.owned) if i != 7]
    for name in ROWS:
        assert_same_bytes(found[name][others], clean[name][others], name)
    for name in ("dw13", "dw2"):
        assert_same_bytes(found[name][[0, 2]], clean[name][[0, 2]], name)
    if where == "x":
        assert found["out"][7].isnan().all()
        assert found["gate_up"][HALF + 3].isnan().all()
        assert not found["dx"][7].any()  # NaN is within no bounds of the clamps
        assert found["dw2"][1].isnan().all()  # h of the row is NaN
        assert found["dw13"][1][:, 5].isnan().all()
        assert found["dw13"][1][:, [4, 6]].isfinite().all()
    else:
        assert_same_bytes(found["out"], clean["out"])
        assert found["dx"][7].isnan().all()
        assert found["dw2"][1][5].isnan().all()
        assert found["dw2"][1][[4, 6]].isfinite().all()
        assert found["dw13"][1].isnan().any(1).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_scales_of_groups_that_are_not_finite(value):
    """NaN reaches the scale and so the whole group, an infinity the scale and itself; not the neighbours."""
    t = operands("separate", (130, 3), 0, 256, 128)
    clean = step(t)
    t.x[2, 5] = value
    _, x_t, x_t_sf = step(t).kept
    codes = [v.view(-1, 256, 128) for v in (x_t, clean.kept[1])]
    scales = x_t_sf.clone()
    assert scales[0, 5].isnan() if math.isnan(value) else scales[0, 5] == INF
    numbers = codes[0][0, 5].double()
    assert numbers.isnan().all() if math.isnan(value) else (numbers[2].isnan() and not numbers[3:].any())
    for v, want in ((codes[0], codes[1]), (scales.unsqueeze(2), clean.kept[2].unsqueeze(2))):
        assert_same_bytes(v[1:], want[1:])
        assert_same_bytes(v[0, [4, 6]], want[0, [4, 6]])
    t.gate_proj[1, 3, 130] = value
    w13_q, w13_sf, *_ = moe_experts_fp8_quantize_weights(*t[1:4])
    assert not w13_sf[1, 0, 1].isfinite()
    assert_same_bytes(w13_q[1, :, :128], clean.weights[0][1, :, :128])
    assert w13_sf.isfinite().sum() == w13_sf.numel() - 1


def test_nan_in_a_weight_reaches_its_experts_rows_alone():
    """Every row and every gradient of x of the expert."""
    t = operands("separate", (4, 5), 0, 128, 128)
    dout = inputs.cotangent(t)
    clean = gradients(t, dout)
    t.down_proj[1, 3, 5] = NAN
    out, dx, dw1, dw3, dw2 = gradients(t, dout)
    for got, want in zip((out, dx), clean[:2], strict=True):
        assert_same_bytes(got[:4], want[:4])
        assert got[4:].isnan().all()
    for got, want in zip((dw1, dw3, dw2), clean[2:], strict=True):
        assert_same_bytes(got[0], want[0])
    assert_same_bytes(dw2, clean[4])  # the gradient of the weight itself does not read it
    assert dw1[1].isnan().all()


def test_experts_without_rows_have_gradients_of_zero(poison):
    """First, middle, last, several, all."""
    for groups in ((0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 12), (0, 0, 0)):
        t = operands("separate", groups, 3, 128, 128)
        for grad in gradients(t, inputs.cotangent(t))[2:]:
            for expert, size in enumerate(groups):
                assert bool(grad[expert].any()) == (size > 0)
                assert size or grad[expert].view(torch.int16).eq(0).all()


@pytest.mark.parametrize(("groups", "tail"), [((0, 0), 0), ((0, 0), 5), ((0,), 0), ((0,), 300)])
def test_calls_without_rows(groups, tail):
    """Empty results or zeros; seven tensors from the first half, as large as for others."""
    t = operands("separate", groups, tail, 256, 128)
    dout = inputs.cotangent(t)
    s = step(t)
    assert s.out.shape == (tail, 256)
    found = moe_experts_fp8_backward_data(dout, *s.data)
    padded = padded_rows(tail, len(groups))
    assert [v.numel() for v in found[1::2]] == [padded * c for c in (256, 128, 256)]
    for v in (s.out, found[0], *gradients(t, dout)):
        assert v.view(torch.int16).eq(0).all()


def test_all_rows_on_one_expert():
    """As if it were the only one."""
    t = operands("separate", (0, 200, 0), 3, 128, 128)
    dout = inputs.cotangent(t)
    one = t._replace(**{n: getattr(t, n)[1:2] for n in ("gate_proj", "up_proj", "down_proj", "num_tokens_per_expert")})
    found, wanted = gradients(t, dout), gradients(one, dout)
    same(found[:2], wanted[:2])
    same([w[1:2] for w in found[2:]], wanted[2:], strides=False)


def test_groups_of_zeros():
    """Scales are those of the floors, codes 0; what is made of them is zeros."""
    t = operands("separate", (130, 4), 0, 256, 128)
    dout = inputs.cotangent(t)
    t.x[:128, 7] = 0
    t.x[3, :128] = 0
    t.x[2], dout[5] = 0, 0
    t.gate_proj[1, :, 128:] = 0
    t.down_proj[0] = 0
    found = results(t, dout)
    assert found["x_t_sf"][0, 7] == floor_scale(1e-10)
    assert not found["x_t"].view(-1, 256, 128)[0, 7].double().any()
    assert found["w13_sf"][1, 0, 1] == floor_scale(1e-4)
    assert found["w2_sf"][0].eq(floor_scale(1e-4)).all()
    assert not found["w13_q"][1, :128, 128:].double().any()
    for name in ("out", "gate_up", "dx"):
        assert not found[name][2].any(), name
    assert not found["dx"][:130].any()  # dH is zero with the down projection
    assert not found["out"][:130].any()
    assert found["dx"][130:].any()
    assert found["dgu_t_sf"][0].eq(floor_scale(1e-10)).all()
    assert found["dw2"][0].any()
    assert not found["dw13"][0].any()


def test_floors():
    """1e-10 for rows, whose small numbers keep their precision; 1e-4 for weights, whose do not."""
    t = operands("separate", (130,), 0, 128, 128)
    for factor, floored in ((2.0**-20, False), (2.0**-26, False), (2.0**-40, True)):
        small = t._replace(x=t.x * factor)
        _, x_t, x_t_sf = step(small).kept
        scales = small.x[:128].float().abs().amax(0) / fp32(448.0)
        assert x_t_sf[0].eq(floor_scale(1e-10)).all() if floored else torch.equal(x_t_sf[0], scales)
        assert floored or x_t[: 128 * 128].double().abs().max() == 448
    _, sf, *_ = moe_experts_fp8_quantize_weights(t.gate_proj * 2.0**-14, t.up_proj, t.down_proj)
    assert sf[0, 0, 0] == floor_scale(1e-4)
    assert sf[0, 1, 0] > floor_scale(1e-4)


@pytest.mark.parametrize("factor", [2.0**-14, 2.0**-20, 2.0**100])
def test_scaled_gradients_give_scaled_gradients(factor):
    """Powers of two, from 1e-6 to 1e30: the same bits but for the exponent."""
    t = operands("separate", (130, 5), 0, 128, 128)
    dout = inputs.cotangent(t)
    found, wanted = gradients(t, dout * factor), gradients(t, dout)
    same(found, [wanted[0], *(g * factor for g in wanted[1:])])


def test_an_outlier_reaches_its_groups_alone():
    """In the row its 128 channels, in the channel the 128 rows of its expert, which end with the expert."""
    t = operands("separate", (100, 60), 0, 256, 128)
    clean = results(t, inputs.cotangent(t))
    t.x[97, 5] = 1e30
    _, x_t, x_t_sf = step(t).kept
    changed = x_t_sf != clean["x_t_sf"]
    assert changed.nonzero().tolist() == [[0, 5]]
    codes = (x_t.view(torch.uint8) != clean["x_t"].view(torch.uint8)).view(-1, 256, 128).any(2)
    assert codes.nonzero().tolist() == [[0, 5]]
    others = [i for i in range(160) if i != 97]
    assert_same_bytes(call(*t)[others], clean["out"][others])
    wide = t.x.clone()
    wide[97, 130] = 1e30
    found = step(t._replace(x=wide, gate_proj=t.gate_proj * torch.tensor([1.0] * 128 + [0.0] * 128).bfloat16()))
    assert found.kept[0][97, :128].isfinite().all()  # the gates do not see the other half of the row


@pytest.mark.parametrize("limit", [1.0, 3.0])
def test_bounds_of_the_clamps(limit):
    """At a bound the gradient is there, one step of bf16 beyond it is not; the bound itself enters h."""
    t = operands("separate", (4,), 0, 128, 128, limit=limit)
    s = step(t)
    step_up = limit * 2.0**-7
    gate_up = torch.zeros_like(s.kept[0])
    gate_up[:, :128], gate_up[:, 128:] = 0.5, 0.5
    for row, (g, u) in enumerate(((limit, 0.5), (limit + step_up, 0.5), (0.5, -limit), (0.5, -limit - step_up))):
        gate_up[row, :128], gate_up[row, 128:] = g, u
    dout = torch.ones_like(t.x)
    data = t[4], gate_up, *s.weights[4:], limit
    _, *columns = moe_experts_fp8_backward_data(dout, *data)
    _, _, h, h_sf, dgu, dgu_sf = columns
    values = (dgu.view(-1, 256, 128)[0].double() * dgu_sf[0].double()[:, None]).t()[:4]
    h = (h.view(-1, 128, 128)[0].double() * h_sf[0].double()[:, None]).t()[:4]
    gate, up = values.chunk(2, dim=1)
    for part, row in ((gate, 1), (up, 3)):
        assert not part[row].any()
        assert part[row - 1].any()
    assert torch.equal(h[0], h[1])
    assert torch.equal(h[2], h[3])


def test_everything_clamped():
    """x has no gradient then, and the down weight has that of the bounds."""
    t = operands("separate", (9, 4), 2, 128, 128, limit=2.0)
    t = t._replace(x=t.x.abs(), gate_proj=t.gate_proj.abs() * 100 + 10, up_proj=-t.up_proj.abs() * 100 - 10)
    out, dx, dw1, dw3, dw2 = gradients(t, inputs.cotangent(t))
    assert out[: t.owned].any()
    for v in (dx, dw1, dw3):
        assert not v.any()
    assert dw2.any()


def test_very_negative_gates_are_zero():
    """And nothing overflows on the way."""
    t = operands("separate", (9,), 0, 128, 128, limit=INF)
    t = t._replace(x=t.x.abs(), gate_proj=-t.gate_proj.abs() * 1e30)
    out, dx, *_ = gradients(t, inputs.cotangent(t))
    assert not out.any()
    assert not dx.any()
