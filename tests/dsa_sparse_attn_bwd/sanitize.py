"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. The results are
then read in full, so initcheck sees a byte that was never written. It does not see what TMA writes, and that is the
queries and their gradients in shared memory: `test_poisoned_memory_is_not_seen` and `test_shared_memory_is_not_seen`
have those.

`--without-specialised-warps` leaves out the products, which racecheck cannot follow, see
`tests/mhc_projection/racecheck_control.py`; what is added and rounded then are random numbers.
"""

import itertools
import sys
from types import SimpleNamespace

import torch
from dsa_sparse_attn_bwd import arguments, dsa_sparse_attn_backward, plan
from torch import Tensor

from tests.dsa_sparse_attn_bwd import inputs, on_gpu
from tests.dsa_sparse_attn_bwd.inputs import Operands

# Queries, slots, rows: fewer queries than programs and more, one tile of slots and several, whole ones and not.
SHAPES = [(1, 1, 1), (3, 64, 17), (5, 65, 40), (135, 9, 33), (2, 200, 16)]
WIDE = [(2, 300, 50), (2, 600, 50), (1, 2050, 50)]  # slots that are taken in other numbers at a time


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    if sys.argv[1:] == ["--without-specialised-warps"]:
        plan.gradients = _random_gradients
    torch.manual_seed(0)
    plan.PARTS = 1  # as few queries at a time as there may be
    calls = sum(_forms(*shape, heads) for shape, heads in itertools.product(SHAPES, arguments.HEADS))
    calls += sum(_forms(*shape, 16) for shape in WIDE)
    torch.cuda.synchronize()
    print(f"{calls} calls, results read")


def _random_gradients(of: plan.Queries, kv: Tensor, sm_scale: float, dq: Tensor, sums: Tensor, ordered: bool):
    """What `plan.gradients` would write."""

    def run() -> None:
        dq.normal_()
        sums.normal_()

    return SimpleNamespace(run=run)


def _forms(queries: int, slots: int, rows: int, heads: int) -> int:
    """As they are, with tails, with no slots anywhere, of other strides and dtypes."""
    t = on_gpu.operands(queries, slots, rows, heads=heads)
    none = torch.full_like(t.indices, rows)
    forms = [t, t._replace(indices=none), *(inputs.with_tail(t, channels) for channels in (16, 64, 512))]
    forms += [t.each(inputs.STRIDES["slice"]), t._replace(indices=t.indices.long(), sinks=t.sinks.double())]
    return sum(_call(form, deterministic) for form in forms for deterministic in on_gpu.MODES.values())


def _call(t: Operands, deterministic: bool) -> int:
    for result in dsa_sparse_attn_backward(**t.batched(), deterministic=deterministic):
        result.reshape(-1).view(torch.uint8).sum()
    return 1


if __name__ == "__main__":
    main()
