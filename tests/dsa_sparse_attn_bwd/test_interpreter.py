"""The Triton kernels under Triton's interpreter (no GPU), against their definitions."""

import pytest

from tests.dsa_sparse_attn_bwd.interpreted import CASES
from tests.support.interpreted import failures


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What failed in each case, "" for nothing; one process for all, since triton is imported once in each."""
    pytest.importorskip("triton")
    return failures("dsa_sparse_attn_bwd")


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name, results):
    assert not results[name], results[name]
