"""What `hopper-kernels check` runs: results and gradients of the public function against the definition in float64.

Of whole numbers G and U have no rounding errors, so that none comes to lie on the other side of a clamp's bound, and
many lie on it. Normal numbers are far from the bounds. What is left are the roundings to bf16, and with FP8, of normal
numbers alone, those to e4m3.
"""

import math

import torch
from hopper_kernels import models
from hopper_kernels.selfcheck import Case, relative_error
from torch import Tensor

from moe_experts import ops, reference

SEED = 20263
LIMIT = 10.0
_NAMES = ("out", "grad_x", "grad_gate", "grad_up", "grad_down")
_BOUND = 5e-3  # storing a result in bf16 alone costs 1.7e-3; behind it are G, U and h, or dH and its gradients
_FP8_BOUND = 7.5e-2  # three bits after the leading one: 2.6e-2 for a number, and three or four are behind each result
_FLASH = models.V41_FLASH


def cases(device: torch.device) -> list[Case]:
    """Toy experts on a CPU; on a GPU V4.1's widths too, with few experts of many rows and many of few."""
    sizes = [((45, 0, 63, 1, 2), 136, 264), ((0, 9, 130, 0), 64, 40), ((77,), 8, 8)]
    fp8_sizes = [((45, 0, 130, 1, 2), 128, 384)]
    if device.type != "cpu":
        width = _FLASH.hidden, _FLASH.moe_intermediate
        few, many = (1983, 2296, 1890, 2025), tuple(200 + (37 * i) % 113 for i in range(48))
        sizes = [(few, *width), (many, *width), *sizes]
        fp8_sizes = [(few, *width), (many, *width), *fp8_sizes]
    forms = [(packed, whole) for packed in (False, True) for whole in (True, False)]
    found = [_case(*size, *form, False, device) for size in sizes for form in forms]
    return found + [_case(*size, packed, False, True, device) for size in fp8_sizes for packed in (False, True)]


def _case(
    groups: tuple[int, ...], hidden: int, inner: int, packed: bool, whole: bool, fp8: bool, device: torch.device
) -> Case:
    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(SEED)
        experts, owned = len(groups), sum(groups)
        numbers = _whole_numbers if whole else torch.randn
        x, dout = (numbers(owned + 5, hidden, device=device).bfloat16() for numbers in (numbers, torch.randn))
        scale = hidden**-0.5
        if whole:  # gates are as wide as the limit, 10, allows about a tenth to be beyond it
            scale = 2.0 ** round(math.log2(7 / (hidden * 4 / 9) ** 0.5))
        gate_up = (numbers(experts, 2 * inner, hidden, device=device) * scale).bfloat16()
        down = (torch.randn(experts, hidden, inner, device=device) * inner**-0.5).bfloat16()
        x[owned:], dout[owned:] = math.nan, math.nan
        return x, gate_up, down, torch.tensor(groups, device=device), dout

    def run(x, gate_up, down, counts, dout) -> dict[str, Tensor]:
        weights = (gate_up,) if packed else (gate_up[:, :inner], gate_up[:, inner:])
        leaves = [t.detach().requires_grad_() for t in (x, *weights, down)]
        x, *weights, down = leaves
        out = ops.moe_experts(x, weights[0], None if packed else weights[1], down, counts, LIMIT, fp8)
        grad_x, *grads, grad_down = torch.autograd.grad(out, leaves, dout)
        grads = (grads[0][:, :inner], grads[0][:, inner:]) if packed else grads
        return dict(zip(_NAMES, (out.detach(), grad_x, *grads, grad_down), strict=True))

    def expected(x, gate_up, down, counts, dout) -> dict[str, Tensor]:
        x, gate_up, down, dout = (t.double() for t in (x, gate_up, down, dout))
        operands = x, gate_up[:, :inner], gate_up[:, inner:], down, counts
        out, gate, up = reference.forward(*operands, LIMIT)
        return dict(zip(_NAMES, (out, *reference.backward(dout, *operands, gate, up, LIMIT)), strict=True))

    rows = f"{len(groups)} experts, {min(groups)} to {max(groups)} rows"
    kind = f"{'packed' if packed else 'separate'}, {'whole' if whole else 'normal'} numbers{', FP8' if fp8 else ''}"
    label = f"{rows} x {hidden} x {inner}, {kind}"
    return Case(label, make, run, expected, relative_error, dict.fromkeys(_NAMES, _FP8_BOUND if fp8 else _BOUND))


def _whole_numbers(*shape: int, device: torch.device) -> Tensor:
    """-1, 0 and 1: the terms of a sum do not round, and their number is below 2^8 with few exceptions."""
    return torch.randint(-1, 2, shape, device=device)
