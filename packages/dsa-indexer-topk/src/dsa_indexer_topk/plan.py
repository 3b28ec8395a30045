"""Plan of the kernels: tiles, grids and arguments of each launch, workspace, and what is compiled ahead."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from hopper_kernels.launcher import Launch
from torch import Tensor

from dsa_indexer_topk import arguments

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

COLUMNS = 128  # queries x heads of a warpgroup of the scores' kernel, which has two
BLOCK, OCTET = 64, 8  # entries of a tile, and of what lies together in a candidate's tile
LONGEST_WHOLE = 16384  # entries of a document of which all scores are kept; of longer ones, the best of each group
GROUP = 8  # entries of such a group, if no blocks of another size are asked for
PART, LEAST_PART = 16384, 1024  # entries of a document that a program computes
SMS = 132  # of an H100 or H200
WORKSPACE = 2**28  # bytes, about: as many rows at a time as fit

QUANTIZE_ROWS = 32
SCORE_STAGES = 8  # of two tiles
CANDIDATE = {"STAGES": 2, "num_warps": 4, "maxnreg": 64}  # four programs an SM


class Rows(NamedTuple):
    """Some queries, ready for the kernels.

    queries (rows, H, D) and keys (entries, D) e4m3; weights (rows, H) and scales (entries,) fp32, the scales halved;
    ks, ke (rows,) int32. longest: no document has more entries.
    """

    queries: Tensor
    keys: Tensor
    weights: Tensor
    scales: Tensor
    ks: Tensor
    ke: Tensor
    longest: int

    def part(self, rows: slice) -> "Rows":
        """These rows of all queries."""
        q, weights, ks, ke = self.queries[rows], self.weights[rows], self.ks[rows], self.ke[rows]
        return self._replace(queries=q, weights=weights, ks=ks, ke=ke)


def group_size(longest: int, block_size: int | None) -> int:
    """Entries of which the best score is kept: 1 keeps all. block_size: of blocks that are asked for, or None."""
    if longest <= LONGEST_WHOLE:
        return 1
    return GROUP if block_size is None else block_size


def pitch(scores: int) -> int:
    """From a row of so many scores to the next: so that four are one access."""
    return -(-scores // 4) * 4


def row_bytes(longest: int, listed: int | None, topk: int, emit: bool, block_size: int, topk_blocks: int) -> int:
    """Workspace of a row. listed: entries in its candidate blocks, None without candidates."""
    group = group_size(longest, block_size if emit else None)
    whole = -(-longest // group) if emit or listed is None else 0
    again = group > 1 and listed is None
    groups = topk + 1 if again else 0  # and a bound
    rescored = topk * group if again else listed or 0
    return 4 * (pitch(whole) + groups + pitch(rescored)) + 8 * few_keys(topk, topk_blocks if emit else 0)


def rows_at_a_time(*sizes) -> int:
    """Rows that share the workspace, a multiple of what a program of the scores' kernel takes. As `row_bytes`."""
    return max(64, WORKSPACE // row_bytes(*sizes) // 64 * 64)


def few_keys(*counts: int) -> int:
    """Keys of a row that are in registers together: twice as many as are chosen, in bounds."""
    return max(1024, min(4096, 2 * _power_of_two(max(counts))))


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def key_rows(entries: int) -> int:
    """Rows of the e4m3 keys' memory: full groups of entries, of any size."""
    most = max(GROUP, *arguments.BLOCK_SIZES)
    return -(-entries // most) * most


def part(count: int, heads: int, longest: int) -> int:
    """Entries of a document that a program of the scores computes: few where else some SMs had nothing to do."""
    programs = -(-count // (2 * COLUMNS // heads))
    shares = max(1, 2 * SMS // programs)
    return min(PART, -(-longest // shares // LEAST_PART) * LEAST_PART)


def quantize(x: Tensor, w: Tensor | None, out: Tensor, scales: Tensor) -> Launch:
    """e4m3 rows of x, (..., D) contiguous, and their scales times w, or without w half the scales."""
    from dsa_indexer_topk.kernels.quantize import quantize_kernel

    rows, d = scales.numel(), x.shape[-1]
    args = (x, scales if w is None else w, out, scales, rows)
    options = {"WEIGHTED": w is not None, "D": d, "ROWS": QUANTIZE_ROWS, "num_warps": 4}
    return Launch(quantize_kernel, (-(-rows // QUANTIZE_ROWS),), args, options)


def score(rows: Rows, out: Tensor, group: int) -> Launch:
    """All scores of the rows, or the best of each group of entries."""
    from dsa_indexer_topk.kernels.scores import score_kernel

    count, heads, d = rows.queries.shape
    length = part(count, heads, rows.longest)
    args = (
        _descriptor(rows.queries.view(count * heads, d), COLUMNS, d),
        _descriptor(_grouped(rows.keys, group), BLOCK, d),
        *rows[2:6],
        out,
        count,
        rows.keys.shape[0],
        rows.longest,
        length,
        out.shape[1],
    )
    grid = (-(-count // (2 * COLUMNS // heads)), -(-rows.longest // length))
    options = {"H": heads, "D": d, "GROUP": group, "STAGES": SCORE_STAGES, "num_warps": 4}
    return Launch(score_kernel, grid, args, options)


def score_candidates(rows: Rows, candidates: Tensor, out: Tensor, group: int) -> Launch:
    """Scores of the entries in candidates (rows, C), blocks of `group` entries; C is at least 1."""
    from dsa_indexer_topk.kernels.candidates import candidate_kernel

    count, heads, d = rows.queries.shape
    args = (
        _descriptor(rows.queries.view(count * heads, d), heads, d),
        _descriptor(rows.keys, OCTET, d),
        *rows[2:6],
        candidates,
        out,
        rows.keys.shape[0],
        rows.longest,
        candidates.shape[1],
        out.shape[1],
    )
    return Launch(candidate_kernel, (count,), args, {"H": heads, "D": d, "GROUP": group, **CANDIDATE})


def select(
    rows: Rows,
    scores: Tensor,
    candidates: Tensor | None,
    few: Tensor,
    out: Tensor,
    kind: str,
    size: int,
    per: int = 1,
    bounds: Tensor | None = None,
    groups: Tensor | None = None,
    unique: Tensor | None = None,
) -> Launch:
    """The best items of each row of scores; kind: the name of a constant in `kernels.selection`.

    The rows of scores are a multiple of 4 long. few: int64, at least `few_keys` of out's width a row. bounds (rows,)
    fp32: for GROUPS, and as it left them for CANDIDATES. groups: for BLOCKS, to have the best groups too, fewer than
    blocks. unique: int32, for UNSORTED alone.
    """
    from dsa_indexer_topk.kernels import selection

    assert scores.shape[1] % 4 == 0, "rows of scores start at multiples of 16 bytes"
    count, topk = out.shape
    width = 1024 if per > 1 else min(4096, max(2048, 4 * _power_of_two(topk)))
    listed = 0 if candidates is None else candidates.shape[1]
    args = (
        scores,
        rows.ks,
        rows.ke,
        rows.ks if candidates is None else candidates,
        few.view(torch.int32),
        out,
        rows.ks if unique is None else unique,
        scores if bounds is None else bounds,
        out if groups is None else groups,
        0 if groups is None else groups.shape[1],
        scores.shape[1],
        rows.keys.shape[0],
        rows.longest,
        listed,
        topk,
    )
    options = {
        "KIND": getattr(selection, kind).value,
        "SIZE": size,
        "PER": per,
        "W": width,
        "FEW": few_keys(topk),
        "TOPK": min(2048, _power_of_two(topk)),
        "WITH_GROUPS": groups is not None,
        "num_warps": 8 if per > 1 or width > 2048 else 4,
    }
    return Launch(selection.selection_kernel, (count,), args, options)


def _grouped(keys: Tensor, group: int) -> Tensor:
    """Keys (entries, D) with one row for each `group` entries. The memory of the last row is there: `key_rows`."""
    entries, d = keys.shape
    return keys.as_strided((-(-entries // group), group * d), (group * d, 1))


def _descriptor(t: Tensor, rows: int, width: int):
    """A TMA descriptor of a contiguous matrix of bytes, for tiles of so many rows and bytes."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, width], _layout(width))


@functools.cache
def _layout(width: int):
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=8, rank=2)


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: V4.1's heads, topk and blocks. Other sizes compile when first met."""
    from hopper_kernels.models import V41_FLASH
    from hopper_kernels.precompile import Variant

    heads, d = V41_FLASH.index_heads, V41_FLASH.index_head_dim
    topk, size, kept = V41_FLASH.index_topk, V41_FLASH.index_block_size, V41_FLASH.index_topk_blocks
    count, entries = 1024, 2 * LONGEST_WHOLE

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    queries, keys = meta(count, heads, d, dtype=torch.float8_e4m3fn), meta(entries, d, dtype=torch.float8_e4m3fn)
    number = functools.partial(meta, dtype=torch.int32)
    rows = Rows(queries, keys, meta(count, heads), meta(entries), number(count), number(count), entries)
    scores, picks = meta(count, entries), meta(count, topk, dtype=torch.int64)
    few, unique, bounds = meta(count, few_keys(topk, kept), dtype=torch.int64), number(1), meta(count)
    candidates, blocks, groups = number(count, kept), number(count, kept), number(count, topk)
    bf16 = functools.partial(meta, dtype=torch.bfloat16)
    tensor_cores = ("QGMMA", "UTMALDG")
    found = [
        Variant("quantize[weighted=0]", quantize(bf16(entries, d), None, keys, rows.scales).compile),
        Variant("select[groups]", select(rows, scores, None, few, groups, "GROUPS", GROUP, bounds=bounds).compile),
        Variant("select[entries]", select(rows, scores, None, few, picks, "ENTRIES", 1).compile),
        Variant("select[blocks]", select(rows, scores, None, few, blocks, "BLOCKS", size).compile),
        Variant(
            "select[blocks and groups]",
            select(rows, scores, None, few, blocks, "BLOCKS", size, bounds=bounds, groups=groups).compile,
        ),
        Variant("select[blocks of entries]", select(rows, scores, None, few, blocks, "BLOCKS", size, size).compile),
        Variant(
            "select[candidates]", select(rows, scores, groups, few, picks, "CANDIDATES", GROUP, bounds=bounds).compile
        ),
        Variant(
            "select[unsorted]", select(rows, scores, candidates, few, picks, "UNSORTED", size, unique=unique).compile
        ),
        Variant("candidates", score_candidates(rows, candidates, scores, size).compile, tensor_cores),
    ]
    for w in (bf16(count, heads), meta(count, heads)):
        label = f"quantize[weighted={str(w.dtype).removeprefix('torch.')}]"
        found.append(Variant(label, quantize(bf16(count, heads, d), w, queries, rows.weights).compile))
    for group in (1, GROUP):
        found.append(Variant(f"scores[group={group}]", score(rows, scores, group).compile, tensor_cores))
    return found
