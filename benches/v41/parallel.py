"""Several processes: queries in context-parallel parts, experts in expert-parallel ones.

Keys, entries and index keys are those of the whole document on every process; their gradients are summed over the
processes in fp32. An expert's rows travel to the process that has it, and its results back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

Run = Callable[[Tensor, Tensor], Tensor]
"""(rows sorted by expert, counts of the experts of this process) -> a result for each row."""


class Parallel(Protocol):
    """What a layer asks of the processes."""

    expert_ranks: int

    def gather(self, x: Tensor) -> Tensor:
        """Rows of all processes in their order, of the document."""

    def exchange(self, rows: Tensor, counts: Tensor, run: Run) -> Tensor:
        """Results of `run` for rows sorted by expert, counts (experts,) of all experts."""


class Alone:
    """One process, which has everything."""

    expert_ranks = 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    def exchange(self, rows: Tensor, counts: Tensor, run: Run) -> Tensor:
        return run(rows, counts)


class LastRank(Alone):
    """The last of `ranks` context-parallel processes, without the others: theirs are normal numbers that stay the
    same, and the gradients for them are computed and dropped."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self._ranks, self._seed = ranks, seed
        self._others: dict[tuple, Tensor] = {}

    def gather(self, x: Tensor) -> Tensor:
        key = (*x.shape, x.dtype)
        if key not in self._others:
            generator = torch.Generator(x.device).manual_seed(self._seed)
            shape = ((self._ranks - 1) * len(x), *x.shape[1:])
            self._others[key] = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
        return torch.cat((self._others[key], x))


class Processes:
    """The processes of `group`, each with a part of the document's queries and of the experts."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.expert_ranks = group.size()

    def gather(self, x: Tensor) -> Tensor:
        return _Gather.apply(x, self.group)

    def exchange(self, rows: Tensor, counts: Tensor, run: Run) -> Tensor:
        ranks = self.group.size()
        local = len(counts) // ranks
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = (c.view(ranks, local).sum(dim=1).tolist() for c in (counts, arriving))  # waits for the GPU
        arrived = all_to_all_single_autograd(rows, received, sent, self.group)
        # They are sorted by sender and then by expert.
        owner = (
            torch.arange(local, device=rows.device).repeat(ranks).repeat_interleave(arriving, output_size=sum(received))
        )
        order = owner.argsort(stable=True)
        results = run(arrived[order], arriving.view(ranks, local).sum(dim=0))
        back = torch.empty_like(results).index_copy(0, order, results)
        return all_to_all_single_autograd(back, sent, received, self.group)


class _Gather(torch.autograd.Function):
    """Concatenates the rows of all processes; in the backward each gets the sum of all gradients of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        whole = x.new_empty(group.size() * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx, grad: Tensor):
        mine = grad.new_empty(len(grad) // ctx.group.size(), *grad.shape[1:], dtype=torch.float32)
        dist.reduce_scatter_tensor(mine, grad.float().contiguous(), group=ctx.group)
        return mine.to(grad.dtype), None
