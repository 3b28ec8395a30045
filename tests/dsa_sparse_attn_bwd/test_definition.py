"""The definition against autograd in float64, and what it says of odd slots, sinks and queries."""

import math

import pytest
import torch
from dsa_sparse_attn_bwd import reference

from tests.dsa_sparse_attn_bwd.inputs import forward, operands

INF, NAN = math.inf, math.nan


def exact(t):
    """By autograd in float64, through an output that is not rounded."""
    q, kv, sinks = (v.double().requires_grad_() for v in (t.q, t.kv, t.sinks))
    out, lse = forward(q, kv, t.indices, sinks, t.sm_scale)
    grads = torch.autograd.grad(out, (q, kv, sinks), t.grad_out.double(), materialize_grads=True)
    return t._replace(out=out.detach(), lse=lse.detach()), grads


def assert_close(found, wanted, rtol=1e-12):
    for got, want, name in zip(found, wanted, ("dq", "dkv", "dsinks"), strict=True):
        assert got.shape == want.shape, name
        if want.numel():
            assert (got - want).abs().max() <= rtol * want.abs().max(), name


@pytest.mark.parametrize("shape", [(13, 9, 24), (1, 1, 1), (7, 70, 5), (3, 0, 4), (4, 3, 0), (0, 5, 4)])
def test_against_autograd(shape):
    t, wanted = exact(operands(*shape))
    assert_close(reference.backward(*t), wanted)


def test_chunks_change_nothing(monkeypatch):
    t = operands(40)
    whole = reference.backward(*t)
    monkeypatch.setattr(reference, "CHUNK", 600)
    assert_close(reference.backward(*t), whole)


def test_a_row_counts_as_often_as_it_is_named():
    t = operands(6, 8, 10, empty=0.0)
    t = t._replace(indices=t.indices[:, :4].repeat(1, 2))
    t, wanted = exact(t)
    assert_close(reference.backward(*t), wanted)


def test_the_order_of_slots_and_empty_ones_change_nothing():
    t, _ = exact(operands())
    order = torch.randperm(t.indices.shape[1])
    more = torch.full((len(t.q), 3), len(t.kv) + 5, dtype=torch.int32)
    more[:, 1] = -(2**31)
    other = t._replace(indices=torch.cat([more, t.indices[:, order]], dim=1))
    found = (reference.backward(*one) for one in (other, t))
    assert_close(*found)


def test_rows_that_nobody_names_are_not_read():
    t, wanted = exact(operands())
    named = t.indices[t.indices >= 0].unique()
    lonely = torch.ones(len(t.kv), dtype=torch.bool).index_fill_(0, named.long(), False)
    assert lonely.any()
    _, dkv, _ = found = reference.backward(*t._replace(kv=t.kv.masked_fill(lonely[:, None], NAN)))
    assert not dkv[lonely].any()
    assert_close(found, wanted)


@pytest.mark.parametrize("lse", [INF, -INF, NAN, 3.0])
def test_queries_without_slots_add_nothing(lse):
    """Whatever stands in their lse, output and gradient."""
    t, wanted = exact(operands())
    alone = (t.indices < 0).all(dim=1)
    assert alone.any()
    odd = t._replace(
        lse=t.lse.masked_fill(alone[:, None], lse),
        out=t.out.masked_fill(alone[:, None, None], NAN),
        grad_out=t.grad_out.double().masked_fill(alone[:, None, None], INF),
        q=t.q.double().masked_fill(alone[:, None, None], NAN),
    )
    dq, _, _ = found = reference.backward(*odd)
    assert not dq[alone].any()
    assert_close(found, wanted)


@pytest.mark.parametrize("sink", [-INF, -1e4, -60.0, 60.0, 1e4, INF])
def test_sinks(sink):
    """At -inf none, at +inf all of the weight."""
    t = operands()
    t.sinks[1] = sink
    out, lse = forward(t.q.double(), t.kv.double(), t.indices, t.sinks.double().clamp(-1e6, 1e6), t.sm_scale)
    _, wanted = exact(t._replace(sinks=t.sinks.double().clamp(-1e6, 1e6)))
    found = reference.backward(*t._replace(out=out, lse=lse))
    assert_close(found, wanted)
    assert all(v.isfinite().all() for v in found)


def test_the_tail_stands_for_the_last_channels_of_the_output():
    t = operands()
    tail = t.out[..., -16:].clone()
    overwritten = t._replace(out=torch.cat([t.out[..., :-16], torch.full_like(tail, NAN)], dim=-1), out_tail=tail)
    for found, wanted in zip(reference.backward(*overwritten), reference.backward(*t), strict=True):
        assert torch.equal(found, wanted)


def test_linear_in_the_gradient():
    t = operands()
    once, twice = (reference.backward(*t._replace(grad_out=t.grad_out * f)) for f in (1, 2))
    assert_close([2 * v for v in once], twice)
