"""What `hopper-kernels check` runs: gradients of the public function against the definition in float64."""

import torch
from hopper_kernels import models
from hopper_kernels.selfcheck import Case, relative_error
from torch import Tensor

from dsa_sparse_attn_bwd import ops, reference
from dsa_sparse_attn_bwd.arguments import CHANNELS

SEED = 20267
# Storing a result in bf16 alone costs 1.7e-3; on a GPU, p and ds are rounded too.
_BOUNDS = {"dq": 3e-3, "dkv": 3e-3, "dsinks": 1e-4}
_FLASH = models.V41_FLASH
_CHUNK = 64  # queries


def cases(device: torch.device) -> list[Case]:
    """Toy lists on a CPU; on a GPU V4.1's heads and slots too, and other numbers of heads."""
    sizes = [(5, 9, 24, 16), (7, 70, 40, 32)]
    if device.type != "cpu":
        picked = _FLASH.window + _FLASH.index_topk
        flash = [(1024, picked, 1536, _FLASH.heads), (397, _FLASH.window, 397, _FLASH.heads)]
        sizes = [*flash, (133, 100, 300, 128), (133, 65, 300, 64), *sizes]
    return [_case(*size, deterministic, device) for size in sizes for deterministic in (False, True)]


def _case(queries: int, slots: int, rows: int, heads: int, deterministic: bool, device: torch.device) -> Case:
    scale = CHANNELS**-0.5

    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        grad_out, q = (torch.randn(1, queries, heads, CHANNELS, device=device).bfloat16() for _ in range(2))
        kv = torch.randn(1, rows, 1, CHANNELS, device=device).bfloat16()
        indices = torch.randint(0, rows, (queries, slots), dtype=torch.int32, device=device)
        indices[torch.rand(queries, slots, device=device) < 0.1] = -1
        indices[1::7] = rows  # no slot left
        sinks = torch.randn(heads, device=device)
        out, lse = forward(q[0], kv[0, :, 0], indices, sinks, scale)
        return grad_out, q, kv, out[None], lse[None], indices[None, :, None], sinks

    def run(*operands: Tensor) -> dict[str, Tensor]:
        out = operands[3].clone()
        tail = out[..., -_FLASH.rope_dim :].clone()
        out[..., -_FLASH.rope_dim :] = float("nan")  # as overwritten
        found = ops.dsa_sparse_attn_backward(*operands[:3], out, *operands[4:], scale, tail, deterministic)
        return dict(zip(_BOUNDS, found, strict=True))

    def expected(grad_out, q, kv, out, lse, indices, sinks) -> dict[str, Tensor]:
        flat = (grad_out[0], q[0], kv[0, :, 0], out[0], lse[0], indices[0, :, 0], sinks)
        dq, dkv, dsinks = reference.backward(*flat, scale, None)
        return {"dq": dq[None], "dkv": dkv[None, :, None], "dsinks": dsinks}

    order = ", deterministic" if deterministic else ""
    label = f"{queries} queries x {slots} slots of {rows} rows, {heads} heads{order}"
    return Case(label, make, run, expected, relative_error, _BOUNDS)


def forward(q: Tensor, kv: Tensor, indices: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Results of the attention: out (S, H, 512) bf16, lse (S, H) fp32, without the sinks, +inf without slots."""
    outs, sums = [], []
    for part, mine in zip(q.split(_CHUNK), indices.split(_CHUNK), strict=True):
        named = (mine >= 0) & (mine < len(kv))
        rows = kv[mine.clamp(0, len(kv) - 1).long()].float().masked_fill(~named[..., None], 0.0)
        scores = scale * torch.einsum("shc,skc->shk", part.float(), rows)
        scores = scores.masked_fill(~named[:, None], -torch.inf)
        lse = torch.logsumexp(scores, dim=2)
        p = torch.exp(scores - torch.logaddexp(lse, sinks)[..., None])
        outs.append(torch.einsum("shk,skc->shc", p, rows).bfloat16())
        sums.append(lse.masked_fill(~named.any(dim=1)[:, None], torch.inf))
    return torch.cat(outs), torch.cat(sums)
