"""More than 2**31 elements of queries and of rows, and more than 2**16 queries: offsets and grids.

Whole numbers, so every result is known to the bit; nearly all of the time goes into making them.
"""

import pytest
import torch

from tests.dsa_sparse_attn_bwd import on_gpu
from tests.dsa_sparse_attn_bwd.inputs import NAMES
from tests.dsa_sparse_attn_bwd.on_gpu import CHANNELS, DEVICE, MODES
from tests.support.compare import assert_same_bytes
from tests.support.memory import free_device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(180)]

PART = 2**18  # rows of 512 that are compared at a time: what finds a difference takes fewer than 2**31 elements


def assert_exact(t):
    """In both modes, against the definition in fp32, in which the sums of these numbers do not round either."""
    wanted = on_gpu.definition(t, torch.float32)
    for mode, deterministic in MODES.items():
        found = on_gpu.flat(t, deterministic)
        for name, got, want in zip(NAMES, found, wanted, strict=True):
            got, want = (r.view(-1, r.shape[-1]) for r in (got, want))
            for first in range(0, len(want), PART):
                part = slice(first, first + PART)
                assert_same_bytes(got[part] + 0.0, want[part] + 0.0, f"{mode}: {name} from row {first}")
        del found


def test_more_than_65536_queries():
    with free_device_memory(20):
        assert_exact(on_gpu.whole(70_000, 64, rows=5000, heads=16))


@pytest.mark.parametrize("width", [64, 460])
def test_more_than_two_billion_elements_of_the_queries(width):
    """66,000 queries of 64 x 512: offsets pass 2**31 at query 65,536."""
    with free_device_memory(50):
        t = on_gpu.whole(66_000, width, rows=5000)
        assert t.q.numel() > 2**31
        assert (t.indices[-3:] >= 0).any()
        assert_exact(t)


def test_more_than_two_billion_elements_of_the_rows():
    """4,300,000 rows of 512, whose sums have 2**33 bytes: the last ones are named often."""
    rows = 4_300_000
    with free_device_memory(50):
        indices = on_gpu.slots(265, 70, rows)
        indices[:, ::2] = rows - 1 - torch.randint(0, 1000, indices[:, ::2].shape, dtype=torch.int32, device=DEVICE)
        indices[:, 1:8] = rows + torch.arange(7, dtype=torch.int32, device=DEVICE)  # there are none
        t = on_gpu.whole(265, 70, rows, indices=indices)
        assert rows * CHANNELS > 2**31
        assert_exact(t)
