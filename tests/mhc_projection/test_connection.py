"""The operators that fuse projection and gates, against those of the halves and against float64."""

import itertools

import pytest
import torch
from mhc_projection import hyper_connection, hyper_connection_streams, reference

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import HC_EPS, ITERS, OPTIONS, RMS_EPS, SIZES
from tests.support.compare import assert_same_bytes, error64

OPERATORS = torch.ops.mhc_projection
each_size = pytest.mark.parametrize(("tokens", "hc", "d"), SIZES)
each_function = pytest.mark.parametrize(
    "function", [hyper_connection, hyper_connection_streams], ids=lambda f: f.__name__
)
BF16 = torch.bfloat16
RTOL = 1e-6  # of the specification, between the two ways


def gate_gradients(tokens, hc):
    return [torch.randn(tokens, *shape) for shape in ((hc,), (hc,), (hc, hc))]


@each_function
@each_size
@pytest.mark.parametrize("with_pre_mix", [True, False])
def test_results_and_gradients_are_those_of_the_halves(function, tokens, hc, d, with_pre_mix):
    t = inputs.operands(tokens, hc, d)
    if not with_pre_mix:
        t = t._replace(pre_mix=None)
    found, halves = ([None if v is None else v.clone().requires_grad_() for v in t] for _ in range(2))
    results, wanted = function(*found, **OPTIONS)[:4], plain.two_operators(*halves, **OPTIONS)
    for got, want in zip(results[:3], wanted[:3], strict=True):
        torch.testing.assert_close(got, want, rtol=RTOL, atol=0)
    if with_pre_mix:
        assert_same_bytes(results[3].detach(), wanted[3].detach())
    else:
        assert results[3] is None
        assert wanted[3] is None
    cotangents = inputs.cotangents(*results)
    pairs = []
    for outputs, leaves in ((results, found), (wanted, halves)):
        outputs, leaves = [r for r in outputs if r is not None], [v for v in leaves if v is not None]
        pairs.append(torch.autograd.grad(outputs, leaves, cotangents))
    for name, got, want in zip(inputs.Operands._fields, *pairs, strict=False):
        if name == "x":
            assert (got != want).float().mean() < 1e-3, "other than by a near tie"
        assert error64(got, want.double()) < (1e-4 if name == "x" else RTOL), name


@each_function
def test_a_subset_of_the_results_has_the_gradients_of_the_halves(function):
    """Those that a result does not reach are missing in both."""
    t = inputs.operands(9)
    for count in (1, 2, 3, 4):
        for used in itertools.combinations(range(4), count):
            grads = []
            for call in (function, plain.two_operators):
                leaves, results = (leaves := t.requires_grad()), call(*leaves, **OPTIONS)
                results = [results[i] for i in used]
                torch.manual_seed(count)
                cotangents = inputs.cotangents(*results)
                grads.append(torch.autograd.grad(results, leaves, cotangents, allow_unused=True))
            for name, got, want in zip(inputs.Operands._fields, *grads, strict=True):
                assert (got is None) == (want is None), (name, used)
                assert got is None or error64(got, want.double()) < (1e-4 if name == "x" else RTOL), (name, used)


@pytest.mark.parametrize("tokens", [0, 1, 37])
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_the_definition_is_that_of_the_halves(tokens, hc, poison):
    """mixes by logit, contiguous, everything else bit for bit."""
    t = inputs.operands(tokens, hc, 16)
    mixes, rstd, collapsed = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    gates = reference.gates_forward(mixes, t.scale, t.base, hc, ITERS, HC_EPS)
    found = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)
    by_logit = torch.empty(mixes.shape[::-1]).copy_(mixes.t())
    for got, want in zip(found, (*gates, collapsed, by_logit, rstd), strict=True):
        assert_same_bytes(got, want)

    g_c, addend = torch.randn(tokens, 16).to(BF16), torch.randn_like(t.x)
    gate_grads = gate_gradients(tokens, hc)
    grad_mixes, *parameters = reference.gates_backward(mixes, t.scale, t.base, *gate_grads, hc, ITERS, HC_EPS)
    wanted = reference.projection_backward(t.x, t.weight, t.pre_mix, mixes, rstd, grad_mixes, g_c, addend)
    found = reference.hyper_connection_backward(*t, *found[4:], *gate_grads, g_c, addend, HC_EPS, ITERS)
    for got, want in zip(found, (*wanted[:2], *parameters, wanted[2]), strict=True):
        assert got.shape == want.shape
        assert error64(got, want.double()) < 1e-7


def test_a_gate_without_a_gradient_counts_as_zeros():
    t = inputs.operands(9)
    mixes, rstd = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)[4:]
    full = gate_gradients(9, 4)
    for some in itertools.product((True, False), repeat=3):
        given = [g if wanted else None for g, wanted in zip(full, some, strict=True)]
        zeroed = [g if wanted else torch.zeros_like(g) for g, wanted in zip(full, some, strict=True)]
        found, wanted = (
            reference.hyper_connection_backward(*t, mixes, rstd, *grads, None, None, HC_EPS, ITERS)
            for grads in (given, zeroed)
        )
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)


@each_size
def test_float64_is_the_plain_mathematics(tokens, hc, d):
    """Results, and gradients by the explicit formulas against autograd's, as one chain."""
    t = plain.float64(inputs.operands(tokens, hc, d))
    leaves = t.requires_grad()
    wanted = plain.exact(leaves, hc)
    found = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)
    for got, want in zip(found, (*wanted[2:], wanted.collapsed, wanted.mixes.t()), strict=False):
        assert error64(got, want.detach()) < 1e-13
    results = (*wanted[2:], wanted.collapsed)
    cotangents = inputs.cotangents(*results)
    expected = torch.autograd.grad(results, leaves, cotangents)
    grads = reference.hyper_connection_backward(*t, *found[4:], *cotangents, None, HC_EPS, ITERS)
    for name, got, want in zip(inputs.Operands._fields, grads, expected, strict=True):
        assert error64(got, want) < 1e-12, name


def test_what_the_backward_needs_is_not_differentiable():
    """mixes, rstd and the flag; collapsed too where there is none. The rest is."""
    t = inputs.operands(5).requires_grad()
    for pre_mix, differentiable in ((t.pre_mix, 4), (None, 3)):
        results = OPERATORS.hyper_connection_forward(*t[:4], pre_mix, RMS_EPS, HC_EPS, ITERS)
        assert [r.requires_grad for r in results] == [True] * differentiable + [False] * (7 - differentiable)


def test_nothing_flows_through_the_operator():
    """No gradient of any result: gradients of zero, and an addend's own bits."""
    t = inputs.operands(3)
    mixes, rstd = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)[4:]
    addend = torch.tensor([-0.0, float("nan"), 1.5]).repeat(256).view(3, 4, 64).to(BF16)
    grads = OPERATORS.hyper_connection_backward(*t, mixes, rstd, None, None, None, None, addend, HC_EPS, ITERS)
    assert_same_bytes(grads[0], addend)
    assert grads[0].data_ptr() != addend.data_ptr()
    assert [g.shape for g in grads] == [v.shape for v in t]
    assert not any(g.any() for g in grads[1:])


@pytest.mark.parametrize("needs", list(itertools.product((True, False), repeat=3)))
def test_what_is_not_needed_is_empty(needs):
    """The gradients of scale and base are always there: they cost next to nothing."""
    t = inputs.operands(9)
    mixes, rstd = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)[4:]
    grads = *gate_gradients(9, 4), torch.randn(9, 64).to(BF16), None
    full = OPERATORS.hyper_connection_backward(*t, mixes, rstd, *grads, HC_EPS, ITERS)
    found = OPERATORS.hyper_connection_backward(*t, mixes, rstd, *grads, HC_EPS, ITERS, *needs)
    for need, got, want in zip((*needs[:2], True, True, needs[2]), found, full, strict=True):
        if need:
            assert_same_bytes(got, want)
        else:
            assert (got.shape, got.dtype) == ((0,), want.dtype)


def test_no_tokens():
    t = inputs.operands(0)
    results = OPERATORS.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)
    assert [tuple(r.shape) for r in results] == [(0, 4), (0, 4), (0, 4, 4), (0, 64), (24, 0), (0,), ()]
    grads = OPERATORS.hyper_connection_backward(
        *t, *results[4:6], *gate_gradients(0, 4), torch.randn(0, 64).to(BF16), None, HC_EPS, ITERS
    )
    assert [g.shape for g in grads] == [v.shape for v in t]
    assert not any(g.any() for g in grads)


def test_the_backward_operators_have_no_derivative():
    t = inputs.operands(5)
    mixes, rstd = reference.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)[4:]
    grads = [g.requires_grad_() for g in gate_gradients(5, 4)]
    found = OPERATORS.hyper_connection_backward(*t, mixes, rstd, *grads, None, None, HC_EPS, ITERS)
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        found[1].sum().backward()
