"""What the GPU tests of this package share: operands on the GPU, calls of the operator, and what they must return."""

import math

import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, reference, sparse_attn_backward_flat
from torch import Tensor

from tests.dsa_sparse_attn_bwd import inputs, judge
from tests.dsa_sparse_attn_bwd.inputs import NAMES, Operands
from tests.support.compare import assert_same_bytes

DEVICE = torch.device("cuda")
CHANNELS, TAIL = 512, 64
SCALE = CHANNELS**-0.5
MODES = {"any order": False, "one order": True}  # of the sums of dkv: `deterministic`
CHUNK = 2**24  # elements of a temporary of the forward
Gradients = tuple[Tensor, Tensor, Tensor]


def normal(*shape: int, size: float = 1.0) -> Tensor:
    """In bf16, made in parts: the same numbers in fp32 would take twice the memory."""
    made = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    for part in made.split(max(1, 2**28 // max(1, math.prod(shape[1:])))):
        part.normal_(0, size)
    return made


def slots(queries: int, width: int, rows: int, empty: float = 0.1) -> Tensor:
    """Random rows, holes anywhere."""
    made = torch.randint(0, max(1, rows), (queries, width), dtype=torch.int32, device=DEVICE)
    return made.masked_fill_(torch.rand(queries, width, device=DEVICE) < (empty if rows else 1.1), -1)


def operands(
    queries: int,
    width: int,
    rows: int = 700,
    heads: int = 64,
    *,
    empty: float = 0.1,
    alone: int = 5,
    q_size: float = 1.0,
    kv_size: float = 1.0,
    scale: float = SCALE,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
) -> Operands:
    """Normal numbers; a share of the slots is empty, in every so many-th query (`alone`, 0: in none) all."""
    if indices is None:
        indices = slots(queries, width, rows, empty)
        if alone:
            indices[1::alone] = -1
    q, grad_out = normal(queries, heads, CHANNELS, size=q_size), normal(queries, heads, CHANNELS)
    sinks = torch.randn(heads, device=DEVICE) if sinks is None else sinks
    lse = torch.zeros(queries, heads, device=DEVICE)
    return forward(Operands(grad_out, q, normal(rows, CHANNELS, size=kv_size), q, lse, indices, sinks, scale))


def forward(t: Operands) -> Operands:
    """With the output and the lse of its own forward, computed in float64."""
    width, heads = t.indices.shape[1], t.q.shape[1]
    size = max(1, CHUNK // (max(1, width, heads) * CHANNELS))
    kv, sinks = t.kv.double(), t.sinks.double().clamp(-1e6, 1e6)
    out, lse = torch.empty_like(t.q), torch.empty_like(t.lse)
    for first in range(0, len(t.q), size):
        which = slice(first, first + size)
        out[which], lse[which] = inputs.forward(t.q[which].double(), kv, t.indices[which], sinks, t.sm_scale)
    return t._replace(out=out, lse=lse)


def whole(
    queries: int,
    width: int,
    rows: int = 300,
    heads: int = 64,
    *,
    empty: float = 0.1,
    alone: int = 5,
    indices: Tensor | None = None,
) -> Operands:
    """Numbers of which nothing rounds before the results do, in whatever order they are added.

    q and kv have no channel in common, so all scores are 0, lse is 0 and there is no sink: p is 1 everywhere. ds are
    halves of whole numbers of at most 8 bits. Every third head has a sink of +inf, so p is 0, and the sink's gradient
    a whole number. The output is any numbers, as the definition does not ask whose they are.
    """
    if indices is None:
        indices = slots(queries, width, rows, empty)
        if alone:
            indices[1::alone] = -1

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, dtype=torch.int8, device=DEVICE).bfloat16()

    q, grad_out, out = (numbers(queries, heads, CHANNELS) for _ in range(3))
    kv = numbers(rows, CHANNELS)
    q[..., 1::2], kv[:, ::2] = 0, 0
    lse, sinks = torch.zeros(queries, heads, device=DEVICE), torch.full((heads,), -math.inf, device=DEVICE)
    sinks[::3] = math.inf
    return Operands(grad_out, q, kv, out, lse, indices, sinks, 0.5)


def queries(t: Operands, which) -> Operands:
    """Copies of these queries alone, with all rows."""
    of_queries = ("grad_out", "q", "out", "lse", "indices", "out_tail")
    return t._replace(**{name: getattr(t, name)[which].clone() for name in of_queries if getattr(t, name) is not None})


def flat(t: Operands, deterministic: bool = False) -> Gradients:
    return sparse_attn_backward_flat(**t.flat(), deterministic=deterministic)


def batched(t: Operands, deterministic: bool = False) -> Gradients:
    """By the batched function, without the dimensions of size 1."""
    dq, dkv, dsinks = dsa_sparse_attn_backward(**t.batched(), deterministic=deterministic)
    return dq[0], dkv[0, :, 0], dsinks


def definition(t: Operands, dtype: torch.dtype = torch.float64) -> Gradients:
    """Rounded once, to the dtypes of the results."""
    found = reference.backward(*t, dtype=dtype)
    return tuple(r.to(like.dtype) for r, like in zip(found, (t.q, t.kv, t.sinks), strict=True))


def assert_right(t: Operands, deterministic: bool = False) -> Gradients:
    """All that is promised of numbers that round; the results."""
    found = flat(t, deterministic)
    judge.assert_right(found, t)
    return found


def assert_exact(t: Operands, deterministic: bool = False, what: str = "") -> Gradients:
    """The numbers of the definition, for operands of which nothing rounds; the results."""
    found = flat(t, deterministic)
    assert_equal(found, definition(t), what)
    return found


def assert_equal(found: Gradients, wanted: Gradients, what: str = "") -> None:
    """The same bits, but that zeros may have either sign."""
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert_same_bytes(got + 0.0, want + 0.0, f"{what} {name}")


def assert_same(found: Gradients, wanted: Gradients, what: str = "", *, ordered: bool = False) -> None:
    """dq and dsinks have the same bits, dkv too where its sums are formed in one order: else but for the order."""
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        if name != "dkv" or ordered:
            assert_same_bytes(got, want, f"{what} {name}")
        else:
            judge.assert_reordered(got, want, f"{what} {name}")
