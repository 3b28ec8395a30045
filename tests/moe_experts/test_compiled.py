"""What the compiled kernels must contain, beside the counts in the ahead-of-time table."""

import re

import pytest
from hopper_kernels import cubin
from moe_experts import plan
from moe_experts.fp8 import plan as fp8_plan

from tests.support.ptx import ASYNC_FENCE, arrivals, assert_nothing_stored_over_barriers, compiled

pytest.importorskip("triton")
MOST_INSTRUCTIONS = 4000  # of 16 bytes


@pytest.fixture(scope="module")
def bf16():
    return compiled([variant for variant in plan.variants() if not variant.name.startswith("groups")])


@pytest.fixture(scope="module")
def fp8():
    return compiled([variant for variant in fp8_plan.variants() if "UTMALDG" in variant.expect])


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def assemblies(request):
    """Those of the products: all but small kernels and passes."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def ptx(assemblies):
    return {name: asm["ptx"] for name, asm in assemblies.items()}


def test_barriers_are_fenced_before_tma_meets_them(ptx):
    """Else the copies may not see that they were initialised; all threads meet before the loading warp starts."""
    for name, text in ptx.items():
        setup = text[text.rindex("mbarrier.init") :]
        assert ASYNC_FENCE in setup, name
        assert "bar.sync" in setup[setup.index(ASYNC_FENCE) :], name


def test_every_barrier_is_used(fp8):
    """Else its memory is given away while the hardware still has it for a barrier, and overwrites it now and then."""
    for name, asm in fp8.items():
        assert asm["ptx"].count("mbarrier.init") == 3 * fp8_plan.STAGES, name  # full, second, empty


def test_nothing_is_stored_over_a_barrier(ptx):
    """Not even one that is no longer used: the compiler gives its memory to what it passes to other warps."""
    assert_nothing_stored_over_barriers(ptx)


def test_threads_meet_before_one_of_them_arrives_for_all(ptx):
    """A slot is empty, or a result complete, when all threads are done with it, not only the one that says so."""
    for name, text in ptx.items():
        found = list(arrivals(text))
        assert len(found) >= 2, name  # one in each warpgroup for the slots
        for _, between in found:
            assert not re.search(r"(ld|st)\.shared|stmatrix|try_wait|wgmma|store\.wait|bulk\.wait", between), name


def test_two_products_are_under_way_at_a_time(bf16):
    """A step waits for the products of the step before: with a wait for all of them tensor cores would stand still."""
    for name, asm in bf16.items():
        waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d)", asm["ptx"])
        assert set(waits) == {"0", "1"}, name
        assert waits.count("1") == 2, name  # one in each warpgroup's loop


def test_the_code_stays_in_the_instruction_cache(assemblies):
    """Code that it does not hold is read again for every tile: ends of tiles are loops, not sequences of panels."""
    for name, asm in assemblies.items():
        assert sum(cubin.read(asm["cubin"]).opcodes.values()) < MOST_INSTRUCTIONS, name


def test_what_finishes_a_tile_moves_16_bytes_at_a_time(bf16):
    """Gate and up, their gradients, h: eight channels of a thread."""
    wide = {"gate_up": (0, 2), "grad_hidden": (8, 6)}
    for name, (loads, stores) in wide.items():
        assert len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", bf16[name]["ptx"])) == loads, name
        assert len(re.findall(r"st\.global[\w.:]*\.v4\.b32", bf16[name]["ptx"])) == stores, name


def test_rows_end_where_the_plan_says(ptx):
    """The kernels count a row from the end of the dimension that `plan.ragged` gives its descriptors."""
    for name, text in ptx.items():
        assert (f" {plan.BEYOND}" in text) == (name != "grad_hidden" and "weight_grad[" not in name), name


def test_nothing_but_the_promotion_stands_between_two_sums(fp8):
    """Else the tensor cores stand still: waiting for the next operands costs an eighth of a product's time."""
    for name, asm in fp8.items():
        found = re.findall(r"wgmma\.wait_group\.sync\.aligned 0;(.*?)(?:wgmma\.fence|bra)", asm["ptx"], re.DOTALL)
        assert sum("fma.rn.f32" in between for between in found) == 4, name  # two in each warpgroup's loop
        for between in found:
            met = len(re.findall(r"bar\.sync|try_wait|ld\.global", between))
            # scales for the next step are read once nothing multiplies by these any more
            ahead = name == "fp8_weight_grad[bf16]" and between.rindex("mul.f32") < between.find("ld.shared")
            assert ahead or "ld.shared" not in between, name
            # a weight gradient gives the slot back as soon as it can
            assert met == 0 or ("weight_grad" in name and met == between.count("mbarrier.arrive") == 1), name
