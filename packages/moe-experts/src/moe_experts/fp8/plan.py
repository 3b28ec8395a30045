"""Host side of the FP8 kernels: which kernel with which tiles, grid and arguments. Nothing here allocates or launches.

Tensors of codes are e4m3fn, or their bytes where a kernel writes them. Rows are padded (see `layout`).
"""

from typing import TYPE_CHECKING

import torch
from hopper_kernels.launcher import Launch
from torch import Tensor

from moe_experts.plan import SMS, Groups, descriptor, empty_groups, ragged, strides

if TYPE_CHECKING:
    from hopper_kernels.precompile import Variant

BLOCK, COLUMNS, HALF, PANEL = 128, 256, 64, 64  # as in `kernels.tiles`
STAGES = 4
BF16, OVERWRITE, ADD = 0, 1, 2  # as in `kernels.weight_grad`
QUANTIZE = {"num_warps": 8, "maxnreg": 80}  # three programs an SM
PASS = {"num_warps": 16, "maxnreg": 64}  # two
BACKWARD = {"num_warps": 8, "maxnreg": 255}  # one


def quantize(x: Tensor, where: Groups, rows: tuple[Tensor, Tensor], panels: tuple[Tensor, Tensor] | None) -> Launch:
    """x (M, C) bf16 to rows (Mp, C) with scales (C / 128, Mp), and to panels with scales (Mp / 128, C)."""
    from moe_experts.fp8.kernels.quantize import quantize_kernel

    columns, padded = rows[1].shape
    to_panels = rows if panels is None else panels
    args = (x, *map(_bytes, rows), *map(_bytes, to_panels), where.tiles, where.starts.numel() - 1, columns, padded)
    options = {"PANELS": panels is not None, **QUANTIZE}
    return Launch(quantize_kernel, (columns * (padded // BLOCK),), args, options)


def quantize_weights(
    gate: Tensor, up: Tensor, out: tuple[Tensor, Tensor], turned: tuple[Tensor, Tensor] | None
) -> Launch:
    """Rows of gate and then of up to codes (E, R, C), and turned (E, C, R) if asked, with their scales."""
    from moe_experts.fp8.kernels.quantize import quantize_weights_kernel

    experts, rows, columns = out[1].shape
    pitches = (_rows_apart(t) for t in (gate, up))
    other = out if turned is None else turned
    args = (gate, up, *map(_bytes, out), *map(_bytes, other), rows, gate.shape[1] // BLOCK, columns, *pitches)
    return Launch(
        quantize_weights_kernel, (columns * rows * experts,), args, {"TURNED": turned is not None, **QUANTIZE}
    )


def swiglu(gate_up: Tensor, limit: float, where: Groups, h: tuple[Tensor, Tensor]) -> Launch:
    """gate_up (Mp, 2I) bf16 to h (Mp, I) with scales (I / 128, Mp)."""
    from moe_experts.fp8.kernels.swiglu import swiglu_kernel

    columns, padded = h[1].shape
    args = (gate_up, _bytes(h[0]), h[1], where.tiles, where.starts.numel() - 1, columns, padded, float(limit))
    return Launch(swiglu_kernel, (columns * (padded // BLOCK),), args, PASS)


def product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], where: Groups, out: Tensor, padded: bool) -> Launch:
    """out = a b^T of each row with its expert's b, in padded rows or in those of the caller."""
    from moe_experts.fp8.kernels.products import product_kernel

    experts, blocks, depth = b[1].shape
    args = (
        _codes(a[0], (HALF, BLOCK)),
        _codes(b[0], (1, COLUMNS, BLOCK)),
        ragged(out, PANEL),
        _scales(a[1], BLOCK),
        b[1],
        where.tiles,
        experts,
        -(-blocks // 2),
        depth,
        blocks,
    )
    return Launch(product_kernel, (SMS,), args, {"PADDED": padded, "STAGES": STAGES, "num_warps": 4})


def swiglu_backward(
    grad: Tensor,
    gate_up: Tensor,
    limit: float,
    where: Groups,
    rows: tuple[Tensor, Tensor],
    panels: tuple[Tensor, Tensor] | None,
    h_panels: tuple[Tensor, Tensor] | None,
) -> Launch:
    """Gradients of gate and up, in rows and in panels, and the SwiGLU in panels, from bf16 in padded rows."""
    from moe_experts.fp8.kernels.swiglu import swiglu_backward_kernel

    padded, inner = grad.shape
    kept = panels is not None
    to_panels, to_h = (panels, h_panels) if kept else (rows, rows)
    args = (
        grad,
        gate_up,
        *map(_bytes, rows),
        *map(_bytes, to_panels),
        *map(_bytes, to_h),
        where.tiles,
        where.starts.numel() - 1,
        inner // BLOCK,
        padded,
        float(limit),
    )
    programs = min(SMS, inner // BLOCK * (padded // BLOCK))
    return Launch(swiglu_backward_kernel, (programs,), args, {"PANELS": kept, **BACKWARD})


def weight_grad(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], where: Groups, first: int, outs: tuple[Tensor, ...], mode: int
) -> Launch:
    """a^T b over each expert's rows: channels of a from `first` on, in BF16 to one result after the other."""
    from moe_experts.fp8.kernels.weight_grad import weight_grad_kernel

    experts, columns = outs[0].shape[0], outs[0].shape[2]
    height = sum(out.shape[1] for out in outs) // BLOCK
    width = -(-columns // COLUMNS)
    if mode == BF16:
        targets = [descriptor(t, (1, HALF, PANEL)) for t in (outs[0], outs[-1])]
        pitches = 0, 0
    else:
        targets = [outs[0], outs[0]]
        pitches = outs[0].stride(1) // 4, outs[0].stride(0) // 4
    args = (
        _codes(a[0], (1, HALF, BLOCK)),
        _codes(b[0], (1, COLUMNS, BLOCK)),
        _scales(a[1], BLOCK),
        _scales(b[1], COLUMNS),
        *targets,
        where.blocks,
        experts * height * width,
        height,
        width,
        first // BLOCK,
        outs[0].shape[1] // BLOCK,
        columns,
        *pitches,
    )
    return Launch(weight_grad_kernel, (SMS,), args, {"MODE": mode, "STAGES": STAGES, "num_warps": 4})


def _bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t


def _rows_apart(t: Tensor) -> int:
    return t.stride(0) // t.shape[2] if t.shape[0] > 1 else t.shape[1]


def _codes(t: Tensor, block: tuple[int, ...]):
    return _described(t, block, 128, 8)


def _scales(t: Tensor, columns: int):
    return _described(t, (1, columns), 0, 32)


def _described(t: Tensor, block: tuple[int, ...], swizzle: int, bits: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=len(block))
    return TensorDescriptor(t, list(t.shape), strides(t), list(block), layout)


def variants() -> "list[Variant]":
    """What `hopper_kernels.precompile` compiles: all there is."""
    from hopper_kernels.models import V41_FLASH
    from hopper_kernels.precompile import Variant

    hidden, inner, experts, rows = V41_FLASH.hidden, V41_FLASH.moe_intermediate, 4, 1024

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def codes(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.float8_e4m3fn)

    def of_rows(channels: int) -> tuple[Tensor, Tensor]:
        return codes(rows, channels), meta(channels // BLOCK, rows, dtype=torch.float32)

    def panels(channels: int) -> tuple[Tensor, Tensor]:
        return codes(rows // BLOCK, channels, BLOCK), meta(rows // BLOCK, channels, dtype=torch.float32)

    def weight(height: int, width: int) -> tuple[Tensor, Tensor]:
        return codes(experts, height, width), meta(experts, height // BLOCK, width // BLOCK, dtype=torch.float32)

    where = empty_groups(meta(experts, dtype=torch.int32), rows)
    x, half = meta(rows, hidden), meta(experts, inner, hidden)
    w13, w13_t = weight(2 * inner, hidden), weight(hidden, 2 * inner)
    launches = {
        "quantize[rows]": quantize(x, where, of_rows(hidden), None),
        "quantize[rows,panels]": quantize(x, where, of_rows(hidden), panels(hidden)),
        "quantize_weights": quantize_weights(half, half, w13, None),
        "quantize_weights[turned]": quantize_weights(half, half, w13, w13_t),
        "swiglu": swiglu(meta(rows, 2 * inner), 10.0, where, of_rows(inner)),
        "swiglu_backward[rows]": swiglu_backward(
            meta(rows, inner), meta(rows, 2 * inner), 10.0, where, of_rows(2 * inner), None, None
        ),
        "swiglu_backward[rows,panels]": swiglu_backward(
            meta(rows, inner), meta(rows, 2 * inner), 10.0, where, of_rows(2 * inner), panels(2 * inner), panels(inner)
        ),
    }
    products = {
        f"product[{name}]": product(of_rows(inner), weight(hidden, inner), where, x, padded)
        for name, padded in (("padded", True), ("ragged", False))
    }
    products |= {
        f"weight_grad[{name}]": weight_grad(
            panels(2 * inner),
            panels(hidden),
            where,
            0,
            (meta(experts, 2 * inner, hidden, dtype=torch.bfloat16 if mode == BF16 else torch.float32),),
            mode,
        )
        for name, mode in (("bf16", BF16), ("overwrite", OVERWRITE), ("add", ADD))
    }
    found = [Variant(f"fp8_{name}", launch.compile, ("F2FP",)) for name, launch in launches.items()]
    return found + [Variant(f"fp8_{name}", one.compile, ("QGMMA", "UTMALDG")) for name, one in products.items()]
