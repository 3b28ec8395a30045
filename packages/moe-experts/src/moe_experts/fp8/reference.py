"""The definition of every operator of the FP8 path, in plain PyTorch: what a CPU runs, and what the kernels must match.

Operands are quantised to e4m3 by `hopper_kernels.fp8`, with scales that a NaN reaches:
    q1(t)  the rows of t in groups of 128 channels, MOE_ROWS
    qc(t)  the channels of t in groups of 128 rows of one expert, MOE_COLUMNS; rows that pad a group count as zeros
    qb(w)  blocks of 128 x 128 of a weight, MOE_WEIGHTS
each standing for its values, code times scale. Products and sums of values are formed in float64, and rounded to fp32
and, where the functions say bf(), then to bf16. h, dG and dU are formed in float64 from the bf16 G, U and dH by the
formulas of `moe_experts.reference`, rounded to fp32 once, and quantised from that, along rows and along columns.

Layouts are those of `layout`. Here everything that is unspecified is zeros. A row's results depend on other rows only
where the last bit of a float64 sum changes a rounding to fp32 and, for bf16, that one to bf16. The functions take and
return what those of the same names in `launch` do.
"""

import torch
from hopper_kernels import fp8
from torch import Tensor

from moe_experts.fp8 import layout
from moe_experts.fp8.layout import FP8_GROUP
from moe_experts.reference import rounded, swiglu, swiglu_backward

Columns = tuple[Tensor, Tensor]
"""A transposed operand, flat codes and their scales."""


def quantize_weights(
    gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor, transposed: bool = True
) -> tuple[Tensor, ...]:
    """qb() of the weights, and the transposes of that.

    gate_proj, up_proj (E, I, H), or both (E, 2I, H) with up_proj None; down_proj (E, H, I); bf16.
    Returns codes and scales of [gate; up] (E, 2I, H) and of down_proj, then of the transposes (E, H, 2I) and
    (E, I, H), or (0,) each if not `transposed`: w13_q, w13_sf, w2_q, w2_sf, w13_t, w13_t_sf, w2_t, w2_t_sf.
    """
    gate_up = gate_proj if up_proj is None else _side_by_side(gate_proj, up_proj)
    quantized = *fp8.per_block(gate_up, floor_on="amax"), *fp8.per_block(down_proj, floor_on="amax")
    if not transposed:
        return *quantized, *(t.new_empty(0) for t in quantized)
    # Cloned, since the transpose of few scales may be contiguous as it is.
    return *quantized, *(t.mT.clone(memory_format=torch.contiguous_format) for t in quantized)


def forward(
    x: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
    w13_q: Tensor,
    w13_sf: Tensor,
    w2_q: Tensor,
    w2_sf: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts' MLPs.

    x (M, H) bf16; the weights as `quantize_weights` returns them. With X an expert's rows and W13, W2 its weights,
        [G|U] = bf(q1(X) W13^T),  out = bf(q1(h) W2^T)
    Returns out (M, H), gate_up = [G|U] (Mp, 2I), and qc(x) as x_t and x_t_sf; (0,) each but out if not `keep`.
    """
    experts, hidden, inner = w2_q.shape
    padded = layout.padded_rows(x.shape[0], experts)
    out = x.new_zeros(x.shape)
    gate_up = x.new_zeros((padded, 2 * inner) if keep else (0,))
    columns = layout.new_columns(x, padded, hidden, keep)
    for expert, rows, blocks in layout.groups(num_tokens_per_expert, x.shape[0]):
        found = _product(x[rows], w13_q[expert], w13_sf[expert])
        h = swiglu(*found.chunk(2, dim=1), swiglu_limit, torch.float32)
        out[rows] = _product(h, w2_q[expert], w2_sf[expert])
        if keep:
            gate_up[layout.padded(rows, blocks)] = found
            _put_columns(columns, blocks, x[rows])
    return out, gate_up, *columns


def backward_data(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
    need_x: bool = True,
    need_columns: bool = True,
) -> tuple[Tensor, ...]:
    """Gradient of x, and what `weight_grad_accumulate` multiplies, from that of out.

    With D the rows of dout (M, H), and gate_up and the transposed weights as they were returned,
        dH = bf(q1(D) W2),  dX = bf(q1([dG|dU]) W13)
    Returns dx (M, H), and qc() of dout, h and [dG|dU] as dout_t, dout_t_sf, h_t, h_t_sf, dgu_t, dgu_t_sf; (0,) what is
    not needed.
    """
    experts, inner, hidden = w2_t.shape
    padded = layout.padded_rows(dout.shape[0], experts)
    dx = dout.new_zeros(dout.shape if need_x else (0,))
    columns = [layout.new_columns(dout, padded, channels, need_columns) for channels in (hidden, inner, 2 * inner)]
    for expert, rows, blocks in layout.groups(num_tokens_per_expert, dout.shape[0]):
        dh = _product(dout[rows], w2_t[expert], w2_t_sf[expert])
        gate, up = gate_up[layout.padded(rows, blocks)].chunk(2, dim=1)
        h = swiglu(gate, up, swiglu_limit, torch.float32)
        dgate_dup = _side_by_side(*swiglu_backward(dh, gate, up, swiglu_limit, torch.float32))
        if need_x:
            dx[rows] = _product(dgate_dup, w13_t[expert], w13_t_sf[expert])
        if need_columns:
            for place, values in zip(columns, (dout[rows], h, dgate_dup), strict=True):
                _put_columns(place, blocks, values)
    return dx, *(t for pair in columns for t in pair)


def backward(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
    packed: bool,
    need_x: bool = True,
    need_gate: bool = True,
    need_up: bool = True,
    need_down: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward_data`, then the gradients of the weights, rounded to bf16.

    Returns dx (M, H), dw1 (E, I, H), dw3 (E, I, H) and dw2 (E, H, I), or dw1 (E, 2I, H) of both and dw3 (0,) if packed.
    What is not needed is (0,); for a packed weight need_gate alone decides. An expert without rows has zeros.
    """
    experts, inner, hidden = w2_t.shape
    weights = w13_t, w13_t_sf, w2_t, w2_t_sf
    need_up = need_up and not packed
    needs = need_x, need_gate or need_up or need_down
    dx, *operands = backward_data(dout, num_tokens_per_expert, gate_up, *weights, swiglu_limit, *needs)
    dw1 = dout.new_zeros((experts, 2 * inner if packed else inner, hidden) if need_gate else (0,))
    dw3 = dout.new_zeros((experts, inner, hidden) if need_up else (0,))
    dw2 = dout.new_zeros((experts, hidden, inner) if need_down else (0,))
    d_columns, h_columns, dgu_columns = zip(operands[::2], operands[1::2], strict=True)
    gate, up = slice(0, inner), slice(inner, 2 * inner)
    for expert, _, blocks in layout.groups(num_tokens_per_expert, dout.shape[0]):
        if need_gate:
            dw1[expert, gate] = _sum_over_rows(dgu_columns, (x_t, x_t_sf), blocks, gate)
        if need_gate and packed:
            dw1[expert, up] = _sum_over_rows(dgu_columns, (x_t, x_t_sf), blocks, up)
        if need_up:
            dw3[expert] = _sum_over_rows(dgu_columns, (x_t, x_t_sf), blocks, up)
        if need_down:
            dw2[expert] = _sum_over_rows(d_columns, h_columns, blocks)
    return dx, dw1, dw3, dw2


def backward_accumulate(
    dout: Tensor,
    num_tokens_per_expert: Tensor,
    gate_up: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    w13_t: Tensor,
    w13_t_sf: Tensor,
    w2_t: Tensor,
    w2_t_sf: Tensor,
    swiglu_limit: float,
    dw13: Tensor,
    dw2: Tensor,
    accumulate: bool,
) -> Tensor:
    """`backward_data`, then `weight_grad_accumulate`: dx."""
    weights = w13_t, w13_t_sf, w2_t, w2_t_sf
    dx, *operands = backward_data(dout, num_tokens_per_expert, gate_up, *weights, swiglu_limit)
    rows = dout.shape[0]
    weight_grad_accumulate(num_tokens_per_expert, *operands, x_t, x_t_sf, rows, dw13, dw2, accumulate)
    return dx


def weight_grad_accumulate(
    num_tokens_per_expert: Tensor,
    dout_t: Tensor,
    dout_t_sf: Tensor,
    h_t: Tensor,
    h_t_sf: Tensor,
    dgu_t: Tensor,
    dgu_t_sf: Tensor,
    x_t: Tensor,
    x_t_sf: Tensor,
    num_rows: int,
    dw13: Tensor,
    dw2: Tensor,
    accumulate: bool,
) -> None:
    """Gradients of the weights into fp32 buffers, from the results of `backward_data` and x_t of `forward`.

        dW13 = qc([dG|dU])^T qc(x),  dW2 = qc(D)^T qc(h)
    in fp32. Adds them to dw13 (E, 2I, H) and dw2 (E, H, I), RN(old + new), and leaves experts without rows alone; or
    overwrites all, those with zeros, if not `accumulate`.
    """
    inner = dw2.shape[2]
    groups = list(layout.groups(num_tokens_per_expert, num_rows))
    if not accumulate:
        dw13.zero_()
        dw2.zero_()
    for expert, _, blocks in groups:
        for part in (slice(0, inner), slice(inner, 2 * inner)):
            found = _sum_over_rows((dgu_t, dgu_t_sf), (x_t, x_t_sf), blocks, part)
            _store(found, dw13[expert, part], accumulate)
        _store(_sum_over_rows((dout_t, dout_t_sf), (h_t, h_t_sf), blocks), dw2[expert], accumulate)


def _side_by_side(first: Tensor, second: Tensor) -> Tensor:
    """[first; second] along their second axis. Unlike torch.cat, autocast leaves it alone."""
    found = first.new_empty((first.shape[0], 2 * first.shape[1], *first.shape[2:]))
    found[:, : first.shape[1]], found[:, first.shape[1] :] = first, second
    return found


def _product(t: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """bf(q1(t) W^T) of a weight W (N, K) that is given by its codes and scales; t (n, K) bf16 or fp32."""
    rows, row_scales = fp8.per_token(t, recipe=fp8.MOE_ROWS)
    values = rows.double() * _along(row_scales, 1)
    weight = codes.double() * _along(_along(scales, 0), 1)
    return rounded(values @ weight.t(), torch.bfloat16)


def _along(scales: Tensor, dim: int) -> Tensor:
    """`scales` in float64, each repeated for its group along `dim`."""
    return scales.double().repeat_interleave(FP8_GROUP, dim)


def _sum_over_rows(left: Columns, right: Columns, blocks: slice, part: slice = slice(None)) -> Tensor:
    """The sum over the rows of these blocks of left^T right, fp32, for the channels `part` of left."""
    return (_column_values(*left, blocks, part) @ _column_values(*right, blocks).t()).float()


def _column_values(codes: Tensor, scales: Tensor, blocks: slice, part: slice = slice(None)) -> Tensor:
    """What the panels of these blocks stand for, of the channels `part`: (channels, rows) in float64."""
    values = layout.panels(codes, scales)[blocks, part].double() * scales[blocks, part].double().unsqueeze(-1)
    return values.transpose(0, 1).flatten(1)


def _put_columns(columns: Columns, blocks: slice, values: Tensor) -> None:
    """Quantises an expert's rows, (n, C) bf16 or fp32, along its columns into its panels."""
    codes, scales = fp8.per_token_transposed(values, recipe=fp8.MOE_COLUMNS)
    layout.panels(*columns)[blocks] = codes.unflatten(1, (-1, FP8_GROUP)).transpose(0, 1)
    columns[1][blocks] = scales.t()


def _store(found: Tensor, place: Tensor, accumulate: bool) -> None:
    place.copy_(place + found if accumulate else found)
