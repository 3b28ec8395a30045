"""NaN, infinity and zeros of either sign in the operands; a bound that is too small."""

import pytest
import torch
from dsa_indexer_topk import dsv41_index_topk, plan

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
DOCUMENTS = {"packed": (600, 90), "long": (plan.LONGEST_WHOLE + 900,)}
TOO_SMALL = """
import torch
from dsa_indexer_topk import dsv41_index_topk
from tests.dsa_indexer_topk import on_gpu
a = on_gpu.arguments((50,))
try:
    dsv41_index_topk(*a._replace(max_entries_per_doc=49))
    torch.cuda.synchronize()
except RuntimeError as error:
    print("stopped" if "assert" in str(error) else error)
"""
TWICE = """
import contextlib, sys, torch
from dsa_indexer_topk import dsv41_index_topk
from hopper_kernels import reference
from tests.dsa_indexer_topk import inputs, on_gpu
block, implementation = sys.argv[1:]
a = on_gpu.cuda(inputs.with_scores(torch.arange(3000), rows=70, topk=40))
candidates = torch.arange(370, dtype=torch.int32, device="cuda").repeat(70, 1)
candidates[69, 11] = int(block)  # the best entries are those of the last five blocks
try:
    with reference() if implementation == "definition" else contextlib.nullcontext():
        picks, _ = dsv41_index_topk(*a._replace(candidates=candidates))
    print(picks.tolist() == [list(range(2920, 2960))] * 70)
except RuntimeError as error:
    print("stopped" if "assert" in str(error) else error)
"""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("documents", list(DOCUMENTS.values()), ids=list(DOCUMENTS))
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_what_is_not_finite_stays_where_it_is(mode, documents, value):
    """In a query or its weights: that row; in a key: that entry, which nobody reads. Others keep their bytes."""
    sizes = {"topk": 60, "block_size": 8, "topk_blocks": 30, "listed": 40, "queries": 200}
    a = on_gpu.arguments(documents, mode=mode, numbers=inputs.whole_numbers, **sizes)
    clean = dsv41_index_topk(*a)
    q, w, k = a.q.clone(), a.w.clone(), a.k.clone()
    q[20, 3, 5], w[90, 2] = value, value
    found = dsv41_index_topk(*a._replace(q=q, w=w))
    others = [t for t in range(200) if t not in (20, 90)]
    for got, want in zip(found, clean, strict=True):
        if len(got):
            assert torch.equal(got[others], want[others])
            assert ((got >= -1) & (got < len(a.k))).all()
    k[len(a.k) - 150, 7] = value
    on_gpu.assert_exact(a._replace(k=k))


@pytest.mark.parametrize("mode", MODES)
def test_zeros_of_either_sign_are_equal(mode):
    a = on_gpu.arguments((300,), mode=mode, numbers=inputs.whole_numbers, topk=40, topk_blocks=20, listed=30)
    w = torch.where(torch.rand_like(a.w.float()) < 0.5, -0.0, 0.0).bfloat16()
    on_gpu.assert_exact(a._replace(w=w))


@pytest.mark.timeout(120)
def test_a_bound_of_the_entries_that_is_too_small_stops_the_device():
    assert output_of(start_python(TOO_SMALL), timeout=100).split()[-1] == "stopped"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("block", "implementation", "wanted"),
    [
        (369, "kernels", "stopped"),
        (365, "kernels", "stopped"),
        (12, "kernels", "True"),
        (-1, "kernels", "True"),
        (12, "definition", "stopped"),
        (-1, "definition", "True"),
    ],
)
def test_a_candidate_that_is_named_twice_stops_the_device(block, implementation, wanted):
    """In any row; of the kernels, if it would be picked from twice. Else it changes nothing."""
    assert output_of(start_python(TWICE, str(block), implementation), timeout=100).split()[-1] == wanted
