"""More than 2**31 elements: of the rows, of what the experts keep of them, and of the weights; forward and backward."""

import math

import pytest
import torch

from tests.moe_experts import on_gpu
from tests.moe_experts.inputs import LIMIT, Operands
from tests.support.memory import free_device_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

BF16 = torch.bfloat16
OF_ROWS = ("out", "dx")


@pytest.fixture(autouse=True)
def device_memory():
    with free_device_memory(40):
        yield


def normal(*shape, std=1.0):
    """In bf16, made in parts: the same numbers in fp32 would take twice the memory."""
    made = torch.empty(shape, dtype=BF16, device=on_gpu.DEVICE)
    for part in made.split(max(1, 2**28 // made[0].numel())):
        part.normal_(0, std)
    return made


def large(groups, tail, hidden, inner, *, packed=False):
    """Operands and a gradient of the result, NaN past the last group."""
    experts, rows, owned = len(groups), sum(groups) + tail, sum(groups)
    x, dout = normal(rows, hidden), normal(rows, hidden)
    x[owned:], dout[owned:] = math.nan, math.nan
    std = hidden**-0.5
    if packed:
        weights = normal(experts, 2 * inner, hidden, std=std), None
    else:
        weights = normal(experts, inner, hidden, std=std), normal(experts, inner, hidden, std=std)
    down = normal(experts, hidden, inner, std=inner**-0.5)
    return Operands(x, *weights, down, torch.tensor(groups, device=on_gpu.DEVICE), LIMIT), dout


def alone(t, dout, expert, rows=slice(None)):
    """Copies of these rows of an expert's, with its weights and nothing else; and where the rows are."""
    sizes = t.num_tokens_per_expert.tolist()
    begin = sum(sizes[:expert])
    first, last, _ = rows.indices(sizes[expert])
    place, one = slice(begin + first, begin + last), slice(expert, expert + 1)
    weights = [None if w is None else w[one].clone() for w in t[1:4]]
    counts = torch.tensor([last - first], device=on_gpu.DEVICE)
    return Operands(t.x[place].clone(), *weights, counts, t.swiglu_limit), dout[place].clone(), place


def assert_expert_is_right(t, dout, found, expert):
    """All rows and the weights' gradients of an expert, against the definition in float64, and alone bit for bit."""
    one, d, place = alone(t, dout, expert)
    part = {name: r[place] if name in OF_ROWS else r[expert : expert + 1] for name, r in found.items()}
    on_gpu.assert_accurate(one, d, part, f"expert {expert}")
    on_gpu.assert_same(part, on_gpu.gradients(one, d), f"expert {expert} alone")


def assert_rows_are_those_alone(t, dout, found, expert, rows):
    one, d, place = alone(t, dout, expert, rows)
    part = {name: found[name][place] for name in OF_ROWS}
    on_gpu.assert_same(part, on_gpu.gradients(one, d, ["x"]), f"rows {place}")


@pytest.mark.parametrize(("hidden", "inner"), [(5120, 64), (64, 5120)])
def test_more_than_two_billion_elements_of_rows(hidden, inner):
    """420,000 rows of 5120 channels, of x or of gate and up: offsets pass 2**31 at row 419,430, in the third expert,
    those of the gradients of gate and up side by side also 2**32."""
    groups, tail = (419_000, 0, 930, 63), 7
    t, dout = large(groups, tail, hidden, inner)
    assert len(t.x) * max(hidden, inner) > 2**31
    found = on_gpu.gradients(t, dout)
    for name in OF_ROWS:
        assert not found[name][-tail:].any(), name
    assert_expert_is_right(t, dout, found, 2)
    assert_expert_is_right(t, dout, found, 3)
    for rows in (slice(0, 70), slice(209_680, 209_750), slice(-70, None)):
        assert_rows_are_those_alone(t, dout, found, 0, rows)
    for name in on_gpu.WEIGHTS:
        grad = found[name]
        assert not grad[1].any(), name
        assert grad[0].isfinite().all(), name


@on_gpu.each_form
def test_more_than_two_billion_elements_of_weights(packed):
    """190 experts of 5120 x 2304: offsets pass 2**31 at the 183rd, of a packed weight at the 92nd and 2**32 there."""
    groups = (*(5 * (expert % 3 == 0) for expert in range(189)), 70)
    t, dout = large(groups, 3, on_gpu.HIDDEN, on_gpu.INNER, packed=packed)
    assert t.down_proj.numel() > 2**31
    found = on_gpu.gradients(t, dout)
    for expert in (0, 90, 93, 180, 183, 189):
        assert_expert_is_right(t, dout, found, expert)
    for name in found.keys() - OF_ROWS:
        grad = found[name]
        empty = [expert for expert, size in enumerate(groups) if size == 0]
        assert not any(grad[expert].any().item() for expert in empty), name
        assert all(grad[expert].any().item() for expert in set(range(190)) - set(empty)), name
