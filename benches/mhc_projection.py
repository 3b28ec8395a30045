"""hyper_connection against PyTorch, other projects and a copy: `python -m benches.mhc_projection`.

The other projects are measured if they are there: `uv pip install tile-kernels==1.0.0 tilelang liger-kernel`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mhc_projection
import torch
from hopper_kernels.models import V4_FLASH, V4_PRO, V41_FLASH
from mhc_projection import reference
from torch import Tensor

from benches.difference import Difference
from benches.harness import Bench, Candidate, Case, copy_candidate, main
from benches.peers import hyper_connection as peers

HC, ITERS, RMS_EPS, HC_EPS = V41_FLASH.hc, V41_FLASH.sinkhorn_iters, V41_FLASH.rms_eps, V41_FLASH.hc_eps
LOGITS = (2 + HC) * HC
OPTIONS = {"rms_eps": RMS_EPS, "hc_eps": HC_EPS, "sinkhorn_iters": ITERS}

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
READERS = "backward with the gradient of other readers"
MAIN = (16384, V41_FLASH.hidden)
CASES = [
    *((task, *MAIN) for task in (FORWARD, BACKWARD, BOTH, READERS)),
    *((BOTH, MAIN[0], width.hidden) for width in (V4_FLASH, V4_PRO)),
    *((BOTH, tokens, V41_FLASH.hidden) for tokens in (131072, 32768, 8192, 4096, 1024, 1)),
]
TOY_TOKENS, TOY_CHANNELS = 128, 32  # a CPU gets that fraction of the tokens (at least one) and of the channels
# Compiling takes longer than measuring, and a kernel with 32-bit offsets could end the whole process: the peers from
# elsewhere run at the main width, where streams have fewer than 2^31 elements.
PEER_TOKENS = range(1024, 65536)

RESULTS = ("pre", "post", "comb", "collapsed")
GRADIENTS = ("grad x", "grad weight", "grad scale", "grad base", "grad pre_mix")
SUMMED = ("grad weight", "grad scale", "grad base")  # over the tokens
# Relative errors (L2) that are allowed. Storing a result in bf16 alone costs 1.7e-3.
BOUNDS = {
    **dict.fromkeys(("pre", "post", "comb", "grad pre_mix"), 1e-5),
    **dict.fromkeys(("grad scale", "grad base"), 1e-4),
    "collapsed": 3e-3,
    "grad x": 3e-3,
    "grad weight": 5e-4,
}
LOOSE = 2e-2
# An element may be off by so many times the bound, relative to itself or to the mean square of its row.
ELEMENT = 10
VERIFY_TOKENS = 2048  # at a time: the definition in float64 needs many times the memory of the streams
TOLERANCE = {
    "eager": "pre_mix and the logits' gradient in bf16, three bf16 gradients of x added",
    "torch.compile": "the logits' gradient in bf16, the rest as Inductor fuses it",
    "TileKernels": "weight and products in TF32",
    "Liger": "the weight's gradient in bf16, two bf16 gradients of x added, atomics",
}


@dataclass(frozen=True)
class Inputs:
    """x (T, 4, d) bf16, weight (24, 4 d), scale (3,), base (24,), pre_mix (T, 4), all requiring grad.

    `cotangents` are those of pre, post, comb and collapsed; `addend`, if any, is the gradient of other readers of x.
    """

    x: Tensor
    weight: Tensor
    scale: Tensor
    base: Tensor
    pre_mix: Tensor
    cotangents: tuple[Tensor, ...]
    addend: Tensor | None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return self.x, self.weight, self.scale, self.base, self.pre_mix


def make_inputs(tokens: int, d: int, readers: bool, device: torch.device) -> Inputs:
    """The published workload; `readers`: with a gradient of other readers of x."""

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    bf16 = torch.bfloat16
    return Inputs(
        normal(tokens, HC, d, dtype=bf16).requires_grad_(),
        (normal(LOGITS, HC * d) * 0.02).requires_grad_(),
        (torch.rand(3, device=device) + 0.5).requires_grad_(),
        (normal(LOGITS) * 0.5).requires_grad_(),
        torch.rand(tokens, HC, device=device).requires_grad_(),
        (normal(tokens, HC), normal(tokens, HC), normal(tokens, HC, HC), normal(tokens, d, dtype=bf16)),
        normal(tokens, HC, d, dtype=bf16) if readers else None,
    )


def streams_bytes(tokens: int, d: int) -> int:
    """Bytes of x."""
    return 2 * tokens * HC * d


def least_bytes(task: str, tokens: int, d: int) -> int:
    """Bytes that must move: x once, collapsed or its gradient, dX; and the small terms, all fp32.

    Those are pre_mix, the weight, the logits and rstd kept for the backward, the gates or their gradients; in the
    backward also the gradients of the weight and of pre_mix. The gradient of other readers is read once more than x.
    """
    small = 4 * (tokens * HC + LOGITS * HC * d + tokens * LOGITS + tokens + tokens * LOGITS)
    forward = streams_bytes(tokens, d) + 2 * tokens * d + small
    backward = forward + streams_bytes(tokens, d) + 4 * (LOGITS * HC * d + tokens * HC)
    return {
        FORWARD: forward,
        BACKWARD: backward,
        BOTH: forward + backward,
        READERS: backward + streams_bytes(tokens, d),
    }[task]


def separate_bytes(tokens: int, d: int) -> int:
    """Bytes of a backward and an add of two gradients of x in a pass of its own, which moves three times x."""
    return least_bytes(BACKWARD, tokens, d) + 3 * streams_bytes(tokens, d)


def cases(device: torch.device, quick: bool) -> list[Case]:
    """All of CASES; on a CPU each at toy size; `quick`: those at the main size, against eager PyTorch alone."""
    if device.type != "cuda":
        sizes = [(task, max(1, tokens // TOY_TOKENS), d // TOY_CHANNELS) for task, tokens, d in CASES]
        return [_case(*size, (), device) for size in sizes]
    if quick:
        return [_case(*size, (), device) for size in CASES if size[1:] == MAIN]
    return [_case(*size, _peers_at(*size[1:]), device) for size in CASES]


def _peers_at(tokens: int, d: int) -> tuple[str, ...]:
    if d != V41_FLASH.hidden or tokens not in PEER_TOKENS:
        return ()
    return (*(["torch.compile"] if (tokens, d) == MAIN else []), "TileKernels", "Liger")


def _case(task: str, tokens: int, d: int, names: tuple[str, ...], device: torch.device) -> Case:
    return Case(
        label=f"{tokens} x {HC} x {d}, {task}",
        make=lambda: make_inputs(tokens, d, task == READERS, device),
        candidates=(
            *_ours(task, tokens, d),
            *_peers(task, tokens, d, names),
            copy_candidate(least_bytes(task, tokens, d)),
        ),
        verify=functools.partial(close_to_float64, bounds=BOUNDS),
        bytes=least_bytes(task, tokens, d),
    )


def _ours(task: str, tokens: int, d: int) -> list[Candidate]:
    if task != READERS:
        return [_candidate("hyper_connection", _hyper_connection, task, ours=True)]
    apart = {"work": separate_bytes(tokens, d)}
    return [
        _candidate("hyper_connection_streams", _hyper_connection_streams, task, ours=True),
        _candidate("hyper_connection, then an add", _hyper_connection, task, **apart),
    ]


def _peers(task: str, tokens: int, d: int, names: tuple[str, ...]) -> list[Candidate]:
    """Eager PyTorch and the peers called `names`. All but TileKernels add a gradient of x in a pass of its own."""
    loads = {"torch.compile": peers.compiled, "TileKernels": peers.tile_kernels, "Liger": peers.liger}
    found = []
    for name, load in {"eager": peers.eager, **{name: loads[name] for name in names}}.items():
        options = {
            "verify": functools.partial(close_to_float64, bounds=dict.fromkeys(BOUNDS, LOOSE)),
            "tolerance": f"{TOLERANCE[name]}; errors up to {LOOSE:g}",
        }
        if name == "TileKernels" and task == READERS:
            found.append(Candidate(name, prepare_tile_kernels, graph=False, **options))
            continue
        if task == READERS:
            options["work"] = separate_bytes(tokens, d)
        found.append(_candidate(name, load, task, **options))
    return found


def _candidate(name: str, load: Callable[[], peers.Connection], task: str, **options: Any) -> Candidate:
    # A graph that autograd recorded before a capture runs on the stream of its forward, so it cannot be captured.
    prepare = functools.partial(prepare_connection, load=load, task=task)
    return Candidate(name, prepare, graph=task in (FORWARD, BOTH), **options)


def _hyper_connection() -> peers.Connection:
    return functools.partial(mhc_projection.hyper_connection, **OPTIONS)


def _hyper_connection_streams() -> peers.Connection:
    return functools.partial(mhc_projection.hyper_connection_streams, **OPTIONS)


def prepare_connection(
    inputs: Inputs, load: Callable[[], peers.Connection], task: str
) -> Callable[[], dict[str, Tensor]]:
    """The call that does `task` with the connection that `load` returns; results and gradients by name.

    A backward alone runs again and again on the graph of one forward. If there is a gradient of other readers, it goes
    to the connection's fifth result, the streams; without a fifth result it is added to the gradient of x.
    """
    connection, leaves = load(), inputs.leaves
    if task == FORWARD:
        return lambda: _named(results=connection(*leaves))
    if task == BOTH:

        def both() -> dict[str, Tensor]:
            results = connection(*leaves)
            return _named(results, torch.autograd.grad(results, leaves, inputs.cotangents))

        return both
    results = connection(*leaves)
    with_streams = len(results) > len(RESULTS)
    cotangents = (*inputs.cotangents, inputs.addend) if with_streams else inputs.cotangents

    def backward() -> dict[str, Tensor]:
        grads = torch.autograd.grad(results, leaves, cotangents, retain_graph=True)
        if inputs.addend is not None and not with_streams:
            grads = (grads[0] + inputs.addend, *grads[1:])
        return _named(gradients=grads)

    return backward


def prepare_tile_kernels(inputs: Inputs) -> Callable[[], dict[str, Tensor]]:
    """The backward of TileKernels that adds into the gradient of other readers; timing adds to the same buffer on."""
    results, buffer = peers.tile_kernels(add_gradient=True)(*inputs.leaves), inputs.addend.clone()
    return lambda: _named(gradients=peers.tile_kernels_gradients(results, inputs.leaves, inputs.cotangents, buffer))


def _named(results: tuple[Tensor, ...] = (), gradients: tuple[Tensor, ...] = ()) -> dict[str, Tensor]:
    return {**dict(zip(RESULTS, results, strict=False)), **dict(zip(GRADIENTS, gradients, strict=False))}


def close_to_float64(inputs: Inputs, outputs: dict[str, Tensor], bounds: dict[str, float]) -> str:
    """All outputs within their bounds of the definition in float64, as a whole (L2) and element by element."""
    found = differences(inputs, outputs)
    errors = {name: one.relative() for name, one in found.items()}
    report = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    wrong = [name for name, error in errors.items() if not error <= bounds[name]]
    assert not wrong, f"{', '.join(wrong)} too far from the definition; relative errors: {report}"
    wrong = [f"{name} ({one.worst:.1e})" for name, one in found.items() if not one.worst <= ELEMENT * bounds[name]]
    assert not wrong, f"an element is wrong in {', '.join(wrong)}; relative errors: {report}"
    return f"relative errors: {report}"


@torch.no_grad()
def differences(inputs: Inputs, outputs: dict[str, Tensor]) -> dict[str, Difference]:
    """How far each output is from the definition in float64, computed for VERIFY_TOKENS tokens at a time.

    Raises AssertionError for another shape or dtype.
    """
    _check_layout(inputs, outputs)
    found = {name: Difference() for name in outputs}
    sums: dict[str, Tensor] = {}
    for start in range(0, len(inputs.x), VERIFY_TOKENS):
        rows = slice(start, start + VERIFY_TOKENS)
        for name, expected in _definition(inputs, rows, gradients="grad x" in outputs).items():
            if name in SUMMED:
                sums[name] = sums[name] + expected if name in sums else expected
            elif name in outputs:
                found[name].add(outputs[name][rows], expected)
    for name, expected in sums.items():
        found[name].add(outputs[name], expected)
    return found


def _definition(inputs: Inputs, rows: slice, gradients: bool) -> dict[str, Tensor]:
    """Results of these tokens in float64, and their gradients and shares of summed ones."""
    x, pre_mix = inputs.x[rows].double(), inputs.pre_mix[rows]
    operands = (x, inputs.weight, inputs.scale, inputs.base, pre_mix)
    *results, mixes, rstd = reference.hyper_connection_forward(*operands, RMS_EPS, HC_EPS, ITERS)
    if not gradients:
        return _named(results)
    cotangents = [cotangent[rows] for cotangent in inputs.cotangents]
    addend = None if inputs.addend is None else inputs.addend[rows]
    grads = reference.hyper_connection_backward(*operands, mixes, rstd, *cotangents, addend, HC_EPS, ITERS)
    return _named(results, grads)


def _check_layout(inputs: Inputs, outputs: dict[str, Tensor]) -> None:
    tokens, hc, d = inputs.x.shape
    fp32, bf16 = torch.float32, torch.bfloat16
    results = [((tokens, hc), fp32), ((tokens, hc), fp32), ((tokens, hc, hc), fp32), ((tokens, d), bf16)]
    wanted = dict(zip(RESULTS, results, strict=True))
    wanted |= {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in zip(GRADIENTS, inputs.leaves, strict=True)}
    for name, output in outputs.items():
        found = tuple(output.shape), output.dtype
        assert found == wanted[name], f"{name} is {found}, expected {wanted[name]}"


BENCH = Bench(
    name="mhc_projection",
    title="Gates and collapse of a hyper-connection, with gradients",
    cases=cases,
    wheels=("hopper-kernels", "mhc-projection"),
    peers=("tile-kernels", "tilelang", "liger-kernel"),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
