"""What `hopper-kernels check` runs: picks and blocks of the public function against the definition.

Whole numbers, whose scores have no rounding errors but many ties, must give the very same results. Of normal numbers,
two scores that nearly tie may change places, since the matrix instructions sum with fewer bits than fp32.
"""

import torch
from hopper_kernels import models
from hopper_kernels.selfcheck import Case, differing_bytes
from torch import Tensor

from dsa_indexer_topk import ops, reference

SEED = 20262
_FLASH = models.V41_FLASH
_MOST_MISSING = 1e-2  # what nearly tied scores may exchange


def cases(device: torch.device) -> list[Case]:
    """Toy documents on a CPU; on a GPU V4.1's widths too, with more entries than its candidate blocks hold."""
    toy = {"heads": 16, "head_dim": 64, "topk": 12, "block_size": 4, "topk_blocks": 5}
    sizes = [((70, 1, 53), 1, 124, toy), ((90, 2, 37), 2, 129, toy)]
    if device.type != "cpu":
        flash = {
            "heads": _FLASH.index_heads,
            "head_dim": _FLASH.index_head_dim,
            "topk": _FLASH.index_topk,
            "block_size": _FLASH.index_block_size,
            "topk_blocks": _FLASH.index_topk_blocks,
        }
        sizes = [((20480,), 1, 1024, flash), ((1500, 3, 2049), 2, 3552, flash), *sizes]
    return [
        _case(*size, mode, whole, device)
        for size in sizes
        for mode in ("plain", "source", "consumer")
        for whole in (True, False)
    ]


def missing(actual: Tensor, expected: Tensor) -> float:
    """Share of the expected indices that are not in their row; inf if a row has another number of them, or one twice.

    Any order, -1 last. Reads the result back, so it synchronises.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    rows = torch.arange(len(actual), device=actual.device)[:, None] << 32
    there, wanted = ((rows + t)[t >= 0] for t in (actual, expected))
    if not torch.equal(actual >= 0, expected >= 0) or there.unique().numel() != there.numel():
        return float("inf")
    return 1 - torch.isin(wanted, there).double().mean().item() if wanted.numel() else 0.0


def _case(
    documents: tuple[int, ...], ratio: int, queries: int, sizes: dict[str, int], mode: str, whole: bool, device
) -> Case:
    """The last `queries` tokens of packed documents with one entry for `ratio` tokens."""
    source = mode == "source"
    longest = max(documents) // ratio

    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        ks, ke = _bounds(documents, ratio, queries, device)
        entries = sum(length // ratio for length in documents)
        numbers = _whole_numbers if whole else torch.randn
        q = numbers(queries, sizes["heads"], sizes["head_dim"], device=device).bfloat16()
        k = numbers(entries, sizes["head_dim"], device=device).bfloat16()
        w = numbers(queries, sizes["heads"], device=device).bfloat16()
        candidates = None
        if mode == "consumer":
            candidates = _blocks(ks, ke, sizes["block_size"], sizes["topk_blocks"])
        return q, k, w, ks, ke, sizes["topk"], candidates, source, longest, sizes["block_size"], sizes["topk_blocks"]

    def named(picks: Tensor, blocks: Tensor) -> dict[str, Tensor]:
        return {"picks": picks, "blocks": blocks} if source else {"picks": picks}

    text = " + ".join(map(str, documents))
    return Case(
        label=f"{queries} queries of {text} tokens, ratio {ratio}, {mode}, {'whole' if whole else 'normal'} numbers",
        make=make,
        run=lambda *arguments: named(*ops.dsv41_index_topk(*arguments)),
        expected=lambda *arguments: named(*reference.index_topk(*arguments)),
        error=differing_bytes if whole else missing,
        bounds=dict.fromkeys(("picks", "blocks") if source else ("picks",), 0.0 if whole else _MOST_MISSING),
    )


def _bounds(documents: tuple[int, ...], ratio: int, queries: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """ks and ke of the last `queries` tokens."""
    ks, ke, first = [], [], 0
    for length in documents:
        ks.append(torch.full((length,), first, dtype=torch.int32, device=device))
        ke.append(first + (torch.arange(length, dtype=torch.int32, device=device) + 1) // ratio)
        first += length // ratio
    return torch.cat(ks)[-queries:].contiguous(), torch.cat(ke)[-queries:].contiguous()


def _whole_numbers(*shape: int, device: torch.device) -> Tensor:
    """-2 .. 2: a product of two rows has 10 bits, few enough for the sums of the matrix instructions."""
    return torch.randint(-2, 3, shape, device=device)


def _blocks(ks: Tensor, ke: Tensor, block_size: int, count: int) -> Tensor:
    """Random blocks for each row, some beyond its entries, -1 here and there."""
    all_blocks = -(-int((ke - ks).max()) // block_size)
    order = torch.rand(len(ks), max(1, all_blocks), device=ks.device).argsort(1)[:, :count].int()
    return torch.where(torch.rand_like(order, dtype=torch.float32) < 0.1, -1, order)
