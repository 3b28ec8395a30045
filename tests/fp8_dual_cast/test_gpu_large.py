"""Matrices of more than 2**31 elements and more than 2**16 groups of tokens: offsets and grids."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support.compare import assert_same_bytes
from tests.support.memory import free_device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(autouse=True)
def memory():
    with free_device_memory(20):
        yield


def large(tokens, channels):
    """Normal numbers, made in parts: a generator counts in 32 bits on some versions of PyTorch."""
    x = torch.empty(tokens, channels, dtype=torch.bfloat16, device=on_gpu.DEVICE)
    for part in x.split(max(1, 2**28 // channels)):
        part.normal_()
    return x


def parts(tokens, edge):
    """Whole groups of 128 tokens at the beginning, around `edge` and at the end."""
    last, middle = (tokens - 1) // 128 * 128, edge // 128 * 128
    return [slice(0, 128), slice(middle - 128, middle + 128), slice(last - 128, tokens)]


def assert_part(x, rows, results, names, options):
    """The results of these rows are those of a matrix of these rows alone."""
    options = options | {"position_ids": options["position_ids"][rows]} if options else options
    expected = on_gpu.definition(x[rows], **options)
    tokens, blocks = expected.q_t.shape[1], slice(rows.start // 128, -(-rows.stop // 128))
    columns = slice(rows.start, rows.start + tokens)
    index = {"q": rows, "sf": rows, "q_t": (slice(None), columns), "sf_t": (slice(None), blocks)}
    for name, result in zip(names, results, strict=True):
        assert_same_bytes(result[index[name]], getattr(expected, name), f"{name} of rows {rows}", strides=False)


def check_parts(x, edge, **options):
    calls = [(fp8_dual_cast, ("q", "sf", "q_t", "sf_t"))]
    if not options:
        calls += [(per_token_cast, ("q", "sf")), (per_token_cast_transposed, ("q_t", "sf_t"))]
    for call, names in calls:
        results = call(x, **options)
        for rows in parts(x.shape[0], edge):
            assert_part(x, rows, results, names, options)
        del results


@pytest.mark.timeout(120)
def test_more_than_two_billion_elements():
    """70,000 x 32,768: row offsets of x and q pass 2**31 at row 65,536, those of q_t at channel 30,671."""
    x = large(70_000, 32_768)
    check_parts(x, 2**31 // 32_768)
    check_parts(x, 2**31 // 32_768, **on_gpu.rotation(70_000, 512, 64))


@pytest.mark.timeout(120)
def test_more_than_two_billion_elements_apart():
    """A slice of few channels of a wide matrix: the pitch of x alone passes 2**31, the results are small."""
    x = large(70_000, 32_768)[:, 32_640:]
    check_parts(x, 2**31 // 32_768)


@pytest.mark.timeout(120)
def test_more_than_65536_groups_of_tokens():
    x = large(2**16 * 128 + 1, 128)
    check_parts(x, 2**15 * 128)
    table = inputs.cos_sin_cache(301, 64).to(on_gpu.DEVICE)
    positions = torch.randint(301, (x.shape[0],), device=on_gpu.DEVICE)
    check_parts(x, 2**15 * 128, cos_sin_cache=table, position_ids=positions, head_dim=128)
