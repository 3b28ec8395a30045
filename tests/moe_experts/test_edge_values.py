"""Bounds of the clamps, NaN and infinity, huge and tiny numbers, rows without an expert: what the definition gives."""

import math

import pytest
import torch
from moe_experts import reference

from tests.moe_experts import inputs, plain
from tests.moe_experts.on_cpu import assert_padding_adds_nothing
from tests.support.compare import assert_same_bytes

NAN, INF = math.nan, math.inf
STEP = 0.0625  # of bf16 from 8 to 16


def run(t, dout):
    """out, gate, up, dx, dgate_dup, h, dw1, dw3, dw2."""
    out, gate, up = reference.forward(*t)
    dx, dgate_dup, h = reference.backward_data(dout, *t[1:5], gate, up, t.swiglu_limit)
    return out, gate, up, dx, dgate_dup, h, *reference.weight_grad(dout, t.x, t[4], dgate_dup, h, t.up_proj is None)


def elementwise(gates, ups, limit=10.0, dh=1.0):
    """h, dG and dU of given gates and ups, each a channel of one row, with dH = dh in all of them."""
    inner = 8 * -(-len(gates) // 8)
    x, down = torch.zeros(1, 8), torch.zeros(1, 8, inner)
    x[0, 0], down[0, 0] = 1, dh
    gate_proj, up_proj = (torch.zeros(1, inner, 8) for _ in range(2))
    gate_proj[0, : len(gates), 0], up_proj[0, : len(ups), 0] = torch.tensor(gates), torch.tensor(ups)
    t = inputs.Operands(*(v.bfloat16() for v in (x, gate_proj, up_proj, down)), torch.tensor([1]), limit)
    _, gate, up, _, dgate_dup, h, *_ = run(t, x.bfloat16())
    assert torch.equal(gate[0, : len(gates)], t.gate_proj[0, : len(gates), 0]) or any(math.isnan(g) for g in gates)
    assert torch.equal(up[0, : len(ups)], t.up_proj[0, : len(ups), 0]) or any(math.isnan(u) for u in ups)
    dgate, dup = dgate_dup[0].chunk(2)
    return [v[: len(gates)].tolist() for v in (h[0], dgate, dup)]


def nearest(value):
    return torch.tensor(value, dtype=torch.float32).bfloat16().item()


def silu(value):
    return value / (1 + math.exp(-value))


def slope(value):
    s = 1 / (1 + math.exp(-value))
    return s * (1 + value * (1 - s))


def test_the_upper_bound_of_the_gate():
    """At the bound the gradient is there, one step of bf16 beyond it is +0; h is that of the bound."""
    h, dgate, dup = elementwise([10.0, 10.0 + STEP, 10.0 - STEP, 1e30], [2.0] * 4)
    assert h == [nearest(2 * silu(10.0))] * 2 + [nearest(2 * silu(10 - STEP)), nearest(2 * silu(10.0))]
    assert dgate == [nearest(2 * slope(10.0)), 0.0, nearest(2 * slope(10 - STEP)), 0.0]
    assert [math.copysign(1, dgate[i]) for i in (1, 3)] == [1, 1]
    assert dup == [nearest(silu(10.0))] * 2 + [nearest(silu(10 - STEP)), nearest(silu(10.0))]


def test_the_gate_has_no_lower_bound():
    h, dgate, dup = elementwise([-10.0, -10.0 - STEP, -11.0], [1.0] * 3)
    for i, gate in enumerate((-10.0, -10.0 - STEP, -11.0)):
        assert (h[i], dgate[i], dup[i]) == (nearest(silu(gate)), nearest(slope(gate)), nearest(silu(gate)))


def test_both_bounds_of_the_up():
    ups = [10.0, 10.0 + STEP, -10.0, -10.0 - STEP, INF, -INF, 3e38]
    h, dgate, dup = elementwise([1.0] * 7, ups)
    clamped = [10.0, 10.0, -10.0, -10.0, 10.0, -10.0, 10.0]
    assert h == [nearest(silu(1.0) * u) for u in clamped]
    assert dgate == [nearest(slope(1.0) * u) for u in clamped]
    assert dup == [nearest(silu(1.0)), 0.0, nearest(silu(1.0)), 0.0, 0.0, 0.0, 0.0]


def test_infinite_gates():
    """+inf is the limit, -inf times sigmoid 0 is NaN."""
    h, dgate, dup = elementwise([INF], [2.0])
    assert (h, dgate, dup) == ([nearest(2 * silu(10.0))], [0.0], [nearest(silu(10.0))])
    h, dgate, dup = elementwise([-INF], [2.0])
    assert math.isnan(h[0])
    assert math.isnan(dgate[0])
    assert math.isnan(dup[0])


def test_very_negative_gates_are_zero():
    """And nothing overflows on the way."""
    gates = [-200.0, -1e4, -1e30, -3e38]
    for found in elementwise(gates, [2.0] * 4):
        assert found == [0.0] * 4


def test_nan_is_not_clamped_away():
    """A NaN has no gradient, as with torch.clamp; what it is multiplied with has a NaN."""
    h, dgate, dup = elementwise([NAN, 1.0, NAN, 1.0], [1.0, NAN, NAN, 1.0])
    assert [math.isnan(v) for v in h] == [True, True, True, False]
    assert dgate[0] == dgate[2] == 0
    assert dup[1] == dup[2] == 0
    assert math.isnan(dgate[1])
    assert math.isnan(dup[0])


@pytest.mark.parametrize("limit", [INF, 7, 0.5])
def test_other_limits(limit):
    gates, ups = [0.25, 3.0, 20.0], [-30.0, 0.25, 1.0]
    h, dgate, dup = elementwise(gates, ups, limit=limit)
    for i, (g, u) in enumerate(zip(gates, ups, strict=True)):
        gc, uc = min(g, limit), min(max(u, -limit), limit)
        assert h[i] == nearest(silu(gc) * uc)
        assert dgate[i] == (nearest(uc * slope(gc)) if g <= limit else 0)
        assert dup[i] == (nearest(silu(gc)) if abs(u) <= limit else 0)


def test_autograd_has_the_same_bounds():
    """Clamps in float64, at the bounds and one step to either side."""
    values = [s * (3 + d) for s in (-1, 1) for d in (-(2**-6), 0, 2**-6)]
    gates, ups = [g for g in values for _ in values], values * len(values)
    _, dgate, dup = elementwise(gates, ups, limit=3.0)
    leaves = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (gates, ups)]
    gate, up = plain.at_most(leaves[0], 3.0), -plain.at_most(-plain.at_most(leaves[1], 3.0), 3.0)
    total = (torch.nn.functional.silu(gate) * up).sum()
    for got, want in zip((dgate, dup), torch.autograd.grad(total, leaves), strict=True):
        assert got == want.float().bfloat16().tolist()


def test_a_gradient_beyond_a_bound_is_zero_whatever_it_meets():
    _, dgate, dup = elementwise([1e30, 1.0], [1e30, 1.0], dh=INF)
    assert (dgate[0], dup[0]) == (0.0, 0.0)
    assert (dgate[1], dup[1]) == (INF, INF)


def test_everything_clamped():
    """x has no gradient then, and the down weight has that of the bounds."""
    t = inputs.operands((9, 4), 2, 16, 24, limit=2.0)
    t = t._replace(x=t.x.abs(), gate_proj=t.gate_proj.abs() * 100 + 10, up_proj=-t.up_proj.abs() * 100 - 10)
    out, *_, dx, dgate_dup, h, dw1, dw3, dw2 = run(t, inputs.cotangent(t))
    assert h[: t.owned].unique().tolist() == [nearest(-2 * silu(2.0))]
    assert out[: t.owned].any()
    for v in (dx, dgate_dup, dw1, dw3):
        assert torch.equal(v, torch.zeros_like(v))
    assert dw2.any()


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e38])
def test_rows_that_no_expert_owns(value):
    """Results there are +0, and nothing else changes, whatever they hold."""
    t = inputs.operands((13, 0, 30), 7)
    dout = inputs.cotangent(t)
    t.x[t.owned :], dout[t.owned :] = 0, 0
    wanted = run(t, dout)
    t.x[t.owned :], dout[t.owned :] = value, value
    found = run(t, dout)
    for got, want in zip(found, wanted, strict=True):
        assert_same_bytes(got, want)
    for v in (found[0], found[3]):
        assert v[t.owned :].view(torch.int16).eq(0).all()


def test_rows_of_padding_inside_a_group():
    """Zeros give zeros and add nothing to any gradient."""
    t = inputs.operands((8, 16), 0)
    dout = inputs.cotangent(t)
    padding = [5, 6, 7, 20, 21, 22, 23]
    t.x[padding], dout[padding] = 0, 0
    found = run(t, dout)
    kept = [i for i in range(24) if i not in padding]
    alone = t._replace(x=t.x[kept], num_tokens_per_expert=torch.tensor([5, 12]))
    wanted = run(alone, dout[kept])
    assert_padding_adds_nothing(found, wanted, padding, rows=6)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["x", "dout"])
def test_nan_and_infinity_stay_in_their_row_and_their_experts_weights(where, value):
    t = inputs.operands((4, 6, 3), 2)
    dout = inputs.cotangent(t)
    clean = run(t, dout)
    (t.x if where == "x" else dout)[7, 5] = value
    found = run(t, dout)
    others = [i for i in range(t.owned) if i != 7]
    for i in range(6):
        assert_same_bytes(found[i][others], clean[i][others])
    for i in (6, 7, 8):
        assert_same_bytes(found[i][[0, 2]], clean[i][[0, 2]])
    assert not found[8][1].isfinite().all()
    if where == "x":
        assert not found[0][7].isfinite().any()
        assert found[8][1].isnan().all() if math.isnan(value) else found[8][1].isnan().any()
        assert not found[6][1][:, 5].isfinite().any()
    else:
        assert_same_bytes(found[0], clean[0])
        assert not found[3][7].isfinite().any()


def test_nan_in_a_row_of_x_reaches_no_gradient_of_x():
    """G and U are NaN, which is within no bounds: dG = dU = 0."""
    t = inputs.operands((4,), 0)
    t.x[2, 5] = NAN
    _, gate, up, dx, dgate_dup, *_ = run(t, inputs.cotangent(t))
    assert gate[2].isnan().all()
    assert up[2].isnan().all()
    assert not dgate_dup[2].any()
    assert not dx[2].any()


def test_experts_without_rows_have_gradients_of_zero(poison):
    """First, middle, last, several, all."""
    for groups in ((0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 12), (0, 0, 0)):
        t = inputs.operands(groups, 3)
        found = run(t, inputs.cotangent(t))
        for expert, size in enumerate(groups):
            for grad in found[6:]:
                assert bool(grad[expert].any()) == (size > 0)
                assert size or grad[expert].view(torch.int16).eq(0).all()


def test_tiny_and_huge_numbers():
    """Products of 1e-30 and 1e30 survive, sums that exceed bf16 become infinite in their row."""
    t = inputs.operands((5, 3), 0, limit=INF)
    small = t._replace(x=t.x * 2.0**-100, gate_proj=t.gate_proj * 2.0**100, up_proj=t.up_proj * 2.0**100)
    dout = inputs.cotangent(t)
    wanted, found = run(t, dout), run(small, dout)
    for i in (0, 1, 2, 4, 5, 8):
        assert_same_bytes(found[i], wanted[i])
    t.x[2] = 3e38
    out, gate, *_ = run(t, dout)
    assert not gate[2].isfinite().all()
    assert out[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize(("sizes", "message"), [
    ([5, -1, 3], r"^num_tokens_per_expert must not be negative, got -1 for expert 1"),
    ([-(2**31), 3, 3], r"^num_tokens_per_expert must not be negative"),
    ([5, 5, 5], r"^num_tokens_per_expert must add up to at most the 14 rows, got 15"),
    ([2**31 - 1, 2**31 - 1, 2], r"^num_tokens_per_expert must add up to at most the 14 rows, got 4294967296"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_group_sizes_that_cannot_be(sizes, message, dtype):
    t = inputs.operands((5, 4, 5), 0)
    dout = inputs.cotangent(t)
    _, gate, up = reference.forward(*t)
    _, dgate_dup, h = reference.backward_data(dout, *t[1:5], gate, up, 10.0)
    counts = torch.tensor(sizes, dtype=dtype)
    calls = [
        lambda: reference.forward(*t[:4], counts, 10.0),
        lambda: reference.backward_data(dout, *t[1:4], counts, gate, up, 10.0),
        lambda: reference.weight_grad(dout, t.x, counts, dgate_dup, h, False),
        lambda: reference.backward(dout, *t[:4], counts, gate, up, 10.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()
