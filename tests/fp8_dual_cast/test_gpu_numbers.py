"""Numbers that a cast gets wrong: zeros, the floor, ties, infinities, NaN, and powers of two, in both copies."""

import math

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast

from tests.fp8_dual_cast import inputs, on_gpu

pytestmark = pytest.mark.gpu

TOKENS, CHANNELS = 150, 256  # a whole group of tokens and a ragged one, two blocks of channels
INF, NAN = math.inf, math.nan
BF16_MAX = 3.3895313892515355e38
FLOOR_SCALE = 0x2A7B5123  # RN(1e-10 / 448)


def base():
    return inputs.matrix(TOKENS, CHANNELS, seed=3)


def filled(*values):
    """The values over and over, in every position of a block."""
    count = TOKENS * CHANNELS
    return torch.tensor(values).repeat(-(-count // len(values)))[:count].reshape(TOKENS, CHANNELS).bfloat16()


def changed(rows, columns, value):
    x = base()
    x[rows, columns] = value
    return x


def with_maximum(x, value):
    """x with `value` as the maximum of every block of both casts."""
    t, c = torch.arange(TOKENS)[:, None], torch.arange(CHANNELS)[None, :]
    x[(t + c) % 128 == 0] = value
    x[128] = value
    return x


def ties():
    midpoints = inputs.e4m3_midpoints()
    return with_maximum(filled(*midpoints, *(-v for v in midpoints)), 448.0)


def maxima_exponents():
    """From the least above the floor to the largest of which bf16 holds 448 times."""
    return torch.linspace(-42, 119, TOKENS).round().int()


def exact_maxima():
    """A row's maximum is 448 * 2**k, its own k for each row."""
    x = torch.rand(TOKENS, CHANNELS, generator=torch.Generator().manual_seed(1)) - 0.5
    x[:, ::128] = 1.0
    return torch.ldexp(448 * x, maxima_exponents()[:, None]).bfloat16()


def scattered(*values):
    """The values in a few places of an ordinary matrix."""
    x = base()
    g = torch.Generator().manual_seed(2)
    for value in values * 3:
        x[torch.randint(TOKENS, (), generator=g), torch.randint(CHANNELS, (), generator=g)] = value
    return x


EVERYWHERE = slice(None)
CASES = {
    "zeros": lambda: filled(0.0),
    "negative zeros": lambda: filled(-0.0, 0.0, -0.0),
    "zero block": lambda: changed(slice(0, 128), slice(0, 128), 0.0),
    "zero row": lambda: changed(7, EVERYWHERE, 0.0),
    "zero column": lambda: changed(EVERYWHERE, 200, -0.0),
    "one element": lambda: filled(0.0).index_put((torch.tensor(140), torch.tensor(129)), torch.tensor(-3.0).bfloat16()),
    "under the floor": lambda: filled(9e-11, -1e-20, 9.2e-41, -9.2e-41, 1e-38, 0.0),
    "denormals": lambda: filled(9.2e-41, -1.1e-38),
    "at the floor": lambda: filled(1.1e-10, -9.9e-11, 1e-12),
    "just above the floor": lambda: with_maximum(filled(1e-11, -3e-13), 1.1e-10),
    "largest": lambda: filled(BF16_MAX, -BF16_MAX, 1.0, 1e30),
    "ties": ties,
    "powers of two": exact_maxima,
    "one nan": lambda: scattered(NAN),
    "nan row": lambda: changed(128, EVERYWHERE, NAN),
    "nan column": lambda: changed(EVERYWHERE, 5, NAN),
    "nan block": lambda: changed(slice(0, 128), slice(128, 256), -NAN),
    "infinity": lambda: scattered(INF),
    "negative infinity": lambda: scattered(-INF),
    "infinity row": lambda: changed(3, EVERYWHERE, -INF),
    "nan and infinities": lambda: scattered(NAN, INF, -INF),
}


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("case", CASES)
def test_against_the_definition(case, use_ue8m0):
    on_gpu.check_casts(CASES[case]().to(on_gpu.DEVICE), pattern="nan", use_ue8m0=use_ue8m0)


def test_every_bit_pattern():
    """All 65,536 of them, as neighbours along the channels and along the tokens."""
    patterns = inputs.bf16(torch.arange(65536)).reshape(512, 128).to(on_gpu.DEVICE)
    shuffled = patterns.flatten()[torch.randperm(65536, device=on_gpu.DEVICE)].reshape(256, 256)
    for x in (patterns, patterns.t().contiguous(), shuffled):
        for use_ue8m0 in (False, True):
            on_gpu.check_casts(x, use_ue8m0=use_ue8m0)


def cast(x, **options):
    """The bytes and scale bits of both copies, the transposed ones transposed back."""
    q, sf, q_t, sf_t = fp8_dual_cast(x.to(on_gpu.DEVICE), **options)
    bytes_t = q_t.view(torch.uint8)[:, : x.shape[0]].t()
    return q.view(torch.uint8), sf.view(torch.int32), bytes_t, sf_t.view(torch.int32)


@pytest.mark.parametrize(("use_ue8m0", "scale"), [(False, FLOOR_SCALE), (True, (127 - 42) << 23)])
def test_floor(use_ue8m0, scale):
    """Nothing but zeros (or NaN) has the floor's scale; so have elements below it."""
    for values, codes in (((0.0, -0.0), (0x00, 0x80)), ((9e-11, -9e-11), None)):
        q, sf, q_t, sf_t = cast(filled(*values), use_ue8m0=use_ue8m0)
        assert torch.all(sf == scale)
        assert torch.all(sf_t == scale)
        assert torch.equal(q, q_t)
        if codes is not None:
            assert torch.all(q[:, 0::2] == codes[0])
            assert torch.all(q[:, 1::2] == codes[1])
    q, sf, q_t, sf_t = cast(filled(NAN), use_ue8m0=use_ue8m0)
    assert torch.all(sf == scale)
    assert torch.all(sf_t == scale)
    assert torch.all(q & 0x7F == 0x7F)
    assert torch.all(q_t & 0x7F == 0x7F)


def test_exact_maxima_become_448():
    q, sf, _, _ = cast(exact_maxima())
    expected = (maxima_exponents() + 127) << 23
    assert torch.equal(sf.cpu(), expected[:, None].expand(-1, 2))
    assert torch.all(q[:, ::128] == 0x7E)


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_infinity_fills_its_two_blocks_only(use_ue8m0):
    x = filled(1.0, -2.0)
    x[130, 7] = -INF
    q, sf, q_t, sf_t = cast(x, use_ue8m0=use_ue8m0)
    infinite = torch.zeros_like(sf, dtype=torch.bool)
    infinite[130, 0] = True
    assert torch.equal(sf == 0x7F800000, infinite)
    infinite_t = torch.zeros_like(sf_t, dtype=torch.bool)
    infinite_t[7, 1] = True
    assert torch.equal(sf_t == 0x7F800000, infinite_t)
    assert q[130, 7] & 0x7F == 0x7F
    assert q_t[130, 7] & 0x7F == 0x7F
    others = [c for c in range(128) if c != 7]
    assert q[130, others].tolist() == [0x00 if c % 2 == 0 else 0x80 for c in others]
    assert q_t[128:, 7].tolist() == [0x80 if t != 2 else q_t[130, 7].item() for t in range(TOKENS - 128)]


def test_nan_moves_no_scale():
    x = base()
    with_nan = x.clone()
    with_nan[9, 30] = NAN
    x[9, 30] = 0.0
    (q, sf, q_t, sf_t), (q_nan, sf_nan, q_t_nan, sf_t_nan) = cast(x), cast(with_nan)
    assert torch.equal(sf, sf_nan)
    assert torch.equal(sf_t, sf_t_nan)
    assert (q != q_nan).nonzero().tolist() == (q_t != q_t_nan).nonzero().tolist() == [[9, 30]]
    assert q_nan[9, 30] & q_t_nan[9, 30] & 0x7F == 0x7F
