"""Bytes and scales of the FP8 recipes against exact rational arithmetic. Layouts: test_fp8_layouts.py."""

import math

import pytest
import torch
from hopper_kernels import fp8

from . import rational

INF, NAN = math.inf, math.nan
BF16_MAX = torch.finfo(torch.bfloat16).max
FP32_MAX = torch.finfo(torch.float32).max
both_modes = pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])


def bf16(bits):
    """The bf16 values of these bit patterns."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def fp32_next(value, steps):
    """The fp32 number `steps` away from a positive one."""
    return (torch.tensor(value).view(torch.int32) + steps).view(torch.float32).item()


def filled(*values, rest=0.0):
    return list(values) + [rest] * (128 - len(values))


def e4m3_midpoints():
    """The 126 ties between neighbouring e4m3 magnitudes, 2**-10 (between 0 and the least one) first."""
    v = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return ((v[1:] + v[:-1]) / 2).tolist()


# Every value is a bf16 number, so each block is cast from bf16 and from fp32.
BF16_BLOCKS = {
    "zeros": filled(),
    "single element": filled(-3.0),
    "all -0": [-0.0] * 128,
    "-0 and underflow beside 448": filled(448.0, -0.0, 0.0, -(2.0**-20), 2.0**-20, -(2.0**-130)),
    "one NaN": filled(NAN, 1.0, -2.0, 5.0),
    "NaN larger than the rest would be": filled(2.0**-60, NAN, -NAN),
    "all NaN": [NAN] * 128,
    "+Inf": filled(INF, 1.0, -1.0, 0.0, -0.0, BF16_MAX),
    "-Inf": filled(-INF, 1.0, -1.0, 0.0, -0.0, -BF16_MAX),
    "Inf and NaN": filled(INF, -INF, NAN, -5.0, rest=7.0),
    "below the floor": filled(2.0**-34, -(2.0**-37), 2.0**-66),
    "just above the floor": filled(2.0**-33, -(2.0**-34), 2.0**-60),
    "bf16 denormals": bf16(list(range(1, 129))).tolist(),
    "largest bf16": filled(BF16_MAX, -BF16_MAX, 1.0, BF16_MAX / 2),
    "ties": filled(448.0, -448.0, *e4m3_midpoints()),
    "negative ties": filled(448.0, *(-m for m in e4m3_midpoints())),
    "ties at the largest scale": filled(448.0 * 2.0**118, *(m * 2.0**118 for m in e4m3_midpoints())),
}
FP32_BLOCKS = {
    "the floor": filled(fp32_next(1e-10, 0), 5e-11, -1e-13),
    "below the floor by an ulp": filled(fp32_next(1e-10, -1), 5e-11),
    "above the floor by an ulp": filled(fp32_next(1e-10, 1), 5e-11),
    "fp32 denormals": filled(1e-45, -1e-45, 1e-40, -1.1754942e-38),
    "largest fp32": filled(FP32_MAX, -FP32_MAX, 1e38, 1.0),
    "rounded twice": filled(448.0, fp32_next(1.0625, 1), fp32_next(1.0625, -1), fp32_next(2.0**-10, 1)),
}
CASES = [(name, dtype) for name in BF16_BLOCKS for dtype in (torch.bfloat16, torch.float32)]
CASES += [(name, torch.float32) for name in FP32_BLOCKS]


def assert_bytes(q, expected):
    """Bytes equal those expected, in order; NaN equals NaN of either sign."""
    actual = [0x7F if b & 0x7F == 0x7F else b for b in q.reshape(-1).view(torch.uint8).tolist()]
    wrong = [(i, hex(a), hex(e)) for i, (a, e) in enumerate(zip(actual, expected, strict=True)) if a != e]
    assert not wrong, f"{len(wrong)} bytes differ: (index, actual, expected) {wrong[:8]}"


def assert_scales(s, expected):
    """fp32 scales equal those expected bit for bit; NaN equals NaN."""
    torch.testing.assert_close(
        s.reshape(-1), torch.tensor(expected, dtype=torch.float32), rtol=0, atol=0, equal_nan=True
    )


@both_modes
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=[f"{n}, {str(d)[6:]}" for n, d in CASES])
def test_block(name, dtype, ue8m0):
    values = {**BF16_BLOCKS, **FP32_BLOCKS}[name]
    x = torch.tensor(values).to(dtype)
    s, expected = rational.cast(x.float().tolist(), ue8m0=ue8m0)

    q, sf = fp8.per_token(x[None], ue8m0=ue8m0)
    assert_scales(sf, [s])
    assert_bytes(q, expected)
    q_t, sf_t = fp8.per_token_transposed(x[:, None].expand(128, 128), ue8m0=ue8m0)
    assert_scales(sf_t, [s] * 128)
    assert_bytes(q_t, expected * 128)
    q, s_row = fp8.per_row(x[None], ue8m0=ue8m0)
    assert_scales(s_row, [s])
    assert_bytes(q, expected)


@both_modes
def test_amax_at_powers_of_two(ue8m0):
    """448 * 2**k and the bf16 neighbours of it, over the whole range: where the exponent of a scale changes."""
    top = [2.0**k * m for k in range(-42, 120) for m in (446.0, 448.0, 450.0)]
    x = torch.zeros(len(top), 128, dtype=torch.bfloat16)
    x[:, 0] = torch.tensor(top)
    assert x[:, 0].tolist() == top
    q, sf = fp8.per_token(x, ue8m0=ue8m0)
    scales = [rational.scale(a, ue8m0=ue8m0) for a in top]
    assert_scales(sf, scales)
    assert_bytes(q[:, 0], [rational.byte(a, s) for a, s in zip(top, scales, strict=True)])


@both_modes
def test_every_bf16_amax(ue8m0):
    """All 32640 finite magnitudes as the maximum of a block: the scale and the byte of the maximum."""
    amax = bf16(list(range(0x7F80)))
    scales = [rational.scale(a, ue8m0=ue8m0) for a in amax.tolist()]
    assert_scales(fp8.scale(amax, ue8m0=ue8m0), scales)
    x = torch.zeros(len(amax), 128, dtype=torch.bfloat16)
    x[:, 77] = -amax
    q, sf = fp8.per_token(x, ue8m0=ue8m0)
    assert_scales(sf, scales)
    assert_bytes(q[:, 77], [rational.byte(-a, s) for a, s in zip(amax.tolist(), scales, strict=True)])


@both_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
def test_random_blocks(dtype, ue8m0):
    """Blocks of normal numbers of very different size, including fp16 denormals."""
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(24, 128, generator=g) * 10 ** torch.empty(24, 1).uniform_(-9, 3, generator=g)).to(dtype)
    expected = [rational.cast(row, ue8m0=ue8m0) for row in x.float().tolist()]
    q, sf = fp8.per_token(x, ue8m0=ue8m0)
    assert_scales(sf, [s for s, _ in expected])
    assert_bytes(q, [b for _, block in expected for b in block])


def test_scale_takes_nan_as_no_element_and_keeps_inf():
    amax = torch.tensor([NAN, INF, 0.0])
    assert_scales(fp8.scale(amax), [rational.scale(0.0), INF, rational.scale(0.0)])
    assert_scales(fp8.scale(amax, ue8m0=True), [2.0**-42, INF, 2.0**-42])
    assert fp8.scale(torch.tensor(1.0), floor=448.0).item() == 1.0


def test_quantize_saturates():
    """A quotient over 448 by an ulp, just under 464 (the plain cast still rounds down) and above it (it gives NaN)."""
    v = [fp32_next(448.0, 1), fp32_next(464.0, -1), 464.0, fp32_next(464.0, 1), 480.0, 1e30, FP32_MAX, INF]
    q = fp8.quantize(torch.tensor(v + [-a for a in v]), torch.tensor(1.0))
    assert q.view(torch.uint8).tolist() == [0x7E] * len(v) + [0xFE] * len(v)


def test_quantize_denormal_input_and_broadcast():
    v = torch.tensor([[1e-45, -1e-45, 1e-40, -1.1754942e-38, 0.0, -0.0]])
    s = torch.tensor([[1.0], [1.1754944e-38], [2.0**-100]])
    expected = [rational.byte(a, b) for b in s[:, 0].tolist() for a in v[0].tolist()]
    q = fp8.quantize(v, s)
    assert q.shape == (3, 6)
    assert_bytes(q, expected)


@pytest.mark.parametrize("s", [1.0, 2.0**-42, 1e-10 / 448, 1 / 3, 0.0123, 7.5e35])
def test_every_byte_survives_a_round_trip(s):
    """Dequantised with a scale and requantised with it, each byte returns; NaN as NaN."""
    q = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    sf = torch.full((1, 2), s)
    v = fp8.dequantize(q, sf)
    assert v.dtype == torch.float32
    again = fp8.quantize(v.reshape(1, 2, 128), sf[..., None])
    assert_bytes(again, [0x7F if b & 0x7F == 0x7F else b for b in range(256)])
    if s == 1.0:
        assert_bytes(fp8.quantize(v, torch.tensor(1.0)), [0x7F if b & 0x7F == 0x7F else b for b in range(256)])


def test_the_shortcuts_that_the_recipe_forbids_differ():
    """What makes a recipe more than a flag: reciprocals change a scale in two, a byte in two thousand."""
    amax = bf16(list(range(0x2F00, 0x7F80)))
    s = fp8.scale(amax)
    reciprocal = amax.float() * torch.tensor(1 / 448, dtype=torch.float32)
    assert 0.5 < (s != reciprocal).float().mean() < 0.6
    g = torch.Generator().manual_seed(2)
    x = torch.randn(8192, 128, generator=g).bfloat16()
    q, sf = fp8.per_token(x)
    shortcut = (x.float() * (1 / sf)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert 3e-4 < (q.view(torch.uint8) != shortcut.view(torch.uint8)).float().mean() < 7e-4
    q, sf = fp8.per_token(x, ue8m0=True)
    shortcut = (x.float() * (1 / sf)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.view(torch.uint8), shortcut.view(torch.uint8))


@both_modes
@pytest.mark.parametrize("floor_on", ["amax", "scale"])
def test_weight_blocks(floor_on, ue8m0):
    """A ragged matrix whose four blocks are: ordinary, under both floors, zero, with Inf."""
    g = torch.Generator().manual_seed(3)
    w = torch.randn(131, 130, generator=g).bfloat16()
    w[:128, 128:] *= 1e-5
    w[128:, :128] = 0
    w[128, 129] = -INF
    q, sf = fp8.per_block(w, floor_on=floor_on, ue8m0=ue8m0)
    assert (q.shape, q.is_contiguous()) == (w.shape, True)
    assert (sf.shape, sf.is_contiguous()) == ((2, 2), True)
    for i in range(2):
        for j in range(2):
            part = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            values = w[part].float().flatten().tolist()
            s, expected = rational.cast(values, floor="1e-4", floor_on=floor_on, ue8m0=ue8m0)
            assert_scales(sf[i, j], [s])
            assert_bytes(q[part], expected)


def test_weight_floors_differ_below_amax_0_0448():
    """The linear weights' floor bounds the scale, 448 times more: such a block is coarser there."""
    w = torch.full((128, 128), 0.03)
    w[0, 0] = 0.04
    _, moe = fp8.per_block(w, floor_on="amax")
    _, linear = fp8.per_block(w, floor_on="scale")
    assert_scales(moe, [rational.scale(w[0, 0].item(), floor="1e-4")])
    assert_scales(linear, [1e-4])
    assert moe < linear
    w[0, 0] = 0.05
    assert torch.equal(fp8.per_block(w, floor_on="amax")[1], fp8.per_block(w, floor_on="scale")[1])


@both_modes
def test_nan_rules(ue8m0):
    """Ignored by the casts of linear layers and index rows, propagated to the block's scale by those of the experts."""
    x = torch.ones(128, 256, dtype=torch.bfloat16)
    x[3, 5] = NAN
    row, column = [1.0] * 5 + [NAN] + [1.0] * 122, [1.0] * 3 + [NAN] + [1.0] * 124
    for recipe in (fp8.PER_TOKEN, fp8.MOE_ROWS):
        q, sf = fp8.per_token(x, ue8m0=ue8m0, recipe=recipe)
        s, expected = rational.cast(row, nan=recipe.nan, ue8m0=ue8m0)
        assert_scales(sf[3, 0], [s])
        assert_bytes(q[3, :128], expected)
    for recipe in (fp8.PER_TOKEN_TRANSPOSED, fp8.MOE_COLUMNS):
        q_t, sf_t = fp8.per_token_transposed(x, ue8m0=ue8m0, recipe=recipe)
        s, expected = rational.cast(column, nan=recipe.nan, ue8m0=ue8m0)
        assert_scales(sf_t[5], [s])
        assert_bytes(q_t[5], expected)
    assert fp8.per_block(x, floor_on="amax", ue8m0=ue8m0)[1].isnan().tolist() == [[True, False]]
    assert not fp8.per_block(x, floor_on="scale", ue8m0=ue8m0)[1].isnan().any()
    assert not fp8.per_row(x, ue8m0=ue8m0)[1].isnan().any()


def test_recipes():
    """The table of the recipes, pinned."""
    table = {
        "per_token": ((1, 128), 1e-10, "amax", False, "ignored"),
        "per_token_transposed": ((128, 1), 1e-10, "amax", False, "ignored"),
        "moe_rows": ((1, 128), 1e-10, "amax", False, "propagated"),
        "moe_columns": ((128, 1), 1e-10, "amax", False, "propagated"),
        "moe_weights": ((128, 128), 1e-4, "amax", False, "propagated"),
        "linear_weights": ((128, 128), 1e-4, "scale", False, "ignored"),
        "index_rows": ((1, None), 1e-10, "amax", True, "ignored"),
    }
    for name, expected in table.items():
        r = getattr(fp8, name.upper())
        assert (r.name, r.block, r.floor, r.floor_on, r.ue8m0, r.nan) == (name, *expected)


def test_index_rows_are_powers_of_two_by_default():
    x = torch.tensor([[[1.0] * 128, [-3.0] * 128]])
    q, s = fp8.per_row(x)
    assert s.tolist() == [[2.0**-8, 2.0**-7]]
    assert torch.equal(fp8.dequantize(q, s[..., None], block=(1, 128)), x)


@pytest.mark.gpu
@both_modes
def test_cuda_tensors_give_the_same_bytes(ue8m0):
    """Every bf16 amax, every block of this file and random rows: division and cast round on a GPU as on a CPU."""
    amax = bf16(list(range(0x7F80)))
    x = torch.randn(len(amax), 128, generator=torch.Generator().manual_seed(4)) * amax.float()[:, None] / 8
    x[:, 5] = amax.float()
    x = torch.cat([x, torch.tensor([*BF16_BLOCKS.values(), *FP32_BLOCKS.values()])])
    for cast in (
        fp8.per_token,
        fp8.per_token_transposed,
        fp8.per_row,
        lambda w, ue8m0: fp8.per_block(w, floor_on="amax", ue8m0=ue8m0),
        lambda w, ue8m0: fp8.per_block(w, floor_on="scale", ue8m0=ue8m0),
    ):
        for values in (x, x.bfloat16(), x[: 2**12].half()):
            q, sf = cast(values, ue8m0=ue8m0)
            q_cuda, sf_cuda = cast(values.cuda(), ue8m0=ue8m0)
            assert (q_cuda.stride(), sf_cuda.stride()) == (q.stride(), sf.stride())
            torch.testing.assert_close(sf_cuda.cpu(), sf, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(q_cuda.cpu().float(), q.float(), rtol=0, atol=0, equal_nan=True)
            same = (q_cuda.cpu().view(torch.uint8) == q.view(torch.uint8)) | q.float().isnan()
            assert same.all()  # assert_close takes -0 for 0
