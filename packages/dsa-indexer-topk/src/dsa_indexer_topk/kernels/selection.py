"""The best of each row of scores, exactly (Triton). Scores are compared as floats: NaN reaches no bound, -0 equals +0.

Two passes find, in most rows, the few items that can be among the best: about the k-th of the maxima of W classes of
items is reached by k items, and mostly by few more. Bisection among those few finds the k-th score. In a row where too
many reach that bound, as many equal ones do, the bisection reads the row again in each step.
"""

import triton
import triton.language as tl

# What the items of a row are.
ENTRIES = tl.constexpr(0)
GROUPS = tl.constexpr(1)  # of entries: the best are rescored
BLOCKS = tl.constexpr(2)  # of entries: the newest is always chosen
CANDIDATES = tl.constexpr(3)  # entries of the best groups, in ascending order
UNSORTED = tl.constexpr(4)  # entries of candidate blocks in any order


@triton.jit
def _key(score):
    """A score as an integer of the same order; -0 has the key of +0."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(key):
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Half way, rounded down, without a sum that wraps."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _count(chosen):
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def _read(row, first, W: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr):
    """Scores of the W items from `first` on: the best of PER each. Not WHOLE: there are fewer, and then NaN."""
    scores, items = row
    item = first + tl.arange(0, W)
    if PER > 1:
        at = item[:, None] * PER + tl.arange(0, PER)[None, :]
        score = tl.max(tl.load(scores + at, mask=item[:, None] < items, other=0.0), axis=1)
        return tl.where(item < items, score, float("nan"))
    if WHOLE:
        return tl.load(scores + item)  # without a mask, four scores are one access
    return tl.load(scores + item, mask=item < items, other=float("nan"))


@triton.jit
def _number(item, mask, candidates, KIND: tl.constexpr, SIZE: tl.constexpr):
    """What an item stands for: of equal scores, the smaller number is better."""
    if (KIND == CANDIDATES) | (KIND == UNSORTED):
        return tl.load(candidates + item // SIZE, mask=mask, other=0) * SIZE + item % SIZE
    return item


@triton.jit
def _bisect(scores, k, most):
    """A bound that k to `most` of the scores reach, or else the largest that more reach.

    And how many of those that equal it are chosen, if k are in all. k: 1 to the number of scores that are not NaN.
    """
    low = _key(tl.min(scores))
    high = _key(tl.max(scores)) + 1
    above = tl.full([], 0, tl.int32)  # how many reach `high`
    searching = low + 1 < high
    while searching:
        middle = _middle(low, high)
        count = _count(scores >= _score(middle))
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        above = tl.where(count >= k, above, count)
        searching = (low + 1 < high) & ((count < k) | (count > most))
    return _score(low), k - above


@triton.jit
def _last_tie(tied, number, need):
    """The largest number among the `need` smallest of those tied."""
    before = tl.full([], -1, tl.int32)
    last = tl.max(tl.where(tied, number, 0))
    while last - before > 1:
        middle = before + (last - before) // 2
        enough = _count(tied & (number <= middle)) >= need
        last = tl.where(enough, middle, last)
        before = tl.where(enough, before, middle)
    return last


@triton.jit
def _store(out, place, k, number, chosen, start, KIND: tl.constexpr):
    if KIND == UNSORTED:
        chosen &= place < k  # a block that is listed twice may have more than k chosen
    if (KIND == GROUPS) | (KIND == BLOCKS):
        tl.store(out + place, number, mask=chosen)
    else:
        tl.store(out + place, (start + number).to(tl.int64), mask=chosen)


@triton.jit
def _choose(scores, item, k, start, candidates, out, KIND: tl.constexpr, SIZE: tl.constexpr):
    """Store the k best of these items, in their order. Returns a bound that k scores reach."""
    bound, need = _bisect(scores, k, k)
    chosen = scores >= bound
    number = _number(item, chosen, candidates, KIND, SIZE)
    if _count(chosen) > k:
        tied = scores == bound
        if KIND == UNSORTED:
            chosen = (scores > bound) | (tied & (number <= _last_tie(tied, number, need)))
        else:
            chosen = (scores > bound) | (tied & (tl.cumsum(tied.to(tl.int32)) <= need))
    _store(out, tl.cumsum(chosen.to(tl.int32)) - 1, k, number, chosen, start, KIND)
    return bound


@triton.jit
def _reaching(row, bound, W: tl.constexpr, PER: tl.constexpr):
    """How many scores of a row reach the bound."""
    _, items = row
    count = tl.zeros([W], tl.int32)
    for first in range(0, items, W):
        count += (_read(row, first, W, PER, False) >= bound).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _last_tie_of_row(
    row, bound, need, longest, candidates, W: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr, PER: tl.constexpr
):
    """`_last_tie` of a row's items with the score `bound`; all numbers are less than `longest`."""
    _, items = row
    before = tl.full([], -1, tl.int32)
    last = longest - 1
    while last - before > 1:
        middle = before + (last - before) // 2
        count = tl.zeros([W], tl.int32)
        for first in range(0, items, W):
            tied = _read(row, first, W, PER, False) == bound
            number = _number(first + tl.arange(0, W), tied, candidates, KIND, SIZE)
            count += (tied & (number <= middle)).to(tl.int32)
        enough = tl.sum(count) >= need
        last = tl.where(enough, middle, last)
        before = tl.where(enough, before, middle)
    return last


@triton.jit
def _bisect_row(row, bound, top, k, W: tl.constexpr, PER: tl.constexpr):
    """As `_bisect`, of a row where k or more reach `bound` and none exceeds `top`."""
    low = _key(bound)
    high = _key(top) + 1
    above = tl.full([], 0, tl.int32)
    middle = low + 1  # where many scores are equal, the bound is likely to be right
    searching = middle < high
    while searching:
        count = _reaching(row, _score(middle), W, PER)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle)
        above = tl.where(count >= k, above, count)
        searching = (low + 1 < high) & (count != k)
        middle = _middle(low, high)
    return _score(low), k - above


@triton.jit
def _choose_from_row(
    row,
    bound,
    top,
    k,
    start,
    longest,
    candidates,
    out,
    W: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    PER: tl.constexpr,
):
    """`_choose` for all items of a row, as `_bisect_row`."""
    _, items = row
    bound, need = _bisect_row(row, bound, top, k, W, PER)
    if KIND == UNSORTED:
        last = _last_tie_of_row(row, bound, need, longest, candidates, W, KIND, SIZE, PER)
    ties = tl.full([], 0, tl.int32)
    placed = tl.full([], 0, tl.int32)
    for first in range(0, items, W):
        if placed < k:
            score = _read(row, first, W, PER, False)
            tied = score == bound
            number = _number(first + tl.arange(0, W), score >= bound, candidates, KIND, SIZE)
            chosen = score > bound
            if KIND == UNSORTED:
                chosen |= tied & (number <= last)
            elif ties < need:
                chosen |= tied & (ties + tl.cumsum(tied.to(tl.int32)) <= need)
                ties += _count(tied)
            _store(out, placed + tl.cumsum(chosen.to(tl.int32)) - 1, k, number, chosen, start, KIND)
            placed += _count(chosen)
    return bound


@triton.jit
def _ascending(candidates, count, W: tl.constexpr):
    """Whether the blocks of a row are in ascending order, each once, with -1 at the end alone."""
    wrong = tl.zeros([W], tl.int32)
    for first in range(0, count, W):
        i = first + tl.arange(0, W)
        block = tl.load(candidates + i, mask=i < count, other=-1)
        after = tl.load(candidates + i + 1, mask=i + 1 < count, other=-1)
        wrong |= ((after >= 0) & (block >= after) | (block < 0) & (after >= 0)).to(tl.int32)
    return tl.max(wrong) == 0


@triton.jit
def _in_whole_chunks(items, W: tl.constexpr, PER: tl.constexpr):
    """How many items can be read without a mask, W at a time."""
    if PER > 1:
        return 0
    return items // W * W


@triton.jit
def _class_maxima(row, W: tl.constexpr, PER: tl.constexpr):
    """The best score of every W-th item, for each of the first W; -inf if there is none."""
    _, items = row
    best = tl.full([W], -float("inf"), tl.float32)
    whole = _in_whole_chunks(items, W, PER)
    for first in range(0, whole, W):
        best = tl.maximum(best, _read(row, first, W, PER, True))  # drops NaN
    for first in range(whole, items, W):
        best = tl.maximum(best, _read(row, first, W, PER, False))
    return best


@triton.jit
def _collect_from(
    row, first, bound, few, reached, W: tl.constexpr, PER: tl.constexpr, WHOLE: tl.constexpr, FEW: tl.constexpr
):
    score = _read(row, first, W, PER, WHOLE)
    reaches = score >= bound
    after = reached + _count(reaches)
    if after <= FEW:
        place = reached - 1 + tl.cumsum(reaches.to(tl.int32))
        # Not so, but the store then has the layout of the load, four items a thread, in which the sums are cheap. That
        # the mask may differ from item to item keeps it from writing four together.
        place = tl.max_contiguous(tl.multiple_of(place, 4), 4)
        tl.store(few + place, first + tl.arange(0, W), mask=reaches)
        if PER > 1:
            tl.store(few + FEW + place, score.to(tl.int32, bitcast=True), mask=reaches)
    return after


@triton.jit
def _collect(row, bound, few, limit, W: tl.constexpr, PER: tl.constexpr, FEW: tl.constexpr):
    """Store the items that reach the bound, in their order. Returns how many; of more than `limit`, not all count."""
    _, items = row
    whole = _in_whole_chunks(items, W, PER)
    reached = tl.full([], 0, tl.int32)
    for first in range(0, whole, W):
        if reached <= limit:
            reached = _collect_from(row, first, bound, few, reached, W, PER, True, FEW)
    for first in range(whole, items, W):
        if reached <= limit:
            reached = _collect_from(row, first, bound, few, reached, W, PER, False, FEW)
    return reached


@triton.jit
def _sort(out, k, unique, TOPK: tl.constexpr):
    """The k picks of a row; unique gets 0 if two are equal."""
    tl.debug_barrier()
    i = tl.arange(0, TOPK)
    picks = tl.sort(tl.load(out + i, mask=i < k, other=2**62))
    tl.debug_barrier()
    tl.store(out + i, picks, mask=i < k)
    tl.debug_barrier()
    after = tl.load(out + i + 1, mask=i + 1 < k, other=-1)
    zero = tl.zeros([TOPK], tl.int32)
    tl.store(unique + zero, zero, mask=after == picks)


@triton.jit
def _fill(out, first, end, W: tl.constexpr):
    """-1 from `first` on."""
    for begin in range(first, end, W):
        i = begin + tl.arange(0, W)
        tl.store(out + i, tl.full([W], -1, out.dtype.element_ty), mask=i < end)


@triton.jit(do_not_specialize=["group_count", "pitch", "entries", "longest", "count", "topk"])
def selection_kernel(
    scores,
    ks,
    ke,
    candidates,
    few,
    out,
    unique,
    bounds,
    groups,
    group_count,
    pitch,
    entries,
    longest,
    count,
    topk,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    PER: tl.constexpr,
    W: tl.constexpr,
    FEW: tl.constexpr,
    TOPK: tl.constexpr,
    WITH_GROUPS: tl.constexpr,
):
    """out (rows, topk): the best items of each row of scores (rows, pitch), ascending, then -1. topk is at least 1.

    Items that are ENTRIES are numbered from ks on; GROUPS and BLOCKS have SIZE entries, and the best of PER scores
    count; those of candidates (rows, count) come in blocks of SIZE. NaN is never chosen. Of equal scores, the smaller
    entry, group or block is better. pitch: a multiple of 4. few: workspace (rows, 2 FEW). TOPK: a power of two, in
    UNSORTED at least topk. There, unique gets 0 if an item would be in a row twice, because its block is; unless so,
    `out` is right.

    bounds (rows,): of GROUPS, gets a bound that topk groups reach, so that topk of their entries do; -inf if there are
    fewer. Of CANDIDATES, it is read: no other entry can be chosen. WITH_GROUPS: of BLOCKS, where PER is 1, also writes
    groups (rows, group_count) and their bounds as GROUPS does; group_count is less than topk.
    """
    program = tl.program_id(0).to(tl.int64)
    start = tl.minimum(tl.maximum(tl.load(ks + program), 0), entries)
    stop = tl.minimum(tl.minimum(tl.load(ke + program), entries), start + longest)
    length = tl.maximum(stop, start) - start  # whatever ks and ke hold, this does not wrap
    items = length
    wanted = topk
    if (KIND == CANDIDATES) | (KIND == UNSORTED):
        items = count * SIZE
    elif KIND == GROUPS:
        items = (length + SIZE - 1) // SIZE
    elif KIND == BLOCKS:
        items = tl.maximum(length - 1, 0) // SIZE  # those before the newest, which is chosen whatever its score
        wanted -= 1
    row = (scores + program * (pitch // 4 * 4), items)  # a multiple of 4 that the compiler sees
    candidates += program * count
    few += program * 2 * FEW
    out += program * topk

    bound = tl.full([], -float("inf"), tl.float32)
    top = tl.full([], float("inf"), tl.float32)
    reached = tl.full([], 0, tl.int32)
    if KIND == CANDIDATES:
        bound = tl.load(bounds + program)
    if wanted > 0:
        if (KIND != CANDIDATES) & (items > FEW):
            best = _class_maxima(row, W, PER)
            top = tl.max(best)
            if wanted <= W:
                bound, _ = _bisect(best, wanted, wanted + wanted // 8)
        reached = _collect(row, bound, few, tl.maximum(wanted, FEW), W, PER, FEW)
    k = tl.minimum(wanted, reached)
    if KIND == BLOCKS:
        tl.store(out + k, items)
        _fill(out, k + 1, topk, TOPK)
    else:
        _fill(out, k, topk, TOPK)
    tl.debug_barrier()  # other threads wrote what is read now
    kth = tl.full([], -float("inf"), tl.float32)
    if WITH_GROUPS:
        # All groups that may be among the best reach the blocks' bound, but for the newest, which did not take part.
        groups += program * group_count
        newest = tl.load(row[0] + items, mask=length > 0, other=float("nan"))
        all_reached = reached + (newest == newest).to(tl.int32)
        group_k = tl.minimum(group_count, all_reached)
        _fill(groups, group_k, group_count, TOPK)
        if all_reached > FEW:
            whole = (row[0], items + 1)
            top_of_all = tl.full([], float("inf"), tl.float32)
            kth = _choose_from_row(
                whole, bound, top_of_all, group_k, start, longest, candidates, groups, W // 2, GROUPS, SIZE, PER
            )
        elif group_k > 0:
            i = tl.arange(0, FEW)
            item = tl.load(few + i, mask=i < reached, other=0)
            item = tl.where(i == reached, items, item)
            score = tl.load(row[0] + item, mask=i < all_reached, other=float("nan"))
            kth = _choose(score, item, group_k, start, candidates, groups, GROUPS, SIZE)
        tl.store(bounds + program, tl.where(group_k == group_count, kth, -float("inf")))
    if reached > FEW:
        kth = _choose_from_row(row, bound, top, k, start, longest, candidates, out, W // 2, KIND, SIZE, PER)
    elif k > 0:
        i = tl.arange(0, FEW)
        item = tl.load(few + i, mask=i < reached, other=0)
        if PER > 1:
            score = tl.load(few + FEW + i, mask=i < reached, other=0).to(tl.float32, bitcast=True)
            score = tl.where(i < reached, score, float("nan"))
        else:
            score = tl.load(row[0] + item, mask=i < reached, other=float("nan"))
        kth = _choose(score, item, k, start, candidates, out, KIND, SIZE)
    if KIND == GROUPS:
        tl.store(bounds + program, tl.where(k == topk, kth, -float("inf")))
    if KIND == UNSORTED:
        in_order = _ascending(candidates, count, W)
        if not in_order:
            _sort(out, k, unique, TOPK)
