"""What `hopper-kernels check` runs: the public function against the definition, byte for byte."""

from functools import partial

import torch
from hopper_kernels import fp8, models
from hopper_kernels.selfcheck import Case, differing_bytes
from torch import Tensor

from fp8_dual_cast import ops, reference

SEED = 20260
_NO_DIFFERENCE = {"q": 0.0, "sf": 0.0, "q_t": 0.0, "sf_t": 0.0}


def cases(device: torch.device) -> list[Case]:
    """Toy matrices on a CPU; the gradients of V4.1 Flash's linear layers, in 8,192 tokens, on a GPU."""
    flash = models.V41_FLASH
    if device.type == "cpu":
        plain, rotated = [(300, 384)], (130, 4, 128, 64)
    else:
        plain = [(8192, flash.hidden), (8192, flash.q_lora_rank), (1000, flash.moe_intermediate)]
        rotated = (2048, flash.heads, flash.head_dim, flash.rope_dim)
    found = [_plain(*size, ue8m0, device) for size in plain for ue8m0 in (False, True)]
    return [*found, _rotated(*rotated, device)]


def _plain(tokens: int, channels: int, ue8m0: bool, device: torch.device) -> Case:
    return Case(
        label=f"{tokens} x {channels}{', power-of-two scales' if ue8m0 else ''}",
        make=lambda: (_matrix(tokens, channels, device),),
        run=lambda x: ops.fp8_dual_cast(x, use_ue8m0=ue8m0)._asdict(),
        expected=partial(_expected, ue8m0=ue8m0),
        error=differing_bytes,
        bounds=_NO_DIFFERENCE,
    )


def _rotated(tokens: int, heads: int, head_dim: int, rope_dim: int, device: torch.device) -> Case:
    def make() -> tuple[Tensor, Tensor, Tensor]:
        x = _matrix(tokens, heads * head_dim, device)
        angle = torch.rand(4 * tokens, rope_dim // 2, device=device) * 6.3
        return x, torch.cat((angle.cos(), angle.sin()), dim=1), torch.randint(4 * tokens, (tokens,), device=device)

    def run(x: Tensor, table: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return ops.fp8_dual_cast(x, cos_sin_cache=table, position_ids=positions, head_dim=head_dim)._asdict()

    def expected(x: Tensor, table: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return _expected(reference.rotate(x, table, positions, head_dim))

    label = f"{tokens} x {heads} x {head_dim}, inverse RoPE"
    return Case(label, make, run, expected, differing_bytes, _NO_DIFFERENCE)


def _matrix(tokens: int, channels: int, device: torch.device) -> Tensor:
    """Rows and columns of very different size, so that a scale used at the wrong place shows."""
    torch.manual_seed(SEED)
    rows = torch.randint(-12, 12, (tokens, 1), device=device).float().exp2()
    columns = torch.randint(-12, 12, (channels,), device=device).float().exp2()
    return (torch.randn(tokens, channels, device=device) * rows * columns).bfloat16()


def _expected(x: Tensor, ue8m0: bool = False) -> dict[str, Tensor]:
    q, sf = fp8.per_token(x, ue8m0=ue8m0)
    q_t, sf_t = fp8.per_token_transposed(x, ue8m0=ue8m0)
    return {"q": q, "sf": sf, "q_t": q_t, "sf_t": sf_t}
