"""FP8 operators on a device: parts of a backward, buffers of gradients, frozen inputs, compile, checkpoint."""

import pytest
import torch
from hopper_kernels import reference as use_definition
from moe_experts import (
    FP8WeightCache,
    moe_experts_fp8_backward,
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_weight_grad_accumulate,
)
from torch.utils.checkpoint import checkpoint

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_gpu import call, everything, gradients, results, step, sums
from tests.moe_experts.on_gpu import accumulated, each_form
from tests.moe_experts.wrong_counts import assert_device_notices, wrong_counts
from tests.support import launches
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu
SHAPE = (130, 0, 5, 128), 9, 256, 384

WRONG_COUNTS = """
import sys
from tests.moe_experts import fp8_on_gpu, wrong_counts
wrong_counts.report(fp8_on_gpu.call, fp8_on_gpu.operands()[0], *sys.argv[1:])
"""


@each_form
def test_autograd_and_the_halves_of_a_backward_agree(packed):
    t, dout = fp8_on_gpu.operands(*SHAPE, packed=packed)
    s = step(t)
    by_autograd = gradients(t, dout)
    joint = dict(zip(("dx", "dw1", "dw3", "dw2"), moe_experts_fp8_backward(dout, *s.joint, packed), strict=True))
    assert_same_bytes(by_autograd["out"], s.out, "out")
    on_gpu.assert_same(joint, by_autograd, names=["dx", "dw1", "dw2"] if packed else ["dx", "dw1", "dw3", "dw2"])
    parts = results(t, dout)
    assert_same_bytes(parts["dx"], joint["dx"], "dx")
    assert_same_bytes(parts["dw2"].bfloat16(), joint["dw2"], "dw2")
    whole = joint["dw1"] if packed else torch.cat((joint["dw1"], joint["dw3"]), dim=1)
    assert_same_bytes(parts["dw13"].bfloat16(), whole, "dw13")


def _buffers(t, form):
    """Buffers with something in them, and the memory that they lie in."""
    zeros = sums(t)
    found, homes = [], []
    for shape in (z.shape for z in zeros):
        experts, rows, columns = shape
        if form == "contiguous":
            home = torch.randn(shape, device=on_gpu.DEVICE)
            view = home
        elif form == "flat":
            home = torch.randn(experts * rows * columns + 24, device=on_gpu.DEVICE)
            view = home[8:-16].view(shape)
        else:
            home = torch.randn(experts, rows + 3, columns + 8, device=on_gpu.DEVICE)
            view = home[:, :rows, :columns]
        found.append(view)
        homes.append(home)
    return found, homes


@pytest.mark.parametrize("form", ["contiguous", "flat", "pitched"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("parts", [False, True], ids=["joint", "parts"])
def test_buffers_of_gradients(form, accumulate, parts):
    """RN(old + new) or new, nothing between the rows is touched, nor experts without rows where it is added."""
    t, dout = fp8_on_gpu.operands(*SHAPE)
    s, fresh = step(t), results(t, dout)
    (dw13, dw2), homes = _buffers(t, form)
    dw13[1], dw2[1] = float("nan"), float("nan")
    old = [home.clone() for home in homes]
    views = [h.as_strided(v.shape, v.stride(), v.storage_offset()) for h, v in zip(old, (dw13, dw2), strict=True)]
    for view, name in zip(views, ("dw13", "dw2"), strict=True):
        new = view + fresh[name] if accumulate else fresh[name].clone()
        if accumulate:
            new[1] = view[1]
        view.copy_(new)
    if parts:
        dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
        moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=accumulate)
    else:
        dx = moe_experts_fp8_backward_accumulate(dout, *s.joint, dw13, dw2, accumulate=accumulate)
    assert_same_bytes(dx, fresh["dx"], "dx")
    for home, wanted in zip(homes, old, strict=True):
        assert_same_bytes(home, wanted, "buffer")


def test_denormal_sums_stay_or_become_zeros():
    """Those of an expert without rows are left alone."""
    t, dout = fp8_on_gpu.operands(*SHAPE)
    s = step(t)
    (dw13, dw2), _ = _buffers(t, "contiguous")
    for buffer in (dw13, dw2):
        buffer.fill_(1e-39)
    moe_experts_fp8_backward_accumulate(torch.zeros_like(dout), *s.joint, dw13, dw2)
    for buffer in (dw13, dw2):
        assert buffer[1].eq(1e-39).all()
        assert (buffer.eq(1e-39) | buffer.eq(0)).all()


@each_form
def test_gradients_that_are_not_needed_change_nothing(packed):
    t, dout = fp8_on_gpu.operands(*SHAPE, packed=packed)
    whole = gradients(t, dout)
    names = on_gpu.names_of(t)
    for some in ([n] for n in names):
        found = gradients(t, dout, some)
        on_gpu.assert_same(found, whole, str(some), found)
    for left_out in names:
        found = gradients(t, dout, [n for n in names if n != left_out])
        on_gpu.assert_same(found, whole, f"without {left_out}", found)


def test_packed_and_separate_weights_agree():
    t, dout = fp8_on_gpu.operands(*SHAPE)
    fp8_on_gpu.assert_same(results(t.packed(), dout), results(t, dout))


def test_weights_in_place():
    """Halves of a packed weight, slices of experts, and counts with a stride."""
    t, dout = fp8_on_gpu.operands(*SHAPE)
    fp8_on_gpu.assert_same(results(on_gpu.strided(t), dout), results(t, dout))


def test_a_cache_serves_micro_batches():
    t, _dout = fp8_on_gpu.operands(*SHAPE)
    cache = FP8WeightCache()
    for sizes in ([130, 0, 5, 128], [0, 270, 1, 0], [60, 60, 60, 60]):
        part = t._replace(num_tokens_per_expert=torch.tensor(sizes, device=on_gpu.DEVICE))
        assert_same_bytes(step(part, cache.get(*part[1:4])).out, call(*part), str(sizes))


def test_checkpoint():
    t, dout = fp8_on_gpu.operands(*SHAPE)
    wanted = gradients(t, dout)
    found = on_gpu.gradients(t, dout, None, lambda *t: checkpoint(call, *t, use_reentrant=False))
    fp8_on_gpu.assert_same(found, wanted)


@each_form
def test_compiled(packed):
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for groups in ((130, 0, 5, 128), (3, 300, 0, 0), (1, 1, 1, 1)):
        t, dout = fp8_on_gpu.operands(groups, 5, 256, 384, packed=packed)
        found = on_gpu.gradients(t, dout, None, compiled)
        fp8_on_gpu.assert_same(found, gradients(t, dout), str(groups))
    torch._dynamo.reset()


def test_a_forward_without_grad_is_the_same():
    t, _ = fp8_on_gpu.operands(*SHAPE)
    with torch.no_grad():
        without = call(*t)
    leaves = [v.detach().requires_grad_() for v in t[:4]]
    assert_same_bytes(call(*leaves, *t[4:]).detach(), without)


def test_strides_of_the_cotangent():
    """Expanded, transposed, or one element past an aligned address; by autograd and by the operators."""
    t, dout = fp8_on_gpu.operands(*SHAPE)
    offset = dout.new_empty(dout.numel() + 1)[1:].view_as(dout).copy_(dout)
    for other in (dout.new_ones(()).expand(dout.shape), dout.t().contiguous().t(), offset):
        assert not other.is_contiguous() or other.data_ptr() % 16
        fp8_on_gpu.assert_same(everything(t, other), everything(t, other.clone(memory_format=torch.contiguous_format)))


def test_a_cache_is_told_that_weights_have_changed():
    """Old codes until then, and in another memory afterwards, those of the new weights."""
    t, _ = fp8_on_gpu.operands(*SHAPE)
    cache = FP8WeightCache()
    old, out = cache.get(*t[1:4]), call(*t)
    kept = [w.clone() for w in old]
    t.gate_proj.neg_()
    t.down_proj.mul_(2)
    assert_same_bytes(step(t, cache.get(*t[1:4])).out, out, "before it is told")
    cache.invalidate()
    new = cache.get(*t[1:4])
    assert_same_bytes(step(t, new).out, call(*t), "after it is told")
    assert not torch.equal(call(*t)[: t.owned], out[: t.owned])
    for one, before in zip(old, kept, strict=True):
        assert_same_bytes(one, before, "handed out before")
    assert not {w.data_ptr() for w in old} & {w.data_ptr() for w in new}


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(packed, dtype):
    t, dout = fp8_on_gpu.operands(*SHAPE, packed=packed)
    wanted = everything(t, dout)
    with torch.autocast(on_gpu.DEVICE.type, dtype=dtype):
        fp8_on_gpu.assert_same(everything(t, dout), wanted)
        with pytest.raises(ValueError, match=r"^x must have dtype bfloat16, got float32"):
            call(t.x.float(), *t[1:])


@each_form
def test_a_backward_runs_what_its_forward_ran(packed):
    """The definition inside `reference()`, in the backward outside of it too; no kernel is launched then."""
    t, dout = fp8_on_gpu.operands(*SHAPE, packed=packed)
    kernels = gradients(t, dout)
    with use_definition():
        wanted = gradients(t, dout)
    leaves = t.requires_grad()
    with launches.none_allowed():
        with use_definition():
            out = call(*leaves)
        out.backward(dout)
        with use_definition():
            everything(t, dout)
        with pytest.raises(AssertionError, match="was launched"):
            call(*t)
    found = {"out": out.detach()} | accumulated(leaves)
    on_gpu.assert_same(found, wanted)
    assert not all(torch.equal(found[name], kernels[name]) for name in found)


def test_wrong_counts_are_errors_if_the_environment_asks(monkeypatch):
    """In every call, before anything is launched; right ones pass."""
    t, dout = fp8_on_gpu.operands()
    s, buffers = step(t), sums(t)
    wanted = everything(t, dout)
    _, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    second = s.second_half(columns)[1:]
    monkeypatch.setenv("MOE_EXPERTS_CHECK", "1")
    for counts, message in wrong_counts(t):
        bad = t._replace(num_tokens_per_expert=counts)
        for wrong in (
            lambda bad=bad: call(*bad),
            lambda bad=bad: call(*bad.requires_grad()),
            lambda bad=bad: moe_experts_fp8_forward_quantized(bad.x, bad[4], 10.0, *s.weights[:4]),
            lambda bad=bad: moe_experts_fp8_backward(dout, bad[4], *s.joint[1:], False),
            lambda bad=bad: moe_experts_fp8_backward_data(dout, bad[4], *s.data[1:]),
            lambda bad=bad: moe_experts_fp8_backward_accumulate(dout, bad[4], *s.joint[1:], *buffers),
            lambda bad=bad: moe_experts_fp8_weight_grad_accumulate(bad[4], *second, *buffers),
        ):
            with pytest.raises(ValueError, match=f"^num_tokens_per_expert {message}"):
                wrong()
    assert not any(buffer.any() for buffer in buffers)
    fp8_on_gpu.assert_same(everything(t, dout), wanted)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wrong_counts_are_assertions_of_the_device():
    """Noticed when the host waits, in processes of their own: the context is unusable afterwards."""
    assert_device_notices(WRONG_COUNTS, wrong_counts(fp8_on_gpu.operands()[0], [torch.int64]))


def test_counts_of_either_type_and_any_stride():
    t, dout = fp8_on_gpu.operands(*SHAPE)
    wanted, counts = everything(t, dout), t.num_tokens_per_expert
    for other in (counts.int(), counts.int().repeat_interleave(3)[::3], torch.cat((counts[:1], counts)).int()[1:]):
        fp8_on_gpu.assert_same(everything(t._replace(num_tokens_per_expert=other), dout), wanted)


@each_form
@pytest.mark.parametrize("modes", [torch.no_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(packed, modes):
    """The same bytes, and nothing kept where no gradient can flow; buffers too that were made in such a mode."""
    t, dout = fp8_on_gpu.operands(*SHAPE, packed=packed)
    wanted, saved = results(t, dout), []
    with modes(), torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        out = call(*t.requires_grad())
        found = results(t, dout)
    assert not out.requires_grad
    assert not saved
    assert_same_bytes(out, wanted["out"])
    fp8_on_gpu.assert_same(found, wanted)


def _odd(t):
    """The same memory, of which the first axis, of length 1, has an odd stride."""
    assert t.shape[0] == 1
    view = t.as_strided(t.shape, (t.numel() + 1, *t.stride()[1:]))
    assert view.is_contiguous() == t.is_contiguous()
    return view


@pytest.mark.parametrize("what", ["weights", "packed weights", "quantised weights", "buffers"])
def test_one_expert_may_have_any_stride(what):
    t, dout = fp8_on_gpu.operands((130,), 3, packed=what == "packed weights")
    wanted, names = results(t, dout), ("out", "dx", "dw13", "dw2")
    if what.endswith("weights") and what != "quantised weights":
        changed = t._replace(**{name: _odd(getattr(t, name)) for name in on_gpu.names_of(t) if name != "x"})
        fp8_on_gpu.assert_same(results(changed, dout), wanted)
        fp8_on_gpu.assert_same(gradients(changed, dout), gradients(t, dout))
        return
    s, buffers = step(t), sums(t, float("nan"))
    if what == "quantised weights":
        s = step(t, [_odd(w) for w in s.weights])
    else:
        buffers = [_odd(buffer) for buffer in buffers]
    dx, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), *buffers, accumulate=False)
    found = dict(zip(names, (s.out, dx, *buffers), strict=True))
    on_gpu.assert_same(found, wanted, names=names, strides=False)


def test_one_row_may_have_any_stride():
    t, dout = fp8_on_gpu.operands((0, 1), 0)
    found = everything(t._replace(x=_odd(t.x)), _odd(dout))
    on_gpu.assert_same(found, everything(t, dout), strides=False)
