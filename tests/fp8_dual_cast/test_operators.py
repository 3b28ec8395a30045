"""The public functions on CPU tensors: results, layouts, arguments' forms, strides. Autograd: test_autograd.py."""

import inspect

import pytest
import torch
from fp8_dual_cast import (
    DualCast,
    fp8_dual_cast,
    per_token_cast,
    per_token_cast_transposed,
    reference,
    unsupported_shape_reason,
)
from hopper_kernels import reference as use_definition

from tests.fp8_dual_cast import inputs
from tests.support.compare import assert_same_bytes
from tests.support.device import repeat_bytes

both_modes = pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])


def expected(x, ue8m0=False, *rotation):
    """DualCast of the definition's storages, viewed as the contract says. x is (T, C)."""
    q, sf, q_t, sf_t = reference.dual_cast(x, ue8m0, *rotation)
    tokens, pitch = x.shape[0], sf.shape[1]
    sf = sf.as_strided((tokens, sf.shape[0]), (1, max(pitch, 1)))
    return DualCast(q, sf, q_t, sf_t.as_strided((x.shape[1], sf_t.shape[0]), (1, x.shape[1])))


def assert_equal(actual, wanted):
    for name, got, want in zip(DualCast._fields, actual, wanted, strict=True):
        assert_same_bytes(got, want, name)


def rotation(tokens, rope_dim, dtype=torch.int64):
    return inputs.cos_sin_cache(40, rope_dim), inputs.position_ids(tokens, 40, dtype)


@both_modes
@pytest.mark.parametrize("channels", [128, 384])
@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 127, 128, 129, 300])
def test_results(tokens, channels, ue8m0, poison):
    """Fields, dtypes, shapes, strides (one column included), own storages of the exact size, contents."""
    x = inputs.matrix(tokens, channels)
    result = fp8_dual_cast(x, use_ue8m0=ue8m0)
    assert type(result) is DualCast
    assert DualCast._fields == ("q", "sf", "q_t", "sf_t")
    assert [t.dtype for t in result] == [torch.float8_e4m3fn, torch.float32] * 2
    pitch, padded = -(-tokens // 4) * 4, -(-tokens // 128) * 128
    shapes = [(tokens, channels), (tokens, channels // 128), (channels, padded), (channels, padded // 128)]
    assert [t.shape for t in result] == shapes
    if tokens:
        assert [t.stride() for t in result] == [(channels, 1), (1, pitch), (padded, 1), (1, channels)]
    sizes = [tokens * channels, channels // 128 * pitch * 4, channels * padded, padded // 128 * channels * 4]
    assert [t.untyped_storage().nbytes() for t in result] == sizes
    assert all(t.storage_offset() == 0 and t.data_ptr() % 16 == 0 for t in result)
    owners = [t.untyped_storage().data_ptr() for t in (x, *result) if t.numel()]
    assert len(set(owners)) == len(owners)
    assert_equal(result, expected(x, ue8m0))
    assert_equal((*per_token_cast(x, use_ue8m0=ue8m0), *per_token_cast_transposed(x, use_ue8m0=ue8m0)), result)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize(("heads", "head_dim", "rope_dim"), [(2, 64, 64), (2, 512, 64), (2, 192, 64), (32, 12, 4)])
@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_rotation(tokens, heads, head_dim, rope_dim, dtype):
    """Flat or by heads, positions as (T,) or (1, T), of both integer types, table and positions strided."""
    x = inputs.matrix(tokens, heads * head_dim)
    table, positions = rotation(tokens, rope_dim, dtype)
    wanted = expected(x, False, table, positions, head_dim, True)
    options = {"cos_sin_cache": table, "position_ids": positions}
    by_heads = x.view(tokens, heads, head_dim)
    assert_equal(fp8_dual_cast(x, head_dim=head_dim, **options), wanted)
    assert_equal(fp8_dual_cast(by_heads, **options), wanted)
    assert_equal(fp8_dual_cast(by_heads, head_dim=head_dim, **options | {"position_ids": positions[None]}), wanted)
    strided = {"cos_sin_cache": table.t().contiguous().t(), "position_ids": positions.repeat_interleave(2)[::2]}
    assert_equal(fp8_dual_cast(by_heads.transpose(0, 1).contiguous().transpose(0, 1), **strided), wanted)
    forward = expected(x, True, table, positions, head_dim, False)
    assert_equal(fp8_dual_cast(by_heads, use_ue8m0=True, inverse=False, **options), forward)
    if tokens > 1:
        assert not torch.equal(forward.q.view(torch.uint8), wanted.q.view(torch.uint8))


def test_three_dimensions_without_a_rotation():
    x = inputs.matrix(37, 384)
    by_heads = x.view(37, 2, 192)
    transposed = by_heads.transpose(0, 1).contiguous().transpose(0, 1)
    for y in (by_heads, transposed):
        assert_equal(fp8_dual_cast(y), expected(x))
        assert_equal((*per_token_cast(y), *per_token_cast_transposed(y)), expected(x))


def test_defaults_and_arguments_without_effect():
    """fp32 scales, the inverse rotation; head_dim and inverse mean nothing without a table."""
    for cast in (fp8_dual_cast, per_token_cast, per_token_cast_transposed):
        options = list(inspect.signature(cast).parameters.values())[1:]
        assert all(option.kind is inspect.Parameter.KEYWORD_ONLY for option in options)
    x = inputs.matrix(5, 256)
    assert_equal(fp8_dual_cast(x), expected(x, False))
    assert_equal(fp8_dual_cast(x, head_dim=64, inverse=False), expected(x, False))
    table, positions = rotation(5, 64)
    options = {"cos_sin_cache": table, "position_ids": positions, "head_dim": 128}
    assert_equal(fp8_dual_cast(x, **options), fp8_dual_cast(x, inverse=True, **options))


@pytest.mark.parametrize("name", inputs.STRIDES)
def test_strides_of_x(name):
    x = inputs.matrix(37, 384, seed=1)
    strided = inputs.STRIDES[name](x)
    table, positions = rotation(37, 64)
    assert_same_bytes(strided, x, strides=False)
    assert_equal(fp8_dual_cast(strided), expected(x))
    assert_equal((*per_token_cast(strided), *per_token_cast_transposed(strided)), expected(x))
    rotated = fp8_dual_cast(strided, cos_sin_cache=table, position_ids=positions, head_dim=192)
    assert_equal(rotated, expected(x, False, table, positions, 192))
    assert_same_bytes(strided, x, "x afterwards", strides=False)


@pytest.mark.parametrize("name", inputs.broadcasts())
def test_strides_0(name):
    x = inputs.broadcasts()[name]
    assert_equal(fp8_dual_cast(x), expected(x.contiguous()))


@pytest.mark.parametrize("stride", [0, 1, 7, 977])
def test_a_length_1_axis_may_have_any_stride(stride):
    """Of one token; of one head; and of one position row."""
    x = inputs.matrix(2, 256)
    row = x[:1].clone()
    assert_equal(fp8_dual_cast(inputs.singleton(x, stride)), expected(row))
    one_head = x.as_strided((2, 1, 256), (256, stride, 1))
    assert_equal(fp8_dual_cast(one_head), expected(x))
    table, positions = rotation(2, 64)
    options = {"cos_sin_cache": table, "position_ids": positions.as_strided((1, 2), (stride, 1))}
    assert_equal(fp8_dual_cast(one_head, **options), expected(x, False, table, positions, 256))


@both_modes
def test_a_row_does_not_depend_on_the_batch(ue8m0):
    x = inputs.matrix(300, 256)
    table, positions = rotation(300, 64)

    def cast(rows):
        return fp8_dual_cast(x[rows], use_ue8m0=ue8m0, cos_sin_cache=table, position_ids=positions[rows], head_dim=128)

    q, sf, q_t, sf_t = cast(slice(0, 300))
    for rows in (slice(0, 1), slice(77, 78), slice(3, 140), slice(299, 300)):
        alone = cast(rows)
        assert_same_bytes(alone.q, q[rows])
        assert_same_bytes(alone.sf, sf[rows], strides=False)
    for group in range(3):
        rows = slice(128 * group, min(128 * (group + 1), 300))
        alone = cast(rows)
        assert_same_bytes(alone.q_t, q_t[:, 128 * group : 128 * (group + 1)], strides=False)
        assert_same_bytes(alone.sf_t, sf_t[:, group : group + 1], strides=False)


def test_repeats_and_the_reference_context_change_nothing():
    x = inputs.matrix(131, 256)
    first = repeat_bytes(lambda: (*fp8_dual_cast(x), *per_token_cast(x), *per_token_cast_transposed(x)))
    with use_definition():
        again = (*fp8_dual_cast(x), *per_token_cast(x), *per_token_cast_transposed(x))
    for got, want in zip(again, first, strict=True):
        assert_same_bytes(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype):
    x = inputs.matrix(37, 256)
    table, positions = rotation(37, 64)
    with torch.autocast("cpu", dtype):
        plain = fp8_dual_cast(x)
        rotated = fp8_dual_cast(x, cos_sin_cache=table, position_ids=positions, head_dim=128)
    assert_equal(plain, expected(x))
    assert_equal(rotated, expected(x, False, table, positions, 128))


def test_unsupported_shape_reason_of_what_is_no_size():
    for sizes in ((256.0,), (256, 64.0), (256, 64, 64.0), (True,), ("256",)):
        assert "must be an integer, got" in unsupported_shape_reason(*sizes)


@pytest.mark.parametrize("channels", [0, 64, 128, 200, 256, 384, 2**24, 2**24 + 128])
def test_unsupported_shape_reason_is_what_the_call_does(channels):
    """Over a grid of sizes: a reason where the call raises ValueError, None where it works."""
    tokens = 2 if channels < 1000 else 0
    x = torch.ones(tokens, channels, dtype=torch.bfloat16)
    positions = torch.zeros(tokens, dtype=torch.int64)
    outcomes = set()
    for head_dim in (None, -2, 0, 1, 2, 3, 6, 64, 96, 128, 192, 256, 512):
        for rope_dim in (None, 0, 1, 2, 6, 64, 66, 128, 192):
            options = {"head_dim": head_dim}
            if rope_dim is not None:
                options |= {"cos_sin_cache": torch.ones(3, rope_dim), "position_ids": positions}
            reason = unsupported_shape_reason(channels, head_dim, rope_dim)
            try:
                fp8_dual_cast(x, **options)
                accepted = True
            except ValueError:
                accepted = False
            assert accepted == (reason is None), f"head_dim {head_dim}, rope_dim {rope_dim}: {reason}"
            assert accepted or "got" in reason
            outcomes.add(reason is None)
    assert outcomes == ({False} if channels % 128 or not 0 < channels <= 2**24 else {False, True})
