"""The passes of the FP8 path, each alone: codes and scales of rows, of panels and of weights.

What is made of bf16 numbers has the definition's bytes, whatever the numbers are; any NaN is like any other. The SwiGLU
and its gradients are formed in fp32 by other formulas, so that now and then a code is its neighbour. Blocks that no
expert owns keep what was there before.
"""

import itertools
import math

import pytest
import torch
from hopper_kernels import fp8
from moe_experts import launch, padded_rows
from moe_experts import reference as bf16_reference
from moe_experts.fp8 import launch as fp8_launch
from moe_experts.fp8 import plan, reference

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_gpu import WEIGHTS, blocks_of, padded_of
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu
NAN, INF = math.nan, math.inf
FOREIGN = 0x55  # bytes of what no pass writes: a finite code, and a scale of 1.5e13
NAN_CODE = 0x7F
SIZES = [1.0, 1e-12, 1e-30, 1e-39, 1e30, 0.0]  # the fourth is a denormal number, in fp32 too
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 3e38, -3e38, 1e-39, -1e-39]
CODES_OFF, SCALES_OFF = 1e-3, 1e-5  # of the SwiGLU passes: share of the codes, and relative
GROUPS = [((130, 0, 5, 128, 0, 1), 9, 512), ((127,), 0, 128), ((256, 300), 200, 1152)]
each_way = pytest.mark.parametrize("kept", [False, True], ids=["rows", "rows and panels"])


def with_special(v, share):
    """A few special values at random places."""
    some = torch.randperm(v.numel(), device=v.device)[: int(share * v.numel())]
    values = torch.tensor(SPECIAL, device=v.device).to(v.dtype)
    v.view(-1)[some] = values[torch.arange(len(some), device=v.device) % len(SPECIAL)]
    return v


def numbers(rows, channels):
    """Rows of all sizes, in every second group of 128 channels channels of all sizes; and special values."""
    with on_gpu.DEVICE:
        sizes = torch.tensor(SIZES)
        of_rows, of_channels = (sizes[torch.randint(len(SIZES), s)] for s in ((rows, 1), (1, channels)))
        by_rows = torch.arange(channels) // 128 % 2 == 0
        v = torch.randn(rows, channels) * torch.where(by_rows, of_rows, of_channels)
    return with_special(v.bfloat16(), 1 / 1500)


def foreign(dtype, *shape):
    size = shape[-1] * dtype.itemsize
    return torch.full((*shape[:-1], size), FOREIGN, dtype=torch.uint8, device=on_gpu.DEVICE).view(dtype)


def foreign_copies(padded, channels):
    """For rows and for panels, with their scales."""
    codes, blocks = torch.float8_e4m3fn, padded // 128
    rows = foreign(codes, padded, channels), foreign(torch.float32, channels // 128, padded)
    return rows, (foreign(codes, blocks, channels, 128), foreign(torch.float32, blocks, channels))


def in_padded_rows(values, t):
    """Zeros where a group is padded, NaN behind the last block."""
    found = values.new_zeros(padded_rows(len(t.x), len(t.down_proj)), values.shape[1])
    found[padded_of(t)] = values[: t.owned]
    found[128 * blocks_of(t) :] = NAN
    return found


def by_definition(values, t):
    """Rows and panels of what stands in padded rows (Mp, C)."""
    count = blocks_of(t)
    rows, panels = foreign_copies(*values.shape)
    own = values[: 128 * count]
    codes, scales = fp8.per_token(own, recipe=fp8.MOE_ROWS)
    rows[0][: 128 * count], rows[1][:, : 128 * count] = codes, scales.t()
    codes, scales = fp8.per_token_transposed(own, recipe=fp8.MOE_COLUMNS)
    panels[0][:count], panels[1][:count] = codes.unflatten(1, (count, 128)).transpose(0, 1), scales.t()
    return rows, panels


def padding_of(t):
    """(Mp / 128, 1, 128): whether a padded row pads a group."""
    count = blocks_of(t)
    pads = torch.zeros(padded_rows(len(t.x), len(t.down_proj)), dtype=torch.bool, device=t.x.device)
    pads[: 128 * count] = True
    pads[padded_of(t)] = False
    return pads.view(-1, 1, 128)


def comparable(copy, padding=None):
    """Bytes of codes, and scales, with one kind of NaN.

    padding: of panels. Where a channel's scale is NaN, it is nobody's business what code a row has that pads the group.
    """
    codes, scales = copy
    found = codes.view(torch.uint8)
    found = torch.where(found & NAN_CODE == NAN_CODE, NAN_CODE, found)
    if padding is not None:
        found = found.masked_fill(padding & scales.isnan().unsqueeze(-1), 0)
    return found, scales.masked_fill(scales.isnan(), NAN)


def assert_bytes(found, wanted, what, padding=None):
    pairs = zip(("codes", "scales"), comparable(found, padding), comparable(wanted, padding), strict=True)
    for name, got, want in pairs:
        assert_same_bytes(got, want, f"{name} of {what}", strides=False)


def assert_close(found, wanted, what, padding=None, axes=(0, 1), count=0):
    """Within the bounds of the SwiGLU passes; and untouched behind the first `count` along these axes."""
    (codes, scales), (wanted_codes, wanted_scales) = comparable(found, padding), comparable(wanted, padding)
    for got, want, axis in zip((codes, scales), (wanted_codes, wanted_scales), axes, strict=True):
        behind = slice(count, None)
        got, want = (t.movedim(axis, 0)[behind] for t in (got, want))
        assert_same_bytes(got, want, f"{what} behind the last block", strides=False)
    codes, wanted_codes = (t.movedim(axes[0], 0)[:count] for t in (codes, wanted_codes))
    scales, wanted_scales = (t.movedim(axes[1], 0)[:count] for t in (scales, wanted_scales))
    off = (codes != wanted_codes).sum().item()
    assert off <= CODES_OFF * codes.numel(), f"{what}: {off} of {codes.numel()} codes differ"
    same = (scales == wanted_scales) | (scales.isnan() & wanted_scales.isnan())
    worst = ((scales - wanted_scales).abs() / wanted_scales).masked_fill(same, 0.0).max().item()
    assert worst <= SCALES_OFF, f"{what}: scales are off by up to {worst:.1e}"


def quantized(x, t, kept):
    """What the pass makes of rows."""
    rows, panels = foreign_copies(padded_rows(len(t.x), len(t.down_proj)), x.shape[1])
    where = launch.groups(t.num_tokens_per_expert, len(x))
    plan.quantize(x, where, rows, panels if kept else None).run()
    return rows, panels


def assert_quantized_right(x, t, kept):
    rows, panels = quantized(x, t, kept)
    wanted_rows, wanted_panels = by_definition(in_padded_rows(x, t), t)
    assert_bytes(rows, wanted_rows, "rows")
    wanted = wanted_panels if kept else foreign_copies(*rows[0].shape)[1]
    assert_bytes(panels, wanted, "panels", padding_of(t))


@each_way
@pytest.mark.parametrize(("groups", "tail", "channels"), GROUPS, ids=str)
def test_rows_of_any_numbers(groups, tail, channels, kept):
    """As x and dout are cast: zeros of both signs, denormals, 3e38, Inf and NaN, and NaN that no expert owns."""
    t, _ = fp8_on_gpu.operands(groups, tail, channels, 128)
    x = numbers(len(t.x), channels)
    x[t.owned :] = NAN
    assert_quantized_right(x, t, kept)


def every_maximum():
    """Every finite bf16 number but its sign as the largest of groups of 128 channels (32640, 2688), and with it in one
    of them each number that is less, up to 2^20 times less, which is 0 at the latest then."""
    with on_gpu.DEVICE:
        bits = torch.arange(0x7F80, dtype=torch.int32)[:, None]
        below = torch.arange(21 * 128, dtype=torch.int32).view(21, 128)
        below -= torch.arange(21, dtype=torch.int32)[:, None]  # each group starts with the maximum itself
        below[:, 0] = 0
        bits = (bits - below.view(1, -1)).clamp(min=0) | (below.view(1, -1) & 1) << 15
        return bits.to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("along", ["rows", "columns"])
def test_every_maximum(along):
    x = every_maximum()
    x = x if along == "rows" else x.t().contiguous()
    t, _ = fp8_on_gpu.operands((len(x),), 0, 128, 128)
    assert_quantized_right(x, t, True)


def swiglu_inputs(special):
    """Operands, and G and U, and the gradient of h, in padded rows; many gates and ups are clamped.

    Gates stay away from the zero of the SiLU's slope, at -1.278, near which the slope has no relative accuracy.
    """
    t, _ = fp8_on_gpu.operands((130, 0, 5, 128), 9, 128, 384)
    found = []
    for channels, size in ((768, 7.0), (384, 1.0)):
        v = torch.randn(len(t.x), channels, device=on_gpu.DEVICE).mul_(size)
        v = v.masked_fill_((v + 1.278).abs() < 0.1, -1.0).bfloat16()
        found.append(in_padded_rows(with_special(v, 1 / 3000) if special else v, t))
    return t, *found


each_kind = pytest.mark.parametrize("special", [False, True], ids=["normal", "special"])


@each_kind
def test_swiglu(special):
    t, gate_up, _ = swiglu_inputs(special)
    rows, _ = foreign_copies(len(gate_up), 384)
    where = launch.groups(t.num_tokens_per_expert, len(t.x))
    plan.swiglu(gate_up, t.swiglu_limit, where, rows).run()
    h = bf16_reference.swiglu(*gate_up.chunk(2, dim=1), t.swiglu_limit, torch.float32)
    wanted, _ = by_definition(h, t)
    assert_close(rows, wanted, "h", count=128 * blocks_of(t))


@each_way
@each_kind
def test_swiglu_backward(special, kept):
    t, gate_up, grad = swiglu_inputs(special)
    count, limit = blocks_of(t), t.swiglu_limit
    rows, panels = foreign_copies(len(gate_up), 768)
    _, h_panels = foreign_copies(len(gate_up), 384)
    where = launch.groups(t.num_tokens_per_expert, len(t.x))
    plan.swiglu_backward(grad, gate_up, limit, where, rows, *((panels, h_panels) if kept else (None, None))).run()
    halves = gate_up.chunk(2, dim=1)
    dgu = torch.cat(bf16_reference.swiglu_backward(grad, *halves, limit, torch.float32), dim=1)
    wanted_rows, wanted_panels = by_definition(dgu, t)
    assert_close(rows, wanted_rows, "gradients in rows", count=128 * count)
    _, wanted_h = by_definition(bf16_reference.swiglu(*halves, limit, torch.float32), t)
    for what, found, wanted in (("gradients", panels, wanted_panels), ("h", h_panels, wanted_h)):
        if kept:
            assert_close(found, wanted, f"{what} in panels", padding_of(t), (0, 0), count)
        else:
            assert_bytes(found, foreign_copies(len(gate_up), wanted[1].shape[1])[1], f"{what} in panels")


def weight(*shape):
    """Blocks of all sizes, in every third one a special value."""
    experts, rows, columns = shape
    high, wide = rows // 128, columns // 128
    with on_gpu.DEVICE:
        sizes = torch.tensor([*SIZES, 1e-5])[torch.randint(len(SIZES) + 1, (experts, high, 1, wide, 1))]
        w = (torch.randn(experts, high, 128, wide, 128) * sizes).view(shape).bfloat16()
    for i, (e, r, c) in enumerate(list(itertools.product(range(experts), range(high), range(wide)))[::3]):
        w[e, 128 * r + (37 * i) % 128, 128 * c + (101 * i) % 128] = SPECIAL[i % len(SPECIAL)]
    return w


FORMS = ["separate", "packed", "halves", "every second expert", "with rows between", "one for all experts"]


def weights_in(form):
    """gate, up and down projections (3, 384, 256), (3, 384, 256) and (3, 256, 384)."""
    down = weight(3, 256, 384)
    if form in ("packed", "halves"):
        both = weight(3, 768, 256)
        return (both, None, down) if form == "packed" else (*both.chunk(2, dim=1), down)
    if form == "every second expert":
        both = weight(6, 384, 256)
        return both[::2], both[1::2], down
    if form == "with rows between":
        return *(weight(3, 512, 256)[:, start : start + 384] for start in (0, 5)), down
    if form == "one for all experts":
        return *(weight(1, 384, 256).expand(3, -1, -1) for _ in range(2)), down
    return weight(3, 384, 256), weight(3, 384, 256), down


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_weights(form, transposed, poison):
    weights = weights_in(form)
    wanted = reference.quantize_weights(*weights, transposed)
    poison("nan")
    found = fp8_launch.quantize_weights(*weights, transposed)
    for i, name in enumerate(WEIGHTS[::2]):
        pair = slice(2 * i, 2 * i + 2)
        assert [r.shape for r in found[pair]] == [r.shape for r in wanted[pair]], name
        assert_bytes(found[pair], wanted[pair], name)
