"""Odd slots, sizes, numbers and sinks through both public functions."""

import math

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, sparse_attn_backward_flat

from tests.dsa_sparse_attn_bwd import inputs
from tests.dsa_sparse_attn_bwd.inputs import assert_near, assert_same, forward
from tests.support.compare import assert_same_bytes, error64

INF, NAN = math.inf, math.nan
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.fixture(params=["batched", "flat"])
def call(request):
    """(dq, dkv, dsinks) of operands, in the shapes of the flat function."""

    def batched(t, **options):
        dq, dkv, dsinks = dsa_sparse_attn_backward(**t.batched(), **options)
        return dq[0], dkv[0, :, 0], dsinks

    def flat(t, **options):
        return sparse_attn_backward_flat(**t.flat(), **options)

    return batched if request.param == "batched" else flat


def with_slots(t, indices):
    """With the output and logarithm that belong to them."""
    indices = torch.as_tensor(indices, dtype=torch.int32)
    out, lse = forward(t.q.double(), t.kv.double(), indices, t.sinks.double(), t.sm_scale)
    return t._replace(indices=indices, out=out.bfloat16(), lse=lse.float())


def without_slots(t):
    return ~((t.indices >= 0) & (t.indices < len(t.kv))).any(dim=1)


def slots(queries=5, width=4, rows=7):
    return torch.stack([torch.randperm(rows)[:width] for _ in range(queries)]).int()


@pytest.mark.parametrize("empty", [-1, -2, 7, 8, INT_MAX, INT_MIN])
def test_empty_slots_anywhere(call, empty):
    """Before, between and behind the others, of any number out of range, in place of which nothing is read."""
    t = with_slots(inputs.small(), slots())
    wanted = call(t)
    for places in ([2, 3, 4, 5], [0, 1, 2, 3], [0, 2, 3, 5], [1, 4, 5, 6]):
        more = torch.full((5, 7), empty, dtype=torch.int32)
        more[:, places] = t.indices
        assert_near(call(t._replace(indices=more)), wanted)


def test_empty_slots_read_no_row(call):
    """Not the first one, nor the last one."""
    t = with_slots(inputs.small(), slots(rows=5) + 1)
    wanted = call(t)
    odd = t._replace(kv=t.kv.clone(), indices=torch.cat([t.indices, torch.tensor([[-1, 7]] * 5).int()], dim=1))
    odd.kv[0], odd.kv[6] = NAN, INF
    found = call(odd)
    assert_near(found, wanted)
    assert not found[1][[0, 6]].any()


def test_the_order_of_slots_changes_nothing(call):
    t = with_slots(inputs.small(), slots(width=7))
    order = torch.stack([torch.randperm(7) for _ in range(5)])
    assert_near(call(t._replace(indices=t.indices.gather(1, order))), call(t))


def test_rows_that_no_slot_names(call):
    """Have zeros exactly, and are not read."""
    t = with_slots(inputs.small(rows=9), slots() + 1)
    lonely = torch.ones(9, dtype=torch.bool).index_fill_(0, t.indices.unique().long(), False)
    assert lonely[0]
    assert lonely[8]
    _, dkv, _ = wanted = call(t)
    assert_same_bytes(dkv[lonely], torch.zeros_like(dkv[lonely]))
    assert dkv[~lonely].any(dim=1).all()
    assert_same(call(t._replace(kv=t.kv.masked_fill(lonely[:, None], NAN))), wanted)


@pytest.mark.parametrize(
    "empty", [[0], [4], [2], [0, 1], [3, 4], [1, 2, 3], [0, 4], [0, 1, 2, 3, 4]], ids=lambda e: f"queries {e}"
)
@pytest.mark.parametrize("number", [INF, -INF, NAN, 3.0])
def test_queries_without_slots(call, empty, number):
    """At the start, in the middle, at the end: zeros exactly, though their numbers are not finite."""
    indices = slots()
    indices[empty] = torch.tensor([-1, 7, INT_MAX, INT_MIN], dtype=torch.int32)
    t = with_slots(inputs.small(), indices)
    alone = without_slots(t)
    assert alone.nonzero()[:, 0].tolist() == empty
    left = t._replace(**{n: getattr(t, n)[~alone] for n in ("grad_out", "q", "out", "lse", "indices")})
    dq, dkv, dsinks = call(left)
    of_all = torch.zeros_like(t.q)
    of_all[~alone] = dq
    for names in (("lse",), ("out", "grad_out"), ("lse", "out", "grad_out", "q")):
        odd = {n: getattr(t, n).clone() for n in names}
        for value in odd.values():
            value[alone] = number
        found = call(t._replace(**odd))
        assert_near(found, (of_all, dkv, dsinks))
        assert_same_bytes(found[0][alone], torch.zeros_like(found[0][alone]))


def test_a_query_without_slots_has_no_tail_either(call):
    t = inputs.with_tail(with_slots(inputs.small(), [[0, 1], [-1, 7], [2, 3], [4, 4], [6, -1]]), 64)
    wanted = call(t)
    t.out_tail[1] = NAN
    assert_same(call(t), wanted)


@pytest.mark.parametrize("shape", [(0, 4, 3), (3, 0, 4), (3, 4, 0), (0, 0, 0)])
@pytest.mark.parametrize("number", [INF, -INF, NAN])
def test_nothing_to_do(call, shape, number):
    """No queries, slots or rows: zeros, whatever the rest is."""
    t = inputs.small(*shape)
    odd = inputs.with_tail(t._replace(lse=torch.full_like(t.lse, number)), 16, left=number)
    found = call(odd._replace(grad_out=torch.full_like(t.q, number), out_tail=torch.full_like(odd.out_tail, number)))
    assert_same(found, (torch.zeros_like(t.q), torch.zeros_like(t.kv), torch.zeros_like(t.sinks)))


def test_one_of_each(call):
    """A query, a slot, a row, no sink: all weight is on the row, whatever it is, so dq is 0 and dkv the gradient."""
    t = inputs.small(1, 1, 1, empty=0.0)
    t.sinks.fill_(-INF)
    t = with_slots(t, [[0]])
    assert torch.equal(t.out, t.kv.expand_as(t.out))
    dq, dkv, dsinks = call(t)
    torch.testing.assert_close(dkv.double(), t.grad_out.double().sum(dim=1), rtol=2**-8, atol=1e-4)
    assert dq.abs().max() < 1e-4
    assert not dsinks.any()


@pytest.mark.parametrize("times", [2, 9])
def test_duplicates_count_each_time(call, times):
    """As often as so many rows of the same numbers would, whose gradients then are parts of one."""
    t = inputs.small(rows=times + 1, empty=0.0)
    t.kv[1:] = t.kv[0]
    apart = with_slots(t, [list(range(times + 1))] * 5)
    together = apart._replace(indices=torch.tensor([[0] * times + [times]] * 5).int())
    dq, dkv, dsinks = call(apart)
    wanted = dkv.clone()
    wanted[0], wanted[1:times] = times * dkv[0].float(), 0
    found = call(together)
    assert_near((found[0], dkv, found[2]), (dq, dkv, dsinks))
    assert error64(found[1], wanted.double()) < 2**-7
    assert_same_bytes(found[1][1:times], wanted[1:times])


def test_all_queries_name_one_row(call):
    """Its gradient is the sum of what each of them gives it alone."""
    t = with_slots(inputs.small(), [[3, 3, -1]] * 5)
    _, dkv, _ = call(t)
    alone = [call(with_slots(t, [[3, 3, -1] if s == one else [-1] * 3 for s in range(5)]))[1] for one in range(5)]
    assert error64(dkv[3], sum(d[3].double() for d in alone)) < 2**-7
    assert not dkv[[0, 1, 2, 4, 5, 6]].any()


@pytest.mark.parametrize("name", ["grad_out", "q", "out", "lse"])
@pytest.mark.parametrize("number", [NAN, INF])
def test_what_is_not_finite_stays_where_it_is(call, name, number):
    """In the query's gradient, the rows that it names, and the sinks' of its head."""
    t = with_slots(inputs.small(), [[0, 1], [2, 3], [1, 2], [4, 5], [5, -1]])
    dq, dkv, dsinks = call(t)
    odd = getattr(t, name).clone()
    odd[2, 5] = number
    found = call(t._replace(**{name: odd}))
    others = [0, 1, 3, 4]
    assert_same_bytes(found[0][others], dq[others])
    assert_same_bytes(found[0][2][torch.arange(16) != 5], dq[2][torch.arange(16) != 5])
    assert_same_bytes(found[1][[0, 3, 4, 5, 6]], dkv[[0, 3, 4, 5, 6]])
    assert_same_bytes(found[2][torch.arange(16) != 5], dsinks[torch.arange(16) != 5])
    finite = all(f.isfinite().all() for f in found)
    assert finite == (name == "lse" and number == INF)


def test_a_row_that_is_not_finite_reaches_those_who_name_it(call):
    t = with_slots(inputs.small(), [[0, 1], [2, 3], [1, 2], [4, 5], [5, -1]])
    dq, dkv, _ = call(t)
    odd = t._replace(kv=t.kv.clone())
    odd.kv[4, 9] = NAN
    found = call(odd)
    assert_same_bytes(found[0][[0, 1, 2, 4]], dq[[0, 1, 2, 4]])
    assert_same_bytes(found[1][[0, 1, 2, 3, 5, 6]], dkv[[0, 1, 2, 3, 5, 6]])
    assert found[0][3].isnan().all()
    assert found[1][4].isnan().all()


@pytest.mark.parametrize("sink", [-INF, -1e4, -60.0, 60.0, 1e4, INF])
def test_sinks(call, sink):
    """From no weight to all of it, of one head; the others do not change."""
    t = inputs.small()
    t.sinks[3] = sink
    out, lse = forward(t.q.double(), t.kv.double(), t.indices, t.sinks.double().clamp(-1e6, 1e6), t.sm_scale)
    t = t._replace(out=out.bfloat16(), lse=lse.float())
    others = torch.arange(16) != 3
    dq, _, dsinks = found = call(t)
    assert all(f.isfinite().all() for f in found)
    if abs(sink) >= 60:
        assert abs(dsinks[3]) < 1e-6
        assert bool(dq[:, 3].any()) == (sink < 1000)
    calm = t._replace(sinks=t.sinks.clone(), out=t.out.clone(), lse=t.lse.clone())
    calm.sinks[3] = 0.0
    assert_same_bytes(dq[:, others], call(calm)[0][:, others])
    assert_same_bytes(dsinks[others], call(calm)[2][others])


def test_a_sink_of_all_weight_takes_delta(call):
    """Its share is 1, not inf - inf, if the output is not the 0 that it should be."""
    t = inputs.small()
    t.sinks.fill_(INF)
    dq, dkv, dsinks = call(t)
    assert not dq.any()
    assert not dkv.any()
    left = ~without_slots(t)
    delta = (t.grad_out.double() * t.out.double()).sum(dim=-1)[left].sum(dim=0)
    torch.testing.assert_close(dsinks.double(), -delta, rtol=1e-4, atol=1e-4)


def test_sinks_alone_differ_from_none(call):
    """Without a sink, -inf; a sink of 0 is one."""
    t = inputs.small()
    none, zero = (call(t._replace(sinks=torch.full_like(t.sinks, v)))[2] for v in (-INF, 0.0))
    assert_same_bytes(none, torch.zeros_like(none))
    assert zero.all()


def test_a_gradient_of_zero(call):
    t = inputs.small()
    for result in call(t._replace(grad_out=torch.zeros_like(t.q))):
        assert not result.any()


def test_linear_in_the_gradient(call):
    """Powers of two: exactly."""
    t = inputs.small()
    once, four = call(t), call(t._replace(grad_out=t.grad_out * 4))
    assert_same(four, tuple(4 * result for result in once))


def test_a_peaked_softmax(call):
    """One slot has all weight, the others none in fp32: its row takes the gradient, as it is."""
    t = inputs.small()
    t.q.copy_(t.kv[:5, None] / 2)
    t = with_slots(t._replace(sm_scale=1.0), [[0, 1, 2, 3, 4]] * 5)
    dq, dkv, dsinks = call(t)
    assert error64(dkv[:5], t.grad_out.double().sum(dim=1)) < 2**-8
    assert dq.abs().max() < 1e-2
    assert dsinks.abs().max() < 1e-6


def test_calls_of_other_sizes_in_turn(call):
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append([call(inputs.small(*shape)) for shape in ((3, 2, 4), (5, 9, 7), (1, 1, 1))])
    for again, first in zip(*found, strict=True):
        assert_same(again, first)


@pytest.mark.parametrize("width", [1, 8, 63, 65])
def test_any_number_of_slots(call, width):
    """What is left of a list after its empty slots are taken out is the same call."""
    t = with_slots(inputs.small(3, width, 20), torch.randint(-3, 23, (3, width)).int())
    count = max(1, int(((t.indices >= 0) & (t.indices < 20)).sum(dim=1).max()))
    packed = torch.full((3, count), -1, dtype=torch.int32)
    for row, given in zip(packed, t.indices, strict=True):
        named = given[(given >= 0) & (given < 20)]
        row[: len(named)] = named
    assert_near(call(t._replace(indices=packed)), call(t))
