"""Bytes, scales and padding of the definition's two casts against exact rational arithmetic."""

import pytest
import torch
from fp8_dual_cast import reference

from tests.fp8_dual_cast import exact, inputs
from tests.fp8_dual_cast.edge_cases import EDGE_CASES, edge_case
from tests.support.compare import assert_same_bytes

both_modes = pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])


def assert_exact(x, ue8m0):
    """All four results equal the exact ones in bytes, dtype, shape and strides, made together and alone."""
    expected = exact.dual_cast(x, ue8m0)
    together = reference.dual_cast(x, ue8m0)
    alone = *reference.row_cast(x, ue8m0), *reference.column_cast(x, ue8m0)
    for name, got, single, want in zip(exact.NAMES, together, alone, expected, strict=True):
        assert_same_bytes(got, want, name)
        assert_same_bytes(single, want, f"{name} alone")
    return together


@both_modes
@pytest.mark.parametrize(
    ("tokens", "channels"),
    [(tokens, 384) for tokens in (0, 1, 3, 4, 5, 127, 128, 129, 255, 300)]
    + [(tokens, channels) for tokens in (1, 129) for channels in (128, 640)],
)
def test_sizes(tokens, channels, ue8m0, poison):
    """Every ragged edge, in memory that held NaN: the storages' padding included, each element is right."""
    x = inputs.repetitive(tokens, channels, seed=tokens + channels)
    q, sf, q_t, sf_t = assert_exact(x, ue8m0)
    padded = -(-tokens // 128) * 128
    assert q.shape == (tokens, channels)
    assert sf.shape == (channels // 128, -(-tokens // 4) * 4)
    assert q_t.shape == (channels, padded)
    assert sf_t.shape == (padded // 128, channels)
    assert not sf[:, tokens:].view(torch.int32).any()
    assert not q_t[:, tokens:].view(torch.uint8).any()
    assert (sf[:, :tokens] > 0).all()
    assert (sf_t > 0).all()


@both_modes
def test_normal_numbers(ue8m0):
    assert_exact(inputs.matrix(131, 128), ue8m0)


@both_modes
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edge_values(name, ue8m0):
    """Each element of each result is right, the special ones and those beside them."""
    assert_exact(edge_case(name), ue8m0)
