"""The Triton kernels under Triton's interpreter (no GPU), against the definition in float64."""

import pytest

from tests.mhc_projection.interpreted import CASES
from tests.support.interpreted import assert_passes


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    assert_passes("mhc_projection", name)
