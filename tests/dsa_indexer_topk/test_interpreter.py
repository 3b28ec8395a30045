"""The Triton kernels under Triton's interpreter (no GPU), against the definition."""

import pytest

from tests.dsa_indexer_topk.interpreted import CASES
from tests.support.interpreted import assert_passes


@pytest.mark.parametrize("name", CASES)
def test_equal_to_the_definition(name):
    assert_passes("dsa_indexer_topk", name)
