"""The kernels against the definition in float64: every number of heads, and slots and queries of any number."""

import math

import pytest
import torch
from dsa_sparse_attn_bwd import arguments, reference

from tests.dsa_sparse_attn_bwd import judge, on_gpu
from tests.dsa_sparse_attn_bwd.inputs import NAMES
from tests.dsa_sparse_attn_bwd.on_gpu import CHANNELS, DEVICE, MODES
from tests.support.compare import assert_close_to_float64

pytestmark = pytest.mark.gpu

each_mode = pytest.mark.parametrize("deterministic", list(MODES.values()), ids=list(MODES))
each_number_of_heads = pytest.mark.parametrize("heads", arguments.HEADS)
WIDTHS = (1, 8, 17, 56, 63, 64, 65, 70, 100, 128, 512, 576, 640, 641, 2048)


def half_the_weight(width, heads=64):
    """Sinks that take about half of it: where all slots are equal, what is left without them is rounding."""
    return torch.full((heads,), math.log(width), device=DEVICE)


@each_mode
@pytest.mark.parametrize("width", WIDTHS)
def test_numbers_of_slots(width, deterministic):
    on_gpu.assert_right(on_gpu.operands(37, width, rows=900), deterministic)


@each_mode
@each_number_of_heads
@pytest.mark.parametrize("width", [17, 64, 70, 640])
def test_numbers_of_heads(heads, width, deterministic):
    on_gpu.assert_right(on_gpu.operands(69, width, heads=heads), deterministic)


@each_mode
@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("queries", [1, 2, 63, 65, 131, 132, 133, 265, 397])
@pytest.mark.parametrize("width", [70, 460])
def test_numbers_of_queries(width, queries, heads, deterministic):
    """Fewer than programs, as many, and several for each."""
    on_gpu.assert_right(on_gpu.operands(queries, width, heads=heads, alone=7), deterministic)


@each_mode
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 5000])
def test_numbers_of_rows(rows, deterministic):
    """Down to one, which is in every slot."""
    on_gpu.assert_right(on_gpu.operands(70, 70, rows=rows, sinks=half_the_weight(70)), deterministic)


@each_mode
@each_number_of_heads
@pytest.mark.parametrize(("queries", "width"), [(1, 1), (5, 64), (133, 70), (397, 200), (397, 460)])
def test_whole_numbers_are_exact(queries, width, heads, deterministic):
    """Nothing rounds before the results do, so each number is the definition's; sums of any order too."""
    on_gpu.assert_exact(on_gpu.whole(queries, width, heads=heads), deterministic)


@each_mode
@each_number_of_heads
def test_one_query_one_slot_and_a_gradient_of_a_single_one(heads, deterministic):
    """The gradient of the row then is one product of known numbers, once."""
    t = on_gpu.whole(1, 1, rows=3, heads=heads, empty=0.0, alone=0)
    for head, channel, row in ((1, 0, 0), (heads - 1, 511, 2), (4, 255, 1), (heads // 2, 256, 2)):
        if head % 3 == 0:  # has a sink of +inf
            head -= 1
        grad_out = torch.zeros_like(t.grad_out)
        grad_out[0, head, channel] = 1
        one = t._replace(grad_out=grad_out, indices=torch.full_like(t.indices, row))
        _, dkv, _ = on_gpu.assert_exact(one, deterministic, f"head {head}, channel {channel}")
        ds = t.kv[row, channel].double() - t.out[0, head, channel].double()
        wanted = 0.5 * ds * t.q[0, head].double() + grad_out[0, head].double()
        assert torch.equal(dkv[row].double(), wanted)
        assert dkv.count_nonzero() == wanted.count_nonzero()


@each_mode
def test_widths_in_one_process(deterministic):
    """Each width gives what it gave before the others ran."""
    calls = {width: on_gpu.whole(133, width, heads=64) for width in (640, 128, 1, 64, 65)}
    first = {width: on_gpu.assert_exact(t, deterministic, f"{width} slots") for width, t in calls.items()}
    for width in (640, 128, 640, 1, 65, 640, 64, 128, 1, 640):
        on_gpu.assert_same(on_gpu.flat(calls[width], deterministic), first[width], f"{width} slots", ordered=True)


def lengths(t, numbers):
    """The first so many slots of each query alone, in turn."""
    length = torch.tensor(numbers, device=DEVICE).repeat(len(t.q))[: len(t.q)]
    place = torch.arange(t.indices.shape[1], device=DEVICE)
    return t.indices.masked_fill(place >= length[:, None], -1)


@each_mode
@each_number_of_heads
@pytest.mark.parametrize("shuffled", [False, True])
def test_queries_of_different_lengths(heads, shuffled, deterministic):
    """0, 1, 63, 64, 65 and 640 slots in one launch, in front or anywhere among empty ones."""
    t = on_gpu.operands(150, 640, heads=heads, empty=0.0, alone=0)
    indices = lengths(t, [0, 1, 63, 64, 65, 640, 0, 0])
    if shuffled:
        indices = indices.gather(1, torch.rand(indices.shape, device=DEVICE).argsort(1))
    t = on_gpu.forward(t._replace(indices=indices))
    dq, _, _ = on_gpu.assert_right(t, deterministic)
    assert not dq[(indices < 0).all(dim=1)].any()


@each_mode
@pytest.mark.parametrize("where", ["all", "first", "last", "middle", "all but the last", "all but the first"])
def test_runs_of_queries_without_slots(where, deterministic):
    """Longer than the queries that a program has."""
    which = {
        "all": slice(None),
        "first": slice(0, 300),
        "last": slice(300, None),
        "middle": slice(50, 350),
        "all but the last": slice(0, -1),
        "all but the first": slice(1, None),
    }
    t = on_gpu.operands(400, 65, alone=0)
    t.indices[which[where]] = -1
    t = on_gpu.forward(t)
    dq, dkv, dsinks = on_gpu.assert_right(t, deterministic)
    assert not dq[which[where]].any()
    if where == "all":
        assert not dkv.any()
        assert not dsinks.any()


@each_mode
def test_queries_with_disjoint_rows(deterministic):
    """Five queries that share none: each gradient of a row is a single query's."""
    for heads in arguments.HEADS:
        indices = torch.randperm(5 * 70, dtype=torch.int32, device=DEVICE).view(5, 70)
        on_gpu.assert_right(on_gpu.operands(5, 70, rows=350, heads=heads, indices=indices), deterministic)


@each_mode
def test_rows_that_are_named_twice(deterministic):
    indices = on_gpu.slots(133, 50, 700)
    on_gpu.assert_right(on_gpu.operands(133, 150, indices=indices.repeat(1, 3)), deterministic)


@each_mode
@pytest.mark.parametrize("width", [8, 64, 70, 640])
def test_one_row_in_all_slots(width, deterministic):
    """Another one for each query."""
    indices = torch.randint(0, 700, (133, 1), dtype=torch.int32, device=DEVICE).expand(-1, width).contiguous()
    t = on_gpu.operands(133, width, indices=indices, sinks=half_the_weight(width))
    on_gpu.assert_right(t, deterministic)


@each_mode
def test_every_query_names_the_same_row(deterministic):
    """In all of its slots, or in one of them: everything is added to one row."""
    everywhere = torch.full((397, 70), 3, dtype=torch.int32, device=DEVICE)
    on_gpu.assert_exact(on_gpu.whole(397, 70, indices=everywhere), deterministic)
    once = on_gpu.slots(397, 70, 700)
    once[:, 5] = 3
    on_gpu.assert_right(on_gpu.operands(397, 70, indices=once), deterministic)


@each_mode
def test_rows_out_of_range_are_empty_slots(deterministic):
    """The next row that there is not, and the ends of int32, anywhere among the others."""
    t = on_gpu.whole(133, 130)
    wanted = on_gpu.assert_exact(t, deterministic)
    odd = torch.tensor([-2, -(2**31), 2**31 - 1, 300, 301, 363, -1], dtype=torch.int32, device=DEVICE)
    filled = torch.where(t.indices < 0, odd[torch.randint(0, len(odd), t.indices.shape, device=DEVICE)], t.indices)
    assert (filled >= 300).any()
    on_gpu.assert_same(on_gpu.flat(t._replace(indices=filled), deterministic), wanted, ordered=True)
    wide = filled.long()
    wide[filled < 0], wide[filled >= 300] = -(2**40) - 1, 2**32 + 5  # row 5 if it were cut off to 32 bits
    on_gpu.assert_same(on_gpu.flat(t._replace(indices=wide), deterministic), wanted, "int64", ordered=True)


@each_mode
def test_nine_slots_of_ten_empty(deterministic):
    on_gpu.assert_right(on_gpu.operands(265, 640, empty=0.9), deterministic)


def packed(documents, rows, window, picks):
    """Slots of packed documents: a causal window, then picks of earlier rows of the document, and ids beyond all."""
    found = []
    for first, last in zip((0, *documents), documents, strict=False):
        token = torch.arange(first, last)[:, None]
        near = token - torch.arange(window)
        far = first + (torch.rand(last - first, picks) * (token - first + 1)).long()
        far = far.masked_fill(torch.rand(far.shape) < 0.1, rows + 3)
        found.append(torch.cat([near.masked_fill(near < first, -1), far], dim=1))
    return torch.cat(found).int().to(DEVICE)


@each_mode
@pytest.mark.parametrize(("window", "picks"), [(128, 0), (128, 512)], ids=["window", "window and picks"])
def test_packed_documents(window, picks, deterministic):
    """Documents of one token among them; no gradient of one reaches the rows of another."""
    ends = (1, 150, 151, 152, 260, 261)
    t = on_gpu.operands(261, window + picks, rows=261, indices=packed(ends, 261, window, picks))
    on_gpu.assert_right(t, deterministic)
    second = torch.zeros(261, 1, 1, device=DEVICE, dtype=torch.bool)
    second[1:150] = True
    dq, dkv, _ = on_gpu.flat(t._replace(grad_out=t.grad_out.masked_fill(~second, 0.0)), deterministic)
    assert dkv[1:150].any(dim=1).all()
    for other in (dq[:1], dq[150:], dkv[:1], dkv[150:]):
        assert not other.any()


@each_mode
@pytest.mark.parametrize("q_size", [8.0, 24.0])
def test_peaked_softmax(q_size, deterministic):
    """Nearly all of the weight on one slot."""
    on_gpu.assert_right(on_gpu.operands(133, 200, q_size=q_size), deterministic)


@each_mode
def test_operands_of_very_different_size(deterministic):
    """Queries of a thousand and rows of a thousandth: numbers that land in the wrong place are of the wrong size."""
    on_gpu.assert_right(on_gpu.operands(133, 200, q_size=1e3, kv_size=1e-3), deterministic)


@each_mode
@pytest.mark.parametrize("scale", [0.0, -0.03, 0.2, 1e-6, 1])
def test_other_scales(scale, deterministic):
    t = on_gpu.operands(133, 100, scale=scale, q_size=0.2)
    on_gpu.assert_right(t, deterministic)


@each_mode
@pytest.mark.parametrize("width", [100, 500])
def test_terms_that_cancel(width, deterministic):
    """The gradient of the output is nearly the output, and all rows have a large part in common.

    What is left is bounded by the error of the same mathematics, with the output in bf16 that the call has.
    """
    common = on_gpu.normal(1, CHANNELS)
    t = on_gpu.operands(133, width, alone=0)
    t = on_gpu.forward(t._replace(kv=common + 0.25 * t.kv))
    t = t._replace(grad_out=8 * t.out + 0.25 * t.grad_out)
    exact, rounded = reference.backward(*t, dtype=torch.float64), judge.rounded(t)
    tail = t.out[..., -on_gpu.TAIL :].clone()
    for call in (t, t._replace(out_tail=tail)):
        for name, got, want, eager in zip(NAMES, on_gpu.flat(call, deterministic), exact, rounded, strict=True):
            assert_close_to_float64(got, want, eager, floor=1e-5, name=name)
