"""What compiled kernels must contain: shared memory, barriers and fences in PTX."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hopper_kernels import precompile

ASYNC_FENCE = "fence.proxy.async"


def compiled(variants: Iterable[precompile.Variant]) -> dict[str, dict]:
    """What is made of each variant ("ptx", "cubin") by its name, compiled for SM90 on any machine."""
    with precompile.compile_only_driver():
        return {variant.name: variant.compile().asm for variant in variants}


def compiled_of(kernel: str, prefix: str | tuple[str, ...]) -> dict[str, dict]:
    """Of a package's variants those whose names begin like that."""
    return compiled(variant for variant in precompile.variants_of(kernel) if variant.name.startswith(prefix))


def ptx_of(kernel: str, prefix: str | tuple[str, ...]) -> dict[str, str]:
    """As `compiled_of`, the PTX alone."""
    return {name: made["ptx"] for name, made in compiled_of(kernel, prefix).items()}


def barriers_and_stores(text: str) -> tuple[set[int], set[int]]:
    """Offsets in shared memory of the mbarriers, and of the plain stores whose offset does not depend on the thread.

    PTX allows no store to a barrier's memory before `mbarrier.inval`.
    """
    offsets = {"global_smem": 0}
    for register in re.findall(r"mov\.b(?:32|64)\s+(%\w+), global_smem;", text):
        offsets[register] = 0
    for register, base, offset in re.findall(r"add\.s(?:32|64)\s+(%\w+), (%\w+), (\d+);", text):
        if base in offsets:
            offsets[register] = offsets[base] + int(offset)

    def found(instruction: str) -> set[int]:
        places = set()
        for base, offset in re.findall(instruction + r"[.\w:]*\s+\[(%?\w+)(?:\+(\d+))?\]", text):
            if base in offsets:
                places.add(offsets[base] + int(offset or 0))
        return places

    return found(r"mbarrier\.init"), found(r"\bst\.shared")


def assert_nothing_stored_over_barriers(ptx: dict[str, str]) -> None:
    """Each kernel has stores, all of its barriers are found, and no store meets one, not even one no longer used."""
    for name, text in ptx.items():
        barriers, stores = barriers_and_stores(text)
        assert len(barriers) == text.count("mbarrier.init"), name
        assert stores, name
        assert not any(at - 8 < place < at + 8 for place in stores for at in barriers), name


def assert_barriers_fenced_before_tma(ptx: dict[str, str]) -> None:
    """Between the last barrier's initialisation and the first copy by TMA are a fence and a meeting of all threads.

    Else the copies may not see that the barriers were initialised. Other warps wait for their start.
    """
    for name, text in ptx.items():
        setup = text[text.rindex("mbarrier.init") :]
        before, rest = setup.split("cp.async.bulk.tensor", 1)
        assert ASYNC_FENCE in before, name
        assert "bar.sync" in before[before.index(ASYNC_FENCE) :], name
        assert "barrier.sync" in rest, name  # what the other warps wait for


def arrivals(text: str) -> Iterator[tuple[str, str]]:
    """For each arrival at a barrier the code up to the last meeting of threads before it, and the code in between."""
    for match in re.finditer(r"mbarrier\.arrive\.shared", text):
        meeting = text.rindex("bar.sync", 0, match.start())
        yield text[:meeting], text[meeting : match.start()]
