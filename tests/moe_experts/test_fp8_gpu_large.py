"""FP8: more than 2**31 elements of rows, of panels and of the weights and their gradients; forward and backward."""

import pytest
from moe_experts import moe_experts_fp8_backward_accumulate

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_gpu import gradients, results, step, sums
from tests.moe_experts.test_gpu_large import OF_ROWS, alone, device_memory, large
from tests.support.compare import assert_same_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
assert device_memory  # a fixture


def assert_expert_is_that_alone(t, dout, found, expert):
    """All rows and the weights' gradients of an expert, bit for bit, which alone are right."""
    one, d, place = alone(t, dout, expert)
    part = {name: r[place] if name in OF_ROWS else r[expert : expert + 1] for name, r in found.items()}
    on_gpu.assert_same(part, gradients(one, d), f"expert {expert}")
    fp8_on_gpu.assert_right(one, d, results(one, d))


@pytest.mark.parametrize(("hidden", "inner"), [(5120, 128), (128, 5120)])
def test_more_than_two_billion_elements_of_rows(hidden, inner):
    """420,000 rows of 5120 channels, of x or of h: offsets of elements pass 2**31 at row 419,430, which padded rows
    have in the third expert; those of G and U, and of their gradients, also pass 2**32."""
    groups, tail = (419_000, 0, 930, 63), 7
    t, dout = large(groups, tail, hidden, inner)
    assert len(t.x) * max(hidden, inner) > 2**31
    found = gradients(t, dout)
    for name in OF_ROWS:
        assert not found[name][-tail:].any(), name
    for expert in (2, 3):
        assert_expert_is_that_alone(t, dout, found, expert)
    for rows in (slice(0, 70), slice(209_680, 209_750), slice(-70, None)):
        one, d, place = alone(t, dout, 0, rows)
        part = {name: found[name][place] for name in OF_ROWS}
        on_gpu.assert_same(part, gradients(one, d, ["x"]), f"rows {place}")
    for name in on_gpu.WEIGHTS:
        assert not found[name][1].any(), name
        assert found[name][0].isfinite().all(), name


def test_more_than_two_billion_elements_of_weights():
    """100 experts of 5120 x 2304: offsets in the gradient of gate and up, and in its buffer, pass 2**31 at the 92nd,
    those of bytes much before."""
    groups = (*(5 * (expert % 3 == 0) for expert in range(99)), 70)
    empty = [expert for expert, size in enumerate(groups) if size == 0]
    t, dout = large(groups, 3, on_gpu.HIDDEN, on_gpu.INNER, packed=True)
    assert t.gate_proj.numel() > 2**31
    found = gradients(t, dout)
    for expert in (0, 90, 93, 99):
        assert_expert_is_that_alone(t, dout, found, expert)
    for name in ("dw1", "dw2"):
        assert not any(found[name][expert].any().item() for expert in empty), name
    out, dx = (found[name] for name in OF_ROWS)
    del found
    s, buffers = step(t), sums(t, 1.0)
    assert_same_bytes(s.out, out, "out")
    assert_same_bytes(moe_experts_fp8_backward_accumulate(dout, *s.joint, *buffers), dx, "dx")
    for name, buffer in zip(("dw13", "dw2"), buffers, strict=True):
        for expert in (0, 90, 93, 99):
            one, d, _ = alone(t, dout, expert)
            assert_same_bytes(buffer[expert], results(one, d)[name][0] + 1.0, f"{name} of expert {expert}")
        assert all(buffer[expert].eq(1.0).all().item() for expert in empty), name
