"""Poisoned and guarded memory: an output that was not written, or was written past its end, must show."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# As 16-bit words, since every dtype then sees the same kind of value: NaN; huge but finite in bf16 and fp32 (NaN in
# fp8); a denormal in bf16, fp32 and (every other byte) fp8.
PATTERNS = {"nan": -1, "huge": 0x7F7F, "denormal": 0x0001}

_BAND = 4096  # bytes; a multiple of every alignment a kernel asks for
_SMALL = 1 << 20  # the CUDA allocator serves requests up to this from a pool of their own


def poison(pattern: str = "nan") -> int:
    """Fill free memory with `pattern` ("nan", "huge" or "denormal"); the number of bytes filled on the GPU.

    Takes every free block of the CUDA caching allocator and a ladder of new ones (2 of each power of two from 512 B
    to 1 GiB), fills and frees them, so that the next torch.empty on the current device and stream returns poison.
    Memory first used on another stream comes from another pool: call this inside that stream.
    On a CPU: small blocks through the C allocator, which usually hands them out again; no promise.
    """
    word = PATTERNS[pattern]
    _fill([1 << exponent for exponent in range(6, 21)] * 2, word, torch.device("cpu"))
    if not torch.cuda.is_available():
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()  # or the ladder of each call would come on top of the last one's
    ladder = [1 << exponent for exponent in range(9, 31)] * 2
    return _fill(sorted(_free_blocks(device), reverse=True) + sorted(ladder, reverse=True), word, device)


def _fill(sizes: list[int], word: int, device: torch.device) -> int:
    """Allocates all sizes (bytes) at once, largest first so that each free block goes to the request of its size."""
    held = []
    with contextlib.suppress(torch.OutOfMemoryError):
        for size in sizes:
            held.append(torch.empty(size // 2, dtype=torch.int16, device=device).fill_(word))
    return sum(tensor.nbytes for tensor in held)


def _free_blocks(device: torch.device) -> Iterator[int]:
    stream = torch.cuda.current_stream(device).cuda_stream
    for segment in torch.cuda.memory_snapshot():
        private = tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        if segment["device"] != device.index or segment["stream"] != stream or private:
            continue
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                limit = _SMALL if segment["segment_type"] == "small" else block["size"]
                yield from (min(limit, block["size"] - start) for start in range(0, block["size"], limit))


class Guarded:
    """A tensor between two sentinel bands of one buffer: `.tensor`, and `.check()` after the kernel ran."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, offset: int) -> None:
        itemsize = dtype.itemsize
        self._start = _BAND + offset * itemsize
        self._end = self._start + torch.Size(shape).numel() * itemsize
        # No two neighbouring bytes alike, and no short period: a shifted copy of the band is noticed too.
        count = torch.arange(self._end + _BAND, device=device)
        self._sentinel = ((count * 37 + 11) % 251).to(torch.uint8)
        self._buffer = self._sentinel.clone()
        body = self._buffer[self._start : self._end].fill_(0xFF)
        self.tensor: Tensor = body.view(dtype).view(shape)

    def check(self) -> None:
        """Raise AssertionError if a byte before or after the tensor has changed. Synchronises."""
        changed = self._buffer != self._sentinel
        changed[self._start : self._end] = False
        where = changed.nonzero().flatten()
        if len(where) == 0:
            return
        before, after = where[where < self._start], where[where >= self._end]
        sides = []
        if len(before):
            sides.append(f"{len(before)} before it (the nearest {self._start - int(before[-1])} bytes in front)")
        if len(after):
            sides.append(f"{len(after)} after it (the nearest {int(after[0]) - self._end} bytes past the end)")
        raise AssertionError(f"guard bands of {tuple(self.tensor.shape)}: bytes written " + " and ".join(sides))


def guarded(
    shape: tuple[int, ...] | list[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, offset: int = 0
) -> Guarded:
    """A contiguous tensor of NaN bytes between sentinel bands, for in-place and preallocated buffers.

    `offset` moves its first element that many elements from a 512-byte boundary, to test unaligned bases.
    """
    return Guarded(tuple(shape), dtype, device, offset)


def peak_of(call: Callable[[], object]) -> tuple[object, int]:
    """What a call returns, and the bytes beyond what was there that PyTorch was asked for at its peak."""
    call()
    torch.cuda.synchronize()
    _collect()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    results = call()
    return results, requested("peak") - before


def allocated(device: int | None = None) -> int:
    """Bytes of all tensors on a device, after what earlier tests left, and Python would free any time, has gone.

    A backward that has returned may still be letting go of its tensors on autograd's thread: waits until two readings
    agree.
    """
    reading, previous = _reading(device), None
    while reading != previous:
        time.sleep(0.05)
        reading, previous = _reading(device), reading
    return reading


def _reading(device: int | None) -> int:
    _collect()
    return torch.cuda.memory_allocated(device)


def _collect() -> None:
    """Collect until nothing is left to: what one pass frees in autograd's graphs may hold what the next one frees."""
    while gc.collect():
        pass


def requested(what: str) -> int:
    """Bytes that PyTorch is asked for on the current device: "current" or "peak"."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


@contextlib.contextmanager
def free_device_memory(gib: int) -> Iterator[None]:
    """Skip the test where other processes leave less than that, and give everything back after it."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < gib << 30:
        pytest.skip(f"requires {gib} GiB of free device memory, found {free >> 30} GiB")
    yield
    torch.cuda.empty_cache()


class GuardedAllocations(TorchFunctionMode):
    """Inside, what Python code allocates on a GPU lies between sentinels and starts as NaN (the fixture `guarded`)."""

    def __init__(self, guarded) -> None:
        super().__init__()
        self.guarded, self.count = guarded, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in ("empty", "zeros", "new_empty", "new_zeros") or made.device.type != "cuda":
            return made
        self.count += 1
        buffer = self.guarded(tuple(made.shape), made.dtype, made.device).tensor
        return buffer.zero_() if "zeros" in name else buffer
