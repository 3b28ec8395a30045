"""The Lightning Indexer of DeepSeek-V4.1 for Hopper: FP8 scores, the best entries of each query, candidate blocks."""

from hopper_kernels import KernelSpec

from dsa_indexer_topk.arguments import MAX_TOPK, unsupported_shape_reason
from dsa_indexer_topk.ops import dsv41_index_topk

__version__ = "0.1.0"

SPEC = KernelSpec(
    name="dsa_indexer_topk",
    module="dsa_indexer_topk",
    distribution="dsa-indexer-topk",
    description="indexer scores in FP8, the best entries of each query, and candidate blocks for later layers",
    requires=("triton>=3.6,<3.10",),
    modules=("triton.experimental.gluon",),
    min_cuda=(12, 8),
)

__all__ = [
    "MAX_TOPK",
    "SPEC",
    "__version__",
    "dsv41_index_topk",
    "unsupported_shape_reason",
]
