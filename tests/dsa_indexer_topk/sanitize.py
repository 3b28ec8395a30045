"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. The results are
then read in full, so initcheck sees a byte that was never written.

`--without-specialised-warps` leaves out the kernels of the scores, which racecheck cannot follow, see
`tests/mhc_projection/racecheck_control.py`; what is selected from then are random scores.
"""

import itertools
import sys
from types import SimpleNamespace

import torch
from dsa_indexer_topk import arguments, dsv41_index_topk, plan
from torch import Tensor

from tests.dsa_indexer_topk import inputs, on_gpu
from tests.dsa_indexer_topk.inputs import MODES, Arguments

DOCUMENTS = [(1,), (70, 3, 1, 0, 129), (300,)]
WHOLE, PART = 200, 256  # entries of a document that is kept whole, and of a program's part: else none here has two
FEW = 1024  # ties that overflow what a selection has in registers


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    if sys.argv[1:] == ["--without-specialised-warps"]:
        plan.score, plan.score_candidates = _random_scores, _random_scores_of_candidates
    torch.manual_seed(0)
    plan.LONGEST_WHOLE, plan.PART = WHOLE, PART
    calls = sum(_sizes(*sizes) for sizes in itertools.product(arguments.HEADS, arguments.HEAD_DIMS))
    calls += sum(
        _call(on_gpu.arguments((300,), mode=mode, listed=9, block_size=b)) for mode in MODES for b in (1, 2, 16)
    )
    calls += sum(_ties(mode) for mode in MODES)
    torch.cuda.synchronize()
    print(f"{calls} calls, results read")


def _random_scores(_, out: Tensor, __) -> SimpleNamespace:
    return SimpleNamespace(run=out.uniform_)


def _random_scores_of_candidates(_, candidates: Tensor, out: Tensor, group: int) -> SimpleNamespace:
    none = (candidates < 0).repeat_interleave(group, dim=1)
    return SimpleNamespace(run=lambda: out.uniform_()[:, : none.shape[1]].masked_fill_(none, float("nan")))


def _sizes(heads: int, head_dim: int) -> int:
    calls = 0
    for documents, mode in itertools.product(DOCUMENTS, MODES):
        a = on_gpu.arguments(documents, 1 if heads < 64 else 2, heads=heads, head_dim=head_dim, mode=mode, listed=9)
        calls += _call(a)
        calls += _call(a._replace(w=a.w.float(), topk=100, topk_blocks=70))
        calls += _call(Arguments(*(inputs.STRIDES["slice"](v) if isinstance(v, Tensor) else v for v in a)))
    return calls


def _ties(mode: str) -> int:
    """More equal scores than registers, for each way to select."""
    calls = 0
    for longest_whole in (WHOLE, 9 * FEW):
        plan.LONGEST_WHOLE = longest_whole
        a = on_gpu.cuda(inputs.with_scores(torch.full((9 * FEW,), 7), rows=3, topk=5, topk_blocks=6))
        if mode in ("consumer", "both"):
            a = a._replace(candidates=torch.arange(FEW, dtype=torch.int32, device=on_gpu.DEVICE).flip(0).repeat(3, 1))
        calls += _call(a._replace(emit_candidates=mode in ("source", "both")))
    return calls


def _call(a: Arguments) -> int:
    for result in dsv41_index_topk(*a):
        result.reshape(-1).view(torch.uint8).sum()
    return 1


if __name__ == "__main__":
    main()
