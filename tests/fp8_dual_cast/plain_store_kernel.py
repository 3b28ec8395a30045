"""The pattern of triton-lang/triton#11111 in plain Triton: one FP8 tile, stored as it is and transposed."""

# ruff: noqa: N803  (compile-time parameters are upper case)

import triton
import triton.language as tl


@triton.jit
def store_twice(x, plain, transposed, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(x + i * COLUMNS + j).to(tl.float8e4nv)
    tl.store(plain + i * COLUMNS + j, tile)
    tl.store(transposed + j * ROWS + i, tile)
