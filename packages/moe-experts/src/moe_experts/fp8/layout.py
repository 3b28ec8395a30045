"""How what the FP8 path keeps and hands over lies in memory: padded rows, and panels of transposed operands.

**Padded rows.** Each expert's rows are padded to whole blocks of 128. With B_e the number of blocks of the experts
before e, the sum of ceil(n_i / 128), its row r is the padded row 128 B_e + r. There are Mp = `padded_rows(M, E)` of
them, whatever the sizes of the groups, so that no shape depends on these. `gate_up` (Mp, 2I), G and then U, is in
padded rows; those that pad a group are the product of zeros with the expert's weights, and what comes behind the last
block is unspecified.

**Panels.** An operand of a weight gradient is quantised along the rows, and stored so that the rows of a block are
contiguous. Of a tensor with C channels it is a flat tensor of Mp C codes (e4m3fn). Viewed as (Mp / 128, C, 128),
element [b, c, r] is the code of the padded row 128 b + r in channel c. Its scales (Mp / 128, C) fp32 are those of the
last axis. A panel is what a step of a sum over rows reads, 128 rows of all channels; and where it stands depends on
nothing but the number of its block. DeepGEMM's order is another one, (C, rows of the expert padded to 128) for each
expert; the scales' is the same. Codes of the rows that pad a group are 0, or NaN in a channel whose scale is NaN;
panels behind the last block, and their scales, are unspecified.
"""

from collections.abc import Iterator

import torch
from hopper_kernels.fp8 import BLOCK, ceil_div
from torch import Tensor

from moe_experts import arguments

FP8_GROUP = BLOCK
"""Rows, columns, and edge of a block of a weight, that share a scale in the FP8 path."""
CODES = torch.float8_e4m3fn


def padded_rows(num_rows: int, num_experts: int) -> int:
    """Mp = (ceil(num_rows / 128) + num_experts) * 128: enough for M rows in any groups. Takes SymInts."""
    return (ceil_div(num_rows, FP8_GROUP) + num_experts) * FP8_GROUP


def scales_of_blocks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a weight (E, R, C), in blocks of 128 x 128: (E, R / 128, C / 128)."""
    experts, rows, columns = shape
    return experts, rows // FP8_GROUP, columns // FP8_GROUP


def transposed_shapes(padded: int, channels: int) -> tuple[tuple[int], tuple[int, int]]:
    """Shapes of the flat panels, and of their scales, of a tensor with so many padded rows and channels."""
    return (padded * channels,), (padded // FP8_GROUP, channels)


def new_columns(like: Tensor, padded: int, channels: int, needed: bool = True) -> tuple[Tensor, Tensor]:
    """Zeros for the flat panels and the scales of such a tensor, on the device of `like`; (0,) if not `needed`."""
    codes, scales = transposed_shapes(padded, channels) if needed else ((0,), (0,))
    return like.new_zeros(codes, dtype=CODES), like.new_zeros(scales, dtype=torch.float32)


def panels(codes: Tensor, scales: Tensor) -> Tensor:
    """The flat `codes` of a transposed operand as panels (Mp / 128, C, 128), a view; `scales` are (Mp / 128, C)."""
    return codes.view(*scales.shape, FP8_GROUP)


def groups(num_tokens_per_expert: Tensor, rows: int) -> Iterator[tuple[int, slice, slice]]:
    """Each expert that has rows, with its rows and its blocks. Checks and waits as `arguments.group_sizes`."""
    start = 0
    for expert, part in arguments.groups(num_tokens_per_expert, rows):
        end = start + ceil_div(part.stop - part.start, FP8_GROUP)
        yield expert, part, slice(start, end)
        start = end


def padded(rows: slice, blocks: slice) -> slice:
    """The padded rows of an expert's rows, without those that pad its last block."""
    start = blocks.start * FP8_GROUP
    return slice(start, start + rows.stop - rows.start)
