"""What the tests of FP8 calls on CPU tensors share."""

from typing import NamedTuple

import moe_experts
import pytest
import torch
from torch import Tensor

from tests.moe_experts import on_cpu
from tests.moe_experts.inputs import Operands

# More than a block of rows, none, a few, a block; H and I have different numbers of blocks.
GROUPS, TAIL, HIDDEN, INNER = (130, 0, 5, 128), 9, 256, 384
SHAPES = [
    (GROUPS, TAIL, HIDDEN, INNER),
    ((1, 127, 129, 0), 0, 384, 128),
    ((257,), 1, 128, 256),
    ((0, 0, 9, 0), 3, 128, 128),
    ((0, 0), 6, 128, 256),
    ((0, 0, 0), 0, 256, 128),
]
each_shape = pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), SHAPES)
COLUMNS = ("dout_t", "dout_t_sf", "h_t", "h_t_sf", "dgu_t", "dgu_t_sf")


def operands(form="separate", groups=(130, 0, 5), tail=TAIL, hidden=HIDDEN, inner=128, **options) -> Operands:
    return on_cpu.operands(form, groups, tail, hidden, inner, **options)


def call(*t) -> Tensor:
    return moe_experts.moe_experts(*t, fp8=True)


def gradients(t: Operands, dout: Tensor, names=None):
    """out, and gradients of the operands named, by autograd."""
    return on_cpu.gradients(t, dout, names, call)


class Step(NamedTuple):
    """Operands of the FP8 functions, from a forward with quantised weights."""

    t: Operands
    weights: list[Tensor]
    out: Tensor
    kept: tuple[Tensor, Tensor, Tensor]

    @property
    def joint(self) -> tuple:
        """Arguments of a joint backward, after dout."""
        return self.t.num_tokens_per_expert, *self.kept, *self.weights[4:], self.t.swiglu_limit

    @property
    def data(self) -> tuple:
        """Arguments of `backward_data`, after dout."""
        return self.t.num_tokens_per_expert, self.kept[0], *self.weights[4:], self.t.swiglu_limit

    def sums(self, value=0.0) -> tuple[Tensor, Tensor]:
        """Buffers of the weights' gradients."""
        experts, hidden, inner = self.t.down_proj.shape
        return torch.full((experts, 2 * inner, hidden), value), torch.full((experts, hidden, inner), value)

    def second_half(self, columns) -> tuple:
        """Arguments of `weight_grad_accumulate`, before the buffers."""
        return self.t.num_tokens_per_expert, *columns, *self.kept[1:], len(self.t.x)


def step(t: Operands, weights=None) -> Step:
    if weights is None:
        weights = moe_experts.moe_experts_fp8_quantize_weights(*t[1:4])
    out, *kept = moe_experts.moe_experts_fp8_forward_quantized(
        t.x, t.num_tokens_per_expert, t.swiglu_limit, *weights[:4]
    )
    return Step(t, weights, out, tuple(kept))


def results(t: Operands, dout: Tensor) -> dict[str, Tensor]:
    """Every result of a forward and a backward, by the names of `fp8_plain.step`."""
    s = step(t)
    names = ("w13_q", "w13_sf", "w2_q", "w2_sf", "w13_t", "w13_t_sf", "w2_t", "w2_t_sf")
    found = dict(zip(names, s.weights, strict=True)) | {"out": s.out}
    found |= dict(zip(("gate_up", "x_t", "x_t_sf"), s.kept, strict=True))
    dx, *columns = moe_experts.moe_experts_fp8_backward_data(dout, *s.data)
    found |= {"dx": dx, **dict(zip(COLUMNS, columns, strict=True))}
    dw13, dw2 = s.sums()
    moe_experts.moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=False)
    return found | {"dw13": dw13, "dw2": dw2}
