"""What the host side launches, with which tensors, on CPU tensors: the launches are recorded and not run."""

import itertools
import math

import pytest
import torch
from hopper_kernels.launcher import Launch
from mhc_projection import launch, plan
from mhc_projection.arguments import MAX_LOGITS

from tests.mhc_projection import inputs
from tests.mhc_projection.inputs import HC_EPS, ITERS, RMS_EPS
from tests.support.launches import current_tensors

pytest.importorskip("triton")
BF16 = torch.bfloat16
CHUNK = plan.CHUNKS[0]  # that of few tokens


def names(launches):
    return [one.kernel.__name__.removesuffix("_kernel") for one in launches]


def saved(t, n=24):
    tokens = t.x.shape[0]
    return torch.empty(n, tokens), torch.empty(tokens)


def gate_gradients(tokens, hc=4):
    return [torch.empty(tokens, *shape) for shape in ((hc,), (hc,), (hc, hc))]


@pytest.mark.parametrize("with_pre_mix", [True, False])
def test_forwards(launches, with_pre_mix):
    t = inputs.operands(5)
    pre_mix = t.pre_mix if with_pre_mix else None
    launch.projection_forward(t.x, t.weight, pre_mix, RMS_EPS)
    launch.gates_forward(torch.empty(5, 24), t.scale, t.base, 4, ITERS, HC_EPS)
    assert names(launches) == ["projection", "finish", "gates"]
    launches.clear()
    pre, post, comb, collapsed, mixes, rstd = launch.hyper_connection_forward(*t[:4], pre_mix, RMS_EPS, HC_EPS, ITERS)
    assert names(launches) == ["projection", "gates"]
    assert [tuple(r.shape) for r in (pre, post, comb, mixes, rstd)] == [(5, 4), (5, 4), (5, 4, 4), (24, 5), (5,)]
    assert tuple(collapsed.shape) == ((5, 64) if with_pre_mix else (0,))
    projection, gates = launches
    assert projection.options["COLLAPSE"] == with_pre_mix
    assert gates.options["FINISH"]
    assert gates.options["HC"] == 4
    assert gates.args[-3] == ITERS
    assert any(a is mixes for a in gates.args)


def expected_backward(gates, collapsed, tokens, needs):
    """Kernels of `hyper_connection_backward`."""
    need_x, need_weight, need_pre_mix = needs
    wanted = ["gates_backward"] if gates else []
    need_weight, need_pre_mix = need_weight and gates, need_pre_mix and collapsed
    if (gates or collapsed) and (need_x or need_weight or need_pre_mix):
        wanted += ["projection_backward"]
    return wanted + ["sum"] * (gates or (need_weight and tokens > CHUNK) or need_pre_mix)


@pytest.mark.parametrize("tokens", [5, CHUNK, CHUNK + 1])
def test_backwards(launches, tokens):
    """Only what is needed and flows; a sum of the weight's parts from the second chunk of tokens on."""
    t = inputs.operands(tokens, 4, 8)
    g_c, addend = torch.empty(tokens, 8, dtype=BF16), torch.empty_like(t.x)
    for gates, collapsed, with_addend in itertools.product((True, False), repeat=3):
        for needs in itertools.product((True, False), repeat=3):
            launches.clear()
            grads = [None] * 3 if not gates else gate_gradients(tokens)
            given = (*grads, g_c if collapsed else None, addend if with_addend else None)
            found = launch.hyper_connection_backward(*t, *saved(t), *given, HC_EPS, ITERS, *needs)
            assert names(launches) == expected_backward(gates, collapsed, tokens, needs)
            shapes = [v.shape if need else (0,) for v, need in zip(t, (*needs[:2], True, True, needs[2]), strict=True)]
            assert [g.shape for g in found] == shapes
            for one in launches:
                if names([one]) == ["projection_backward"]:
                    flags = ("PROJECTION", "COLLAPSE", "NEED_X", "NEED_WEIGHT", "NEED_PRE_MIX", "ADDEND")
                    weight = needs[1] and gates
                    products = gates and (needs[0] or weight)  # else nothing needs q
                    wanted = (products, collapsed, needs[0], weight, needs[2] and collapsed)
                    assert tuple(one.options[f] for f in flags) == (*wanted, needs[0] and with_addend)


def test_the_backward_of_the_projection_prepares_first(launches):
    t = inputs.operands(5)
    mixes, grad_mixes = torch.empty(5, 24), torch.empty(5, 24)
    g_c = torch.empty(5, 64, dtype=BF16)
    for given, wanted in (
        ((grad_mixes, g_c), ["prepare", "projection_backward", "sum"]),
        ((grad_mixes, None), ["prepare", "projection_backward"]),
        ((None, g_c), ["projection_backward", "sum"]),
        ((None, None), []),
    ):
        launches.clear()
        launch.projection_backward(t.x, t.weight, t.pre_mix, mixes, torch.empty(5), *given, None)
        assert names(launches) == wanted


def test_what_does_not_flow_is_zero_without_a_kernel(launches):
    """And without gradients x gets the addend's bits, in memory of its own."""
    t = inputs.operands(5)
    addend = torch.tensor([-0.0, float("nan")]).to(BF16).repeat(640).view(5, 4, 64)
    found = launch.hyper_connection_backward(*t, *saved(t), None, None, None, None, addend, HC_EPS, ITERS)
    assert not launches
    assert found[0].data_ptr() != addend.data_ptr()
    assert torch.equal(found[0].view(torch.int16), addend.view(torch.int16))
    assert not any(g.any() for g in found[1:])
    found = launch.hyper_connection_backward(*t, *saved(t), None, None, None, None, None, HC_EPS, ITERS)
    assert not any(g.any() for g in found)


def test_no_tokens_launch_nothing(launches):
    t = inputs.operands(0)
    launch.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    launch.gates_forward(torch.empty(0, 24), t.scale, t.base, 4, ITERS, HC_EPS)
    results = launch.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)
    assert [tuple(r.shape) for r in results] == [(0, 4), (0, 4), (0, 4, 4), (0, 64), (24, 0), (0,)]
    g_c = torch.empty(0, 64, dtype=BF16)
    mixes, rstd = torch.empty(0, 24), torch.empty(0)
    grads = [
        launch.hyper_connection_backward(*t, mixes.t(), rstd, *gate_gradients(0), g_c, None, HC_EPS, ITERS),
        launch.projection_backward(t.x, t.weight, t.pre_mix, mixes, rstd, mixes, g_c, None),
        launch.gates_backward(mixes, t.scale, t.base, *gate_gradients(0), 4, ITERS, HC_EPS),
    ]
    assert not launches
    assert [g.shape for g in grads[0]] == [v.shape for v in t]
    assert not any(g.any() for group in grads for g in group)


def test_launches_are_on_the_device_of_the_operands(monkeypatch):
    """Every launch, forward and backward, while the device of x or of the mixes is current."""
    entered, seen = current_tensors(monkeypatch), []
    monkeypatch.setattr(Launch, "run", lambda one: seen.append((names([one])[0], entered[-1] if entered else None)))
    t, mixes = inputs.operands(CHUNK + 1, 4, 8), torch.empty(CHUNK + 1, 24)
    by_logit, rstd = saved(t)
    grads, g_c = gate_gradients(CHUNK + 1), torch.empty(CHUNK + 1, 8, dtype=BF16)
    launch.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    launch.projection_backward(t.x, t.weight, t.pre_mix, mixes, rstd, mixes, g_c, None)
    launch.gates_forward(mixes, t.scale, t.base, 4, ITERS, HC_EPS)
    launch.gates_backward(mixes, t.scale, t.base, *grads, 4, ITERS, HC_EPS)
    launch.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS)
    launch.hyper_connection_backward(*t, by_logit, rstd, *grads, g_c, None, HC_EPS, ITERS)
    assert len(seen) == 13
    for name, current in seen:
        assert current is t.x or current is mixes, name


@pytest.mark.parametrize("name", [*inputs.STRIDES, "all streams alike", "all tokens alike", "one value"])
def test_streams_reach_the_kernel_contiguous_and_aligned(name, launches):
    """In place where they are so already."""
    x = inputs.operands(9).x
    x = inputs.STRIDES[name](x) if name in inputs.STRIDES else inputs.broadcasts(9, 4, 64)[name]
    t = inputs.operands(9)
    launch.hyper_connection_forward(x, *t[1:], RMS_EPS, HC_EPS, ITERS)
    base = launches[0].args[0].base
    assert base.is_contiguous()
    assert base.data_ptr() % 16 == 0
    assert torch.equal(base, x)
    launch.hyper_connection_forward(t.x, *t[1:], RMS_EPS, HC_EPS, ITERS)
    assert launches[2].args[0].base is t.x


def run_everything(lead, d):
    """Forwards and backwards of tokens (*lead,): the operands, and all results."""
    t, tokens = inputs.operands(0, 4, d, lead=lead), math.prod(lead)
    mixes, grads = torch.empty(*lead, 24), [torch.empty(*lead, *shape) for shape in ((4,), (4,), (4, 4))]
    by_logit, rstd, g_c = torch.empty(24, tokens), torch.empty(tokens), torch.empty(*lead, d, dtype=BF16)
    pair = t.scale, t.base
    return t, [
        *launch.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS),
        *launch.projection_backward(t.x, t.weight, t.pre_mix, mixes, rstd, mixes, g_c, torch.empty_like(t.x)),
        *launch.gates_forward(mixes, *pair, 4, ITERS, HC_EPS),
        *launch.gates_backward(mixes, *pair, *grads, 4, ITERS, HC_EPS),
        *launch.hyper_connection_forward(*t, RMS_EPS, HC_EPS, ITERS),
        *launch.hyper_connection_backward(*t, by_logit, rstd, *grads[:2], None, g_c, None, HC_EPS, ITERS),
    ]


def described(one):
    """All of a launch but where its tensors are."""
    args = []
    for value in one.args:
        if isinstance(value, torch.Tensor):
            args.append((value.dtype, value.numel()))
        elif hasattr(value, "block_shape"):
            args.append((value.base.dtype, *value.shape, *value.strides, *value.block_shape))
        else:
            args.append(value)
    return one.kernel.__name__, one.grid, args, one.options


@pytest.mark.parametrize("lead", [(), (2, CHUNK), (1, 5), (3, 0)], ids=str)
def test_leading_dimensions_change_no_launch(lead, launches):
    """The kernels see tokens; the operands are taken as they are, and results come with the dimensions."""
    tokens = math.prod(lead)
    _, flat = run_everything((tokens,), 8)
    wanted = [described(one) for one in launches]
    launches.clear()
    t, found = run_everything(lead, 8)
    assert [described(one) for one in launches] == wanted
    assert len(launches) == (13 if tokens else 0)
    assert all(one.args[0].base is t.x for one in launches if names([one])[0].startswith("projection"))
    without = {(tokens,), (24, tokens), (24, 32), (24,), (3,)}  # what has no leading dimensions
    for got, want in zip(found, flat, strict=True):
        assert got.shape == (want.shape if tuple(want.shape) in without else (*lead, *want.shape[1:]))
        assert got.is_contiguous()


@pytest.mark.parametrize(("hc", "group"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 1), (6, 3), (7, 1), (8, 4)])
def test_groups_of_streams_divide_them(hc, group):
    assert plan.group_size(hc) == group


def test_chunks_follow_from_the_sizes_alone():
    """The bits of the weight's gradient do: these choices are part of what a release promises."""
    widths = 4096, 5120, 7168
    found = {tokens: [plan.chunk_size(tokens, 4, d) for d in widths] for tokens in (1, 4096, 8192, 16384, 131_072)}
    assert found == {
        1: [512, 512, 512],
        4096: [1024, 512, 512],
        8192: [1024, 1024, 1024],
        16384: [2048, 2048, 2048],
        131_072: [2048, 2048, 2048],
    }


def test_the_splits_of_the_forward_do_not_depend_on_the_tokens(launches):
    """A token's bits are the same in any batch."""
    for d, splits in ((8, 1), (320, 1), (960, 2), (4096, 6), (5120, 8), (7168, 11)):
        for tokens in (1, 130):
            launches.clear()
            launch.projection_forward(torch.empty(tokens, 4, d, dtype=BF16), torch.empty(24, 4 * d), None, RMS_EPS)
            projection, finish = launches
            assert projection.args[-1] == finish.args[-1] == splits, d


def test_the_kernels_know_the_constants_of_the_plan():
    forward = pytest.importorskip("mhc_projection.kernels.projection")
    backward = pytest.importorskip("mhc_projection.kernels.projection_backward")
    reductions = pytest.importorskip("mhc_projection.kernels.reductions")
    assert {kernel.LOGITS.value for kernel in (forward, backward, reductions)} == {MAX_LOGITS}
    assert {kernel.CHANNELS.value for kernel in (forward, backward)} == {plan.CHANNELS}
    assert backward.TOKENS.value == plan.BACKWARD_TOKENS
    assert forward.SQUARES_SCALE.value == plan.SQUARES_SCALE
    assert math.log2(plan.SQUARES_SCALE).is_integer()  # scaling rounds nothing
