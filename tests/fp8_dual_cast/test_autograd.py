"""The casts and autograd: no gradient, nothing saved, and usable where trainers call them."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed
from hopper_kernels import fp8
from torch.utils.checkpoint import checkpoint

from tests.fp8_dual_cast import inputs
from tests.support.compare import assert_same_bytes

OPERATORS = torch.ops.fp8_dual_cast


def rotation(tokens):
    return {
        "cos_sin_cache": inputs.cos_sin_cache(40, 64),
        "position_ids": inputs.position_ids(tokens, 40),
        "head_dim": 128,
    }


CALLS = {
    "fp8_dual_cast": fp8_dual_cast,
    "rotated": lambda x: fp8_dual_cast(x, **rotation(x.shape[0])),
    "per_token_cast": per_token_cast,
    "per_token_cast_transposed": per_token_cast_transposed,
    "operator dual_cast": lambda x: OPERATORS.dual_cast(x, False, None, None, 0, True),
    "operator row_cast": lambda x: OPERATORS.row_cast(x, False),
    "operator column_cast": lambda x: OPERATORS.column_cast(x, False),
}


@pytest.mark.parametrize("cast", CALLS.values(), ids=CALLS)
def test_no_gradient_flows(cast):
    """Results of an x that requires grad do not, equal those without, and nothing is kept for a backward."""
    x = inputs.matrix(37, 256)
    plain = cast(x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        results = cast(x.clone().requires_grad_())
    assert not any(t.requires_grad for t in results)
    assert not saved
    for got, want in zip(results, plain, strict=True):
        assert_same_bytes(got, want)


def test_a_table_that_requires_grad_gets_none():
    options = rotation(37)
    options["cos_sin_cache"].requires_grad_()
    assert not any(t.requires_grad for t in fp8_dual_cast(inputs.matrix(37, 256), **options))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradient_modes(mode):
    x = inputs.matrix(37, 256)
    wanted = fp8_dual_cast(x, **rotation(37))
    with mode():
        for got, want in zip(fp8_dual_cast(x.clone(), **rotation(37)), wanted, strict=True):
            assert_same_bytes(got, want)


class CastGradient(torch.autograd.Function):
    """Identity whose backward casts the gradient, as an FP8 linear layer's does, and returns it dequantised."""

    seen = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        CastGradient.seen = grad, fp8_dual_cast(grad)
        return fp8.dequantize(CastGradient.seen[1].q, CastGradient.seen[1].sf).bfloat16()


def test_inside_a_backward():
    """With a contiguous gradient, and with that of a sum, whose strides are 0 (in double backward mode too)."""
    x = inputs.matrix(130, 256).requires_grad_()
    weight = inputs.matrix(130, 256, seed=1)
    for factor, create_graph in ((weight, False), (weight, True), (None, False)):
        y = CastGradient.apply(x)
        y = y.sum() if factor is None else (y * factor).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=create_graph)
        given, results = CastGradient.seen
        assert (given.stride() == (0, 0)) == (factor is None)
        wanted = fp8_dual_cast(given.detach().contiguous())
        for got, want in zip(results, wanted, strict=True):
            assert not got.requires_grad
            assert_same_bytes(got, want)
        assert_same_bytes(grad.detach(), fp8.dequantize(wanted.q, wanted.sf).bfloat16())


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(use_reentrant):
    """The cast in the recomputed forward gives the bytes of the first one, and gradients are those without."""
    runs = []

    def layer(x):
        y = x * 3
        runs.append(fp8_dual_cast(y, **rotation(37)))
        return (y * fp8.dequantize(runs[-1].q, runs[-1].sf)).sum()

    x = inputs.matrix(37, 256)
    plain, checkpointed = (x.clone().requires_grad_() for _ in range(2))
    layer(plain).backward()
    checkpoint(layer, checkpointed, use_reentrant=use_reentrant).backward()
    assert len(runs) == 3
    for again in runs[1:]:
        for got, want in zip(again, runs[0], strict=True):
            assert_same_bytes(got, want)
    assert_same_bytes(checkpointed.grad, plain.grad)
