"""The projection's definition against float64 and against autograd, and where it rounds."""

import pytest
import torch
from mhc_projection import reference

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import RMS_EPS, SIZES
from tests.support.compare import assert_same_bytes, error64

each_size = pytest.mark.parametrize(("tokens", "hc", "d"), SIZES)
OTHER_LOGITS = [(9, 4, 16, 1), (9, 4, 16, 3), (9, 2, 24, 23), (9, 3, 16, 31), (9, 8, 8, 32)]
WIDTHS = [(*size, inputs.logits(size[1])) for size in SIZES] + OTHER_LOGITS
each_width = pytest.mark.parametrize(("tokens", "hc", "d", "n"), WIDTHS)
EXACT = 1e-13  # float64 against float64
FP32 = 5e-7  # fp32 against float64: a few roundings


def gradients(t, grad_mixes, grad_collapsed, addend=None, **needs):
    mixes, rstd, _ = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    return reference.projection_backward(
        t.x, t.weight, t.pre_mix, mixes, rstd, grad_mixes, grad_collapsed, addend, **needs
    )


def doubles(*tensors):
    return [t.double() for t in tensors]


def differing(actual, expected):
    return (actual != expected).float().mean().item()


@each_width
def test_float64_is_the_plain_mathematics(tokens, hc, d, n):
    """Results, and gradients by the explicit formulas against autograd's."""
    t = plain.float64(inputs.operands(tokens, hc, d, n=n)).requires_grad("x", "weight", "pre_mix")
    wanted = plain.projection(t.x, t.weight, t.pre_mix, RMS_EPS)
    mixes, rstd, collapsed = reference.projection_forward(*(v.detach() for v in (t.x, t.weight, t.pre_mix)), RMS_EPS)
    assert {v.dtype for v in (mixes, rstd, collapsed)} == {torch.float64}
    for got, want in zip((mixes, collapsed), wanted, strict=True):
        assert error64(got, want.detach()) < EXACT
    assert error64(rstd, t.x.detach().flatten(1).square().mean(-1).rsqrt()) < EXACT
    cotangents = inputs.cotangents(*wanted)
    expected = torch.autograd.grad(wanted, (t.x, t.weight, t.pre_mix), cotangents)
    for got, want in zip(gradients(t.requires_grad("base"), *cotangents), expected, strict=True):
        assert error64(got, want) < EXACT


@each_width
def test_results_in_fp32(tokens, hc, d, n, poison):
    """Against float64: a few roundings of fp32; collapsed is the nearest bf16 but for near ties."""
    t = inputs.operands(tokens, hc, d, n=n)
    mixes, rstd, collapsed = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    assert (mixes.dtype, rstd.dtype, collapsed.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert (mixes.shape, rstd.shape, collapsed.shape) == ((tokens, n), (tokens,), (tokens, d))
    exact = reference.projection_forward(t.x.double(), t.weight, t.pre_mix.double(), RMS_EPS)
    assert error64(mixes, exact[0]) < FP32
    assert error64(rstd, exact[1]) < FP32
    assert differing(collapsed, exact[2].bfloat16()) < 0.005
    assert error64(collapsed, exact[2]) < 2.5e-3


@each_width
def test_gradients_in_fp32(tokens, hc, d, n, poison):
    t = inputs.operands(tokens, hc, d, n=n)
    grad_mixes, grad_collapsed = torch.randn(tokens, n), torch.randn(tokens, d).bfloat16()
    grad_x, grad_weight, grad_pre_mix = gradients(t, grad_mixes, grad_collapsed)
    exact = gradients(plain.float64(t), grad_mixes.double(), grad_collapsed.double())
    assert (grad_x.dtype, grad_weight.dtype, grad_pre_mix.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert error64(grad_weight, exact[1]) < FP32
    assert error64(grad_pre_mix, exact[2]) < FP32
    assert differing(grad_x, exact[0].bfloat16()) < 0.005, "rounded more than once, or a term is off"
    assert all(g.is_contiguous() for g in (grad_x, grad_weight, grad_pre_mix))


@each_size
def test_no_output_is_worse_than_eagers(tokens, hc, d):
    """Output by output, errors against float64 are at most those of a trainer's eager bf16 path."""
    t = inputs.operands(tokens, hc, d)
    exact = plain.float64(t).requires_grad()
    eager = t.requires_grad()
    wanted, theirs = plain.exact(exact, hc), plain.eager(eager, hc)
    ours = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    gates = reference.gates_forward(ours[0], t.scale, t.base, hc, inputs.ITERS, inputs.HC_EPS)
    names = ["mixes", "collapsed", "pre", "post", "comb"]
    results = dict(zip(names, zip((ours[0], ours[2], *gates), wanted, theirs, strict=True), strict=True))
    cotangents = inputs.cotangents(*theirs[1:])
    grad_mixes, grad_scale, grad_base = reference.gates_backward(
        ours[0], t.scale, t.base, *cotangents[1:], hc, inputs.ITERS, inputs.HC_EPS
    )
    grads = reference.projection_backward(t.x, t.weight, t.pre_mix, *ours[:2], grad_mixes, cotangents[0], None)
    mine = dict(zip(inputs.Operands._fields, (*grads[:2], grad_scale, grad_base, grads[2]), strict=True))
    expected = torch.autograd.grad(wanted[1:], exact, doubles(*cotangents))
    found = torch.autograd.grad(theirs[1:], eager, cotangents)
    for name, want, their in zip(inputs.Operands._fields, expected, found, strict=True):
        results[f"gradient of {name}"] = (mine[name], want, their)
    for name, (got, want, their) in results.items():
        assert error64(got, want.detach()) <= error64(their, want.detach()) * 1.02 + 2e-7, name


def test_the_weight_is_rounded_to_bf16():
    """fp32 weights count as their bf16 neighbours, to nearest even; the gradient is with respect to those."""
    t = inputs.operands(37)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    t.weight[0, :2] = ties
    rounded = t._replace(weight=t.weight.bfloat16())
    assert rounded.weight[0, :2].tolist() == [1.0, 1 + 2**-6]
    grads = torch.randn(37, 24), torch.randn(37, 64).bfloat16()
    for one, other in zip(gradients(t, *grads), gradients(rounded, *grads), strict=True):
        assert_same_bytes(one, other)
    mixes, _, _ = reference.projection_forward(t.x, t.weight, None, RMS_EPS)
    assert_same_bytes(mixes, reference.projection_forward(t.x, rounded.weight, None, RMS_EPS)[0])
    unrounded = plain.projection(t.x.double(), t.weight.double(), t.pre_mix.double(), RMS_EPS)[0]
    assert error64(mixes, unrounded) > 5e-4


def test_collapsed_is_rounded_once():
    """1 + 2^-9 + 2^-17 is above the tie of 1 and 1 + 2^-7 only if the sum is not rounded to bf16 in between."""
    x = torch.zeros(1, 4, 8, dtype=torch.bfloat16)
    x[0, :, 0] = torch.tensor([1.0, 2.0**-8, 2.0**-16, 0.0])
    _, _, collapsed = reference.projection_forward(x, torch.zeros(1, 32), torch.ones(1, 4), RMS_EPS)
    assert collapsed[0, 0] == 1 + 2**-7
    x[0, 2, 0] = 0
    assert reference.projection_forward(x, torch.zeros(1, 32), torch.ones(1, 4), RMS_EPS)[2][0, 0] == 1


def test_grad_x_is_rounded_once_and_again_with_an_addend():
    """g_c = 1 with pre_mix 1 + 2^-8 + 2^-16: up without an addend; bf16 twice with one, never a single rounding."""
    t = inputs.operands(1, 1, 8)
    t.pre_mix.fill_(1 + 2**-8 + 2**-16)
    one = torch.ones(1, 8).bfloat16()
    (up,) = set(gradients(t, None, one)[0].flatten().tolist())
    assert up == 1 + 2**-7
    addend = torch.full((1, 1, 8), -1.0).bfloat16()
    (rest,) = set(gradients(t, None, one, addend)[0].flatten().tolist())
    assert rest == 2**-7  # in one rounding, 2^-8 + 2^-16 becomes 2^-8


def test_terms_without_a_gradient():
    """No gradient is zero for parameters; for the streams it leaves the terms out."""
    t = inputs.operands(9)
    g_m, g_c = torch.randn(9, 24), torch.randn(9, 64).bfloat16()
    zero_m, zero_c = torch.zeros_like(g_m), torch.zeros_like(g_c)
    for given, filled in (((g_m, None), (g_m, zero_c)), ((None, g_c), (zero_m, g_c)), ((None, None), (zero_m, zero_c))):
        for got, want in zip(gradients(t, *given), gradients(t, *filled), strict=True):
            assert torch.equal(got, want)


def test_what_is_not_needed_is_empty():
    t = inputs.operands(9)
    grads = torch.randn(9, 24), torch.randn(9, 64).bfloat16()
    full = gradients(t, *grads)
    for index, name in enumerate(("need_x", "need_weight", "need_pre_mix")):
        found = gradients(t, *grads, **{name: False})
        for other, (got, want) in enumerate(zip(found, full, strict=True)):
            if other == index:
                assert (got.shape, got.dtype) == ((0,), want.dtype)
            else:
                assert_same_bytes(got, want)
    without = gradients(t._replace(pre_mix=None), grads[0], None)
    assert without[2].shape == (0,)
    assert reference.projection_forward(t.x, t.weight, None, RMS_EPS)[2].shape == (0,)


def test_chunks_of_tokens_change_nothing(monkeypatch):
    t = inputs.operands(37)
    grads = torch.randn(37, 24), torch.randn(37, 64).bfloat16(), torch.randn(37, 4, 64).bfloat16()
    forward, backward = reference.projection_forward(*t[:2], t.pre_mix, RMS_EPS), gradients(t, *grads)
    for chunk in (1, 5 * 256):
        monkeypatch.setattr(reference, "CHUNK", chunk)
        assert_same_bytes(reference.projection_forward(*t[:2], t.pre_mix, RMS_EPS)[2], forward[2])
        again = *reference.projection_forward(*t[:2], t.pre_mix, RMS_EPS)[:2], *gradients(t, *grads)
        for got, want in zip(again, (*forward[:2], *backward), strict=True):
            assert error64(got, want.double()) < 1e-7


def test_a_token_does_not_depend_on_its_batch():
    """collapsed bit for bit; what a matmul sums within one rounding."""
    t = inputs.operands(130)
    g_m, g_c = torch.randn(130, 24), torch.randn(130, 64).bfloat16()
    forward, backward = reference.projection_forward(*t[:2], t.pre_mix, RMS_EPS), gradients(t, g_m, g_c)
    for rows in (slice(0, 1), slice(64, 65), slice(3, 99), slice(129, 130)):
        part = t._replace(x=t.x[rows], pre_mix=t.pre_mix[rows])
        mixes, rstd, collapsed = reference.projection_forward(part.x, part.weight, part.pre_mix, RMS_EPS)
        grad_x, _, grad_pre_mix = gradients(part, g_m[rows], g_c[rows])
        assert_same_bytes(collapsed, forward[2][rows])
        for got, want in ((mixes, forward[0]), (rstd, forward[1]), (grad_x, backward[0]), (grad_pre_mix, backward[2])):
            torch.testing.assert_close(got, want[rows], rtol=2**-7 if got is grad_x else 2**-22, atol=1e-30)


def test_long_sums_do_not_drift():
    """65,536 tokens of 1 +- 2^-7: the gradient of the weight keeps every bit that fp32 has."""
    tokens = 65536
    x = (1 + torch.randint(-1, 2, (tokens, 1, 8)) * 2.0**-7).bfloat16()
    mixes, rstd, _ = reference.projection_forward(x, torch.zeros(1, 8), None, 0.0)
    _, grad, _ = reference.projection_backward(
        x, torch.zeros(1, 8), None, mixes, torch.ones_like(rstd), torch.ones(tokens, 1), None, None
    )
    assert torch.equal(grad, x.double().sum(0).float())
