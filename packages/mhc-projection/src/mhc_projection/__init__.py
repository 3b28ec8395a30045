"""Gates of DeepSeek-V4.1's hyper-connections for Hopper: projection, Sinkhorn iterations, collapse."""

from hopper_kernels import KernelSpec

from mhc_projection.arguments import MAX_LOGITS, unsupported_shape_reason
from mhc_projection.ops import (
    hyper_connection,
    hyper_connection_streams,
    mhc_gates,
    mhc_projection,
    mhc_projection_streams,
)

__version__ = "0.1.0"

SPEC = KernelSpec(
    name="mhc_projection",
    module="mhc_projection",
    distribution="mhc-projection",
    description="gates of hyper-connections: projection, Sinkhorn iterations and collapse, with gradients",
    requires=("triton>=3.6,<3.10",),
    modules=("triton.experimental.gluon",),
    min_cuda=(12, 8),
)

__all__ = [
    "MAX_LOGITS",
    "SPEC",
    "__version__",
    "hyper_connection",
    "hyper_connection_streams",
    "mhc_gates",
    "mhc_projection",
    "mhc_projection_streams",
    "unsupported_shape_reason",
]
