"""What a measurement was made on: device, versions, clocks, and the ceilings of that device on that day."""

from __future__ import annotations

import hashlib
import importlib.util
import platform
import subprocess
import threading
import time
import tokenize
from importlib import metadata
from pathlib import Path

import torch

from benches.timing import median_ms, percentile

_QUERY = {"sm_mhz": "clocks.sm", "memory_mhz": "clocks.mem", "power_w": "power.draw", "celsius": "temperature.gpu"}
_COPY_BYTES = 1 << 30  # of each of the two buffers: far past any L2
_MATMUL = 8192


def device_facts(device: torch.device) -> dict[str, object]:
    """Name and sizes of the GPU, or the kind of CPU."""
    if device.type != "cuda":
        return {"type": "cpu", "name": platform.machine()}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
    }


def versions(wheels: tuple[str, ...]) -> dict[str, str | None]:
    """Versions of Python, PyTorch, CUDA, Triton, the driver and these wheels; None for what is not installed."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", *wheels):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found["driver"] = driver.splitlines()[0] if driver else None
    return found


def code_digest(packages: tuple[str, ...]) -> str:
    """Identifies the measured code: a hash of the files of these that plan, launch and compute on a device.

    packages: wheels, each for the package of its name, and packages inside others with dots ("moe_experts.fp8"). Of
    each, the files directly in it and in its `kernels` count, not those of other packages in it.

    Comments, docstrings and layout do not count. A test compares it with the committed record, so a figure cannot
    outlive the kernel that it was measured on.
    """
    digest = hashlib.sha256()
    for package in packages:
        root = Path(importlib.util.find_spec(package.replace("-", "_")).origin).parent
        for pattern in ("plan.py", "launch.py", "*_device.py", "kernels/*.py"):
            for path in sorted(root.glob(pattern)):
                digest.update(f"{package}/{path.name}:{_code(path)}\n".encode())
    return digest.hexdigest()[:16]


def _code(path: Path) -> str:
    """The tokens of a file without comments, blank space and docstrings."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    kept, line = [], []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in layout:
                line.append(token)
            elif token.type == tokenize.NEWLINE:
                if not (len(line) == 1 and line[0].type == tokenize.STRING):
                    kept += [one.string for one in line]
                line = []
    return "".join(kept)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class ClockLog:
    """Reads clocks, power and temperature a few times a second while the `with` block runs; nothing on a CPU."""

    def __init__(self, device: torch.device, period_s: float = 0.2) -> None:
        self._command = _clock_command(device) if device.type == "cuda" else None
        self._period_s = period_s
        self._log: list[tuple[float, dict[str, float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> ClockLog:
        if self._command:
            self._read()
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._command:
            self._thread.join()
            self._read()

    def summary(self) -> dict[str, dict[str, float]] | None:
        """The first and the last reading, and the median over the block ("during")."""
        if not self._log:
            return None
        return {"before": self._log[0][1], "after": self._log[-1][1], "during": self.between(0.0, float("inf"))}

    def between(self, start: float, end: float) -> dict[str, float] | None:
        """Medians of the readings between two time.perf_counter() values, or the reading nearest to their middle."""
        if not self._log:
            return None
        log = list(self._log)
        chosen = [reading for when, reading in log if start <= when <= end]
        chosen = chosen or [min(log, key=lambda entry: abs(entry[0] - (start + end) / 2))[1]]
        names = [name for name in _QUERY if all(name in reading for reading in chosen)]
        return {name: percentile([reading[name] for reading in chosen], 0.5) for name in names}

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            self._read()

    def _read(self) -> None:
        line = _output(self._command)
        if line:
            self._log.append((time.perf_counter(), _parse_clocks(line)))


def _clock_command(device: torch.device) -> list[str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY.values())}", "--format=csv,noheader,nounits"]
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return [*command, "-i", f"GPU-{uuid}"] if uuid else command


def _parse_clocks(line: str) -> dict[str, float]:
    reading = {}
    for name, text in zip(_QUERY, line.splitlines()[0].split(","), strict=False):
        try:
            reading[name] = float(text)
        except ValueError:  # "[N/A]" where the machine hides it
            continue
    return reading


def copy_ceiling(device: torch.device) -> float:
    """GB/s of a copy between two 1 GiB buffers, bytes read plus bytes written."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_ms(device, lambda: target.copy_(source)) / 1e6


def matmul_ceiling(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """TFLOP/s of a product of 8192^3 random values, bf16 or e4m3, a short burst.

    That of e4m3 has one scale for each operand and adds up as the tensor cores do, without a sum in fp32 beside them.
    """
    a, b = (torch.randn(_MATMUL, _MATMUL, dtype=torch.bfloat16, device=device) for _ in range(2))
    if dtype == torch.bfloat16:
        return 2 * _MATMUL**3 / median_ms(device, lambda: torch.mm(a, b)) / 1e9
    a, b, one = a.to(dtype), b.to(dtype).t(), torch.ones((), device=device)
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return 2 * _MATMUL**3 / median_ms(device, lambda: torch._scaled_mm(a, b, **options)) / 1e9
