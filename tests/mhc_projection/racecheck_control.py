"""A control for compute-sanitizer's racecheck: a kernel of specialised warps that exchange nothing.

Racecheck reports a race between what Triton itself exchanges to start and to end the warps, so its reports on a kernel
of specialised warps say nothing. `projection_backward_kernel` is one; `test_compiled.py` looks at its barriers instead.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier


@gluon.jit
def _store(out, bars, value: gl.constexpr):
    gl.store(out + value, value)


@gluon.jit
def control_kernel(out):
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(bars.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize([(_store, (out, bars, 0)), (_store, (out, bars, 1))], [1], [24])


def main() -> None:
    """Launch it once; its two groups of warps write one number each."""
    out = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    control_kernel[(1,)](out, num_warps=4)
    assert out.tolist() == [0, 1]
    print("the control's results are right")


if __name__ == "__main__":
    main()
