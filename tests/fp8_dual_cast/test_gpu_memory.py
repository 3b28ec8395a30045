"""Strides of x on the GPU, and device memory: read in place or copied as documented, nothing else is allocated."""

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed

from tests.fp8_dual_cast import inputs, on_gpu
from tests.support import memory
from tests.support.compare import assert_same_bytes

pytestmark = pytest.mark.gpu

IN_PLACE = {
    *("contiguous", "aligned column slice", "every second row"),
    *("columns of a wide matrix", "singleton", "3-D"),
}
TOKENS, CHANNELS = 515, 1280


def size(tensors):
    return sum(t.untyped_storage().nbytes() for t in tensors)


def layouts():
    """Matrices by the name of their layout."""
    x = on_gpu.matrix(TOKENS, CHANNELS)
    found = {name: make(x) for name, make in inputs.STRIDES.items()}
    found["columns of a wide matrix"] = on_gpu.matrix(TOKENS, 4 * CHANNELS)[:, CHANNELS : 2 * CHANNELS]
    found["singleton"] = inputs.singleton(x)
    found["3-D"] = x.view(TOKENS, 10, 128)
    return found


@pytest.mark.parametrize("name", [*inputs.STRIDES, "columns of a wide matrix", "singleton", "3-D"])
def test_peak_memory(name):
    """Exactly the results, plus a copy of x where it cannot be read in place."""
    x = layouts()[name]
    copy = 0 if name in IN_PLACE else 2 * x.numel()
    for call in (fp8_dual_cast, per_token_cast, per_token_cast_transposed):
        results, peak = memory.peak_of(lambda call=call: call(x))
        assert peak == size(results) + copy, call.__name__
    options = on_gpu.rotation(len(x), 128, 64)
    results, peak = memory.peak_of(lambda: fp8_dual_cast(x, **options))
    assert peak == size(results) + copy


@pytest.mark.parametrize("name", [*inputs.STRIDES, "columns of a wide matrix", "singleton"])
def test_strides(name):
    x = layouts()[name]
    on_gpu.assert_dual(on_gpu.check_casts(x, pattern="nan"), fp8_dual_cast(x.clone().contiguous()), name)
    on_gpu.check_casts(x, **on_gpu.rotation(len(x), 128, 64))


@pytest.mark.parametrize("name", list(inputs.broadcasts()))
def test_strides_of_zero(name):
    source = inputs.broadcasts()[name]
    once = source[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in source.stride())]
    x = once.to(on_gpu.DEVICE).expand(source.shape)
    assert 0 in x.stride()
    on_gpu.check_casts(x, pattern="nan")


def test_gradient_of_a_sum():
    """Stride 0 on both axes, straight from autograd."""
    y = on_gpu.matrix(130, 256).requires_grad_()
    gradients = []
    y.register_hook(gradients.append)
    y.sum().backward()
    assert gradients[0].stride() == (0, 0)
    on_gpu.check_casts(gradients[0])


@pytest.mark.parametrize("strides", [(1, 128, 1), (7, 128, 1), (2**33, 128, 1)], ids=str)
def test_singleton_axes(strides):
    """The stride of an axis of length 1 means nothing, whatever it is."""
    x = on_gpu.matrix(1, 1280)
    expected = fp8_dual_cast(x)
    on_gpu.assert_dual(fp8_dual_cast(x.as_strided((1, 1280), (strides[0], 1))), expected, "2-D")
    on_gpu.assert_dual(fp8_dual_cast(x.as_strided((1, 10, 128), strides)), expected, "3-D")
    one_head = on_gpu.matrix(9, 128)
    wild = one_head.as_strided((9, 1, 128), (128, strides[0], 1))
    on_gpu.assert_dual(fp8_dual_cast(wild), fp8_dual_cast(one_head), "one head")


def test_memory_comes_back():
    """Nothing is kept: after 50 calls as much memory is allocated as before them."""
    x = on_gpu.matrix(TOKENS, CHANNELS)
    options = on_gpu.rotation(TOKENS, 128, 64)
    fp8_dual_cast(x, **options)
    before = memory.allocated()
    for _ in range(50):
        fp8_dual_cast(x, **options)
        fp8_dual_cast(x.t().contiguous().t())
    assert memory.allocated() == before


def test_results_share_no_memory_with_x():
    """Writing into every result leaves x as it was, and the other way round."""
    x = on_gpu.matrix(130, 256)
    before = x.clone()
    results = fp8_dual_cast(x)
    expected = [t.clone() for t in results]
    x.zero_()
    for got, want in zip(results, expected, strict=True):
        assert_same_bytes(got, want, "result", strides=False)
    x.copy_(before)
    for t in results:
        t.untyped_storage().fill_(255)
    assert torch.equal(x, before)
