"""fp8_dual_cast against two separate casts, torch.compile and a copy: `python -m benches.fp8_dual_cast`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed, reference
from hopper_kernels.models import V41_FLASH
from torch import Tensor

from benches.harness import Bench, Candidate, Case, copy_candidate, main

HEAD_DIM, ROPE_DIM, BLOCK = V41_FLASH.head_dim, V41_FLASH.rope_dim, 128
CHUNK = 1024  # tokens verified at a time: the definition needs many times the memory of its input
SHAPES = [(16384, 32768), (16384, 5120), (8192, 32768), (8192, 5120), (8192, 2304), (8192, 1280), (8192, 512)]
ROPE_SHAPES = [(16384, 32768), (8192, 32768), (16384, 5120)]
TOY_CHANNELS = {32768: 1024, 5120: 512, 2304: 384, 1280: 256, 512: 128}
# Compiling takes longer than measuring, so the compiled peer runs at one shape of each kind.
COMPILED = {(16384, 5120, False), (8192, 32768, False), (8192, 32768, True), (8192, 2304, False)}
TOLERANCE = "Inductor's division and contraction: at most 1 % of bytes and of scales differ, a scale by more than 2 ulp"


@dataclass(frozen=True)
class Inputs:
    """x (T, C) bf16; with RoPE a table (T, 64) fp32 and positions (T,) int64, else None."""

    x: Tensor
    table: Tensor | None
    positions: Tensor | None

    @property
    def head_dim(self) -> int | None:
        return None if self.table is None else HEAD_DIM

    def rows(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Tokens start..stop of x, and their positions."""
        return self.x[start:stop], None if self.positions is None else self.positions[start:stop]


def make_inputs(tokens: int, channels: int, rope: bool, device: torch.device) -> Inputs:
    """Normal x with rows of different size; the RoPE table of the window layers (base 10,000)."""
    x = torch.randn(tokens, channels, dtype=torch.bfloat16, device=device)
    x *= torch.logspace(-2, 1, tokens, base=2.0, device=device).bfloat16()[torch.randperm(tokens, device=device), None]
    if not rope:
        return Inputs(x, None, None)
    frequency = 10_000.0 ** (-torch.arange(0, ROPE_DIM, 2, device=device) / ROPE_DIM)
    positions = torch.arange(tokens, device=device)
    angle = positions[:, None] * frequency
    return Inputs(x, torch.cat((angle.cos(), angle.sin()), dim=1), positions)


def fused_bytes(tokens: int, channels: int, rope: bool) -> int:
    """Bytes that one pass must move: x once, both copies, both scales with their padding; 4.0625 an element.

    With RoPE also the positions and the rows of the table, once (1.2 % at 5,120 channels).
    """
    padded = _align(tokens, BLOCK)
    scales = 4 * (channels // BLOCK * _align(tokens, 4) + padded // BLOCK * channels)
    rotation = tokens * (8 + 4 * ROPE_DIM) if rope else 0
    return 2 * tokens * channels + tokens * channels + channels * padded + scales + rotation


def separate_bytes(tokens: int, channels: int, rope: bool) -> int:
    """Bytes of two casts: x is read twice, 6.0625 an element; the rotation in place reads and writes its channels."""
    rotation = 4 * tokens * channels * ROPE_DIM // HEAD_DIM if rope else 0
    return fused_bytes(tokens, channels, rope) + 2 * tokens * channels + rotation


def _align(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def cases(device: torch.device, quick: bool) -> list[Case]:
    """All shapes, without and with inverse RoPE; on a CPU each at toy size; `quick`: 8,192 tokens, nothing compiled."""
    shapes = [(*shape, False) for shape in SHAPES] + [(*shape, True) for shape in ROPE_SHAPES]
    if device.type != "cuda":
        shapes = [(tokens // 64, TOY_CHANNELS[channels], rope) for tokens, channels, rope in shapes]
    elif quick:
        shapes = [shape for shape in shapes if shape[0] == 8192]
    return [_case(*shape, device, compiled=shape in COMPILED and not quick) for shape in shapes]


def _case(tokens: int, channels: int, rope: bool, device: torch.device, *, compiled: bool) -> Case:
    nbytes = fused_bytes(tokens, channels, rope)
    candidates = [
        Candidate("fp8_dual_cast", prepare_fused, ours=True),
        Candidate("two Triton casts", prepare_separate, work=separate_bytes(tokens, channels, rope)),
        Candidate("per_token_cast, then transposed", prepare_single, work=separate_bytes(tokens, channels, rope)),
        copy_candidate(nbytes),
    ]
    if compiled:
        peer = Candidate("torch.compile definition", prepare_compiled, verify=close_to_definition, tolerance=TOLERANCE)
        candidates.insert(3, peer)
    return Case(
        label=f"{tokens} x {channels}" + (", inverse RoPE" if rope else ""),
        make=lambda: make_inputs(tokens, channels, rope, device),
        candidates=tuple(candidates),
        verify=same_as_definition,
        bytes=nbytes,
    )


def prepare_fused(inputs: Inputs) -> Callable[[], Any]:
    """One call that makes both copies."""
    options = {"cos_sin_cache": inputs.table, "position_ids": inputs.positions, "head_dim": inputs.head_dim}
    return lambda: fp8_dual_cast(inputs.x, **options)


def prepare_separate(inputs: Inputs) -> Callable[[], Any]:
    """What one call replaces: a rotation in place, if any, and two Triton casts."""
    if inputs.x.is_cuda:
        from benches.peers.column_cast import column_cast
    else:
        column_cast = reference.column_cast

    def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
        q_t, sf_t = column_cast(x)
        return q_t, sf_t.t()

    return _two_casts(inputs, transposed)


def prepare_single(inputs: Inputs) -> Callable[[], Any]:
    """The same with both of this package's single casts; the transposed one is half of the fused kernel."""
    return _two_casts(inputs, per_token_cast_transposed)


def _two_casts(inputs: Inputs, transposed: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[], Any]:
    """The row cast and `transposed`, after a rotation in place, if any. Timing rotates the same copy of x further."""
    if inputs.table is None:
        return lambda: (*per_token_cast(inputs.x), *transposed(inputs.x))
    x = inputs.x.clone()
    rotate_ = _rotation(x.device)

    def call() -> Any:
        rotate_(x, inputs.table, inputs.positions, HEAD_DIM)
        return (*per_token_cast(x), *transposed(x))

    return call


def _rotation(device: torch.device) -> Callable[..., None]:
    if device.type == "cuda":
        from benches.peers.rotation import rotate_

        return rotate_
    return lambda x, *arguments: x.copy_(reference.rotate(x, *arguments))


def prepare_compiled(inputs: Inputs) -> Callable[[], Any]:
    """The same in plain PyTorch under torch.compile."""
    from benches.peers.compiled import compiled_casts

    casts = compiled_casts()
    return lambda: casts(inputs.x, inputs.table, inputs.positions, inputs.head_dim)


def same_as_definition(inputs: Inputs, outputs: tuple[Tensor, ...]) -> str:
    """All bytes and scales equal to the definition's."""
    counts = differences(inputs, outputs, ulps=0)
    assert not any(counts.values()), f"elements that differ from the definition: {counts}"
    return "all bytes and scales equal the definition's"


def close_to_definition(inputs: Inputs, outputs: tuple[Tensor, ...]) -> str:
    """At most 1 % of the bytes differ, and of the scales by more than 2 ulp."""
    counts = differences(inputs, outputs, ulps=2)
    shares = {name: counts[name] / output.numel() for name, output in zip(counts, outputs, strict=True)}
    assert max(shares.values()) <= 0.01, f"shares that differ from the definition: {shares}"
    return "shares that differ: " + ", ".join(f"{name} {share:.1e}" for name, share in shares.items())


def differences(inputs: Inputs, outputs: tuple[Tensor, ...], ulps: int) -> dict[str, int]:
    """How many elements of q, sf, q_t and sf_t differ from the definition, scales by more than `ulps`.

    Computed for CHUNK tokens at a time; both casts of a group of 128 tokens depend on no other. Raises AssertionError
    for another shape, dtype or stride.
    """
    q, sf, q_t, sf_t = outputs
    _check_layout(inputs.x.shape, outputs)
    counts = dict.fromkeys(("q", "sf", "q_t", "sf_t"), 0)
    for start in range(0, len(inputs.x), CHUNK):
        stop = min(start + CHUNK, len(inputs.x))
        x, positions = inputs.rows(start, stop)
        expected = reference.dual_cast(x, False, inputs.table, positions, inputs.head_dim or 0, True)
        padded, groups = start + _align(stop - start, BLOCK), slice(start // BLOCK, -(-stop // BLOCK))
        pairs = {
            "q": (q[start:stop], expected[0]),
            "sf": (sf[start:stop], expected[1].t()[: stop - start]),
            "q_t": (q_t[:, start:padded], expected[2]),
            "sf_t": (sf_t[:, groups], expected[3].t()),
        }
        for name, (actual, wanted) in pairs.items():
            bits = torch.int32 if actual.dtype == torch.float32 else torch.uint8
            distance = (actual.view(bits).int() - wanted.view(bits).int()).abs()
            counts[name] += int((distance > (ulps if bits == torch.int32 else 0)).sum())
    return counts


def _check_layout(shape: torch.Size, outputs: tuple[Tensor, ...]) -> None:
    tokens, channels = shape
    padded, fp8 = _align(tokens, BLOCK), torch.float8_e4m3fn
    wanted = [
        ((tokens, channels), (channels, 1), fp8),
        ((tokens, channels // BLOCK), (1, _align(tokens, 4)), torch.float32),
        ((channels, padded), (padded, 1), fp8),
        ((channels, padded // BLOCK), (1, channels), torch.float32),
    ]
    found = [(tuple(output.shape), output.stride(), output.dtype) for output in outputs]
    assert found == wanted, f"layouts {found}, expected {wanted}"


BENCH = Bench(
    name="fp8_dual_cast",
    title="Row and transposed FP8 cast of a bf16 matrix",
    cases=cases,
    wheels=("hopper-kernels", "fp8-dual-cast"),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
