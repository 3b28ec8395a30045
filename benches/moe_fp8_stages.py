"""The stages of an FP8 step of `moe_experts`, each alone: cases of `benches.moe_experts_fp8`, and its six products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hopper_kernels import fp8
from moe_experts import padded_rows, reference
from moe_experts import plan as bf16_plan
from moe_experts.fp8 import reference as fp8_reference
from torch import Tensor

from benches import moe_experts as bf16
from benches.difference import Difference
from benches.harness import Candidate, Case, copy_candidate
from benches.moe_products import SIZES
from benches.peers import experts_fp8 as peers
from benches.peers.experts_fp8 import BLOCK, Packing, Quantised

OURS, SUMS, DEEP_GEMM, COMPILED = "moe_experts, FP8", "moe_experts, FP8, fp32 sums", "DeepGEMM", "torch.compile"
LABELS = {
    "quantize_x": "quantise x",
    "gate_up": "gate and up",
    "swiglu": "SwiGLU",
    "down": "down",
    "quantize_dout": "quantise dout",
    "grad_hidden": "gradient of h",
    "swiglu_backward": "SwiGLU backward",
    "down_grad": "gradient of down",
    "grad_x": "gradient of x",
    "gate_up_grad": "gradients of gate and up",
    "quantize_weights": "quantise weights",
}
# Relative errors (L2) of products, against float64 of what the codes stand for, and of products kept in fp32: the
# tensor cores add up 128 products with about 14 bits. Storing a result in bf16 alone costs 1.7e-3.
ERRORS = {torch.bfloat16: 3e-3, torch.float32: 1e-3}
SAMPLE = 97  # every so manieth row of the first and of the last expert is compared
# Largest share of codes that may differ, and relative difference of scales.
EXACT = 0.0, 0.0
SWIGLU = 1e-3, 1e-5  # formed in fp32 from the same numbers, by other formulas
CASTS = 1e-2, 1e-6  # Inductor's divisions
ROUNDED = 5e-2, 5e-3  # cast from bf16, whose roundings are up to 3.9e-3


class Copies(NamedTuple):
    """A tensor of C channels quantised in both ways, in Mp padded rows: rows (Mp, C) with scales (C / 128, Mp), and
    panels (Mp / 128, C, 128) with scales (Mp / 128, C)."""

    rows: Quantised
    panels: Quantised

    @classmethod
    def of(cls, padded: Tensor) -> Copies:
        """By the definition."""
        blocks, channels = len(padded) // BLOCK, padded.shape[1]
        codes, scales = fp8.per_token(padded, recipe=fp8.MOE_ROWS)
        turned, turned_scales = fp8.per_token_transposed(padded, recipe=fp8.MOE_COLUMNS)
        panels = turned.view(channels, blocks, BLOCK).transpose(0, 1).contiguous()
        return cls((codes, scales.t()), (panels, turned_scales.t()))

    @classmethod
    def empty(cls, padded: int, channels: int, device: torch.device) -> Copies:
        """For a result."""
        blocks = padded // BLOCK
        codes = functools.partial(torch.empty, dtype=peers.CODES, device=device)
        scales = functools.partial(torch.empty, dtype=torch.float32, device=device)
        rows = codes(padded, channels), scales(channels // BLOCK, padded)
        return cls(rows, (codes(blocks, channels, BLOCK), scales(blocks, channels)))

    def named(self, name: str) -> dict[str, Quantised]:
        """Both, by what they are of and how they lie."""
        return {f"{name} in rows": self.rows, f"{name} in panels": self.panels}


@dataclass(frozen=True)
class Inputs(bf16.Inputs):
    """Those of a step, and what its stages read, by the definition. G, U and the gradient of h are random numbers."""

    @functools.cached_property
    def where(self) -> Packing:
        return Packing.of(self.counts)

    @property
    def padded(self) -> int:
        """Mp, at least the packed rows, which come first."""
        return padded_rows(len(self.x), len(self.counts))

    @property
    def inner(self) -> int:
        return self.down_proj.shape[2]

    @functools.cached_property
    def weights(self) -> dict[str, Quantised]:
        """w13, w2, w13_t and w2_t."""
        found = fp8_reference.quantize_weights(*(t.detach() for t in self.leaves[1:]))
        return dict(zip(("w13", "w2", "w13_t", "w2_t"), zip(found[::2], found[1::2], strict=True), strict=True))

    @functools.cached_property
    def gate_up(self) -> Tensor:
        """G and U (Mp, 2I)."""
        return self._random(2 * self.inner, 7)

    @functools.cached_property
    def grad_h(self) -> Tensor:
        """(Mp, I)."""
        return self._random(self.inner, 1)

    @functools.cached_property
    def copies(self) -> dict[str, Copies]:
        """Of x, dout, h, and dgu, the gradients of gate and up."""
        h, dgu = swiglu(self.grad_h, self.gate_up)
        x, dout = (self._in_place(t) for t in (self.x.detach(), self.dout))
        return {"x": Copies.of(x), "dout": Copies.of(dout), "h": Copies.of(h), "dgu": Copies.of(dgu)}

    @property
    def products_of_rows(self) -> dict[str, tuple[Quantised, Quantised]]:
        """Of each product of rows: the rows and the weight."""
        rows, w = {name: copies.rows for name, copies in self.copies.items()}, self.weights
        return {
            "gate_up": (rows["x"], w["w13"]),
            "down": (rows["h"], w["w2"]),
            "grad_hidden": (rows["dout"], w["w2_t"]),
            "grad_x": (rows["dgu"], w["w13_t"]),
        }

    @property
    def sums_of_rows(self) -> dict[str, tuple[Quantised, Quantised]]:
        """Of each weight gradient a^T b: the panels of a and of b."""
        panels = {name: copies.panels for name, copies in self.copies.items()}
        return {"down_grad": (panels["dout"], panels["h"]), "gate_up_grad": (panels["dgu"], panels["x"])}

    def _random(self, channels: int, size: float) -> Tensor:
        shape = len(self.x), channels
        return self._in_place(torch.randn(shape, dtype=torch.bfloat16, device=self.x.device).mul_(size))

    def _in_place(self, rows: Tensor) -> Tensor:
        found = rows.new_zeros(self.padded, rows.shape[1])
        found[self.where.own] = rows
        return found


def swiglu(grad_h: Tensor, gate_up: Tensor, rows: int = 4096) -> tuple[Tensor, Tensor]:
    """h, and the gradients of gate and up side by side, in fp32, by the definition a few rows at a time."""
    h = torch.empty(grad_h.shape, dtype=torch.float32, device=grad_h.device)
    dgu = torch.empty(gate_up.shape, dtype=torch.float32, device=grad_h.device)
    for part in zip(*(t.split(rows) for t in (grad_h, gate_up, h, dgu)), strict=True):
        grad, (gate, up) = part[0], part[1].chunk(2, dim=1)
        part[2].copy_(reference.swiglu(gate, up, bf16.LIMIT, torch.float32))
        halves = reference.swiglu_backward(grad, gate, up, bf16.LIMIT, torch.float32)
        part[3].copy_(torch.cat(halves, dim=1))
    return h, dgu


def cases(load: str, make: Callable[[], Inputs], sizes: list[int], hidden: int, inner: int) -> list[Case]:
    """One for each stage, in the order of a step, but the weights last; sizes: of the groups."""
    return [_case(name, load, make, sizes, hidden, inner) for name in LABELS]


def _case(name: str, load: str, make: Callable[[], Inputs], sizes: list[int], hidden: int, inner: int) -> Case:
    case = functools.partial(Case, label=f"{load}, {LABELS[name]}", make=make)
    ours = Candidate(OURS, functools.partial(by_us, name), ours=True, graph=False)
    if name in SIZES:
        candidates = [ours, Candidate(DEEP_GEMM, functools.partial(peers.product_alone, name), graph=False)]
        if name.endswith("_grad"):
            candidates.insert(1, Candidate(SUMS, functools.partial(by_us, name, sums=True), ours=True, graph=False))
        verify = functools.partial(right, name)
        return case(candidates=tuple(candidates), verify=verify, flops=2 * SIZES[name] * sum(sizes) * hidden * inner)
    nbytes = pass_bytes(name, sizes, hidden, inner)
    allowed, bounds = (SWIGLU, ROUNDED) if "swiglu" in name else (EXACT, CASTS)
    compiled = Candidate(
        COMPILED,
        functools.partial(peers.pass_alone, name, limit=bf16.LIMIT, compiled=True),
        verify=functools.partial(pass_right, name, bounds=bounds, packed=True),
        tolerance=f"rows packed before; up to {bounds[0]:.0%} of the codes differ",
        graph=False,
    )
    candidates = ours, compiled, copy_candidate(nbytes)
    return case(candidates=candidates, verify=functools.partial(pass_right, name, bounds=allowed), bytes=nbytes)


def pass_bytes(name: str, sizes: list[int], hidden: int, inner: int) -> int:
    """What a pass must read and write, once; results are in packed rows."""
    packed = sum(-(-size // BLOCK) * BLOCK for size in sizes)
    copy = packed + 4 * packed // BLOCK  # of one channel, in rows or in panels, with scales
    if name == "quantize_weights":
        elements = 3 * len(sizes) * hidden * inner
        return 4 * elements + 8 * elements // BLOCK**2
    if name == "swiglu":
        return inner * (4 * packed + copy)
    if name == "swiglu_backward":
        return inner * (6 * packed + 5 * copy)
    return hidden * (2 * sum(sizes) + 2 * copy)


def by_us(name: str, s: Inputs, sums: bool = False) -> Callable[[], Any]:
    """The launch of a stage, and its results. sums: weight gradients are added to fp32, not stored in bf16."""
    from moe_experts.fp8 import plan

    where = bf16_plan.empty_groups(s.counts, len(s.x))
    bf16_plan.groups(s.counts, len(s.x), where).run()
    device, padded, (experts, hidden, inner) = s.x.device, s.padded, s.down_proj.shape
    empty = functools.partial(torch.empty, dtype=torch.bfloat16, device=device)
    if name in ("quantize_x", "quantize_dout"):
        key, source = ("x", s.x.detach()) if name == "quantize_x" else ("dout", s.dout)
        found = Copies.empty(padded, hidden, device)
        return _launched(found.named(key), plan.quantize(source, where, *found))
    if name == "quantize_weights":
        found = {key: tuple(map(torch.empty_like, pair)) for key, pair in s.weights.items()}
        gate, up, down = (t.detach() for t in s.leaves[1:])
        first = plan.quantize_weights(gate, up, found["w13"], found["w13_t"])
        return _launched(found, first, plan.quantize_weights(down, down, found["w2"], found["w2_t"]))
    if name == "swiglu":
        h = Copies.empty(padded, inner, device).rows
        return _launched({"h in rows": h}, plan.swiglu(s.gate_up, bf16.LIMIT, where, h))
    if name == "swiglu_backward":
        dgu, h = Copies.empty(padded, 2 * inner, device), Copies.empty(padded, inner, device).panels
        launch = plan.swiglu_backward(s.grad_h, s.gate_up, bf16.LIMIT, where, *dgu, h)
        return _launched({**dgu.named("dgu"), "h in panels": h}, launch)
    if name in s.sums_of_rows:
        a, b = s.sums_of_rows[name]
        shape = experts, a[1].shape[1], b[1].shape[1]
        if sums:
            out = torch.zeros(shape, dtype=torch.float32, device=device)
            return _launched((out, None), plan.weight_grad(a, b, where, 0, (out,), plan.ADD))
        out = empty(shape)
        outs = (out,) if name == "down_grad" else (out[:, :inner], out[:, inner:])
        return _launched((out, None), plan.weight_grad(a, b, where, 0, outs, plan.BF16))
    a, b = s.products_of_rows[name]
    if name in ("gate_up", "grad_hidden"):
        out = empty(padded, b[0].shape[1])
        return _launched((out, s.where.own), plan.product(a, b, where, out, padded=True))
    out = empty(s.x.shape)
    return _launched((out, None), plan.product(a, b, where, out, padded=False))


def _launched(found: Any, *launches: Any) -> Callable[[], Any]:
    def call() -> Any:
        for launch in launches:
            launch.run()
        return found

    return call


def six_alone(s: Inputs) -> Callable[[], dict[str, Any]]:
    """All six products one after the other, by DeepGEMM."""
    calls = {name: peers.product_alone(name, s) for name in SIZES}
    return lambda: {name: call() for name, call in calls.items()}


def right(name: str, s: Inputs, found: tuple[Tensor, Tensor | None]) -> str:
    """A product, in float64 of what the codes stand for."""
    out, own = found
    ends, difference = s.counts.cumsum(0).tolist(), Difference()
    for expert, size in _first_and_last(s.counts):
        if name in s.sums_of_rows:
            rows = torch.arange(0, out.shape[1], SAMPLE, device=out.device)
            a, b = (_values_of_columns(panels, s.where, expert) for panels in s.sums_of_rows[name])
            difference.add(out[expert, rows], a[rows] @ b.T)
            continue
        (codes, scales), (w, w_scales) = s.products_of_rows[name]
        rows = torch.arange(ends[expert] - size, ends[expert], SAMPLE, device=out.device)
        places = s.where.own[rows]
        read = codes.view(torch.uint8)[places].view(codes.dtype)
        values = _exact(read) * scales[:, places].T.double().repeat_interleave(BLOCK, 1)
        wide = w_scales[expert].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        difference.add(out[rows if own is None else own[rows]], values @ (_exact(w[expert]) * wide).T)
    error = difference.relative()
    assert error <= ERRORS[out.dtype], f"{name}: relative error {error:.1e}"
    return f"{name} {error:.1e}"


def _first_and_last(counts: Tensor) -> Iterator[tuple[int, int]]:
    sizes = counts.tolist()
    return ((expert, sizes[expert]) for expert in (0, len(sizes) - 1))


def _values_of_columns(panels: Quantised, where: Packing, expert: int) -> Tensor:
    """(channels, packed rows of the expert) in float64."""
    first, count = sum(where.sizes[:expert]) // BLOCK, where.sizes[expert] // BLOCK
    codes, scales = (t[first : first + count] for t in panels)
    return (_exact(codes) * scales.double().unsqueeze(-1)).transpose(0, 1).flatten(1)


def _exact(codes: Tensor) -> Tensor:
    return codes.float().double()


def all_right(s: Inputs, found: dict[str, Any]) -> str:
    """`right` of each product."""
    return "relative errors: " + ", ".join(right(name, s, one) for name, one in found.items())


def pass_right(
    name: str, s: Inputs, found: dict[str, Quantised], bounds: tuple[float, float], packed: bool = False
) -> str:
    """All codes and scales of a pass, but for those behind the packed rows. packed: found in DeepGEMM's layouts."""
    if name == "quantize_weights":
        expected = s.weights
    elif name == "swiglu":
        expected = {"h in rows": s.copies["h"].rows}
    elif name == "swiglu_backward":
        expected = {**s.copies["dgu"].named("dgu"), "h in panels": s.copies["h"].panels}
    else:
        key = name.removeprefix("quantize_")
        expected = s.copies[key].named(key)
    assert found.keys() == expected.keys(), f"{list(found)}, expected {list(expected)}"
    pairs = {}
    for key, wanted in expected.items():
        one = found[key] if packed else peers.packed(key, found[key], s.where)
        pairs[key] = one, peers.packed(key, wanted, s.where)
    return _compare(pairs, bounds)


def _compare(pairs: dict[str, tuple[Quantised, Quantised]], bounds: tuple[float, float]) -> str:
    """Found and expected operands by name: shares of codes that differ, and the largest difference of a scale."""
    wrong, worst = [], [0.0, 0.0]
    for name, (found, expected) in pairs.items():
        layouts = [[(tuple(t.shape), t.dtype) for t in pair] for pair in (found, expected)]
        assert layouts[0] == layouts[1], f"{name} is {layouts[0]}, expected {layouts[1]}"
        codes, scales = zip(found, expected, strict=True)
        unequal = codes[0].view(torch.uint8) != codes[1].view(torch.uint8)
        seen = unequal.sum().item() / unequal.numel(), ((scales[0] - scales[1]).abs() / scales[1]).max().item()
        wrong += [name] if not all(one <= bound for one, bound in zip(seen, bounds, strict=True)) else []
        worst = [max(pair) for pair in zip(worst, seen, strict=True)]
    report = f"{worst[0]:.1e} of the codes differ, scales by up to {worst[1]:.1e}"
    assert not wrong, f"{', '.join(wrong)} too far from the definition: {report}"
    return report
