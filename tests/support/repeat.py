"""How to run one test again with the same random numbers."""

from __future__ import annotations

import pytest

SEED = pytest.StashKey[int]()


def command(item: pytest.Item) -> str:
    """The command line that repeats this test, with its seed if it has one yet."""
    seed = f" --seed {item.stash[SEED]}" if SEED in item.stash else ""
    return f'python -m pytest "{item.nodeid}"{seed}'
