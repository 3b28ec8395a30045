"""The definition against brute force in exact arithmetic, and what its rows do not depend on."""

import pytest
import torch
from dsa_indexer_topk import reference
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dsa_indexer_topk import inputs, oracle
from tests.dsa_indexer_topk.inputs import MODES
from tests.support.compare import assert_same_bytes

each_mode = pytest.mark.parametrize("mode", MODES)


def same(found, wanted):
    for name, got, want in zip(("picks", "blocks"), found, wanted, strict=True):
        assert_same_bytes(got, want, name)


def assert_exact(a):
    found = reference.index_topk(*a)
    same(found, oracle.index_topk(a))
    return found


VALUES = {
    "normal": torch.randn,
    "whole": inputs.whole_numbers,
    "of all magnitudes": lambda *shape: torch.randn(shape) * torch.randint(-30, 30, (*shape[:-1], 1)).float().exp2(),
    "spread in a row": lambda *shape: torch.randn(shape) * torch.randint(-20, 20, shape).float().exp2(),
    "around the floor": lambda *shape: torch.randn(shape) * 1e-10,
    "below the floor": lambda *shape: torch.randn(shape) * 1e-20,
    "maximum 448 * 2^n": lambda *shape: (
        torch.rand(shape).mul(2).sub(1).index_fill(-1, torch.tensor([1]), 1.0)
        * 448
        * torch.randint(-9, 9, (*shape[:-1], 1)).float().exp2()
    ),
    "maximum just above 448 * 2^n": lambda *shape: (
        torch.rand(shape).mul(2).sub(1).index_fill(-1, torch.tensor([1]), -450 / 448) * 448
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_scores(name):
    """Bit for bit, which a wrong scale, byte, sign or order of roundings would not be."""
    q, k = (VALUES[name](*shape).bfloat16() for shape in ((7, 16, 64), (19, 64)))
    for w in (torch.randn(7, 16), torch.randn(7, 16).bfloat16(), torch.rand(7, 16), -torch.rand(7, 16)):
        assert_same_bytes(reference.scores(q, k, w), torch.tensor(oracle.scores(q, k, w)) + 0.0)


def test_weights_that_underflow():
    """The product of a weight with its query's scale is rounded to fp32, where it may be a denormal number or 0."""
    q, k = torch.randn(7, 16, 64) * 2.0**-25, torch.randn(19, 64) * 2.0**90
    w = torch.randn(7, 16) * torch.randint(-125, -105, (7, 16)).float().exp2()
    found = reference.scores(q.bfloat16(), k.bfloat16(), w)
    assert found.any()
    assert_same_bytes(found, torch.tensor(oracle.scores(q.bfloat16(), k.bfloat16(), w)) + 0.0)


@pytest.mark.parametrize(("heads", "head_dim"), [(16, 128), (32, 64), (32, 128), (64, 64), (64, 128)])
def test_scores_of_all_widths(heads, head_dim):
    q, k, w = torch.randn(3, heads, head_dim).bfloat16(), torch.randn(5, head_dim).bfloat16(), torch.randn(3, heads)
    assert_same_bytes(reference.scores(q, k, w), torch.tensor(oracle.scores(q, k, w)))


def test_scores_are_close_to_those_of_the_operands():
    """What FP8 costs, and that the scales were applied."""
    q, k, w = torch.randn(50, 32, 128).bfloat16() * 37, torch.randn(60, 128).bfloat16() / 91, torch.randn(50, 32)
    plain = torch.einsum("the,th->te", torch.einsum("thd,ed->the", q.double(), k.double()).relu(), w.double())
    error = (reference.scores(q, k, w) - plain).norm() / plain.norm()
    assert 0.01 < error < 0.05


@each_mode
@pytest.mark.parametrize("numbers", [torch.randn, inputs.whole_numbers], ids=["normal", "whole"])
@pytest.mark.parametrize(
    ("documents", "ratio", "options"),
    [
        ((41,), 1, {}),
        ((13, 1, 1, 17, 2), 1, {"topk": 6, "block_size": 2}),
        ((1, 11, 2, 3, 16), 2, {"heads": 32, "head_dim": 128, "topk": 4}),
        ((1,) * 20, 1, {"block_size": 16}),
        ((1,) * 9 + (3,), 2, {"block_size": 1}),
        ((33,), 3, {"topk": 64, "block_size": 1, "topk_blocks": 40}),
        ((40,), 1, {"topk": 1, "block_size": 16, "topk_blocks": 1}),
        ((5, 1, 7, 2, 9, 4), 1, {"topk": 0, "block_size": 8}),
        ((23,), 1, {"topk_blocks": 0, "block_size": 8}),
        ((1,), 1, {"topk": 3}),
        ((1,), 2, {"topk": 3}),
        ((), 1, {}),
    ],
)
def test_against_brute_force(documents, ratio, options, numbers, mode):
    a = inputs.arguments(documents, ratio, mode=mode, numbers=numbers, **options)
    picks, blocks = assert_exact(a)
    rows = sum(documents)
    assert picks.shape == (rows, a.topk)
    assert blocks.shape == ((rows, a.topk_blocks) if a.emit_candidates else (0, 0))


@each_mode
@pytest.mark.parametrize("chunk", [1, 40, 3000])
def test_the_size_of_the_chunks_changes_nothing(mode, chunk, monkeypatch):
    a = inputs.arguments((30, 2, 17), mode=mode)
    wanted = reference.index_topk(*a)
    monkeypatch.setattr(reference, "CHUNK", chunk)
    monkeypatch.setattr(reference, "KEYS", 7)
    same(reference.index_topk(*a), wanted)


def test_memory_stays_chunked(monkeypatch):
    """Whichever of entries, queries, candidates, picks and blocks is the widest: no temporary is larger than a chunk.

    Unless one row of that is.
    """
    row = 2 * 64
    monkeypatch.setattr(reference, "CHUNK", 2 * row)
    monkeypatch.setattr(reference, "KEYS", 4)
    seen = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and not function.is_view:
                seen.append(result.numel())
            return result

    few = {"entries": 9, "width": 5, "topk": 2, "topk_blocks": 2}
    for many in ({}, *({name: size} for name in few for size in (2 * row, 2 * row + 200))):
        entries, width, topk, topk_blocks = (few | many).values()
        a = inputs.arguments((entries,), heads=2, topk=topk, mode="both", topk_blocks=topk_blocks)
        a = a.rows(slice(-3, None))._replace(candidates=inputs.blocks(3, entries, 4, width))
        with Sizes():
            results = reference.index_topk(*a)
        for result in results:
            seen.remove(result.numel())
        assert max(seen) == max(2 * row, *many.values(), 0), many
        seen.clear()


def test_a_source_and_its_consumer():
    """All blocks as candidates are the plain picks; those kept hold the best entries of the blocks that were kept."""
    a = inputs.arguments((50, 7), topk=6, mode="source", topk_blocks=20)
    plain, blocks = reference.index_topk(*a)
    consumer = a._replace(candidates=blocks, emit_candidates=False)
    same(reference.index_topk(*consumer), (plain, torch.empty(0, 0, dtype=torch.int32)))
    few = reference.index_topk(*a._replace(topk_blocks=6))[1]
    picks = reference.index_topk(*consumer._replace(candidates=few))[0]
    for t in range(len(picks)):  # six entries above all others lie in the six best blocks; the newest may displace one
        best = set(reference.index_topk(*a._replace(topk=5).rows(slice(t, t + 1)))[0][0].tolist())
        assert best <= set(picks[t].tolist())
