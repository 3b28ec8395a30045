"""The gates' definition: against float64 and autograd through every iteration, and what Sinkhorn promises."""

import pytest
import torch
from mhc_projection import reference

from tests.mhc_projection import inputs, plain
from tests.support.compare import assert_same_bytes, error64

each_hc = pytest.mark.parametrize("hc", [1, 2, 4])
each_length = pytest.mark.parametrize(("iters", "eps"), [(1, 0.0), (1, 1e-6), (2, 1e-3), (3, 0.0), (20, 1e-6)])


def operands(tokens, hc, spread=2.0):
    n = inputs.logits(hc)
    return torch.randn(tokens, n) * spread, torch.rand(3) + 0.5, torch.randn(n) * 0.5


def gradients(tokens, hc):
    return [torch.randn(tokens, *shape) for shape in ((hc,), (hc,), (hc, hc))]


def doubles(tensors):
    return [t.double() for t in tensors]


@each_hc
@each_length
def test_float64_is_the_plain_mathematics(hc, iters, eps):
    """Results, and the explicit gradients of all iterations against autograd's."""
    leaves = [t.double().requires_grad_() for t in operands(50, hc)]
    wanted = plain.gates(*leaves, hc, iters, eps)
    found = reference.gates_forward(*(t.detach() for t in leaves), hc, iters, eps)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == torch.float64
        assert error64(got, want.detach()) < 1e-13
    cotangents = doubles(gradients(50, hc))
    expected = torch.autograd.grad(wanted, leaves, cotangents)
    found = reference.gates_backward(*(t.detach() for t in leaves), *cotangents, hc, iters, eps)
    for name, got, want in zip(("mixes", "scale", "base"), found, expected, strict=True):
        difference = (got - want).norm() / (want.norm() + 1e-3)
        assert difference < 1e-12, name


@each_hc
@each_length
def test_results_in_fp32(hc, iters, eps, poison):
    given, cotangents = operands(300, hc), gradients(300, hc)
    exact = reference.gates_forward(*doubles(given), hc, iters, eps)
    found = reference.gates_forward(*given, hc, iters, eps)
    assert [tuple(t.shape) for t in found] == [(300, hc), (300, hc), (300, hc, hc)]
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
        assert error64(got, want) < 1e-6
    wanted = reference.gates_backward(*doubles(given), *doubles(cotangents), hc, iters, eps)
    for name, got, want in zip(
        ("mixes", "scale", "base"), reference.gates_backward(*given, *cotangents, hc, iters, eps), wanted, strict=True
    ):
        assert got.dtype == torch.float32
        assert error64(got, want) < 5e-6, name


def test_parameters_in_bf16_count_as_their_values():
    mixes, scale, base = operands(9, 4)
    scale, base = scale.bfloat16(), base.bfloat16()
    cotangents = gradients(9, 4)
    wanted = reference.gates_forward(mixes, scale.float(), base.float(), 4, 3, 1e-6)
    for got, want in zip(reference.gates_forward(mixes, scale, base, 4, 3, 1e-6), wanted, strict=True):
        assert_same_bytes(got, want)
    for grad in reference.gates_backward(mixes, scale, base, *cotangents, 4, 3, 1e-6):
        assert grad.dtype == torch.float32


def test_each_section_has_its_own_scale():
    """Order of the logits: pre, post, comb row by row."""
    mixes = torch.arange(24.0)[None] / 10
    scale, base = torch.tensor([0.0, 1.0, 2.0]), torch.arange(24.0) / 7
    pre, post, comb = reference.gates_forward(mixes, scale, base, 4, 1, 0.0)
    z = mixes[0].double() * torch.tensor([0.0, 1.0, 2.0]).double().repeat_interleave(torch.tensor([4, 4, 16])) + base
    assert error64(pre[0], z[:4].sigmoid()) < 1e-6
    assert error64(post[0], 2 * z[4:8].sigmoid()) < 1e-6
    softmax = z[8:].view(4, 4).softmax(1)
    assert error64(comb[0], softmax / softmax.sum(0)) < 1e-6


def test_columns_sum_to_one_and_rows_only_nearly():
    """After 20 iterations of N(0, 2^2) logits, columns within 2e-6, some row by more than a percent."""
    given = operands(5000, 4)
    comb = reference.gates_forward(given[0], torch.ones(3), torch.zeros(24), 4, 20, 1e-6)[2].double()
    assert (comb.sum(-2) - 1).abs().max() < 2e-6
    assert 0.01 < (comb.sum(-1) - 1).abs().max() < 0.3
    assert (comb > 0).all()


def test_comb_is_the_softmax_with_rows_and_columns_scaled():
    """comb = diag(u) (softmax + eps) diag(v): every 2 x 2 minor of the quotient vanishes."""
    mixes = operands(200, 4)[0].double()
    comb = reference.gates_forward(mixes, torch.ones(3), torch.zeros(24), 4, 20, 1e-6)[2]
    quotient = comb / (mixes[:, 8:].view(-1, 4, 4).softmax(-1) + 1e-6)
    minors = quotient[:, :1, :1] * quotient[:, 1:, 1:] / (quotient[:, :1, 1:] * quotient[:, 1:, :1])
    assert (minors - 1).abs().max() < 1e-12


def test_the_gradient_of_comb_has_zero_row_sums():
    given = [t.double() for t in operands(200, 4)]
    cotangents = doubles(gradients(200, 4))
    grad, _, _ = reference.gates_backward(*given, *cotangents, 4, 20, 1e-6)
    rows = grad[:, 8:].view(-1, 4, 4)
    assert rows.abs().max() > 1e-2
    assert rows.sum(-1).abs().max() < 1e-14


def test_equal_logits_give_equal_shares():
    pre, post, comb = reference.gates_forward(
        torch.full((3, 24), 1.5), torch.ones(3), torch.full((24,), -1.5), 4, 20, 0.0
    )
    assert torch.equal(comb, torch.full((3, 4, 4), 0.25))
    assert torch.equal(pre, torch.full((3, 4), 0.5))
    assert torch.equal(post, torch.ones(3, 4))


def test_one_stream():
    """A 1 x 1 matrix: softmax 1, each division by (itself + eps)."""
    comb = reference.gates_forward(torch.randn(5, 3), torch.ones(3), torch.zeros(3), 1, 20, 0.0)[2]
    assert torch.equal(comb, torch.ones(5, 1, 1))


@pytest.mark.parametrize("size", [30.0, 100.0, 1e4])
def test_saturated_gates_stay_finite(size):
    """Results and gradients are finite, and the gradient of a sigmoid near 1 keeps its relative precision."""
    mixes = torch.randn(200, 24).sign() * size
    scale, base, cotangents = torch.ones(3), torch.zeros(24), gradients(200, 4)
    results = reference.gates_forward(mixes, scale, base, 4, 20, 1e-6)
    grads = reference.gates_backward(mixes, scale, base, *cotangents, 4, 20, 1e-6)
    assert all(t.isfinite().all() for t in (*results, *grads))
    exact = reference.gates_backward(mixes.double(), *doubles((scale, base, *cotangents)), 4, 20, 1e-6)
    torch.testing.assert_close(grads[0][:, :8].double(), exact[0][:, :8], rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_token(value):
    mixes, scale, base = operands(5, 4)
    cotangents = gradients(5, 4)
    clean = *reference.gates_forward(mixes, scale, base, 4, 20, 1e-6), mixes
    clean_grad = reference.gates_backward(mixes, scale, base, *cotangents, 4, 20, 1e-6)[0]
    mixes[2, 9] = value
    found = reference.gates_forward(mixes, scale, base, 4, 20, 1e-6)
    grad, grad_scale, grad_base = reference.gates_backward(mixes, scale, base, *cotangents, 4, 20, 1e-6)
    others = [0, 1, 3, 4]
    for got, want in zip((*found, grad), (*clean[:3], clean_grad), strict=True):
        assert_same_bytes(got[others], want[others])
    assert found[2][2].isnan().all()
    assert found[0][2].isfinite().all()
    assert grad_scale[2].isnan()
    assert grad_scale[:2].isfinite().all()
    assert grad_base[8:].isnan().any()
    assert grad_base[:8].isfinite().all()


def test_a_token_does_not_depend_on_its_batch_nor_on_chunks(monkeypatch):
    given, cotangents = operands(130, 4), gradients(130, 4)
    forward = reference.gates_forward(*given, 4, 20, 1e-6)
    backward = reference.gates_backward(*given, *cotangents, 4, 20, 1e-6)
    for rows in (slice(0, 1), slice(64, 65), slice(3, 99)):
        found = reference.gates_forward(given[0][rows], *given[1:], 4, 20, 1e-6)
        grad = reference.gates_backward(given[0][rows], *given[1:], *(c[rows] for c in cotangents), 4, 20, 1e-6)[0]
        for got, want in zip((*found, grad), (*forward, backward[0]), strict=True):
            assert_same_bytes(got, want[rows])
    monkeypatch.setattr(reference, "CHUNK", 64 * 24 * 7)
    for got, want in zip(reference.gates_forward(*given, 4, 20, 1e-6), forward, strict=True):
        assert_same_bytes(got, want)
    again = reference.gates_backward(*given, *cotangents, 4, 20, 1e-6)
    assert_same_bytes(again[0], backward[0])
    for got, want in zip(again[1:], backward[1:], strict=True):
        assert error64(got, want.double()) < 1e-6


def test_long_sums_do_not_drift():
    """The gradients of scale and base over 65,536 tokens that all push the same way."""
    tokens = 65536
    mixes = torch.ones(tokens, 3) + torch.randn(tokens, 3) * 2**-9
    ones = [torch.ones(tokens, *shape) for shape in ((1,), (1,), (1, 1))]
    found = reference.gates_backward(mixes, torch.ones(3), torch.zeros(3), *ones, 1, 1, 0.0)
    exact = reference.gates_backward(mixes.double(), *doubles((torch.ones(3), torch.zeros(3), *ones)), 1, 1, 0.0)
    for got, want in zip(found[1:], exact[1:], strict=True):
        assert error64(got, want) < 1e-7
