"""Every bf16 maximum of a block with every bf16 value that does not vanish beside it: the quotients are exact.

The kernels multiply by a reciprocal and correct once. That this is RN(v / s) rests on all pairs tried here.
"""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed

from tests.fp8_dual_cast import on_gpu
from tests.support.compare import assert_same_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EXPONENTS = 255  # fields 0 (denormals) to 254
DISTANCES = 22  # a value 2**21 times smaller than the maximum is below half of e4m3's least number
CHUNK = 15


def blocks(exponents, distances):
    """Rows of two blocks of 128 with one maximum each, (len(exponents) * len(distances) * 128, 256) bf16.

    For each exponent field, distance and mantissa of the maximum there is a row. Its two blocks hold the maximum in
    one place, and elsewhere values whose exponent is `distance` lower (0 at the least) with the mantissas 0 to 127:
    the one that the maximum hides in one block is shown in the other.
    """
    device = on_gpu.DEVICE
    e = torch.tensor(exponents, device=device)[:, None, None, None]
    d = torch.tensor(distances, device=device)[None, :, None, None]
    m = torch.arange(128, device=device)[None, None, :, None]
    k = torch.arange(256, device=device)[None, None, None, :]
    mantissa = torch.where(k < 128, k, k + 64) % 128
    exponent = (e - d).clamp(min=0)
    mantissa = torch.where(exponent == e, torch.minimum(mantissa, m), mantissa)
    bits = (exponent << 7) | mantissa
    bits = torch.where(k % 128 == (m + 5 * d) % 128, (e << 7) | m, bits)
    bits = bits | torch.randint(2, bits.shape, device=device) << 15
    return bits.flatten(0, 2).to(torch.int16).view(torch.bfloat16)


def assert_exact(x, use_ue8m0, names):
    expected = on_gpu.definition(x, use_ue8m0=use_ue8m0)
    actual = fp8_dual_cast(x, use_ue8m0=use_ue8m0)
    single = dict(zip(("q", "sf"), per_token_cast(x, use_ue8m0=use_ue8m0), strict=True))
    single |= dict(zip(("q_t", "sf_t"), per_token_cast_transposed(x, use_ue8m0=use_ue8m0), strict=True))
    for name in names:
        assert_same_bytes(getattr(actual, name), getattr(expected, name), f"dual, {name}")
        assert_same_bytes(single[name], getattr(expected, name), f"single, {name}")


def test_blocks_hold_every_pair():
    """The matrix is what it claims to be, where a mistake in it would weaken everything below."""
    x = blocks([0, 3, 127], [0, 2, 5]).double().abs().reshape(3, 3, 128, 2, 128)
    maximum = x.amax(-1)
    assert torch.equal(maximum[..., 0], maximum[..., 1])
    assert torch.equal(maximum[2, :, :, 0], (1 + torch.arange(128, device=x.device) / 128).expand(3, -1).double())
    for i, mantissa in ((1, 0), (1, 77), (2, 127)):
        below = {v for v in x[2, i, mantissa].flatten().tolist() if v < 1}
        assert below == {(1 + k / 128) / 2 ** (2, 5)[i - 1] for k in range(128)}
    assert set(x[2, 0, 100].flatten().tolist()) == {1 + k / 128 for k in range(101)}


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
@pytest.mark.parametrize("along", ["channels", "tokens"])
def test_every_maximum_with_every_value(along, use_ue8m0):
    """Blocks along the channels prove q and sf, the transposed matrix q_t and sf_t."""
    checked = 0
    for first in range(0, EXPONENTS, CHUNK):
        x = blocks(list(range(first, first + CHUNK)), list(range(DISTANCES)))
        checked += x.numel()
        if along == "channels":
            assert_exact(x, use_ue8m0, ("q", "sf"))
        else:
            assert_exact(x.t().contiguous(), use_ue8m0, ("q_t", "sf_t"))
    assert checked == EXPONENTS * DISTANCES * 128 * 256


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_the_gpu_divides_like_the_cpu(use_ue8m0):
    """The definition above ran on the GPU. At the ends of the range and at 1e-10 it gives the CPU's bytes."""
    x = blocks([0, 1, 92, 93, 94, 127, 254], [0, 1, 7, 8, 9, 15, 20])
    for y in (x, x.t().contiguous()):
        on_gpu.assert_dual(fp8_dual_cast(y, use_ue8m0=use_ue8m0), fp8_dual_cast(y.cpu(), use_ue8m0=use_ue8m0), "dual")


@pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_values_far_below_the_maximum(use_ue8m0):
    """They are zeros of their sign, whatever the distance, down to denormals beside the largest bf16."""
    x = blocks(list(range(40, EXPONENTS, 6)), list(range(DISTANCES, 255, 9)))
    assert_exact(x, use_ue8m0, ("q", "sf", "q_t", "sf_t"))
    assert_exact(x.t().contiguous(), use_ue8m0, ("q", "sf", "q_t", "sf_t"))
