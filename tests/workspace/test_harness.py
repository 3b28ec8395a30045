"""The harness itself: a comparison that cannot fail, or a guard that does not notice, would hide everything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import compare, device, memory
from tests.support.process import output_of, start_python

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]
FP8 = torch.float8_e4m3fn


def test_error64_is_relative_to_the_output():
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert compare.error64(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert compare.error64(torch.tensor([3.0, 4.0]), expected) == 0.0
    assert compare.error64(1e3 * torch.tensor([3.0, 4.5]), 1e3 * expected) == pytest.approx(0.1)


def test_error64_of_special_values():
    inf, nan = float("inf"), float("nan")
    zero, one = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert compare.error64(torch.zeros(2), zero) == 0.0
    assert compare.error64(torch.tensor([0.0, 1e-30]), zero) == inf
    assert compare.error64(torch.tensor([nan, 1.0]), one) == inf
    assert compare.error64(torch.tensor([inf, 1.0]), one) == inf
    assert compare.error64(torch.tensor([-inf, 1.0]), torch.tensor([-inf, 1.0], dtype=torch.float64)) == 0.0
    with pytest.raises(AssertionError, match="shape is"):
        compare.error64(torch.ones(2, 1), one)


def _product(columns: int = 256):
    a, b = torch.randn(32, 64), torch.randn(64, columns) / 8
    return a.double() @ b.double(), a.bfloat16() @ b.bfloat16()


def test_float64_bound_accepts_the_eager_result_and_rejects_a_worse_one():
    expected, eager = _product()
    compare.assert_close_to_float64(eager, expected, eager)
    worse = (eager.double() + 4 * compare.error64(eager, expected) * expected.abs()).bfloat16()
    with pytest.raises(AssertionError, match=r"out: error .* exceeds 2 x .* \(eager\)"):
        compare.assert_close_to_float64(worse, expected, eager, name="out")
    with pytest.raises(AssertionError, match="dtype is float32, the eager result has bfloat16"):
        compare.assert_close_to_float64(eager.float(), expected, eager)
    with pytest.raises(AssertionError, match="must be float64"):
        compare.assert_close_to_float64(eager, expected.float(), eager)


def test_a_nan_never_passes_even_if_eager_has_it_too():
    expected, eager = _product()
    eager[0, 0] = float("nan")
    with pytest.raises(AssertionError, match="error inf"):
        compare.assert_close_to_float64(eager, expected, eager)


def test_bands_find_what_the_whole_hides():
    expected, eager = _product(4096)
    expected[:, 512:528] *= 1e-3
    eager[:, 512:528] *= 1e-3
    compare.assert_bands_close_to_float64(eager, expected, eager)
    wrong = eager.clone()
    wrong[:, 512:528] = 0
    compare.assert_close_to_float64(wrong, expected, eager)
    with pytest.raises(AssertionError, match=r"1 of 256 bands along dim -1 are wrong; worst 512\.\.527"):
        compare.assert_bands_close_to_float64(wrong, expected, eager)


def test_bands_along_rows_and_a_band_of_zeros():
    expected = torch.ones(40, 8, dtype=torch.float64)
    expected[32:] = 0
    eager = expected.float()
    compare.assert_bands_close_to_float64(eager.clone(), expected, eager, dim=0)
    wrong = eager.clone()
    wrong[39, 7] = 1e-5
    with pytest.raises(AssertionError, match=r"1 of 3 bands along dim 0 .* worst 32\.\.39"):
        compare.assert_bands_close_to_float64(wrong, expected, eager, dim=0)


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.float32, torch.bfloat16, torch.int64])
def test_same_bytes_names_the_first_difference(dtype):
    expected = torch.arange(12, dtype=torch.float32).view(3, 4).to(dtype)
    compare.assert_same_bytes(expected.clone(), expected)
    actual = expected.clone()
    actual[1, 2], actual[2, 0] = actual[0, 1], actual[0, 1]
    with pytest.raises(AssertionError, match=r"q: 2 of 12 elements differ, first at \(1, 2\): 1(\.0)? .*expected 6"):
        compare.assert_same_bytes(actual, expected, "q")


def test_same_bytes_looks_at_bits_and_layout():
    zero = torch.zeros(4)
    with pytest.raises(AssertionError, match=r"first at \(0,\): -0\.0 \(0x80000000\), expected 0\.0 \(0x00000000\)"):
        compare.assert_same_bytes(-zero, zero)
    with pytest.raises(AssertionError, match="dtype float32, expected int32"):
        compare.assert_same_bytes(zero, zero.int())
    with pytest.raises(AssertionError, match=r"shape \(4,\), expected \(4, 1\)"):
        compare.assert_same_bytes(zero, zero.view(4, 1))
    wide = torch.zeros(4, 4)
    with pytest.raises(AssertionError, match=r"strides \(4, 1\), expected \(1, 4\)"):
        compare.assert_same_bytes(wide, wide.t())
    compare.assert_same_bytes(wide, wide.t(), strides=False)
    compare.assert_same_bytes(torch.empty(0, 4), torch.empty(0, 4))


def test_same_bytes_ignores_the_sign_of_a_float8_nan_only():
    def pattern(byte):
        return torch.tensor([byte, 0x38], dtype=torch.uint8).view(FP8)

    compare.assert_same_bytes(pattern(0x7F), pattern(0xFF))
    with pytest.raises(AssertionError, match="nan"):
        compare.assert_same_bytes(pattern(0x7F), pattern(0x7E))
    nan = torch.tensor([0x7FC00000], dtype=torch.int32)
    with pytest.raises(AssertionError, match="1 of 1"):
        compare.assert_same_bytes(nan.view(torch.float32), (nan + 1).view(torch.float32))


def test_repeat_bytes_finds_a_result_that_changes():
    x = torch.randn(8)
    assert device.repeat_bytes(lambda: (x + 1, {"y": x * 2}, None), 3)[0].equal(x + 1)
    with pytest.raises(AssertionError, match="call 2 of 3, output 0"):
        device.repeat_bytes(lambda: torch.randn(8), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8, torch.int64])
def test_guard_bands(dtype):
    buffer = memory.guarded((3, 5), dtype, offset=1)
    assert buffer.tensor.shape == (3, 5)
    assert buffer.tensor.is_contiguous()
    assert buffer.tensor.data_ptr() % 64 == dtype.itemsize
    assert not dtype.is_floating_point or buffer.tensor.float().isnan().all()
    buffer.tensor.zero_()
    buffer.check()
    flat = buffer.tensor.as_strided((17,), (1,), buffer.tensor.storage_offset() - 1)
    flat[-1] = 0
    with pytest.raises(AssertionError, match=r"[1-8] after it \(the nearest \d bytes past the end\)"):
        buffer.check()
    flat[0] = 0
    with pytest.raises(AssertionError, match=r"before it \(the nearest \d bytes in front\) and"):
        buffer.check()


def test_poison_patterns_mean_the_same_in_every_dtype(poison):
    assert poison("denormal") >= 0
    for dtype in (torch.bfloat16, torch.float32, FP8):
        words = {name: torch.full((4,), word, dtype=torch.int16) for name, word in memory.PATTERNS.items()}
        values = {name: word.view(dtype).float() for name, word in words.items()}
        assert values["nan"].isnan().all()
        assert values["huge"].isnan().all() if dtype == FP8 else (values["huge"] > 1e38).all()
        assert values["denormal"].max() < torch.finfo(dtype).tiny
        assert values["denormal"].max() > 0


def test_no_sync_on_any_machine():
    with device.no_sync():
        torch.ones(3).sum().item()


TOY = """
import pytest, torch
@pytest.mark.gpu
def test_device(): pass
def test_fails(seed):
    assert torch.initial_seed() == seed and seed == 0
"""


def _inner(pytester, text: str, *options: str):
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\nmarkers = ['gpu: .', 'slow: .']\n")
    pytester.makepyfile(test_toy=text)
    return pytester.runpytest_inprocess("-p", "tests.conftest", "-p", "no:cacheprovider", *options)


def test_gpu_tests_are_skipped_with_a_reason_and_a_failure_says_how_to_repeat_it(pytester, monkeypatch):
    from hopper_kernels import arch

    monkeypatch.setattr(arch, "capability", lambda *_: (8, 0))
    monkeypatch.setattr(arch, "describe", lambda *_: "SM80 (some GPU)")
    result = _inner(pytester, TOY)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*seed *",
            'python -m pytest "test_toy.py::test_fails" --seed *',
            "gpu tests: 0 ran, 1 skipped (1 requires SM90, found SM80 (some GPU))",
        ]
    )
    result = _inner(pytester, TOY, "--seed", "0", "-m", "not gpu")
    result.assert_outcomes(passed=1, deselected=1)
    assert "gpu tests" not in result.stdout.str()


def test_gpu_tests_run_on_sm90(pytester, monkeypatch):
    from hopper_kernels import arch

    monkeypatch.setattr(arch, "capability", lambda *_: (9, 0))
    result = _inner(pytester, TOY, "--seed", "0", "-m", "gpu")
    result.assert_outcomes(passed=1, deselected=1)
    result.stdout.fnmatch_lines(["gpu tests: 1 ran, 0 skipped"])


HANG = """
import pytest, time
@pytest.mark.gpu
@pytest.mark.timeout(1)
def test_hang():
    print("before the hang")
    time.sleep(60)
"""


def test_watchdog_ends_a_hung_gpu_test(tmp_path):
    pytest.importorskip("pytest_timeout")
    (tmp_path / "test_hang.py").write_text(HANG)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: .\n")
    program = "import sys; from hopper_kernels import arch; arch.capability = lambda *_: (9, 0)\n"
    program += "import pytest; sys.exit(pytest.main(['-p', 'tests.conftest', '-q', sys.argv[1]]))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert "before the hang" in done.stderr
    assert "GPU watchdog: test_hang.py::test_hang still runs after 1 s" in done.stderr
    assert 'python -m pytest "test_hang.py::test_hang" --seed ' in done.stderr
    assert "in test_hang" in done.stderr


@pytest.mark.parametrize(("quit_at_once", "found"), [(False, "first last"), (True, "first")])
def test_a_process_may_quit_at_once(quit_at_once, found):
    code = "import atexit, sys; atexit.register(print, 'last'); print(*sys.argv[1:])"
    output = output_of(start_python(code, "first", quit_at_once=quit_at_once))
    assert output.split() == found.split()


def test_a_process_that_fails_is_noticed():
    with pytest.raises(AssertionError, match=r"(?s)exit status 1.*ZeroDivisionError"):
        output_of(start_python("1 / 0", quit_at_once=True))


@pytest.mark.gpu
class TestOnDevice:
    @pytest.mark.parametrize("elements", [1, 1000, 1 << 20, 100_000_000])
    def test_fresh_memory_is_poisoned(self, elements, poison):
        assert torch.empty(elements, device="cuda").isnan().all()
        poison("huge")
        assert (torch.empty(elements, device="cuda") > 1e38).all()

    def test_guard_bands(self, guarded):
        buffer = guarded((100, 7), torch.bfloat16, "cuda")
        assert buffer.tensor.data_ptr() % 512 == 0
        buffer.tensor.zero_()

    def test_side_stream_shows_work_on_the_wrong_stream(self):
        x = torch.ones(1000, device="cuda")
        assert (device.side_stream(lambda y: y * 2, x) == 2).all()

        def wrong(y):
            with torch.cuda.stream(torch.cuda.default_stream()):
                return y * 2

        assert device.side_stream(wrong, x).isnan().all()

    def test_capture_replays_with_new_contents(self):
        x = torch.zeros(1000, device="cuda")
        captured = device.capture(lambda: x + 1)
        x.fill_(2)
        assert (captured.replay() == 3).all()

    def test_no_sync(self):
        x = torch.ones(1000, device="cuda")
        with device.no_sync():
            x + 1
            with pytest.raises(RuntimeError, match="synchroniz"):
                x.sum().item()
        x.sum().item()
