"""The operators under PyTorch's tracers, on the GPU: opcheck, fakes, compilation."""

import pytest
import torch
from hopper_kernels import launcher
from moe_experts import moe_experts

from tests.moe_experts import inputs, on_gpu
from tests.moe_experts.on_gpu import each_form, layer, small, strided
from tests.support.tracing import UTILITIES, assert_fake_like_real, compiled

pytestmark = pytest.mark.gpu

OPERATORS = torch.ops.moe_experts


def operator_calls(t, dout):
    """The operators with all arguments, with other strides, and with parts not needed.

    Zeros in the tail: opcheck compares arguments, in which NaN is not equal to itself.
    """
    t.x[t.owned :] = dout[t.owned :] = 0
    _, gate, up, used = OPERATORS.moe_experts_forward(*t)
    # Not written past the last group.
    gate, up = (v.index_fill(0, torch.arange(t.owned, len(v), device=v.device), 0) for v in (gate, up))
    saved, other = (*t[:5], gate, up, t.swiglu_limit), (*strided(t)[:5], gate, up, t.swiglu_limit)
    _, dgate_dup, h = OPERATORS.moe_experts_backward_data(dout, *saved[1:])
    dgate_dup, h = (v.index_fill(0, torch.arange(t.owned, len(v), device=v.device), 0) for v in (dgate_dup, h))
    turned, packed = dout.t().contiguous().t(), t.up_proj is None
    backward, weight_grad = OPERATORS.moe_experts_backward.default, OPERATORS.moe_experts_weight_grad.default
    return [
        (OPERATORS.moe_experts_forward.default, tuple(t)),
        (OPERATORS.moe_experts_forward.default, (*other[:5], float("inf"))),
        (backward, (dout, *saved)),
        (backward, (turned, *other)),
        (backward, (dout, *saved, False, True, False, True, used)),
        (backward, (dout, *saved, True, False, True, False, used)),
        (backward, (dout, *saved, True, False, False, False, None)),
        (OPERATORS.moe_experts_backward_data.default, (dout, *saved[1:])),
        (OPERATORS.moe_experts_backward_data.default, (turned, *other[1:])),
        (weight_grad, (dout, t.x, t.num_tokens_per_expert, dgate_dup, h, packed)),
        (weight_grad, (turned, t.x, t.num_tokens_per_expert.int(), dgate_dup, h, packed)),
    ]


@each_form
@pytest.mark.parametrize("groups", [(130, 0, 45), (1,), (0, 0)], ids=str)
def test_opcheck(packed, groups):
    for operator, arguments in operator_calls(*small(groups, 0, 16, 24, packed=packed)):
        torch.library.opcheck(operator, arguments, test_utils=UTILITIES)


@each_form
def test_opcheck_with_a_tail(packed):
    """Without the utility that compares two calls: rows past the last group are unspecified in some results."""
    for operator, arguments in operator_calls(*small((130, 0, 45), 7, 16, 24, packed=packed)):
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@each_form
def test_opcheck_with_gradients(packed):
    t, _ = small((30, 0, 45), 0, 16, 24, packed=packed)
    for one in (t, strided(t)):
        leaves = one._replace(**{n: getattr(one, n).detach().requires_grad_() for n in on_gpu.names_of(one)})
        torch.library.opcheck(OPERATORS.moe_experts_forward.default, tuple(leaves), test_utils=UTILITIES)


@each_form
@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
def test_fake_results_are_like_the_real_ones(packed, groups, tail, hidden, inner):
    for operator, arguments in operator_calls(*small(groups, tail, hidden, inner, packed=packed)):
        assert_fake_like_real(operator, arguments)


def compile_and_compare(packed, backend, row_counts, **options):
    """Compare the compiled layer with eager for each number of rows; how often it was compiled by then."""
    compilations = []
    with compiled(layer, backend, **options) as (call, counter):
        for rows in row_counts:
            groups = rows // 2, 0, rows // 3
            t, dout = small(groups, rows - sum(groups), 64, 40, packed=packed)
            dout = dout.nan_to_num()
            wanted = on_gpu.gradients(t, dout, function=layer)
            on_gpu.assert_same(on_gpu.gradients(t, dout, function=call), wanted, f"{rows} rows", strides=False)
            compilations.append(counter.frame_count)
    return compilations


@each_form
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_number_of_rows(packed, dynamic):
    """No graph break, eager's bytes, and one recompilation over the numbers of rows of a training run, or none."""
    row_counts = [1024, *range(256, 256 + 8 * 77, 77)]
    first, *later = compile_and_compare(packed, "aot_eager", row_counts, dynamic=dynamic)
    assert later == [first if dynamic else first + 1] * 8


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_compiled_with_inductor():
    assert compile_and_compare(False, "inductor", [1024, 300, 515, 130]) == [1, 2, 2, 2]


def test_compiled_without_rows():
    assert compile_and_compare(False, "aot_eager", [0, 0]) == [1, 1]


def test_new_sizes_compile_no_kernel():
    """Any number of rows, channels, and experts below 1,024: nothing new in the launcher's cache."""

    def call(groups, hidden, inner):
        for packed in (False, True):
            t, dout = small(groups, 3, hidden, inner, packed=packed)
            on_gpu.everything(t, dout)
            moe_experts(*t._replace(num_tokens_per_expert=t.num_tokens_per_expert.int()))

    call((300, 0, 1, 2), 136, 72)
    before = len(launcher._compiled)
    assert before >= 7
    for rows in range(1, 25):
        groups = (rows * 16 if rows % 3 else rows, 0, 1, 2, 3, 0, 5)[: 1 + rows % 7]
        call(groups, 8 * (1 + rows % 23), 8 * (1 + rows % 7))
    call((2, 0, 1) * 60, 40, 24)
    assert len(launcher._compiled) == before
