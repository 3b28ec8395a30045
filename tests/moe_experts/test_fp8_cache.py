"""The cache of quantised weights: what it returns, when it quantises, and what it refuses."""

import pytest
import torch
from moe_experts import FP8WeightCache, moe_experts_fp8_backward, moe_experts_fp8_quantize_weights
from moe_experts.fp8 import cache as module

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import gradients, operands, step
from tests.moe_experts.on_cpu import each_form, same

NAMES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def quantised(monkeypatch):
    """The calls that quantise."""
    seen, right = [], module.ops.moe_experts_fp8_quantize_weights
    monkeypatch.setattr(
        module.ops, "moe_experts_fp8_quantize_weights", lambda *a, **k: seen.append(1) or right(*a, **k)
    )
    return seen


def pointers(tensors):
    return [t.data_ptr() for t in tensors]


@each_form
def test_it_quantises_once(form, quantised):
    """Fresh lists of the same tensors, which are those of the function."""
    weights = operands(form)[1:4]
    cache = FP8WeightCache()
    first = cache.get(*weights)
    same(first, moe_experts_fp8_quantize_weights(*weights))
    assert len(quantised) == 1
    kept = list(first)
    first.clear()
    again = cache.get(*weights)
    assert all(one is other for one, other in zip(again, kept, strict=True))
    assert again is not cache.get(*weights)
    assert len(quantised) == 1


def test_invalidate_makes_it_quantise_again(quantised):
    """Until then weights that changed are not noticed, however they changed."""
    t = operands()
    cache = FP8WeightCache()
    first = cache.get(*t[1:4])
    kept = [v.clone() for v in first]
    t.gate_proj.mul_(2)  # noticed by _version, if anyone looked
    t.up_proj.data.mul_(2)
    moved = t.down_proj.clone() * 2
    same(cache.get(t.gate_proj, t.up_proj, moved), kept)
    assert len(quantised) == 1
    cache.invalidate()
    second = cache.get(t.gate_proj, t.up_proj, moved)
    assert len(quantised) == 2
    same(second, moe_experts_fp8_quantize_weights(t.gate_proj, t.up_proj, moved))
    same(first, kept)  # those handed out before stay as they are
    assert not set(pointers(first)) & set(pointers(second))
    cache.invalidate()
    cache.invalidate()


def test_micro_batches_between_two_steps():
    """Bits as without the cache, with another routing each; and as of the old weights until it is told."""
    t, cache = operands(limit=1.0), FP8WeightCache()
    for groups in ((130, 0, 5), (0, 7, 128)):
        other = operands("separate", groups, 3, limit=1.0)._replace(**dict(zip(NAMES, t[1:4], strict=True)))
        dout = inputs.cotangent(other)
        s = step(other, cache.get(*other[1:4]))
        same((s.out, *moe_experts_fp8_backward(dout, *s.joint, False)), gradients(other, dout))
    stale = step(t, cache.get(*t[1:4])).out
    t.gate_proj.neg_()
    assert torch.equal(step(t, cache.get(*t[1:4])).out, stale)
    cache.invalidate()
    assert not torch.equal(step(t, cache.get(*t[1:4])).out, stale)


def test_caches_share_nothing():
    one, other = FP8WeightCache(), FP8WeightCache()
    first, second = operands(), operands()
    same(one.get(*first[1:4]), moe_experts_fp8_quantize_weights(*first[1:4]))
    same(other.get(*second[1:4]), moe_experts_fp8_quantize_weights(*second[1:4]))
    one.invalidate()
    same(other.get(*second[1:4]), moe_experts_fp8_quantize_weights(*second[1:4]))


def test_weights_that_are_not_those():
    """Of another shape, dtype, device or packing than what is cached; those cached are then still there."""
    t = operands()
    gate, up, down = t[1:4]
    cache = FP8WeightCache()
    kept = cache.get(gate, up, down)
    packed = t.packed().gate_proj
    cases = [
        (
            (gate[:2], up, down),
            r"^gate_proj must be bfloat16 of shape \(3, 128, 256\) on cpu, as what",
        ),
        (
            (gate, up[:, :64], down),
            r"^up_proj must be .*, got bfloat16 of shape \(3, 64, 256\) on cpu: call",
        ),
        ((gate, up, down.float()), r"^down_proj must be bfloat16 .*, got float32 of shape \(3, 256, 128\)"),
        ((gate.to("meta"), up, down), r"^gate_proj must be .* on cpu, .* on meta"),
        ((gate, None, down), r"^up_proj must be bfloat16 .*, got None"),
        ((packed, None, down), r"^gate_proj must be .*, got bfloat16 of shape \(3, 256, 256\)"),
    ]
    for weights, message in cases:
        with pytest.raises(ValueError, match=message):
            cache.get(*weights)
        assert pointers(cache.get(gate, up, down)) == pointers(kept)
    cache.invalidate()
    cache.get(packed, None, down)
    with pytest.raises(ValueError, match=r"^gate_proj must be bfloat16 of shape \(3, 256, 256\)"):
        cache.get(gate, up, down)
    with pytest.raises(ValueError, match=r"^up_proj must be None, as what this cache holds, got bfloat16"):
        cache.get(packed, up, down)
    with pytest.raises(TypeError, match=r"^down_proj must be a torch\.Tensor, got NoneType"):
        cache.get(packed, None, None)


def test_what_cannot_be_quantised_is_not_cached():
    gate, up, down = operands()[1:4]
    cache = FP8WeightCache()
    with pytest.raises(ValueError, match=r"^gate_proj must have dtype bfloat16, got float32"):
        cache.get(gate.float(), up, down)
    with pytest.raises(TypeError, match=r"^up_proj must be a torch\.Tensor, got list"):
        cache.get(gate, [1.0], down)
    same(cache.get(gate, up, down), moe_experts_fp8_quantize_weights(gate, up, down))


def test_parameters_are_not_kept_alive():
    """Nor is anything that autograd recorded."""
    t = operands().requires_grad()
    found = FP8WeightCache().get(*t[1:4])
    assert not any(v.requires_grad or v.grad_fn for v in found)
