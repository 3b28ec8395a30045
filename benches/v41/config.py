"""Sizes of the model, and what each of its layers does in the published schedule."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hopper_kernels.models import V41_FLASH

# Published layers (`config.json` of deepseek-ai/DeepSeek-V4.1-Flash): 0 and 1 have a window alone, 2 to 19 read entries
# of two tokens each, 20 to 39 entries of one.
WINDOW_LAYERS, PAIR_LAYERS, LAYERS = 2, 20, 40
ENTRY_SOURCES = (2, 8, 14, 20)  # compress tokens to entries, which the layers behind them share
PICK_SOURCES = (2, 8, 14, 20, 24, 28, 32, 36)  # have an indexer, whose picks the layers behind them share
CANDIDATE_SOURCE = 20  # picks blocks too, to which later indexers keep


@dataclass(frozen=True)
class Role:
    """What a layer's attention does: `ratio` tokens an entry (0: a window alone), what it makes for later layers, and
    whether it keeps to the candidates of an earlier one."""

    layer: int
    ratio: int
    makes_entries: bool
    makes_picks: bool
    makes_candidates: bool
    has_candidates: bool

    @property
    def label(self) -> str:
        made = {"entries": self.makes_entries, "picks": self.makes_picks, "candidates": self.makes_candidates}
        parts = [f"layer {self.layer}", f"ratio {self.ratio}" if self.ratio else "window alone"]
        return ", ".join([*parts, *(f"makes {name}" for name, makes in made.items() if makes)])


def role(layer: int) -> Role:
    """Of a published layer."""
    if not 0 <= layer < LAYERS:
        raise ValueError(f"layer must be 0 to {LAYERS - 1}, got {layer}")
    return Role(
        layer=layer,
        ratio=0 if layer < WINDOW_LAYERS else 2 if layer < PAIR_LAYERS else 1,
        makes_entries=layer in ENTRY_SOURCES,
        makes_picks=layer in PICK_SOURCES,
        makes_candidates=layer == CANDIDATE_SOURCE,
        has_candidates=layer > CANDIDATE_SOURCE and layer in PICK_SOURCES,
    )


# A window alone; entries of two tokens, made and then shared; entries of one with candidates, made, used and shared.
STACK = (0, 2, 3, 20, 24, 25)
SINGLE = (20,)


@dataclass(frozen=True)
class Config:
    """Sizes. experts: those of this expert-parallel rank or group, among which the router chooses."""

    layers: tuple[int, ...] = STACK
    hidden: int = V41_FLASH.hidden
    streams: int = V41_FLASH.hc
    sinkhorn_iters: int = V41_FLASH.sinkhorn_iters
    rms_eps: float = V41_FLASH.rms_eps
    hc_eps: float = V41_FLASH.hc_eps
    heads: int = V41_FLASH.heads
    head_dim: int = V41_FLASH.head_dim
    rope_dim: int = V41_FLASH.rope_dim
    q_rank: int = V41_FLASH.q_lora_rank
    out_groups: int = 8  # `o_groups`
    out_rank: int = 1024  # `o_lora_rank`, of each group
    window: int = V41_FLASH.window
    index_heads: int = V41_FLASH.index_heads
    index_head_dim: int = V41_FLASH.index_head_dim
    index_topk: int = V41_FLASH.index_topk
    block: int = V41_FLASH.index_block_size
    topk_blocks: int = V41_FLASH.index_topk_blocks
    experts: int = 24  # of 384, so 16 expert-parallel ranks
    active: int = 6  # experts of a token
    inner: int = V41_FLASH.moe_intermediate
    route_scale: float = 1.5
    swiglu_limit: float = 10.0
    rope_base: float = 10_000.0  # of the window's layers
    rope_base_entries: float = 160_000.0  # of the others, without YaRN's scaling of the frequencies

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role(layer) for layer in self.layers)

    @property
    def gates(self) -> int:
        """Logits of a hyper-connection."""
        return (2 + self.streams) * self.streams

    def candidates_bind(self, entries: int) -> bool:
        """Whether a document of so many entries of one token has more than the candidates can hold."""
        return entries > self.topk_blocks * self.block


FLASH = Config()
TOY = dataclasses.replace(
    FLASH,
    hidden=256,
    heads=16,
    q_rank=128,
    out_groups=4,
    out_rank=32,
    window=8,
    index_heads=16,
    index_head_dim=64,
    index_topk=16,
    topk_blocks=4,
    experts=4,
    active=2,
    inner=128,
)
"""For a CPU: the sizes that no kernel is bound to are smaller."""
