"""Expert MLPs of a mixture-of-experts layer for Hopper: grouped products with a clamped SwiGLU, and their gradients."""

from hopper_kernels import KernelSpec

from moe_experts.arguments import TOKEN_GROUP_ALIGNMENT, unsupported_shape_reason
from moe_experts.fp8.cache import FP8WeightCache
from moe_experts.fp8.layout import FP8_GROUP, padded_rows
from moe_experts.fp8.ops import (
    fp8_unavailable_reason,
    moe_experts_fp8_backward,
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
)
from moe_experts.operators import OPS_NAMESPACE
from moe_experts.ops import (
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
)

__version__ = "0.1.0"

SPEC = KernelSpec(
    name="moe_experts",
    module="moe_experts",
    distribution="moe-experts",
    description="expert MLPs of one rank: grouped products with a clamped SwiGLU, with gradients",
    requires=("triton>=3.6,<3.10",),
    modules=("triton.experimental.gluon",),
    min_cuda=(12, 8),
)

__all__ = [
    "FP8_GROUP",
    "OPS_NAMESPACE",
    "SPEC",
    "TOKEN_GROUP_ALIGNMENT",
    "FP8WeightCache",
    "__version__",
    "fp8_unavailable_reason",
    "moe_experts",
    "moe_experts_backward",
    "moe_experts_backward_data",
    "moe_experts_forward",
    "moe_experts_fp8_backward",
    "moe_experts_fp8_backward_accumulate",
    "moe_experts_fp8_backward_data",
    "moe_experts_fp8_forward_quantized",
    "moe_experts_fp8_quantize_weights",
    "moe_experts_fp8_weight_grad_accumulate",
    "moe_experts_weight_grad",
    "padded_rows",
    "unsupported_shape_reason",
]
