"""A training step of some layers: forward, backward and the optimiser, and how far its gradients are from another's."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import hopper_kernels
import torch
from torch import Tensor

from benches.v41 import model, operations
from benches.v41.choices import Choices
from benches.v41.config import Config
from benches.v41.parallel import Alone, LastRank, Parallel

SEED = 41
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """Layers of a model and the tokens of a step: those of the last of `ranks` context-parallel ranks."""

    label: str
    config: Config
    tokens: int
    ranks: int = 1
    checkpointed: bool = False


class Step:
    """The layers, their optimiser and their data, all the same for every choice of operations.

    Without `parallel`: one process, which, if the setting has several ranks, is the last of them without the others.
    parallel, rank: that process of several. parts: the data of so many ranks together.
    """

    def __init__(
        self,
        setting: Setting,
        device: torch.device,
        parallel: Parallel | None = None,
        rank: int | None = None,
        parts: int = 1,
    ) -> None:
        config, ranks = setting.config, setting.ranks
        self.share = 1.0 if parallel is None else 1.0 / ranks  # of the loss
        if parallel is None:
            parallel = LastRank(ranks) if ranks > 1 else Alone()
        self.parallel, self.rank = parallel, ranks - 1 if rank is None else rank
        self.tokens = model.make_tokens(config, setting.tokens, self.rank, ranks, device)
        with device:
            self.model = model.Stack(config, model.Way(parallel=parallel), checkpointed=setting.checkpointed)
        count = self.tokens.count // parts
        data = [_data(config, count, self.rank + part, device) for part in range(parts)]
        self.x, self.target = (torch.cat(pieces) for pieces in zip(*data, strict=True))
        self.x.requires_grad_()
        self.reset()

    def reset(self) -> None:
        """The parameters and the optimiser as they were at first."""
        model.reset(self.model, SEED, self.rank if self.parallel.expert_ranks > 1 else 0)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=self.x.is_cuda)

    def load(self, sequence: int) -> None:
        """Other data."""
        with torch.no_grad():
            x, self.target = _data(self.model.config, len(self.x), sequence, self.x.device)
            self.x.copy_(x)

    def gradients(self, use: operations.Operations, choices: Choices | None = None) -> Tensor:
        """The loss, whose gradients are in the parameters and in x afterwards."""
        self.optimiser.zero_grad(set_to_none=True)
        self.x.grad = None
        return self.backward(use, choices)

    def backward(self, use: operations.Operations, choices: Choices | None = None) -> Tensor:
        """The same, added to the gradients that are there."""
        found = {} if choices is None else {"choices": choices}
        self.model.way = model.Way(use, self.parallel, **found)
        loss = self.share * (self.model(self.x, self.tokens).float() - self.target.float()).square().mean()
        loss.backward()
        return loss.detach()

    def __call__(self, use: operations.Operations) -> None:
        """What is timed."""
        self.gradients(use)
        self.optimiser.step()

    def found(self) -> dict[str, Tensor]:
        """The gradients by name, which the next call does not touch."""
        return {name: p.grad for name, p in self.named() if p.grad is not None}

    def named(self):
        yield from self.model.named_parameters()
        yield "x", self.x


def _data(config: Config, count: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Streams (count, S, C) and targets (count, C), normal, of a rank."""
    generator = torch.Generator(device).manual_seed(SEED + rank)
    shapes = (count, config.streams, config.hidden), (count, config.hidden)
    return tuple(torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)


@dataclass(frozen=True)
class Comparison:
    """A step compared with the same step by other operations, with the choices of experts and entries of a third.

    loss: difference, relative to the other's. whole: relative error (L2) of all gradients together; worst: of the
    parameters of one kind in all layers, the kind that is farthest off. shares: see `Choices`. excess: where the other
    step is one with FP8, how far this one's gradients are from those in bf16, divided by how far the other's are.
    """

    loss: float
    whole: float
    worst: float
    kind: str
    shares: dict[str, float]
    excess: float | None = None

    def __str__(self) -> str:
        common = ", ".join(f"{100 * share:.2f} % of {what}" for what, share in self.shares.items())
        excess = "" if self.excess is None else f"; {self.excess:.3f} x as far from bf16"
        return (
            f"loss {self.loss:+.1e}, gradients {self.whole:.1e}, of {self.kind} {self.worst:.1e}{excess}; "
            f"chosen alike at least {common}"
        )


@dataclass(frozen=True)
class Plain:
    """The first step in plain PyTorch: its loss, its gradients and its choices."""

    loss: float
    gradients: dict[str, Tensor]
    choices: Choices


def plain_step(step: Step) -> Plain:
    """What other steps are compared with."""
    step.reset()
    choices = Choices()
    loss = step.gradients(operations.choose(), choices).item()
    return Plain(loss, step.found(), choices)


def compare(step: Step, names: tuple[str, ...], recipe: tuple[str, ...], plain: Plain) -> Comparison:
    """The operations by kernels of `names` with those in plain PyTorch, or with a recipe, by its definitions."""
    step.reset()
    loss, expected = plain.loss, plain.gradients
    if recipe:
        with hopper_kernels.reference():
            loss = step.gradients(operations.choose(*recipe), Choices(plain.choices)).item()
        expected = step.found()
    mine = Choices(plain.choices)
    difference = step.gradients(operations.choose(*names), mine).item() - loss
    found = step.found()
    whole, worst, kind = distances(found, expected)
    excess = None
    if recipe:
        excess = distances(found, plain.gradients)[0] / distances(expected, plain.gradients)[0]
    return Comparison(difference / loss, whole, worst, kind, mine.shares, excess)


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float, str]:
    """Relative errors (L2) of all together and of the worst kind of parameter, and which that is. NaN is farthest."""
    if found.keys() != expected.keys():
        raise AssertionError(f"gradients of other parameters: {sorted(found.keys() ^ expected.keys())}")
    squares: dict[str, list[float]] = {}
    for name, wanted in expected.items():
        kind = squares.setdefault(re.sub(r"^layers\.\d+\.", "", name), [0.0, 0.0])
        for part, other in zip(found[name].flatten().split(2**28), wanted.flatten().split(2**28), strict=True):
            kind[0] += (part.double() - other.double()).square().sum().item()
            kind[1] += other.double().square().sum().item()
    errors = {kind: math.sqrt(error / size) if size else math.inf for kind, (error, size) in squares.items()}
    worst = max(errors, key=lambda kind: math.inf if math.isnan(errors[kind]) else errors[kind])
    total, size = (sum(pair[i] for pair in squares.values()) for i in (0, 1))
    return math.sqrt(total / size), errors[worst], worst
