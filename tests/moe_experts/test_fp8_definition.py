"""The FP8 definition against one that is written otherwise, against float64, and exactly where nothing rounds."""

import math

import pytest
import torch
from hopper_kernels import fp8
from moe_experts import (
    FP8_GROUP,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
    padded_rows,
)

from tests.moe_experts import fp8_plain, inputs, plain
from tests.moe_experts.fp8_on_cpu import GROUPS, HIDDEN, INNER, TAIL, each_shape, gradients, operands, results, step
from tests.support.compare import assert_bands_close_to_float64, assert_same_bytes, error64

NAMES = ("out", "dx", "dgate", "dup", "ddown")
FP8 = torch.float8_e4m3fn
SUMS = ("dw13", "dw2")  # fp32, so that the last bit of a float64 sum may show


@each_shape
@pytest.mark.parametrize("limit", [1.0, math.inf])
def test_every_result_is_that_of_the_plain_definition(groups, tail, hidden, inner, limit, poison):
    """Codes, scales, rows and gradients, byte for byte; what is unspecified is zeros in both."""
    t = operands("separate", groups, tail, hidden, inner, limit=limit)
    dout = inputs.cotangent(t)
    found, wanted = results(t, dout), fp8_plain.step(t, dout)
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        if name in SUMS:
            assert found[name].dtype == torch.float32
            assert error64(found[name], want.double()) < 1e-7, name
        else:
            assert_same_bytes(found[name], want, name)


def test_the_plain_definition_has_the_formats():
    """Its table of e4m3 against PyTorch's, and its roundings against a cast."""
    codes = torch.arange(256).to(torch.uint8)
    wanted = codes.view(FP8).double()
    assert torch.equal(fp8_plain.decode(codes).nan_to_num(7e7), wanted.nan_to_num(7e7))
    v = torch.cat((fp8_plain.VALUES, fp8_plain.MIDDLES, torch.randn(2000).double() * 30))
    v = torch.cat((v, -v)).float()
    assert_same_bytes(fp8_plain.encode(v.double()).view(FP8), v.to(FP8))


@pytest.mark.parametrize(("also", "names"), [("bf16", ("h_t", "dgu_t")), ("twice", ("x_t", "dout_t"))])
def test_another_rounding_would_be_noticed(also, names, monkeypatch):
    """h and its like rounded to bf16 before they are quantised; column copies made of the row copies."""
    right = fp8_plain.columns
    other = {"bf16": lambda v: v.bfloat16().float(), "twice": fp8_plain.rows}[also]
    monkeypatch.setattr(fp8_plain, "columns", lambda v: right(other(v)))
    t = operands()
    dout = inputs.cotangent(t)
    found, wanted = results(t, dout), fp8_plain.step(t, dout)
    for name in names:
        differ = (found[name].view(torch.uint8) != wanted[name].view(torch.uint8)).float().mean()
        assert differ > 1e-3, name


def test_panels_element_by_element():
    """Element [b, c, r] is the padded row 128 b + r of channel c: expert 0 has blocks 0 and 1, expert 2 block 2."""
    t = operands("separate", (130, 0, 5, 128), 9, 128, 128)
    _, _, x_t, x_t_sf = moe_experts_fp8_forward_quantized(
        t.x, t[4], 10.0, *moe_experts_fp8_quantize_weights(*t[1:4])[:4]
    )
    padded = padded_rows(272, 4)
    assert padded == (3 + 4) * 128
    assert x_t.shape == (padded * 128,)
    assert x_t_sf.shape == (padded // 128, 128)
    blocks = {0: (0, 128), 1: (128, 130), 2: (130, 135), 3: (135, 263)}  # the rows of x in each
    codes = x_t.double().tolist()
    for b, (first, last) in blocks.items():
        for c in (0, 1, 77, 127):
            column = t.x[first:last, c].float()
            s = x_t_sf[b, c]
            assert s == column.abs().max() / torch.tensor(448.0)
            for r in range(128):
                want = (column[r] / s).to(FP8).item() if r < last - first else 0.0
                assert codes[(b * 128 + c) * 128 + r] == want
    assert not any(codes[4 * 128 * 128 :])


def test_padded_rows():
    for rows, experts, want in ((0, 1, 128), (1, 1, 256), (128, 1, 256), (129, 1, 384), (98304, 4, 98816)):
        assert padded_rows(rows, experts) == want
    assert FP8_GROUP == 128
    for sizes in ((1,) * 7, (129, 1, 1, 253), (0, 384), (127, 129)):
        assert sum(-(-n // 128) for n in sizes) * 128 <= padded_rows(sum(sizes), len(sizes))


def exact(t, dout):
    return plain.gradients(t._replace(x=t.x.nan_to_num()).double(), dout.nan_to_num().double())


@pytest.mark.parametrize(("limit", "gate_std"), [(10.0, 1.0), (math.inf, 1.0)])
@pytest.mark.parametrize(
    ("groups", "tail", "hidden", "inner"), [(GROUPS, TAIL, HIDDEN, INNER), ((90,) * 3, 24, 384, 256)]
)
def test_errors_without_clamped_values(groups, tail, hidden, inner, limit, gate_std):
    """Of e4m3 alone, whose last bit is 2^-4 of a number, in every band of channels."""
    t = operands("separate", groups, tail, hidden, inner, limit=limit, gate_std=gate_std)
    dout = inputs.cotangent(t)
    for name, got, want in zip(NAMES, gradients(t, dout), exact(t, dout), strict=True):
        assert got.dtype == torch.bfloat16
        assert got.is_contiguous()
        assert error64(got, want) < 8e-2, name
        assert error64(got, want) > 1e-2, "it would be bf16"
        assert 0.1 < want.norm() / want.count_nonzero().sqrt() < 30, name
        for dim in (-1, -2) if name.startswith("d") and name != "dx" else (-1,):
            assert_bands_close_to_float64(got, want, want.bfloat16(), dim=dim, floor=0.12, name=name)


def test_errors_with_values_beyond_the_bounds():
    """The published workload's gates, where a rounding moves many across the bound."""
    t = operands("separate", (90,) * 3, 24, 384, 256, gate_std=7.0)
    dout = inputs.cotangent(t)
    for name, got, want in zip(NAMES, gradients(t, dout), exact(t, dout), strict=True):
        assert error64(got, want) < (8e-2 if name in ("out", "ddown") else 0.16), name


def test_a_wrong_band_or_swapped_operands_would_be_noticed():
    """Gates are large and ups small, so that swapping them, or a band of 16 channels, changes much."""
    t = operands("separate", (60, 30), 0)
    t = t._replace(gate_proj=t.gate_proj * 8, up_proj=t.up_proj * 0.125)
    dout = inputs.cotangent(t)
    right = exact(t, dout)[0]
    assert error64(gradients(t, dout)[0], right) < 8e-2
    assert error64(gradients(t._replace(gate_proj=t.up_proj, up_proj=t.gate_proj), dout)[0], right) > 0.3
    band = slice(16, 32)
    gate, up = t.gate_proj.clone(), t.up_proj.clone()
    gate[:, band], up[:, band] = t.up_proj[:, band], t.gate_proj[:, band]
    assert error64(gradients(t._replace(gate_proj=gate, up_proj=up), dout)[0], right) > 0.1


def powers(*shape):
    """Distinct powers of two along the last axis and along the one before it."""
    *lead, rows, columns = shape
    exponents = torch.arange(rows)[:, None] + 3 * torch.arange(columns)
    return 2.0 ** (exponents.expand(*lead, -1, -1) % 11 - 5.0)


def whole(*shape):
    """Small whole numbers, which e4m3 has, as fp32."""
    return torch.randint(-3, 4, shape).float()


def lossless(rows, channels):
    """Rows (rows, channels) whose groups of 128 channels have a power of two as scale: each holds 448 of it."""
    numbers = whole(rows, channels // 128, 128)
    numbers[:, :, 5] = 448
    return (numbers * powers(rows, channels // 128)[..., None]).flatten(1)


def blocks(experts, rows, columns):
    """Codes of whole numbers and scales of powers of two, and the weight that they are."""
    numbers, scales = whole(experts, rows, columns), powers(experts, rows // 128, columns // 128)
    weight = numbers * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return numbers.to(FP8), scales.contiguous(), weight


def test_each_block_meets_its_own_scale_forward():
    """1,024 channels whose scales, of each row and group and of each block, are different powers of two: no error."""
    groups = (130, 3)
    x = lossless(140, 1024)
    w13_q, w13_sf, w13 = blocks(2, 512, 1024)
    w2_q, w2_sf, _ = blocks(2, 1024, 256)
    _, gate_up, *_ = moe_experts_fp8_forward_quantized(
        x.bfloat16(), torch.tensor(groups), math.inf, w13_q, w13_sf, w2_q, w2_sf
    )
    for expert, (rows, padded) in enumerate(((slice(0, 130), slice(0, 130)), (slice(130, 133), slice(256, 259)))):
        wanted = (x[rows].double() @ w13[expert].double().t()).float().bfloat16()
        assert_same_bytes(gate_up[padded], wanted, strides=False)


def test_each_block_meets_its_own_scale_in_the_gradient_of_x():
    """G = 64 makes sigma(G) = 1: dG = dH U and dU = 64 dH, of which nothing rounds. 2I = 1,024 channels."""
    hidden, inner, rows = 768, 512, 130
    dh = lossless(rows, inner)
    dout = torch.zeros(rows, hidden)
    dout[:, :inner] = dh
    w2_t = torch.eye(inner, hidden).expand(1, -1, -1).contiguous()
    w2_t_sf = torch.ones(1, inner // 128, hidden // 128)
    up = 2.0 ** torch.arange(-2, 2).repeat_interleave(128)  # one for each group of channels, so groups keep their 448
    gate_up = torch.zeros(padded_rows(rows, 1), 2 * inner)
    gate_up[:rows, :inner], gate_up[:rows, inner:] = 64, up
    w13_t_q, w13_t_sf, w13_t = blocks(1, hidden, 2 * inner)
    dx, *columns = moe_experts_fp8_backward_data(
        dout.bfloat16(), torch.tensor([rows]), gate_up.bfloat16(), w13_t_q, w13_t_sf, w2_t.to(FP8), w2_t_sf, math.inf
    )
    dgu = torch.cat((dh * up, dh * 64), dim=1)
    assert_same_bytes(dx, (dgu.double() @ w13_t[0].double().t()).float().bfloat16())
    dgu_t, dgu_t_sf = columns[4].view(-1, 2 * inner, 128), columns[5]
    assert torch.equal(dgu_t_sf[0], dgu[:128].abs().amax(0) / torch.tensor(448.0))
    assert dgu_t[0].double().abs().amax(1).eq(448).all()


def transposed(padded, channels):
    """Panels of whole numbers and scales of powers of two, and the rows (padded, channels) that they are."""
    numbers, scales = whole(padded // 128, channels, 128), powers(padded // 128, channels)
    return numbers.flatten().to(FP8), scales.contiguous(), (numbers * scales[..., None]).mT.flatten(0, 1)


def test_each_panel_meets_its_own_scale_in_the_weights_gradients():
    """1,024 rows and more, which are 11 blocks, and C and 2I that differ."""
    sizes, hidden, inner = (1300, 0, 100), 256, 128
    padded = padded_rows(1400, 3)
    made = [transposed(padded, channels) for channels in (hidden, inner, 2 * inner, hidden)]
    dout, h, dgu, x = (rows.double() for *_, rows in made)
    dw13, dw2 = torch.full((3, 2 * inner, hidden), math.nan), torch.full((3, hidden, inner), math.nan)
    given = [t for codes, scales, _ in made for t in (codes, scales)]
    moe_experts_fp8_weight_grad_accumulate(torch.tensor(sizes), *given, 1400, dw13, dw2, accumulate=False)
    for expert, rows in ((0, slice(0, 11 * 128)), (2, slice(11 * 128, 12 * 128))):
        assert torch.equal(dw13[expert], (dgu[rows].t() @ x[rows]).float())
        assert torch.equal(dw2[expert], (dout[rows].t() @ h[rows]).float())
    assert not dw13[1].any()
    assert not dw2[1].any()


def test_quantised_weights_are_the_weights():
    """To e4m3's half of the last bit, in every block; scales are no powers of two, and codes were made with them."""
    t = operands("separate", GROUPS, 0, HIDDEN, INNER)
    t.gate_proj[0, :128, :128] *= 1e-3
    t.down_proj[1, 128:256, :128] *= 1e3
    w13_q, w13_sf, w2_q, w2_sf, *_ = moe_experts_fp8_quantize_weights(*t[1:4])
    for q, sf, w in ((w13_q, w13_sf, t.packed().gate_proj), (w2_q, w2_sf, t.down_proj)):
        value = fp8.dequantize(q, sf, (128, 128)).double()
        scale = sf.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert ((value - w.double()).abs() <= 2**-4 * w.double().abs() + 2**-10 * scale).all()
        assert (torch.frexp(sf)[0] != 0.5).all()


@pytest.mark.parametrize("rows", [1, 2, 45, 63, 65, 127, 128, 129, 256, 264])
def test_any_group_size(rows):
    """Alone, and between others: neither the rows' results nor the expert's gradients change."""
    t = operands("separate", (3, rows, 5), 2, 128, 128)
    dout = inputs.cotangent(t)
    among = gradients(t, dout)
    part, one = slice(3, 3 + rows), slice(1, 2)
    alone = t._replace(x=t.x[part], num_tokens_per_expert=t.num_tokens_per_expert[one])
    alone = alone._replace(**{n: getattr(t, n)[one] for n in ("gate_proj", "up_proj", "down_proj")})
    wanted = *(v[part] for v in among[:2]), *(v[one] for v in among[2:])
    for got, want in zip(gradients(alone, dout[part]), wanted, strict=True):
        assert_same_bytes(got, want, strides=False)


def test_many_experts_with_tiny_groups():
    groups = tuple((7 * i) % 4 for i in range(40))
    t = operands("separate", groups, 3, 128, 128)
    dout = inputs.cotangent(t)
    for name, got, want in zip(NAMES, gradients(t, dout), exact(t, dout), strict=True):
        assert error64(got, want) < 8e-2, name


def test_long_sums_do_not_drift():
    """Ones and a few halves: the gradient of a weight is exact, however many rows there are."""
    rows = 16384
    t = operands("separate", (rows,), 0, 128, 128, limit=math.inf)
    x = torch.randint(1, 3, (rows, 128)).bfloat16() / 2
    gate_up = torch.zeros(padded_rows(rows, 1), 256)
    gate_up[:rows, :128], gate_up[:rows, 128:] = 64, 1 / 64
    s = step(t._replace(x=x))
    dw13, dw2 = s.sums()
    data = s.t.num_tokens_per_expert, gate_up.bfloat16(), *s.weights[4:], math.inf
    _, *columns = moe_experts_fp8_backward_data(x, *data)
    moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2)
    scales = torch.tensor(1 / 448, dtype=torch.float32).double()
    codes = (torch.tensor([0.5, 1.0]) / scales.float()).to(FP8).double() * scales
    values = torch.where(x == 1, codes[1], codes[0])
    assert torch.equal(dw2[0], (values.sum(0) * codes[1]).float()[:, None].expand(-1, 128))
