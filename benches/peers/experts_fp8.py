"""Today's way to run the experts' MLPs in FP8: DeepGEMM's grouped products, and casts in plain PyTorch between them.

The host knows the sizes of the groups. Rows are packed so that each expert's begin at a multiple of 128, and unpacked
after. A quantised operand is its codes (e4m3fn) and its scales (fp32), as DeepGEMM 0.1.5 reads them on SM90:
    rows     (P, C), (C / 128, P), of the P packed rows
    columns  (P C,), (P / 128, C); of each expert (C, its packed rows), one after the other
    blocks   (E, R, C), (E, R / 128, C / 128)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benches.moe_fp8_stages import Inputs

BLOCK, MAX = 128, 448.0
ROW_FLOOR, BLOCK_FLOOR = 1e-10, 1e-4  # of the largest magnitude that a scale is made of
COLUMN_RECIPE = (1, 1, BLOCK)  # numbers that share a scale: rows of a, rows of b, terms
CODES = torch.float8_e4m3fn

Quantised = tuple[Tensor, Tensor]
"""Codes and their scales."""


@dataclass(frozen=True)
class Packing:
    """Where the experts' rows are when packed.

    sizes: rows of each expert, packed; lengths (E,): the same, int32; own (M,): the place of each row; source (P,): the
    row at each place, 0 where there is none; free: the places without a row; experts (P,): each place's, int32.
    """

    sizes: list[int]
    lengths: Tensor
    own: Tensor
    source: Tensor
    free: Tensor
    experts: Tensor

    @classmethod
    def of(cls, counts: Tensor) -> Packing:
        """For groups of these sizes (E,), behind which there are no rows. Waits for the device."""
        counts = counts.long()
        lengths = -(-counts // BLOCK) * BLOCK
        total, rows = int(lengths.sum()), int(counts.sum())
        shift = (lengths - counts).cumsum(0) - (lengths - counts)
        own = torch.arange(rows, device=counts.device) + shift.repeat_interleave(counts)
        source = own.new_zeros(total)
        source[own] = torch.arange(rows, device=counts.device)
        taken = torch.zeros(total, dtype=torch.bool, device=counts.device)
        taken[own] = True
        experts = torch.arange(len(counts), dtype=torch.int32, device=counts.device).repeat_interleave(lengths)
        return cls(lengths.tolist(), lengths.int(), own, source, (~taken).nonzero()[:, 0], experts)

    def pack(self, rows: Tensor) -> Tensor:
        """(M, C) to (P, C), with zeros at the free places."""
        return rows.index_select(0, self.source).index_fill_(0, self.free, 0.0)

    def unpack(self, packed: Tensor) -> Tensor:
        """(P, C) to (M, C)."""
        return packed.index_select(0, self.own)


def multiply(a: Quantised, b: Quantised, where: Packing, out: Tensor) -> Tensor:
    """out (P, R) bf16 = a b^T, of rows a (P, C) with their expert's blocks b (E, R, C)."""
    import deep_gemm

    deep_gemm.m_grouped_fp8_gemm_nt_contiguous((a[0], a[1].t()), b, out, where.experts)
    return out


def add_sums(a: Quantised, b: Quantised, where: Packing, out: Tensor) -> Tensor:
    """a^T b over each expert's rows, of columns a (R channels) and b (C channels), added to out (E, R, C) fp32."""
    import deep_gemm

    scaled = (a[0], a[1].t()), (b[0], b[1].t())
    deep_gemm.k_grouped_fp8_gemm_nt_contiguous(*scaled, out, where.sizes, where.lengths, c=out, recipe=COLUMN_RECIPE)
    return out


class Casts(NamedTuple):
    """The passes between the products.

    rows(t (P, C)); blocks(*weights), of one weight or of several one above the other, and turned_blocks, of the
    transposes, side by side; swiglu(gate_up, limit) and swiglu_backward(dh, gate_up, limit), which gives the gradients
    of gate and up side by side and the SwiGLU; all in bf16. columns_into casts the blocks of one expert.
    """

    rows: Callable[..., Quantised]
    columns_into: Callable[..., None]
    blocks: Callable[..., Quantised]
    turned_blocks: Callable[..., Quantised]
    swiglu: Callable[..., Tensor]
    swiglu_backward: Callable[..., tuple[Tensor, Tensor]]

    def columns(self, t: Tensor, where: Packing) -> Quantised:
        """t (P, C) bf16 along its rows, one expert after the other."""
        channels = t.shape[1]
        codes = torch.empty(t.numel(), dtype=CODES, device=t.device)
        scales = torch.empty(len(t) // BLOCK, channels, dtype=torch.float32, device=t.device)
        blocks, first = t.view(-1, BLOCK, channels), 0
        for size in where.sizes:
            end = first + size // BLOCK
            if size:
                part = codes[first * BLOCK * channels : end * BLOCK * channels].view(channels, -1, BLOCK)
                operands = {blocks[first:end]: 0, part: 1, scales[first:end]: 0}
                for operand, varying in operands.items():  # so that one compilation serves experts of all sizes
                    torch._dynamo.maybe_mark_dynamic(operand, varying)
                    torch._dynamo.mark_static(operand, [d for d in range(operand.ndim) if d != varying])
                self.columns_into(*operands)
            first = end
        return codes, scales


def casts(compiled: bool) -> Casts:
    """Freshly compiled, or as they are. Inductor's division is not IEEE's: bytes are close to the definition's."""
    if not compiled:
        return Casts(_rows, _columns_into, _blocks, _turned_blocks, _swiglu, _swiglu_backward)
    torch._dynamo.reset()  # otherwise the shapes of the earlier cases count against the recompile limit
    fixed = functools.partial(torch.compile, dynamic=False, fullgraph=True)
    columns_into = torch.compile(_columns_into, fullgraph=True)
    weights = fixed(_blocks), fixed(_turned_blocks)
    return Casts(fixed(_rows), columns_into, *weights, fixed(_swiglu), fixed(_swiglu_backward))


class Step(NamedTuple):
    """Forward and backward of the MLPs, in bf16 outside. Weights are quantised by each."""

    where: Packing
    casts: Casts
    limit: float

    def forward(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """out (M, H), and what the backward needs: x and gate_up, packed."""
        cast, x = self.casts, self.where.pack(x)
        gate_up = self._product(cast.rows(x), cast.blocks(gate, up))
        out = self._product(cast.rows(cast.swiglu(gate_up, self.limit)), cast.blocks(down))
        return self.where.unpack(out), (x, gate_up)

    def backward(
        self, dout: Tensor, kept: tuple[Tensor, Tensor], gate: Tensor, up: Tensor, down: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of x, gate, up and down."""
        cast, where, inner = self.casts, self.where, gate.shape[1]
        x, gate_up = kept
        dout = where.pack(dout)
        dh = self._product(cast.rows(dout), cast.turned_blocks(down))
        grads, h = cast.swiglu_backward(dh, gate_up, self.limit)
        dx = where.unpack(self._product(cast.rows(grads), cast.turned_blocks(gate, up)))
        dw2 = self._sums(dout, h).bfloat16()
        dw13 = self._sums(grads, x)
        return dx, dw13[:, :inner].bfloat16(), dw13[:, inner:].bfloat16(), dw2

    def _product(self, a: Quantised, b: Quantised) -> Tensor:
        out = torch.empty(len(a[0]), b[0].shape[1], dtype=torch.bfloat16, device=a[0].device)
        return multiply(a, b, self.where, out)

    def _sums(self, a: Tensor, b: Tensor) -> Tensor:
        out = torch.zeros(len(self.where.sizes), a.shape[1], b.shape[1], dtype=torch.float32, device=a.device)
        return add_sums(self.casts.columns(a, self.where), self.casts.columns(b, self.where), self.where, out)


def product_alone(name: str, s: Inputs) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """A product of a step, of operands that are brought into DeepGEMM's layouts before, and where the experts' rows are
    in it; or a weight gradient, which is added to fp32, and None."""
    if name in s.sums_of_rows:
        a, b = (packed("in panels", pair, s.where) for pair in s.sums_of_rows[name])
        shape = len(s.counts), a[1].shape[1], b[1].shape[1]
        out = torch.zeros(shape, dtype=torch.float32, device=s.x.device)
        return lambda: (add_sums(a, b, s.where, out), None)
    rows, b = s.products_of_rows[name]
    a = packed("in rows", rows, s.where)
    out = torch.empty(len(a[0]), b[0].shape[1], dtype=torch.bfloat16, device=s.x.device)
    return lambda: (multiply(a, b, s.where, out), s.where.own)


def pass_alone(name: str, s: Inputs, limit: float, compiled: bool) -> Callable[[], dict[str, Quantised]]:
    """A pass of a step, of rows that were packed before. "In panels" are DeepGEMM's columns here."""
    cast, where = casts(compiled), s.where
    if name == "quantize_weights":
        gate, up, down = (t.detach() for t in s.leaves[1:])
        return lambda: {
            "w13": cast.blocks(gate, up),
            "w2": cast.blocks(down),
            "w13_t": cast.turned_blocks(gate, up),
            "w2_t": cast.turned_blocks(down),
        }
    if name == "swiglu":
        gate_up = s.gate_up[: len(where.source)]
        return lambda: {"h in rows": cast.rows(cast.swiglu(gate_up, limit))}
    if name == "swiglu_backward":
        grad_h, gate_up = (t[: len(where.source)] for t in (s.grad_h, s.gate_up))

        def backward() -> dict[str, Quantised]:
            dgu, h = cast.swiglu_backward(grad_h, gate_up, limit)
            found = {"dgu in rows": cast.rows(dgu), "dgu in panels": cast.columns(dgu, where)}
            return {**found, "h in panels": cast.columns(h, where)}

        return backward
    key, source = ("x", s.x.detach()) if name == "quantize_x" else ("dout", s.dout)
    rows = where.pack(source)
    return lambda: {f"{key} in rows": cast.rows(rows), f"{key} in panels": cast.columns(rows, where)}


def packed(name: str, operand: Quantised, where: Packing) -> Quantised:
    """An operand of moe_experts in DeepGEMM's layout: another one if the name ends with "in rows" or "in panels"."""
    if name.endswith("in rows"):
        codes, scales = operand
        return codes[: len(where.source)], scales[:, : len(where.source)].contiguous()
    if name.endswith("in panels"):
        blocks = [size // BLOCK for size in where.sizes]
        codes, scales = (t[: sum(blocks)] for t in operand)
        return torch.cat([part.transpose(0, 1).flatten() for part in codes.split(blocks)]), scales.contiguous()
    return operand


def _rows(t: Tensor) -> Quantised:
    groups = t.float().view(len(t), -1, BLOCK)
    scales = _scale(groups.abs().amax(-1), ROW_FLOOR)
    return _quantised(groups / scales.unsqueeze(-1)).view(t.shape), scales.t().contiguous()


def _columns_into(blocks: Tensor, codes: Tensor, scales: Tensor) -> None:
    """blocks (n, 128, C) to codes (C, n, 128) and scales (n, C)."""
    found = _scale(blocks.float().abs().amax(1), ROW_FLOOR)
    scales.copy_(found)
    codes.copy_(_quantised(blocks.float() / found.unsqueeze(1)).permute(2, 0, 1))


def _blocks(*weights: Tensor) -> Quantised:
    codes, scales = zip(*(_of_blocks(w) for w in weights), strict=True)
    return torch.cat(codes, dim=1), torch.cat(scales, dim=1)


def _turned_blocks(*weights: Tensor) -> Quantised:
    codes, scales = zip(*(_of_blocks(w.mT) for w in weights), strict=True)
    return torch.cat(codes, dim=2), torch.cat(scales, dim=2)


def _of_blocks(w: Tensor) -> Quantised:
    blocks = w.float().unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = _scale(blocks.abs().amax((2, 4)), BLOCK_FLOOR)
    codes = _quantised(blocks / scales[:, :, None, :, None]).flatten(3, 4).flatten(1, 2)
    return codes.contiguous(), scales.contiguous()


def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)).bfloat16()


def _swiglu_backward(dh: Tensor, gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.float().chunk(2, dim=1)
    g, u, dh = gate.clamp(max=limit), up.clamp(-limit, limit), dh.float()
    s = torch.sigmoid(g)
    grad_gate = torch.where(gate <= limit, dh * u * s * (1 + g * (1 - s)), 0.0)
    grad_up = torch.where(up.abs() <= limit, dh * g * s, 0.0)
    return torch.cat((grad_gate, grad_up), dim=1).bfloat16(), (g * s * u).bfloat16()


def _scale(amax: Tensor, floor: float) -> Tensor:
    return amax.clamp(min=floor) / MAX


def _quantised(quotient: Tensor) -> Tensor:
    return quotient.clamp(-MAX, MAX).to(CODES)
