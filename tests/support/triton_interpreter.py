"""Repairs Triton's interpreter (TRITON_INTERPRET=1, triton 3.6) for bf16 and fp8, rounding included.

As it comes, the interpreter keeps bf16 as raw 16-bit integers and computes with those, truncates fp32 to bf16,
rounds fp8 wrongly and does not saturate, rounds an fma twice, lets `maximum` return NaN where the GPU's drops it, and
fails on range() over a run-time value with numpy 2.4. `install()` puts that right. The variable must be set before
triton is imported, so interpreted kernels have a process of their own.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_RAW = {tl.bfloat16: torch.uint16, tl.float8e4nv: torch.uint8, tl.float8e5: torch.uint8}

_Handle = interpreter.TensorHandle


def install() -> None:
    """Patch the interpreter of this process, once."""
    builder = interpreter.InterpreterBuilder
    if hasattr(builder, "_without_repairs"):
        return
    builder._without_repairs = {name: getattr(builder, name) for name in ("cast_impl", "create_dot")}
    builder.get_bf16 = lambda self, value: _bf16_handle(np.array([value]))
    builder.cast_impl = _cast_impl
    builder.create_fp_to_fp = lambda self, source, to, rounding_mode: _convert(source, to)
    for name, count in {"binary_op": 2, "unary_op": 1, "ternary_op": 3}.items():
        setattr(builder, name, _in_fp32(getattr(builder, name), count))
    builder.create_fma = _in_fp32(_fma, 3)
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    builder.create_dot = _dot
    builder.create_masked_load = _with_bool_mask(builder.create_masked_load, 1)
    builder.create_masked_store = _with_bool_mask(builder.create_masked_store, 2)
    _patch_index()


def _values(handle: _Handle) -> torch.Tensor:
    """The numbers in a handle of a floating-point type."""
    raw = torch.from_numpy(np.ascontiguousarray(handle.data))
    return raw if raw.is_floating_point() else raw.view(_TORCH[handle.dtype.scalar])


def _handle(values: torch.Tensor, dtype) -> _Handle:
    return _Handle((values.view(_RAW[dtype]) if dtype in _RAW else values).numpy(), dtype)


def _bf16_handle(values) -> _Handle:
    return _handle(torch.from_numpy(np.ascontiguousarray(values, np.float32)).bfloat16(), tl.bfloat16)


def _is_bf16(handle: _Handle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widened(handle: _Handle) -> _Handle:
    return _Handle(_values(handle).float().numpy(), tl.float32) if _is_bf16(handle) else handle


def _convert(source: _Handle, to) -> _Handle:
    """Round to nearest even; to fp8 with saturation, as the GPU's conversion does."""
    values, dtype = _values(source), to.scalar
    if dtype in _LARGEST:
        values = values.float().clamp(-_LARGEST[dtype], _LARGEST[dtype])
    return _handle(values.to(_TORCH[dtype]), dtype)


def _cast_impl(self, source: _Handle, to) -> _Handle:
    if source.dtype.scalar in _TORCH and to.scalar in _TORCH:
        return _convert(source, to)
    if to.scalar == tl.bfloat16:
        return _bf16_handle(source.data)
    return self._without_repairs["cast_impl"](self, _widened(source), to)


def _in_fp32(method, count: int):
    """`method` with its first `count` operands widened from bf16, and the result narrowed again."""

    def repaired(self, *args):
        operands, rest = args[:count], args[count:]
        if not any(map(_is_bf16, operands)):
            return method(self, *args)
        out = method(self, *map(_widened, operands), *rest)
        is_number = out.data.dtype != bool and out.dtype.scalar == tl.float32
        return _bf16_handle(out.data) if is_number else out

    return repaired


def _fma(self, a: _Handle, b: _Handle, c: _Handle) -> _Handle:
    """a * b + c, rounded once: fp32 products are exact in float64, and their sum is rounded to odd before to fp32."""
    if a.dtype.scalar != tl.float32:
        return _Handle(a.data * b.data + c.data, c.dtype.scalar)
    with np.errstate(invalid="ignore", over="ignore"):
        product, addend = np.multiply(a.data, b.data, dtype=np.float64), np.asarray(c.data, np.float64)
        total = product + addend
        other = total - product
        rest = (product - (total - other)) + (addend - other)
        inexact = (rest != 0) & np.isfinite(total) & (total.view(np.int64) % 2 == 0)
        odd = np.where(inexact, np.nextafter(total, np.where(rest > 0, np.inf, -np.inf)), total)
        return _Handle(odd.astype(np.float32), tl.float32)


def _dot(self, a: _Handle, b: _Handle, c: _Handle, *rest) -> _Handle:
    return self._without_repairs["create_dot"](self, _widened(a), _widened(b), c, *rest)


def _with_bool_mask(method, place: int):
    """`method` with the mask, at that place, in bool: comparisons of integers give int32, which Triton 3.9 refuses."""

    def repaired(self, *args):
        mask = args[place]
        return method(self, *args[:place], _Handle(mask.data.astype(bool), tl.int1), *args[place + 1 :])

    return repaired


def _patch_index() -> None:
    """numpy 2.4 no longer makes an int of an array of one element, which range() needs."""
    patch = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
