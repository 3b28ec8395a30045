"""The same mathematics written otherwise: in PyTorch for autograd, and in Python, number by number."""

import math
import struct

import torch
from torch import Tensor

from tests.moe_experts.inputs import Operands


def experts(t: Operands) -> Tensor:
    """The MLPs in the dtype of the operands, whose gradients are autograd's."""
    limit, outs = t.swiglu_limit, []
    gate_up = t.gate_proj if t.up_proj is None else torch.cat((t.gate_proj, t.up_proj), dim=1)
    *groups, tail = t.x.split([*t.num_tokens_per_expert.tolist(), len(t.x) - t.owned])
    for rows, weight, down in zip(groups, gate_up, t.down_proj, strict=True):
        gate, up = torch.nn.functional.linear(rows, weight).chunk(2, dim=-1)
        h = torch.nn.functional.silu(at_most(gate, limit)) * -at_most(-at_most(up, limit), limit)
        outs.append(torch.nn.functional.linear(h, down))
    return torch.cat([*outs, torch.zeros_like(tail)])


def at_most(value: Tensor, limit: float) -> Tensor:
    """torch.clamp(value, max=limit) with a gradient at the bound itself, which torch.clamp has none at from 2.14 on."""
    return value.masked_fill(value > limit, limit)


def gradients(t: Operands, dout: Tensor) -> list[Tensor]:
    """Result and gradients by autograd, of everything that can have one."""
    leaves = t.requires_grad()
    out = experts(leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves.leaves, dout.to(out.dtype))]


def fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def bf16(value: float) -> float:
    """To fp32 and to bf16, nearest even, on the bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


class Rounded:
    """One expert, number by number: every sum is exact, and rounded where the definition says so.

    `also` names a further rounding that the definition must not have: "silu" before it is multiplied, or "dx" of the
    two products before they are added.
    """

    def __init__(self, x, gate, up, down, limit, also=None):
        self.x, self.w_gate, self.w_up, self.w_down = (t.tolist() for t in (x, gate, up, down))
        self.limit, self.also = limit, also
        self.hidden, self.inner = range(x.shape[1]), range(gate.shape[0])
        self.g = [[bf16(self._sum(row, w)) for w in self.w_gate] for row in self.x]
        self.u = [[bf16(self._sum(row, w)) for w in self.w_up] for row in self.x]
        self.h = [[self._swiglu(g, u) for g, u in zip(*pair, strict=True)] for pair in zip(self.g, self.u, strict=True)]
        self.out = [[bf16(self._sum(row, w)) for w in self.w_down] for row in self.h]

    def backward(self, dout):
        dout = dout.tolist()
        down = list(zip(*self.w_down, strict=True))
        dh = [[bf16(self._sum(row, column)) for column in down] for row in dout]
        dg, du = [], []
        for row in zip(dh, self.g, self.u, strict=True):
            pairs = [self._swiglu_backward(*values) for values in zip(*row, strict=True)]
            dg.append([p[0] for p in pairs])
            du.append([p[1] for p in pairs])
        gate, up = (list(zip(*w, strict=True)) for w in (self.w_gate, self.w_up))
        self.dgate, self.dup = dg, du
        self.dx = [[self._dx(*pair, gate[c], up[c]) for c in self.hidden] for pair in zip(dg, du, strict=True)]
        self.dw1, self.dw3 = (self._outer(d, self.x) for d in (dg, du))
        self.dw2 = self._outer(dout, self.h)

    def _dx(self, dg, du, gate, up):
        if self.also == "dx":
            return bf16(bf16(self._sum(dg, gate)) + bf16(self._sum(du, up)))
        return bf16(self._sum([*dg, *du], [*gate, *up]))

    def _sum(self, left, right):
        return math.fsum(a * b for a, b in zip(left, right, strict=True))

    def _outer(self, left, right):
        columns = list(zip(*right, strict=True))
        return [[bf16(self._sum(row, column)) for column in columns] for row in zip(*left, strict=True)]

    def _clamped(self, g, u):
        return min(g, self.limit), min(max(u, -self.limit), self.limit)

    def _swiglu(self, g, u):
        g, u = self._clamped(g, u)
        silu = g * sigmoid(g)
        return bf16((bf16(silu) if self.also == "silu" else silu) * u)

    def _swiglu_backward(self, dh, g, u):
        gc, uc = self._clamped(g, u)
        s = sigmoid(gc)
        dg = dh * uc * s * (1 + gc * (1 - s)) if g <= self.limit else 0.0
        du = dh * gc * s if -self.limit <= u <= self.limit else 0.0
        return bf16(dg), bf16(du)
