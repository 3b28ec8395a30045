"""The backward of DeepSeek-V4.1's sparse attention for Hopper: gradients of queries, latent rows and sinks."""

from hopper_kernels import KernelSpec

from dsa_sparse_attn_bwd.arguments import unsupported_shape_reason
from dsa_sparse_attn_bwd.ops import dsa_sparse_attn_backward, sparse_attn_backward_flat

__version__ = "0.1.0"

SPEC = KernelSpec(
    name="dsa_sparse_attn_bwd",
    module="dsa_sparse_attn_bwd",
    distribution="dsa-sparse-attn-bwd",
    description="gradients of sparse attention: queries, shared latent rows and sinks",
    requires=("triton>=3.6,<3.10",),
    modules=("triton.experimental.gluon",),
    min_cuda=(12, 8),
)

__all__ = [
    "SPEC",
    "__version__",
    "dsa_sparse_attn_backward",
    "sparse_attn_backward_flat",
    "unsupported_shape_reason",
]
