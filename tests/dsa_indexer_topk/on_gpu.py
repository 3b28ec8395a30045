"""What the GPU tests of this package share: calls with operands on the GPU, and what their results must be."""

import torch
from dsa_indexer_topk import dsv41_index_topk
from hopper_kernels import reference as use_definition
from torch import Tensor

from tests.dsa_indexer_topk import inputs, judge
from tests.dsa_indexer_topk.inputs import Arguments
from tests.support.compare import assert_same_bytes

DEVICE = torch.device("cuda")
V41 = {"heads": 32, "head_dim": 128, "topk": 512, "block_size": 8, "topk_blocks": 2048}
SHARE = 2.0**-13  # of the sum of a score's terms without signs: what the kernels' rounding may change
NAMES = ("picks", "blocks")


def arguments(documents: tuple[int, ...], ratio: int = 1, *, listed: int = 0, queries: int = 0, **options) -> Arguments:
    """As `inputs.arguments`, on the GPU; listed: candidate blocks of a row; queries: the last so many rows alone."""
    with DEVICE:
        a = inputs.arguments(documents, ratio, **options)
        if a.candidates is not None and listed:
            a = a._replace(candidates=inputs.blocks(len(a.q), a.max_entries_per_doc, a.block_size, listed))
    return a.rows(slice(len(a.q) - queries, None)) if queries else a


def cuda(a: Arguments) -> Arguments:
    return Arguments(*(v.to(DEVICE) if isinstance(v, Tensor) else v for v in a))


def definition(a: Arguments) -> tuple[Tensor, Tensor]:
    with use_definition():
        return dsv41_index_topk(*a)


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], what: str = "") -> None:
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert_same_bytes(got, want, f"{what} {name}")


def assert_exact(a: Arguments, what: str = "") -> None:
    """The kernels give the bytes of the definition: for scores whose sums do not round."""
    assert_same(dsv41_index_topk(*a), definition(a), what)


def assert_right(a: Arguments) -> tuple[Tensor, Tensor]:
    """All that is promised of scores that round; the results."""
    found = dsv41_index_topk(*a)
    judge.assert_right(found, a, SHARE)
    return found
