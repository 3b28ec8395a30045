"""The public functions on CPU tensors: forms of the arguments, results, autograd, modes that trainers call them in."""

import inspect

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, reference, sparse_attn_backward_flat
from hopper_kernels import reference as use_definition

from tests.dsa_sparse_attn_bwd import inputs
from tests.dsa_sparse_attn_bwd.inputs import NAMES, Operands, assert_near, assert_same
from tests.support.compare import assert_same_bytes, error64, unchanged
from tests.support.device import deterministic_algorithms, other_defaults, repeat_bytes

SHAPES = [(5, 9, 7), (1, 1, 1), (4, 0, 3), (3, 4, 0), (0, 3, 5)]  # queries, slots, rows
DIFFERENTIABLE = ("grad_out", "q", "kv", "out", "lse", "sinks")


def batched(t):
    return dsa_sparse_attn_backward(**t.batched())


def flat(t):
    return sparse_attn_backward_flat(**t.flat())


FORMS = {"batched": batched, "flat": flat}
each_form = pytest.mark.parametrize("call", FORMS.values(), ids=FORMS)


def test_the_signature_is_that_of_prime_rl():
    """The operator's schema is where a trainer looks for `out_tail`, the ninth argument, before it gives it."""
    parameters = inspect.signature(dsa_sparse_attn_backward).parameters
    assert tuple(parameters) == (*Operands._fields, "deterministic")
    assert (parameters["out_tail"].default, parameters["deterministic"].default) == (None, False)
    arguments = dsa_sparse_attn_backward._opoverload._schema.arguments
    assert [argument.name for argument in arguments] == list(parameters)
    assert arguments[8].name == "out_tail"
    assert str(arguments[8].type) == "Optional[Tensor]"
    assert [argument.default_value for argument in arguments[8:]] == [None, False]
    assert not any(argument.has_default_value() for argument in arguments[:8])


def test_the_signature_of_the_flat_function_is_that_of_cudnn():
    parameters = inspect.signature(sparse_attn_backward_flat).parameters
    first = ["q", "kv", "out", "grad_out", "lse", "indices", "sinks", "sm_scale"]
    assert list(parameters) == [*first, "out_tail", "deterministic"]
    assert (parameters["out_tail"].default, parameters["deterministic"].default) == (None, False)


def test_positions_and_names_are_one():
    t = inputs.with_tail(inputs.small(), 64)
    wanted = batched(t)
    assert_same(dsa_sparse_attn_backward(*t.batched().values()), wanted)
    assert_same(dsa_sparse_attn_backward._opoverload(*t.batched().values()), wanted)
    assert_same(dsa_sparse_attn_backward._opoverload(**t.batched()), wanted)
    assert_same(sparse_attn_backward_flat(*t.flat().values()), flat(t))


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_results(call, dtype, poison):
    """Shapes, dtypes, contiguous, storages of their own and of the exact size: also in memory full of NaN."""
    for shape in SHAPES:
        t = inputs.small(*shape)
        t = t._replace(sinks=t.sinks.to(dtype))
        arguments = t.flat() if call is flat else t.batched()
        results = call(t)
        assert type(results) is tuple
        assert [r.dtype for r in results] == [torch.bfloat16, torch.bfloat16, dtype]
        assert [r.shape for r in results] == [arguments[name].shape for name in ("q", "kv", "sinks")]
        assert all(r.is_contiguous() and r.storage_offset() == 0 for r in results)
        assert all(r.untyped_storage().nbytes() == r.nbytes for r in results)
        owners = [x.untyped_storage().data_ptr() for x in (*t.tensors().values(), *results) if x.numel()]
        assert len(set(owners)) == len(owners)
        assert all(r.isfinite().all() for r in results)


@each_form
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_numbers(call, heads):
    """Those of the definition in float64, once rounded."""
    t = inputs.small(heads=heads)
    wanted = reference.backward(*t)
    assert all(w.any() for w in wanted)
    for name, got, exact, most in zip(NAMES, call(t), wanted, (2**-8, 2**-8, 1e-5), strict=True):
        assert error64(got.reshape(exact.shape), exact) < most, name


@pytest.mark.parametrize("tail", [None, 64])
def test_flat_has_the_bits_of_the_batched_function(tail):
    for shape in SHAPES:
        t = inputs.small(*shape)
        t = t if tail is None else inputs.with_tail(t, tail)
        dq, dkv, dsinks = batched(t)
        assert_same(flat(t), (dq[0], dkv[0, :, 0], dsinks))


@each_form
@pytest.mark.parametrize("channels", [16, 64, 112, 512])
def test_a_tail_stands_for_the_channels_that_were_overwritten(call, channels):
    t = inputs.small()
    wanted = call(t)
    assert_same(call(inputs.with_tail(t, channels)), wanted)


def test_ways_to_give_the_tail():
    """As a keyword, ninth, as a view of a saved output; None is none."""
    t = inputs.small()
    cut, given = inputs.with_tail(t, 64), t.batched()
    del given["out_tail"]
    wanted = dsa_sparse_attn_backward(**given)
    assert_same(dsa_sparse_attn_backward(**given, out_tail=None), wanted)
    tail = given["out"][..., -64:]
    assert not tail.is_contiguous()
    given["out"] = cut.batched()["out"]
    assert_same(dsa_sparse_attn_backward(**given, out_tail=tail), wanted)
    assert_same(dsa_sparse_attn_backward(*given.values(), tail), wanted)
    # In place, as the caller does it: the output is overwritten between saving and calling.
    kept = t.out[..., -64:].clone()
    t.out[..., -64:] = 3.0
    assert not torch.equal(batched(t)[0], wanted[0])
    assert_same(batched(t._replace(out_tail=kept)), wanted)


@each_form
@pytest.mark.parametrize("name", inputs.STRIDES)
def test_strides(call, name):
    """Of one tensor and of all of them."""
    t = inputs.with_tail(inputs.small(), 64)
    wanted, change = call(t), inputs.STRIDES[name]
    for one, value in t.tensors().items():
        assert_near(call(t._replace(**{one: change(value)})), wanted)
    assert_near(call(t.each(change)), wanted)


@each_form
def test_strides_of_0(call):
    """One number, head, query, row or list of slots for all."""
    t = inputs.with_tail(inputs.small(), 64)
    for name, value in t.tensors().items():
        same = value[-1:].expand(value.shape)
        assert same.stride(0) == 0
        assert_near(call(t._replace(**{name: same})), call(t._replace(**{name: same.contiguous()})))
    for one in (t.grad_out[:1, :1, :1], t.grad_out[:, :1], t.grad_out[..., :1]):
        same = one.expand(t.grad_out.shape)
        assert_near(call(t._replace(grad_out=same)), call(t._replace(grad_out=same.contiguous())))


def test_axes_of_length_1_may_have_any_stride():
    t = inputs.small(1, 1, 1)
    wanted = batched(t)
    for stride in (0, 1, 977):
        odd = {}
        for name, value in t.batched().items():
            if isinstance(value, torch.Tensor):
                strides = [stride if size == 1 else old for size, old in zip(value.shape, value.stride(), strict=True)]
                value = value.as_strided(value.shape, strides)
            odd[name] = value
        assert_same(dsa_sparse_attn_backward(**odd), wanted)


@each_form
def test_int64_indices(call):
    """Those beyond 32 bits are empty slots, though their lower halves name rows."""
    t = inputs.small()
    t.indices[0, :4] = torch.tensor([-1, 7, 2**31 - 1, -(2**31)])
    wanted = call(t)
    wide = t._replace(indices=t.indices.long())
    assert_same(call(wide), wanted)
    wide.indices[0, :4] = torch.tensor([2**32, -(2**32) + 1, 2**40 + 2, -(2**63)])
    assert_same(call(wide), wanted)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_of_other_dtypes(call, dtype):
    t = inputs.small()
    t = t._replace(sinks=t.sinks.to(dtype))
    *wanted, wanted_dsinks = call(t._replace(sinks=t.sinks.float()))
    *found, dsinks = call(t)
    assert all(torch.equal(got, want) for got, want in zip(found, wanted, strict=True))
    assert dsinks.dtype == dtype
    torch.testing.assert_close(
        dsinks.float(), wanted_dsinks.to(dtype).float(), rtol=max(1e-6, torch.finfo(dtype).eps), atol=0
    )


@each_form
def test_other_scales(call):
    """An int is a number; each scale has results of its own."""
    t = inputs.small()
    found = [call(t._replace(sm_scale=scale))[0] for scale in (0.0, 0.01, 1, -0.02)]
    assert_same_bytes(call(t._replace(sm_scale=1.0))[0], found[2])
    assert not found[0].any()
    assert not torch.equal(found[1], found[3])


@each_form
def test_inputs_are_not_modified(call):
    t = inputs.with_tail(inputs.small(), 64)
    with unchanged(t):
        call(t)


@each_form
def test_nothing_else_changes_the_bits(call):
    """Repeats, the definition by name, the deterministic mode in either way, defaults of PyTorch."""
    t = inputs.with_tail(inputs.small(), 64)
    wanted = repeat_bytes(lambda: call(t), n=3)
    with use_definition():
        assert_same(call(t), wanted)
    function, arguments = (
        (sparse_attn_backward_flat, t.flat()) if call is flat else (dsa_sparse_attn_backward, t.batched())
    )
    assert_same(function(**arguments, deterministic=True), wanted)
    with deterministic_algorithms():
        assert_same(call(t), wanted)
    with other_defaults():
        assert_same(call(t), wanted)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(call, dtype):
    t = inputs.with_tail(inputs.small(), 64)
    wanted = call(t)
    with torch.autocast("cpu", dtype):
        assert_same(call(t), wanted)


@each_form
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(call, mode):
    t = inputs.with_tail(inputs.small(), 64)
    wanted = call(t)
    with mode():
        assert_same(call(t.each(torch.clone)), wanted)


@each_form
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_order_gradients_raise(call, name):
    """The results are as without; nothing is kept for a backward, which is refused."""
    t = inputs.small()
    leaf = getattr(t, name).clone().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x), lambda x: x):
        results = call(t._replace(**{name: leaf}))
    assert not kept
    assert all(r.requires_grad for r in results)
    assert_same(tuple(r.detach() for r in results), call(t))
    for result in results:
        with pytest.raises(RuntimeError, match=r"^dsa_sparse_attn_bwd has no second-order gradients"):
            result.sum().backward()
    assert leaf.grad is None
    with torch.no_grad():
        assert not any(r.requires_grad for r in call(t._replace(**{name: leaf})))


@each_form
def test_forward_mode_derivatives_raise(call):
    """Rather than lose the tangent."""
    t = inputs.small()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(t.q, t.q)
        with pytest.raises(NotImplementedError, match="jvp"):  # what PyTorch says of a Function without one
            call(t._replace(q=dual))
    with pytest.raises(RuntimeError):
        torch.func.jvp(lambda q: call(t._replace(q=q)), (t.q,), (t.q,))


@each_form
def test_parameters_are_tensors(call):
    t = inputs.small()
    wanted = call(t)
    results = call(t._replace(sinks=torch.nn.Parameter(t.sinks), q=torch.nn.Parameter(t.q)))
    assert_same(tuple(r.detach() for r in results), wanted)
