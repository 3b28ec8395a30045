"""The operators inside PyTorch, on the GPU: checkpoints, autocast, frozen operands, layouts, wrong counts."""

import functools
import itertools

import pytest
import torch
from hopper_kernels import KernelUnavailable, launcher
from hopper_kernels import reference as use_definition
from moe_experts import (
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
)
from torch.utils.checkpoint import checkpoint

from tests.moe_experts import inputs, on_gpu
from tests.moe_experts.on_gpu import GRADIENTS, accumulated, each_form, layer, small, strided
from tests.moe_experts.wrong_counts import assert_device_notices, wrong_counts
from tests.support import launches, machines
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu

WRONG_COUNTS = """
import sys
from moe_experts import moe_experts
from tests.moe_experts import on_gpu, wrong_counts
wrong_counts.report(moe_experts, on_gpu.operands()[0], *sys.argv[1:])
"""


@each_form
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(packed, use_reentrant):
    t, dout = small(packed=packed)
    checkpointed = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
    wanted = on_gpu.gradients(t, dout, function=layer)
    leaves = t.requires_grad()
    out = checkpointed(*leaves)
    out.backward(dout)
    on_gpu.assert_same({"out": out.detach()} | accumulated(leaves), wanted)


@each_form
def test_any_subset_of_operands_that_require_grad(packed):
    """Frozen operands get no gradient, and change no bit of the others'."""
    t, dout = small(packed=packed)
    names = on_gpu.names_of(t)
    wanted = on_gpu.gradients(t, dout)
    for needed in (some for k in range(1, len(names) + 1) for some in itertools.combinations(names, k)):
        leaves = t.requires_grad(*needed)
        out = moe_experts(*leaves)
        out.backward(dout)
        found = {"out": out.detach()} | accumulated(leaves)
        assert found.keys() == {"out", *(GRADIENTS[name] for name in needed)}
        on_gpu.assert_same(found, wanted, f"gradients of {needed}:", found)


@each_form
def test_gradients_that_are_not_needed_are_not_computed(packed, monkeypatch):
    t, dout = small(packed=packed)
    launched, run = [], launcher.Launch.run
    monkeypatch.setattr(launcher.Launch, "run", lambda one: launched.append(one.kernel.__name__) or run(one))
    products = {}
    for names in (["x"], ["down_proj"], ["gate_proj"], on_gpu.names_of(t)):
        launched.clear()
        on_gpu.gradients(t, dout, names)
        found = [name.removesuffix("_kernel") for name in launched if not name.startswith("groups")]
        products[tuple(names)] = found[2:]  # behind those of the forward
    everything = products.pop(tuple(on_gpu.names_of(t)))
    assert everything == ["grad_hidden", "weight_grad", "product", "weight_grad"]
    assert products == {
        ("x",): ["grad_hidden", "product"],
        ("down_proj",): ["grad_hidden", "weight_grad"],
        ("gate_proj",): ["grad_hidden", "weight_grad"],
    }


@each_form
def test_strides_of_the_cotangent(packed):
    """Expanded, as from a sum; transposed; every second row; off by one element."""
    t, dout = small(packed=packed)
    changes = {
        "one number": torch.ones((), dtype=dout.dtype, device=dout.device).expand(dout.shape),
        "one row": dout[:1].expand(dout.shape),
        "one column": dout[:, :1].nan_to_num().expand(dout.shape),
        "transposed": dout.t().contiguous().t(),
        "every second row": dout.repeat_interleave(2, 0)[::2],
        "off by one element": dout.new_empty(dout.numel() + 1)[1:].view_as(dout).copy_(dout),
    }
    for what, changed in changes.items():
        assert not changed.is_contiguous() or changed.data_ptr() % 16, what
        wanted = on_gpu.everything(t, changed.clone(memory_format=torch.contiguous_format))
        on_gpu.assert_same(on_gpu.everything(t, changed), wanted, what)
    leaves = t.requires_grad()
    moe_experts(*leaves).sum().backward()
    wanted = on_gpu.gradients(t, torch.ones_like(dout))
    del wanted["out"]
    on_gpu.assert_same(accumulated(leaves), wanted, "of a sum")


@each_form
def test_twice_backward_accumulates(packed):
    t, dout = small(packed=packed)
    wanted, leaves = on_gpu.gradients(t, dout), t.requires_grad()
    del wanted["out"]
    out = moe_experts(*leaves)
    for times in (1, 2):
        out.backward(dout, retain_graph=times == 1)
        on_gpu.assert_same(accumulated(leaves), {name: grad * times for name, grad in wanted.items()}, f"{times}")


@each_form
@pytest.mark.parametrize("modes", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(packed, modes):
    """The same bytes, and nothing kept where no gradient can flow."""
    t, _ = small(packed=packed)
    wanted = moe_experts(*t.requires_grad()).detach()
    saved = []
    with modes(), torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s), lambda s: s):
        leaves = t.requires_grad() if modes is not torch.enable_grad else t
        found = moe_experts(*leaves)
    assert not found.requires_grad
    assert not saved
    assert_same_bytes(found, wanted)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(packed, dtype):
    t, dout = small(packed=packed)
    wanted = on_gpu.everything(t, dout)
    with torch.autocast(on_gpu.DEVICE.type, dtype=dtype):
        on_gpu.assert_same(on_gpu.everything(t, dout), wanted)
        with pytest.raises(ValueError, match=r"^x must have dtype bfloat16, got float32"):
            moe_experts(t.x.float(), *t[1:])


@each_form
def test_the_joint_backward_and_its_halves_are_autograds(packed):
    t, dout = small(packed=packed)
    halves, joint, autograds = (f(t, dout) for f in (on_gpu.step, on_gpu.joint, on_gpu.gradients))
    on_gpu.assert_same(halves, joint, "halves", joint)
    on_gpu.assert_same(autograds, joint, "autograd", autograds)
    assert autograds.keys() == joint.keys() - ({"dw3"} if packed else set())
    assert (joint["dw3"].shape == (0,)) == packed


def test_packed_weights_are_separate_weights():
    """Results and gradients: the kernels read a packed weight as two."""
    t, dout = small()
    inner = t.down_proj.shape[2]
    wanted = on_gpu.everything(t, dout)
    found = on_gpu.everything(t.packed(), dout)
    for way in ("", "joint ", "autograd "):
        grad = found.pop(f"{way}dw1")
        assert grad.is_contiguous()
        assert_same_bytes(grad[:, :inner], wanted.pop(f"{way}dw1"), f"{way}dw1", strides=False)
        assert_same_bytes(grad[:, inner:], wanted.pop(f"{way}dw3"), f"{way}dw3", strides=False)
        if way != "autograd ":
            assert found.pop(f"{way}dw3").shape == (0,)
    on_gpu.assert_same(found, wanted, "packed")


@each_form
def test_layouts_of_the_weights(packed):
    """Halves of one tensor and slices of experts have the bits of weights of their own."""
    t, dout = small(packed=packed)
    on_gpu.assert_same(on_gpu.everything(strided(t), dout), on_gpu.everything(t, dout))


def test_counts_of_either_type_and_any_stride():
    t, dout = small()
    wanted, counts = on_gpu.everything(t, dout), t.num_tokens_per_expert
    others = {
        "int32": counts.int(),
        "every second": counts.repeat_interleave(2)[::2],
        "int32, every third": counts.int().repeat_interleave(3)[::3],
        "off by one element": torch.cat((counts[:1], counts))[1:],
        "int32, off by one element": torch.cat((counts[:1], counts)).int()[1:],
    }
    for what, other in others.items():
        on_gpu.assert_same(on_gpu.everything(t._replace(num_tokens_per_expert=other), dout), wanted, what)


def test_wrong_counts_are_errors_if_the_environment_asks(monkeypatch):
    """In every call, before anything is launched; right ones pass."""
    t, dout = small()
    _, gate, up = moe_experts_forward(*t)
    _, dgate_dup, h = moe_experts_backward_data(dout, *t[1:5], gate, up, 1.0)
    monkeypatch.setenv("MOE_EXPERTS_CHECK", "1")
    for counts, message in wrong_counts(t):
        bad = t._replace(num_tokens_per_expert=counts)
        for call in (
            lambda bad=bad: moe_experts(*bad),
            lambda bad=bad: moe_experts(*bad.requires_grad()),
            lambda bad=bad: moe_experts_backward(dout, *bad[:5], gate, up, 1.0),
            lambda bad=bad: moe_experts_backward_data(dout, *bad[1:5], gate, up, 1.0),
            lambda bad=bad: moe_experts_weight_grad(dout, bad.x, bad[4], dgate_dup, h, False),
        ):
            with pytest.raises(ValueError, match=f"^num_tokens_per_expert {message}"):
                call()
    checked = on_gpu.everything(t, dout)
    monkeypatch.delenv("MOE_EXPERTS_CHECK")
    on_gpu.assert_same(checked, on_gpu.everything(t, dout))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_wrong_counts_are_assertions_of_the_device():
    """Noticed when the host waits, in processes of their own: the context is unusable afterwards."""
    assert_device_notices(WRONG_COUNTS, wrong_counts(on_gpu.operands()[0]))


@pytest.mark.parametrize("name", GRADIENTS)
def test_second_order_gradients_raise(name):
    t = small()[0].requires_grad()
    out = moe_experts(*t)
    (grad,) = torch.autograd.grad(out.float().square().sum(), getattr(t, name), create_graph=True)
    with pytest.raises(RuntimeError, match="moe_experts has no second-order gradients"):
        grad.float().sum().backward()


def test_another_architecture():
    """An error that names the device, not the definition in silence; the definition still where it is asked for."""
    t, _ = small()
    wanted = moe_experts(*t)
    with machines.capability(8, 0):
        with pytest.raises(KernelUnavailable, match="moe_experts requires SM90, found SM80"):
            moe_experts(*t)
        with use_definition():
            assert moe_experts(*t).shape == t.x.shape
    assert_same_bytes(moe_experts(*t), wanted)


@each_form
def test_a_backward_runs_what_its_forward_ran(packed):
    """The definition inside `reference()`, in the backward outside of it too; no kernel is launched then."""
    t, dout = small(packed=packed)
    wanted = on_gpu.definition(t, dout)
    moe_experts(*t)
    leaves = t.requires_grad()
    with launches.none_allowed():
        with use_definition():
            out = moe_experts(*leaves)
        out.backward(dout)
        with use_definition():
            on_gpu.everything(t, dout)
        with pytest.raises(AssertionError, match="was launched"):
            moe_experts(*t)
    found = {"out": out.detach()} | accumulated(leaves)
    assert len(found) == 1 + len(on_gpu.names_of(t))
    on_gpu.assert_same(found, wanted, names=found)


@pytest.mark.parametrize("on_cpu", inputs.Operands._fields[:5])
def test_mixed_devices(on_cpu):
    t, _ = small()
    with pytest.raises(ValueError, match="device"):
        moe_experts(*t._replace(**{on_cpu: getattr(t, on_cpu).cpu()}))
