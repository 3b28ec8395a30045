"""Checks of the Triton kernels under Triton's interpreter.

`TRITON_INTERPRET=1 python -m tests.fp8_dual_cast.interpreted` prints a JSON object: for each of CASES what failed, ""
if nothing did. The variable is read when triton is imported, hence a process of its own; test_interpreter.py starts it.
"""

import math

import torch
from fp8_dual_cast import launch, reference
from hopper_kernels import fp8
from torch import Tensor

from benches.peers import column_cast
from tests.fp8_dual_cast import inputs
from tests.fp8_dual_cast.edge_cases import EDGE_CASES, edge_case
from tests.support.compare import assert_same_bytes
from tests.support.interpreted import main
from tests.support.memory import guarded

NAN, INF = math.nan, math.inf
# Cases that are also run with power-of-two scales: those at the edges of what a scale can be.
SCALE_EDGES = {"below the floor", "largest", "maxima at 448", "one nan", "plus inf"}
SIZES = [(1, 128), (3, 384), (5, 128), (33, 256), (128, 128), (257, 128)]


def row_cast_into(x: Tensor, q: Tensor, sf: Tensor, use_ue8m0: bool) -> None:
    launch._row(x, q, sf, use_ue8m0).run()


def check_casts(x: Tensor, modes: tuple[bool, ...] = (False, True)) -> None:
    """The row kernel and the benches' transposed peer: the definition's bytes, padding too, nothing past the ends."""
    before = x.clone()
    for use_ue8m0 in modes:
        for make, cast_into, define in (
            (launch.row_results, row_cast_into, reference.row_cast),
            (launch.column_results, column_cast.cast_into, reference.column_cast),
        ):
            outputs = [guarded(tuple(t.shape), t.dtype) for t in make(x)]
            cast_into(launch._readable(x), *(output.tensor for output in outputs), use_ue8m0)
            for index, (output, expected) in enumerate(zip(outputs, define(before, use_ue8m0), strict=True)):
                assert_same_bytes(output.tensor, expected, f"{define.__name__} {index}, ue8m0={use_ue8m0}")
                output.check()
    assert_same_bytes(x, before, "x", strides=False)


def check_sizes() -> None:
    """Ragged ends; the rows behind the last one hold huge numbers that must reach no maximum."""
    for tokens, channels in SIZES:
        below = torch.full((tokens + 160, channels), 1e38).bfloat16()
        below[:tokens] = inputs.matrix(tokens, channels, seed=tokens)
        check_casts(below[:tokens])


def check_edge_values() -> None:
    for name in EDGE_CASES:
        check_casts(edge_case(name)[:, :128], (False, True) if name in SCALE_EDGES else (False,))


def check_strides() -> None:
    """Read in place or copied first: the pitch and the base that the kernels get are the right ones."""
    x = inputs.matrix(37, 256, seed=1)
    views = [restride(x) for restride in inputs.STRIDES.values()]
    views += [*inputs.broadcasts().values(), inputs.singleton(x), inputs.singleton(x, stride=0)]
    for view in views:
        check_casts(view, (False,))


def edge_maxima() -> Tensor:
    """fp32 maxima: denormals, around the floor, around 448 * 2**k, the largest, Inf, NaN, random ones of every size."""
    edges = [0.0, 1e-45, 1e-40, 1.1754942e-38, 1e-10, 448.0, torch.finfo(torch.float32).max, INF, NAN]
    around = torch.tensor([1e-10, *(448 * 2.0**k for k in range(-42, 119, 5))])
    around = torch.cat([(around.view(torch.int32) + step).view(torch.float32) for step in (-1, 0, 1)])
    bits = torch.randint(0x7F800000, (1400,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return torch.cat([torch.tensor(edges), around, bits.view(torch.float32)])


def run_scale(amax: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    from tests.fp8_dual_cast.twin_kernels import scale_kernel

    size = 1 << (len(amax) - 1).bit_length()
    padded = torch.zeros(size)
    padded[: len(amax)] = amax
    scale, inverse = torch.empty(size), torch.empty(size)
    scale_kernel[(1,)](padded, scale, inverse, N=size, UE8M0=ue8m0)
    return scale[: len(amax)], inverse[: len(amax)]


def check_scale_twins() -> None:
    """block_scale and reciprocal on edge values and on every bf16 magnitude."""
    for amax in (edge_maxima(), inputs.bf16(torch.arange(0x7F80)).float()):
        for ue8m0 in (False, True):
            scale, inverse = run_scale(amax, ue8m0)
            expected = fp8.scale(amax, ue8m0=ue8m0)
            assert_same_bytes(scale, expected, f"block_scale, ue8m0={ue8m0}")
            assert_same_bytes(inverse, 1 / expected, f"reciprocal, ue8m0={ue8m0}")


def check_quantize_twin() -> None:
    """Fractions of each maximum (what a block can hold beside it), ties, denormals, zeros, NaN, Inf."""
    from tests.fp8_dual_cast.twin_kernels import quantize_kernel

    amax = edge_maxima()
    for ue8m0 in (False, True):
        s = fp8.scale(amax, ue8m0=ue8m0)
        g = torch.Generator().manual_seed(2)
        fractions = torch.rand(len(amax), 16, generator=g) ** 8
        fractions[:, :2] = torch.tensor([1.0, -1.0])
        midpoints = torch.tensor(inputs.e4m3_midpoints())
        ties = midpoints[torch.randint(len(midpoints), (len(amax), 8), generator=g)] * s[:, None]
        ties = torch.cat([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(INF))], 1)
        ties = torch.where(ties.abs() <= amax[:, None], ties, 0.0)
        special = torch.tensor([0.0, -0.0, NAN, 1e-45, -1e-45, -1e-40, 1.1754942e-38])
        special = torch.where(special.abs() <= amax[:, None].nan_to_num(), special, -0.0)
        values = torch.cat([fractions * amax[:, None], ties, -ties, special], 1)
        scales = s[:, None].expand_as(values).contiguous()
        size = 1 << (values.numel() - 1).bit_length()
        v, padded = torch.zeros(size), torch.ones(size)
        v[: values.numel()], padded[: values.numel()] = values.flatten(), scales.flatten()
        q = torch.empty(size, dtype=torch.float8_e4m3fn)
        quantize_kernel[(1,)](v, padded, q, N=size)
        found = q[: values.numel()].view_as(values)
        assert_same_bytes(found, fp8.quantize(values, scales), f"quantize, ue8m0={ue8m0}")


CASES = {
    "sizes": check_sizes,
    "edge values": check_edge_values,
    "strides": check_strides,
    "scale twins": check_scale_twins,
    "quantize twin": check_quantize_twin,
}


if __name__ == "__main__":
    main(CASES)
