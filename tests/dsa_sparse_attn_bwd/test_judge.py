"""The judge of the kernels takes what rounding may change, and nothing else."""

import math

import pytest
import torch
from dsa_sparse_attn_bwd import reference

from tests.dsa_sparse_attn_bwd import inputs, judge


def call(**options):
    return inputs.operands(60, 40, 90, heads=16, channels=64, **options)


def rounded_once(t):
    """The definition, rounded to the dtypes of the results alone."""
    found = reference.backward(*t, dtype=torch.float64)
    return tuple(r.to(like.dtype) for r, like in zip(found, (t.q, t.kv, t.sinks), strict=True))


def test_the_definition_is_right():
    t = call()
    judge.assert_right(rounded_once(t), t)
    judge.assert_right(rounded_once(inputs.with_tail(t, 16)), inputs.with_tail(t, 16))


@pytest.mark.parametrize("sink", [None, -math.inf, -60.0, 60.0, 1e4])
def test_the_kernels_mathematics_is_right(sink):
    t = call()
    if sink is not None:
        t.sinks.fill_(sink)
        out, lse = inputs.forward(t.q.double(), t.kv.double(), t.indices, t.sinks.double().clamp(-1e6, 1e6), t.sm_scale)
        t = t._replace(out=out.bfloat16(), lse=lse.float())
    judge.assert_right(judge.rounded(t), t)
    judge.assert_right(judge.rounded(inputs.with_tail(t, 16)), inputs.with_tail(t, 16))


@pytest.mark.parametrize(("queries", "slots", "rows"), [(1, 1, 1), (60, 1, 90), (5, 0, 9), (0, 3, 9), (5, 3, 0)])
def test_small_calls_are_taken(queries, slots, rows):
    t = inputs.operands(queries, slots, rows, heads=16, channels=64)
    judge.assert_right(rounded_once(t), t)


def test_calls_without_slots_must_be_zero():
    t = call()
    t.indices.fill_(-1)
    zeros = torch.zeros_like(t.q), torch.zeros_like(t.kv), torch.zeros_like(t.sinks)
    judge.assert_right(zeros, t)
    for index in range(3):
        wrong = list(zeros)
        wrong[index] = torch.full_like(zeros[index], 1e-20)
        with pytest.raises(AssertionError, match="should be zero"):
            judge.assert_right(tuple(wrong), t)


def no_output(t):
    return rounded_once(t._replace(out=torch.zeros_like(t.out)))


def no_scale_of_dq(t):
    dq, *rest = rounded_once(t)
    return dq / t.sm_scale, *rest


def no_values(t):
    """dkv without p g."""
    dq, dkv, dsinks = rounded_once(t)
    return dq, (dkv - _values(t)).to(dkv.dtype), dsinks


def values_twice(t):
    dq, dkv, dsinks = rounded_once(t)
    return dq, (dkv + _values(t)).to(dkv.dtype), dsinks


def _values(t):
    """The share p g of dkv."""
    valid = (t.indices >= 0) & (t.indices < len(t.kv))
    k = t.kv[t.indices.clamp_min(0).long()].double()
    total = torch.logaddexp(t.lse, t.sinks).double()
    p = torch.exp(t.sm_scale * torch.einsum("shc,skc->shk", t.q.double(), k) - total[..., None])
    of_slots = torch.einsum("shk,shc->skc", p, t.grad_out.double())
    return torch.zeros_like(t.kv, dtype=torch.float64).index_add_(0, t.indices[valid].long(), of_slots[valid])


def no_sinks(t):
    return rounded_once(t._replace(sinks=torch.full_like(t.sinks, -30.0)))


def base_2(t):
    return rounded_once(t._replace(lse=t.lse / math.log(2)))


def scaled_sinks(t):
    dq, dkv, dsinks = rounded_once(t)
    return dq, dkv, dsinks * t.sm_scale


def each_row_once(t):
    """A row that is named twice counts once."""
    first = torch.ones_like(t.indices, dtype=torch.bool)
    for slot in range(1, t.indices.shape[1]):
        first[:, slot] = (t.indices[:, :slot] != t.indices[:, slot, None]).all(dim=1)
    return rounded_once(t._replace(indices=t.indices.where(first, -1)))


def row_0_for_empty_slots(t):
    return rounded_once(t._replace(indices=t.indices.clamp_min(0)))


def last_slot_lost(t):
    return rounded_once(t._replace(indices=t.indices[:, :-1]))


def overwritten_output(t):
    out = t.out.clone()
    out[..., -16:] = out[..., -16:].flip(-1)
    return rounded_once(t._replace(out=out))


WRONG = [
    no_output,
    no_scale_of_dq,
    no_values,
    values_twice,
    no_sinks,
    base_2,
    scaled_sinks,
    each_row_once,
    row_0_for_empty_slots,
    last_slot_lost,
    overwritten_output,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_other_mathematics_fails(wrong):
    t = call()
    with pytest.raises(AssertionError, match=r"rows are wrong|should be zero|error"):
        judge.assert_right(wrong(t), t)


def one_row_larger(t):
    """By 5 %: too little for the norm of the whole to show."""
    t[3, 7] *= 1.05


def one_row_of_a_neighbour(t):
    t[3, 7] = t[3, 8]


def a_band_moved(t):
    t[3, 7, :32] = t[3, 7, 32:].clone()


FAULTS = {
    one_row_larger: "dq: 1 rows are wrong, first row 55",
    one_row_of_a_neighbour: "dq: 1 rows are wrong, first row 55",
    a_band_moved: "dq: 1 rows are wrong, first row 55",
    lambda t: t[1].fill_(1e-30): "dq: 1 should be zero and are not, the first is 1",
    lambda t: t[3, 7, 5:6].fill_(math.nan): "dq: not finite",
    lambda t: t[1, 7, 5:6].fill_(math.inf): "dq: not finite",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_one_wrong_row_fails(fault, message):
    t = call()
    found = rounded_once(t)
    fault(found[0])
    with pytest.raises(AssertionError, match=message):
        judge.assert_right(found, t)


def test_one_wrong_latent_row_fails():
    t = call(empty=0.0)
    found = rounded_once(t)
    found[1][5] *= 1.06
    with pytest.raises(AssertionError, match="dkv: 1 rows are wrong, first row 5:"):
        judge.assert_right(found, t)


def test_a_row_that_nobody_names_must_be_zero():
    t = call()
    t.indices[t.indices == 5] = -1
    found = rounded_once(t)
    judge.assert_right(found, t)
    found[1][5, 3] = 1e-30
    with pytest.raises(AssertionError, match="dkv: 1 should be zero and are not, the first is 5"):
        judge.assert_right(found, t)


@pytest.mark.parametrize("index", range(3))
def test_other_dtypes_and_shapes_fail(index):
    t = call()
    found = list(rounded_once(t))
    for wrong in (found[index].double(), found[index][:-1], found[index].repeat_interleave(2, -1)[..., ::2]):
        with pytest.raises(AssertionError, match=r"float64|shape|strides"):
            judge.assert_right((*found[:index], wrong, *found[index + 1 :]), t)


def test_another_order_of_sums_is_taken():
    """Terms in fp32 in two orders, then rounded."""
    terms = torch.randn(600, 300, 128)
    one, other = (sum(part).bfloat16() for part in (terms.unbind(), terms.flip(0).unbind()))
    assert not torch.equal(one, other)
    judge.assert_reordered(one, other)


@pytest.mark.parametrize("change", [lambda v: v * 1.02, lambda v: v + 0.05, lambda v: v.where(v.abs() > 1, 0.0)])
def test_more_than_another_order_fails(change):
    wanted = (45 * torch.randn(30, 64)).bfloat16()
    found = wanted.clone()
    found[3] = change(found[3])
    with pytest.raises(AssertionError, match="further apart"):
        judge.assert_reordered(found, wanted)
