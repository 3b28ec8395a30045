"""The Triton kernels of the single casts, and the device twins they use, under Triton's interpreter (no GPU)."""

import pytest

from tests.fp8_dual_cast.edge_cases import EDGE_CASES
from tests.fp8_dual_cast.interpreted import CASES, SCALE_EDGES
from tests.support.interpreted import assert_passes


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    assert_passes("fp8_dual_cast", name)


def test_the_cases_with_powers_of_two_exist():
    assert set(EDGE_CASES) >= SCALE_EDGES
