"""The streams handed on to their other readers: every gradient is bit for bit that of autograd's own sum."""

import pytest
import torch
from mhc_projection import hyper_connection, hyper_connection_streams, mhc_projection, mhc_projection_streams, reference

from tests.mhc_projection import inputs
from tests.mhc_projection.inputs import OPTIONS, RMS_EPS
from tests.support.compare import assert_same_bytes

LEAVES = ("x", "weight", "pre_mix")
BF16 = torch.bfloat16


def gradients(t, outputs, cotangents, **options):
    """Gradients of x, weight and pre_mix; None where none flows."""
    return torch.autograd.grad(outputs, (t.x, t.weight, t.pre_mix), cotangents, allow_unused=True, **options)


def assert_same_gradients(found, wanted, leaves=LEAVES):
    for name, got, want in zip(leaves, found, wanted, strict=True):
        assert (got is None) == (want is None), name
        if want is not None:
            assert_same_bytes(got, want, name)


@pytest.mark.parametrize("lead", [(), (37,), (2, 5), (0,), (1, 3, 2)])
@pytest.mark.parametrize("with_pre_mix", [True, False])
def test_results(lead, with_pre_mix):
    """Those without, and a view of x itself."""
    t = inputs.operands(0, lead=lead)
    pre_mix = t.pre_mix if with_pre_mix else None
    mixes, collapsed, streams = mhc_projection_streams(t.x, t.weight, pre_mix)
    wanted = mhc_projection(t.x, t.weight, pre_mix)
    assert_same_bytes(mixes, wanted[0])
    assert (collapsed is None) == (not with_pre_mix) == (wanted[1] is None)
    if with_pre_mix:
        assert_same_bytes(collapsed, wanted[1])
    assert_same_bytes(streams, t.x)
    assert streams.untyped_storage().data_ptr() == t.x.untyped_storage().data_ptr()
    assert streams.storage_offset() == t.x.storage_offset()


@pytest.mark.parametrize("name", ["aligned slice", "streams outermost", "every second token"])
def test_the_view_has_the_strides_of_x(name):
    x = inputs.STRIDES[name](inputs.operands(9).x)
    streams = mhc_projection_streams(x, torch.zeros(24, 256), None)[2]
    assert streams.data_ptr() == x.data_ptr()
    assert streams.stride() == x.stride()


@pytest.mark.parametrize(("tokens", "hc", "d"), [(37, 4, 320), (77, 2, 192), (5, 1, 8), (0, 4, 64)])
def test_one_other_reader(tokens, hc, d):
    """As x read twice: autograd adds two bf16 gradients there."""
    t = inputs.operands(tokens, hc, d).requires_grad(*LEAVES)
    mixes, collapsed, streams = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    other = torch.randn(t.x.shape).to(BF16)
    cotangents = inputs.cotangents(mixes, collapsed)
    found = gradients(t, (mixes, collapsed, (streams * other).sum()), (*cotangents, None))
    plain = mhc_projection(t.x, t.weight, t.pre_mix)
    assert_same_gradients(found, gradients(t, (*plain, (t.x * other).sum()), (*cotangents, None)))


def test_the_sum_is_rounded_twice():
    """bf16(bf16(dX) + addend): among random numbers a single rounding differs often, and never passes."""
    t = inputs.operands(37).requires_grad(*LEAVES)
    mixes, collapsed, streams = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    cotangents = inputs.cotangents(mixes, collapsed)
    addend = torch.randn(37, 4, 64).to(BF16)
    found = gradients(t, (mixes, collapsed, streams), (*cotangents, addend))[0]
    alone = gradients(t, mhc_projection(t.x, t.weight, t.pre_mix), cotangents)[0]
    assert_same_bytes(found, (alone.float() + addend.float()).to(BF16))
    x, pre_mix = t.x.detach().double(), t.pre_mix.detach().double()
    forward = reference.projection_forward(x, t.weight.detach(), pre_mix, RMS_EPS)
    wide = [c.double() for c in cotangents]
    exact = reference.projection_backward(x, t.weight.detach(), pre_mix, *forward[:2], *wide, addend.double())[0]
    assert (found != exact.to(BF16)).float().mean() > 0.01


def test_several_other_readers():
    """Autograd sums their gradients first, in its own order; that sum is the addend."""
    t = inputs.operands(37).requires_grad(*LEAVES)
    mixes, collapsed, streams = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    cotangents = inputs.cotangents(mixes, collapsed)
    factors = [torch.randn(37, 4, 64).to(BF16) for _ in range(2)]
    readers = [(streams * f).sum() for f in factors]
    found = gradients(t, (mixes, collapsed, *readers), (*cotangents, None, None))
    alone = gradients(t, mhc_projection(t.x, t.weight, t.pre_mix), cotangents)
    assert_same_gradients(found, (alone[0] + (factors[0] + factors[1]), *alone[1:]))


def test_the_streams_never_read():
    t = inputs.operands(37).requires_grad(*LEAVES)
    mixes, collapsed, _ = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    cotangents = inputs.cotangents(mixes, collapsed)
    plain = mhc_projection(t.x, t.weight, t.pre_mix)
    assert_same_gradients(gradients(t, (mixes, collapsed), cotangents), gradients(t, plain, cotangents))


ODD = [-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 2.0**-133, -(2.0**127)]


def odd_addend(tokens=3):
    return torch.tensor(ODD).repeat(tokens * 256)[: tokens * 256].view(tokens, 4, 64).to(BF16)


def test_the_streams_alone():
    """x gets the very bits of their gradient, -0 among them; weight and pre_mix get none."""
    t = inputs.operands(3).requires_grad(*LEAVES)
    streams = mhc_projection_streams(t.x, t.weight, t.pre_mix)[2]
    addend = odd_addend()
    assert_same_gradients(gradients(t, streams, addend), (addend, None, None))


def test_the_operator_copies_an_addend_that_is_alone():
    """Its bits, in memory of its own: operators do not return their inputs."""
    t, addend = inputs.operands(3), odd_addend()
    mixes, rstd, _, _ = torch.ops.mhc_projection.projection_forward(t.x, t.weight, None, RMS_EPS)
    grad_x, grad_weight, _ = torch.ops.mhc_projection.projection_backward(
        t.x, t.weight, None, mixes, rstd, None, None, addend
    )
    assert_same_bytes(grad_x, addend)
    assert grad_x.data_ptr() != addend.data_ptr()
    assert not grad_weight.any()


@pytest.mark.parametrize("which", [0, 1])
def test_one_result_and_the_streams(which):
    """A gradient of mixes or of collapsed alone: as autograd adds it, and the other parameter gets none."""
    t = inputs.operands(37).requires_grad(*LEAVES)
    results = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    (cotangent,) = inputs.cotangents(results[which])
    other = torch.randn(37, 4, 64).to(BF16)
    found = gradients(t, (results[which], results[2]), (cotangent, other))
    plain = mhc_projection(t.x, t.weight, t.pre_mix)
    wanted = gradients(t, (plain[which], t.x * 1), (cotangent, other))
    assert_same_gradients(found, wanted)
    assert found[2 - which] is None
    assert found[1 + which] is not None


def test_odd_addends():
    """NaN, infinities, denormals and exact cancellation; +0 + -0 is +0 where the projection's gradient is zero."""
    t = inputs.operands(3)
    t.x[:, 1] = 0
    t = t.requires_grad(*LEAVES)
    zero = torch.zeros(3, 24)
    results, plain = mhc_projection_streams(t.x, t.weight, t.pre_mix), mhc_projection(t.x, t.weight, t.pre_mix)
    for cotangents in ((zero, torch.zeros(3, 64).to(BF16)), inputs.cotangents(*plain)):
        alone = gradients(t, plain, cotangents, retain_graph=True)[0]
        for addend in (odd_addend(), -alone):
            found = gradients(t, results, (*cotangents, addend), retain_graph=True)[0]
            wanted = alone + addend
            assert torch.equal(found.isnan(), wanted.isnan())
            assert_same_bytes(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert not found.any()
    assert not found.signbit().any()


@pytest.mark.parametrize("name", ["aligned slice", "channels outermost", "expanded"])
def test_strided_addends_are_read_and_not_changed(name):
    t = inputs.operands(9).requires_grad(*LEAVES)
    addend = torch.randn(9, 4, 64).to(BF16)
    addend = addend[:1].expand(9, 4, 64) if name == "expanded" else inputs.STRIDES[name](addend)
    before = addend.clone()
    results, plain = mhc_projection_streams(t.x, t.weight, t.pre_mix), mhc_projection(t.x, t.weight, t.pre_mix)
    cotangents = inputs.cotangents(*plain)
    found = gradients(t, results, (*cotangents, addend))
    alone = gradients(t, plain, cotangents)
    assert_same_gradients(found, (alone[0] + before, *alone[1:]))
    assert_same_bytes(addend, before, strides=False)


@pytest.mark.parametrize("name", inputs.STRIDES)
def test_strides_of_x(name):
    t = inputs.operands(9)
    restrided = t._replace(x=inputs.STRIDES[name](t.x).requires_grad_(), weight=t.weight.requires_grad_())
    t = t.requires_grad("x", "weight")
    grads = []
    for one in (t, restrided):
        results = mhc_projection_streams(one.x, one.weight, one.pre_mix)
        torch.manual_seed(0)
        grads.append(torch.autograd.grad(results, (one.x, one.weight), inputs.cotangents(*results)))
    for got, want in zip(grads[1], grads[0], strict=True):
        assert_same_bytes(got, want, strides=False)


def test_leading_dimensions_that_no_view_can_flatten():
    t = inputs.operands(0, lead=(3, 5))
    x = t.x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    plain = t.x.clone().requires_grad_()
    results = mhc_projection_streams(x, t.weight, t.pre_mix)
    wanted = mhc_projection_streams(plain, t.weight, t.pre_mix)
    assert results[2].data_ptr() == x.data_ptr()
    cotangents = inputs.cotangents(*results)
    (found,) = torch.autograd.grad(results, x, cotangents)
    (expected,) = torch.autograd.grad(wanted, plain, cotangents)
    assert_same_bytes(found, expected, strides=False)


def test_without_pre_mix():
    t = inputs.operands(37).requires_grad("x", "weight")
    results = mhc_projection_streams(t.x, t.weight)
    assert results[1] is None
    cotangents = inputs.cotangents(results[0], t.x)
    found = torch.autograd.grad((results[0], results[2]), (t.x, t.weight), cotangents)
    alone = torch.autograd.grad(mhc_projection(t.x, t.weight)[0], (t.x, t.weight), cotangents[0])
    assert_same_bytes(found[0], alone[0] + cotangents[1])
    assert_same_bytes(found[1], alone[1])


def test_writing_to_the_streams_raises():
    t = inputs.operands(3).requires_grad(*LEAVES)
    streams = mhc_projection_streams(t.x * 1, t.weight, t.pre_mix)[2]
    with pytest.raises(RuntimeError, match="modified inplace"):
        streams.add_(1)


@pytest.mark.parametrize("name", ["aligned slice", "streams outermost", "every second token"])
def test_the_view_of_a_connection_is_x(name):
    t = inputs.operands(9)
    x = inputs.STRIDES[name](t.x)
    streams = hyper_connection_streams(x, *t[1:], **OPTIONS)[4]
    assert (streams.data_ptr(), streams.stride(), streams.shape) == (x.data_ptr(), x.stride(), x.shape)


def test_another_reader_of_a_connections_streams():
    """With the gradients of every set of its results, strided ones of the view too: autograd's own sum."""
    t = inputs.operands(9).requires_grad()
    results, plain = hyper_connection_streams(*t, **OPTIONS), hyper_connection(*t, **OPTIONS)
    cotangents = inputs.cotangents(*plain)
    for used in ((0,), (1,), (2,), (3,), (0, 3), (0, 1, 2, 3)):
        for restride in (torch.clone, inputs.STRIDES["aligned slice"], inputs.STRIDES["channels outermost"]):
            addend = restride(torch.randn(9, 4, 64).to(BF16))
            before = addend.clone()
            options = {"allow_unused": True, "retain_graph": True}
            given = [cotangents[i] for i in used]
            found = torch.autograd.grad([*(results[i] for i in used), results[4]], t, [*given, addend], **options)
            alone = torch.autograd.grad([plain[i] for i in used], t, given, **options)
            assert_same_gradients(found, (alone[0] + before.contiguous(), *alone[1:]), inputs.Operands._fields)
            assert_same_bytes(addend, before, strides=False)


def test_a_connections_streams_alone():
    """x gets the very bits of their gradient, the parameters none."""
    addend = odd_addend()
    for names in (inputs.Operands._fields, ("x",)):
        t = inputs.operands(3).requires_grad(*names)
        leaves = [getattr(t, name) for name in names]
        streams = hyper_connection_streams(*t, **OPTIONS)[4]
        found = torch.autograd.grad(streams, leaves, addend, allow_unused=True)
        assert_same_bytes(found[0], addend)
        assert all(g is None for g in found[1:])


def test_a_connections_streams_without_pre_mix():
    t = inputs.operands(37)._replace(pre_mix=None)
    leaves = [v.requires_grad_() for v in t[:4]]
    results, plain = hyper_connection_streams(*leaves, **OPTIONS), hyper_connection(*leaves, **OPTIONS)
    assert results[3] is None
    cotangents = inputs.cotangents(*results)
    found = torch.autograd.grad([r for r in results if r is not None], leaves, cotangents)
    alone = torch.autograd.grad(plain[:3], leaves, cotangents[:3])
    assert_same_bytes(found[0], alone[0] + cotangents[3])
    for got, want in zip(found[1:], alone[1:], strict=True):
        assert_same_bytes(got, want)


def test_writing_to_a_connections_streams_raises():
    t = inputs.operands(3).requires_grad()
    streams = hyper_connection_streams(t.x * 1, *t[1:], **OPTIONS)[4]
    with pytest.raises(RuntimeError, match="modified inplace"):
        streams.add_(1)


def test_a_whole_sublayer():
    """Gates, collapse and a stream update, as a model has them: the same bits as with x in place of the view."""

    def layer(x, rest, function):
        results = function(x, *rest, **OPTIONS)
        streams = results[4] if len(results) == 5 else x
        pre, post, comb, collapsed = results[:4]
        y = torch.tanh(collapsed.float()).to(BF16)
        updated = post.to(BF16)[..., None] * y[..., None, :] + torch.einsum("tij,tic->tjc", comb.to(BF16), streams)
        return (updated.float() ** 2).sum() + pre.sum()

    grads = []
    for function in (hyper_connection, hyper_connection_streams):
        t = inputs.operands(37)
        torch.manual_seed(0)
        t = inputs.operands(37).requires_grad()
        grads.append(torch.autograd.grad(layer(t.x, t[1:], function), t))
    for name, got, want in zip(inputs.Operands._fields, grads[1], grads[0], strict=True):
        assert got.any()
        assert_same_bytes(got, want, name)
