"""All functions with their gradients against float64 on the GPU: token counts, widths, streams, logits, dtypes."""

import pytest
import torch
from mhc_projection import hyper_connection, mhc_gates, mhc_projection, mhc_projection_streams

from tests.mhc_projection import on_gpu
from tests.mhc_projection.inputs import HC_EPS, ITERS, OPTIONS, RMS_EPS
from tests.support import memory

pytestmark = pytest.mark.gpu

RAGGED = [(1, 4, 64), (37, 4, 320), (130, 4, 200), (77, 2, 192), (5, 1, 8), (3, 4, 5128), (129, 2, 8)]
BF16 = torch.bfloat16


def check(t, what="", *, eager=False):
    """Projection and connection, with pre_mix and without."""
    found = on_gpu.projection(t, c := on_gpu.cotangents(t, *on_gpu.PROJECTION))
    on_gpu.assert_accurate(found, on_gpu.exact(t, c), t, f"{what} projection")
    without, only = t._replace(pre_mix=None), {"mixes": c["mixes"]}
    on_gpu.assert_accurate(on_gpu.projection(without, only), on_gpu.exact(without, only), what=f"{what} no pre_mix")
    found = on_gpu.connection(t, c := on_gpu.cotangents(t, *on_gpu.CONNECTION))
    wanted = on_gpu.exact(t, c)
    on_gpu.assert_accurate(found, wanted, t, f"{what} connection")
    if eager:
        on_gpu.assert_no_worse_than_eager(found, wanted, on_gpu.eager(t, c), what)
    only = {name: c[name] for name in on_gpu.GATES}
    on_gpu.assert_accurate(on_gpu.connection(without, only), on_gpu.exact(without, only), what=f"{what} no pre_mix")


@pytest.mark.parametrize("function", [on_gpu.projection, on_gpu.connection], ids=lambda f: f.__name__)
def test_every_small_token_count(function, poison):
    """1 .. 140: a token's bits are those in the largest batch, sums over tokens are right for each count."""
    t = on_gpu.operands(140, 4, 128)
    c = on_gpu.cotangents(t, *(on_gpu.PROJECTION if function is on_gpu.projection else on_gpu.CONNECTION))
    whole = function(t, c)
    on_gpu.assert_accurate(whole, on_gpu.exact(t, c), t)
    for tokens in range(1, 140):
        part = on_gpu.rows(t, c, slice(tokens))
        found = function(*part)
        what = f"{tokens} tokens"
        on_gpu.assert_same(on_gpu.of_a_token(found, ...), on_gpu.of_a_token(whole, slice(tokens)), what)
        if tokens % 8 in (0, 1, 7):
            on_gpu.assert_accurate(found, on_gpu.exact(*part), part[0], what)


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2049])
def test_token_counts_around_tiles(tokens, poison):
    check(on_gpu.operands(tokens, 4, 200))


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_ragged_sizes(sizes, pattern, poison):
    t = on_gpu.operands(*sizes)
    poison(pattern)
    check(t)


@pytest.mark.parametrize("d", [8, 64, 200, 320, 5128, 5120, 4096, 7168])
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_widths(hc, d):
    check(on_gpu.operands(67, hc, d))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4096, 4, 5120), (1024, 4, 7168), (2048, 4, 4096), (300, 2, 5120)], ids=str)
def test_no_worse_than_the_eager_path(sizes):
    """Nowhere a larger error than the same mathematics in bf16, at the sizes of the models."""
    check(on_gpu.operands(*sizes), eager=True)


@pytest.mark.parametrize("hc", [3, 5, 6, 8])
def test_other_counts_of_streams(hc):
    """The projection takes any; 5 go one by one through shared memory, 6 in threes, 8 in fours."""
    for tokens, d, n in ((70, 136, 24), (1100, 64, 7)):
        t = on_gpu.operands(tokens, hc, d, n=n)
        c = on_gpu.cotangents(t, *on_gpu.PROJECTION)
        on_gpu.assert_accurate(on_gpu.projection(t, c), on_gpu.exact(t, c), t, f"{tokens} tokens")


@pytest.mark.parametrize("n", [1, 3, 23, 31, 32])
def test_counts_of_logits(n, poison):
    """The tile has 32; what is beyond n must not be met, whatever the memory holds."""
    for pattern in memory.PATTERNS:
        for tokens, hc in ((67, 4), (1100, 2), (1, 1)):
            t = on_gpu.operands(tokens, hc, 200, n=n)
            c = on_gpu.cotangents(t, *on_gpu.PROJECTION)
            poison(pattern)
            on_gpu.assert_accurate(on_gpu.projection(t, c), on_gpu.exact(t, c), t, f"{pattern}, {tokens} tokens")


@pytest.mark.parametrize(
    ("hc", "d", "n"), [(4, 64, 24), (4, 512, 24), (2, 64, 8), (1, 8, 3), (8, 128, 32), (1, 2048, 5)]
)
def test_whole_numbers_are_exact(hc, d, n):
    """Streams of +-1 have rstd 1, and nothing but the gradient of x is rounded: a term too much or too few shows."""
    for tokens in (1, 64, 1500):
        t = on_gpu.operands(tokens, hc, d, n=n)
        x = 2 * torch.randint(2, t.x.shape, device=on_gpu.DEVICE) - 1
        weight, pre_mix = (torch.randint(-2, 3, v.shape, device=on_gpu.DEVICE).float() for v in (t.weight, t.pre_mix))
        t = t._replace(x=x.to(BF16), weight=weight, pre_mix=pre_mix)
        c = on_gpu.cotangents(t, *on_gpu.PROJECTION)
        c = {name: torch.randint(-3, 4, g.shape, device=on_gpu.DEVICE).to(g.dtype) for name, g in c.items()}
        found, wanted = on_gpu.projection(t, c), on_gpu.exact(t, c)
        for name, got in found.items():
            assert torch.equal(got, wanted[name].to(got.dtype)), f"{tokens} tokens, {name}"


@pytest.mark.parametrize(("tokens", "hc", "d"), [(37, 4, 320), (1100, 4, 200), (77, 2, 192), (5, 1, 8)])
def test_the_connection_is_its_parts(tokens, hc, d):
    """One operator for both, but the numbers of the projection and then the gates."""
    t = on_gpu.operands(tokens, hc, d)
    pre, post, comb, collapsed = hyper_connection(*t, **OPTIONS)
    mixes, alone = mhc_projection(t.x, t.weight, t.pre_mix, RMS_EPS)
    for got, want in zip((pre, post, comb), mhc_gates(mixes, t.scale, t.base, hc, ITERS, HC_EPS), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    on_gpu.assert_same({"collapsed": collapsed}, {"collapsed": alone})
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION)
    whole = on_gpu.connection(t, c)
    through_gates = on_gpu.gates(mixes, t.scale, t.base, {name: c[name] for name in on_gpu.GATES}, hc)
    parts = on_gpu.projection(t, {"mixes": through_gates["grad_mixes"], "collapsed": c["collapsed"]})
    on_gpu.assert_same({"grad_pre_mix": whole["grad_pre_mix"]}, {"grad_pre_mix": parts["grad_pre_mix"]})
    for name in ("grad_scale", "grad_base"):
        torch.testing.assert_close(whole[name], through_gates[name], rtol=1e-5, atol=1e-5)
    error = (whole["grad_weight"] - parts["grad_weight"]).norm() / parts["grad_weight"].norm()
    assert error.item() < 1e-5
    assert torch.count_nonzero(whole["grad_x"] != parts["grad_x"]) <= max(1, 0.005 * t.x.numel())


def test_dtypes_of_the_parameters():
    """Gradients in the dtype of each; bf16 and float64 weights of the streams count as fp32."""
    t = on_gpu.operands(130, 4, 200)
    narrow = t._replace(**{name: getattr(t, name).to(BF16) for name in ("weight", "scale", "base", "pre_mix")})
    wide = narrow._replace(**{name: getattr(narrow, name).float() for name in ("weight", "scale", "base", "pre_mix")})
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION)
    wanted = on_gpu.connection(wide, c)
    rounded = {name: r.to(BF16) if name.startswith("grad_") else r for name, r in wanted.items()}
    on_gpu.assert_same(on_gpu.connection(narrow, c), rounded, "bf16")
    doubles = wide._replace(pre_mix=wide.pre_mix.double())
    widened = wanted | {"grad_pre_mix": wanted["grad_pre_mix"].double()}
    on_gpu.assert_same(on_gpu.connection(doubles, c), widened, "float64 pre_mix")


@pytest.mark.parametrize("lead", [(), (2, 65), (1, 3, 2), (5, 1)], ids=str)
def test_leading_dimensions(lead):
    """Any number of them: the bits of the flat tokens, in the shape asked for."""
    tokens = torch.Size(lead).numel()
    t = on_gpu.operands(tokens, 4, 72)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    shaped = t._replace(x=t.x.view(*lead, 4, 72), pre_mix=t.pre_mix.view(*lead, 4))
    for names in (on_gpu.CONNECTION, (*on_gpu.CONNECTION, "streams")):
        flat = {name: c[name] for name in names}
        found = on_gpu.connection(shaped, {name: g.view(*lead, *g.shape[1:]) for name, g in flat.items()})
        for name, want in on_gpu.connection(t, flat).items():
            shape = (*lead, *want.shape[1:]) if name in on_gpu.OF_A_TOKEN else want.shape
            assert torch.equal(found[name], want.view(shape)), name


def test_no_tokens(monkeypatch):
    """The definition's shapes, gradients of zero, and no launch."""
    from hopper_kernels.launcher import Launch

    def refuse(self):
        raise AssertionError("something was launched for no tokens")

    t = on_gpu.operands(0, 4, 64)
    c = on_gpu.all_cotangents(t)
    wanted = on_gpu.definition(on_gpu.everything, t, c)
    monkeypatch.setattr(Launch, "run", refuse)
    found = on_gpu.everything(t, c)
    on_gpu.assert_same(found, wanted)
    assert not any(torch.count_nonzero(r) for r in found.values())


def test_the_streams_are_a_view():
    t = on_gpu.operands(5)
    streams = mhc_projection_streams(t.x, t.weight, t.pre_mix)[2]
    assert (streams.data_ptr(), streams.shape, streams.stride()) == (t.x.data_ptr(), t.x.shape, t.x.stride())


def noisy_ones(tokens, hc, d):
    """Everything about 1, so that sums only grow: low bits dropped in each step would add up."""
    t = on_gpu.operands(tokens, hc, d)
    x = 1 + torch.randn(t.x.shape, device=on_gpu.DEVICE) * 2**-9
    return t._replace(x=x.to(BF16), weight=1 + torch.rand_like(t.weight) * 2**-6, pre_mix=1 + t.pre_mix * 2**-9)


def test_long_sums_over_tokens_do_not_drift():
    errors = []
    for tokens in (1024, 65536):
        t = noisy_ones(tokens, 4, 64)
        c = {"mixes": 1 + torch.rand(tokens, 24, device=on_gpu.DEVICE) * 2**-9}
        found, wanted = (f(t, c)["grad_weight"].double() for f in (on_gpu.projection, on_gpu.exact))
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    assert errors[1] <= on_gpu.BOUNDS["grad_weight"] / 10
    assert errors[1] <= 2 * errors[0] + 1e-6, errors


@pytest.mark.parametrize("d", [64, 7168])
def test_long_sums_over_channels_do_not_drift(d):
    t = noisy_ones(67, 4, d)
    c = {
        "mixes": torch.rand(67, 24, device=on_gpu.DEVICE),
        "collapsed": torch.ones(67, d, device=on_gpu.DEVICE).to(BF16),
    }
    found, wanted = on_gpu.projection(t, c), on_gpu.exact(t, c)
    for name in ("mixes", "grad_pre_mix", "grad_weight"):
        error = (found[name].double() - wanted[name]).norm() / wanted[name].norm()
        assert error.item() <= on_gpu.BOUNDS[name], name
