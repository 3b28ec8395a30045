"""Shapes, strides, padding, tracing and errors of the FP8 recipes. Bytes and scales: test_fp8.py."""

import pytest
import torch
from hopper_kernels import fp8
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

TOKENS = [0, 1, 3, 4, 5, 127, 128, 129, 255, 1000]


def matrix(tokens, channels, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, channels, generator=g).bfloat16()


def storage_of(view):
    """The whole memory under a view, as a flat tensor."""
    flat = torch.empty(0, dtype=view.dtype)
    return flat.set_(view.untyped_storage())


def _bytes(t):
    return t.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def assert_same(actual, expected):
    """Tensors of equal shape, strides and bits."""
    for a, e in zip(actual, expected, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (e.shape, e.stride(), e.dtype)
        assert torch.equal(_bytes(a), _bytes(e))


def test_ceil_div_and_align():
    assert [fp8.ceil_div(a, 128) for a in (0, 1, 127, 128, 129)] == [0, 1, 1, 1, 2]
    assert [fp8.align(a, 4) for a in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("channels", [128, 384])
@pytest.mark.parametrize("tokens", TOKENS)
def test_per_token_layout(tokens, channels):
    q, sf = fp8.per_token(matrix(tokens, channels))
    assert (q.shape, q.dtype, q.is_contiguous()) == ((tokens, channels), torch.float8_e4m3fn, True)
    assert (sf.shape, sf.dtype) == ((tokens, channels // 128), torch.float32)
    pitch = fp8.align(tokens, 4)
    if tokens:
        assert sf.stride() == (1, pitch)
    assert sf.untyped_storage().nbytes() == channels // 128 * pitch * 4
    padding = storage_of(sf).reshape(channels // 128, pitch)[:, tokens:]
    assert torch.equal(padding, torch.zeros_like(padding))


@pytest.mark.parametrize("channels", [128, 384])
@pytest.mark.parametrize("tokens", TOKENS)
def test_per_token_transposed_layout(tokens, channels):
    x = matrix(tokens, channels)
    q_t, sf_t = fp8.per_token_transposed(x)
    padded = fp8.align(tokens, 128)
    assert (q_t.shape, q_t.dtype, q_t.is_contiguous()) == ((channels, padded), torch.float8_e4m3fn, True)
    assert (sf_t.shape, sf_t.dtype, sf_t.stride()) == ((channels, padded // 128), torch.float32, (1, channels))
    assert not q_t.view(torch.uint8)[:, tokens:].any()
    # A transposed cast of x is a row cast of x^T, padded with zeros.
    rows = torch.zeros(channels, padded, dtype=torch.bfloat16)
    rows[:, :tokens] = x.t()
    q, sf = fp8.per_token(rows)
    assert torch.equal(q.view(torch.uint8), q_t.view(torch.uint8))
    assert torch.equal(sf, sf_t)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("recipe", [fp8.PER_TOKEN_TRANSPOSED, fp8.MOE_COLUMNS], ids=lambda r: r.name)
def test_padded_columns_are_zero_whatever_the_scale(bad, recipe):
    x = torch.full((130, 128), -1.0).bfloat16()
    x[129] = bad
    q_t, _ = fp8.per_token_transposed(x, recipe=recipe)
    assert not q_t.view(torch.uint8)[:, 130:].any()


@pytest.mark.parametrize("tokens", [1, 4, 5, 128, 129])
def test_scale_storages_and_views(tokens):
    """The views that a kernel's outputs are given are those of the definitions, for one column too."""
    for channels in (128, 512):
        rows = fp8.row_scales_like(tokens, channels, "cpu")
        assert (rows.shape, rows.stride()[1]) == ((channels // 128, fp8.align(tokens, 4)), 1)
        view = fp8.row_scales_view(rows, tokens)
        assert view.data_ptr() == rows.data_ptr()
        assert (view.shape, view.stride()) == ((tokens, channels // 128), (1, fp8.align(tokens, 4)))
        columns = fp8.col_scales_like(tokens, channels, "cpu")
        assert columns.shape == (fp8.ceil_div(tokens, 128), channels)
        view = fp8.col_scales_view(columns)
        assert view.data_ptr() == columns.data_ptr()
        assert (view.shape, view.stride()) == ((channels, fp8.ceil_div(tokens, 128)), (1, channels))


def test_any_strides_of_the_input():
    """Column slices, every second row, column-major, expanded and length-1 axes: the results of a contiguous copy."""
    wide = matrix(20, 1024)
    inputs = [
        wide[:, 3 : 3 + 256],
        wide[::2, :256],
        matrix(256, 20).t(),
        wide[:1, :256].expand(7, 256),
        torch.ones(()).bfloat16().expand(9, 128),
        wide.as_strided((1, 128), (977, 1)),
    ]
    for x in inputs:
        before = x.clone()
        for cast in (fp8.per_token, fp8.per_token_transposed, fp8.per_row):
            assert_same(cast(x), cast(x.contiguous().clone(memory_format=torch.contiguous_format)))
        for floor_on in ("amax", "scale"):
            assert_same(fp8.per_block(x, floor_on=floor_on), fp8.per_block(x.clone(), floor_on=floor_on))
        assert torch.equal(x, before)


def test_rows_do_not_depend_on_their_batch():
    x = matrix(300, 256)
    q, sf = fp8.per_token(x)
    alone = fp8.per_token(x[77:78])
    assert torch.equal(alone[0].view(torch.uint8), q[77:78].view(torch.uint8))
    assert torch.equal(alone[1], sf[77:78])
    q_t, sf_t = fp8.per_token_transposed(x)
    alone = fp8.per_token_transposed(x[128:256])
    assert torch.equal(alone[0].view(torch.uint8), q_t[:, 128:256].view(torch.uint8))
    assert torch.equal(alone[1], sf_t[:, 1:2])


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 200), (256, 127), (3, 2, 140, 130), (0, 5), (4, 0)])
@pytest.mark.parametrize("floor_on", ["amax", "scale"])
def test_per_block_shapes(shape, floor_on):
    """Leading axes are a batch, ragged edges blocks of their own; a round trip is within half an e4m3 step."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    q, sf = fp8.per_block(w, floor_on=floor_on)
    assert (q.shape, q.is_contiguous()) == (shape, True)
    blocks = (*shape[:-2], fp8.ceil_div(shape[-2], 128), fp8.ceil_div(shape[-1], 128))
    assert (sf.shape, sf.dtype, sf.is_contiguous()) == (blocks, torch.float32, True)
    back = fp8.dequantize(q, sf, block=(128, 128))
    assert (back.shape, back.is_contiguous()) == (shape, True)
    if w.numel():
        assert ((back - w.float()).abs() <= w.float().abs() / 16 + sf.max() / 512).all()
    if len(shape) > 2:
        last = fp8.per_block(w[-1, -1], floor_on=floor_on)
        assert_same((q[-1, -1], sf[-1, -1]), last)


@pytest.mark.parametrize("shape", [(5, 128), (2, 3, 128), (128,), (0, 128), (4, 7)])
def test_per_row_shapes(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    q, s = fp8.per_row(x)
    assert (q.shape, q.is_contiguous()) == (shape, True)
    assert (s.shape, s.dtype, s.is_contiguous()) == (shape[:-1], torch.float32, True)


def test_dequantize_casts_of_both_directions():
    x = matrix(200, 256)
    for q, sf, original in (
        (*fp8.per_token(x), x.float()),
        (*(t[:, :n] for t, n in zip(fp8.per_token_transposed(x), (200, 2), strict=True)), x.t().float()),
    ):
        error = (fp8.dequantize(q, sf) - original).norm() / original.norm()
        assert 0.02 < error < 0.03
    with pytest.raises(ValueError, match=r"sf must have shape \(200, 2\), got \(200, 1\)"):
        fp8.dequantize(fp8.per_token(x)[0], torch.ones(200, 1))


CASTS = {
    "per_token": fp8.per_token,
    "per_token_transposed": fp8.per_token_transposed,
    "per_row": fp8.per_row,
    "moe_weights": lambda x, ue8m0: fp8.per_block(x, floor_on="amax", ue8m0=ue8m0),
    "linear_weights": lambda x, ue8m0: fp8.per_block(x, floor_on="scale", ue8m0=ue8m0),
    "round_trip": lambda x, ue8m0: (fp8.dequantize(*fp8.per_token(x, ue8m0=ue8m0)),),
}
each_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
both_modes = pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])


@both_modes
@each_cast
def test_compile_with_a_dynamic_token_count(cast, ue8m0):
    """The bits and strides of eager mode; a graph for ragged token counts, one for multiples of 128, no more."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: cast(x, ue8m0=ue8m0), fullgraph=True, backend=counter)
    for i, tokens in enumerate((130, 256, 129, 255, 512, 1001, 384)):
        x = matrix(tokens, 256)
        torch._dynamo.mark_dynamic(x, 0)
        assert_same(compiled(x), cast(x, ue8m0=ue8m0))
        assert counter.frame_count <= min(i + 1, 2)


@both_modes
@each_cast
def test_fake_tensors(cast, ue8m0):
    """On a CUDA FakeTensor, without a GPU: the shapes, strides and dtypes of real tensors."""
    for tokens in (0, 1, 130):
        real = cast(matrix(tokens, 384), ue8m0=ue8m0)
        with FakeTensorMode():
            fake = cast(torch.empty(tokens, 384, dtype=torch.bfloat16, device="cuda"), ue8m0=ue8m0)
        for f, r in zip(fake, real, strict=True):
            assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)
            assert f.device.type == "cuda"


X = torch.zeros(4, 128)
BAD_CALLS = [
    (lambda: fp8.per_token([1.0]), TypeError, "x must be a torch.Tensor"),
    (lambda: fp8.per_token(X[0]), ValueError, "x must have 2 dimensions"),
    (lambda: fp8.per_token(X[:, :64]), ValueError, "C must be a multiple of 128, got 64"),
    (lambda: fp8.per_token(X.double()), ValueError, "x must have dtype bfloat16 or float16 or float32, got float64"),
    (lambda: fp8.per_token(X, recipe=fp8.MOE_COLUMNS), ValueError, r"blocks of \(1, 128\), got moe_columns"),
    (lambda: fp8.per_token_transposed(X[None]), ValueError, "x must have 2 dimensions"),
    (lambda: fp8.per_token_transposed(X[:, :64]), ValueError, "C must be a multiple of 128, got 64"),
    (lambda: fp8.per_token_transposed(X, recipe=fp8.MOE_ROWS), ValueError, r"blocks of \(128, 1\), got moe_rows"),
    (lambda: fp8.per_block(X[0], floor_on="amax"), ValueError, "w must have at least 2 dimensions, got 1"),
    (lambda: fp8.per_block(X, floor_on="both"), ValueError, "floor_on must be 'amax' or 'scale', got 'both'"),
    (lambda: fp8.per_block(X.int(), floor_on="amax"), ValueError, "w must have dtype"),
    (lambda: fp8.per_row(X[:, :0]), ValueError, "x must have a last dimension of at least 1"),
    (lambda: fp8.quantize(X, torch.ones((), device="meta")), ValueError, "v on cpu, s on meta"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS, ids=[m for _, _, m in BAD_CALLS])
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
