"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. Results that are
stored plainly are then read in full, so initcheck sees a byte that was never written: h and the gradients of gate and
up, of the experts' rows, since the others are unspecified. Initcheck does not see what TMA writes, which is everything
else: `test_poisoned_memory_is_not_seen` has that, gate and up are random numbers in the backward, and what FP8's
products write for its passes to read is filled with them before.

`--without-specialised-warps` leaves out the products, since racecheck cannot follow their warps, see
`tests/mhc_projection/racecheck_control.py`. What is left is the kernel of the groups, and the passes of FP8.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from moe_experts import (
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_weight_grad_accumulate,
    plan,
)
from moe_experts.fp8 import plan as fp8_plan
from torch import Tensor

from tests.moe_experts import inputs
from tests.moe_experts.fp8_on_cpu import call, step
from tests.moe_experts.inputs import Operands

OPERATORS = torch.ops.moe_experts
PRODUCTS = ("gate_up", "down", "grad_hidden", "grad_x", "weight_grad")
FP8_PRODUCTS = ("product", "weight_grad")
# Beside those of the tests: more than a tile in each direction, more steps than a ring has slots.
SHAPES = [*inputs.SHAPES, ((130, 0, 1, 300, 0), 5, 136, 520), ((0, 257), 0, 520, 136), ((128, 256), 128, 64, 256)]
FP8_SHAPES = [((130, 0, 1, 300, 0), 5, 256, 384), ((0, 257), 0, 384, 128), ((0, 0), 3, 128, 128)]
PROGRAMS = (2, 132)  # that share the tiles: many tiles for each, then one at most
NEEDS = list(itertools.product((True, False), repeat=4))


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    if sys.argv[1:] == ["--without-specialised-warps"]:
        for module, names in ((plan, PRODUCTS), (fp8_plan, FP8_PRODUCTS)):
            for name in names:
                setattr(module, name, lambda *_, **__: SimpleNamespace(run=lambda: None))
    fp8_plan.product = _filled_before(fp8_plan.product)
    torch.manual_seed(0)
    calls = 0
    for programs, shape in itertools.product(PROGRAMS, SHAPES):
        plan.SMS = programs
        calls += sum(_experts(t, NEEDS if shape == inputs.SHAPES[0] else NEEDS[:1]) for t in _operands(*shape))
    for programs, shape in itertools.product(PROGRAMS, FP8_SHAPES):
        fp8_plan.SMS = programs
        calls += sum(_fp8_experts(t, NEEDS if shape == FP8_SHAPES[0] else NEEDS[:1]) for t in _operands(*shape))
    # More tiles of an expert than a program of the groups writes at a time.
    plan.GROUPS_CHUNK = 16
    calls += sum(_experts(t, NEEDS[:1]) for t in _operands((128 * 40 + 1, 0, 7), 300, 8, 8))
    torch.cuda.synchronize()
    print(f"{calls} calls, results read")


def _filled_before(product: Callable[..., Any]) -> Callable[..., Any]:
    def filled(a: Any, b: Any, where: plan.Groups, out: Tensor, padded: bool) -> Any:
        out.normal_()
        return product(a, b, where, out, padded)

    return filled


def _operands(groups: tuple[int, ...], tail: int, hidden: int, inner: int) -> Iterator[Operands]:
    """Separate weights, halves of one, and that one as it is; counts of either type."""
    with torch.device("cuda"):
        t = inputs.operands(groups, tail, hidden, inner, limit=1.0)
        packed = t.packed()
    gate, up = packed.gate_proj.chunk(2, dim=1)
    yield t
    yield packed._replace(gate_proj=gate, up_proj=up)
    yield packed._replace(num_tokens_per_expert=t.num_tokens_per_expert.int())


def _experts(t: Operands, needs: list[tuple[bool, ...]]) -> int:
    """A forward, a backward in two parts, and one in one part for each of `needs`."""
    rows, inner, owned, limit = len(t.x), t.down_proj.shape[2], t.owned, t.swiglu_limit
    with torch.device("cuda"):
        dout = inputs.cotangent(t)
        gate, up = (torch.randn(rows, inner).bfloat16() for _ in range(2))
    OPERATORS.moe_experts_forward(*t)
    _, dgate_dup, h = OPERATORS.moe_experts_backward_data(dout, *t[1:5], gate, up, limit)
    _read((dgate_dup[:owned], h[:owned]))
    OPERATORS.moe_experts_weight_grad(dout, t.x, t.num_tokens_per_expert, dgate_dup, h, t.up_proj is None)
    for need in needs:
        OPERATORS.moe_experts_backward(dout.t().contiguous().t(), *t[:5], gate, up, limit, *need)
    return 3 + len(needs)


def _fp8_experts(t: Operands, needs: list[tuple[bool, ...]]) -> int:
    """The same with FP8, without gradients, into buffers of fp32 sums, and by autograd for each of `needs`."""
    with torch.device("cuda"):
        dout = inputs.cotangent(t)
        experts, hidden, inner = t.down_proj.shape
        dw13, dw2 = torch.zeros(experts, 2 * inner, hidden), torch.zeros(experts, hidden, inner)
    with torch.no_grad():
        _read([call(*t)])
    s = step(t)
    blocks = -(-t.num_tokens_per_expert // 128).sum()
    _, *columns = moe_experts_fp8_backward_data(dout, *s.data)
    _read([*s.weights, *(scales[:blocks] for scales in (s.kept[2], *columns[1::2]))])
    moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=False)
    moe_experts_fp8_backward_accumulate(dout, *s.joint, dw13, dw2)
    _read([dw13, dw2])
    for need in needs:
        OPERATORS.moe_experts_fp8_backward(dout, *s.joint, t.up_proj is None, *need)
    return 6 + len(needs)


def _read(results: Sequence[Tensor]) -> None:
    for result in results:
        result.reshape(-1).view(torch.uint8).sum()


if __name__ == "__main__":
    main()
