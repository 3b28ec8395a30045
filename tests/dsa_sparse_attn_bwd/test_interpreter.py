"""The Triton kernels under Triton's interpreter (no GPU), against their definitions."""

import pytest

from tests.dsa_sparse_attn_bwd.interpreted import CASES
from tests.support.interpreted import assert_passes


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    assert_passes("dsa_sparse_attn_bwd", name)
