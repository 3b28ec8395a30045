"""Device memory: what operands may look like, what is written, what is allocated, and that all of it comes back."""

import pytest
import torch
from mhc_projection import hyper_connection_streams, launch, plan

from tests.mhc_projection import inputs, on_gpu
from tests.support import memory
from tests.support.compare import tensors_of, unchanged

pytestmark = pytest.mark.gpu

RAGGED = [(1, 4, 64), (31, 4, 8), (64, 2, 200), (65, 4, 72), (130, 1, 8), (1025, 4, 72), (140, 4, 128)]


def size(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors_of(tensors))


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
def test_poisoned_memory_is_not_seen(sizes, pattern, poison):
    """Neither in results nor in what a kernel leaves for the next one."""
    t = on_gpu.operands(*sizes)
    c = on_gpu.all_cotangents(t)
    wanted = on_gpu.everything(t, c)
    poison(pattern)
    on_gpu.assert_same(on_gpu.everything(t, c), wanted)


def implementation_calls(t, c):
    """The calls of the host side by name: forward and backward of all operators."""
    hc = t.x.shape[1]
    gates = [c[name] for name in on_gpu.GATES]
    mixes, rstd, _ = launch.projection_forward(t.x, t.weight, None, 1e-20)
    saved = (t.x, t.weight, t.scale, t.base, t.pre_mix, mixes.t().contiguous(), rstd)
    return {
        "projection": lambda: launch.projection_forward(t.x, t.weight, t.pre_mix, 1e-20),
        "projection without pre_mix": lambda: launch.projection_forward(t.x, t.weight, None, 1e-20),
        "its backward": lambda: launch.projection_backward(
            t.x, t.weight, t.pre_mix, mixes, rstd, c["mixes"], c["collapsed"], None
        ),
        "its backward, addend": lambda: launch.projection_backward(
            t.x, t.weight, t.pre_mix, mixes, rstd, c["mixes"], c["collapsed"], c["streams"]
        ),
        "gates": lambda: launch.gates_forward(mixes, t.scale, t.base, hc, 20, 1e-6),
        "their backward": lambda: launch.gates_backward(mixes, t.scale, t.base, *gates, hc, 20, 1e-6),
        "connection": lambda: launch.hyper_connection_forward(*t, 1e-20, 1e-6, 20),
        "its backward, gates": lambda: launch.hyper_connection_backward(
            *saved, *gates, c["collapsed"], c["streams"], 1e-6, 20
        ),
    }


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
def test_nothing_is_written_beside_the_buffers(sizes, guarded):
    """Results and workspace lie between sentinels, which the fixture looks at afterwards, and start as NaN."""
    t = on_gpu.operands(*sizes)
    for name, call in implementation_calls(t, on_gpu.all_cotangents(t)).items():
        wanted = call()
        with memory.GuardedAllocations(guarded) as allocations:
            found = call()
        assert allocations.count >= len(wanted), name
        for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
            on_gpu.assert_same({index: got}, {index: want}, name)


def test_inputs_are_not_modified():
    t = on_gpu.operands(1100, 4, 200)
    c = on_gpu.all_cotangents(t)
    with unchanged((*t, *c.values())):
        on_gpu.everything(t, c)


@pytest.mark.parametrize("name", [*inputs.STRIDES, "all streams alike", "all tokens alike", "one value"])
def test_strides_of_the_streams(name):
    t = on_gpu.operands(131, 4, 72)
    c = on_gpu.all_cotangents(t)
    if name in inputs.STRIDES:
        x = inputs.STRIDES[name](t.x)
    else:
        source = inputs.broadcasts(131, 4, 72)[name]
        once = source[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in source.stride())]
        x = once.to(on_gpu.DEVICE).expand(131, 4, 72)
        assert 0 in x.stride()
    wanted = on_gpu.everything(t._replace(x=x.contiguous().clone()), c)
    on_gpu.assert_same(on_gpu.everything(t._replace(x=x), c), wanted)


def test_strides_of_the_parameters():
    t = on_gpu.operands(131, 4, 72)
    c = on_gpu.all_cotangents(t)
    wanted = on_gpu.everything(t, c)
    strided = t._replace(
        weight=t.weight.t().contiguous().t(),
        scale=t.scale.repeat_interleave(2)[::2],
        base=torch.cat((t.base[:1], t.base))[1:],
        pre_mix=t.pre_mix.t().contiguous().t(),
    )
    assert strided.base.data_ptr() % 16
    on_gpu.assert_same(on_gpu.everything(strided, c), wanted)
    sliced = t._replace(weight=torch.cat((t.weight, t.weight), 1)[:, : t.weight.shape[1]])
    on_gpu.assert_same(on_gpu.everything(sliced, c), wanted)
    alike = t._replace(pre_mix=t.pre_mix[:1].expand(131, 4))
    copied = t._replace(pre_mix=alike.pre_mix.contiguous())
    on_gpu.assert_same(on_gpu.everything(alike, c), on_gpu.everything(copied, c))


def test_strides_of_the_gradients():
    """Expanded, as from a sum; transposed; every second element; off by one element."""
    t = on_gpu.operands(131, 4, 72)
    c = on_gpu.all_cotangents(t)
    changes = {
        "expanded": lambda g: torch.ones((), dtype=g.dtype, device=g.device).expand(g.shape),
        "transposed": lambda g: g.mT.contiguous().mT,
        "every second token": lambda g: g.repeat_interleave(2, 0)[::2],
        "base off by one element": lambda g: g.new_empty(g.numel() + 1)[1:].view_as(g).copy_(g),
    }
    for name, change in changes.items():
        changed = {key: change(g) for key, g in c.items()}
        wanted = on_gpu.everything(
            t, {key: g.clone(memory_format=torch.contiguous_format) for key, g in changed.items()}
        )
        on_gpu.assert_same(on_gpu.everything(t, changed), wanted, name)


@pytest.mark.parametrize("stride", [1, 7, 2**33])
def test_the_stride_of_an_axis_of_length_1(stride):
    """It means nothing, whatever it is: of a single token, a single stream, a single logit."""
    one_token = on_gpu.operands(1, 4, 64)
    wild = one_token._replace(
        x=one_token.x.as_strided((1, 4, 64), (stride, 64, 1)),
        pre_mix=one_token.pre_mix.as_strided((1, 4), (stride, 1)),
    )
    c = on_gpu.all_cotangents(one_token)
    strange = {name: g.as_strided(g.shape, (stride, *g.stride()[1:])) for name, g in c.items()}
    on_gpu.assert_same(on_gpu.everything(wild, strange), on_gpu.everything(one_token, c), "one token")
    one_stream = on_gpu.operands(9, 1, 64)
    c = on_gpu.all_cotangents(one_stream)
    wild = one_stream._replace(x=one_stream.x.as_strided((9, 1, 64), (64, stride, 1)))
    strange = c | {"streams": c["streams"].as_strided((9, 1, 64), (64, stride, 1))}
    on_gpu.assert_same(on_gpu.everything(wild, strange), on_gpu.everything(one_stream, c), "one stream")
    one_logit = on_gpu.operands(9, 2, 64, n=1)
    c = on_gpu.cotangents(one_logit, *on_gpu.PROJECTION)
    wanted = on_gpu.projection(one_logit, c)
    for weight in (one_logit.weight, one_logit.weight.bfloat16()):
        wild = one_logit._replace(weight=weight.as_strided((1, 128), (stride, 1)))
        found = on_gpu.projection(wild, c)
        assert torch.equal(found.pop("grad_weight"), wanted["grad_weight"].to(weight.dtype))
        on_gpu.assert_same(found | {"grad_weight": wanted["grad_weight"]}, wanted, "one logit")


def test_leading_dimensions_that_no_view_can_flatten():
    t = on_gpu.operands(35, 4, 72)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    wanted = on_gpu.connection(t, c)
    x = t.x.view(5, 7, 4, 72).transpose(0, 1).contiguous().transpose(0, 1)
    assert not x.is_contiguous()
    shaped = t._replace(x=x, pre_mix=t.pre_mix.view(5, 7, 4))
    found = on_gpu.connection(shaped, {name: g.unflatten(0, (5, 7)) for name, g in c.items()})
    for name, want in wanted.items():
        assert torch.equal(found[name].reshape(want.shape), want), name


def workspace(t, *, backward):
    """Bytes beside the results that the docstrings of `launch` promise not to exceed."""
    tokens, hc, d = t.x.shape
    n = t.weight.shape[0]
    copy_of_weight = 2 * n * hc * d
    if not backward:
        return copy_of_weight + 4 * (n + 1) * tokens * max(1, round(d / 640))
    chunks, blocks = -(-tokens // plan.chunk_size(tokens, hc, d)), -(-d // 64)
    parts_of_weight = 4 * n * hc * d * chunks if chunks > 1 else 0
    gates = 8 * n * -(-tokens // 32) + 8 * hc * (inputs.ITERS - 1) * tokens
    return copy_of_weight + 132 * tokens + 4 + parts_of_weight + 4 * hc * tokens * blocks + gates


@pytest.mark.parametrize("sizes", [(4096, 4, 5120), (1000, 4, 5120), (2500, 2, 200)], ids=str)
def test_peak_memory(sizes):
    """Results and the documented workspace; nothing else of the size of the streams."""
    t = on_gpu.operands(*sizes)
    n = t.weight.shape[0]
    c = on_gpu.all_cotangents(t)
    kept = 4 * (n + 1) * len(t.x)  # mixes and rstd, for the backward
    results, peak = memory.peak_of(lambda: torch.ops.mhc_projection.projection_forward(t.x, t.weight, t.pre_mix, 1e-20))
    assert peak <= size([r for r in results if r.is_cuda]) + workspace(t, backward=False)
    for function, names in ((on_gpu.projection, on_gpu.PROJECTION), (on_gpu.connection, on_gpu.CONNECTION)):
        for more in ((), ("streams",)):
            chosen = {name: c[name] for name in (*names, *more)}
            results, peak = memory.peak_of(lambda f=function, chosen=chosen: f(t, chosen))
            bound = size(results) + kept + max(workspace(t, backward=b) for b in (False, True))
            assert size(results) <= peak <= bound, f"{function.__name__} {more}: {peak}, bound {bound}"


def test_strided_streams_cost_a_copy():
    t = on_gpu.operands(1000, 4, 5120)
    strided = t._replace(x=t.x.transpose(0, 1).contiguous().transpose(0, 1))
    c = on_gpu.cotangents(t, *on_gpu.PROJECTION)
    peaks = [memory.peak_of(lambda operands=operands: on_gpu.projection(operands, c))[1] for operands in (t, strided)]
    assert peaks[0] < peaks[1] <= peaks[0] + 2 * t.x.nbytes


def test_memory_comes_back():
    """Nothing is kept: after 50 calls as much memory is allocated as before them."""
    t = on_gpu.operands(1100, 4, 200)
    c = on_gpu.all_cotangents(t)
    on_gpu.everything(t, c)
    before = memory.allocated()
    for _ in range(50):
        on_gpu.everything(t, c)
    assert memory.allocated() == before


def test_what_is_kept_for_the_backward():
    """Beyond the inputs, n + 1 fp32 numbers a token on the device."""
    t = on_gpu.operands(37).requires_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        hyper_connection_streams(*t, **inputs.OPTIONS)
    given = {v.untyped_storage().data_ptr() for v in t}
    kept = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saved if s.is_cuda}
    assert sum(nbytes for pointer, nbytes in kept.items() if pointer not in given) == 37 * 25 * 4


def test_results_share_no_memory_with_the_operands():
    t = on_gpu.operands(130, 4, 200)
    c = on_gpu.all_cotangents(t)
    given = {v.untyped_storage().data_ptr() for v in (*t, *c.values())}
    found = on_gpu.everything(t, c)
    assert not given & {r.untyped_storage().data_ptr() for r in found.values()}
