"""NaN, infinity, zeros and other odd values: in sinks, in what nobody names, in one query, in queries without slots."""

import math

import pytest
import torch

from tests.dsa_sparse_attn_bwd import inputs, on_gpu
from tests.dsa_sparse_attn_bwd.on_gpu import DEVICE, MODES
from tests.support.compare import assert_same_bytes, error64

pytestmark = pytest.mark.gpu

NAN, INF = math.nan, math.inf
each_mode = pytest.mark.parametrize("deterministic", list(MODES.values()), ids=list(MODES))
each_value = pytest.mark.parametrize("value", [NAN, INF, -INF])


@each_mode
@pytest.mark.parametrize("sink", [-INF, -1e4, -60.0, 0.0, 60.0, 1e4, INF])
def test_one_sink_for_all_heads(sink, deterministic):
    t = on_gpu.operands(133, 70, sinks=torch.full((64,), sink, device=DEVICE))
    dq, dkv, dsinks = on_gpu.assert_right(t, deterministic)
    if sink == INF:
        assert not dq.any()
        assert not dkv.any()
    if sink == -INF:
        assert not dsinks.any()


@each_mode
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("width", [70, 460])
def test_any_sinks_side_by_side(width, heads, deterministic):
    """With outputs that are not the forward's either: at +inf the sink's gradient is the sum of the deltas."""
    values = [-INF, -1e4, -60.0, 0.0, 3.0, 60.0, 1e4, INF]
    sinks = torch.tensor(values, device=DEVICE).repeat(heads // 8)
    t = on_gpu.operands(133, width, heads=heads, sinks=sinks)
    on_gpu.assert_right(t, deterministic)
    other = t._replace(out=on_gpu.normal(*t.out.shape))
    on_gpu.assert_right(other, deterministic)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_other_dtypes(dtype):
    """As in fp32, and their gradient rounded once."""
    t = on_gpu.operands(133, 70)
    t = t._replace(sinks=t.sinks.to(dtype))
    found, wanted = on_gpu.flat(t), on_gpu.flat(t._replace(sinks=t.sinks.float()))
    on_gpu.assert_same(found, (*wanted[:2], wanted[2].to(dtype)))


@each_mode
@each_value
def test_rows_that_nobody_names_are_not_read(value, deterministic):
    """The first and the last one among them, beside empty slots of every kind."""
    t = on_gpu.whole(133, 130, indices=1 + on_gpu.slots(133, 130, 250))
    t.indices[t.indices <= 0] = -1
    t.indices[::3, 7] = len(t.kv)
    wanted = on_gpu.assert_exact(t, deterministic)
    lonely = torch.ones(len(t.kv), dtype=torch.bool, device=DEVICE)
    lonely[t.indices[(t.indices >= 0) & (t.indices < len(t.kv))].long()] = False
    assert lonely[0]
    assert lonely[-1]
    found = on_gpu.flat(t._replace(kv=t.kv.masked_fill(lonely[:, None], value)), deterministic)
    on_gpu.assert_same(found, wanted, ordered=True)
    assert not found[1][lonely].any()


def untouched(t, query):
    """Rows that the query does not name."""
    free = torch.ones(len(t.kv), dtype=torch.bool, device=DEVICE)
    free[t.indices[query][t.indices[query] >= 0].long()] = False
    return free


def assert_contained(found, wanted, t, query, heads):
    """What is not finite is in dq of these heads of the query, in rows that it names, and in their sinks' gradients."""
    (dq, dkv, dsinks), free = found, untouched(t, query)
    others = [head for head in range(t.q.shape[1]) if head not in heads]
    beside = torch.arange(len(t.q), device=DEVICE) != query
    assert_same_bytes(dq[beside], wanted[0][beside], "dq of other queries")
    assert_same_bytes(dq[query, others], wanted[0][query, others], "dq of other heads")
    assert_same_bytes(dsinks[others], wanted[2][others], "dsinks of other heads")
    assert_same_bytes(dkv[free], wanted[1][free], "dkv of other rows")
    assert not dq[query, heads].isfinite().all()
    assert not dkv.isfinite().all()


@each_mode
@each_value
@pytest.mark.parametrize("name", ["q", "grad_out", "out"])
@pytest.mark.parametrize("width", [40, 460])
def test_what_is_not_finite_stays_in_its_query(width, name, value, deterministic):
    """One number of one head. The queries beside it run in the same program and on the same SM."""
    t = on_gpu.whole(270, width, rows=9000, empty=0.2)
    query, head = 135, 4  # has slots, and a head without a sink
    wanted = on_gpu.flat(t, deterministic)
    changed = getattr(t, name).clone()
    changed[query, head, 301] = value
    if name == "out":
        t.grad_out[query, head, 301] = 1
        wanted = on_gpu.flat(t, deterministic)
    found = on_gpu.flat(t._replace(**{name: changed}), deterministic)
    assert_contained(found, wanted, t, query, [head])
    assert found[2][head].isfinite() == (name == "q")


@each_mode
@each_value
def test_a_row_that_is_not_finite_stays_with_those_that_name_it(value, deterministic):
    t = on_gpu.whole(270, 40, rows=9000)
    t.indices[t.indices == 77] = -1
    t.indices[135, 11] = 77
    wanted = on_gpu.flat(t, deterministic)
    kv = t.kv.clone()
    kv[77, 301] = value
    found = on_gpu.flat(t._replace(kv=kv), deterministic)
    assert_contained(found, wanted, t, 135, list(range(64)))
    assert_same_bytes(found[2], wanted[2])


@each_mode
@each_value
@pytest.mark.parametrize("width", [40, 460])
def test_the_numbers_of_queries_without_slots_are_not_looked_at(width, value, deterministic):
    t = on_gpu.whole(270, width, alone=3)
    t.indices[100:240] = -7
    t.indices[50] = len(t.kv)
    alone = ((t.indices < 0) | (t.indices >= len(t.kv))).all(dim=1)
    wanted = on_gpu.assert_exact(t, deterministic)
    odd = {name: getattr(t, name).masked_fill(alone[:, None, None], value) for name in ("q", "grad_out", "out")}
    odd["lse"] = t.lse.masked_fill(alone[:, None], value)
    for names in (*([name] for name in odd), list(odd)):
        found = on_gpu.flat(t._replace(**{name: odd[name] for name in names}), deterministic)
        on_gpu.assert_same(found, wanted, str(names), ordered=True)
        assert not found[0][alone].any()


@each_mode
@pytest.mark.parametrize("width", [40, 460])
def test_only_queries_without_slots(width, deterministic):
    """Exact zeros, whatever else is there."""
    t = on_gpu.operands(270, width, alone=1)
    t.indices[1::2] = len(t.kv)
    t.indices[0] = -(2**31)
    bad = {name: torch.full_like(getattr(t, name), NAN) for name in ("q", "grad_out", "out", "lse", "kv")}
    for call in (t, t._replace(**bad)):
        for result in on_gpu.flat(call, deterministic):
            assert not result.any()


@each_mode
def test_a_gradient_of_zero(deterministic):
    t = on_gpu.operands(133, 70)
    for zero in (torch.zeros_like(t.grad_out), -torch.zeros_like(t.grad_out)):
        for result in on_gpu.flat(t._replace(grad_out=zero), deterministic):
            assert not result.any()


def test_linear_in_the_gradient():
    """Bit for bit for powers of two; the parts of a sum to the error of bf16."""
    t = on_gpu.operands(133, 70)
    wanted = on_gpu.flat(t, True)
    for factor in (2.0, 0.25):
        found = on_gpu.flat(t._replace(grad_out=factor * t.grad_out), True)
        on_gpu.assert_equal(found, [(factor * w).to(w.dtype) for w in wanted], f"{factor} times")
    first = torch.arange(512, device=DEVICE) % 3 == 0
    parts = [on_gpu.flat(t._replace(grad_out=t.grad_out.masked_fill(mask, 0.0)), True) for mask in (first, ~first)]
    for one, other, both in zip(*parts, wanted, strict=True):
        assert error64(one.double() + other.double(), both.double()) < 6e-3


@each_mode
def test_a_gradient_orthogonal_to_rows_and_outputs(deterministic):
    """Leaves nothing for queries and sinks."""
    t = on_gpu.whole(133, 70)
    call = t._replace(out=torch.zeros_like(t.out), grad_out=t.grad_out.clone())
    call.grad_out[..., 1::2] = 0  # rows have odd channels alone
    dq, _, dsinks = on_gpu.assert_exact(call, deterministic)
    assert not dq.any()
    assert not dsinks.any()


@each_mode
@pytest.mark.parametrize("left", [NAN, 77.0])
@pytest.mark.parametrize("channels", [16, 64, 112, 192, 512])
@pytest.mark.parametrize("width", [70, 460])
def test_the_tail_stands_for_the_last_channels_of_the_output(width, channels, left, deterministic):
    """What was overwritten is not looked at. dq and dsinks bit for bit as with the output as it was."""
    t = on_gpu.operands(133, width)
    wanted = on_gpu.flat(t, deterministic)
    tailed = inputs.with_tail(t, channels, left)
    on_gpu.assert_same(on_gpu.flat(tailed, deterministic), wanted, ordered=deterministic)
    inside = t.out[..., -channels:]  # a view, as a caller may have kept it
    on_gpu.assert_same(on_gpu.flat(tailed._replace(out_tail=inside), deterministic), wanted, ordered=deterministic)
    on_gpu.assert_same(on_gpu.batched(tailed, deterministic), wanted, "batched", ordered=deterministic)


def test_an_overwritten_output_without_its_tail_is_another_one():
    """The tail is needed: an output that was rotated in place gives another delta."""
    t = on_gpu.operands(133, 70)
    rotated = t.out.clone()
    rotated[..., -64::2], rotated[..., -63::2] = -t.out[..., -63::2], t.out[..., -64::2]
    wanted = on_gpu.flat(t)
    assert error64(on_gpu.flat(t._replace(out=rotated))[0], wanted[0].double()) > 0.01
    tailed = t._replace(out=rotated, out_tail=t.out[..., -64:].clone())
    on_gpu.assert_same(on_gpu.flat(tailed), wanted)
