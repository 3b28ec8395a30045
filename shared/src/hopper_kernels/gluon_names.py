"""Names of Gluon's TMA copies, barriers and views of memory, which changed between Triton 3.6 and 3.9.

Imports triton, so only kernels import it.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
tma_store_wait = tma.store_wait
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
reinterpret = getattr(_memory, "reinterpret", None) or _memory._reinterpret
"""(memory, dtype, shape, layout) -> the same bytes seen as such a tensor."""
