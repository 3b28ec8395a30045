"""What compute-sanitizer watches (CONTRIBUTING.md has the commands): every variant of the kernels, small ragged shapes.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1` gives each tensor memory of its own, so a byte beyond one is seen. All results are
then read in full, storage included, so initcheck sees a byte that was never written.
"""

import itertools

import fp8_dual_cast  # noqa: F401  registers the operators
import torch

from tests.fp8_dual_cast import inputs

SHAPES = [(1, 128), (4, 384), (127, 384), (130, 768), (257, 256)]
# head_dim and rope_dim: half a tile rotated or any channels, four pairs at a time or one by one.
ROTATIONS = [(128, 64), (128, 4), (64, 64), (256, 10)]


def main() -> None:
    """Run all calls on the current CUDA device and print their number."""
    torch.manual_seed(0)
    calls = 0
    for (tokens, channels), use_ue8m0 in itertools.product(SHAPES, (False, True)):
        wide = inputs.matrix(tokens, channels + 64).cuda()
        for x in (wide[:, :channels].contiguous(), wide[:, 8 : channels + 8], wide[:, 1 : channels + 1]):
            _read(torch.ops.fp8_dual_cast.row_cast(x, use_ue8m0))
            _read(torch.ops.fp8_dual_cast.column_cast(x, use_ue8m0))
            _read(torch.ops.fp8_dual_cast.dual_cast(x, use_ue8m0, None, None, 0, True))
            calls += 3
            for (head_dim, rope_dim), dtype in itertools.product(ROTATIONS, (torch.int32, torch.int64)):
                if channels % head_dim == 0:
                    table = inputs.cos_sin_cache(37, rope_dim).cuda()
                    positions = inputs.position_ids(tokens, 37, dtype).cuda()
                    _read(torch.ops.fp8_dual_cast.dual_cast(x, use_ue8m0, table, positions, head_dim, True))
                    calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, all results read")


def _read(results: tuple[torch.Tensor, ...]) -> None:
    for result in results:
        result.view(torch.uint8).sum()


if __name__ == "__main__":
    main()
