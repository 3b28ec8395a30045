"""What a user sees on an H200: the command line and the registry in processes of their own, and cheap launches."""

import re

import pytest
import torch
from dsa_indexer_topk import arguments, dsv41_index_topk, launch, plan, unsupported_shape_reason

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES
from tests.support import installed, launches

pytestmark = pytest.mark.gpu

PICKS = """
from tests.dsa_indexer_topk import inputs
from dsa_indexer_topk import dsv41_index_topk
print(dsv41_index_topk(*inputs.scored([[5, 1, 9, 7]]))[0].tolist())
"""
# As a model calls: V4.1's sizes, short and long documents, all modes, weights in either dtype.
CALLS = """
import torch
from dsa_indexer_topk import dsv41_index_topk, plan
from tests.dsa_indexer_topk import inputs, on_gpu
for documents in ((900, 3), (plan.LONGEST_WHOLE + 1000,)):
    for mode in inputs.MODES:
        a = on_gpu.arguments(documents, mode=mode, listed=1500, queries=70, **on_gpu.V41)
        for w in (a.w, a.w.float()):
            dsv41_index_topk(*a._replace(w=w))
torch.cuda.synchronize()
"""
LONG = plan.LONGEST_WHOLE + 500


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_check():
    installed.assert_check_passes("dsa_indexer_topk", seconds=230)


def test_status():
    installed.assert_status_available("dsa_indexer_topk")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_precompile_fills_the_cache(tmp_path):
    """The variants then are on disk, and a process that runs a model compiles nothing."""
    installed.precompile("dsa_indexer_topk", len(launch.variants()), tmp_path)
    installed.assert_compiles_nothing(CALLS, tmp_path)


def test_available():
    assert installed.assert_available("dsa_indexer_topk").dsv41_index_topk is dsv41_index_topk


def test_no_visible_device():
    """The package imports and computes on the CPU, and the registry says what is missing."""
    assert installed.printed_without_a_device("dsa_indexer_topk", PICKS) == "[[0, 2, 3]]"


@pytest.mark.timeout(180)
@pytest.mark.parametrize("heads", [8, *arguments.HEADS, 128])
@pytest.mark.parametrize("head_dim", [32, *arguments.HEAD_DIMS])
def test_shapes_said_to_be_taken_are_taken(heads, head_dim):
    """And the others raise, with that reason."""
    for block_size in (3, *arguments.BLOCK_SIZES):
        sizes = {"heads": heads, "head_dim": head_dim, "topk": 20, "topk_blocks": 30}
        for documents in ((70,), (LONG,)):
            options = {"mode": "both", "numbers": inputs.whole_numbers, "listed": 9, "queries": 7}
            a = on_gpu.arguments(documents, block_size=block_size, **sizes, **options)
            if (reason := unsupported_shape_reason(heads, head_dim, block_size)) is None:
                on_gpu.assert_exact(a)
                on_gpu.assert_exact(a._replace(candidates=None))
            else:
                with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
                    dsv41_index_topk(*a)


def test_later_launches_do_without_tritons_own():
    """Once compiled, no call goes through Triton's look at every argument; other sizes and strides included."""

    def calls(queries):
        for documents in ((400, 3), (LONG,)):
            for mode in MODES:
                a = on_gpu.arguments(documents, mode=mode, listed=9, topk=9, queries=queries)
                dsv41_index_topk(*a)
                strided = (inputs.STRIDES["slice"](v) if isinstance(v, torch.Tensor) else v for v in a)
                dsv41_index_topk(*strided)

    launches.assert_later_ones_do_without_triton(calls, first=[50], later=[33, 1, 50])


@pytest.mark.parametrize("documents", [(400, 3), (LONG,)], ids=str)
def test_both_ways_of_launching_give_the_same_bytes(documents):
    made = [on_gpu.arguments(documents, mode=mode, listed=9, queries=50, **on_gpu.V41) for mode in MODES]
    for a in made:
        dsv41_index_topk(*a)
    fast = [dsv41_index_topk(*a) for a in made]
    with launches.through_triton() as seen:
        for a, wanted in zip(made, fast, strict=True):
            on_gpu.assert_same(dsv41_index_topk(*a), wanted)
    assert len(seen) >= 16
