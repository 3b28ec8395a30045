"""moe_experts in FP8 against bf16 and against DeepGEMM with separate casts: `python -m benches.moe_experts_fp8`.

DeepGEMM is measured if it is there: `uv pip install sgl-deep-gemm==0.1.5 apache-tvm-ffi==0.1.11`, and nvcc.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from moe_experts import (
    moe_experts,
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
)
from torch import Tensor

from benches import moe_experts as bf16
from benches import moe_fp8_stages as stages
from benches.harness import Bench, Candidate, Case, main
from benches.moe_experts import BOTH, FORWARD, HIDDEN, INNER, LIMIT, LOADS, PRODUCTS, RESULTS, ROWS, group_sizes
from benches.moe_fp8_stages import OURS, Inputs
from benches.peers import experts_fp8 as peers

BATCHES = 4
MICRO = f"{BATCHES} micro-batches"
ANEW = "moe_experts, FP8, fp32 sums"
CACHED = "moe_experts, FP8, fp32 sums, weights quantised once"
TOY = ROWS // 512, 256, 128  # rows, and hidden and inner channels, on a CPU
# Relative errors (L2) that are allowed, compared with the definition in bf16. With eight bits an operand they are
# about 0.07; a gate or an up that rounds to the other side of a clamp's bound has a gradient, or has none any more.
BOUNDS = {"out": 8e-2, "grad down": 8e-2, "grad x": 0.16, "grad gate": 0.16, "grad up": 0.16}


class Batch(NamedTuple):
    """x (M / 4, H), requiring grad, dout (M / 4, H), counts (E,)."""

    x: Tensor
    dout: Tensor
    counts: Tensor


@dataclass(frozen=True)
class MicroBatches:
    """gate_proj and up_proj (E, I, H), down_proj (E, H, I), all requiring grad, and what comes with each batch."""

    weights: tuple[Tensor, Tensor, Tensor]
    batches: tuple[Batch, ...]

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """What RESULTS should be, by the definition in bf16, as fp32: rows one batch after the other, sums of the
        weights' gradients."""
        rows: tuple[list[Tensor], list[Tensor]] = ([], [])
        sums = [torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in self.weights]
        for x, dout, counts in self.batches:
            found = bf16.Inputs(x, *self.weights, dout, counts).expected
            for parts, part in zip(rows, found[:2], strict=True):
                parts.append(part)
            for total, grad in zip(sums, found[2:], strict=True):
                total.add_(grad)
        return *(torch.cat(parts).float() for parts in rows), *sums


def make_inputs(experts: int, rows: int, hidden: int, inner: int, device: torch.device) -> Inputs:
    """The numbers of the bench in bf16."""
    return Inputs(**vars(bf16.make_inputs(experts, rows, hidden, inner, device)))


def make_micro_batches(experts: int, rows: int, hidden: int, inner: int, device: torch.device) -> MicroBatches:
    """Each with a quarter of the rows, and the sizes of the groups one expert further on."""
    first = bf16.make_inputs(experts, rows // BATCHES, hidden, inner, device)
    x = [first.x, *(torch.randn_like(first.x).requires_grad_() for _ in range(1, BATCHES))]
    dout = [first.dout, *(torch.randn_like(first.dout) for _ in range(1, BATCHES))]
    counts = [first.counts.roll(i) for i in range(BATCHES)]
    return MicroBatches(first.leaves[1:], tuple(map(Batch, x, dout, counts)))


def cases(device: torch.device, quick: bool) -> list[Case]:
    """Every load forward, with the backward and in micro-batches, then each stage; on a CPU at toy size, without the
    stages; `quick`: EP=96 alone."""
    cuda = device.type == "cuda"
    rows, hidden, inner = size = (ROWS, HIDDEN, INNER) if cuda else TOY
    found = []
    for load, experts in LOADS.items() if not quick else [("EP=96", LOADS["EP=96"])]:
        label = f"{load}, {experts} experts"
        make = functools.partial(make_inputs, experts, *size, device)
        sizes = group_sizes(experts, rows)
        found += [_step(label, task, make, 2 * sum(sizes) * hidden * inner, cuda) for task in PRODUCTS]
        work = 2 * BATCHES * sum(group_sizes(experts, rows // BATCHES)) * hidden * inner
        found.append(_micro_batches(label, functools.partial(make_micro_batches, experts, *size, device), work))
        if cuda:
            found += stages.cases(load, make, sizes, hidden, inner)
    return found


def _step(load: str, task: str, make: Callable[[], Inputs], work: int, cuda: bool) -> Case:
    candidates = [
        Candidate(OURS, functools.partial(prepare, task, True), ours=True, graph=False),
        Candidate(
            "moe_experts, bf16",
            functools.partial(prepare, task, False),
            verify=functools.partial(bf16.close, bounds=bf16.BOUNDS),
            graph=False,
        ),
    ]
    if cuda:
        candidates.append(
            Candidate(
                "DeepGEMM, casts by torch.compile",
                functools.partial(prepare_deep_gemm, task, compiled=True),
                tolerance="h and the gradients of gate and up rounded to bf16 before they are cast",
                graph=False,
            )
        )
    if cuda and task == BOTH:
        candidates.append(
            Candidate(
                "its six products alone",
                stages.six_alone,
                verify=stages.all_right,
                tolerance="DeepGEMM, operands quantised before, weight gradients added to fp32; no SwiGLU",
                graph=False,
            )
        )
    verify = functools.partial(bf16.close, bounds=BOUNDS)
    return Case(f"{load}, {task}", make, tuple(candidates), verify, flops=PRODUCTS[task] * work)


def _micro_batches(load: str, make: Callable[[], MicroBatches], work: int) -> Case:
    return Case(
        label=f"{load}, {MICRO}",
        make=make,
        candidates=(
            Candidate(OURS, by_autograd, ours=True, graph=False),
            *(
                Candidate(
                    name,
                    functools.partial(with_fp32_sums, cached=name == CACHED),
                    ours=True,
                    verify=functools.partial(summed, dtype=torch.float32),
                    graph=False,
                )
                for name in (ANEW, CACHED)
            ),
        ),
        verify=functools.partial(summed, dtype=torch.bfloat16),
        flops=PRODUCTS[BOTH] * work,
    )


def prepare(task: str, fp8: bool, inputs: Inputs) -> Callable[[], dict[str, Tensor]]:
    """The call that does `task`; results and gradients by name."""
    return bf16.prepare(lambda t: lambda *leaves: moe_experts(*leaves, t.counts, LIMIT, fp8=fp8), task, inputs)


def prepare_deep_gemm(task: str, inputs: Inputs, compiled: bool) -> Callable[[], dict[str, Tensor]]:
    """The same by DeepGEMM's products and casts apart."""
    step = peers.Step(inputs.where, peers.casts(compiled), LIMIT)
    x, *weights = (t.detach() for t in inputs.leaves)

    def forward() -> dict[str, Tensor]:
        return {"out": step.forward(x, *weights)[0]}

    def both() -> dict[str, Tensor]:
        out, kept = step.forward(x, *weights)
        return dict(zip(RESULTS, (out, *step.backward(inputs.dout, kept, *weights)), strict=True))

    return forward if task == FORWARD else both


def by_autograd(inputs: MicroBatches) -> Callable[[], dict[str, Any]]:
    """Weights are quantised in every forward, and autograd adds up their gradients in bf16."""

    def call() -> dict[str, Any]:
        leaves = *inputs.weights, *(batch.x for batch in inputs.batches)
        for leaf in leaves:
            leaf.grad = None
        outs = []
        for x, dout, counts in inputs.batches:
            out = moe_experts(x, *inputs.weights, counts, LIMIT, fp8=True)
            out.backward(dout)
            outs.append(out.detach())
        grads = [leaf.grad for leaf in leaves]
        return dict(zip(RESULTS, (outs, grads[3:], *grads[:3]), strict=True))

    return call


def with_fp32_sums(inputs: MicroBatches, cached: bool) -> Callable[[], dict[str, Any]]:
    """The weights' gradients are added up in fp32, from the first batch's on. cached: weights are quantised for the
    first batch only. Nothing is kept from call to call but the memory of the sums."""
    gate, _, down = weights = [t.detach() for t in inputs.weights]
    experts, inner, hidden = gate.shape
    dw13 = torch.empty(experts, 2 * inner, hidden, dtype=torch.float32, device=gate.device)
    dw2 = torch.empty(down.shape, dtype=torch.float32, device=gate.device)
    batches = [Batch(batch.x.detach(), batch.dout, batch.counts) for batch in inputs.batches]

    def call() -> dict[str, Any]:
        outs, grads = [], []
        for i, (x, dout, counts) in enumerate(batches):
            if i == 0 or not cached:
                w13_q, w13_sf, w2_q, w2_sf, *transposed = moe_experts_fp8_quantize_weights(*weights)
            out, *kept = moe_experts_fp8_forward_quantized(x, counts, LIMIT, w13_q, w13_sf, w2_q, w2_sf)
            sums = dw13, dw2, i > 0
            grads.append(moe_experts_fp8_backward_accumulate(dout, counts, *kept, *transposed, LIMIT, *sums))
            outs.append(out)
        return dict(zip(RESULTS, (outs, grads, dw13[:, :inner], dw13[:, inner:], dw2), strict=True))

    return call


def summed(inputs: MicroBatches, outputs: dict[str, Any], dtype: torch.dtype) -> str:
    """All outputs within their bounds of the definition; sums of gradients have that dtype."""
    for name in RESULTS[2:]:
        assert outputs[name].dtype == dtype, f"{name} is {outputs[name].dtype}, expected {dtype}"
    rows = {name: torch.cat(outputs[name]) for name in RESULTS[:2]}
    found = {name: t.float() for name, t in {**outputs, **rows}.items()}
    return bf16.close(SimpleNamespace(expected=inputs.expected), found, BOUNDS)


BENCH = Bench(
    name="moe_experts_fp8",
    title="Expert MLPs with a clamped SwiGLU in FP8, with gradients",
    cases=cases,
    wheels=("hopper-kernels", "moe-experts"),
    packages=("moe_experts.fp8",),
    peers=("sgl-deep-gemm",),
    matmul=torch.float8_e4m3fn,
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
