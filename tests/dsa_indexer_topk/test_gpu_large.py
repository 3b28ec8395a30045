"""More than 2**31 elements and more than 2**16 rows: offsets and grids."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import Arguments
from tests.support.memory import free_device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(autouse=True)
def device_memory():
    with free_device_memory(60):
        yield


def large(queries, entries, heads=16, head_dim=64, **options):
    """The last queries of a document; bf16 numbers made in parts, which else would take twice the memory."""

    def normal(*shape):
        made = torch.empty(shape, dtype=torch.bfloat16, device=on_gpu.DEVICE)
        for part in made.split(max(1, 2**28 // made[0].numel())):
            part.normal_()
        return made

    with on_gpu.DEVICE:
        ke = torch.arange(entries - queries, entries, dtype=torch.int32).clamp_min(0) + 1
        made = Arguments(
            normal(queries, heads, head_dim),
            normal(entries, head_dim),
            normal(queries, heads),
            torch.zeros(queries, dtype=torch.int32),
            ke,
            64,
            None,
            True,
            entries,
            8,
            100,
        )
    return made._replace(**options)


def assert_rows_are_those_alone(a, *places):
    found = dsv41_index_topk(*a)
    queries = len(a.q)
    edges = [slice(0, 70), *(slice(max(0, p - 70), p + 70) for p in places), slice(queries - 70, queries)]
    for rows in edges:
        on_gpu.assert_same([t[rows] for t in found], dsv41_index_topk(*a.rows(rows)), f"rows {rows}")
    return found


def test_more_than_two_billion_elements_of_the_queries():
    """263,000 queries of 64 x 128: offsets pass 2**31 at query 262,144."""
    a = large(263_000, 500, heads=64, head_dim=128)
    assert_rows_are_those_alone(a, 131_072, 262_144)


def test_more_than_two_billion_picks_and_blocks():
    """1,050,000 rows of 2,048 picks and of 2,048 blocks."""
    a = large(1_050_000, 300, topk=2048, topk_blocks=2048)
    assert_rows_are_those_alone(a, 524_288, 2**20)


def test_more_than_two_billion_candidates():
    """140,000 rows of 16,384 candidate blocks, most of them beyond the entries: 2**31 at row 131,072."""
    a = large(140_000, 4000, emit_candidates=False)
    with on_gpu.DEVICE:
        listed = torch.arange(16_384, dtype=torch.int32).repeat(140_000, 1)
    assert_rows_are_those_alone(a._replace(candidates=listed), 65_536, 131_072)


def test_more_than_two_billion_scores():
    """32,768 queries x 131,072 entries; the best key is the last one, and each query that may see it picks it."""
    a = large(32_768, 131_072)
    a = a._replace(q=a.q.abs_(), w=a.w.abs_(), topk=512)
    a.k[-1] = 8
    picks, _ = assert_rows_are_those_alone(a, 16_384)
    assert picks[-1, -1].item() == 131_071
    assert (picks[:-1].amax(1) < a.ke[:-1]).all()


def test_more_than_65536_queries():
    """As many programs in each kernel's grid."""
    for mode in inputs.MODES:
        a = large(70_000, 128, emit_candidates=mode in ("source", "both"))
        if mode in ("consumer", "both"):
            with on_gpu.DEVICE:
                a = a._replace(candidates=inputs.blocks(70_000, 128, 8, 9))
        found = dsv41_index_topk(*a)
        for rows in (slice(0, 70), slice(65_500, 65_570), slice(69_930, 70_000)):
            on_gpu.assert_same([t[rows] for t in found], dsv41_index_topk(*a.rows(rows)), f"{mode} rows {rows}")
