"""How an operator and its implementations are registered with PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


def assert_registered(
    packet: torch._ops.OpOverloadPacket,
    *,
    keys: Iterable[str] = ("CPU", "CUDA", "Meta", "Autograd"),
    changed: Sequence[str] = (),
) -> None:
    """The operator is implemented for these keys, may be compiled, and writes to the arguments `changed` alone.

    Its results share no memory with its arguments.
    """
    operator = packet.default
    for key in keys:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator._schema.name, key), key
    assert torch.Tag.pt2_compliant_tag in operator.tags
    assert operator._schema.is_mutable == bool(changed)
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == list(changed)
    assert all(returned.alias_info is None for returned in operator._schema.returns)
