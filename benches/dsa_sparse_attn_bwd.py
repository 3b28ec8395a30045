"""sparse_attn_backward_flat against cuDNN's backward and the definition: `python -m benches.dsa_sparse_attn_bwd`.

cuDNN is measured if it is there: `uv pip install "nvidia-cudnn-frontend[cutedsl]==1.32.0"`.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import hopper_kernels
import torch
from dsa_sparse_attn_bwd import reference, selfcheck, sparse_attn_backward_flat
from hopper_kernels.models import V41_FLASH
from torch import Tensor

from benches.harness import Bench, Candidate, Case, main
from benches.peers import sparse_attention as peers
from benches.peers.sparse_attention import Arguments

CHANNELS = V41_FLASH.head_dim
RATIO = 2  # tokens of an entry
RANDOM, LOCAL = "random", "local"
PART = 64  # queries that are made together; see `lasting_scores` too
UNREADABLE = -1.0  # below all scores
RESULTS = ("dq", "dkv", "dsinks")
# Relative errors (L2) that are allowed, compared with the definition in fp32. Storing a result in bf16 costs 1.7e-3,
# and rounding weights and their gradients to bf16 before the products about as much again; dsinks is never bf16.
BOUNDS = {"dq": 3e-3, "dkv": 3e-3, "dsinks": 1e-3}
# And of each row of 512 channels, but for those below a share of the median of all that are not zero: a whole tensor's
# error would hide a few wrong rows.
ROW_BOUND, SMALL = 4e-2, 0.05
ROWS = 65536  # that are compared at a time
TOY = 128  # a CPU gets that fraction of the tokens


class Document(NamedTuple):
    """Tokens of a document in a row of packed ones, of which those from `first` on have queries here; its first token
    and its first entry, counted in the row."""

    tokens: int
    first: int
    token: int
    entry: int


@dataclass(frozen=True)
class Shape:
    """Packed documents of so many tokens. Queries are the last of `ranks` equal parts of the tokens.

    topk: entries that a query picks among those of its document which end no later than at its own token, after its
    window. 0: layers of a window alone, for which there are no entries.
    """

    documents: tuple[int, ...]
    ranks: int = 1
    picks: str = RANDOM
    heads: int = V41_FLASH.heads
    window: int = V41_FLASH.window
    topk: int = V41_FLASH.index_topk

    @property
    def tokens(self) -> int:
        return sum(self.documents)

    @property
    def queries(self) -> int:
        return self.tokens // self.ranks

    @property
    def rows(self) -> int:
        """Of kv: tokens, then entries."""
        return self.tokens + (sum(n // RATIO for n in self.documents) if self.topk else 0)

    @property
    def label(self) -> str:
        count = len(self.documents)
        where = f"last of {self.ranks} ranks" if self.ranks > 1 else f"{count} document{'s' * (count > 1)}"
        special = [f"{self.picks} picks"] if self.picks != RANDOM else []
        special += ["window alone"] if not self.topk else []
        return ", ".join([f"{self.queries} queries", where, *special])

    def packed(self) -> Iterator[Document]:
        """The documents that have queries, in their order."""
        token = entry = 0
        for tokens in self.documents:
            first = max(0, self.tokens - self.queries - token)
            if first < tokens:
                yield Document(tokens, first, token, entry)
            token, entry = token + tokens, entry + tokens // RATIO

    def slots(self) -> int:
        """How many are not empty."""
        read = (end for d in self.packed() for end in range(d.first + 1, d.tokens + 1))
        return sum(min(end, self.window) + min(end // RATIO, self.topk) for end in read)

    def flops(self) -> int:
        """Of the five products with each slot that is not empty: scores, their gradients, dq, and dkv as keys and as
        values."""
        return 5 * 2 * self.heads * CHANNELS * self.slots()

    def toy(self) -> Shape:
        """For a CPU."""
        documents = tuple(n // TOY for n in self.documents)
        return dataclasses.replace(
            self, documents=documents, heads=16, window=self.window // 16, topk=self.topk // (TOY // 2)
        )


RANK = Shape((131072,), ranks=8)
PUBLISHED = [Shape((8192,)), Shape((16384,)), Shape((6000, 3000, 4384, 3000))]
SMALL_CALL = Shape((1024,))  # where the definition is measured too
SHAPES = [*PUBLISHED, RANK, dataclasses.replace(RANK, picks=LOCAL), Shape((8192,), topk=0), SMALL_CALL]


@dataclass(frozen=True)
class Inputs:
    """Arguments of a call, and what it should return."""

    arguments: Arguments

    @functools.cached_property
    def expected(self) -> tuple[Tensor, ...]:
        """RESULTS by the definition, in fp32."""
        q, kv, out, grad_out, *rest = self.arguments
        return reference.backward(grad_out, q, kv, out, *rest, None, torch.float32)


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    """Normal q, kv, grad_out and sinks, and what the forward gives for them."""

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    q, grad_out = (normal(shape.queries, shape.heads, CHANNELS) for _ in range(2))
    kv, sinks = normal(shape.rows, CHANNELS), torch.randn(shape.heads, device=device)
    indices, scale = make_indices(shape, device), CHANNELS**-0.5
    out, lse = selfcheck.forward(q, kv, indices, sinks, scale)
    return Inputs(Arguments(q, kv, out, grad_out, lse, indices, sinks, scale))


def make_indices(shape: Shape, device: torch.device) -> Tensor:
    """int32 (queries, window + topk): the tokens of the window, ascending, then -1; the picks, best first, then -1."""
    drawn = {RANDOM: random_scores, LOCAL: lasting_scores}[shape.picks]
    found = []
    for d in shape.packed():
        token = torch.arange(d.first, d.tokens, device=device)
        window = (token - shape.window + 1).clamp_min(0)[:, None] + torch.arange(shape.window, device=device)
        window = torch.where(window <= token[:, None], window + d.token, -1)
        readable, entries = (token + 1) // RATIO, d.tokens // RATIO
        picks = best(readable, drawn(len(token), entries, device), min(shape.topk, entries))
        picks = torch.where(picks < 0, -1, picks + (shape.tokens + d.entry))
        picks = torch.nn.functional.pad(picks, (0, shape.topk - picks.shape[1]), value=-1)
        found.append(torch.cat([window, picks], dim=1).int())
    return torch.cat(found)


def random_scores(queries: int, entries: int, device: torch.device) -> Iterator[Tensor]:
    """(PART or fewer, entries): scores of all entries, 0 to 1, of some queries and then of the next; new for each."""
    for start in range(0, queries, PART):
        yield torch.rand(min(PART, queries - start), entries, device=device)


def lasting_scores(queries: int, entries: int, device: torch.device) -> Iterator[Tensor]:
    """As `random_scores`, but an entry keeps its score for PART queries, each entry from another query on.

    So two queries that are d apart share about 1 - d / PART of their picks, and from PART on what chance gives.
    """
    change = torch.randint(PART, (entries,), device=device)
    now, then = torch.rand(2, entries, device=device)
    for start in range(0, queries, PART):
        query = torch.arange(min(PART, queries - start), device=device)
        yield torch.where(query[:, None] < change, now, then)
        now, then = then, torch.rand(entries, device=device)


def best(readable: Tensor, scores: Iterator[Tensor], count: int) -> Tensor:
    """int64 (queries, count): entries of the best scores among the first `readable` ones, the best first, then -1."""
    found = readable.new_empty(len(readable), count)
    for part, to, some in zip(readable.split(PART), found.split(PART), scores, strict=True):
        entry = torch.arange(some.shape[1], device=some.device)
        values, chosen = some.masked_fill_(entry >= part[:, None], UNREADABLE).topk(count, dim=1)
        to.copy_(torch.where(values > UNREADABLE, chosen, -1))
    return found


def cases(device: torch.device, quick: bool) -> list[Case]:
    """All of SHAPES; on a CPU each at toy size, without cuDNN; `quick`: the published ones, without it too."""
    if device.type != "cuda":
        return [_case(shape.toy(), device, []) for shape in SHAPES]
    if quick:
        return [_case(shape, device, []) for shape in PUBLISHED]
    return [_case(shape, device, [*_cudnn(), *_definition(shape)]) for shape in SHAPES]


def _case(shape: Shape, device: torch.device, others: list[Candidate]) -> Case:
    return Case(
        label=shape.label,
        make=lambda: make_inputs(shape, device),
        candidates=(*_ours(), *others),
        verify=close,
        flops=shape.flops(),
    )


def _ours() -> list[Candidate]:
    name = "dsa_sparse_attn_bwd"
    ordered = functools.partial(prepare, deterministic=True)
    return [
        Candidate(name, prepare, ours=True),
        Candidate(f"{name}, deterministic", ordered, ours=True, verify=close_again),
    ]


def _cudnn() -> list[Candidate]:
    return [
        Candidate("cuDNN", lambda inputs: peers.cudnn(inputs.arguments, compact=False)),
        Candidate("cuDNN, compacted slots", lambda inputs: peers.cudnn(inputs.arguments, compact=True)),
    ]


def _definition(shape: Shape) -> list[Candidate]:
    return [Candidate("definition in PyTorch", prepare_definition, graph=False)] if shape == SMALL_CALL else []


def prepare_definition(inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """One call of the definition, in float64."""

    def call() -> tuple[Tensor, Tensor, Tensor]:
        with hopper_kernels.reference():
            return sparse_attn_backward_flat(*inputs.arguments)

    return call


def prepare(inputs: Inputs, deterministic: bool = False) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """One call."""
    return lambda: sparse_attn_backward_flat(*inputs.arguments, deterministic=deterministic)


def close(inputs: Inputs, outputs: tuple[Tensor, ...]) -> str:
    """All results within their bounds of the definition, as a whole and row by row, and zero where it is."""
    a = inputs.arguments
    whole, worst = {}, {}
    for name, found, like, expected in zip(RESULTS, outputs, (a.q, a.kv, a.sinks), inputs.expected, strict=True):
        facts, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (found, like))
        assert facts == wanted, f"{name} is {facts}, expected {wanted}"
        whole[name], worst[name], nonzero = errors(found, expected)
        assert not nonzero, f"{name}: {nonzero} rows that must be zero are not"
    report = f"relative errors: {_listed(whole)}; of the worst row: {_listed(worst)}"
    wrong = [name for name, bound in BOUNDS.items() if not (whole[name] <= bound and worst[name] <= ROW_BOUND)]
    assert not wrong, f"{', '.join(wrong)} too far from the definition; {report}"
    return report


def close_again(inputs: Inputs, outputs: tuple[Tensor, ...]) -> str:
    """As `close`, and the deterministic call returns the same bits again."""
    report = close(inputs, outputs)
    pairs = zip(RESULTS, outputs, prepare(inputs, deterministic=True)(), strict=True)
    different = [name for name, found, again in pairs if not torch.equal(found, again)]
    assert not different, f"{', '.join(different)} differ from one deterministic call to the next"
    return f"{report}; the same bits again"


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float, int]:
    """Relative errors (L2): of the tensor, and the largest of a row that is not small; NaN if one is NaN. And how many
    rows are not zero that should be."""
    pairs = (t.reshape(-1, t.shape[-1]).split(ROWS) for t in (actual, expected))
    squares = []
    for part, wanted in zip(*pairs, strict=True):
        wanted = wanted.double()
        squares.append(torch.stack([t.square().sum(dim=1) for t in (part.double() - wanted, wanted)]))
    error, size = torch.cat(squares, dim=1)
    large = size > SMALL**2 * size[size > 0].median()
    worst = (error[large] / size[large]).max()
    return (error.sum() / size.sum()).sqrt().item(), worst.sqrt().item(), int((error[size == 0] != 0).sum())


def _listed(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2e}" for name, value in values.items())


BENCH = Bench(
    name="dsa_sparse_attn_bwd",
    title="Backward of sparse attention: gradients of queries, latent rows and sinks",
    cases=cases,
    wheels=("hopper-kernels", "dsa-sparse-attn-bwd"),
    peers=("nvidia-cudnn-frontend", "nvidia-cutlass-dsl"),
)

if __name__ == "__main__":
    sys.exit(main(BENCH))
