"""Special values, each put into a matrix of 131 x 256 so that it has ordinary neighbours and ragged ends.

A case is a function that edits the matrix in place; EDGE_CASES has them by name, `edge_case` makes the matrix.
"""

import math

import torch
from torch import Tensor

from tests.fp8_dual_cast import inputs

NAN, INF = math.nan, math.inf
BF16_MAX = torch.finfo(torch.bfloat16).max


def zero_row(x):
    x[5] = 0


def zero_column(x):
    x[:, 7] = 0


def zero_block(x):
    x[:128, :128] = 0


def zero_matrix(x):
    x.zero_()


def one_element(x):
    x.zero_()[130, 100] = -3


def negative_zeros(x):
    x[:, ::3] = -0.0
    x[9] = -0.0


def negative_zero_matrix(x):
    x.fill_(-0.0)


def below_the_floor(x):
    x.fill_(9e-11)[::2] *= -1
    x[3] = 1e-20


def bf16_denormals(x):
    x[:] = inputs.bf16(torch.arange(1, 129)).repeat(2).roll(1)
    x[::2] *= -1


def just_above_the_floor(x):
    x.fill_(1.1e-10)
    x[:, 1::2] = -5e-12


def largest(x):
    x[3, 4], x[3, 100], x[129, 4] = BF16_MAX, -BF16_MAX, BF16_MAX / 2


def ties(x):
    midpoints = torch.tensor([448.0, -448.0, *inputs.e4m3_midpoints()])
    x[:128] = midpoints.repeat(2)
    x[128:] = -midpoints.repeat(2)


def transposed_ties(x):
    x[:128] = torch.tensor([-448.0, 448.0, *inputs.e4m3_midpoints()])[:, None]
    x[128:] = 448


def underflow(x):
    x[:] = torch.tensor([448.0, 2.0**-10, -(2.0**-10), 2.0**-11, -(2.0**-11), 2.0**-9, -(2.0**-130), -0.0]).repeat(32)


def maxima_at_448(x):
    """448 * 2**k as the maxima of rows and of columns: exact scales in both modes."""
    x *= 2.0**-30
    k = torch.arange(131) % 100 - 30.0
    x[torch.arange(131), torch.arange(131)] = 448 * 2.0 ** k.bfloat16()


def one_nan(x):
    x[7, 9], x[129, 100] = NAN, -NAN


def nan_row(x):
    x[6] = NAN


def nan_column(x):
    x[:, 6] = NAN


def nan_block(x):
    x[:128, :128] = NAN


def plus_inf(x):
    x[5, 6] = INF


def minus_inf(x):
    x[130, 6] = -INF


def inf_beside_nan(x):
    x[5, 6], x[5, 8], x[9, 6], x[11, 6] = INF, NAN, NAN, -INF


def very_different_sizes(x):
    """Row t times 2**(t % 13 - 6), column c times 2**(c % 11 - 5)."""
    x *= (2.0 ** (torch.arange(131) % 13 - 6.0))[:, None].bfloat16() * (
        2.0 ** (torch.arange(256) % 11 - 5.0)
    ).bfloat16()


_EDITS = [
    zero_row,
    zero_column,
    zero_block,
    zero_matrix,
    one_element,
    negative_zeros,
    negative_zero_matrix,
    below_the_floor,
    bf16_denormals,
    just_above_the_floor,
    largest,
    ties,
    transposed_ties,
    underflow,
    maxima_at_448,
    one_nan,
    nan_row,
    nan_column,
    nan_block,
    plus_inf,
    minus_inf,
    inf_beside_nan,
    very_different_sizes,
]
EDGE_CASES = {edit.__name__.replace("_", " "): edit for edit in _EDITS}


def edge_case(name: str) -> Tensor:
    """A new matrix (131, 256) bf16 with the special values of the case."""
    x = inputs.repetitive(131, 256, seed=11)
    EDGE_CASES[name](x)
    return x
