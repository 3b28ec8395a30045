"""The numbers on a device: exact where nothing rounds, elsewhere every element within a unit in the last place."""

import math

import pytest
import torch
from moe_experts import moe_experts_backward_data, moe_experts_forward, moe_experts_weight_grad
from moe_experts import reference as definition_of

from tests.moe_experts import inputs, on_gpu
from tests.moe_experts.on_gpu import HIDDEN, INNER, ROWS, WEIGHTS, each_form
from tests.support.compare import assert_same_bytes, error64

pytestmark = pytest.mark.gpu
NAN, INF = math.nan, math.inf
# (sizes of the groups, rows past the last, H, I)
SHAPES = [
    *inputs.SHAPES,
    ((1, 2, 45, 63, 65, 127, 128, 129, 256, 200), 24, 136, 264),
    ((300, 0, 290, 0, 310), 40, 256, 192),
    (tuple((7 * i) % 11 for i in range(160)), 9, 64, 72),
    ((1100, 2), 1, 72, 520),
]
LARGE = [((500, 400, 0, 700), 10), (tuple(20 + (i * 37) % 90 for i in range(48)), 3), ((2500,), 0)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_form
@each_shape
def test_exact(shape, packed):
    t, dout = on_gpu.exact(*shape)
    t = t.packed() if packed else t
    found, wanted = on_gpu.step(t, dout), on_gpu.definition(t, dout)
    on_gpu.assert_same(on_gpu.without_signs_of_zeros(found), on_gpu.without_signs_of_zeros(wanted))


@each_form
@pytest.mark.parametrize("gate_std", [1.0, 7.0])
@each_shape
def test_rounded(shape, gate_std, packed, poison):
    t, dout = on_gpu.operands(*shape, packed=packed, gate_std=gate_std)
    poison("nan")
    on_gpu.assert_right(t, dout, on_gpu.step(t, dout))


@pytest.mark.parametrize(("groups", "tail"), LARGE, ids=["four", "many", "one"])
def test_widths_of_the_model(groups, tail):
    t, dout = on_gpu.operands(groups, tail, HIDDEN, INNER, gate_std=7.0)
    on_gpu.assert_right(t, dout, on_gpu.step(t, dout))


def test_many_sizes():
    """Any number of rows and experts, any widths."""
    for i in range(20):
        groups = tuple((j * 31 + i) % 90 for j in range(1 + i % 7))
        t, dout = on_gpu.operands(groups, i % 3, 8 * (1 + i), 8 * (20 - i))
        on_gpu.assert_right(t, dout, on_gpu.step(t, dout))


@pytest.mark.parametrize("groups", [
    (0, 0, 256, 0), (256, 0, 0, 0), (0, 0, 0, 256), (0, 0, 0, 0), (3, *[0] * 40, 130, *[0] * 40),
], ids=str)  # fmt: skip
@each_form
def test_experts_without_rows(groups, packed, poison):
    """Whole tiles between them, and many of them on end: their gradients are written, and +0."""
    t, dout = on_gpu.operands(groups, 5, packed=packed)
    poison("nan")
    found = on_gpu.step(t, dout)
    on_gpu.assert_right(t, dout, found)
    empty = t.num_tokens_per_expert == 0
    for name in ("dw1", "dw2") if packed else WEIGHTS:
        assert not found[name][empty].view(torch.int16).any(), name


@pytest.mark.parametrize("shape", [((1, 2, 45), 3, 136, 264), ((300, 129), 0, 64, 40)], ids=str)
def test_whole_numbers(shape):
    """Gates and ups on a bound of the clamp, and beyond it: the same as in the definition, so also what is made of
    them, within the rounding."""
    with on_gpu.DEVICE:
        t = inputs.whole_numbers(*shape)
        dout = inputs.cotangent(t)
    found, wanted = on_gpu.step(t, dout), on_gpu.definition(t, dout)
    assert (found["gate"].abs() == t.swiglu_limit).any()
    on_gpu.assert_same(found, wanted, names=("gate", "up"))
    on_gpu.assert_right(t, dout, found)
    for name in ("out", "dx", *WEIGHTS):
        assert error64(found[name], wanted[name].double()) < on_gpu.BOUND, name


def test_weight_gradients_of_whole_numbers_are_exact():
    """Any counts; what other experts and rows after the last one hold does not enter."""
    groups, tail, hidden, inner = (0, 1, 63, 64, 65, 700, 0, 2), 5, 136, 264
    rows = sum(groups)
    with on_gpu.DEVICE:
        dout, x, dgate_dup, h = (
            torch.randint(-3, 4, (rows + tail, width)).bfloat16() for width in (hidden, hidden, 2 * inner, inner)
        )
        counts = torch.tensor(groups)
    for t in (dout, x, dgate_dup, h):
        t[rows:] = NAN
    for packed in (False, True):
        found = moe_experts_weight_grad(dout, x, counts, dgate_dup, h, packed)
        wanted = definition_of.weight_grad(dout, x, counts, dgate_dup, h, packed)
        found, wanted = (on_gpu.without_signs_of_zeros(dict(zip(WEIGHTS, r, strict=True))) for r in (found, wanted))
        on_gpu.assert_same(found, wanted, strides=False)


SPECIAL = [
    *(0.0, -0.0, 1.0, -1.0, 9.9375, 10.0, 10.0625, -9.9375, -10.0, -10.0625, 88.0, -88.0, 200.0, -200.0),
    *(1e-30, -1e-30, 3e38, -3e38, INF, -INF, NAN),
]


@pytest.mark.parametrize("limit", [10.0, INF, 1e-3])
def test_special_gates_and_ups(limit):
    """Every pair of special values, from a row of x with one 1: h, and the gradients where that of h is 1, 2, 3, ..."""
    count = len(SPECIAL)
    with on_gpu.DEVICE:
        t, dout = on_gpu.operands((count,), 0, 64, 64 * 8, limit=limit)
        values = torch.tensor(SPECIAL).bfloat16()
    x = torch.zeros_like(t.x)
    x[torch.arange(count), torch.arange(count)] = 1
    gate, up = torch.zeros_like(t.gate_proj), torch.zeros_like(t.up_proj)
    for i in range(count):  # channel i: the i-th up with each of the gates
        gate[0, i, :count], up[0, i, :count] = values, values[i]
    down = torch.zeros_like(t.down_proj)
    down[0, 0] = 1
    dout = torch.zeros_like(dout)
    dout[:, 0] = torch.arange(1, count + 1)
    # Infinite weights times the zeros of a row would be NaN: only the finite ones can come from products.
    finite = [i for i, value in enumerate(SPECIAL) if math.isfinite(value)]
    keep = torch.zeros(count, dtype=torch.bool)
    keep[finite] = True
    gate[0, :, :count][:, ~keep.to(gate.device)] = 0
    up[0, : len(SPECIAL)][~keep.to(up.device)] = 0
    t = t._replace(x=x, gate_proj=gate, up_proj=up, down_proj=down)
    found, wanted = on_gpu.step(t, dout), on_gpu.definition(t, dout)
    on_gpu.assert_same(found, wanted, names=("gate", "up"))
    for name in ("h", "dgate_dup"):
        got, want = found[name].double(), wanted[name].double()
        assert torch.equal(got.isnan(), want.isnan()), name
        off = (got - want).abs() > 2.0**-7 * want.abs() + 1e-37
        assert not off[~want.isnan()].any(), f"{name}: {int(off.sum())} elements are off"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["gate", "up"])
def test_special_values_that_a_forward_left(where, value):
    """Gates and ups of NaN and Inf, which the backward gets: h and the gradients as in the definition."""
    t, dout = on_gpu.operands((70, 3), 2, 64, 40)
    weights = t.gate_proj, t.up_proj, t.down_proj
    _, gate, up = moe_experts_forward(t.x, *weights, t.num_tokens_per_expert, t.swiglu_limit)
    gate[t.owned :], up[t.owned :] = 0, 0
    {"gate": gate, "up": up}[where][3::5, 1::3] = value
    operands = dout, *weights, t.num_tokens_per_expert, gate, up, t.swiglu_limit
    _, dgate_dup, h = moe_experts_backward_data(*operands)
    _, wanted_grads, wanted_h = definition_of.backward_data(*operands)
    for got, want in ((dgate_dup, wanted_grads), (h, wanted_h)):
        got, want = got[: t.owned].double(), want[: t.owned].double()
        assert torch.equal(got.isnan(), want.isnan())
        same = (got == want) | ((got - want).abs() <= 2.0**-6 * want.abs() + 1e-4)
        assert same[~want.isnan()].all()


@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@pytest.mark.parametrize("where", ["x", "dout"])
def test_one_bad_row_stays_in_its_row_and_its_expert(where, value):
    t, dout = on_gpu.operands((70, 130, 5), 3, 136, 264)
    clean = on_gpu.step(t, dout)
    bad = 100  # a row of expert 1
    changed, dout_changed = t, dout.clone()
    if where == "x":
        x = t.x.clone()
        x[bad, 7] = value
        changed = t._replace(x=x)
    else:
        dout_changed[bad, 7] = value
    found = on_gpu.step(changed, dout_changed)
    others = torch.arange(len(t.x), device=t.x.device) != bad
    for name in ROWS:
        got, want = found[name], clean[name]
        assert_same_bytes(got[others[: len(got)]], want[others[: len(want)]], name)
    for name in WEIGHTS:
        assert_same_bytes(found[name][[0, 2]], clean[name][[0, 2]], name)
    if math.isnan(value):
        assert found["dw2"][1].isnan().any() or where == "x"
        assert found["out" if where == "x" else "dx"][bad].isnan().any()


@pytest.mark.parametrize("value", [0.0, NAN, INF, 3e38])
def test_rows_after_the_last_expert_do_not_enter(value):
    t, dout = on_gpu.operands((70, 0, 61), 130, 136, 264)
    x, other = t.x.clone(), dout.clone()
    x[t.owned :], other[t.owned :] = value, value
    on_gpu.assert_same(on_gpu.step(t._replace(x=x), other), on_gpu.step(t, dout))


def test_rows_of_zeros_add_nothing():
    """What a dispatcher pads groups with."""
    t, dout = on_gpu.operands((64, 128), 0, 136, 264)
    t.x[60:64], dout[60:64] = 0, 0
    found = on_gpu.step(t, dout)
    assert not found["out"][60:64].any()
    assert not found["dx"][60:64].any()
    keep = torch.tensor([*range(60), *range(64, 192)], device=t.x.device)
    counts = torch.tensor([60, 128], device=t.x.device)
    without = on_gpu.step(t._replace(x=t.x[keep], num_tokens_per_expert=counts), dout[keep])
    on_gpu.assert_same(found, without, names=WEIGHTS)


@pytest.mark.parametrize("rows", [1024, 65536])
def test_the_error_does_not_grow_with_the_rows(rows):
    """Of nearly constant numbers, whose sums grow the most."""
    with on_gpu.DEVICE:
        t, dout = on_gpu.operands((rows,), 0, 64, 128)
        x, dout = (1 + 2.0**-9 * torch.randn(rows, 64) for _ in range(2))
        h, grads = (1 + 2.0**-9 * torch.randn(rows, width) for width in (128, 256))
        x, dout, h, grads = (v.bfloat16() for v in (x, dout, h, grads))
    found = moe_experts_weight_grad(dout, x, t.num_tokens_per_expert, grads, h, True)
    assert error64(found[0][0], grads.double().T @ x.double()) < 2.5e-3
    assert error64(found[2][0], dout.double().T @ h.double()) < 2.5e-3
