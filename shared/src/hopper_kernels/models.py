"""Published dimensions of the model family, for tests, benches and precompilation. Data only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelWidth:
    """What the hyper-connection kernels need to know of a model."""

    name: str
    hidden: int
    """Channels of the residual stream, `hidden_size`."""
    hc: int
    """Parallel residual streams, `hc_mult`."""
    rms_eps: float
    """`rms_norm_eps`."""


@dataclass(frozen=True)
class ModelDimensions(ModelWidth):
    """What all kernels need to know of a model."""

    layers: int
    sinkhorn_iters: int
    """Iterations of the Sinkhorn normalisation of the stream mixing, `hc_sinkhorn_iters`."""
    hc_eps: float
    """Added to the gates and to every denominator of the Sinkhorn normalisation."""
    heads: int
    """Query heads; keys and values are one shared latent head."""
    head_dim: int
    rope_dim: int
    """Rotated channels, the last ones of each head, `qk_rope_head_dim`."""
    q_lora_rank: int
    index_heads: int
    index_head_dim: int
    index_topk: int
    """Compressed entries that the indexer picks for a query."""
    index_block_size: int
    """Compressed entries of a candidate block."""
    index_topk_blocks: int
    """Candidate blocks that the indexer keeps for a query."""
    window: int
    """Tokens of the sliding window, which attention reads besides the picked entries."""
    moe_intermediate: int
    """Inner size of a routed expert and of the shared one."""


V41_FLASH = ModelDimensions(
    name="DeepSeek-V4.1-Flash",
    hidden=5120,
    hc=4,
    rms_eps=1e-20,
    layers=40,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    heads=64,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=1280,
    index_heads=32,
    index_head_dim=128,
    index_topk=512,
    index_block_size=8,
    index_topk_blocks=2048,
    window=128,
    moe_intermediate=2304,
)
"""Source: `config.json` of deepseek-ai/DeepSeek-V4.1-Flash, and the same numbers in PrimeIntellect-ai/prime-rl,
`src/prime_rl/trainer/models/deepseek_v41/configuration_deepseek_v41.py`."""

V4_FLASH = ModelWidth(name="DeepSeek-V4-Flash", hidden=4096, hc=4, rms_eps=1e-6)
"""Source: PrimeIntellect-ai/prime-rl, `trainer/models/deepseek_v4`, and the shapes of DeepGEMM's tests."""

V4_PRO = ModelWidth(name="DeepSeek-V4-Pro", hidden=7168, hc=4, rms_eps=1e-6)
"""Source: as for `V4_FLASH`."""

FAMILY: tuple[ModelWidth, ...] = (V41_FLASH, V4_FLASH, V4_PRO)
