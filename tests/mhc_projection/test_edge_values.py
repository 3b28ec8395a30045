"""Zero, tiny and huge streams, NaN and infinity, one-hot weights: what the definition gives."""

import pytest
import torch
from mhc_projection import reference

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import RMS_EPS
from tests.support.compare import assert_same_bytes, error64


def run(t, grad_mixes, grad_collapsed):
    """mixes, rstd, collapsed, then the three gradients."""
    forward = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    backward = reference.projection_backward(t.x, t.weight, t.pre_mix, *forward[:2], grad_mixes, grad_collapsed, None)
    return *forward, *backward


def cotangents(tokens, hc=4, d=64):
    return torch.randn(tokens, inputs.logits(hc)), torch.randn(tokens, d).bfloat16()


def test_a_token_of_zeros():
    """rstd = eps^-1/2, mixes 0, and the gradient 1e10 times the projected one: large, finite."""
    t = inputs.operands(3)
    t.x[1] = 0
    g_m, g_c = cotangents(3)
    mixes, rstd, collapsed, grad_x, grad_weight, grad_pre_mix = run(t, g_m, g_c)
    assert rstd[1] == pytest.approx(1e10)
    assert not mixes[1].any()
    assert not collapsed[1].any()
    assert not grad_pre_mix[1].any()
    wanted = 1e10 * (g_m[1].double() @ t.weight.bfloat16().double())
    assert error64(grad_x[1].flatten(), wanted) < 3e-3
    others = run(t._replace(x=t.x[::2], pre_mix=t.pre_mix[::2]), g_m[::2], g_c[::2])[4]
    assert error64(grad_weight, others.double()) < 1e-6


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e-10, 1e10, 1e18])
def test_tiny_and_large_streams(size):
    """Where eps counts, and up to where squares are far from the end of fp32: as float64."""
    t = inputs.operands(7)
    t = t._replace(x=(t.x.float() * size).bfloat16())
    g = cotangents(7)
    wanted = run(plain.float64(t), *(v.double() for v in g))
    for got, want, bound in zip(run(t, *g), wanted, (1e-6, 1e-6, 3e-3, 3e-3, 1e-6, 1e-6), strict=True):
        assert error64(got, want) < bound


def test_streams_whose_squares_overflow():
    """rstd and mixes become 0 in that token only, where the sums themselves are finite."""
    t = inputs.operands(3)
    small = run(t, *cotangents(3))
    t.x[1] = 1e20
    mixes, rstd, collapsed, *_ = run(t, *cotangents(3))
    assert rstd[1] == 0
    assert not mixes[1].any()
    assert collapsed[1].isfinite().all()
    for got, want in zip((mixes, rstd, collapsed), small, strict=False):
        assert_same_bytes(got[::2], want[::2], strides=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_token(value):
    """Other tokens keep their bits; the gradient of the weight is NaN in the columns it meets."""
    t = inputs.operands(5)
    g = cotangents(5)
    clean = run(t, *g)
    t.x[2, 1, 3] = value
    found = run(t, *g)
    assert found[0][2].isnan().all()
    assert not found[2][2, 3].isfinite()
    others = [0, 1, 3, 4]
    for index in (0, 1, 2, 3, 5):
        assert_same_bytes(found[index][others], clean[index][others])
    assert found[4].isnan().any()


def test_one_hot_weights_return_that_stream():
    t = inputs.operands(9)
    for i in range(4):
        t.pre_mix.zero_()[:, i] = 1
        assert torch.equal(reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)[2], t.x[:, i])


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_few_tokens(tokens):
    t = inputs.operands(tokens)
    results = run(t, *cotangents(tokens))
    shapes = [(tokens, 24), (tokens,), (tokens, 64), (tokens, 4, 64), (24, 256), (tokens, 4)]
    assert [tuple(r.shape) for r in results] == shapes
    assert bool(results[4].any()) == (tokens > 0)
    zero = torch.zeros(24)
    for grad, want in zip(
        reference.gates_backward(
            results[0], t.scale, t.base, *(torch.randn(tokens, *s) for s in ((4,), (4,), (4, 4))), 4, 2, 0.0
        ),
        (results[0], t.scale, zero),
        strict=True,
    ):
        assert grad.shape == want.shape
        assert tokens > 0 or not grad.any()
