"""The rotation of the definition, bit for bit, against fractions: which product is fused and where it is rounded."""

import math

import pytest
import torch
from fp8_dual_cast import reference

from tests.fp8_dual_cast import exact, inputs
from tests.support.compare import assert_same_bytes

NAN, INF = math.nan, math.inf
directions = pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])

# (a, b, cosine, sine) for which every other placement of the rounding in one output gives another bf16.
PINS_A = [
    (-1.5859375, -1.265625, "0x1.3f5ba0p-1", "0x1.903170p-1"),
    (-0.279296875, 0.06005859375, "-0x1.adf772p-3", "0x1.f496d6p-1"),
    (-0.1572265625, -0.75, "0x1.f51742p-1", "0x1.a48356p-3"),
]
PINS_B = [
    (-0.8046875, -1.0, "0x1.402da4p-1", "-0x1.8f897ep-1"),
    (-0.3515625, -0.451171875, "-0x1.0c7f86p-1", "0x1.b3f34ep-1"),
    (-0.359375, 0.228515625, "-0x1.bbb874p-1", "-0x1.fee7ccp-2"),
]
# Rounded once from the exact sum, without fp32 in between, one of the two outputs is another bf16.
PINS_FP32 = [
    (-0.625, 1.1640625, "0x1.2835dcp-1", "-0x1.a19dc8p-1"),
    (-0.3046875, -1.375, "0x1.bb102ap-3", "-0x1.f3dffcp-1"),
    (-0.109375, 0.271484375, "0x1.7ea942p-2", "0x1.dae82ep-1"),
]


def parse(pin):
    a, b, c, s = pin
    return a, b, float.fromhex(c), float.fromhex(s)


def rotate_one(a, b, c, s, inverse=False):
    """The pair (a, b) of one token through `reference.rotate`, as bf16."""
    x = torch.tensor([[a, b]]).bfloat16()
    table = torch.tensor([[c, s]])
    assert x[0].tolist() == pytest.approx([a, b], rel=0, abs=0, nan_ok=True), "the inputs must be bf16 numbers"
    return reference.rotate(x, table, torch.tensor([0]), 2, inverse)


def assert_rotates(x, table, positions, head_dim, inverse):
    expected = exact.rotate(x, table, positions, head_dim, inverse)
    assert_same_bytes(reference.rotate(x, table, positions, head_dim, inverse), expected, "rotate")


@directions
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(
    ("head_dim", "rope_dim", "channels"),
    [(512, 64, 1024), (64, 64, 128), (128, 32, 384), (192, 64, 384), (192, 192, 384), (256, 128, 256), (12, 4, 384)],
)
def test_heads(head_dim, rope_dim, channels, dtype, inverse):
    """Head sizes beside, below and across 128 channels; repeated, unsorted positions of both integer types."""
    x = inputs.matrix(7, channels)
    table = inputs.cos_sin_cache(50, rope_dim)
    positions = inputs.position_ids(7, 50, dtype)
    assert_rotates(x, table, positions, head_dim, inverse)
    unrotated = torch.arange(channels) % head_dim < head_dim - rope_dim
    y = reference.rotate(x, table, positions, head_dim, inverse)
    assert torch.equal(y[:, unrotated], x[:, unrotated])


@directions
@pytest.mark.parametrize("exponent", [-128, -60, 0, 124], ids=lambda e: f"2**{e}")
def test_random_pairs_of_every_size(exponent, inverse):
    """Magnitudes of a pair 2**8 apart at most, near fp32's denormals and near its overflow, where Inf is right."""
    g = torch.Generator().manual_seed(exponent)
    size = 2.0 ** torch.randint(-4, 5, (40, 64), generator=g)
    x = (torch.randn(40, 64, generator=g).double() * size * 2.0**exponent).bfloat16()
    table = torch.randn(40, 64, generator=g)
    assert_rotates(x, table, torch.arange(40), 64, inverse)
    if exponent == 124:
        assert reference.rotate(x, table, torch.arange(40), 64, inverse).isinf().any()


def test_the_fma_placement_is_pinned():
    """Other placements give another bf16 in each of these, so the product that must stay exact is a's."""
    for a, b, c, s in map(parse, PINS_A):
        right = exact.rotate_pair(a, b, c, s, False)[0]
        assert exact.bf16(exact.fma(-b, s, exact.mul(a, c))) != right, "the other product fused"
        assert exact.bf16(exact.fma(1.0, exact.mul(a, c), -exact.mul(b, s))) != right, "no fma"
        for sine, inverse in ((s, False), (-s, True)):
            assert rotate_one(a, b, c, sine, inverse)[0, 0].item() == right
    for a, b, c, s in map(parse, PINS_B):
        right = exact.rotate_pair(a, b, c, s, False)[1]
        assert exact.bf16(exact.fma(b, c, exact.mul(a, s))) != right, "the other product fused"
        assert exact.bf16(exact.fma(1.0, exact.mul(a, s), exact.mul(b, c))) != right, "no fma"
        for sine, inverse in ((s, False), (-s, True)):
            assert rotate_one(a, b, c, sine, inverse)[0, 1].item() == right


def test_the_result_is_rounded_to_fp32_before_bf16():
    for pin in PINS_FP32:
        a, b, c, s = parse(pin)
        right = exact.rotate_pair(a, b, c, s, False)
        in_float64 = torch.tensor([a * c - b * s, a * s + b * c], dtype=torch.float64).bfloat16()
        assert in_float64.tolist() != right
        assert rotate_one(a, b, c, s)[0].tolist() == right


# 3 * factor is the middle of two fp32 numbers of which one is the middle of two bf16 numbers, and the tiny second
# product lies on the other side: float64 loses it, takes the tie to even, and then takes the bf16 tie, too.
UP = (5614251 / 2**24, 2.0**-60, 1 + 2.0**-7)  # 1 + 2**-8 + 2**-24 and a little more
DOWN = (5657941 / 2**24, -(2.0**-60), 1 + 2.0**-7)  # 1 + 3 * 2**-8 - 2**-24 and a little less


@pytest.mark.parametrize(("factor", "tiny", "right"), [UP, DOWN], ids=["up", "down"])
def test_the_sum_is_not_rounded_twice(factor, tiny, right):
    plain = torch.tensor(3 * factor + tiny, dtype=torch.float64).float().bfloat16().item()
    assert plain != right, "a plain float64 sum must fail here, else this test says nothing"
    small = math.copysign(2.0**-30, tiny)
    for sine, inverse in ((-small, False), (small, True)):
        assert rotate_one(3.0, 2.0**-30, factor, sine, inverse)[0, 0].item() == right
    for sine, inverse in ((factor, False), (-factor, True)):
        assert rotate_one(3.0, small, 2.0**-30, sine, inverse)[0, 1].item() == right


@directions
def test_position_zero_is_the_plain_cast(inverse):
    """c = 1 and s = 0 change no number but a zero's sign, which the next test pins."""
    x = inputs.matrix(5, 128)
    table, positions = inputs.cos_sin_cache(2, 64), torch.zeros(5, dtype=torch.int64)
    assert_same_bytes(reference.rotate(x, table, positions, 64, inverse), x)
    assert_same_bytes(reference.dual_cast(x, False, table, positions, 64, inverse)[2], reference.dual_cast(x)[2], "q_t")


# Of a pair with a zero, at c = 1 and s = +0: (a, b), forward, inverse. IEEE's sum of two zeros is -0 for two -0 only.
ZEROS = [
    ((-0.0, 3.0), (-0.0, 3.0), (0.0, 3.0)),
    ((-0.0, -3.0), (0.0, -3.0), (-0.0, -3.0)),
    ((3.0, -0.0), (3.0, 0.0), (3.0, -0.0)),
    ((-3.0, -0.0), (-3.0, -0.0), (-3.0, 0.0)),
    ((-0.0, -0.0), (0.0, -0.0), (-0.0, 0.0)),
    ((-0.0, 0.0), (-0.0, 0.0), (0.0, 0.0)),
    ((0.0, -0.0), (0.0, 0.0), (0.0, -0.0)),
    ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)),
]


@pytest.mark.parametrize(("pair", "forward", "inverse"), ZEROS, ids=[str(pair) for pair, _, _ in ZEROS])
def test_zeros_at_position_zero(pair, forward, inverse):
    for expected, flag in ((forward, False), (inverse, True)):
        assert exact.rotate_pair(*pair, 1.0, 0.0, flag) == list(expected)
        assert_same_bytes(rotate_one(*pair, 1.0, 0.0, flag), torch.tensor([expected]).bfloat16())


def test_forward_then_inverse():
    """Exact for quarter turns; else two roundings of bf16 away, and a table's factor counts twice (the transpose)."""
    x = inputs.matrix(6, 256)
    quarters = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])  # cosine, sine
    positions = torch.tensor([0, 1, 2, 3, 1, 1])
    for factor in (1.0, 2.0):
        table = quarters.repeat_interleave(32, dim=1) * factor
        there = reference.rotate(x, table, positions, 128, False)
        back = reference.rotate(there, table, positions, 128, True)[:, 64:128]
        assert_same_bytes(back, x[:, 64:128] * factor**2, strides=False)
    for factor in (1.0, 1.3):
        table, positions = inputs.cos_sin_cache(90, 128, factor), torch.arange(20, 80, 10)
        there = reference.rotate(x, table, positions, 128, False)
        back = reference.rotate(there, table, positions, 128, True).double()
        wanted = x.double() * factor**2
        error = (back - wanted).norm(dim=1) / wanted.norm(dim=1)
        assert 1e-4 < error.min() < error.max() < 4e-3


@directions
def test_scaled_tables_are_used_as_they_are(inverse):
    assert_rotates(inputs.matrix(4, 128), inputs.cos_sin_cache(9, 64, 1.37), torch.tensor([8, 1, 1, 0]), 64, inverse)


@directions
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_nan_and_inf_reach_their_partner_only(bad, inverse):
    x = inputs.matrix(3, 256)
    table, positions = inputs.cos_sin_cache(9, 64), torch.tensor([5, 6, 7])
    plain = reference.rotate(x, table, positions, 128, inverse)
    x[1, 128 + 64 + 10] = bad  # the first of a pair
    x[2, 64 + 21] = bad  # the second of a pair
    x[0, 5] = bad  # not rotated
    y = reference.rotate(x, table, positions, 128, inverse)
    touched = torch.zeros_like(x, dtype=torch.bool)
    touched[1, 202:204] = touched[2, 84:86] = touched[0, 5] = True
    assert_same_bytes(y.masked_fill(touched, 0), plain.masked_fill(touched, 0))
    assert (y.isnan() if math.isnan(bad) else y.isinf())[touched].all()


def test_infinities_in_both_of_a_pair():
    assert rotate_one(INF, INF, 0.5, 0.5)[0].tolist() == [pytest.approx(NAN, nan_ok=True), INF]
    assert rotate_one(INF, INF, 0.5, 0.5, True)[0].tolist() == [INF, pytest.approx(NAN, nan_ok=True)]
    assert rotate_one(INF, 1.0, 1.0, 0.0)[0].isnan().tolist() == [False, True]


def test_the_result_is_new_and_the_input_unchanged():
    x = inputs.matrix(4, 128)
    before, table = x.clone(), inputs.cos_sin_cache(9, 64)
    for view in (x, x.t().contiguous().t()):
        y = reference.rotate(view, table, torch.tensor([1, 2, 3, 4]), 128)
        assert y.is_contiguous()
        assert_same_bytes(y, reference.rotate(before, table, torch.tensor([1, 2, 3, 4]), 128))
        y.fill_(7)
        assert torch.equal(x, before)


@pytest.mark.parametrize("position", [9, 2**31 - 1, -1, -9])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_a_position_outside_the_table_raises(position, dtype):
    positions = torch.tensor([0, position, 8], dtype=dtype)
    with pytest.raises(IndexError):
        reference.rotate(inputs.matrix(3, 128), inputs.cos_sin_cache(9, 64), positions, 64)


def test_the_casts_see_the_rounded_rotation():
    x, table = inputs.matrix(9, 384), inputs.cos_sin_cache(20, 64)
    positions = inputs.position_ids(9, 20)
    for use_ue8m0 in (False, True):
        expected = exact.dual_cast(exact.rotate(x, table, positions, 192, True), use_ue8m0)
        found = reference.dual_cast(x, use_ue8m0, table, positions, 192, True)
        for name, got, want in zip(exact.NAMES, found, expected, strict=True):
            assert_same_bytes(got, want, name)
