"""Host side of the kernels: results and workspace, and the launches that `plan` describes."""

import torch
from torch import Tensor

from dsa_indexer_topk import arguments, plan

variants = plan.variants


def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ks: Tensor,
    ke: Tensor,
    topk: int,
    candidates: Tensor | None,
    emit_candidates: bool,
    max_entries_per_doc: int,
    block_size: int,
    topk_blocks: int,
) -> tuple[Tensor, Tensor]:
    """`reference.index_topk` on the current stream of q's device.

    Documents of up to 16,384 entries: all scores of a row are kept, and the best picked. Longer ones: the best score of
    each group of 8 entries (of block_size entries, if blocks are emitted) is kept; the entries of the topk best groups,
    which have all picks in them, are scored again. Candidates: the scores of their entries alone.

    Workspace: the e4m3 copies, (H D + 4 H) bytes a query and D + 4 an entry; and for as many rows at a time as need
    256 MiB together (64 at least), `plan.row_bytes` each. Besides, copies of operands that are not contiguous, not
    aligned to 16 bytes, or, of integers, not int32.
    """
    queries, entries = q.shape[0], k.shape[0]
    picks = torch.empty((queries, topk), dtype=torch.int64, device=q.device)
    shape = (queries, topk_blocks) if emit_candidates else (0, 0)
    blocks = torch.empty(shape, dtype=torch.int32, device=q.device)
    longest = min(max_entries_per_doc, entries)
    if longest == 0 or picks.numel() + blocks.numel() == 0:
        picks.fill_(-1)
        blocks.fill_(-1)[:, :1] = 0
        return picks, blocks
    with torch.cuda.device_of(q):
        rows = _quantized(q, k, w, ks, ke, longest)
        unique = None
        if candidates is not None:
            candidates = _bounds(candidates, entries)
            unique = torch.ones(1, dtype=torch.int32, device=q.device)
        listed = None if candidates is None else candidates.shape[1] * block_size
        size = plan.rows_at_a_time(longest, listed, topk, emit_candidates, block_size, topk_blocks)
        for first in range(0, queries, size):
            part = slice(first, min(first + size, queries))
            _select(
                rows.part(part),
                None if candidates is None else candidates[part],
                unique,
                picks[part],
                blocks[part] if emit_candidates else None,
                block_size,
            )
        if unique is not None:
            torch._assert_async(unique, arguments.NOT_UNIQUE)
    return picks, blocks


def _quantized(q: Tensor, k: Tensor, w: Tensor, ks: Tensor, ke: Tensor, longest: int) -> plan.Rows:
    (queries, heads, _), entries = q.shape, k.shape[0]
    q8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    k8 = torch.empty(plan.key_rows(entries), k.shape[1], dtype=torch.float8_e4m3fn, device=q.device)[:entries]
    weights, scales = _fp32(q, queries, heads), _fp32(q, entries)
    plan.quantize(_readable(q), _readable(w), q8, weights).run()
    plan.quantize(_readable(k), None, k8, scales).run()
    return plan.Rows(q8, k8, weights, scales, _bounds(ks, entries), _bounds(ke, entries), longest)


def _select(
    rows: plan.Rows,
    candidates: Tensor | None,
    unique: Tensor | None,
    picks: Tensor,
    blocks: Tensor | None,
    block_size: int,
) -> None:
    """Write the picks of some rows, and their blocks if wanted. Workspace comes from PyTorch's allocator each time.

    unique: gets 0 if a candidate is in a row twice and is picked from.
    """
    count, topk = picks.shape
    group = plan.group_size(rows.longest, None if blocks is None else block_size)
    kept = 0 if blocks is None else blocks.shape[1]
    few = torch.empty(count, plan.few_keys(topk, kept), dtype=torch.int64, device=picks.device)
    if kept > 0 or (topk > 0 and candidates is None):
        scores = _fp32(picks, count, plan.pitch(-(-rows.longest // group)))
        plan.score(rows, scores, group).run()
    groups = bounds = None
    if topk > 0 and candidates is None and group > 1:
        groups, bounds = torch.empty(count, topk, dtype=torch.int32, device=picks.device), _fp32(picks, count)
    both = groups is not None and kept > topk  # one launch selects blocks and groups, which are the same
    if kept > 0:
        found = {"bounds": bounds, "groups": groups} if both else {}
        plan.select(rows, scores, None, few, blocks, "BLOCKS", block_size, block_size // group, **found).run()
    if topk == 0:
        return
    if candidates is not None and candidates.shape[1] == 0:
        picks.fill_(-1)
    elif candidates is not None:
        scores = _fp32(picks, count, plan.pitch(candidates.shape[1] * block_size))
        plan.score_candidates(rows, candidates, scores, block_size).run()
        plan.select(rows, scores, candidates, few, picks, "UNSORTED", block_size, unique=unique).run()
    elif group == 1:
        plan.select(rows, scores, None, few, picks, "ENTRIES", 1).run()
    else:
        if not both:
            plan.select(rows, scores, None, few, groups, "GROUPS", group, bounds=bounds).run()
        scores = _fp32(picks, count, plan.pitch(topk * group))
        plan.score_candidates(rows, groups, scores, group).run()
        plan.select(rows, scores, groups, few, picks, "CANDIDATES", group, bounds=bounds).run()


def _fp32(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _bounds(t: Tensor, entries: int) -> Tensor:
    """Entries or blocks in int32, which an int64 number outside of the entries may not fit; -1 for a negative one."""
    return _readable(t if t.dtype == torch.int32 else t.clamp(-1, entries).int())


def _readable(t: Tensor) -> Tensor:
    """t itself where the kernels can read it: contiguous and aligned to 16 bytes. Else a copy."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()
