"""The public function on CPU tensors: forms of the arguments, results, autograd, modes that trainers call it in."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, reference
from hopper_kernels import reference as use_definition
from torch.utils.checkpoint import checkpoint

from tests.dsa_indexer_topk import inputs
from tests.dsa_indexer_topk.inputs import MODES, Arguments
from tests.support.checkpoints import saving
from tests.support.compare import assert_same_bytes, unchanged
from tests.support.device import deterministic_algorithms, other_defaults, repeat_bytes

each_mode = pytest.mark.parametrize("mode", MODES)
TENSORS = ("q", "k", "w", "ks", "ke", "candidates")
DOCUMENTS = (20, 3, 17)


def same(found, wanted):
    for name, got, want in zip(("picks", "blocks"), found, wanted, strict=True):
        assert_same_bytes(got, want, name)


def test_the_signature_is_that_of_prime_rl():
    """Called with positions only, and with names."""
    assert tuple(inspect.signature(dsv41_index_topk).parameters) == Arguments._fields
    a = inputs.arguments(DOCUMENTS, mode="both")
    same(dsv41_index_topk(**a._asdict()), dsv41_index_topk(*a))


@each_mode
@pytest.mark.parametrize("topk", [0, 1, 5])
@pytest.mark.parametrize("topk_blocks", [0, 1, 3])
def test_results(mode, topk, topk_blocks, poison):
    """Shapes, dtypes, contiguous, storages of their own and of the exact size, contents: also in memory full of NaN."""
    for documents in (DOCUMENTS, (1,), ()):
        a = inputs.arguments(documents, mode=mode, topk=topk, topk_blocks=topk_blocks)
        results = dsv41_index_topk(*a)
        assert type(results) is tuple
        assert [t.dtype for t in results] == [torch.int64, torch.int32]
        rows = sum(documents)
        assert [t.shape for t in results] == [(rows, topk), (rows, topk_blocks) if a.emit_candidates else (0, 0)]
        assert all(t.is_contiguous() and t.storage_offset() == 0 for t in results)
        assert [t.untyped_storage().nbytes() for t in results] == [8 * results[0].numel(), 4 * results[1].numel()]
        owners = [t.untyped_storage().data_ptr() for t in (*a, *results) if isinstance(t, torch.Tensor) and t.numel()]
        assert len(set(owners)) == len(owners)
        same(results, reference.index_topk(*a))


@each_mode
@pytest.mark.parametrize("name", inputs.STRIDES)
def test_strides(mode, name):
    """Of one tensor and of all of them; their contents stay."""
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    changed = {t: inputs.STRIDES[name](getattr(a, t)) for t in TENSORS if getattr(a, t) is not None}
    for some in ({}, *({t: value} for t, value in changed.items()), changed):
        strided = a._replace(**some)
        same(dsv41_index_topk(*strided), wanted)
        for t in changed:
            assert_same_bytes(getattr(strided, t), getattr(a, t), t, strides=False)


def test_strides_of_0():
    """One query, key, weight, document or list of candidates for all rows."""
    a = inputs.arguments((9,), mode="both")
    for name in TENSORS:
        t = getattr(a, name)
        expanded = t[-1:].expand(t.shape)
        same(
            dsv41_index_topk(*a._replace(**{name: expanded})),
            dsv41_index_topk(*a._replace(**{name: expanded.contiguous()})),
        )
    alike = a.q[:, :1, :1].expand(a.q.shape)
    same(dsv41_index_topk(*a._replace(q=alike)), dsv41_index_topk(*a._replace(q=alike.contiguous())))


@pytest.mark.parametrize("stride", [0, 1, 7, 977])
def test_a_length_1_axis_may_have_any_stride(stride):
    a = inputs.arguments((3,), mode="both", topk_blocks=1).rows(slice(2, 3))
    wanted = dsv41_index_topk(*a)
    alone = a._replace(
        q=a.q.as_strided((1, 16, 64), (stride, 64, 1), a.q.storage_offset()),
        w=a.w.as_strided((1, 16), (stride, 1), a.w.storage_offset()),
        ks=a.ks.as_strided((1,), (stride,), a.ks.storage_offset()),
        candidates=a.candidates.as_strided((1, 5), (stride, 1), a.candidates.storage_offset()),
    )
    same(dsv41_index_topk(*alone), wanted)


@each_mode
def test_dtypes(mode):
    """int64 bounds and candidates, together or apart, and fp32 weights give the results of the narrow ones."""
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    for names in (("ks",), ("ke",), ("ks", "ke", "candidates")):
        same(dsv41_index_topk(*a._replace(**{n: t.long() for n in names if (t := getattr(a, n)) is not None})), wanted)
    same(dsv41_index_topk(*a._replace(w=a.w.float())), wanted)


def test_fp32_weights_are_not_rounded():
    a = inputs.arguments((200,), topk=3)
    fine = a._replace(w=torch.randn(a.w.shape))
    assert not torch.equal(dsv41_index_topk(*fine)[0], dsv41_index_topk(*fine._replace(w=fine.w.bfloat16()))[0])


@each_mode
def test_repeats_and_the_reference_context_change_nothing(mode):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    first = repeat_bytes(lambda: dsv41_index_topk(*a), n=3)
    with use_definition():
        same(dsv41_index_topk(*a), first)


@each_mode
def test_deterministic_algorithms(mode):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    with deterministic_algorithms():
        same(dsv41_index_topk(*a), wanted)


@each_mode
def test_inputs_are_not_modified(mode):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    with unchanged(a):
        dsv41_index_topk(*a)


@each_mode
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(mode, dtype):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    with torch.autocast("cpu", dtype):
        same(dsv41_index_topk(*a), wanted)


@each_mode
def test_other_default_device_and_dtype(mode):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    with other_defaults():
        same(dsv41_index_topk(*a), wanted)


@each_mode
@pytest.mark.parametrize("modes", [torch.no_grad, torch.enable_grad, torch.inference_mode], ids=lambda m: m.__name__)
def test_gradient_modes(mode, modes):
    a = inputs.arguments(DOCUMENTS, mode=mode)
    wanted = dsv41_index_topk(*a)
    with modes():
        made = [t.clone() if isinstance(t, torch.Tensor) else t for t in a]
        same(dsv41_index_topk(*made), wanted)


def test_no_gradient_flows():
    """Results of operands that require grad do not; nothing is kept for a backward."""
    a = inputs.arguments(DOCUMENTS, mode="both")
    leaves = a._replace(**{name: getattr(a, name).clone().requires_grad_() for name in ("q", "k", "w")})
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        results = dsv41_index_topk(*leaves)
    assert not saved
    assert not any(t.requires_grad for t in results)
    same(results, dsv41_index_topk(*a))


def layer(x, a, runs):
    """Picks from what x makes, and gathers what was picked: x has a gradient through the gathered values alone."""
    picks, blocks = dsv41_index_topk(*a._replace(q=(x * 3).bfloat16()))
    runs.append((picks, blocks))
    values = (x * x).flatten(1)
    return torch.where(picks >= 0, values.gather(1, picks.clamp_min(0)), 0.0).sum()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_by_a_checkpoint(use_reentrant):
    """The very same picks in the recomputed forward, of scores with many ties, and gradients as without."""
    a, runs = inputs.arguments(DOCUMENTS, mode="source", numbers=inputs.whole_numbers), []
    plain, checkpointed = (a.q.float().clone().requires_grad_() for _ in range(2))
    layer(plain, a, runs).backward()
    checkpoint(layer, checkpointed, a, runs, use_reentrant=use_reentrant).backward()
    assert len(runs) == 3
    for again in runs[1:]:
        same(again, runs[0])
    assert_same_bytes(checkpointed.grad, plain.grad)


@pytest.mark.parametrize("listed", [True, False])
def test_saved_by_a_selective_checkpoint(listed, monkeypatch):
    """A policy names the operator; its results saved, it does not run again."""
    calls, right = [], reference.index_topk
    monkeypatch.setattr(reference, "index_topk", lambda *arguments: calls.append(1) or right(*arguments))
    saved = ["dsa_indexer_topk::dsv41_index_topk"] if listed else []
    a, runs = inputs.arguments(DOCUMENTS, mode="source"), []
    plain, checkpointed = (a.q.float().clone().requires_grad_() for _ in range(2))
    layer(plain, a, runs).backward()
    calls.clear()
    checkpoint(layer, checkpointed, a, runs, use_reentrant=False, context_fn=saving(*saved)).backward()
    assert len(calls) == (1 if listed else 2)
    same(runs[-1], runs[0])
    assert_same_bytes(checkpointed.grad, plain.grad)


def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parents[2] / "packages/dsa-indexer-topk/README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    picks, blocks, later, ks, ke = (scope[name] for name in ("picks", "blocks", "later", "ks", "ke"))
    assert picks.shape == later.shape == (96, 16)
    assert blocks.shape == (96, 2)
    assert torch.equal((picks >= 0).sum(1), (ke - ks).clamp_max(16))
    kept = (((later - ks[:, None]) // 8)[:, :, None] == blocks[:, None, :]).any(-1)
    assert kept[later >= 0].all()
    assert (later >= 0).sum(1).max() == 16
