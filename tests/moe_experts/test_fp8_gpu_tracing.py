"""The FP8 operators under PyTorch's tracers, on the GPU: opcheck, fakes, compilation."""

import pytest
import torch
from hopper_kernels import launcher
from moe_experts import moe_experts_fp8_quantize_weights
from torch._dynamo.testing import CompileCounterWithBackend

from tests.moe_experts import fp8_on_gpu, on_gpu
from tests.moe_experts.fp8_on_cpu import SHAPES
from tests.moe_experts.on_gpu import each_form
from tests.moe_experts.test_fp8_tracing import calls, joint_step, split_step
from tests.moe_experts.test_tracing import fp8_layer, halves, in_place_leaves
from tests.support.compare import assert_same_bytes
from tests.support.tracing import assert_fake_like_real, fresh_compiler

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_compiler")]
assert fresh_compiler  # the fixture

SCHEMA = ("test_faketensor", "test_autograd_registration")
# Of their results some parts are unspecified, in which two calls may differ.
PADDED = ("moe_experts_fp8_forward", "moe_experts_fp8_forward_quantized", "moe_experts_fp8_backward_data")


def small(groups=(4, 0, 5), tail=2, hidden=128, inner=128, **options):
    """Zeros in the tail: opcheck compares results, in which NaN is not equal to itself."""
    t, dout = fp8_on_gpu.operands(groups, tail, hidden, inner, limit=1.0, **options)
    t.x[t.owned :] = dout[t.owned :] = 0
    return t, dout


def operator_calls(t):
    """Those of the tests on the CPU; NaN in unspecified parts of operands is made 0 first, in place."""
    with on_gpu.DEVICE:
        found = calls(t)
    made = []
    for operator, arguments in found:
        given = [a.cpu() if isinstance(a, torch.Tensor) and a.dtype == torch.bool else a for a in arguments]
        for a in given:
            if isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn:
                codes = a.view(torch.uint8)
                codes.masked_fill_(codes & 0x7F == 0x7F, 0)
            elif isinstance(a, torch.Tensor) and a.is_floating_point() and not a.requires_grad:
                a.masked_fill_(a.isnan(), 0)
        made.append((operator.default, tuple(given)))
    return made


@pytest.mark.parametrize(
    ("groups", "tail", "packed"), [((4, 0, 5), 2, False), ((130,), 0, True), ((0, 0), 0, True)], ids=str
)
def test_opcheck(groups, tail, packed):
    """Without test_schema, which cannot compare tensors of FP8."""
    for operator, arguments in operator_calls(small(groups, tail, packed=packed)[0]):
        compared = (
            () if operator._schema.name.removeprefix("moe_experts::") in PADDED else ("test_aot_dispatch_dynamic",)
        )
        torch.library.opcheck(operator, arguments, test_utils=SCHEMA + compared)


@each_form
def test_opcheck_with_gradients(packed):
    t, _ = small(packed=packed)
    for strided in (t, halves(t)):
        for operator, arguments in operator_calls(in_place_leaves(strided))[:5]:
            torch.library.opcheck(operator, arguments, test_utils=SCHEMA)


@each_form
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fake_results_are_like_the_real_ones(packed, shape):
    for operator, arguments in operator_calls(small(*shape, packed=packed)[0]):
        _, real = assert_fake_like_real(operator, arguments)
        assert all(r.is_contiguous() for r in real)


@each_form
@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_for_any_number_of_rows(packed, dynamic):
    """No graph break, eager's bytes, and one recompilation over the numbers of rows of a training run, or none."""
    counter, compilations = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(fp8_layer, fullgraph=True, backend=counter, dynamic=dynamic)
    for rows in (1024, *range(256, 256 + 4 * 77, 77)):
        groups = rows // 2, 0, rows // 3
        t, dout = small(groups, rows - sum(groups), packed=packed)
        wanted = on_gpu.gradients(t, dout, function=fp8_layer)
        on_gpu.assert_same(on_gpu.gradients(t, dout, function=compiled), wanted, f"{rows} rows", strides=False)
        compilations.append(counter.frame_count)
    first, *later = compilations
    assert later == [first if dynamic else first + 1] * 4


def test_compiled_without_rows():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fp8_layer, fullgraph=True, backend=counter)
    for _ in range(2):
        t, dout = small((0, 0), 0)
        wanted = on_gpu.gradients(t, dout, function=fp8_layer)
        on_gpu.assert_same(on_gpu.gradients(t, dout, function=compiled), wanted, strides=False)
    assert counter.frame_count == 1


INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.timeout(120)])


@pytest.mark.parametrize("pitched", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
@pytest.mark.parametrize("function", [split_step, joint_step])
def test_compiled_steps_into_views_of_one_buffer(function, backend, pitched):
    """Views are changed once in each call, and what lies around them not; another M compiles nothing."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    first, _ = small()
    weights = moe_experts_fp8_quantize_weights(*first[1:4])
    shapes = [s.shape for s in fp8_on_gpu.sums(first)]
    apart = 4 if pitched else 0
    homes = [(experts, rows + apart, channels + apart) for experts, rows, channels in shapes]
    sizes = [8, torch.Size(homes[0]).numel(), 4, torch.Size(homes[1]).numel(), 12]
    buffers = [torch.randn(sum(sizes), device=on_gpu.DEVICE)]
    buffers.append(buffers[0].clone())
    for groups, tail in (((4, 0, 5), 2), ((130, 3, 1), 0), ((0, 9, 2), 3)):
        t, dout = small(groups, tail)
        found = []
        for one, buffer in zip((compiled, function), buffers, strict=True):
            parts = zip(buffer.split(sizes)[1::2], homes, shapes, strict=True)
            views = [part.view(home)[:, : shape[1], : shape[2]] for part, home, shape in parts]
            found.append(one(dout, t.x, t[4], *views, *weights))
        for got, want in zip(*found, strict=True):
            assert_same_bytes(got, want, strides=False)
        assert_same_bytes(*buffers)
    assert counter.frame_count == 1


def test_new_sizes_compile_no_kernel():
    """Any number of rows, channels, and experts below 1,024: nothing new in the launcher's cache."""

    def call(groups, hidden, inner):
        for packed in (False, True):
            t, dout = small(groups, 3, hidden, inner, packed=packed)
            fp8_on_gpu.everything(t, dout)
            fp8_on_gpu.call(*t._replace(num_tokens_per_expert=t.num_tokens_per_expert.int()))

    call((300, 0, 1, 2), 256, 128)
    before = len(launcher._compiled)
    assert before >= 14  # of FP8 12, and the groups of counts of either type
    for rows in range(1, 13):
        groups = (rows * 16 if rows % 3 else rows, 0, 1, 2, 3, 0, 5)[: 1 + rows % 7]
        call(groups, 128 * (1 + rows % 5), 128 * (1 + rows % 3))
    call((2, 0, 1) * 60, 128, 256)
    assert len(launcher._compiled) == before
