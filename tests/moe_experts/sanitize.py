"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. Results that are
stored plainly are then read in full, so initcheck sees a byte that was never written: h and the gradients of gate and
up, of the experts' rows, since the others are unspecified. Initcheck does not see what TMA writes, which is everything
else: `test_poisoned_memory_is_not_seen` has that, and gate and up are random numbers in the backward.

`--without-specialised-warps` leaves the kernel of the groups alone, since racecheck cannot follow the others, see
`tests/mhc_projection/racecheck_control.py`.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import moe_experts  # noqa: F401  registers the operators
import torch
from moe_experts import plan
from torch import Tensor

from tests.moe_experts import inputs
from tests.moe_experts.inputs import Operands

OPERATORS = torch.ops.moe_experts
PRODUCTS = ("gate_up", "down", "grad_hidden", "grad_x", "weight_grad")
# Beside those of the tests: more than a tile in each direction, more steps than a ring has slots.
SHAPES = [*inputs.SHAPES, ((130, 0, 1, 300, 0), 5, 136, 520), ((0, 257), 0, 520, 136), ((128, 256), 128, 64, 256)]
PROGRAMS = (2, 132)  # that share the tiles: many tiles for each, then one at most
NEEDS = list(itertools.product((True, False), repeat=4))


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    if sys.argv[1:] == ["--without-specialised-warps"]:
        for name in PRODUCTS:
            setattr(plan, name, lambda *_: SimpleNamespace(run=lambda: None))
    torch.manual_seed(0)
    calls = 0
    for programs, shape in itertools.product(PROGRAMS, SHAPES):
        plan.SMS = programs
        calls += sum(_experts(t, NEEDS if shape == inputs.SHAPES[0] else NEEDS[:1]) for t in _operands(*shape))
    # More tiles of an expert than a program of the groups writes at a time.
    plan.GROUPS_CHUNK = 16
    calls += sum(_experts(t, NEEDS[:1]) for t in _operands((128 * 40 + 1, 0, 7), 300, 8, 8))
    torch.cuda.synchronize()
    print(f"{calls} calls, results read")


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


def _read(results: Sequence[Tensor]) -> None:
    for result in results:
        result.reshape(-1).view(torch.uint8).sum()


if __name__ == "__main__":
    main()
