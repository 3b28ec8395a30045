"""The Triton kernels of the single casts, and the device twins they use, under Triton's interpreter (no GPU)."""

import pytest

from tests.fp8_dual_cast.edge_cases import EDGE_CASES
from tests.fp8_dual_cast.interpreted import CASES, SCALE_EDGES
from tests.support.interpreted import failures


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """What failed in each case, "" for nothing; one process for all, since triton is imported once in each."""
    pytest.importorskip("triton")
    return failures("fp8_dual_cast")


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name, results):
    assert not results[name], results[name]


def test_the_cases_with_powers_of_two_exist():
    assert set(EDGE_CASES) >= SCALE_EDGES
