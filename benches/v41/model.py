"""The decoder layers: hyper-connections around sparse attention and a mixture of experts.

Mathematics as published in `modeling_deepseek_v41.py` of PrimeIntellect-ai/prime-rl, without the n-gram embeddings
(layers 1 and 14), the token embedding and the vocabulary, and for one document. T are the tokens that this process has
queries for, N those of the document.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benches.v41 import plain
from benches.v41.config import Config, Role
from benches.v41.operations import Operations
from benches.v41.parallel import Alone, Parallel, Run

NEAR, FAR = "near", "far"  # the rotations of layers with a window alone, and of the others


@dataclass(frozen=True)
class Tokens:
    """The tokens of a document from `first` on that a process has queries for, and what their windows read.

    positions (T,) int64; window (T, W) int32, -1 before the document's start; tables of rotations (N, R) fp32.
    """

    total: int
    first: int
    positions: Tensor
    window: Tensor
    tables: dict[str, Tensor]

    @property
    def count(self) -> int:
        return len(self.positions)

    def readable(self, ratio: int) -> tuple[Tensor, Tensor]:
        """(T,) int32 each: the first entry that a query reads, and the end: entries that end at its token or before."""
        stop = ((self.positions + 1) // ratio).int()
        return torch.zeros_like(stop), stop


def make_tokens(config: Config, total: int, rank: int, ranks: int, device: torch.device) -> Tokens:
    """Those of context-parallel rank `rank`: the document in `ranks` equal parts."""
    count = total // ranks
    if count * ranks != total:
        raise ValueError(f"{total} tokens are not divisible among {ranks} ranks")
    positions = torch.arange(rank * count, (rank + 1) * count, device=device)
    window = positions[:, None] - torch.arange(config.window - 1, -1, -1, device=device)
    tables = {}
    for name, base in ((NEAR, config.rope_base), (FAR, config.rope_base_entries)):
        frequencies = base ** -(torch.arange(0, config.rope_dim, 2, device=device) / config.rope_dim)
        angles = torch.arange(total, device=device)[:, None] * frequencies
        tables[name] = torch.cat((angles.cos(), angles.sin()), dim=1)
    return Tokens(total, rank * count, positions, window.clamp_min(-1).int(), tables)


class Shared(NamedTuple):
    """What layers make for those behind them: rotated entries (E, D), index keys (E, D_i), picks (T, K), blocks."""

    entries: Tensor | None = None
    index_keys: Tensor | None = None
    picks: Tensor | None = None
    candidates: Tensor | None = None


@dataclass(frozen=True)
class Way:
    """How layers are computed: the operations, the processes, and what is done with choices."""

    use: Operations = field(default_factory=Operations)
    parallel: Parallel = field(default_factory=Alone)
    choices: Callable[[str, int, Tensor], Tensor] = lambda what, layer, found: found


class SparseAttention(torch.autograd.Function):
    """The forward in plain PyTorch (no kernel of this project does it), the backward by the chosen function."""

    @staticmethod
    def forward(ctx, q: Tensor, kv: Tensor, indices: Tensor, sinks: Tensor, scale: float, backward) -> Tensor:
        out, lse = plain.attention(q, kv, indices, sinks, scale)
        ctx.save_for_backward(q, kv, out, lse, indices, sinks)
        ctx.scale, ctx.call = scale, backward
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, kv, out, lse, indices, sinks = ctx.saved_tensors
        dq, dkv, dsinks = ctx.call(q, kv, out, grad.contiguous(), lse, indices, sinks, ctx.scale)
        return dq, dkv, None, dsinks, None, None


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """One to be filled by `reset`."""
    return nn.Parameter(torch.empty(shape, dtype=dtype))


class Norm(nn.Module):
    """RMSNorm with a scale."""

    def __init__(self, size: int, config: Config) -> None:
        super().__init__()
        self.scale = weight(size)
        self.eps = config.rms_eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.scale.shape, self.scale, self.eps)


class Compressor(nn.Module):
    """Entries of `ratio` tokens each: a projection, for two tokens their mean by a softmax gate of each channel."""

    def __init__(self, config: Config, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.project = weight(config.head_dim, config.hidden)
        self.gate = weight(config.head_dim, config.hidden) if ratio > 1 else None
        self.norm = Norm(config.head_dim, config)

    def forward(self, x: Tensor, parallel: Parallel) -> Tensor:
        """(T, C) of this process to (N / ratio, D) of all, not rotated."""
        if self.gate is None:
            return parallel.gather(self.norm(functional.linear(x, self.project)))
        values, gates = (
            parallel.gather(functional.linear(x, w)).float().unflatten(0, (-1, self.ratio))
            for w in (self.project, self.gate)
        )
        return self.norm((values * gates.softmax(dim=1)).sum(dim=1).to(x.dtype))


class Indexer(nn.Module):
    """Picks entries for each query. Frozen, as trainers have it: picks have no gradient."""

    def __init__(self, config: Config, role: Role) -> None:
        super().__init__()
        self.config, self.role = config, role
        self.q = weight(config.index_heads * config.index_head_dim, config.q_rank)
        self.weights = weight(config.index_heads, config.hidden)
        self.key = weight(config.index_head_dim, config.head_dim) if role.makes_entries else None
        self.norm = Norm(config.index_head_dim, config) if role.makes_entries else None
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, x: Tensor, compressed: Tensor, latent: Tensor | None, tokens: Tokens, shared: Shared, way: Way
    ) -> Shared:
        c, ratio, table = self.config, self.role.ratio, tokens.tables[FAR]
        keys = shared.index_keys
        if latent is not None:
            first = torch.arange(0, tokens.total, ratio, device=x.device)
            keys = plain.rotate(self.norm(functional.linear(latent, self.key))[:, None], table, first)[:, 0]
        q = functional.linear(compressed, self.q).unflatten(1, (c.index_heads, c.index_head_dim))
        q = plain.rotate(q, table, tokens.positions)
        binds = c.candidates_bind(tokens.total)
        emit = self.role.makes_candidates and binds
        picks, blocks = way.use.index_topk(
            q,
            keys,
            functional.linear(x, self.weights),
            *tokens.readable(ratio),
            c.index_topk,
            shared.candidates if self.role.has_candidates and binds else None,
            emit,
            len(keys),
            c.block,
            c.topk_blocks,
        )
        picks = way.choices("picks", self.role.layer, picks)
        blocks = way.choices("blocks", self.role.layer, blocks) if emit else shared.candidates
        return shared._replace(index_keys=keys, picks=picks, candidates=blocks)


class Attention(nn.Module):
    """64 heads over one latent key and value of each token and entry: the query's window, and the entries picked."""

    def __init__(self, config: Config, role: Role) -> None:
        super().__init__()
        self.config, self.role = config, role
        size = config.heads * config.head_dim
        self.q_down, self.q_norm = weight(config.q_rank, config.hidden), Norm(config.q_rank, config)
        self.q_up = weight(size, config.q_rank)
        self.kv, self.kv_norm = weight(config.head_dim, config.hidden), Norm(config.head_dim, config)
        self.out_down = weight(config.out_groups, config.out_rank, size // config.out_groups)
        self.out_up = weight(config.hidden, config.out_groups * config.out_rank)
        self.sinks = weight(config.heads, dtype=torch.float32)
        self.compressor = Compressor(config, role.ratio) if role.makes_entries else None
        self.indexer = Indexer(config, role) if role.makes_picks else None

    def forward(self, x: Tensor, tokens: Tokens, shared: Shared, way: Way) -> tuple[Tensor, Shared]:
        use, parallel = way.use, way.parallel
        c, table = self.config, tokens.tables[FAR if self.role.ratio else NEAR]
        kv = plain.rotate(self.kv_norm(functional.linear(x, self.kv))[:, None], table, tokens.positions)[:, 0]
        rows, indices = parallel.gather(kv), tokens.window
        compressed = self.q_norm(use.linear(x, self.q_down))
        q = use.rotated_linear(compressed, self.q_up, c.head_dim, table, tokens.positions)
        if self.role.ratio:
            latent = None
            if self.compressor is not None:
                latent = self.compressor(x, parallel)
                first = torch.arange(0, tokens.total, self.role.ratio, device=x.device)
                shared = shared._replace(entries=plain.rotate(latent[:, None], table, first)[:, 0])
            if self.indexer is not None:
                shared = self.indexer(x, compressed, latent, tokens, shared, way)
            picks = torch.where(shared.picks < 0, -1, shared.picks + tokens.total).int()
            rows, indices = torch.cat((rows, shared.entries)), torch.cat((indices, picks), dim=1)
        out = SparseAttention.apply(q, rows, indices, self.sinks, c.head_dim**-0.5, use.attention_backward)
        out = plain.rotate(out, table, tokens.positions, inverse=True)  # values are rotated keys
        groups = out.flatten(1).unflatten(1, (c.out_groups, -1))
        down = torch.bmm(groups.transpose(0, 1), self.out_down.transpose(1, 2)).transpose(0, 1).flatten(1)
        return use.linear(down, self.out_up), shared


class Moved(torch.autograd.Function):
    """x[place], of which x[order] is the inverse. Autograd would add in the backward instead of moving rows."""

    @staticmethod
    def forward(ctx, x: Tensor, place: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[place]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]], None, None


class Rows(torch.autograd.Function):
    """Each token `copies` times, sorted: x[order // copies], place being the inverse of order."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Tensor, place: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[ctx.saved_tensors[0]].unflatten(0, (-1, ctx.copies)).sum(dim=1), None, None, None


class Experts(nn.Module):
    """The router's best experts of each token, spread over the processes, and one that all tokens have."""

    def __init__(self, config: Config, role: Role, ranks: int) -> None:
        super().__init__()
        if config.experts % ranks:
            raise ValueError(f"{config.experts} experts are not divisible among {ranks} ranks")
        self.config, self.layer = config, role.layer
        self.router = weight(config.experts, config.hidden)
        local = config.experts // ranks
        self.gate_up, self.down = (
            weight(local, 2 * config.inner, config.hidden),
            weight(local, config.hidden, config.inner),
        )
        self.shared_gate_up = weight(2 * config.inner, config.hidden)
        self.shared_down = weight(config.hidden, config.inner)
        self.run: Run | None = None  # see `sharded`

    def by_operation(self, use: Operations, rows: Tensor, counts: Tensor) -> Tensor:
        return use.experts(rows, self.gate_up, self.down, counts, self.config.swiglu_limit)

    def forward(self, x: Tensor, way: Way) -> Tensor:
        c, use = self.config, way.use
        scores = functional.softplus(functional.linear(x, self.router).float()).sqrt()
        chosen = way.choices("experts", self.layer, scores.topk(c.active, dim=1).indices)
        best = scores.gather(1, chosen)
        share = c.route_scale * best / best.sum(dim=1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = chosen.flatten().bincount(minlength=c.experts)

        run = self.run or functools.partial(self.by_operation, use)
        results = way.parallel.exchange(Rows.apply(x, order, place, c.active), counts, run)
        results = Moved.apply(results, place, order).unflatten(0, (-1, c.active))
        gate, up = use.linear(x, self.shared_gate_up).chunk(2, dim=1)
        hidden = functional.silu(gate.clamp(max=c.swiglu_limit)) * up.clamp(-c.swiglu_limit, c.swiglu_limit)
        return fused(combine, share, results, use.linear(hidden, self.shared_down))


class HyperConnection(nn.Module):
    """The gates of a sublayer, from the streams that enter it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.project = weight(config.gates, config.streams * config.hidden, dtype=torch.float32)
        self.scale = weight(3, dtype=torch.float32)
        self.base = weight(config.gates, dtype=torch.float32)

    def forward(self, x: Tensor, pre_mix: Tensor, way: Way) -> tuple[Tensor, ...]:
        """pre, post, comb, the streams collapsed by pre_mix, and the streams."""
        return way.use.hyper_connection(x, self.project, self.scale, self.base, pre_mix)


class Layer(nn.Module):
    """Attention, then experts; each reads the streams collapsed by the gates of the sublayer before."""

    def __init__(self, config: Config, role: Role, ranks: int) -> None:
        super().__init__()
        self.attention_gates, self.experts_gates = HyperConnection(config), HyperConnection(config)
        self.attention_norm, self.experts_norm = Norm(config.hidden, config), Norm(config.hidden, config)
        self.attention, self.experts = Attention(config, role), Experts(config, role, ranks)

    def forward(
        self, x: Tensor, pre_mix: Tensor, *shared: Tensor | None, tokens: Tokens, way: Way
    ) -> tuple[Tensor | None, ...]:
        """Streams (T, S, C), pre_mix (T, S) and `Shared`, to the same for the next layer."""
        pre_mix, post, comb, collapsed, x = self.attention_gates(x, pre_mix, way)
        y, given = self.attention(self.attention_norm(collapsed), tokens, Shared(*shared), way)
        x = fused(spread, x, post, comb, y)
        pre_mix, post, comb, collapsed, x = self.experts_gates(x, pre_mix, way)
        x = fused(spread, x, post, comb, self.experts(self.experts_norm(collapsed), way))
        return (x, pre_mix, *given)


def spread(x: Tensor, post: Tensor, comb: Tensor, y: Tensor) -> Tensor:
    """The streams after a sublayer: its output y (T, C) by `post` (T, S), and the streams mixed by `comb` (T, S, S)."""
    mixed = (comb.to(x.dtype)[..., None].float() * x.float()[:, :, None]).sum(dim=1)
    return (post.to(x.dtype)[..., None].float() * y.float()[:, None] + mixed).to(x.dtype)


def combine(share: Tensor, results: Tensor, shared: Tensor) -> Tensor:
    """Results (T, A, C) of a token's experts by their shares (T, A), and that of the shared expert (T, C)."""
    return (share[..., None] * results).sum(dim=1).to(shared.dtype) + shared


def fused(function: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    """What no kernel here does, under `torch.compile` on a GPU, whatever the operations are."""
    return _compiled(function)(*operands) if operands[0].is_cuda else function(*operands)


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)


class Stack(nn.Module):
    """Layers in their order; with `checkpointed`, each keeps its inputs alone and is computed again in the backward."""

    def __init__(self, config: Config, way: Way | None = None, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.config, self.way, self.checkpointed = config, way or Way(), checkpointed
        ranks = self.way.parallel.expert_ranks
        self.layers = nn.ModuleList(Layer(config, role, ranks) for role in config.roles)
        self.norm = Norm(config.hidden, config)

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Streams (T, S, C) bf16 to the hidden state (T, C)."""
        pre_mix = torch.zeros(x.shape[:2], device=x.device)
        pre_mix[:, 0] = 1.0
        state: tuple[Tensor | None, ...] = (x, pre_mix, *Shared())
        for layer in self.layers:
            if self.checkpointed:
                state = checkpoint(layer, *state, use_reentrant=False, tokens=tokens, way=self.way)
            else:
                state = layer(*state, tokens=tokens, way=self.way)
        x, pre_mix = state[:2]
        return self.norm((pre_mix[:, :, None] * x.float()).sum(dim=1).to(x.dtype))


@torch.no_grad()
def reset(model: Stack, seed: int, expert_rank: int = 0) -> None:
    """Fills all parameters, the same for every number of processes: norms and scales with 1, sinks and biases with
    0, what remains with normal numbers that keep the size of what they are multiplied with."""
    device = next(model.parameters()).device
    generator = torch.Generator(device)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator.manual_seed(seed + number)
        if name.endswith("scale"):
            parameter.fill_(1.0)
        elif name.endswith(("sinks", "base")):
            parameter.zero_()
        elif name.endswith(("experts.gate_up", "experts.down")):
            for i, one in enumerate(parameter):
                generator.manual_seed(seed + (number << 20) + expert_rank * len(parameter) + i)
                one.normal_(std=one.shape[-1] ** -0.5, generator=generator)
        else:
            std = 0.02 if name.endswith("gates.project") else parameter.shape[-1] ** -0.5
            parameter.normal_(std=std, generator=generator)
