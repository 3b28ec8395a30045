"""Inputs of the tests: matrices, rotation tables, and one matrix under every kind of strides."""

import torch
from torch import Tensor


def bf16(bits) -> Tensor:
    """The bf16 values of these bit patterns."""
    return torch.as_tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def matrix(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """Normal numbers in rows of very different size (1e-4 to 1e4), so that no two scales are alike."""
    g = torch.Generator().manual_seed(seed)
    size = 10 ** torch.empty(tokens, 1).uniform_(-4, 4, generator=g)
    return (torch.randn(tokens, channels, generator=g) * size).bfloat16()


def repetitive(tokens: int, channels: int, seed: int = 0) -> Tensor:
    """As `matrix`, but made of 48 distinct values only: exact arithmetic on it is quick."""
    g = torch.Generator().manual_seed(seed)
    values = (torch.randn(48, generator=g) * 10 ** torch.empty(48).uniform_(-3, 3, generator=g)).bfloat16()
    # The large ones are rare, otherwise they would be the maximum of every block.
    share = 1 / (1 + values.float().abs()) ** 2
    return values[torch.multinomial(share, max(tokens * channels, 1), replacement=True, generator=g)][
        : tokens * channels
    ].reshape(tokens, channels)


def e4m3_midpoints() -> list[float]:
    """The 126 ties between neighbouring e4m3 magnitudes, the denormal ones first."""
    v = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return ((v[1:] + v[:-1]) / 2).tolist()


def cos_sin_cache(max_pos: int, rope_dim: int, factor: float = 1.0) -> Tensor:
    """A table (max_pos, rope_dim) as models have it, base 10 000; row 0 is cosine 1, sine 0."""
    frequency = 10_000 ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)
    angle = torch.arange(max_pos, dtype=torch.float64)[:, None] * frequency
    return (torch.cat((angle.cos(), angle.sin()), dim=1) * factor).float()


def position_ids(tokens: int, max_pos: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """Unsorted positions with repetitions, 0 and the last one among them."""
    ids = torch.randint(max_pos, (tokens,), generator=torch.Generator().manual_seed(seed))
    ids[: min(4, tokens)] = torch.tensor([max_pos - 1, 0, 3, 3])[:tokens] % max_pos
    return ids.to(dtype)


def _inside(x: Tensor, rows: int, left: int, right: int, step: int = 1) -> Tensor:
    """The values of x as a slice of a wider matrix, every `step`-th row from row `rows` on; NaN around it."""
    tokens, channels = x.shape
    wide = x.new_full((rows + step * tokens + 1, left + channels + right), float("nan"))
    view = wide[rows : rows + step * tokens : step, left : left + channels]
    view.copy_(x)
    return view


def _misaligned(x: Tensor) -> Tensor:
    flat = x.new_empty(x.numel() + 1)
    return flat[1:].view_as(x).copy_(x)


# Each takes a contiguous matrix and returns the same values with other strides.
STRIDES = {
    "contiguous": lambda x: x.clone(),
    "aligned column slice": lambda x: _inside(x, 1, 8, 16),
    "unaligned column slice": lambda x: _inside(x, 1, 3, 5),
    "slice with an odd pitch": lambda x: _inside(x, 0, 0, 1),
    "every second row": lambda x: _inside(x, 1, 0, 0, step=2),
    "base off by one element": _misaligned,
    "column-major": lambda x: x.t().contiguous().t(),
    "every second channel": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


def singleton(x: Tensor, stride: int = 977) -> Tensor:
    """The first row of x as (1, C) with a stride on the first axis that means nothing."""
    return x.as_strided((1, x.shape[1]), (stride, 1))


def broadcasts() -> dict[str, Tensor]:
    """Matrices with strides 0, as the gradient of a sum has them."""
    return {
        "one value": torch.tensor(-1.5).bfloat16().expand(9, 128),
        "one row": matrix(1, 256, seed=5).expand(130, 256),
        "one column": matrix(130, 1, seed=6).expand(130, 256),
    }
