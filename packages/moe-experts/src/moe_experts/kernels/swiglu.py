"""The clamped SwiGLU and its backward (Gluon). ALL: Triton's name for extrema that keep NaN; see `tiles` for why."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _sigmoid(x):
    """1 / (1 + e^-x) within some units in the last place, for negative x as e^x / (1 + e^x), so that nothing overflows
    or is flushed to zero."""
    power: gl.constexpr = "ex2.approx.f32 $0, $1;"
    inverse: gl.constexpr = "rcp.approx.ftz.f32 $0, $1;"
    scaled = gl.abs(x) * -1.4426950408889634
    e = gl.inline_asm_elementwise(power, "=f,f", [scaled], dtype=gl.float32, is_pure=True, pack=1)
    part = gl.inline_asm_elementwise(inverse, "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1)
    return gl.where(x < 0.0, e * part, part)


@gluon.jit
def _clamped(gate, up, limit, ALL: gl.constexpr):
    """gate clamped from above, up on both sides; NaN stays."""
    gate = gl.minimum(gate, limit, propagate_nan=ALL)
    return gate, gl.maximum(gl.minimum(up, limit, propagate_nan=ALL), -limit, propagate_nan=ALL)


@gluon.jit
def swiglu(gate, up, limit, ALL: gl.constexpr):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), of fp32."""
    gate, up = _clamped(gate, up, limit, ALL)
    return gate * _sigmoid(gate) * up


@gluon.jit
def swiglu_backward(grad, gate, up, limit, ALL: gl.constexpr):
    """The gradients of gate and up from that of the SwiGLU, and the SwiGLU again. At a bound there is a gradient."""
    clamped_gate, clamped_up = _clamped(gate, up, limit, ALL)
    s = _sigmoid(clamped_gate)
    silu = clamped_gate * s
    slope = silu * (1.0 - s) + s
    grad_gate = gl.where(gate <= limit, grad * (clamped_up * slope), 0.0)
    grad_up = gl.where(gl.abs(up) <= limit, grad * silu, 0.0)
    return grad_gate, grad_up, silu * clamped_up
