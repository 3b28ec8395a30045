"""Selective checkpoints: what a trainer's policy saves does not run again."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def saving(*operators: str) -> Callable[[], tuple]:
    """For `checkpoint(..., context_fn=saving("library::operator"))`: their results are saved, all others made again."""

    def policy(context, operator, *args, **options):
        return CheckpointPolicy.MUST_SAVE if operator.name() in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)
