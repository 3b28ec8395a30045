"""Zero, tiny and huge streams, NaN and infinity, one-hot and absent weights on the GPU, gradients included."""

import pytest
import torch

from tests.mhc_projection import on_gpu

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
TOKENS, ODD_ONE = 200, 77
OTHERS = [i for i in range(TOKENS) if i != ODD_ONE]
FUNCTIONS = {"projection": on_gpu.projection, "connection": on_gpu.connection}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def operands(name, tokens=TOKENS, d=200):
    t = on_gpu.operands(tokens, 4, d)
    return t, on_gpu.cotangents(t, *(on_gpu.PROJECTION if name == "projection" else on_gpu.CONNECTION))


def assert_others_are_untouched(found, clean, what=""):
    """Bit for bit: a token's tile neighbours do not see it."""
    on_gpu.assert_same(on_gpu.of_a_token(found, OTHERS), on_gpu.of_a_token(clean, OTHERS), what)


@each_function
@pytest.mark.parametrize("d", [64, 5120])
def test_a_token_of_zeros(name, d):
    """rstd is eps^-1/2, the logits 0, and the gradient 1e10 times the projected one: large, finite."""
    t, c = operands(name, d=d)
    clean = FUNCTIONS[name](t, c)
    t.x[ODD_ONE] = 0
    found, wanted = FUNCTIONS[name](t, c), on_gpu.exact(t, c)
    assert_others_are_untouched(found, clean)
    assert torch.count_nonzero(found["collapsed"][ODD_ONE]) == torch.count_nonzero(found["grad_pre_mix"][ODD_ONE]) == 0
    if name == "projection":
        assert torch.count_nonzero(found["mixes"][ODD_ONE]) == 0
        assert found["grad_x"][ODD_ONE].abs().max() > 1e8
    on_gpu.assert_accurate(found, wanted, t)
    alone = {key: {"grad_x": r["grad_x"][ODD_ONE, None]} for key, r in (("found", found), ("wanted", wanted))}
    on_gpu.assert_accurate(alone["found"], alone["wanted"], what="the token")


@each_function
def test_nothing_but_zeros(name):
    """The gradient of the weight is 0, not 1e10 times something that was left over."""
    t, c = operands(name)
    t.x.zero_()
    found = FUNCTIONS[name](t, c)
    on_gpu.assert_accurate(found, on_gpu.exact(t, c), t)
    assert torch.count_nonzero(found["grad_weight"]) == 0


@pytest.mark.parametrize(
    ("size", "d"),
    [*((size, d) for size in (1e-30, 1e-12, 1e-10, 1e-5, 1e10, 1e17) for d in (64, 5120)), (1e18, 64), (1e18, 5120)],
)
def test_tiny_and_large_streams(size, d):
    """Where eps counts, where squares underflow, and up to where they are near the end of fp32."""
    t, c = operands("projection", 7, d)
    t = t._replace(x=(t.x.float() * size).to(torch.bfloat16))
    for some in (c, {"mixes": c["mixes"]}):
        on_gpu.assert_accurate(on_gpu.projection(t, some), on_gpu.exact(t, some), t, str(list(some)))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1.0])
def test_other_epsilons(eps):
    t, c = operands("projection")
    on_gpu.assert_accurate(on_gpu.projection(t, c, eps), on_gpu.exact(t, c, rms_eps=eps), t)
    t, c = operands("connection")
    options = {"rms_eps": eps, "hc_eps": eps / 4, "sinkhorn_iters": 2}
    on_gpu.assert_accurate(on_gpu.connection(t, c, **options), on_gpu.exact(t, c, **options), t)


@each_function
def test_streams_whose_squares_overflow(name):
    """Beyond 1e19: 0 or NaN for the logits of that token, and only there."""
    t, c = operands(name)
    clean = FUNCTIONS[name](t, c)
    t.x[ODD_ONE] = 1e20
    found = FUNCTIONS[name](t, c)
    assert_others_are_untouched(found, clean)
    assert found["collapsed"][ODD_ONE].isfinite().all()
    if name == "projection":
        mixes = found["mixes"][ODD_ONE]
        assert torch.all((mixes == 0) | mixes.isnan())


@each_function
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nan_and_infinity_in_the_streams(name, value):
    """They stay in their token; the gradient of the weight meets all tokens."""
    t, c = operands(name)
    clean = FUNCTIONS[name](t, c)
    t.x[ODD_ONE, 1, 3] = value
    found = FUNCTIONS[name](t, c)
    assert_others_are_untouched(found, clean)
    assert not found["collapsed"][ODD_ONE, 3].isfinite()
    assert found["grad_weight"][:, t.x.shape[2] + 3].isnan().all()
    assert not found["grad_pre_mix"][ODD_ONE, 1].isfinite()
    if name == "projection":
        assert found["mixes"][ODD_ONE].isnan().all()
        same = [channel for channel in range(t.x.shape[2]) if channel != 3]
        assert torch.equal(found["collapsed"][ODD_ONE, same], clean["collapsed"][ODD_ONE, same])
    if value != value:
        assert found["grad_x"][ODD_ONE].isnan().all()
    if name == "connection" and value != value:
        assert found["grad_scale"].isnan().all()
        assert found["grad_base"].isnan().all()


@each_function
@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_infinity_in_pre_mix(name, value):
    t, c = operands(name)
    clean = FUNCTIONS[name](t, c)
    t.pre_mix[ODD_ONE, 2] = value
    found = FUNCTIONS[name](t, c)
    assert_others_are_untouched(found, clean)
    assert not found["collapsed"][ODD_ONE].isfinite().any()
    assert not found["grad_x"][ODD_ONE, 2].isfinite().any()
    on_gpu.assert_same({"w": found["grad_weight"]}, {"w": clean["grad_weight"]})
    others = [0, 1, 3]
    assert torch.equal(found["grad_x"][ODD_ONE, others], clean["grad_x"][ODD_ONE, others])


@each_function
@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_infinity_in_the_gradients(name, value):
    """Of the logits or gates, of the collapse: other tokens keep their bits in what belongs to a token."""
    t, c = operands(name)
    clean = FUNCTIONS[name](t, c)
    for which in c:
        spoiled = c | {which: c[which].clone()}
        spoiled[which][ODD_ONE].view(-1)[2] = value
        found = FUNCTIONS[name](t, spoiled)
        assert_others_are_untouched(found, clean, which)
        assert not found["grad_x"][ODD_ONE].isfinite().all(), which
        weight = found["grad_weight"]
        if which == "collapsed":
            on_gpu.assert_same({"w": weight}, {"w": clean["grad_weight"]})
        else:
            assert not weight.isfinite().all(), which


def test_nan_in_the_weight_stays_in_its_logit():
    """Row 5 alone; the gradient of x meets all rows."""
    t, c = operands("projection")
    clean = on_gpu.projection(t, c)
    t.weight[5, 700] = NAN
    found = on_gpu.projection(t, c)
    others = [j for j in range(24) if j != 5]
    assert found["mixes"][:, 5].isnan().all()
    on_gpu.assert_same({"m": found["mixes"][:, others]}, {"m": clean["mixes"][:, others]})
    on_gpu.assert_same({"c": found["collapsed"]}, {"c": clean["collapsed"]})
    assert found["grad_x"][:, 3, 100].isnan().all()


@each_function
def test_one_hot_weights_return_that_stream(name):
    """Exactly; also where the other streams are far larger."""
    t, c = operands(name)
    t.x[:, 1] *= 2.0**40
    for i in range(4):
        t.pre_mix.zero_()[:, i] = 1
        assert torch.equal(FUNCTIONS[name](t, c)["collapsed"], t.x[:, i])


@each_function
def test_without_pre_mix_the_rest_keeps_its_bits(name):
    t, c = operands(name)
    c.pop("collapsed")
    found = FUNCTIONS[name](t._replace(pre_mix=None), c)
    wanted = FUNCTIONS[name](t, c)
    wanted.pop("collapsed")
    on_gpu.assert_same(found, wanted)


def test_signs_and_sizes_of_pre_mix():
    """Negative, zero, far apart: sums that cancel keep the error of fp32."""
    t, c = operands("projection")
    t.pre_mix.normal_()
    t.pre_mix[::3, 1] = 0
    t.pre_mix[1::3] *= torch.tensor([1e4, 1, 1e-4, -1e4], device=on_gpu.DEVICE)
    t.x[2::3, 1] = t.x[2::3, 0]
    t.pre_mix[2::3, 1] = -t.pre_mix[2::3, 0]
    on_gpu.assert_accurate(on_gpu.projection(t, c), on_gpu.exact(t, c), t)
