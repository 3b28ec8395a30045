"""The inverse RoPE in the dual cast: byte for byte that of the definition, for every kind of head."""

import math

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, reference

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu

# (head_dim, rope_dim); the kernel distinguishes them by head_dim % 128, rope_dim <= 64 and both by multiples of 8.
HEADS = [
    *[(12, 4), (12, 12), (16, 8), (32, 2), (64, 4), (64, 20), (64, 64), (96, 4), (96, 64), (96, 96)],
    *[(128, 4), (128, 64), (128, 66), (128, 72), (128, 128), (192, 64), (192, 100), (192, 192)],
    *[(256, 64), (256, 192), (256, 256), (384, 40), (384, 384)],
    *[(512, 4), (512, 6), (512, 64), (512, 66), (512, 128), (512, 512)],
]
TOKENS = 133


@pytest.mark.parametrize(("head_dim", "rope_dim"), HEADS)
def test_heads(head_dim, rope_dim):
    """Both directions, both types of positions, both kinds of scales; heads across two blocks of channels too."""
    x = on_gpu.before_foreign_rows(on_gpu.matrix(TOKENS, 2 * math.lcm(head_dim, 128)))
    for dtype, inverse, use_ue8m0 in (
        (torch.int64, True, False),
        (torch.int32, True, False),
        (torch.int64, False, False),
        (torch.int32, True, True),
        (torch.int64, False, True),
    ):
        options = on_gpu.rotation(TOKENS, head_dim, rope_dim, dtype=dtype)
        on_gpu.check_casts(x, pattern="nan", inverse=inverse, use_ue8m0=use_ue8m0, **options)


@pytest.mark.parametrize("tokens", [1, 3, 127, 128, 129, 260])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (64, 64), (12, 4)])
def test_token_counts(head_dim, rope_dim, tokens):
    x = on_gpu.before_foreign_rows(on_gpu.matrix(tokens, 3 * 512))
    on_gpu.check_casts(x, pattern="huge", **on_gpu.rotation(tokens, head_dim, rope_dim))


@pytest.mark.parametrize("factor", [1.0, 0.1 * math.log(16.0) + 1.0], ids=["plain", "scaled"])
@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_query_gradient(inverse, factor):
    """The model's shape, (T, 64, 512) with 64 rotated channels and positions (1, T); a table with a factor."""
    x = on_gpu.matrix(515, 32768)
    options = on_gpu.rotation(515, 512, 64, factor=factor) | {"inverse": inverse}
    expected = on_gpu.check_casts(x, pattern="nan", **options)
    options["position_ids"] = options["position_ids"][None]
    del options["head_dim"]
    on_gpu.assert_dual(fp8_dual_cast(x.view(515, 64, 512), **options), expected, "3-D")


def _odd_offset(t):
    """The same values from an address that is a multiple of one element only."""
    return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape)


TABLES = {
    "base off by one element": _odd_offset,
    "slice of a wider table": lambda t: torch.cat((t, t, t), dim=1)[:, t.shape[1] : 2 * t.shape[1]],
    "every second row": lambda t: t.repeat_interleave(2, dim=0)[::2],
    "column-major": lambda t: t.t().contiguous().t(),
}
POSITIONS = {
    "base off by one element": _odd_offset,
    "every second element": lambda t: t.repeat_interleave(2)[::2],
    "row of a matrix": lambda t: torch.stack((t + 1, t))[1:],
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (64, 64), (192, 100)])
def test_strides_of_table_and_positions(head_dim, rope_dim, dtype):
    x = on_gpu.matrix(TOKENS, 2 * math.lcm(head_dim, 128))
    plain = on_gpu.rotation(TOKENS, head_dim, rope_dim, dtype=dtype)
    expected = on_gpu.definition(x, **plain)
    changes = [("cos_sin_cache", name, change) for name, change in TABLES.items()]
    changes += [("position_ids", name, change) for name, change in POSITIONS.items()]
    for argument, name, change in changes:
        options = plain | {argument: change(plain[argument])}
        assert torch.equal(options[argument].view_as(plain[argument]), plain[argument])
        on_gpu.assert_dual(fp8_dual_cast(x, **options), expected, f"{argument}, {name}")


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(512, 64), (128, 128), (96, 20)])
def test_position_zero_is_the_plain_cast(head_dim, rope_dim):
    x = on_gpu.matrix(TOKENS, 2 * math.lcm(head_dim, 128))
    options = on_gpu.rotation(TOKENS, head_dim, rope_dim)
    options["position_ids"].zero_()
    on_gpu.assert_dual(fp8_dual_cast(x, **options), fp8_dual_cast(x), "position 0")


def test_there_and_back():
    """The rotation, then the cast with its inverse: x again, but for the rounding to bf16 and e4m3."""
    x = torch.randn(256, 1024, device=on_gpu.DEVICE).bfloat16()
    options = on_gpu.rotation(256, 512, 64)
    turned = reference.rotate(x, *options.values(), inverse=False)
    back, plain = fp8_dual_cast(turned, inverse=True, **options), fp8_dual_cast(x)
    assert (turned != x).sum() > 20_000
    scale_error = ((back.sf - plain.sf) / plain.sf).abs().max().item()
    assert scale_error < 2**-6
    assert (back.q.view(torch.uint8) != plain.q.view(torch.uint8)).float().mean().item() < 0.03


def one_token_a_group(tokens, channels):
    """Only every 128th token is not zero: its values v show in sf_t as RN(|v| / 448), which no two bf16 share."""
    x = torch.zeros(tokens, channels, dtype=torch.bfloat16, device=on_gpu.DEVICE)
    x[::128] = torch.randn(tokens // 128, channels, device=on_gpu.DEVICE).bfloat16()
    return x


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_placement_of_the_fused_multiply_adds(inverse):
    """Two million rotated values, each to the last bit; products that are all rounded would show in some of them."""
    x = one_token_a_group(64 * 128, 32768)
    options = on_gpu.rotation(len(x), 64, 64)
    options["cos_sin_cache"] = inputs.cos_sin_cache(5003, 64).to(on_gpu.DEVICE)
    options["position_ids"] = torch.randint(5003, (len(x),), device=on_gpu.DEVICE)
    actual = fp8_dual_cast(x, inverse=inverse, **options)
    assert_same_bytes(actual.sf_t, on_gpu.definition(x, inverse=inverse, **options).sf_t, "sf_t")
    rows = x[::128]
    cosine, sine = options["cos_sin_cache"][options["position_ids"][::128]].unsqueeze(1).split(32, dim=-1)
    a, b = rows.float().unflatten(1, (512, 32, 2)).unbind(-1)
    sine = -sine if inverse else sine
    rounded = torch.stack((a * cosine - b * sine, a * sine + b * cosine), dim=-1).flatten(1).bfloat16()
    scales = (rounded.float().abs().t() / torch.tensor(448.0, device=on_gpu.DEVICE)).view(torch.int32)
    flipped = (scales != actual.sf_t.view(torch.int32)).float().mean().item()
    assert 2e-6 < flipped < 2e-4


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(128, 64), (64, 64), (192, 20)])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_nan_and_infinity_reach_their_partner_only(value, head_dim, rope_dim):
    """In a rotated channel the neighbour of the pair is spoiled too, in the other channels nothing is."""
    channels = 2 * math.lcm(head_dim, 128)
    x = on_gpu.matrix(TOKENS, channels)
    options = on_gpu.rotation(TOKENS, head_dim, rope_dim)
    clean = fp8_dual_cast(x, **options)
    rotated, plain = 2 * head_dim - rope_dim + 5, head_dim
    x[7, rotated] = x[129, rotated] = value
    if rope_dim < head_dim:
        x[11, plain] = value
    spoiled = on_gpu.check_casts(x, **options)
    if not math.isnan(value):
        return
    nan = (spoiled.q.view(torch.uint8) & 0x7F == 0x7F).nonzero().tolist()
    expected = [[7, rotated - 1], [7, rotated], [129, rotated - 1], [129, rotated]]
    assert nan == sorted([*expected, *([[11, plain]] if rope_dim < head_dim else [])])
    assert (spoiled.q_t.view(torch.uint8) & 0x7F == 0x7F).sum() == len(nan)
    blocks = torch.ones_like(spoiled.sf, dtype=torch.bool)
    blocks[[7, 129], rotated // 128] = False
    blocks[11, plain // 128] = False
    assert torch.equal(spoiled.sf[blocks], clean.sf[blocks])
