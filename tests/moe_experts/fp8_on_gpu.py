"""What the GPU tests of the FP8 path share: a step on the GPU, by its parts, and what each result must be.

What is made of bf16 operands alone, the codes and scales of x, dout and the weights, is compared byte for byte. What
comes behind a product is compared with what the definition makes of the kernels' own intermediate results, since a
product's last bit may differ, and with it a code.
"""

import moe_experts
import torch
from hopper_kernels import reference as use_definition
from moe_experts.fp8 import layout, reference
from torch import Tensor

from tests.moe_experts import inputs, on_gpu
from tests.moe_experts.fp8_on_cpu import COLUMNS, Step, step
from tests.moe_experts.inputs import Operands
from tests.support.compare import assert_same_bytes, error64

Results = dict[str, Tensor]
WEIGHTS = ("w13_q", "w13_sf", "w2_q", "w2_sf", "w13_t", "w13_t_sf", "w2_t", "w2_t_sf")
PRODUCT = 2.5e-3  # relative error of a product in bf16, whose storing alone costs 1.7e-3
FP32 = 5e-4  # of a sum in fp32: the tensor cores keep 14 bits of a block's
CODES = {
    "h_t": 1e-3,
    "dgu_t": 1e-2,
}  # share of the codes that may be their neighbour: the gradient of h is rounded before


def operands(groups=on_gpu.GROUPS, tail=7, hidden=256, inner=384, **options) -> tuple[Operands, Tensor]:
    return on_gpu.operands(groups, tail, hidden, inner, **options)


def call(*t) -> Tensor:
    return moe_experts.moe_experts(*t, fp8=True)


def gradients(t: Operands, dout: Tensor, names=None) -> Results:
    """By autograd."""
    return on_gpu.gradients(t, dout, names, call)


def sums(t: Operands, value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Buffers of the weights' gradients."""
    experts, hidden, inner = t.down_proj.shape
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    return tuple(torch.full(shape, value, device=on_gpu.DEVICE) for shape in shapes)


def padded_of(t: Operands) -> Tensor:
    """The padded rows of the experts' rows."""
    found = [
        torch.arange(blocks.start * 128, blocks.start * 128 + rows.stop - rows.start)
        for _, rows, blocks in layout.groups(t.num_tokens_per_expert, len(t.x))
    ]
    return torch.cat([*found, torch.empty(0, dtype=torch.long)]).to(t.x.device)


def blocks_of(t: Operands) -> int:
    """How many blocks the experts have."""
    return sum(-(-size // 128) for size in t.num_tokens_per_expert.tolist())


def specified(t: Operands, found: Results) -> Results:
    """Without what is unspecified: panels and padded rows behind the last block."""
    count = blocks_of(t)
    kept = {}
    for name, r in found.items():
        if name.endswith("_t_sf") and not name.startswith("w"):
            r = r[:count]
        elif name.endswith("_t") and not name.startswith("w"):
            r = layout.panels(r, found[f"{name}_sf"])[:count]
        elif name == "gate_up":
            r = r[: 128 * count]
        kept[name] = r
    return kept


def results(t: Operands, dout: Tensor) -> Results:
    """Every result of a forward and of a backward in two parts, as far as it is specified."""
    s = step(t)
    found = dict(zip(WEIGHTS, s.weights, strict=True)) | {"out": s.out}
    found |= dict(zip(("gate_up", "x_t", "x_t_sf"), s.kept, strict=True))
    dx, *columns = moe_experts.moe_experts_fp8_backward_data(dout, *s.data)
    found |= {"dx": dx, **dict(zip(COLUMNS, columns, strict=True))}
    dw13, dw2 = sums(t)
    moe_experts.moe_experts_fp8_weight_grad_accumulate(*s.second_half(columns), dw13, dw2, accumulate=False)
    return specified(t, found | {"dw13": dw13, "dw2": dw2})


def everything(t: Operands, dout: Tensor) -> Results:
    """As `results`, with what the other calls give: every kernel in every form that there is."""
    found = results(t, dout)
    with torch.no_grad():
        found["inference out"] = call(*t)
    for names in (None, ["x"]):
        found |= {f"autograd of {names} {name}": r for name, r in gradients(t, dout, names).items()}
    s, (dw13, dw2) = step(t), sums(t, 1.0)
    dx = moe_experts.moe_experts_fp8_backward_accumulate(dout, *s.joint, dw13, dw2)
    return found | {"joint dx": dx, "joint dw13": dw13, "joint dw2": dw2}


def definition(t: Operands, dout: Tensor) -> Results:
    """The same as `results` by the definition, on the GPU."""
    with use_definition():
        return results(t, dout)


def values(codes: Tensor, scales: Tensor) -> Tensor:
    """What panels stand for: (rows, channels) in float64."""
    return (codes.double() * scales.double().unsqueeze(-1)).transpose(1, 2).flatten(0, 1)


def assert_right(t: Operands, dout: Tensor, found: Results) -> None:
    """Every result is what it must be of the results that it was made from."""
    wanted = definition(t, dout)
    for name in (*WEIGHTS, "x_t", "x_t_sf", "dout_t", "dout_t_sf"):
        assert_same_bytes(found[name], wanted[name], name)
    for name in ("out", "dx"):
        tail = found[name][t.owned :]
        assert_same_bytes(tail, torch.zeros_like(tail), f"{name} after the last expert")
    _close("gate_up", found["gate_up"], wanted["gate_up"], PRODUCT)
    made = _of_gate_up(t, dout, found)
    for name in ("h_t", "dgu_t"):
        _codes(name, found[name], made[name], found[f"{name}_sf"], made[f"{name}_sf"])
    _close("out", found["out"], made["out"], 2 * PRODUCT)
    _close("dx", found["dx"], made["dx"], 4 * PRODUCT)
    block = 0
    for e, size in enumerate(t.num_tokens_per_expert.tolist()):
        part = slice(block, block + -(-size // 128))
        block = part.stop
        d, h, g, x = (values(found[f"{n}_t"][part], found[f"{n}_t_sf"][part]) for n in ("dout", "h", "dgu", "x"))
        _close("dw2", found["dw2"][e], d.T @ h, FP32)
        _close("dw13", found["dw13"][e], g.T @ x, FP32)


def _of_gate_up(t: Operands, dout: Tensor, found: Results) -> Results:
    """What the definition makes of the gate_up that was found."""
    padded = layout.padded_rows(len(t.x), len(t.down_proj))
    gate_up = found["gate_up"].new_zeros(padded, found["gate_up"].shape[1])
    gate_up[: len(found["gate_up"])] = found["gate_up"]
    transposed = [found[name] for name in WEIGHTS[4:]]
    dx, *columns = reference.backward_data(dout, t.num_tokens_per_expert, gate_up, *transposed, t.swiglu_limit)
    made = specified(t, {"dx": dx, **dict(zip(COLUMNS, columns, strict=True))})
    out = torch.zeros_like(t.x)
    for e, rows, blocks in layout.groups(t.num_tokens_per_expert, len(t.x)):
        gate, up = gate_up[layout.padded(rows, blocks)].chunk(2, dim=1)
        h = reference.swiglu(gate, up, t.swiglu_limit, torch.float32)
        out[rows] = reference._product(h, found["w2_q"][e], found["w2_sf"][e])
    return made | {"out": out}


def _close(name: str, found: Tensor, wanted: Tensor, bound: float) -> None:
    assert found.shape == wanted.shape, name
    error = error64(found, wanted.double())
    assert error <= bound, f"{name}: error {error:.2e}, bound {bound:.1e}"


def _codes(name: str, found: Tensor, wanted: Tensor, scales: Tensor, wanted_scales: Tensor) -> None:
    """Nearly all codes are the same, and the values are close."""
    off = (found.view(torch.uint8) != wanted.view(torch.uint8)).sum().item()
    assert off <= max(CODES[name] * found.numel(), 20), f"{name}: {off} of {found.numel()} codes differ"
    _close(f"{name}_sf", scales, wanted_scales, 1e-3)
    _close(name, values(found, scales), values(wanted, wanted_scales), 5e-3)


def assert_same(found: Results, wanted: Results, what: str = "", names=None) -> None:
    on_gpu.assert_same(found, wanted, what, names)


__all__ = ["Step", "inputs"]
