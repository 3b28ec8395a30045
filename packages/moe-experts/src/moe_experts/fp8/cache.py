"""One layer's quantised weights, for the micro-batches between two changes of the weights."""

from hopper_kernels import checks
from torch import Tensor

from moe_experts.fp8 import ops

_NAMES = ("gate_proj", "up_proj", "down_proj")


class FP8WeightCache:
    """Keeps what `moe_experts_fp8_quantize_weights` made of a layer's weights until it is told to forget it.

    Whoever changes the weights calls `invalidate`: the trainer, after each step of the optimiser and each load of a
    checkpoint. Nothing is guessed. Under FSDP the same values come in other memory with every gather, and a gather into
    the same memory tells PyTorch nothing of it, so neither addresses nor versions of the tensors mean a change.

    Not for use inside torch.compile: call `get` outside, and give its tensors to the compiled function.
    """

    def __init__(self) -> None:
        self._facts: dict[str, tuple | None] = {}
        self._quantized: list[Tensor] | None = None

    def get(self, gate_proj: Tensor, up_proj: Tensor | None, down_proj: Tensor) -> list[Tensor]:
        """The eight tensors of `moe_experts_fp8_quantize_weights`, quantised by the first call after `invalidate`.

        Each call returns a new list of the same tensors, whatever the values of the weights are by now. ValueError for
        weights of another shape, dtype, device or packing than those of that first call, which raises as the function.
        """
        weights = dict(zip(_NAMES, (gate_proj, up_proj, down_proj), strict=True))
        if self._quantized is None:
            self._quantized = ops.moe_experts_fp8_quantize_weights(**weights)
            self._facts = {name: _facts(name, weight) for name, weight in weights.items()}
        else:
            for name, weight in weights.items():
                _compare(name, _facts(name, weight), self._facts[name])
        return list(self._quantized)

    def invalidate(self) -> None:
        """Forget the quantised weights: they have changed, or another layer's come next."""
        self._quantized = None


def _facts(name: str, weight: Tensor | None) -> tuple | None:
    """Shape, dtype and device; None for an up_proj that is None."""
    if name == "up_proj" and weight is None:
        return None
    checks.tensor(name, weight)
    return tuple(weight.shape), weight.dtype, weight.device


def _compare(name: str, found: tuple | None, cached: tuple | None) -> None:
    if found != cached:
        raise ValueError(
            f"{name} must be {_text(cached)}, as what this cache holds, got {_text(found)}: call invalidate() first"
        )


def _text(facts: tuple | None) -> str:
    if facts is None:
        return "None"
    shape, dtype, device = facts
    return f"{str(dtype).removeprefix('torch.')} of shape {shape} on {device}"
