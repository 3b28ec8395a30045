"""The Triton kernels under Triton's interpreter (no GPU)."""

import pytest

from tests.moe_experts.interpreted import CASES
from tests.support.interpreted import assert_passes


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    assert_passes("moe_experts", name)
