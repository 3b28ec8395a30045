"""The streams handed on, on the GPU: every gradient is bit for bit that of autograd's own sum."""

import pytest
import torch
from mhc_projection import hyper_connection, hyper_connection_streams, mhc_projection, mhc_projection_streams

from tests.mhc_projection import inputs, on_gpu
from tests.support.compare import assert_same_bytes
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SIZES = [(37, 4, 320), (1100, 4, 200), (130, 2, 72), (65, 1, 8), (300, 4, 5120)]
ODD = [-0.0, 0.0, float("nan"), float("inf"), -float("inf"), 2.0**-133, -(2.0**127)]
FUNCTIONS = {"projection": on_gpu.projection, "connection": on_gpu.connection}
NAMES = {"projection": on_gpu.PROJECTION, "connection": on_gpu.CONNECTION}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def run(name, t, c):
    """With the addend in c, and without it."""
    return FUNCTIONS[name](t, c), FUNCTIONS[name](t, {key: g for key, g in c.items() if key != "streams"})


def operands(name, *sizes):
    t = on_gpu.operands(*sizes)
    return t, on_gpu.cotangents(t, *NAMES[name], "streams")


@each_function
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_sum_of_autograd(name, sizes, poison):
    """What autograd adds of two bf16 gradients; everything else as without the addend."""
    t, c = operands(name, *sizes)
    together, alone = run(name, t, c)
    on_gpu.assert_same(together, alone | {"grad_x": alone["grad_x"] + c["streams"]})


@each_function
def test_rounded_twice(name):
    """Among random numbers one rounding of the whole sum differs often: it would not pass for two."""
    t, c = operands(name, 300, 4, 64)
    together, alone = run(name, t, c)
    assert_same_bytes(together["grad_x"], (alone["grad_x"].float() + c["streams"].float()).to(BF16))
    once = on_gpu.exact(t, c)["grad_x"].to(BF16)
    assert (together["grad_x"] != once).float().mean() > 0.01


@each_function
@pytest.mark.parametrize("hidden", ["mixes", "collapsed"])
def test_without_one_of_the_gradients(name, hidden):
    """The addend beside the gradient of the logits or gates alone, and beside that of the collapse alone."""
    t, c = operands(name, 130, 4, 200)
    kept = ("collapsed", "streams") if hidden == "mixes" else (*NAMES[name][:-1], "streams")
    together, alone = run(name, t, {key: c[key] for key in kept})
    on_gpu.assert_same(together, alone | {"grad_x": alone["grad_x"] + c["streams"]})
    assert ("grad_weight" in together) == (hidden != "mixes")
    assert ("grad_pre_mix" in together) == (hidden == "mixes")


@each_function
def test_without_pre_mix(name):
    t, c = operands(name, 130, 4, 200)
    c.pop("collapsed")
    together, alone = run(name, t._replace(pre_mix=None), c)
    on_gpu.assert_same(together, alone | {"grad_x": alone["grad_x"] + c["streams"]})


def odd_numbers(shape):
    count = torch.Size(shape).numel()
    values = torch.tensor(ODD, device=on_gpu.DEVICE).to(BF16)
    return values.repeat(-(-count // len(ODD)))[:count].view(shape)


@each_function
def test_odd_addends(name):
    """NaN, infinities, denormals, and what cancels the gradient exactly: +0, as IEEE has it."""
    t, c = operands(name, 131, 4, 200)
    _, alone = run(name, t, c)
    for addend in (odd_numbers(t.x.shape), -alone["grad_x"]):
        found, wanted = run(name, t, c | {"streams": addend})[0]["grad_x"], alone["grad_x"] + addend
        assert torch.equal(found.isnan(), wanted.isnan())
        assert_same_bytes(found.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert torch.count_nonzero(found) == 0
    assert not found.signbit().any()


def test_zero_gradients_and_signed_zeros():
    """A gradient of +0 beside an addend of -0 gives +0, as in autograd's sum."""
    t, c = operands("projection", 70, 4, 64)
    c = {key: torch.zeros_like(g) for key, g in c.items()}
    c["streams"] = odd_numbers(t.x.shape).nan_to_num(0.0)
    together, alone = run("projection", t, c)
    assert_same_bytes(together["grad_x"], alone["grad_x"] + c["streams"])


@each_function
def test_the_streams_alone(name):
    """x gets the very bits of their gradient, -0 among them; nothing else gets any."""
    t, _ = operands(name, 131, 4, 64)
    addend = odd_numbers(t.x.shape)
    found = FUNCTIONS[name](t, {"streams": addend})
    assert_same_bytes(found["grad_x"], addend)
    assert [key for key in found if key.startswith("grad_")] == ["grad_x"]


def test_the_operator_copies_an_addend_that_is_alone():
    t, addend = on_gpu.operands(131), odd_numbers((131, 4, 64))
    mixes, rstd, _, _ = torch.ops.mhc_projection.projection_forward(t.x, t.weight, None, 1e-20)
    grad_x, grad_weight, _ = torch.ops.mhc_projection.projection_backward(
        t.x, t.weight, None, mixes, rstd, None, None, addend
    )
    assert_same_bytes(grad_x, addend)
    assert grad_x.data_ptr() != addend.data_ptr()
    assert torch.count_nonzero(grad_weight) == 0


@each_function
def test_the_streams_never_read(name):
    """As the function without streams."""
    t, c = operands(name, 130, 4, 200)
    c.pop("streams")
    leaves = t.requires_grad()
    if name == "projection":
        results = mhc_projection_streams(leaves.x, leaves.weight, leaves.pre_mix)
        wanted = on_gpu.projection(t, c)
        grads = torch.autograd.grad(results[:2], (leaves.x, leaves.weight, leaves.pre_mix), list(c.values()))
        names = ("grad_x", "grad_weight", "grad_pre_mix")
    else:
        results = hyper_connection_streams(*leaves, **inputs.OPTIONS)
        wanted = on_gpu.connection(t, c)
        grads = torch.autograd.grad(results[:4], leaves, list(c.values()))
        names = tuple(f"grad_{key}" for key in inputs.Operands._fields)
    for key, grad in zip(names, grads, strict=True):
        assert_same_bytes(grad, wanted[key], key)


def test_several_readers():
    """Autograd sums their gradients first; that sum is the addend. x itself may be read too."""
    t, c = operands("projection", 130, 4, 200)
    factors = [torch.randn_like(t.x) for _ in range(2)]
    plain_c = [c["mixes"], c["collapsed"]]
    x = t.x.clone().requires_grad_()
    *results, streams = mhc_projection_streams(x, t.weight, t.pre_mix)
    (found,) = torch.autograd.grad((*results, *(streams * f for f in factors)), x, (*plain_c, *[c["streams"]] * 2))
    (alone,) = torch.autograd.grad(mhc_projection(x, t.weight, t.pre_mix), x, plain_c)
    assert_same_bytes(found, alone + (factors[0] * c["streams"] + factors[1] * c["streams"]))
    *results, streams = mhc_projection_streams(x, t.weight, t.pre_mix)
    (found,) = torch.autograd.grad((*results, streams, x * factors[0]), x, (*plain_c, *[c["streams"]] * 2))
    assert_same_bytes(found, (alone + c["streams"]) + factors[0] * c["streams"])


@each_function
@pytest.mark.parametrize("layout", [*inputs.STRIDES, "all streams alike", "one value"])
def test_strided_addends(name, layout):
    """Read whatever their strides, and not changed: another branch may share them."""
    t, c = operands(name, 131, 4, 72)
    if layout in inputs.STRIDES:
        addend = inputs.STRIDES[layout](c["streams"])
    else:
        addend = inputs.broadcasts(131, 4, 72)[layout].to(on_gpu.DEVICE)
        addend = addend[:, :1, :1].expand(131, 4, 72) if layout == "one value" else addend[:, :1].expand(131, 4, 72)
        assert 0 in addend.stride()
    before = addend.clone()
    together, alone = run(name, t, c | {"streams": addend})
    on_gpu.assert_same(together, alone | {"grad_x": alone["grad_x"] + before.contiguous()})
    assert torch.equal(addend, before)


FIRST_CALL = """
import torch
from tests.mhc_projection import on_gpu
torch.manual_seed(0)
t = on_gpu.operands(1100, 4, 72)
c = on_gpu.cotangents(t, *on_gpu.PROJECTION, "streams")
addend = c["streams"].clone()
calls = [on_gpu.projection(t, c) for _ in range(3)]
alone = on_gpu.projection(t, {name: c[name] for name in on_gpu.PROJECTION})
for found in calls:
    on_gpu.assert_same(found, alone | {"grad_x": alone["grad_x"] + addend})
assert torch.equal(c["streams"], addend)
print("added once")
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_first_call_of_a_process_adds_once(tmp_path):
    """The one that compiles launches once too; and the addend is not what the result is written to."""
    process = start_python(FIRST_CALL, quit_at_once=True, TRITON_CACHE_DIR=str(tmp_path))
    assert output_of(process, timeout=100) == "added once"


def test_a_whole_sublayer():
    """Gates, collapse and a stream update as a model has them: the same bits as with x in place of the view."""
    t = on_gpu.operands(130, 4, 200)
    grads = []
    for function in (hyper_connection, hyper_connection_streams):
        leaves = t.requires_grad()
        results = function(*leaves, **inputs.OPTIONS)
        pre, post, comb, collapsed = results[:4]
        streams = results[4] if len(results) == 5 else leaves.x
        y = torch.tanh(collapsed.float()).to(BF16)
        old = torch.einsum("tij,tic->tjc", comb.to(BF16), streams)
        updated = post.to(BF16)[..., None] * y[..., None, :] + old
        grads.append(torch.autograd.grad((updated.float() ** 2).sum() + pre.sum(), leaves))
    for field, got, want in zip(inputs.Operands._fields, grads[1], grads[0], strict=True):
        assert torch.count_nonzero(got) > 0
        assert_same_bytes(got, want, field)


def test_writing_to_the_streams_raises():
    t = on_gpu.operands(3).requires_grad()
    streams = mhc_projection_streams(t.x * 1, t.weight, t.pre_mix)[2]
    with pytest.raises(RuntimeError, match="modified inplace"):
        streams.add_(1)
