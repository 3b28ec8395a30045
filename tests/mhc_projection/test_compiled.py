"""What the compiled kernels must contain, beside the counts in the ahead-of-time table."""

import re

import pytest

from tests.support.ptx import ASYNC_FENCE, barriers_and_stores, ptx_of

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def ptx():
    """The PTX of the projection's kernels by variant, compiled for SM90 on any machine."""
    return ptx_of("mhc_projection", "projection")


def test_barriers_are_fenced_before_tma_meets_them(ptx):
    """Else the copies may not see that they were initialised."""
    for name, text in ptx.items():
        setup = text[text.rindex("mbarrier.init") :]
        if "projection_backward" in name:  # the loading warp's code stands elsewhere; it starts behind a barrier
            setup = setup[: setup.index("barrier.sync")]
        else:
            setup = setup[: setup.index("cp.async.bulk.tensor")]
        assert ASYNC_FENCE in setup, name


def test_nothing_is_stored_over_a_barrier(ptx):
    """Not even one that is no longer used: the compiler gives its memory to what it passes to other warps."""
    for name, text in ptx.items():
        barriers, stores = barriers_and_stores(text)
        assert barriers, name
        assert stores or "projection_backward" not in name, name
        assert not any(at - 8 < place < at + 8 for place in stores for at in barriers), name


def test_stores_are_waited_for_before_the_end(ptx):
    """Both warpgroups: shared memory may not be given away while TMA reads it."""
    for name, text in ptx.items():
        if "projection_backward" in name:
            waits = re.findall(r"cp\.async\.bulk\.wait_group\.read\s+(0x)?(\d+);", text)
            assert sorted(int(count) for _, count in waits)[:2] == [0, 0], name
            assert len(waits) == 4, name


def test_threads_meet_before_one_of_them_arrives_for_all(ptx):
    """An arrival tells the other warps that this group has read, or written, shared memory: all of its threads."""
    for name, text in ptx.items():
        if "projection_backward" not in name:
            continue
        arrivals = [match.start() for match in re.finditer(r"mbarrier\.arrive[.\w]*\.shared", text)]
        assert len(arrivals) == 7, name  # two of each warpgroup, three of the loading warp
        for arrival in arrivals:
            meeting = max(text.rfind(kind, 0, arrival) for kind in ("bar.sync", "bar.warp.sync"))
            between = text[meeting:arrival]
            assert not re.search(r"(ld|st)\.shared|try_wait|cp\.async\.bulk\.tensor", between), name
