"""What the compiled kernels must contain, beside the counts in the ahead-of-time table."""

import re

import pytest

from tests.support.ptx import (
    ASYNC_FENCE,
    arrivals,
    assert_barriers_fenced_before_tma,
    assert_nothing_stored_over_barriers,
    ptx_of,
)

pytest.importorskip("triton")
ADDITION = "red.relaxed.gpu.global.add.v4.f32"


@pytest.fixture(scope="module")
def gradients():
    """PTX by variant, compiled for SM90 on any machine."""
    return ptx_of("dsa_sparse_attn_bwd", "gradients")


@pytest.fixture(scope="module")
def passes():
    """The kernels before and after the products."""
    return ptx_of("dsa_sparse_attn_bwd", ("prepare", "add", "finish"))


def test_barriers_are_fenced_before_tma_meets_them(gradients):
    """Else the copies may not see that they were initialised; all threads meet before the specialised warps start."""
    assert len(gradients) == 6
    assert_barriers_fenced_before_tma(gradients)


def test_nothing_is_stored_over_a_barrier(gradients):
    """Not even one that is no longer used: the compiler gives its memory to what it passes to other warps."""
    assert_nothing_stored_over_barriers(gradients)


def test_what_threads_wrote_is_fenced_before_products_read_it(gradients):
    """The gathered rows, and what the scores became: by all threads, before they meet or arrive for the others."""
    for name, text in gradients.items():
        assert text.count(ASYNC_FENCE) >= 3, name
        gathered = text.rindex("cp.async.cg")
        first_product = text.index("wgmma.mma_async", gathered)
        between = text[gathered:first_product]
        assert "cp.async.wait_group" in between, name
        assert ASYNC_FENCE in between[between.index("cp.async.wait_group") :], name
        assert "bar.sync" in between[between.index(ASYNC_FENCE) :], name


def test_threads_meet_before_one_of_them_arrives_for_all(gradients):
    """An arrival tells other warps that this warpgroup has read, or written, shared memory: all of its threads."""
    for name, text in gradients.items():
        found = list(arrivals(text))
        assert found, name
        for _, between in found:
            assert not re.search(r"(ld|st)\.shared|try_wait|wgmma", between), name


def test_gradients_of_rows_are_added_four_at_a_time(gradients):
    """In the L2, or, ordered, stored: 20 times 4 numbers of each of 256 channels, and no other additions."""
    for name, text in gradients.items():
        ordered = "ordered=1" in name
        assert (text.count(ADDITION) > 0) != ordered, name
        assert not re.search(r"\b(atom|red)\.", text.replace(ADDITION, "")), name
        assert "st.global.v4" in text, name


def test_nothing_is_read_behind_the_last_slot(gradients):
    """Rows are gathered 16 bytes at a time, or none: a copy's size is in a register, and what it leaves out is zero."""
    for name, text in gradients.items():
        copies = re.findall(r"cp\.async\.cg\.shared\.global[^;]*;", text)
        assert copies, name
        assert all(re.search(r"\], 0x10, %r\d+;|\], 16, %r\d+;", copy) for copy in copies), (name, copies[0])


def test_passes_have_no_atomics(passes):
    """The gradients of queries and sinks, and ordered ones, are sums in one order."""
    assert len(passes) == 5
    for name, text in passes.items():
        assert not re.search(r"\b(atom|red)\.", text), name


def test_sums_are_read_and_written_in_whole_vectors(passes):
    for name in ("add", "finish"):
        assert re.search(r"ld\.global\.v4", passes[name]), name
        assert re.search(r"st\.global\.v4", passes[name]), name
