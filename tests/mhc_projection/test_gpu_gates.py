"""The gates alone on the GPU against float64, with the values that Sinkhorn iterations and sigmoids get wrong."""

import pytest
import torch
from mhc_projection import mhc_gates, reference

from tests.mhc_projection import on_gpu
from tests.mhc_projection.inputs import HC_EPS, ITERS, logits

pytestmark = pytest.mark.gpu


def operands(tokens, hc):
    n = logits(hc)
    mixes, scale, base = (torch.randn(shape, device=on_gpu.DEVICE) for shape in ((tokens, n), (3,), (n,)))
    return mixes, 0.5 + scale.abs(), base


def cotangents(tokens, hc):
    shapes = {"pre": (tokens, hc), "post": (tokens, hc), "comb": (tokens, hc, hc)}
    return {name: torch.randn(shape, device=on_gpu.DEVICE) for name, shape in shapes.items()}


def exact(mixes, scale, base, c, hc, iters, eps):
    wide = [v.double() for v in (mixes, scale, base)]
    found = dict(zip(on_gpu.GATES, reference.gates_forward(*wide, hc, iters, eps), strict=True))
    grads = reference.gates_backward(*wide, *(c[name].double() for name in on_gpu.GATES), hc, iters, eps)
    return found | dict(zip(("grad_mixes", "grad_scale", "grad_base"), grads, strict=True))


def check(t, c, hc, iters=ITERS, eps=HC_EPS, what=""):
    """Against float64; the sums over tokens relative to what is summed, since that may cancel."""
    mixes, scale, _ = t
    found, wanted = on_gpu.gates(*t, c, hc, iters, eps), exact(*t, c, hc, iters, eps)
    slopes = wanted["grad_mixes"] / torch.cat([scale[i].expand(k) for i, k in enumerate((hc, hc, hc * hc))]).double()
    sections = (slopes * mixes).abs().sum(0).split((hc, hc, hc * hc))
    sizes = {"grad_base": slopes.abs().sum(0), "grad_scale": torch.stack([part.sum() for part in sections])}
    for name, size in sizes.items():
        difference = (found.pop(name).double() - wanted.pop(name)).abs()
        assert torch.all(difference <= 1e-5 * (size + size.mean())), f"{what} {name}: {difference / size}"
    on_gpu.assert_accurate(found, wanted, what=what)
    return found


def whole_numbers(tokens, hc, values):
    """Logits that reach the sigmoids and the softmax without a rounding: scale 1 and base 0."""
    choice = torch.randint(len(values), (tokens, logits(hc)), device=on_gpu.DEVICE)
    mixes = torch.tensor(values, dtype=torch.float32, device=on_gpu.DEVICE)[choice]
    return mixes, torch.ones(3, device=on_gpu.DEVICE), torch.zeros(logits(hc), device=on_gpu.DEVICE)


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-2])
@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_against_float64(hc, iters, eps, poison):
    for tokens in (1, 31, 127, 128, 129, 1000):
        t, c = operands(tokens, hc), cotangents(tokens, hc)
        check(t, c, hc, iters, eps, f"{tokens} tokens")


@pytest.mark.parametrize("hc", [1, 2, 4])
def test_many_tokens(hc):
    """More sums of programs than one pass over them takes."""
    t, c = operands(70_000, hc), cotangents(70_000, hc)
    check(t, c, hc)


@pytest.mark.parametrize("size", [30, 100, 10_000])
@pytest.mark.parametrize("iters", [1, 20])
def test_saturated(size, iters):
    """Sigmoids at 0 and 1, softmax at one element: float64's values, gradients included, and all of them finite."""
    t, c = whole_numbers(200, 4, [-size, -1, 0, 2, size]), cotangents(200, 4)
    assert all(r.isfinite().all() for r in check(t, c, 4, iters).values())


def test_slopes_of_saturated_sigmoids_do_not_cancel():
    """a (1 - a) at 30 is 9.4e-14; formed with 1 - a it would be 0."""
    t, c = whole_numbers(10, 4, [30, -30, 20]), cotangents(10, 4)
    found, wanted = (f["grad_mixes"][:, :8].double() for f in (on_gpu.gates(*t, c, 4), exact(*t, c, 4, ITERS, HC_EPS)))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


def test_equal_logits():
    """All mixing weights are 1/4, whatever the logits."""
    for value in (0.0, -3.5, 80.0):
        mixes = torch.full((70, 24), value, device=on_gpu.DEVICE)
        scale, base = torch.ones(3, device=on_gpu.DEVICE), torch.zeros(24, device=on_gpu.DEVICE)
        comb = mhc_gates(mixes, scale, base, 4, ITERS, 0.0)[2]
        torch.testing.assert_close(comb, torch.full_like(comb, 0.25), rtol=1e-6, atol=0)
        check((mixes, scale, base), cotangents(70, 4), 4)


@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_rows_far_up_and_far_down(eps):
    """A row of +60 and one of -60: softmax does not see the offset, so nothing overflows in either direction."""
    (mixes, _, _), c = operands(70, 4), cotangents(70, 4)
    comb = mixes[:, 8:].view(70, 4, 4)
    comb.copy_((comb * 64).round() / 64)  # so that adding 60 rounds nothing
    scale, base = torch.ones(3, device=on_gpu.DEVICE), torch.zeros(24, device=on_gpu.DEVICE)
    level = on_gpu.gates(mixes, scale, base, c, 4, ITERS, eps)
    comb[:, 1] += 60
    comb[:, 3] -= 60
    found = check((mixes, scale, base), c, 4, ITERS, eps)
    for name in ("comb", "grad_mixes"):
        torch.testing.assert_close(found[name], level[name], rtol=1e-5, atol=1e-6)


def test_logits_of_both_signs_in_a_row():
    check(whole_numbers(300, 4, [60, -60, 0]), cotangents(300, 4), 4)


def test_columns_sum_to_one():
    """They are normalised last. The gradient of the logits sums to zero along each row."""
    (mixes, scale, base), c = operands(1000, 4), cotangents(1000, 4)
    found = on_gpu.gates(mixes * 3, scale, base, c, 4)
    torch.testing.assert_close(found["comb"].sum(-2), torch.ones(1000, 4, device=on_gpu.DEVICE), rtol=0, atol=3e-6)
    slopes = found["grad_mixes"][:, 8:].view(1000, 4, 4)
    assert slopes.sum(-1).abs().max() <= 1e-5 * slopes.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_token(value):
    t, c = operands(200, 4), cotangents(200, 4)
    clean = on_gpu.gates(*t, c, 4)
    others = [i for i in range(200) if i != 77]
    for column in (1, 5, 13):
        mixes = t[0].clone()
        mixes[77, column] = value
        found = on_gpu.gates(mixes, *t[1:], c, 4)
        on_gpu.assert_same(on_gpu.of_a_token(found, others), on_gpu.of_a_token(clean, others), f"column {column}")
        if column == 13 and value != -float("inf"):
            assert found["comb"][77].isnan().any()
        if value != value:
            assert found["grad_base"][column].isnan()
            assert found["grad_scale"][(0, 1, 2)[(column >= 4) + (column >= 8)]].isnan()


def test_a_column_that_underflows_is_nan_without_eps_only():
    t, c = whole_numbers(5, 4, [0]), cotangents(5, 4)
    t[0][2, 8::4] = -200.0
    assert on_gpu.gates(*t, c, 4)["comb"].isfinite().all()
    comb = on_gpu.gates(*t, c, 4, ITERS, 0.0)["comb"]
    assert comb[2, :, 0].isnan().all()
    assert comb[[0, 1, 3, 4]].isfinite().all()
