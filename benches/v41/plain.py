"""The operations of a layer in plain PyTorch, as a trainer without kernels has them: in parts, so that they fit."""

from __future__ import annotations

import torch
from hopper_kernels import fp8
from torch import Tensor
from torch.nn import functional

from benches.peers import experts as expert_peers
from benches.peers import hyper_connection as connections
from benches.peers import index_topk as pickers

QUERIES = 256  # of the attention, whose rows are gathered together
PRODUCTS = 2**28  # of queries, heads and entries, that are formed together


def products(a: Tensor, b: Tensor) -> Tensor:
    """(B, M, K) times (B, K, N), bf16, in fp32."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())


def index_topk(*arguments: Tensor | int | bool | None) -> tuple[Tensor, Tensor]:
    """As `dsa_indexer_topk.dsv41_index_topk` for one document, picks and blocks in any order."""
    return pickers.unfused(pickers.Arguments(*arguments), fp8.per_row, _scores)()


def _scores(o: pickers.Operands, candidates: Tensor | None, block_size: int) -> Tensor:
    """A `benches.peers.index_topk.Scorer`."""
    keys = o.keys.bfloat16().t()[None]
    entry = torch.arange(keys.shape[2], device=keys.device)
    parts = []
    heads = o.queries.shape[1]
    size = max(1, PRODUCTS // (heads * keys.shape[2]))
    for first in range(0, len(o.queries), size):
        some = o.rows(slice(first, first + size))
        dots = products(some.queries.bfloat16().flatten(0, 1)[None], keys)[0].unflatten(0, (-1, heads))
        total = torch.bmm(some.weights[:, None], dots.relu_())[:, 0] * o.scales
        parts.append(total.masked_fill_(entry >= some.ke[:, None], pickers.UNREADABLE))
    scores = torch.cat(parts)
    return scores if candidates is None else pickers.gathered(scores, candidates, block_size)


def attention(q: Tensor, kv: Tensor, indices: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """out (S, H, D) bf16 and lse (S, H), natural, without the sinks: the forward of the sparse attention.

    q (S, H, D), kv (N, D) bf16; indices (S, K), -1 for none, of which each query has another; sinks (H,) fp32.
    """
    outs, sums = [], []
    for mine, listed in zip(q.split(QUERIES), indices.split(QUERIES), strict=True):
        rows = kv[listed.clamp_min(0).long()]
        scores = products(mine, rows.transpose(1, 2)).mul_(scale).masked_fill_((listed < 0)[:, None], -torch.inf)
        lse = scores.logsumexp(dim=2)
        p = torch.exp(scores - torch.logaddexp(lse, sinks)[..., None])
        outs.append(torch.bmm(p.bfloat16(), rows))
        sums.append(lse)
    return torch.cat(outs), torch.cat(sums)


def attention_backward(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    indices: Tensor,
    sinks: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dkv, dsinks, as `dsa_sparse_attn_bwd.sparse_attn_backward_flat`, of lists that are not empty."""
    dq, dkv = torch.empty_like(q), torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
    dsinks = torch.zeros_like(sinks)
    for first in range(0, len(q), QUERIES):
        part = slice(first, first + QUERIES)
        mine, g, listed = q[part], grad_out[part], indices[part]
        rows = kv[listed.clamp_min(0).long()]
        total = torch.logaddexp(lse[part], sinks)
        delta = (g.float() * out[part].float()).sum(dim=2)
        p = torch.exp(products(mine, rows.transpose(1, 2)).mul_(scale) - total[..., None])
        p.masked_fill_((listed < 0)[:, None], 0.0)
        ds = (p * (products(g, rows.transpose(1, 2)) - delta[..., None]) * scale).bfloat16()
        dq[part] = torch.bmm(ds, rows)
        of_slots = products(ds.transpose(1, 2), mine) + products(p.bfloat16().transpose(1, 2), g)
        dkv.index_add_(0, listed.clamp_min(0).long().flatten(), of_slots.flatten(0, 1))
        dsinks -= (torch.exp(sinks - total) * delta).sum(dim=0)
    return dq, dkv.bfloat16(), dsinks


def hyper_connection(
    x: Tensor, weight: Tensor, scale: Tensor, base: Tensor, pre_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """pre, post, comb, collapsed and the streams, as `mhc_projection.hyper_connection_streams` with V4.1's numbers."""
    return *connections.eager()(x, weight, scale, base, pre_mix), x


def experts(x: Tensor, gate_up: Tensor, down: Tensor, counts: Tensor, limit: float) -> Tensor:
    """As `moe_experts.moe_experts` with gate_up (E, 2I, H) packed, of rows that all belong to an expert."""
    gate, up = gate_up.chunk(2, dim=1)
    return expert_peers.grouped_mm(counts, limit, compiled=False)(x, gate, up, down)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, C), weight (N, C), bf16."""
    return functional.linear(x, weight)


def rotate(x: Tensor, table: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Turns pairs of neighbouring channels, the last ones of each head, by their position's angles, or back.

    x (T, H, D) bf16; table (tokens, R) fp32, R / 2 cosines then R / 2 sines; positions (T,).
    """
    rope = table.shape[1]
    cosine, sine = table[positions][:, None].chunk(2, dim=2)
    sine = -sine if inverse else sine
    kept, turned = x.split((x.shape[2] - rope, rope), dim=2)
    a, b = turned.float().unflatten(2, (rope // 2, 2)).unbind(3)
    turned = torch.stack((a * cosine - b * sine, a * sine + b * cosine), dim=3).flatten(2)
    return torch.cat((kept, turned.to(x.dtype)), dim=2)
