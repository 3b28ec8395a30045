"""Pretended machines: another card, another version of Triton."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterator

import pytest
import torch
from hopper_kernels import registry


def capability(major: int, minor: int) -> contextlib.AbstractContextManager[None]:
    """Within the block every CUDA device has this compute capability."""
    return _pretended(torch.cuda, "get_device_capability", lambda device=None: (major, minor))


def triton_version(version: str) -> contextlib.AbstractContextManager[None]:
    """Within the block what is installed says that Triton has this version."""
    installed = importlib.metadata.version
    return _pretended(importlib.metadata, "version", lambda name: version if name == "triton" else installed(name))


@contextlib.contextmanager
def _pretended(module: object, name: str, function: object) -> Iterator[None]:
    """With that function in the module; the registry looks again, then and after it."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, function)
            registry.refresh()
            yield
    finally:
        registry.refresh()
