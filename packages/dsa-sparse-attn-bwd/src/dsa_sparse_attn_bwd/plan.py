"""Plan of the kernels: grids and arguments of each launch, workspace, and what is compiled ahead."""

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from hopper_kernels.launcher import Launch
from torch import Tensor

from dsa_sparse_attn_bwd.arguments import CHANNELS

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

SMS = 132  # of an H100 or H200
TILE = 64  # slots, and heads, that are multiplied together
PANEL = 64  # channels of a swizzled tile
SCRATCH = 64  # rows of the sums that take what empty slots add
ROUNDS = 4  # see `kernels.gradients`
REGISTERS = (192, 120)  # a thread: of the second warpgroup that adds gradients, and of the one that computes scores
PARTS = 2**30  # bytes, about, of the shares of the gradient of rows that are kept to be added in order
FINISH_ROWS, ADD_ROWS = 16, 8
LOG2_E = 1.4426950408889634


class Queries(NamedTuple):
    """Queries and what is computed of them: q, grad_out, out (S, H, 512) and tail (S, H, R) or None, R whole panels,
    bf16; slots (S, pitch) and counts (S,) int32; and, all (S, H) fp32, logs, deltas and shares of the sinks' gradient.
    """

    q: Tensor
    grad_out: Tensor
    out: Tensor
    tail: Tensor | None
    slots: Tensor
    counts: Tensor
    logs: Tensor
    deltas: Tensor
    shares: Tensor

    def part(self, which: slice) -> "Queries":
        """Some of them."""
        return Queries(*(None if t is None else t[which] for t in self))

    @property
    def late_deltas(self) -> bool:
        """Long lists have delta computed next to the products, a panel of channels with each tile. That of a short one
        would have to wait for them."""
        return self.slots.shape[1] >= CHANNELS // PANEL * TILE


def pitch(slots: int) -> int:
    """From a query's slots to the next query's: whole tiles."""
    return -(-slots // TILE) * TILE


def queries_at_a_time(slots: int, heads: int) -> int:
    """Of which the shares of the rows' gradients are kept together: a multiple of what runs at a time."""
    parts = max(1, heads // TILE)
    return max(1, PARTS // (SMS * pitch(slots) * parts * CHANNELS * 4)) * SMS


def prepare(of: Queries, lse: Tensor, sinks: Tensor, indices: Tensor, rows: int) -> Launch:
    """Slots, counts and logs of all queries, and unless these come late, deltas and shares."""
    from dsa_sparse_attn_bwd.kernels.passes import prepare_kernel

    queries, heads, _ = of.q.shape
    width, pitch = indices.shape[1], of.slots.shape[1]
    tail = of.out if of.tail is None else of.tail
    args = (of.grad_out, of.out, tail, lse, sinks, indices, *of[4:], width, rows, pitch)
    options = {
        "HEADS": heads,
        "TAIL": 0 if of.tail is None or of.late_deltas else tail.shape[2],
        "DELTAS": not of.late_deltas,
        "SLOTS": min(1024, max(64, 1 << (width - 1).bit_length())),
        "num_warps": 4,
    }
    return Launch(prepare_kernel, (queries,), args, options)


def gradients(of: Queries, kv: Tensor, sm_scale: float, dq: Tensor, sums: Tensor, ordered: bool) -> Launch:
    """dq (S, H, 512) bf16, and the gradients of rows: added to sums (N + 64, 512) fp32, or ordered, stored as parts.

    Parts are (S * pitch + 64, 512) fp32 for each 64 heads, one for each slot.
    """
    from dsa_sparse_attn_bwd.kernels.gradients import gradients_kernel

    queries, heads, _ = of.q.shape
    tail = of.tail if of.late_deltas and of.tail is not None else of.out
    items = queries * max(1, heads // TILE)
    args = (
        _descriptor(of.q),
        _descriptor(of.grad_out),
        _descriptor(of.out),
        _descriptor(tail),
        kv,
        of.slots,
        of.counts,
        of.logs,
        of.deltas,
        of.shares,
        dq,
        sums,
        sm_scale * LOG2_E,
        sm_scale,
        items,
        of.slots.shape[1],
        sums.shape[0] - SCRATCH,
        ROUNDS,
    )
    options = {
        "HEADS": heads,
        "TAIL": 0 if tail is of.out else tail.shape[2],
        "DELTAS": of.late_deltas,
        "ORDERED": ordered,
        "REGISTERS": REGISTERS,
        "num_warps": 4,
    }
    return Launch(gradients_kernel, (min(SMS, items),), args, options)


def add(parts: Tensor, order: Tensor, starts: Tensor, sums: Tensor) -> Launch:
    """Parts of each row, in the order given, to sums. order int64, starts (N + 1,) int64."""
    from dsa_sparse_attn_bwd.kernels.passes import add_kernel

    rows = starts.shape[0] - 1
    return Launch(add_kernel, (rows,), (parts, order, starts, sums), {"ROWS": ADD_ROWS, "num_warps": 4})


def finish(sums: Tensor, dkv: Tensor) -> Launch:
    """The gradients of rows in bf16."""
    from dsa_sparse_attn_bwd.kernels.passes import finish_kernel

    rows = dkv.shape[0]
    grid = (-(-rows // FINISH_ROWS),)
    return Launch(finish_kernel, grid, (sums, dkv, rows), {"ROWS": FINISH_ROWS, "num_warps": 4})


def _descriptor(t: Tensor):
    """A TMA descriptor of (S, H, 512), for tiles of one query, 64 heads and 64 channels."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, heads, channels = t.shape  # and not its strides, of which that of a single query may be odd
    return TensorDescriptor(t, list(t.shape), [heads * channels, channels, 1], [1, TILE, PANEL], _layout())


@functools.cache
def _layout():
    from triton.experimental.gluon import language as gl

    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: V4.1's heads, slots and tail. Other sizes compile when first met."""
    from hopper_kernels.models import V41_FLASH
    from hopper_kernels.precompile import Variant

    queries, rows, heads = 1024, 1536, V41_FLASH.heads

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bf16, number = functools.partial(meta, dtype=torch.bfloat16), functools.partial(meta, dtype=torch.int32)
    q, kv = bf16(queries, heads, CHANNELS), bf16(rows, CHANNELS)
    sums, of_heads = meta(rows + SCRATCH, CHANNELS), meta(queries, heads)
    whole = 2**16
    found = [
        Variant("finish", finish(sums, kv).compile),
        Variant("add", add(sums, meta(whole, dtype=torch.int64), meta(rows + 1, dtype=torch.int64), sums).compile),
    ]
    for slots in (V41_FLASH.window, V41_FLASH.window + V41_FLASH.index_topk):
        for size in (0, V41_FLASH.rope_dim):
            tail = bf16(queries, heads, size) if size else None
            of = Queries(q, q, q, tail, number(queries, pitch(slots)), number(queries), *[of_heads] * 3)
            label = f"[slots={slots}, tail={size}]"
            if not (of.late_deltas and size):
                launch = prepare(of, of_heads, meta(heads), number(queries, slots), rows)
                found.append(Variant("prepare" + label, launch.compile))
            if of.late_deltas or not size:
                for ordered in (False, True):
                    launch = gradients(of, kv, 0.04, q, sums, ordered)
                    used = ("HGMMA", "UTMALDG", "LDGSTS")
                    found.append(Variant(f"gradients{label[:-1]}, ordered={int(ordered)}]", launch.compile, used))
    return found
