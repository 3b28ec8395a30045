"""The three casts on the GPU against the definition, byte for byte: shapes, layouts, padding, foreign memory."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, launch, per_token_cast, per_token_cast_transposed, reference
from hopper_kernels import fp8

from tests.fp8_dual_cast import on_gpu
from tests.support import memory
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu

RAGGED = [1, 3, 4, 5, 127, 128, 129, 255, 1000]
WIDTHS = [128, 384, 640, 1280, 2304, 4608, 5120, 8192, 32768]
both_scales = pytest.mark.parametrize("use_ue8m0", [False, True], ids=["fp32", "ue8m0"])


@pytest.mark.parametrize("pattern", list(memory.PATTERNS))
@pytest.mark.parametrize("tokens", RAGGED)
def test_token_counts(tokens, pattern):
    """Neither the memory behind x nor what the results' memory held before is seen; one column of scales too."""
    for channels in (128, 384):
        x = on_gpu.before_foreign_rows(on_gpu.matrix(tokens, channels))
        for use_ue8m0 in (False, True):
            on_gpu.check_casts(x, pattern=pattern, use_ue8m0=use_ue8m0)


@both_scales
@pytest.mark.parametrize("channels", WIDTHS)
def test_widths(channels, use_ue8m0):
    for tokens in (2, 130):
        on_gpu.check_casts(on_gpu.matrix(tokens, channels), pattern="nan", use_ue8m0=use_ue8m0)


@both_scales
@pytest.mark.parametrize("tokens", [1024, 3001, 4096])
@pytest.mark.parametrize("channels", [1280, 2304, 5120, 32768])
def test_model_shapes(tokens, channels, use_ue8m0):
    on_gpu.check_casts(on_gpu.matrix(tokens, channels), pattern="huge", use_ue8m0=use_ue8m0)


def test_no_tokens():
    """The shapes, dtypes and strides of nothing are those of the definition, and no memory is needed for it."""
    x = torch.empty(0, 384, dtype=torch.bfloat16, device=on_gpu.DEVICE)
    expected = on_gpu.definition(x)
    before = memory.allocated()
    actual = fp8_dual_cast(x)
    assert memory.allocated() == before
    on_gpu.assert_dual(actual, expected, "dual")
    on_gpu.assert_dual((*per_token_cast(x), *per_token_cast_transposed(x)), expected, "single")
    assert [tuple(t.shape) for t in actual] == [(0, 384), (0, 3), (384, 0), (384, 0)]
    rotated = fp8_dual_cast(x, **on_gpu.rotation(0, 128, 64))
    on_gpu.assert_dual(rotated, expected, "rotated")


@both_scales
@pytest.mark.parametrize(("tokens", "channels"), [(5, 128), (130, 384), (256, 1280)])
def test_operators_return_storages(tokens, channels, use_ue8m0):
    x = on_gpu.matrix(tokens, channels)
    options = on_gpu.rotation(tokens, 64, 32)
    table, positions = options["cos_sin_cache"], options["position_ids"]
    calls = {
        "dual_cast": (x, use_ue8m0, None, None, 0, True),
        "row_cast": (x, use_ue8m0),
        "column_cast": (x, use_ue8m0),
    }
    calls_with_table = {"dual_cast": (x, use_ue8m0, table, positions, 64, False)}
    for name, args in [*calls.items(), *calls_with_table.items()]:
        results = getattr(torch.ops.fp8_dual_cast, name)(*args)
        for index, (got, want) in enumerate(zip(results, getattr(reference, name)(*args), strict=True)):
            assert got.is_contiguous()
            assert_same_bytes(got, want, f"{name}, result {index}")


@both_scales
@pytest.mark.parametrize("tokens", [1, 6, 127, 129, 300])
def test_nothing_is_written_beside_the_results(tokens, use_ue8m0, guarded):
    """The kernels write into buffers with sentinels on both sides, which the fixture looks at afterwards."""
    channels = 640
    x = on_gpu.matrix(tokens, channels)
    options = on_gpu.rotation(tokens, 128, 64)
    table, positions = options["cos_sin_cache"], options["position_ids"]
    results = [*launch.row_results(x), *launch.column_results(x)]

    def buffers(like):
        return [guarded(tuple(t.shape), t.dtype, on_gpu.DEVICE).tensor for t in like]

    plain, rotated, row, column = (buffers(results[part]) for part in (slice(4), slice(4), slice(2), slice(2, 4)))
    launch._dual(x, *plain, use_ue8m0).run()
    launch._dual(x, *rotated, use_ue8m0, table, positions, 128, True).run()
    launch._row(x, *row, use_ue8m0).run()
    launch._column(x, *column, use_ue8m0).run()
    expected = reference.dual_cast(x, use_ue8m0)
    for index, (got, want) in enumerate(zip([*plain, *row, *column], [*expected, *expected], strict=True)):
        assert_same_bytes(got, want, f"buffer {index}")
    turned = reference.dual_cast(x, use_ue8m0, table, positions, 128, True)
    for index, (got, want) in enumerate(zip(rotated, turned, strict=True)):
        assert_same_bytes(got, want, f"rotated, buffer {index}")


def test_results_do_not_depend_on_the_batch():
    """A row's q and sf are those of the row alone; a group of 128 rows has the q_t and sf_t of the group alone."""
    x = on_gpu.matrix(700, 1280)
    whole = fp8_dual_cast(x)
    for rows in (slice(0, 1), slice(129, 130), slice(3, 200), slice(698, 700)):
        for q, sf in (fp8_dual_cast(x[rows].clone())[:2], per_token_cast(x[rows].clone())):
            assert_same_bytes(q, whole.q[rows], "q of a part", strides=False)
            assert_same_bytes(sf, whole.sf[rows], "sf of a part", strides=False)
    for first in (0, 256, 640):
        part = x[first : first + 128].clone()
        columns, block = slice(first, first + 128), slice(first // 128, first // 128 + 1)
        for q_t, sf_t in (fp8_dual_cast(part)[2:], per_token_cast_transposed(part)):
            assert_same_bytes(q_t, whole.q_t[:, columns], "q_t of a group", strides=False)
            assert_same_bytes(sf_t, whole.sf_t[:, block], "sf_t of a group", strides=False)


def test_dequantised_error_is_that_of_e4m3():
    """A check that does not rest on the definition: 2.57e-2 for normal numbers, in both copies."""
    x = torch.randn(1024, 1280, device=on_gpu.DEVICE).bfloat16()
    q, sf, q_t, sf_t = fp8_dual_cast(x)
    for copy in (fp8.dequantize(q, sf), fp8.dequantize(q_t, sf_t).t()):
        error = (copy.double() - x.double()).norm() / x.double().norm()
        assert 0.0250 < error.item() < 0.0265
