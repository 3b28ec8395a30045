"""FP8 on a device: bytes of what is quantised, exact products where nothing rounds, else within the stated errors."""

import math

import pytest
import torch
from moe_experts import (
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
    padded_rows,
)

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_gpu import WEIGHTS, assert_right, results, sums
from tests.moe_experts.on_gpu import HIDDEN, INNER, each_form
from tests.support.compare import assert_same_bytes, error64

pytestmark = pytest.mark.gpu
NAN, INF = math.nan, math.inf
SHAPES = [
    ((130, 0, 5, 128), 9, 256, 384),
    ((1, 127, 129, 0), 0, 384, 128),
    ((1, 2, 45, 63, 65, 127, 128, 129, 256, 136), 24, 256, 384),
    ((0, 0, 9, 0), 3, 128, 128),
    ((0, 0), 6, 128, 256),
    (tuple((7 * i) % 11 for i in range(160)), 9, 128, 256),
    ((1100, 2), 1, 640, 768),
    ((300,), 65, 1152, 128),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_form
@pytest.mark.parametrize("gate_std", [1.0, 7.0])
@each_shape
def test_every_result(shape, gate_std, packed, poison):
    t, dout = fp8_on_gpu.operands(*shape, packed=packed, gate_std=gate_std)
    poison("nan")
    assert_right(t, dout, results(t, dout))


@pytest.mark.parametrize(
    ("groups", "tail"), [((500, 400, 0, 700), 10), (tuple(20 + (i * 37) % 90 for i in range(48)), 3), ((2500,), 0)]
)
def test_widths_of_the_model(groups, tail):
    t, dout = fp8_on_gpu.operands(groups, tail, HIDDEN, INNER, gate_std=7.0)
    assert_right(t, dout, results(t, dout))


@pytest.mark.parametrize("inner", [128, 384, 640, 768])
def test_any_widths_and_groups(inner):
    for i, hidden in enumerate((128, 256, 640, 1152)):
        groups = tuple((j * 67 + 31 * i) % 300 for j in range(1 + 5 * i))
        t, dout = fp8_on_gpu.operands(groups, i, hidden, inner)
        assert_right(t, dout, results(t, dout))


@each_form
@pytest.mark.parametrize(("hidden", "inner"), [(16384, 128), (128, 8192)])
def test_largest_widths(hidden, inner, packed):
    """As many terms of a product as there is room for the scales of."""
    t, dout = fp8_on_gpu.operands((130, 0, 5), 3, hidden, inner, packed=packed)
    assert_right(t, dout, results(t, dout))


def _powers(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 4, shape, device=on_gpu.DEVICE)


def _exact_rows(rows: int, channels: int) -> torch.Tensor:
    """Small whole numbers, times another power of two in each group of 128 channels of each row, which its 7 makes the
    scale of: 448 / 64 = 7."""
    v = torch.randint(-3, 4, (rows, channels // 128, 128), device=on_gpu.DEVICE).double()
    v[..., 0] = 7
    return (v * _powers(rows, channels // 128, 1)).flatten(1).bfloat16()


def test_products_of_whole_numbers_are_exact():
    """A scale of its own for each row and block of terms, and for each block of the weights: none may be another's."""
    with on_gpu.DEVICE:
        t, _ = fp8_on_gpu.operands((130, 0, 257), 3, 1024, 256)
        x = _exact_rows(len(t.x), 1024)
        blocks = torch.randint(-3, 4, (3, 4, 128, 8, 128)).double()
        blocks[:, :, 0, :, 0] = 7
        w13 = (blocks * _powers(3, 4, 1, 8, 1)).reshape(3, 512, 1024).bfloat16()
    weights = moe_experts_fp8_quantize_weights(w13, None, t.down_proj)
    _, gate_up, *_ = moe_experts_fp8_forward_quantized(x, t.num_tokens_per_expert, 10.0, *weights[:4])
    begin, block = 0, 0
    for e, size in enumerate(t.num_tokens_per_expert.tolist()):
        wanted = (x[begin : begin + size].double() @ w13[e].double().T).float().bfloat16()
        assert_same_bytes(gate_up[128 * block : 128 * block + size] + 0.0, wanted + 0.0, f"expert {e}")
        begin, block = begin + size, block + -(-size // 128)


def test_weight_gradients_of_whole_numbers_are_exact():
    """As above, with a scale for each channel and block of rows; each operand in the place of each other one."""
    hidden, inner, counts = 384, 256, torch.tensor([300, 0, 129], device=on_gpu.DEVICE)
    padded = padded_rows(429, 3)
    kept, numbers = {}, {}
    for name, channels in (("dout", hidden), ("h", inner), ("dgu", 2 * inner), ("x", hidden)):
        v = torch.randint(-3, 4, (padded // 128, channels, 128), device=on_gpu.DEVICE).float()
        s = _powers(padded // 128, channels)
        kept[name] = v.to(torch.float8_e4m3fn).view(-1), s
        numbers[name] = (v * s.unsqueeze(-1)).double()
    dw13, dw2 = (torch.full(s, NAN, device=on_gpu.DEVICE) for s in ((3, 2 * inner, hidden), (3, hidden, inner)))
    operands = (t for name in ("dout", "h", "dgu", "x") for t in kept[name])
    moe_experts_fp8_weight_grad_accumulate(counts, *operands, 429, dw13, dw2, accumulate=False)
    for e, part in enumerate((slice(0, 3), slice(3, 3), slice(3, 5))):
        d, h, g, x = (numbers[n][part].transpose(1, 2).flatten(0, 1) for n in ("dout", "h", "dgu", "x"))
        assert_same_bytes(dw13[e] + 0.0, (g.T @ x).float() + 0.0, f"dw13 of expert {e}", strides=False)
        assert_same_bytes(dw2[e] + 0.0, (d.T @ h).float() + 0.0, f"dw2 of expert {e}", strides=False)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e30])
def test_numbers_of_any_size(scale):
    """Floors of the scales, and values far from 1: the bytes, and no loss beyond e4m3."""
    t, dout = fp8_on_gpu.operands((130, 5), 3)
    t = t._replace(x=(t.x.float() * scale).bfloat16())
    found, wanted = results(t, dout), fp8_on_gpu.definition(t, dout)
    for name in ("x_t", "x_t_sf", *WEIGHTS):
        assert_same_bytes(found[name], wanted[name], name)
    assert_right(t, (dout.float() * 1e-10).bfloat16(), results(t, (dout.float() * 1e-10).bfloat16()))


def test_zeros():
    """Rows, groups and blocks of nothing but zeros: the floor's scale, codes of zero, and zeros of the result."""
    t, dout = fp8_on_gpu.operands((130, 5), 3)
    t.x[7], t.x[:, 128:] = 0, 0
    t.gate_proj[0, :128, :128] = 0
    dout[9] = 0
    found = results(t, dout)
    assert_right(t, dout, found)
    assert not found["out"][7].any()
    assert not found["dx"][9].any()


@pytest.mark.parametrize("value", [NAN, INF, 3e38])
@pytest.mark.parametrize("where", ["x", "dout"])
def test_one_bad_row_stays_in_its_row_and_its_expert(where, value):
    t, dout = fp8_on_gpu.operands((70, 130, 5), 3)
    clean = results(t, dout)
    bad = 100  # a row of expert 1, whose blocks are 1 and 2
    x, other = t.x.clone(), dout.clone()
    {"x": x, "dout": other}[where][bad, 7] = value
    found = results(t._replace(x=x), other)
    rows = torch.arange(len(x), device=x.device) != bad
    for name in ("out", "dx"):
        assert_same_bytes(found[name][rows], clean[name][rows], name)
    for name in ("dw13", "dw2"):
        assert_same_bytes(found[name][[0, 2]], clean[name][[0, 2]], name)
    for name in ("x_t", "h_t", "dgu_t", "dout_t"):
        assert_same_bytes(found[name][[0, 3]], clean[name][[0, 3]], name)
    if math.isnan(value):
        assert found["out" if where == "x" else "dx"][bad].isnan().any()


@pytest.mark.parametrize("value", [NAN, INF, 3e38])
def test_rows_after_the_last_expert_do_not_enter(value):
    t, dout = fp8_on_gpu.operands((70, 0, 61), 130)
    x, other = t.x.clone(), dout.clone()
    x[t.owned :], other[t.owned :] = value, value
    fp8_on_gpu.assert_same(results(t._replace(x=x), other), results(t, dout))


def test_errors_against_float64_are_those_of_the_recipe():
    """As far from float64 as the definition is, with widths of the model."""
    t, dout = fp8_on_gpu.operands((300, 500, 0, 257), 20, HIDDEN, INNER)
    found, wanted, truth = results(t, dout), fp8_on_gpu.definition(t, dout), on_gpu.definition64(t, dout)
    truth = {
        "out": truth["out"],
        "dx": truth["dx"],
        "dw2": truth["dw2"],
        "dw13": torch.cat((truth["dw1"], truth["dw3"]), 1),
    }
    for name, true in truth.items():
        error, recipe = (error64(r[name], true) for r in (found, wanted))
        assert error < 8e-2, name
        assert error < 1.02 * recipe + 1e-3, name


def test_the_error_does_not_grow_with_the_rows():
    """Of nearly constant numbers, whose sums grow the most."""
    errors = []
    for rows in (1024, 65536):
        padded = padded_rows(rows, 1)
        counts = torch.tensor([rows], device=on_gpu.DEVICE)
        kept, numbers = [], []
        for channels in (128, 128, 256, 128):
            v = (1 + 2.0**-9 * torch.randn(padded // 128, channels, 128, device=on_gpu.DEVICE)).to(torch.float8_e4m3fn)
            v[rows // 128 :] = 0
            s = 1 + torch.rand(padded // 128, channels, device=on_gpu.DEVICE)
            kept += [v.view(-1), s]
            numbers.append((v.double() * s.double().unsqueeze(-1)).transpose(1, 2).flatten(0, 1))
        t, _ = fp8_on_gpu.operands((1,), 0, 128, 128)
        dw13, dw2 = sums(t)
        moe_experts_fp8_weight_grad_accumulate(counts, *kept, rows, dw13, dw2, accumulate=False)
        errors += [error64(dw2[0], numbers[0].T @ numbers[1]), error64(dw13[0], numbers[2].T @ numbers[3])]
    assert max(errors) < 5e-4, errors
