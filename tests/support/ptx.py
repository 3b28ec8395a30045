"""What PTX says of shared memory."""

import re


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
