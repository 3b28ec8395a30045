"""What a bench consists of: cases, and candidates that do the work of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benches.timing import Call, median_ms

COPY = "copy of the same bytes"
_PAGE, _LARGE_PAGE, _LARGE = 4 << 10, 2 << 20, 64 << 20


@dataclass(frozen=True)
class Candidate:
    """One way to do the work of a case.

    prepare: takes the case's inputs and returns the call to time; it may allocate and compile. The first call of what
        it returns is verified.
    ours: whether it is this project's kernel; the bench fails if that is wrong or raises.
    work: bytes or operations that this way needs at least, if more than the case's.
    verify: instead of the case's, for a peer with another recipe, which `tolerance` describes.
    graph: whether the call may be captured in a CUDA graph.
    """

    name: str
    prepare: Callable[[Any], Call]
    ours: bool = False
    work: int | None = None
    verify: Callable[[Any, Any], str] | None = None
    tolerance: str = ""
    graph: bool = True


@dataclass(frozen=True)
class Case:
    """One shape. Exactly one of `bytes` and `flops` is set: the least that any way of doing it must move or compute.

    verify(inputs, outputs) returns what was found in a few words, or raises AssertionError.
    """

    label: str
    make: Callable[[], Any]
    candidates: tuple[Candidate, ...]
    verify: Callable[[Any, Any], str]
    bytes: int | None = None
    flops: int | None = None

    @property
    def work(self) -> int:
        return self.bytes if self.bytes is not None else self.flops


@dataclass(frozen=True)
class Bench:
    """A bench module. cases(device, quick) lists the cases, at toy sizes for a CPU.

    `wheels`: those measured; their versions are recorded, and a digest of their code. Each has its import name.
    `packages`: those inside the wheels' whose code the digest covers too ("moe_experts.fp8").
    `peers`: distributions that candidates come from, if they are installed; their versions are recorded.
    `matmul`: dtype of the matrix product that is the ceiling of cases that count operations, bfloat16 or float8_e4m3fn.
    """

    name: str
    title: str
    cases: Callable[[torch.device, bool], list[Case]]
    wheels: tuple[str, ...] = ("hopper-kernels",)
    packages: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    matmul: torch.dtype = torch.bfloat16


def copy_candidate(nbytes: int) -> Candidate:
    """A device copy that reads and writes `nbytes` in total: the floor of a case of that many bytes.

    Each of the two buffers is rounded up to whole 4 KiB, from 64 MiB on to whole 2 MiB: on an H200 the driver copied
    some other lengths at two thirds of the speed. For the same reason the faster of `copy_` and a Triton kernel is the
    candidate on a GPU. Rates count the rounded bytes.
    """
    buffer = _copied_bytes(nbytes)

    def prepare(inputs: Any) -> Call:
        device = next(t.device for t in vars(inputs).values() if isinstance(t, torch.Tensor))
        source = torch.empty(buffer, dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)
        ways = {"copy_": target.copy_}
        if device.type == "cuda":
            from benches.peers.plain_copy import copy_into

            ways["Triton"] = lambda source: copy_into(source, target)
        name = min(ways, key=lambda name: median_ms(device, lambda: ways[name](source))) if len(ways) > 1 else "copy_"
        way = ways[name]
        target.zero_()

        def call() -> tuple[torch.Tensor, torch.Tensor, str]:
            way(source)
            return source, target, name

        return call

    def verify(inputs: Any, outputs: tuple[torch.Tensor, torch.Tensor, str]) -> str:
        source, target, name = outputs
        assert torch.equal(source, target), "the copy differs"
        return f"equal, by {name}"

    return Candidate(COPY, prepare, work=2 * buffer, verify=verify)


def _copied_bytes(nbytes: int) -> int:
    """Size of each buffer of a copy that moves `nbytes`."""
    page = _LARGE_PAGE if nbytes // 2 >= _LARGE else _PAGE
    return -(-nbytes // (2 * page)) * page
