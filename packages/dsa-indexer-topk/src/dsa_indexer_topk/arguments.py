"""Checks of the arguments, and the limits of their sizes, which nothing else knows."""

import torch
from hopper_kernels import checks
from torch import Tensor

HEADS = (16, 32, 64)
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (1, 2, 4, 8, 16)
MAX_TOPK = 2048
"""Most picks of a query: four times what DeepSeek-V4.1 asks for. The definition would take more, a kernel need not."""


_SORTED = 2**22  # candidates that are sorted together
NOT_UNIQUE = "dsv41_index_topk: candidates must name a block once in a row"


def unsupported_shape_reason(num_heads: int, head_dim: int, block_size: int) -> str | None:
    """Why queries of these sizes are refused, or None if they are taken. For set-up time.

    num_heads: index heads of a query, 16, 32 or 64. head_dim: channels of a head and of a key, 64 or 128. block_size:
    entries of a candidate block, a power of two up to 16. The same words as the ValueError of the call.
    """
    try:
        _sizes(num_heads, head_dim, block_size)
    except ValueError as error:
        return str(error)
    return None


@checks.remembered
def index_topk(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    ks: Tensor,
    ke: Tensor,
    topk: int,
    candidates: Tensor | None,
    emit_candidates: bool,
    max_entries_per_doc: int,
    block_size: int,
    topk_blocks: int,
) -> None:
    """Checks all arguments of `dsv41_index_topk` but for the values in the tensors."""
    for name, value in {"q": q, "k": k, "w": w, "ks": ks, "ke": ke}.items():
        checks.tensor(name, value)
    checks.ndim("q", q, 3)
    checks.dtype("q", q, torch.bfloat16)
    checks.ndim("k", k, 2)
    checks.dtype("k", k, torch.bfloat16)
    queries, heads, head_dim = q.shape
    _sizes(heads, head_dim, block_size)
    checks.shape("k", k, (None, head_dim))
    checks.dtype("w", w, torch.bfloat16, torch.float32)
    checks.shape("w", w, (queries, heads))
    for name, value in {"ks": ks, "ke": ke}.items():
        checks.dtype(name, value, torch.int32, torch.int64)
        checks.shape(name, value, (queries,))
    checks.integer("topk", topk, 0, MAX_TOPK)
    if candidates is not None:
        checks.dtype("candidates", candidates, torch.int32, torch.int64)
        checks.shape("candidates", candidates, (queries, None))
    if not isinstance(emit_candidates, bool):
        raise TypeError(f"emit_candidates must be a bool, got {type(emit_candidates).__name__}")
    checks.integer("max_entries_per_doc", max_entries_per_doc, 0)
    checks.integer("topk_blocks", topk_blocks, 0)
    checks.same_device(q=q, k=k, w=w, ks=ks, ke=ke, candidates=candidates)


def entries_per_doc(ks: Tensor, ke: Tensor, max_entries_per_doc: int) -> None:
    """Checks ke - ks <= max_entries_per_doc in every row, and waits for no GPU.

    ValueError on a CPU; on a GPU an assertion that the device makes, after which its CUDA context is unusable.
    """
    length = ke.long() - ks
    fits = (length <= max_entries_per_doc).all()
    if fits.device.type != "cpu":
        torch._assert_async(fits, "dsv41_index_topk: max_entries_per_doc must be at least ke - ks in every row")
    elif not fits:
        row = int(length.argmax())
        raise ValueError(
            f"max_entries_per_doc must be at least {length[row]}, ke - ks of row {row}, got {max_entries_per_doc}"
        )


def unique_candidates(candidates: Tensor) -> None:
    """Checks that no row names a block twice, and waits for no GPU. Negative numbers are no blocks.

    ValueError on a CPU; on a GPU an assertion that the device makes.
    """
    size = max(1, _SORTED // max(1, candidates.shape[1]))
    for i, part in enumerate(candidates.split(size)):
        ordered = part.sort(dim=1).values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if twice.device.type != "cpu":
            torch._assert_async(~twice.any(), NOT_UNIQUE)
        elif twice.any():
            row, column = twice.nonzero()[0].tolist()
            block = int(ordered[row, column])
            raise ValueError(f"candidates must name a block once in a row, got {block} twice in row {i * size + row}")


def _sizes(heads: int, head_dim: int, block_size: int) -> None:
    _one_of("the number of heads H of q", heads, HEADS)
    _one_of("the number of channels D of q", head_dim, HEAD_DIMS)
    _one_of("block_size", block_size, BLOCK_SIZES)


def _one_of(name: str, value: int, allowed: tuple[int, ...]) -> None:
    checks.integer(name, value)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value}")
