"""What the GPU tests of this package share: inputs made on the GPU, comparisons with the definition, subprocesses."""

from __future__ import annotations

import hashlib

import torch
from fp8_dual_cast import DualCast, fp8_dual_cast, per_token_cast, per_token_cast_transposed
from hopper_kernels import reference
from torch import Tensor

from tests.fp8_dual_cast import inputs
from tests.support import memory
from tests.support.compare import assert_same_bytes

DEVICE = torch.device("cuda")
CPU_LIMIT = 200_000  # elements up to which the definition also runs on the CPU


def matrix(tokens: int, channels: int) -> Tensor:
    """Normal numbers whose rows and columns differ in size by powers of two and by less: all scales differ."""
    rows = torch.empty(tokens, 1, device=DEVICE).uniform_(-12, 12).exp2_()
    columns = torch.empty(1, channels, device=DEVICE).uniform_(-6, 6).exp2_()
    return (torch.randn(tokens, channels, device=DEVICE) * rows * columns).bfloat16()


def before_foreign_rows(x: Tensor) -> Tensor:
    """The same matrix as the first rows of a longer one, which goes on with NaN and Inf."""
    tokens, channels = x.shape
    longer = x.new_empty(tokens + 131, channels)
    longer[:tokens] = x
    longer[tokens::2] = float("nan")
    longer[tokens + 1 :: 2] = float("inf")
    return longer[:tokens]


def rotation(tokens: int, head_dim: int, rope_dim: int, *, dtype: torch.dtype = torch.int64, factor: float = 1.0):
    """Keyword arguments of a rotation: a table of 301 positions, unsorted positions with repetitions and 0."""
    return {
        "cos_sin_cache": inputs.cos_sin_cache(301, rope_dim, factor).to(DEVICE),
        "position_ids": inputs.position_ids(tokens, 301, dtype).to(DEVICE),
        "head_dim": head_dim,
    }


def definition(x: Tensor, **options) -> DualCast:
    """The definition's results, on the device of x."""
    with reference():
        return fp8_dual_cast(x, **options)


def to_cpu(options: dict) -> dict:
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}


def assert_dual(actual: DualCast, expected: DualCast, what: str) -> None:
    for name, got, want in zip(DualCast._fields, actual, expected, strict=True):
        assert_same_bytes(got, want, f"{what}, {name}")


def assert_layout(result: DualCast, tokens: int, channels: int) -> None:
    """Shapes, strides, alignment and the contents of the padding, written out."""
    q, sf, q_t, sf_t = result
    pitch_sf, pitch_t = -(-tokens // 4) * 4, -(-tokens // 128) * 128
    assert (tuple(q.shape), q.stride()) == ((tokens, channels), (channels, 1))
    assert (tuple(sf.shape), sf.stride()) == ((tokens, channels // 128), (1, pitch_sf))
    assert (tuple(q_t.shape), q_t.stride()) == ((channels, pitch_t), (pitch_t, 1))
    assert (tuple(sf_t.shape), sf_t.stride()) == ((channels, pitch_t // 128), (1, channels))
    assert [t.dtype for t in result] == [torch.float8_e4m3fn, torch.float32] * 2
    assert all(t.data_ptr() % 16 == 0 and t.storage_offset() == 0 and not t.requires_grad for t in result)
    assert len({t.untyped_storage().data_ptr() for t in result}) == 4
    padding = sf.as_strided((channels // 128, pitch_sf), (pitch_sf, 1))[:, tokens:]
    assert torch.count_nonzero(padding.view(torch.int32)) == 0
    assert torch.count_nonzero(q_t.view(torch.uint8)[:, tokens:]) == 0


def check_casts(x: Tensor, *, pattern: str | None = None, **options) -> DualCast:
    """Compare the dual cast of x (T, C), and without a rotation the single casts, with the definition; the dual cast.

    The definition runs on the same device, and for small matrices on the CPU too. With `pattern`, one of
    memory.PATTERNS, the results come from poisoned memory.
    """
    expected = definition(x, **options)
    before = x.clone()
    if pattern is not None:
        memory.poison(pattern)
    actual = fp8_dual_cast(x, **options)
    single = None
    if "cos_sin_cache" not in options:
        single = DualCast(*per_token_cast(x, **options), *per_token_cast_transposed(x, **options))
    assert_layout(actual, x.shape[0], x[:1].numel())
    assert_dual(actual, expected, "dual")
    if single is not None:
        assert_dual(single, expected, "single")
    if x.numel() <= CPU_LIMIT:
        assert_dual(actual, fp8_dual_cast(x.cpu(), **to_cpu(options)), "dual against the CPU")
    assert_same_bytes(x, before, "x", strides=False)
    return actual


def powers_of_two(tokens: int, channels: int) -> Tensor:
    """Signed powers of two that e4m3 holds exactly, with a 448 in every block of both casts: all scales are 1."""
    exponent = torch.randint(-9, 9, (tokens, channels), device=DEVICE)
    sign = 1 - 2 * torch.randint(2, (tokens, channels), device=DEVICE)
    x = torch.ldexp(sign.float(), exponent)
    t, c = torch.arange(tokens, device=DEVICE)[:, None], torch.arange(channels, device=DEVICE)[None, :]
    x[(t + c) % 128 == 0] = 448.0
    if tokens % 128:
        x[tokens // 128 * 128] = -448.0
    return x.bfloat16()


def assert_copies_are_equal(tokens: int, channels: int, **options) -> None:
    """Both copies of `powers_of_two` must be x itself, byte for byte, the second one transposed."""
    x = powers_of_two(tokens, channels)
    plain = x.to(torch.float8_e4m3fn)
    padded = torch.zeros(channels, -(-tokens // 128) * 128, dtype=torch.uint8, device=DEVICE)
    padded[:, :tokens] = plain.view(torch.uint8).t()
    memory.poison("huge")
    q, sf, q_t, sf_t = fp8_dual_cast(x, **options)
    results = [("q", q, plain), ("q_t", q_t, padded.view(torch.float8_e4m3fn))]
    if "cos_sin_cache" not in options:
        results.append(("row cast, q", per_token_cast(x, **options)[0], plain))
        results.append(("column cast, q_t", per_token_cast_transposed(x, **options)[0], results[1][2]))
    for name, got, want in results:
        assert_same_bytes(got, want, f"{tokens} x {channels} {name}")
    assert torch.all(sf == 1)
    assert torch.all(sf_t == 1)


def digest() -> str:
    """SHA-256 over all results for fixed inputs of both modes, with and without a rotation: processes compare it."""
    x = inputs.matrix(300, 512, seed=7).to(DEVICE)
    found = hashlib.sha256()
    for options in ({}, rotation(300, 128, 64), rotation(300, 64, 64, dtype=torch.int32)):
        for use_ue8m0 in (False, True):
            results = [*fp8_dual_cast(x, use_ue8m0=use_ue8m0, **options)]
            results += [*per_token_cast(x, use_ue8m0=use_ue8m0), *per_token_cast_transposed(x, use_ue8m0=use_ue8m0)]
            for tensor in results:
                found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
