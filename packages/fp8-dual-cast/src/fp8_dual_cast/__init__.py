"""One-pass row and transposed FP8 (e4m3) block cast of a bf16 matrix for Hopper, with optional inverse RoPE."""

from hopper_kernels import KernelSpec

from fp8_dual_cast.ops import (
    DualCast,
    fp8_dual_cast,
    per_token_cast,
    per_token_cast_transposed,
    unsupported_shape_reason,
)

__version__ = "0.1.0"

SPEC = KernelSpec(
    name="fp8_dual_cast",
    module="fp8_dual_cast",
    distribution="fp8-dual-cast",
    description="row and transposed FP8 block cast in one pass, with optional inverse RoPE",
    requires=("triton>=3.6,<3.10",),
    modules=("triton.experimental.gluon",),
    min_cuda=(12, 8),
)

__all__ = [
    "SPEC",
    "DualCast",
    "__version__",
    "fp8_dual_cast",
    "per_token_cast",
    "per_token_cast_transposed",
    "unsupported_shape_reason",
]
