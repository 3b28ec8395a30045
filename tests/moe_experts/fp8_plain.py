"""The FP8 path written otherwise: e4m3 as a table of its values, one expert and one element's place at a time.

It shares nothing with `hopper_kernels.fp8` and `moe_experts.fp8`. Quotients are divided in float64 and then rounded to
fp32, which is the correctly rounded quotient.
"""

import torch
from torch import Tensor

from tests.moe_experts.inputs import Operands

ROW_FLOOR, BLOCK_FLOOR = 1e-10, 1e-4
FP8 = torch.float8_e4m3fn


def value_of(code: int) -> float:
    """Of a code without sign."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


VALUES = torch.tensor([value_of(code) for code in range(0x7F)], dtype=torch.float64)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2


def encode(quotients: Tensor) -> Tensor:
    """The nearest codes (uint8), the even one of two; beyond 448 that of 448."""
    size = quotients.abs()
    code = torch.searchsorted(MIDDLES, size)
    between = MIDDLES[code.clamp(max=len(MIDDLES) - 1)] == size
    code = torch.where(between & (code % 2 == 1), code + 1, code)
    code = torch.where(size.isnan(), 0x7F, code)
    return (code + 0x80 * torch.signbit(quotients)).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """Values of codes (uint8), float64."""
    size = torch.cat((VALUES, torch.tensor([torch.nan], dtype=torch.float64)))[(codes & 0x7F).long()]
    return torch.where(codes >= 0x80, -size, size)


def quantized(v: Tensor, dims: tuple[int, ...], floor: float) -> tuple[Tensor, Tensor]:
    """Codes (uint8) and scales (fp32, `dims` kept) of groups along `dims`."""
    v = v.double()
    amax = v.abs().amax(dims, keepdim=True)
    floor = torch.tensor(floor, dtype=torch.float32).double()
    scales = (torch.maximum(amax, floor) / 448).float()
    return encode((v / scales.double()).float().double()), scales


def rows(v: Tensor) -> Tensor:
    """The values that the row copy of v (n, C) stands for."""
    codes, scales = quantized(v.unflatten(1, (-1, 128)), (2,), ROW_FLOOR)
    return (decode(codes) * scales.double()).flatten(1)


def columns(v: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (blocks, 128, C) and scales (blocks, 1, C) of an expert's rows (n, C), padded with zeros."""
    padded = torch.zeros(-(-len(v) // 128) * 128, v.shape[1], dtype=v.dtype)
    padded[: len(v)] = v
    return quantized(padded.unflatten(0, (-1, 128)), (1,), ROW_FLOOR)


def blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (E, R, C) and scales (E, R / 128, C / 128) of weights."""
    codes, scales = quantized(w.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)), (2, 4), BLOCK_FLOOR)
    return codes.flatten(3, 4).flatten(1, 2), scales.squeeze(4).squeeze(2)


def block_values(codes: Tensor, scales: Tensor) -> Tensor:
    wide = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    return decode(codes) * wide


class Panels:
    """A transposed operand, filled element by element."""

    def __init__(self, padded: int, channels: int) -> None:
        self.channels = channels
        self.codes = torch.zeros(padded * channels, dtype=torch.uint8)
        self.scales = torch.zeros(padded // 128, channels)

    def put(self, first: int, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes and scales as `columns` has them, from block `first` on. Returns their values, (rows, C)."""
        count = len(codes)
        b, r, c = torch.meshgrid(*map(torch.arange, codes.shape), indexing="ij")
        self.codes[((first + b) * self.channels + c) * 128 + r] = codes
        self.scales[first : first + count] = scales.squeeze(1)
        return (decode(codes) * scales.double()).flatten(0, 1)


def bf(t: Tensor) -> Tensor:
    return t.float().bfloat16()


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-z))


def swiglu(dh: Tensor, g: Tensor, u: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """h, and dG and dU side by side, in float64."""
    gc, uc = torch.minimum(g, torch.tensor(limit)), u.clip(-limit, limit)
    s = sigmoid(gc)
    dg = torch.where(g <= limit, dh * uc * s * (1 + gc * (1 - s)), 0.0)
    du = torch.where((u >= -limit) & (u <= limit), dh * gc * s, 0.0)
    return gc * s * uc, torch.cat((dg, du), dim=1)


def step(t: Operands, dout: Tensor) -> dict[str, Tensor]:
    """Every result of a forward and a backward, by name; dw13 and dw2 in fp32, from zeros."""
    gate_up = t.gate_proj if t.up_proj is None else torch.cat((t.gate_proj, t.up_proj), dim=1)
    (w13, w13_sf), (w2, w2_sf) = blocks(gate_up), blocks(t.down_proj)
    experts, hidden, inner = t.down_proj.shape
    padded = (-(-len(t.x) // 128) + experts) * 128
    w13_values, w2_values = block_values(w13, w13_sf), block_values(w2, w2_sf)
    kept = {name: Panels(padded, c) for name, c in (("x", hidden), ("dout", hidden), ("h", inner), ("dgu", 2 * inner))}
    found = {name: torch.zeros(t.x.shape).bfloat16() for name in ("out", "dx")}
    found["gate_up"] = torch.zeros(padded, 2 * inner).bfloat16()
    found |= {"dw13": torch.zeros(experts, 2 * inner, hidden), "dw2": torch.zeros(experts, hidden, inner)}
    start = block = 0
    for expert, size in enumerate(t.num_tokens_per_expert.tolist()):
        if not size:
            continue
        x, d = (v[start : start + size].float() for v in (t.x, dout))
        w13_e, w2_e = w13_values[expert], w2_values[expert]
        gu = bf(rows(x) @ w13_e.T)
        g, u = gu.double().split(inner, dim=1)
        dh = bf(rows(d) @ w2_e).double()
        h, dgu = swiglu(dh, g, u, t.swiglu_limit)
        h, dgu = h.float(), dgu.float()
        found["gate_up"][128 * block : 128 * block + size] = gu
        found["out"][start : start + size] = bf(rows(h) @ w2_e.T)
        found["dx"][start : start + size] = bf(rows(dgu) @ w13_e)
        values = {n: kept[n].put(block, *columns(v)) for n, v in (("x", x), ("dout", d), ("h", h), ("dgu", dgu))}
        found["dw13"][expert] = (values["dgu"].T @ values["x"]).float()
        found["dw2"][expert] = (values["dout"].T @ values["h"]).float()
        start, block = start + size, block + -(-size // 128)
    for name, panels in kept.items():
        found |= {f"{name}_t": panels.codes.view(FP8), f"{name}_t_sf": panels.scales}
    weights = {"w13_q": w13, "w13_sf": w13_sf, "w2_q": w2, "w2_sf": w2_sf}
    weights |= {"w13_t": w13.mT, "w13_t_sf": w13_sf.mT, "w2_t": w2.mT, "w2_t_sf": w2_sf.mT}
    for name, v in weights.items():
        v = v.clone(memory_format=torch.contiguous_format)
        found[name] = v.view(FP8) if v.dtype == torch.uint8 else v
    return found
