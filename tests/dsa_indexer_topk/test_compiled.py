"""What the compiled kernels must contain, beside the counts in the ahead-of-time table."""

import re

import pytest
from hopper_kernels import cubin

from tests.support.ptx import (
    arrivals,
    assert_barriers_fenced_before_tma,
    assert_nothing_stored_over_barriers,
    compiled_of,
    ptx_of,
)

pytest.importorskip("triton")
HEAD_DIM = 128  # of the variants


@pytest.fixture(scope="module")
def assemblies():
    """PTX and cubin of the kernels of the scores by variant, compiled for SM90 on any machine."""
    return compiled_of("dsa_indexer_topk", ("scores", "candidates"))


def warpgroups(name: str) -> int:
    """That multiply matrices, each with code of its own."""
    return 2 if name.startswith("scores") else 1


@pytest.fixture(scope="module")
def selections():
    """The PTX of the selections by variant."""
    return ptx_of("dsa_indexer_topk", "select")


@pytest.fixture
def ptx(assemblies):
    return {name: asm["ptx"] for name, asm in assemblies.items()}


def test_barriers_are_fenced_before_tma_meets_them(ptx):
    """Else the copies may not see that they were initialised; all threads meet before the loading warp starts."""
    assert_barriers_fenced_before_tma(ptx)


def test_nothing_is_stored_over_a_barrier(ptx):
    """Not even one that is no longer used: the compiler gives its memory to what it passes to other warps."""
    assert_nothing_stored_over_barriers(ptx)


def test_threads_meet_before_one_of_them_arrives_for_all(ptx):
    """An arrival tells the loading warp that this warpgroup has read shared memory: all of its threads."""
    for name, text in ptx.items():
        found = list(arrivals(text))
        assert len(found) == warpgroups(name), name
        for before, between in found:
            assert not re.search(r"(ld|st)\.shared|try_wait|wgmma", between), name
            assert re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", before)[-1] == "0", name


def test_what_is_loaded_is_awaited(ptx):
    """Each pair of products of matrices has a wait for its tiles just before."""
    for name, text in ptx.items():
        starts = [match.start() for match in re.finditer("wgmma.fence", text)]
        assert len(starts) == 2 * warpgroups(name), name
        for start in starts[::2]:
            assert text.rfind("try_wait.parity", 0, start) > text.rfind("wgmma.wait_group", 0, start), name


def test_products_of_matrices_are_not_serialised(assemblies):
    """ptxas then waits after each instruction: here, once for all of a tile."""
    for name, asm in assemblies.items():
        opcodes = cubin.read(asm["cubin"]).opcodes
        products = 2 * warpgroups(name)
        assert opcodes["QGMMA"] == products * HEAD_DIM // 32, name
        assert opcodes["WARPGROUP"] == 2 * products, name  # an arrival and a wait


def test_the_relu_keeps_nan(ptx):
    """x + |x| does; maxima are those of groups alone, which leave NaN out."""
    for name, text in ptx.items():
        terms = {"scores": 64, "candidates": 16}[name.split("[")[0]]  # a tile and thread
        assert len(re.findall(r"\babs\.f32", text)) == 2 * terms * warpgroups(name), name
        assert not re.search(r"\bmax\.NaN\.f32", text), name
        assert (len(re.findall(r"\bmax\.f32", text)) > 0) == (name == "scores[group=8]"), name


def test_sums_of_heads_exchange_no_shared_memory(assemblies):
    """Between threads they go by shuffles, so that no warp waits for another."""
    for name, asm in assemblies.items():
        opcodes = cubin.read(asm["cubin"]).opcodes
        assert opcodes["SHFL"] > 0, name
        assert opcodes["STS"] <= 3, name  # with which a launch of specialised warps starts and ends


def test_what_is_chosen_is_stored_one_by_one(selections):
    """`selection._places` says that neighbours have neighbouring places, which is false."""
    for name, text in selections.items():
        assert "st.global" in text, name
        assert not re.search(r"st\.global\.v\d", text), name


def test_rows_are_read_four_at_a_time(selections):
    for name, text in selections.items():
        assert len(re.findall(r"ld\.global\.v4", text)) >= 8 or name == "select[blocks of entries]", name
