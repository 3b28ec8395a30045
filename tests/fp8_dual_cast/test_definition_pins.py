"""What the definition's two casts must give, pinned: literals, every bf16 number, NaN and Inf, equal copies."""

import math

import pytest
import torch
from fp8_dual_cast import reference

from tests.fp8_dual_cast import exact, inputs
from tests.fp8_dual_cast.edge_cases import edge_case
from tests.shared import rational
from tests.support.compare import assert_same_bytes

NAN, INF = math.nan, math.inf
FLOOR_SCALE = 2.2321428288629014e-13  # RN(RN(1e-10) / 448)
both_modes = pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])


@both_modes
def test_every_finite_bf16_as_data(ue8m0):
    """All 65 280 patterns in order, along the rows and along the columns."""
    patterns = torch.arange(65536)
    patterns = patterns[(patterns & 0x7F80) != 0x7F80]
    assert len(patterns) == 65280
    x = torch.zeros(512, 128, dtype=torch.bfloat16)
    x[:510] = inputs.bf16(patterns).reshape(510, 128)
    for got, want in zip(reference.row_cast(x, ue8m0), exact.row_cast(x, ue8m0), strict=True):
        assert_same_bytes(got, want)
    x = x.t()
    for got, want in zip(reference.column_cast(x, ue8m0), exact.column_cast(x, ue8m0), strict=True):
        assert_same_bytes(got, want)


@both_modes
def test_every_finite_bf16_as_block_maximum(ue8m0):
    """In one row, each of the 32 640 magnitudes is its column's maximum; in one column, its row's."""
    amax = inputs.bf16(torch.arange(0x7F80))
    amax[1::2] *= -1
    scales = torch.tensor([rational.scale(abs(a), ue8m0=ue8m0) for a in amax.double().tolist()])
    q_t, sf_t = reference.column_cast(amax[None], ue8m0)
    assert_same_bytes(sf_t, scales[None], "sf_t")
    x = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
    x[:, 77] = amax
    q, sf = reference.row_cast(x, ue8m0)
    assert_same_bytes(sf, scales[None], "sf")
    found = [rational.byte(a, s) for a, s in zip(amax.double().tolist(), scales.double().tolist(), strict=True)]
    expected = torch.tensor(found, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert_same_bytes(q[:, 77].contiguous(), expected, "q")
    assert_same_bytes(q_t[:, 0].contiguous(), expected, "q_t")


def test_known_results():
    """The contract's constants as literals, apart from any oracle."""
    x = torch.zeros(2, 128).bfloat16()
    x[1, 3] = -448.0
    x[1, 4], x[1, 5] = -0.0, 2.0**-20
    q, sf, q_t, sf_t = reference.dual_cast(x)
    assert sf.tolist() == [[FLOOR_SCALE, 1.0, 0.0, 0.0]]
    assert q.view(torch.uint8)[1, 2:6].tolist() == [0x00, 0xFE, 0x80, 0x00]
    assert sf_t[0, 2:6].tolist() == [FLOOR_SCALE, 1.0, FLOOR_SCALE, torch.tensor(2.0**-20 / 448).item()]
    assert q_t.view(torch.uint8)[2:6, :3].tolist() == [[0, 0, 0], [0, 0xFE, 0], [0, 0x80, 0], [0, 0x7E, 0]]
    _, sf, _, sf_t = reference.dual_cast(x, True)
    assert sf.tolist() == [[2.0**-42, 1.0, 0.0, 0.0]]
    assert sf_t[0, 2:6].tolist() == [2.0**-42, 1.0, 2.0**-42, 2.0**-28]
    x[1, 3] = 449.0  # rounds to 448
    x[0, 3] = 450.0
    assert reference.row_cast(x)[1][0, :2].tolist() == [torch.tensor(450 / 448).item(), 1.0]
    assert reference.row_cast(x, True)[1][0, :2].tolist() == [2.0, 1.0]


# amax, v, byte of RN(v / RN(amax / 448)): both v * RN(1 / s) and v * RN(448 / amax) give the byte beside it.
QUOTIENTS = [(248.0, 186.0, 0x7B), (3.875, 1.453125, 0x73)]


@pytest.mark.parametrize(("amax", "v", "byte"), QUOTIENTS, ids=str)
def test_the_quotient_is_divided(amax, v, byte):
    x = torch.zeros(2, 128).bfloat16()
    x[0, 3], x[1, 3] = amax, v
    x[1, 4] = -amax
    q = reference.row_cast(x)[0].view(torch.uint8)
    assert (q[0, 3], q[1, 3], q[1, 4]) == (0x7E, byte, 0xFE)
    assert reference.column_cast(x)[0].view(torch.uint8)[3, :3].tolist() == [0x7E, byte, 0x00]
    s = torch.tensor(amax) / torch.tensor(448.0)
    for shortcut in (v * (1 / s), v * (torch.tensor(448.0) / torch.tensor(amax))):
        assert shortcut.to(torch.float8_e4m3fn).view(torch.uint8) != byte


def test_nan_moves_no_scale_and_inf_takes_both_blocks():
    x = inputs.matrix(128, 128, seed=2)
    _, sf, _, sf_t = reference.dual_cast(x)
    row, column = x[5].float().abs().argmin(), x[:, 6].float().abs().argmin()
    x[5, row] = NAN
    x[column, 6] = NAN
    q, sf_nan, q_t, sf_t_nan = reference.dual_cast(x)
    assert_same_bytes(sf_nan[:, 5], sf[:, 5], "sf of the row with a small element replaced")
    assert_same_bytes(sf_t_nan[:, 6], sf_t[:, 6], "sf_t of the column with a small element replaced")
    assert q.isnan().nonzero().tolist() == sorted([[5, row], [column, 6]])
    assert torch.equal(q_t.isnan(), q.isnan().t())
    x = inputs.matrix(128, 128, seed=2)
    x[5, 6] = -INF
    for use_ue8m0 in (False, True):
        q, sf, q_t, sf_t = reference.dual_cast(x, use_ue8m0)
        assert sf.isinf().nonzero().tolist() == [[0, 5]]
        assert sf_t.isinf().nonzero().tolist() == [[0, 6]]
        signs = torch.where(x.signbit(), 0x80, 0x00)
        assert torch.equal(q.view(torch.uint8)[5].int() & ~0x80, torch.where(x[5].isinf(), 0x7F, 0))
        finite = ~x.isinf()
        assert torch.equal(q.view(torch.uint8)[5][finite[5]].int(), signs[5][finite[5]])
        assert torch.equal(q_t.view(torch.uint8)[6][finite[:, 6]].int(), signs[:, 6][finite[:, 6]])
        assert q_t[6, 5].isnan()


@both_modes
def test_both_copies_hold_the_same_bytes_where_all_scales_are_1(ue8m0):
    """Distinct powers of two and every other e4m3 value, with 448 in each block: a foreign byte would show."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[~values.isnan()]
    x = values[torch.randint(len(values), (300, 384), generator=torch.Generator().manual_seed(3))].bfloat16()
    t, c = torch.arange(300)[:, None], torch.arange(384)[None, :]
    x[(t + c) % 44 == 0] = 448.0
    q, sf, q_t, sf_t = reference.dual_cast(x, ue8m0)
    assert (sf[:, :300] == 1).all()
    assert (sf_t == 1).all()
    assert_same_bytes(q, x.to(torch.float8_e4m3fn))
    assert torch.equal(q_t[:, :300].view(torch.uint8), q.view(torch.uint8).t())


def test_the_two_copies_scale_apart():
    """Where rows and columns differ in size, taking one copy's scales for the other's is far off."""
    x = edge_case("very different sizes")
    q, sf, q_t, sf_t = reference.dual_cast(x)
    by_row = sf[:, :131].t().repeat_interleave(128, 1)
    by_column = sf_t.repeat_interleave(128, 0)[:131]
    assert (by_row == by_column).float().mean() < 0.01
    for copy, scale in ((q, by_row), (q_t[:, :131].t(), by_column)):
        assert ((copy.float() * scale - x.float()).abs() <= x.float().abs() / 16 + scale / 512).all()
