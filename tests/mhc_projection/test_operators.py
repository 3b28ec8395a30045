"""The public functions on CPU tensors: forms of the arguments, autograd's corners, autocast, checkpoints."""

import itertools
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from hopper_kernels import reference as use_definition
from mhc_projection import (
    hyper_connection,
    hyper_connection_streams,
    mhc_gates,
    mhc_projection,
    mhc_projection_streams,
    reference,
)
from torch.utils.checkpoint import checkpoint

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import HC_EPS, ITERS, OPTIONS, RMS_EPS, Operands
from tests.support.checkpoints import saving
from tests.support.compare import assert_same_bytes, unchanged
from tests.support.device import other_defaults, repeat_bytes

FUNCTIONS = (hyper_connection, hyper_connection_streams)
each_way = pytest.mark.parametrize("function", [*FUNCTIONS, plain.two_operators], ids=lambda f: f.__name__)
each_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
BF16 = torch.bfloat16


def same(found, wanted, strides=True):
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            assert_same_bytes(got, want, strides=strides)


def definition(t):
    """pre, post, comb, collapsed by the definition, of T tokens."""
    mixes, _, collapsed = reference.projection_forward(t.x, t.weight, t.pre_mix, RMS_EPS)
    gates = reference.gates_forward(mixes, t.scale, t.base, t.x.shape[1], ITERS, HC_EPS)
    return *gates, None if t.pre_mix is None else collapsed


def gradients(function, t, cotangents=None, names=Operands._fields):
    """Gradients of the operands named, with cotangents for all results, by default those of seed 0."""
    t = t.requires_grad(*names)
    results = [r for r in function(*t, **OPTIONS) if r is not None]
    if cotangents is None:
        torch.manual_seed(0)
        cotangents = inputs.cotangents(*results)
    used = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    return torch.autograd.grad([r for r, _ in used], [getattr(t, name) for name in names], [c for _, c in used])


@pytest.mark.parametrize("lead", [(), (1,), (37,), (2, 5), (0,), (3, 0), (1, 3, 2)])
@pytest.mark.parametrize("hc", [1, 2, 4])
def test_leading_dimensions(lead, hc, poison):
    """Any number of them; shapes, dtypes, contents, none of it sharing memory with the inputs."""
    t = inputs.operands(0, hc, 16, lead=lead)
    pre, post, comb, collapsed = hyper_connection(*t, **OPTIONS)
    assert [tuple(r.shape) for r in (pre, post, comb, collapsed)] == [(*lead, hc)] * 2 + [(*lead, hc, hc), (*lead, 16)]
    assert {r.dtype for r in (pre, post, comb)} == {torch.float32}
    assert collapsed.dtype == BF16
    flat = t._replace(x=t.x.reshape(pre[..., 0].numel(), hc, 16), pre_mix=t.pre_mix.reshape(pre[..., 0].numel(), hc))
    for got, want in zip((pre, post, comb, collapsed), definition(flat), strict=True):
        assert_same_bytes(got.reshape(want.shape), want)
    same(hyper_connection_streams(*t, **OPTIONS)[:4], (pre, post, comb, collapsed))


@pytest.mark.parametrize("lead", [(), (2, 5), (3, 0)], ids=str)
@each_way
def test_gradients_have_the_leading_dimensions(function, lead):
    """And the bytes that they have without."""
    t = inputs.operands(0, 4, 16, lead=lead)
    tokens = t.x[..., 0, 0].numel()
    flat = t._replace(x=t.x.reshape(tokens, 4, 16), pre_mix=t.pre_mix.reshape(tokens, 4))
    for operand, got, want in zip(t, gradients(function, t), gradients(function, flat), strict=True):
        assert got.shape == operand.shape
        assert_same_bytes(got.reshape(want.shape), want)


@pytest.mark.parametrize("lead", [(), (2, 5), (3, 0)], ids=str)
def test_gradients_of_the_projections_streams_have_the_leading_dimensions(lead):
    t = inputs.operands(0, 4, 16, lead=lead).requires_grad("x", "pre_mix")
    results = mhc_projection_streams(t.x, t.weight, t.pre_mix)
    wanted = torch.autograd.grad(mhc_projection(t.x, t.weight, t.pre_mix), (t.x, t.pre_mix), results[:2])
    assert [g.shape for g in wanted] == [t.x.shape, t.pre_mix.shape]
    same(torch.autograd.grad(results, (t.x, t.pre_mix), (*results[:2], torch.zeros_like(t.x))), wanted)


@each_function
def test_parts_and_whole(function):
    """hyper_connection is mhc_projection and then mhc_gates; without pre_mix nothing is collapsed."""
    t = inputs.operands(37)
    mixes, collapsed = mhc_projection(t.x, t.weight, t.pre_mix, RMS_EPS)
    gates = mhc_gates(mixes, t.scale, t.base, 4, ITERS, HC_EPS)
    same(function(*t, **OPTIONS)[:4], (*gates, collapsed))
    same(function(*t[:4], **OPTIONS)[:4], (*gates, None))
    same(mhc_projection(t.x, t.weight), (mixes, None))
    assert mhc_gates(mixes[0], t.scale, t.base, 4, ITERS, HC_EPS)[2].shape == (4, 4)


def test_defaults():
    t = inputs.operands(3)
    t.x[1] = 0
    for function in (mhc_projection, mhc_projection_streams):
        same(function(t.x, t.weight)[:2], function(t.x, t.weight, None, 1e-20)[:2])
    (grad,) = torch.autograd.grad(mhc_projection(x := t.x.requires_grad_(), t.weight)[0].sum(), x)
    assert grad[1].abs().max() > 1e8  # eps is 1e-20: rstd of a token of zeros is 1e10
    for option in OPTIONS:
        with pytest.raises(TypeError, match=option):
            hyper_connection(*t, **{k: v for k, v in OPTIONS.items() if k != option})


@each_function
@pytest.mark.parametrize("name", [*inputs.STRIDES, "all streams alike", "all tokens alike", "one value"])
def test_strides_of_x(function, name):
    t = inputs.operands(9)
    x = inputs.STRIDES[name](t.x) if name in inputs.STRIDES else inputs.broadcasts(9, 4, 64)[name]
    t = t._replace(x=x.contiguous())
    before = x.clone()
    same(function(x, *t[1:], **OPTIONS)[:4], function(*t, **OPTIONS)[:4])
    leaf = x.detach().requires_grad_()
    results = function(leaf, *t[1:], **OPTIONS)
    torch.manual_seed(0)
    (grad,) = torch.autograd.grad(results, leaf, inputs.cotangents(*results))
    assert_same_bytes(grad, gradients(function, t, names=("x",))[0], strides=False)
    assert_same_bytes(x, before, strides=False)


@each_function
def test_strides_of_the_parameters(function):
    t = inputs.operands(9)
    strided = t._replace(
        weight=t.weight.t().contiguous().t(),
        scale=t.scale.repeat_interleave(2)[::2],
        base=t.base.repeat_interleave(2)[::2],
        pre_mix=t.pre_mix.t().contiguous().t(),
    )
    same(function(*strided, **OPTIONS)[:4], function(*t, **OPTIONS)[:4])
    same(gradients(function, strided), gradients(function, t), strides=False)
    alike = t._replace(pre_mix=t.pre_mix[:1].expand(9, 4))
    copied = alike._replace(pre_mix=alike.pre_mix.contiguous())
    same(gradients(function, alike), gradients(function, copied), strides=False)


@each_function
def test_dtypes_of_the_parameters(function):
    """Gradients in the dtype of each; bf16 and float64 weights of the streams count as fp32."""
    t = inputs.operands(9)
    narrow = Operands(t.x, *(p.to(BF16) for p in t[1:]))
    wide = Operands(t.x, *(p.float() for p in narrow[1:]))
    same(function(*narrow, **OPTIONS)[:4], function(*wide, **OPTIONS)[:4])
    grads, expected = gradients(function, narrow), gradients(function, wide)
    same(grads, [e.to(BF16) for e in expected])
    doubles = wide._replace(pre_mix=wide.pre_mix.double())
    found = gradients(function, doubles, names=("pre_mix",))[0]
    assert_same_bytes(found, expected[4].double())


@each_function
def test_any_subset_of_inputs_requiring_grad(function):
    """The same bits as with all; without any, results do not require grad."""
    t = inputs.operands(9)
    wanted = dict(zip(Operands._fields, gradients(function, t), strict=True))
    for count in (1, 2, 3, 4):
        for names in itertools.combinations(Operands._fields, count):
            same(gradients(function, t, names=names), [wanted[name] for name in names])
    assert not any(r.requires_grad for r in function(*t, **OPTIONS))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        function(*t, **OPTIONS)
    assert not saved


@each_function
def test_any_subset_of_results_used(function):
    """As with gradients of zero for the others, where autograd's sums tell no difference."""
    t = inputs.operands(9)
    full = [r for r in function(*t, **OPTIONS) if r is not None]
    cotangents = inputs.cotangents(*full)
    for count in range(1, len(full) + 1):
        for used in itertools.combinations(range(len(full)), count):
            leaves = t.requires_grad()
            results = function(*leaves, **OPTIONS)
            found = torch.autograd.grad(
                [results[i] for i in used], leaves, [cotangents[i] for i in used], allow_unused=True
            )
            zeroed = [c if i in used else torch.zeros_like(c) for i, c in enumerate(cotangents)]
            for name, got, want in zip(Operands._fields, found, gradients(function, t, zeroed), strict=True):
                needs = {"x": True, "pre_mix": 3 in used}.get(name, bool({0, 1, 2} & set(used)))
                assert (got is not None) == needs, (name, used)
                assert torch.equal(want if got is None else got, want), (name, used)


@each_function
def test_cotangents_of_any_strides(function):
    """Expanded, as from a sum; transposed; every second element."""
    t = inputs.operands(37)
    results = [r for r in function(*t, **OPTIONS) if r is not None]
    ones = [torch.ones((), dtype=r.dtype).expand(r.shape) for r in results]
    transposed = [c.t().contiguous().t() if c.ndim == 2 else c.mT.contiguous().mT for c in inputs.cotangents(*results)]
    sparse = [c.repeat_interleave(2, 0)[::2] for c in inputs.cotangents(*results)]
    for cotangents in (ones, transposed, sparse):
        assert not all(c.is_contiguous() for c in cotangents)
        wanted = gradients(function, t, [c.contiguous() for c in cotangents])
        same(gradients(function, t, cotangents), wanted)
    leaves = t.requires_grad()
    total = sum(r.sum() for r in function(*leaves, **OPTIONS))
    same(torch.autograd.grad(total, leaves), gradients(function, t, ones))


@each_function
def test_repeats_and_the_reference_context_change_nothing(function):
    t = inputs.operands(37)
    first = repeat_bytes(lambda: (*function(*t, **OPTIONS), *gradients(function, t)), n=3)
    with use_definition():
        same((*function(*t, **OPTIONS), *gradients(function, t)), first)


@each_function
def test_inputs_are_not_modified(function):
    t = inputs.operands(37)
    with unchanged(t):
        cotangents = inputs.cotangents(*(r for r in function(*t, **OPTIONS) if r is not None))
        with unchanged(cotangents):
            gradients(function, t, cotangents)


@each_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(function, dtype):
    t = inputs.operands(37)
    wanted = *function(*t, **OPTIONS), *gradients(function, t)
    with torch.autocast("cpu", dtype):
        found = *function(*t, **OPTIONS), *gradients(function, t)
    same(found, wanted)


@each_function
def test_other_default_device_and_dtype(function):
    t = inputs.operands(37)
    wanted = *function(*t, **OPTIONS), *gradients(function, t)
    cotangents = inputs.cotangents(*function(*t, **OPTIONS))
    wanted = *function(*t, **OPTIONS), *gradients(function, t, cotangents)
    with other_defaults():
        found = *function(*t, **OPTIONS), *gradients(function, t, cotangents)
    same(found, wanted)


@each_function
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(function, use_reentrant):
    t = inputs.operands(37)
    wanted = gradients(function, t)
    leaves = t.requires_grad()
    results = checkpoint(lambda *args: function(*args, **OPTIONS), *leaves, use_reentrant=use_reentrant)
    torch.manual_seed(0)
    torch.autograd.backward(results, inputs.cotangents(*results))
    same([leaf.grad for leaf in leaves], wanted)


@each_way
@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(function, listed, monkeypatch):
    """Policies name the forward operators; saved, they do not run again."""
    calls = []
    names = ["projection_forward", "gates_forward"]
    if function is not plain.two_operators:
        names = ["hyper_connection_forward"]
    for name in names:
        forward = getattr(reference, name)
        run = partial(lambda forward, name, *args: calls.append(name) or forward(*args), forward, name)
        monkeypatch.setattr(reference, name, run)
    saved = [f"mhc_projection::{name}" for name in names] if listed else []
    t = inputs.operands(37)
    wanted = gradients(function, t)
    leaves = t.requires_grad()
    calls.clear()
    results = checkpoint(
        lambda *args: function(*args, **OPTIONS),
        *leaves,
        use_reentrant=False,
        context_fn=saving(*saved),
    )
    torch.manual_seed(0)
    torch.autograd.backward(results, inputs.cotangents(*results))
    assert calls == names * (1 if listed else 2)
    same([leaf.grad for leaf in leaves], wanted)


@each_way
def test_what_is_kept_for_the_backward(function):
    """Beyond the inputs, n + 1 fp32 numbers a token, and a flag for each operator."""
    t = inputs.operands(37).requires_grad()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        results = function(*t, **OPTIONS)
    given = {v.untyped_storage().data_ptr() for v in t}
    kept = {s.untyped_storage().data_ptr(): s.untyped_storage().nbytes() for s in saved}
    extra = sum(size for pointer, size in kept.items() if pointer not in given)
    assert extra == 37 * (24 + 1) * 4 + (2 if function is plain.two_operators else 1)
    assert len(results) == (5 if function is hyper_connection_streams else 4)


@each_function
@pytest.mark.parametrize("result", range(4))
def test_second_order_gradients_raise(function, result):
    """The first one may be asked for with create_graph; differentiating it raises."""
    t = inputs.operands(5).requires_grad()
    (grad,) = torch.autograd.grad(function(*t, **OPTIONS)[result].float().square().sum(), t.x, create_graph=True)
    assert_same_bytes(
        grad.detach(),
        torch.autograd.grad(function(*t, **OPTIONS)[result].float().square().sum(), t.x)[0],
    )
    with pytest.raises(RuntimeError, match="no second-order gradients"):
        grad.float().sum().backward()


def test_forward_mode_derivatives_raise():
    """Rather than lose the tangent."""
    t = inputs.operands(3)
    x, weight = t.x, t.weight.detach()
    mixes = torch.zeros(3, 24)

    def gates(m):
        return mhc_gates(m, t.scale.detach(), t.base.detach(), 4, 2, 1e-6)[0]

    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda w: mhc_projection(x, w)[0], (weight,), (weight,))
    with pytest.raises(RuntimeError):
        torch.func.jacfwd(gates)(mixes)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, weight)
        with pytest.raises(NotImplementedError, match="jvp"):  # what PyTorch says of a Function without one
            mhc_projection(x, dual)


@each_function
def test_no_tokens(function):
    """Gradients of the parameters are zeros, not missing."""
    t = inputs.operands(0)
    grads = gradients(function, t)
    assert [g.shape for g in grads] == [v.shape for v in t]
    assert not any(g.any() for g in grads)


def test_every_small_token_count():
    """1 .. 140, each as the first rows of the largest: gates and collapse to the last bits of fp32."""
    t = inputs.operands(140, 4, 8)
    whole = hyper_connection(*t, **OPTIONS)
    for tokens in range(1, 141):
        part = hyper_connection(t.x[:tokens], *t[1:4], t.pre_mix[:tokens], **OPTIONS)
        for got, want in zip(part[:3], whole[:3], strict=True):
            torch.testing.assert_close(got, want[:tokens], rtol=1e-6, atol=0)
        assert_same_bytes(part[3], whole[3][:tokens])


def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parents[2] / "packages/mhc-projection/README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["streams"].shape == (1, 64, 4, 5120)
    assert scope["pre_mix"].shape == (1, 64, 4)
    scope["streams"].float().sum().backward()
    assert scope["weight"].grad.any()
