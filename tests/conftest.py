"""Fixtures and rules of all tests: GPU selection, seeds, poisoned and guarded memory, pretended cards, a watchdog.

Options: `--seed N` repeats a test with the seed that it printed. Markers: `gpu` (skipped without an SM90 device),
`slow`.
"""

from __future__ import annotations

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support import memory, repeat, watchdog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="seed of every test (default: made from the test's name)")


def pytest_configure(config: pytest.Config) -> None:
    # Or the threads of `-n` processes wait for each other's cores, which takes several times as long.
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): limit of a test; needs pytest-timeout to act")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    reason = _no_gpu_reason()
    for item in gpu:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(watchdog.limit(item), method="thread"), append=False)


def _no_gpu_reason() -> str | None:
    from hopper_kernels import arch

    return None if arch.capability() == (9, 0) else f"requires SM90, found {arch.describe()}"


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings) -> bool | None:
    if item.get_closest_marker("gpu") is None:
        return None
    watchdog.start(item, settings.timeout)
    return True


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """The test's seed, printed and given to torch and random: stable across runs, machines and test order."""
    given = request.config.getoption("seed")
    value = zlib.crc32(request.node.nodeid.encode()) if given is None else given
    request.node.stash[repeat.SEED] = value
    print(f"seed {value}")
    random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture
def poison() -> Callable[[str], int]:
    """Free memory holds NaN bytes now; call it with "nan", "huge" or "denormal" to poison again (memory.poison)."""
    memory.poison("nan")
    return memory.poison


@pytest.fixture
def guarded() -> Iterator[Callable[..., memory.Guarded]]:
    """guarded(shape, dtype, device="cpu", offset=0): as memory.guarded; all are checked when the test ends."""
    made: list[memory.Guarded] = []

    def make(*args, **kwargs) -> memory.Guarded:
        made.append(memory.guarded(*args, **kwargs))
        return made[-1]

    yield make
    for buffer in made:
        buffer.check()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list:
    """The launches of kernels, in order; they do nothing."""
    from hopper_kernels.launcher import Launch

    seen = []
    monkeypatch.setattr(Launch, "run", lambda one: seen.append(one))
    return seen


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """machine("SM80 (NVIDIA A100)"): the card that CUDA tensors are on. That of tests/shared shows more of a card."""
    from hopper_kernels import arch

    def show(card: str) -> None:
        monkeypatch.setattr(arch, "is_sm90", lambda device=None: card.startswith("SM90"))
        monkeypatch.setattr(arch, "describe", lambda device=None: card)

    return show


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("Repeat", repeat.command(item)))
    return report


def pytest_terminal_summary(terminalreporter) -> None:
    ran, skipped = 0, Counter()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            if not isinstance(report, pytest.TestReport) or "gpu" not in report.keywords:
                continue
            if outcome == "skipped":
                skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
            elif report.when == "call":
                ran += 1
    if not ran and not skipped:
        return
    reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.most_common())
    terminalreporter.write_line(
        f"gpu tests: {ran} ran, {skipped.total()} skipped" + (f" ({reasons})" if reasons else "")
    )
