"""opcheck, FakeTensors and torch.compile: what a traced call promises is what a real one returns."""

import pytest
import torch
from fp8_dual_cast import DualCast, fp8_dual_cast, per_token_cast, per_token_cast_transposed
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from tests.fp8_dual_cast import inputs
from tests.support.compare import assert_same_bytes
from tests.support.tracing import UTILITIES, assert_fake_like_real, facts, fresh_compiler

OPERATORS = torch.ops.fp8_dual_cast
TOKENS = [0, 1, 3, 4, 5, 127, 128, 129, 300]
pytestmark = pytest.mark.usefixtures("fresh_compiler")
assert fresh_compiler  # the fixture


def rotation(tokens, dtype=torch.int64):
    return inputs.cos_sin_cache(40, 64), inputs.position_ids(tokens, 40, dtype)


def operator_calls(x, dtype=torch.int64):
    """Every operator with arguments for x (T, C), C a multiple of 128."""
    table, positions = rotation(x.shape[0], dtype)
    return [
        (OPERATORS.row_cast.default, (x, False)),
        (OPERATORS.column_cast.default, (x, True)),
        (OPERATORS.dual_cast.default, (x, False, None, None, 0, True)),
        (OPERATORS.dual_cast.default, (x, True, None, None, 64, False)),
        (OPERATORS.dual_cast.default, (x, False, table, positions, 128, True)),
        (OPERATORS.dual_cast.default, (x, True, table.t().contiguous().t(), positions, 64, False)),
    ]


X = {
    "contiguous": lambda: inputs.matrix(37, 256),
    "sliced": lambda: inputs.STRIDES["aligned column slice"](inputs.matrix(37, 256)),
    "unaligned": lambda: inputs.STRIDES["unaligned column slice"](inputs.matrix(130, 128)),
    "transposed": lambda: inputs.matrix(256, 37).t(),
    "expanded": lambda: inputs.broadcasts()["one row"],
    "one token": lambda: inputs.matrix(1, 128),
    "no tokens": lambda: inputs.matrix(0, 256),
}


@pytest.mark.parametrize("name", X)
def test_opcheck(name):
    for operator, arguments in operator_calls(X[name]()):
        opcheck(operator, arguments, test_utils=UTILITIES)


def test_opcheck_of_an_input_that_requires_grad():
    for operator, arguments in operator_calls(inputs.matrix(37, 256).requires_grad_(), torch.int32):
        opcheck(operator, arguments, test_utils=UTILITIES)


@pytest.mark.parametrize("channels", [128, 384])
def test_fake_operators_promise_what_real_ones_return(channels):
    """Contiguous storages of equal metadata over a sweep of token counts."""
    for tokens in TOKENS:
        for operator, arguments in operator_calls(inputs.matrix(tokens, channels)):
            fake, real = assert_fake_like_real(operator, arguments)
            assert all(t.device.type == "cpu" for t in fake)
            assert all(t.is_contiguous() for t in real)
            assert [t.untyped_storage().nbytes() for t in fake] == [t.untyped_storage().nbytes() for t in real]


@pytest.mark.parametrize("channels", [128, 384])
def test_fake_cuda_tensors_without_a_gpu(channels):
    """The public functions on fake CUDA tensors give the views of the CPU, on the device of x."""
    for tokens in TOKENS:
        table, positions = rotation(tokens)
        x = inputs.matrix(tokens, channels)
        options = {"cos_sin_cache": table, "position_ids": positions, "head_dim": 128}
        real = (*fp8_dual_cast(x), *per_token_cast(x), *per_token_cast_transposed(x), *fp8_dual_cast(x, **options))
        with FakeTensorMode():
            y = torch.empty(tokens, channels, dtype=torch.bfloat16, device="cuda")
            options["cos_sin_cache"] = torch.empty(40, 64, device="cuda")
            options["position_ids"] = torch.empty(1, tokens, dtype=torch.int32, device="cuda")
            fake = fp8_dual_cast(y), per_token_cast(y), per_token_cast_transposed(y), fp8_dual_cast(y, **options)
        assert type(fake[0]) is DualCast
        fake = [t for results in fake for t in results]
        assert [facts(t)[:-1] for t in fake] == [facts(t)[:-1] for t in real]
        assert all(t.device.type == "cuda" for t in fake)


@pytest.mark.parametrize("ue8m0", [False, True], ids=["fp32", "ue8m0"])
def test_compiled_calls_equal_eager_ones(ue8m0):
    """One graph, bytes and strides alike, around other work, for contiguous and transposed intermediates."""

    def step(x, table, positions):
        doubled = x * 2
        dual = fp8_dual_cast(
            doubled.unflatten(1, (-1, 128)),
            use_ue8m0=ue8m0,
            cos_sin_cache=table,
            position_ids=positions[None],
            inverse=False,
        )
        row = per_token_cast(doubled[::2], use_ue8m0=ue8m0)
        column = per_token_cast_transposed(doubled.t().contiguous().t(), use_ue8m0=ue8m0)
        return *dual, *row, *column, dual.sf + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (37, 1, 130):
        arguments = (inputs.matrix(tokens, 256), *rotation(tokens))
        for got, want in zip(compiled(*arguments), step(*arguments), strict=True):
            assert_same_bytes(got, want)


def test_compiled_with_an_input_that_requires_grad():
    compiled = torch.compile(lambda x: (fp8_dual_cast(x), x * 2), fullgraph=True, backend="aot_eager")
    x = inputs.matrix(37, 256).requires_grad_()
    results, doubled = compiled(x)
    assert type(results) is DualCast
    assert not any(t.requires_grad for t in results)
    doubled.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    for got, want in zip(results, fp8_dual_cast(x), strict=True):
        assert_same_bytes(got, want)


def call(x, table, positions):
    return fp8_dual_cast(x, cos_sin_cache=table, position_ids=positions, head_dim=128)


def run_with_token_counts(counts, dynamic=None, mark=False):
    """Compiles for the first count, runs all, compares with eager; the number of compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for tokens in counts:
        x, (table, positions) = inputs.matrix(tokens, 128), rotation(tokens)
        if mark:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(positions, 0)
        for got, want in zip(compiled(x, table, positions), call(x, table, positions), strict=True):
            assert_same_bytes(got, want)
    return counter.frame_count


TWENTY = [300, 301, 129, 130, 255, 256, 257, 384, 385, 131, 132, 133, 640, 137, 211, 513, 514, 299, 199, 150]


def test_twenty_token_counts_need_two_compilations():
    """The first count, then a dynamic one; counts up to 128 need another, since q_t's blocks are then one."""
    assert len(set(TWENTY)) == 20
    assert run_with_token_counts(TWENTY) == 2
    torch._dynamo.reset()
    assert run_with_token_counts([300, 301, 5, 128, 127, 2, 129, 64]) == 3


def test_a_token_count_marked_dynamic_needs_one_compilation():
    assert run_with_token_counts(TWENTY[:6], mark=True) == 1


def test_no_tokens_and_one_token_compile_apart():
    """PyTorch specialises sizes 0 and 1, whatever an operator does."""
    assert run_with_token_counts([300, 301, 0, 1, 0, 1, 302, 2]) <= 5
