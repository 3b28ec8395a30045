"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. The results are
then read in full, so initcheck sees a byte that was never written; but not the gradient of the streams, because
initcheck does not see what TMA writes: `test_poisoned_memory_is_not_seen` has that one.

`--without-specialised-warps` leaves out the launches of `projection_backward_kernel`, see `racecheck_control.py`.
"""

import itertools
import sys
from collections.abc import Sequence
from types import SimpleNamespace

import mhc_projection  # noqa: F401  registers the operators
import torch
from mhc_projection import plan
from torch import Tensor

from tests.mhc_projection import inputs

OPERATORS = torch.ops.mhc_projection
# Tokens, streams, channels, logits: one to three chunks of tokens; groups of one, two, three and four streams.
SHAPES = [(1, 4, 8, 24), (65, 4, 72, 24), (67, 1, 200, 3), (130, 2, 64, 8), (70, 3, 136, 31), (9, 5, 8, 1)]
LONG = [(1025, 4, 72, 24), (2100, 8, 8, 32)]
NEEDS = list(itertools.product((True, False), repeat=3))


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    if sys.argv[1:] == ["--without-specialised-warps"]:
        plan.projection_backward = lambda *_: SimpleNamespace(run=lambda: None)
    torch.manual_seed(0)
    calls = sum(_projection(*shape, NEEDS) for shape in SHAPES)
    calls += sum(_projection(*shape, NEEDS[:1]) for shape in LONG)
    calls += sum(_gates(tokens, hc, iters) for tokens in (1, 129) for hc in (1, 2, 4) for iters in (1, 3))
    calls += sum(_connection(*shape) for shape in ((1, 4, 8), (65, 4, 72), (130, 2, 64), (67, 1, 200), (1025, 4, 72)))
    torch.cuda.synchronize()
    print(f"{calls} calls, results read")


def _projection(tokens: int, hc: int, d: int, n: int, needs: list[tuple[bool, bool, bool]]) -> int:
    calls = 0
    t = _cuda(inputs.operands(tokens, hc, d, n=n))
    grad_mixes, grad_collapsed, addend = _normal((tokens, n)), _normal((tokens, d)), _normal((tokens, hc, d))
    for x, weight in ((t.x, t.weight), (inputs.STRIDES["unaligned slice"](t.x), t.weight.bfloat16())):
        for pre_mix in (t.pre_mix, None):
            mixes, rstd, *_ = _read(OPERATORS.projection_forward(x, weight, pre_mix, 1e-20))
            for g_m, g_c, other in itertools.product(
                (grad_mixes, None), (grad_collapsed, None) if pre_mix is not None else (None,), (addend, None)
            ):
                g_c, other = (None if g is None else g.bfloat16() for g in (g_c, other))
                for need in needs:
                    _, *rest = OPERATORS.projection_backward(x, weight, pre_mix, mixes, rstd, g_m, g_c, other, *need)
                    _read(rest)
                    calls += 1
            calls += 1
    return calls


def _gates(tokens: int, hc: int, iters: int) -> int:
    n = inputs.logits(hc)
    mixes, scale, base = _normal((tokens, n)), _normal((3,)), _normal((n,))
    grads = _normal((tokens, hc)), _normal((tokens, hc)), _normal((tokens, hc, hc))
    _read(OPERATORS.gates_forward(mixes, scale, base, hc, iters, 1e-6))
    _read(OPERATORS.gates_backward(mixes, scale, base, *grads, hc, iters, 1e-6))
    return 2


def _connection(tokens: int, hc: int, d: int) -> int:
    t = _cuda(inputs.operands(tokens, hc, d))
    grads = [_normal((tokens, hc)), _normal((tokens, hc)), _normal((tokens, hc, hc)), _normal((tokens, d)).bfloat16()]
    addend = _normal((tokens, hc, d)).bfloat16()
    calls = 0
    for weight, pre_mix in ((t.weight, t.pre_mix), (t.weight.bfloat16(), t.pre_mix), (t.weight, None)):
        operands = (t.x, weight, t.scale, t.base, pre_mix)
        *_, mixes, rstd, _ = _read(OPERATORS.hyper_connection_forward(*operands, 1e-20, 1e-6, 3))
        for some in (grads[:3], [grads[0], None, None], [None] * 3):
            for g_c, other in itertools.product((grads[3] if pre_mix is not None else None, None), (addend, None)):
                _, *rest = OPERATORS.hyper_connection_backward(*operands, mixes, rstd, *some, g_c, other, 1e-6, 3)
                _read(rest)
                calls += 1
        calls += 1
    return calls


def _cuda(t: inputs.Operands) -> inputs.Operands:
    return inputs.Operands(*(v.cuda() for v in t))


def _normal(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, device="cuda")


def _read(results: Sequence[Tensor]) -> Sequence[Tensor]:
    for result in results:
        result.reshape(-1).view(torch.uint8).sum()
    return results


if __name__ == "__main__":
    main()
