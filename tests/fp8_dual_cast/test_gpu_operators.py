"""The operators inside PyTorch: opcheck, compilation, autocast, errors, the definition on request, autograd."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed
from hopper_kernels import KernelUnavailable, reference
from torch.utils.checkpoint import checkpoint

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support import launches, machines
from tests.support.compare import assert_same_bytes
from tests.support.tracing import assert_fake_like_real, compiled

pytestmark = pytest.mark.gpu

OPERATORS = torch.ops.fp8_dual_cast


def samples():
    x = on_gpu.matrix(130, 384)
    rotation = on_gpu.rotation(130, 64, 32)
    table, positions = rotation["cos_sin_cache"], rotation["position_ids"]
    for matrix in (x, on_gpu.matrix(130, 640)[:, 128:512], x.t().contiguous().t(), x[:1], x[:0]):
        count = len(matrix)
        yield OPERATORS.dual_cast.default, (matrix, False, None, None, 0, True)
        yield OPERATORS.dual_cast.default, (matrix, True, table, positions[:count], 64, count > 1)
        yield OPERATORS.row_cast.default, (matrix, False)
        yield OPERATORS.column_cast.default, (matrix, True)


def test_opcheck():
    for operator, args in samples():
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_fake_results_are_like_the_real_ones():
    """Shape, dtype, device, strides and offset, for many token counts."""
    for tokens in (0, 1, 2, 3, 4, 5, 127, 128, 129, 1000):
        for operator, args in (
            (OPERATORS.dual_cast, (False, None, None, 0, True)),
            (OPERATORS.row_cast, (False,)),
            (OPERATORS.column_cast, (False,)),
        ):
            assert_fake_like_real(operator, (on_gpu.matrix(tokens, 256), *args))


def step(x, cos_sin_cache, position_ids):
    """A producer that Inductor fuses, all three casts, and their views."""
    x = x * 2
    rotated = fp8_dual_cast(x, cos_sin_cache=cos_sin_cache, position_ids=position_ids, head_dim=128)
    return *rotated, *fp8_dual_cast(x, use_ue8m0=True), *per_token_cast(x), *per_token_cast_transposed(x)


def compile_and_compare(backend, token_counts):
    """Compare the compiled step with eager for each token count; how often it was compiled."""
    table = inputs.cos_sin_cache(301, 64).to(on_gpu.DEVICE)
    with compiled(step, backend) as (call, counter):
        for tokens in token_counts:
            x = on_gpu.matrix(tokens, 256)
            positions = torch.randint(301, (tokens,), device=on_gpu.DEVICE)
            expected = step(x, table, positions)
            for index, (got, want) in enumerate(zip(call(x, table, positions), expected, strict=True)):
                assert_same_bytes(got, want, f"{tokens} tokens, result {index}")
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    """No graph break, eager's bytes and strides, one recompilation over the token counts of a training run."""
    assert compile_and_compare(backend, [1024, *range(256, 256 + 19 * 128, 128)]) <= 2


@pytest.mark.timeout(150)
def test_compiled_for_any_token_count():
    """PyTorch keeps apart whether a view of the scales is contiguous: T a multiple of 4 or not, one group or more."""
    assert compile_and_compare("aot_eager", [130, *range(63, 63 + 19 * 77, 77), 128, 5]) <= 3


def test_compiled_without_tokens():
    assert compile_and_compare("aot_eager", [0, 0]) == 1


def test_new_token_counts_compile_nothing():
    """200 token counts, pitches and fresh tensors add no entry to the caches of both kernels."""
    from fp8_dual_cast.kernels.dual_cast import dual_cast_kernel
    from fp8_dual_cast.kernels.row_cast import row_cast_kernel

    kernels = (dual_cast_kernel, row_cast_kernel)

    def call(tokens, channels):
        x = on_gpu.matrix(tokens, channels + 128 * (tokens % 3))[:, :channels]
        options = on_gpu.rotation(tokens, 128, 64)
        fp8_dual_cast(x)
        fp8_dual_cast(x, inverse=tokens % 2 == 0, **options)
        per_token_cast(x)
        per_token_cast_transposed(x)

    def sizes():
        return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels]

    for tokens, channels in ((300, 256), (1, 128), (128, 384)):
        call(tokens, channels)
    before = sizes()
    assert all(count >= 1 for count in before)
    for tokens in range(1, 201):
        call(tokens * 7, 128 * (1 + tokens % 5))
    assert sizes() == before


def test_autocast_changes_nothing():
    x = on_gpu.matrix(130, 256)
    expected = fp8_dual_cast(x)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast(on_gpu.DEVICE.type, dtype=dtype):
            on_gpu.assert_dual(fp8_dual_cast(x), expected, "autocast")


@pytest.mark.parametrize("on_cpu", ["x", "cos_sin_cache", "position_ids"])
def test_mixed_devices(on_cpu):
    arguments = {"x": on_gpu.matrix(4, 256)} | on_gpu.rotation(4, 64, 32)
    arguments[on_cpu] = arguments[on_cpu].cpu()
    with pytest.raises(ValueError, match="device"):
        fp8_dual_cast(**arguments)


def test_another_architecture():
    """An error that names the device, not the definition in silence; the definition still where it is asked for."""
    x = on_gpu.matrix(130, 256)
    expected = fp8_dual_cast(x)
    with machines.capability(8, 0):
        for call in (fp8_dual_cast, per_token_cast, per_token_cast_transposed):
            with pytest.raises(KernelUnavailable, match=f"{call.__name__} requires SM90, found SM80"):
                call(x)
        with reference():
            on_gpu.assert_dual(fp8_dual_cast(x), expected, "definition")
    on_gpu.assert_dual(fp8_dual_cast(x), expected, "kernel")


def test_reference_runs_the_definition():
    """Inside `reference()` nothing is launched by this package; the bytes are the kernel's."""
    x = on_gpu.matrix(130, 256)
    options = on_gpu.rotation(130, 64, 32)
    expected = fp8_dual_cast(x, **options)
    with launches.none_allowed():
        with reference():
            on_gpu.assert_dual(fp8_dual_cast(x, **options), expected, "definition")
        with pytest.raises(AssertionError, match="was launched"):
            fp8_dual_cast(x, **options)


class CastGradient(torch.autograd.Function):
    """The identity, which keeps the casts of its input and, in its backward, of its gradient."""

    found = None

    @staticmethod
    def forward(ctx, x):
        CastGradient.found.append(fp8_dual_cast(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        CastGradient.found.append(fp8_dual_cast(gradient))
        return gradient


def test_inside_a_backward():
    """With a gradient of strides 0, as a sum gives it; x requires grad, the results do not."""
    CastGradient.found = []
    x = on_gpu.matrix(130, 256).requires_grad_()
    CastGradient.apply(x).sum().backward()
    of_x, of_gradient = CastGradient.found
    on_gpu.assert_dual(of_x, on_gpu.definition(x.detach()), "x")
    on_gpu.assert_dual(of_gradient, on_gpu.definition(torch.ones_like(x)), "gradient")
    assert torch.equal(x.grad, torch.ones_like(x))
    assert all(t.grad_fn is None and not t.requires_grad for t in (*of_x, *of_gradient))


def test_checkpoint_recomputes_the_same_bytes():
    CastGradient.found = []
    x = on_gpu.matrix(130, 256).requires_grad_()
    checkpoint(lambda y: CastGradient.apply(y * 3).square().sum(), x, use_reentrant=False).backward()
    first, again, _ = CastGradient.found
    on_gpu.assert_dual(again, first, "recomputed")
    on_gpu.assert_dual(first, on_gpu.definition(x.detach() * 3), "first")
