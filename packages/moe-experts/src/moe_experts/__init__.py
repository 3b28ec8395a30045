"""Expert MLPs of a mixture-of-experts layer for Hopper: grouped products with a clamped SwiGLU, and their gradients."""

from hopper_kernels import KernelSpec

from moe_experts.arguments import TOKEN_GROUP_ALIGNMENT, unsupported_shape_reason
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
    "OPS_NAMESPACE",
    "SPEC",
    "TOKEN_GROUP_ALIGNMENT",
    "__version__",
    "moe_experts",
    "moe_experts_backward",
    "moe_experts_backward_data",
    "moe_experts_forward",
    "moe_experts_weight_grad",
    "unsupported_shape_reason",
]
