"""DeepGEMM takes both copies as they are: right products, and no kernel in front of its own.

The left operand of a data gradient is (q, sf), of a weight gradient (q_t, sf_t). Compared with the float64 product of
what the bytes stand for. SM90's FP8 tensor cores add up 128 products with about 14 bits, so a float32 result has an
error near 1.3e-4; data whose partial sums fit into those bits give the exact product.
"""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast_transposed
from hopper_kernels import fp8
from torch.autograd import DeviceType

from tests.fp8_dual_cast import on_gpu
from tests.support import memory
from tests.support.compare import assert_close_to_float64, error64

# DeepGEMM compiles each shape of its kernels with nvcc at the first call.
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]

TOKENS, CHANNELS, OTHER = 501, 512, 256  # OTHER: the width of the other operand
RECIPE = (1, 1, 128)
TENSOR_CORE_ERROR = 5e-4


@pytest.fixture(scope="module")
def deep_gemm():
    try:
        import deep_gemm
    except Exception as error:  # without a CUDA toolkit its import ends in an AssertionError
        pytest.skip(f"requires DeepGEMM (sgl-deep-gemm 0.1.5): {type(error).__name__}: {error}")
    return deep_gemm


def random_matrix(rows, columns):
    return torch.randn(rows, columns, device=on_gpu.DEVICE).bfloat16()


def exact_matrix(rows, columns):
    """+-448 and +-224 times a power of two for each 128 x 128 tile: exact codes, scales and partial sums."""
    values = 224 * 2 ** torch.randint(2, (rows, columns), device=on_gpu.DEVICE)
    values = values * (1 - 2 * torch.randint(2, (rows, columns), device=on_gpu.DEVICE))
    tiles = torch.randint(-1, 2, (-(-rows // 128), -(-columns // 128)), device=on_gpu.DEVICE)
    tiles = tiles.repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :columns]
    return torch.ldexp(values.float(), tiles).bfloat16()


DATA = {"random": random_matrix, "exact": exact_matrix}
data = pytest.mark.parametrize("make", DATA.values(), ids=DATA.keys())


def dequantised(codes, scales, rows=1):
    """Float64 values of codes (R, K) with scales (ceil(R / rows), K / 128)."""
    wide = scales.double().repeat_interleave(rows, dim=0)[: len(codes)].repeat_interleave(128, dim=1)
    return codes.float().double() * wide


def assert_product(actual, left, right, make):
    """The result is left @ right.T, exactly or up to the roundings of tensor cores and output."""
    expected = left @ right.t()
    if make is exact_matrix:
        assert torch.equal(actual, expected.to(actual.dtype))
    elif actual.dtype == torch.float32:
        assert error64(actual, expected) < TENSOR_CORE_ERROR
    else:
        assert_close_to_float64(actual, expected, expected.to(actual.dtype), factor=1.1, name="product")


def data_gradient(deep_gemm, make, channels=CHANNELS):
    """A call of the GEMM of a data gradient, dX = x W, and its result and operands in float64."""
    w = make(OTHER, channels)
    w_codes, w_scales = fp8.per_block(w, floor_on="scale")
    x = make(TOKENS, channels)
    memory.poison("nan")
    q, sf, _, _ = fp8_dual_cast(x)
    d = torch.full((TOKENS, OTHER), float("nan"), dtype=torch.bfloat16, device=on_gpu.DEVICE)

    def call(scales=sf):
        deep_gemm.fp8_gemm_nt((q, scales), (w_codes, w_scales), d)

    return call, d, dequantised(q, sf), dequantised(w_codes, w_scales, rows=128), sf


def weight_gradient(deep_gemm, make, tokens=TOKENS):
    """A call of the GEMM of a weight gradient, dW += x^T input, and its result and operands in float64."""
    x, other = make(tokens, CHANNELS), make(tokens, OTHER)
    memory.poison("nan")
    _, _, q_t, sf_t = fp8_dual_cast(x)
    other_t, other_sf = per_token_cast_transposed(other)
    d = torch.zeros(CHANNELS, OTHER, device=on_gpu.DEVICE)

    def call(scales=sf_t):
        deep_gemm.fp8_gemm_nt((q_t, scales), (other_t, other_sf), d, c=d, recipe=RECIPE)

    return call, d, dequantised(q_t, sf_t), dequantised(other_t, other_sf), sf_t


@data
def test_data_gradient(deep_gemm, make):
    call, d, left, right, _ = data_gradient(deep_gemm, make)
    call()
    assert_product(d, left, right, make)


@data
def test_weight_gradient(deep_gemm, make):
    """The padding of the ragged last group must be zeros, or the product is wrong; a second call adds another dW."""
    call, d, left, right, _ = weight_gradient(deep_gemm, make)
    call()
    assert_product(d, left, right, make)
    call()
    assert_product(d, 2 * left, right, make)


@data
def test_grouped_data_gradient(deep_gemm, make):
    """Three experts of whole 128-token tiles, one weight each."""
    experts = torch.arange(3, dtype=torch.int32, device=on_gpu.DEVICE)
    layout = experts.repeat_interleave(torch.tensor([256, 128, 384], device=on_gpu.DEVICE))
    x = make(len(layout), CHANNELS)
    weights = torch.stack([make(OTHER, CHANNELS) for _ in range(3)])
    codes, scales = fp8.per_block(weights, floor_on="amax")
    q, sf, _, _ = fp8_dual_cast(x)
    d = torch.full((len(layout), OTHER), float("nan"), dtype=torch.bfloat16, device=on_gpu.DEVICE)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((q, sf), (codes, scales), d, layout)
    left = dequantised(q, sf)
    for expert in range(3):
        rows = layout == expert
        assert_product(d[rows], left[rows], dequantised(codes[expert], scales[expert], rows=128), make)


@data
def test_grouped_weight_gradient(deep_gemm, make):
    """Three experts, one of them ragged: their transposed copies one after the other, a dW each."""
    counts = [256, 100, 384]
    pairs = [(make(count, CHANNELS), make(count, OTHER)) for count in counts]
    lefts = [fp8_dual_cast(left)[2:] for left, _ in pairs]
    rights = [per_token_cast_transposed(right) for _, right in pairs]

    def joined(casts):
        codes = torch.cat([q_t.flatten() for q_t, _ in casts])
        return codes, torch.cat([sf_t.t() for _, sf_t in casts]).t()

    padded = [fp8.align(count, 128) for count in counts]
    lengths = torch.tensor(padded, dtype=torch.int32, device=on_gpu.DEVICE)
    d = torch.zeros(3, CHANNELS, OTHER, device=on_gpu.DEVICE)
    a, b = joined(lefts), joined(rights)
    names = kernels_of(lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, d, padded, lengths, c=d, recipe=RECIPE))
    assert_only_the_gemm(names)
    for expert, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        assert_product(d[expert], 2 * dequantised(*left), dequantised(*right), make)


def kernels_of(call):
    """Names of the kernels, copies and fills that a call (made twice, profiled the second time) runs on the GPU."""
    call()
    torch.cuda.synchronize()
    marker = torch.zeros(1, device=on_gpu.DEVICE)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.sin(marker)
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == DeviceType.CUDA]
    if not any("sin" in name for name in names):
        pytest.skip("requires a profiler that sees kernels")
    return [name for name in names if "sin_kernel" not in name]


def assert_only_the_gemm(names):
    assert len(names) == 1, names
    assert "sm90_fp8_gemm" in names[0]


@pytest.mark.parametrize("channels", [CHANNELS, 128], ids=["four columns", "one column"])
def test_row_scales_are_read_as_they_are(deep_gemm, channels):
    call, *_, sf = data_gradient(deep_gemm, random_matrix, channels)
    assert sf.shape == (TOKENS, channels // 128)
    assert_only_the_gemm(kernels_of(call))
    if channels > 128:  # row-major scales do cost a kernel, so the profile would show one
        row_major = sf.contiguous()
        assert len(kernels_of(lambda: call(row_major))) == 2


@pytest.mark.parametrize("tokens", [TOKENS, 128, 77], ids=["four columns", "one column", "one ragged column"])
def test_column_scales_are_read_as_they_are(deep_gemm, tokens):
    call, d, left, right, sf_t = weight_gradient(deep_gemm, random_matrix, tokens)
    assert sf_t.shape == (CHANNELS, -(-tokens // 128))
    assert_only_the_gemm(kernels_of(call))
    assert_product(d, 2 * left, right, random_matrix)
    if tokens > 128:
        row_major = sf_t.contiguous()
        assert len(kernels_of(lambda: call(row_major))) == 2
