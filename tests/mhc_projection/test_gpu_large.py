"""More than 2**31 elements and more than 2**16 tiles of tokens: offsets and grids, forward and backward."""

import pytest
import torch
from mhc_projection import plan, reference

from tests.mhc_projection import inputs, on_gpu
from tests.mhc_projection.inputs import HC_EPS, ITERS, RMS_EPS
from tests.support.compare import error64
from tests.support.memory import free_device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def device_memory():
    with free_device_memory(60):
        yield


def normal(*shape):
    """In bf16, made in parts: the same numbers in fp32 would take twice the memory."""
    made = torch.empty(shape, dtype=BF16, device=on_gpu.DEVICE)
    for part in made.split(max(1, 2**28 // made[0].numel())):
        part.normal_()
    return made


def large(tokens, hc, d):
    t = on_gpu.operands(1, hc, d)
    t = t._replace(x=normal(tokens, hc, d), pre_mix=torch.rand(tokens, hc, device=on_gpu.DEVICE))
    n = inputs.logits(hc)
    shapes = {"mixes": (tokens, n), "pre": (tokens, hc), "post": (tokens, hc), "comb": (tokens, hc, hc)}
    c = {name: torch.randn(shape, device=on_gpu.DEVICE) for name, shape in shapes.items()}
    return t, c | {"collapsed": normal(tokens, d), "streams": normal(tokens, hc, d)}


def edges(tokens, *places):
    """The first tokens, those around the places, and the last."""
    return [slice(0, 70), *(slice(max(0, p - 70), p + 70) for p in places), slice(tokens - 70, tokens)]


def assert_tokens_are_those_alone(function, t, c, found, chosen):
    for index in chosen:
        alone = function(*on_gpu.rows(t, c, index))
        on_gpu.assert_same(on_gpu.of_a_token(found, index), on_gpu.of_a_token(alone, ...), f"tokens {index}")


def assert_sums_are_right(t, c, found):
    """The weight's gradient and the gates', against the definition with its sums in float64."""
    mixes, rstd, _ = reference.projection_forward(t.x, t.weight, None, RMS_EPS)
    gradient = c.get("mixes")
    if gradient is None:
        incoming = [c[name] for name in on_gpu.GATES]
        gradient, *parameters = reference.gates_backward(mixes, t.scale, t.base, *incoming, t.x.shape[1], ITERS, HC_EPS)
        for name, want in zip(("grad_scale", "grad_base"), parameters, strict=True):
            assert error64(found[name], want.double()) <= on_gpu.BOUNDS[name], name
    operands = (t.x, t.weight, None, mixes, rstd, gradient)
    weight = reference.projection_backward(*operands, None, None, need_x=False)[1]
    assert error64(found["grad_weight"], weight.double()) <= on_gpu.BOUNDS["grad_weight"]


@pytest.mark.parametrize("name", ["projection", "connection"])
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streams"])
def test_more_than_two_billion_elements(name, streams):
    """104,960 tokens of 4 x 5120: offsets pass 2**31 at token 104,857, that of the last is 2**31 + 2,088,960."""
    t, c = large(104_960, 4, 5120)
    names = on_gpu.PROJECTION if name == "projection" else on_gpu.CONNECTION
    c = {key: c[key] for key in (*names, *(["streams"] if streams else []))}
    function = getattr(on_gpu, name)
    found = function(t, c)
    assert_tokens_are_those_alone(function, t, c, found, edges(104_960, 52_428, 104_857))
    assert_sums_are_right(t, c, found)


@pytest.mark.parametrize("hc", [1, 4])
def test_more_than_65536_tiles_of_tokens(hc):
    """One token more than 2**16 tiles hold, also in the kernels of the gates and of the sums."""
    tokens = 2**16 * plan.FORWARD_TOKENS + 1
    t, c = large(tokens, hc, 8)
    for function, names in ((on_gpu.projection, on_gpu.PROJECTION), (on_gpu.connection, on_gpu.CONNECTION)):
        chosen = {key: c[key] for key in (*names, "streams")}
        found = function(t, chosen)
        assert_tokens_are_those_alone(function, t, chosen, found, edges(tokens, 2**21, 2**22))
        assert_sums_are_right(t, chosen, found)
        del found


def test_more_than_65536_programs_of_the_gates():
    tokens = 2**16 * plan.GATES["TOKENS"] + 1
    mixes = torch.randn(tokens, 3, device=on_gpu.DEVICE)
    t, c = large(1, 1, 8)
    c = {"pre": mixes[:, :1].clone(), "post": mixes[:, 1:2].clone(), "comb": mixes[:, 2:, None].clone()}
    found = on_gpu.gates(mixes, t.scale, t.base, c, 1)
    for index in edges(tokens, 2**22):
        part = {name: g[index].clone() for name, g in c.items()}
        alone = on_gpu.gates(mixes[index].clone(), t.scale, t.base, part, 1)
        on_gpu.assert_same(on_gpu.of_a_token(found, index), on_gpu.of_a_token(alone, ...), str(index))
    incoming = [c[name] for name in on_gpu.GATES]
    wanted = reference.gates_backward(mixes, t.scale, t.base, *incoming, 1, ITERS, HC_EPS)
    for name, want in zip(("grad_mixes", "grad_scale", "grad_base"), wanted, strict=True):
        assert error64(found[name], want.double()) <= on_gpu.BOUNDS[name], name
