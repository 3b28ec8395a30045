"""The Triton kernels under Triton's interpreter (no GPU)."""

import pytest

from tests.moe_experts.interpreted import CASES
from tests.support.interpreted import failures


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What failed in each case, "" for nothing; one process for all, since triton is imported once in each."""
    pytest.importorskip("triton")
    return failures("moe_experts")


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name, results):
    assert not results[name], results[name]
