"""Stand-ins for what the FP8 bench of moe_experts calls on a GPU: DeepGEMM's products, and the plan of our kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import moe_experts
import pytest
import torch
from torch import Tensor

from benches import moe_fp8_stages as stages
from benches.moe_experts import LIMIT
from benches.peers import experts_fp8 as peers


def replace_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products by float64, where the operands are as it reads them without a copy."""
    functions = {"m_grouped_fp8_gemm_nt_contiguous": m_grouped, "k_grouped_fp8_gemm_nt_contiguous": k_grouped}
    monkeypatch.setitem(sys.modules, "deep_gemm", SimpleNamespace(**functions))


def replace_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages' plan becomes `Plan`."""
    groups = {"empty_groups": lambda counts, rows: counts, "groups": lambda *_: _writing((), ())}
    monkeypatch.setattr(stages, "bf16_plan", SimpleNamespace(**groups))
    monkeypatch.setattr(moe_experts.fp8, "plan", Plan, raising=False)


def wide(scales: Tensor) -> Tensor:
    """Scales of blocks, for each number."""
    return scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def m_grouped(a, b, d, experts):
    (codes, scales), (w, w_scales) = a, b
    (rows, depth), columns = codes.shape, w.shape[1]
    assert (scales.shape, scales.stride()) == ((rows, depth // 128), (1, rows))
    assert w_scales.shape == (len(w), columns // 128, depth // 128)
    assert (d.shape, d.dtype) == ((rows, columns), torch.bfloat16)
    assert (experts.shape, experts.dtype) == ((rows,), torch.int32)
    assert all(t.is_contiguous() for t in (codes, w, w_scales, d, experts))
    tiles = experts.view(-1, 128)
    assert torch.equal(tiles, tiles[:, :1].expand(-1, 128))
    values = codes.double() * scales.double().repeat_interleave(128, 1)
    for expert in range(len(w)):
        mine = experts == expert
        d[mine] = (values[mine] @ (w[expert].double() * wide(w_scales[expert])).T).bfloat16()


def k_grouped(a, b, d, sizes, lengths, c, recipe):
    assert (c is d, d.dtype, d.is_contiguous(), recipe) == (True, torch.float32, True, (1, 1, 128))
    assert (lengths.tolist(), lengths.dtype) == (sizes, torch.int32)
    assert all(size % 128 == 0 for size in sizes)
    for (codes, scales), channels in zip((a, b), d.shape[1:], strict=True):
        assert codes.shape == (sum(sizes) * channels,)
        assert (scales.shape, scales.stride()) == ((channels, sum(sizes) // 128), (1, channels))
    first = 0
    for expert, size in enumerate(sizes):
        values = []
        for (codes, scales), channels in zip((a, b), d.shape[1:], strict=True):
            part = codes[first * channels : (first + size) * channels].view(channels, size).double()
            own = scales[:, first // 128 : (first + size) // 128].double()
            values.append(part * own.repeat_interleave(128, 1))
        d[expert] += (values[0] @ values[1].T).float()
        first += size


class Plan:
    """The definition with the functions of `moe_experts.fp8.plan`; `where` is the group sizes."""

    BF16, ADD = 0, 2

    @staticmethod
    def quantize(x, where, rows, panels):
        copies = stages.Copies.of(_padded(x, where, len(rows[0])))
        return _writing((*rows, *panels), (*copies.rows, *copies.panels))

    @staticmethod
    def quantize_weights(gate, up, out, turned):
        joined = gate if len(gate[0]) == len(out[0][0]) else torch.cat((gate, up), dim=1)
        codes, scales = peers.casts(compiled=False).blocks(joined)
        return _writing((*out, *turned), (codes, scales, codes.mT, scales.mT))

    @staticmethod
    def swiglu(gate_up, limit, where, h):
        assert limit == LIMIT
        found, _ = stages.swiglu(gate_up[:, : gate_up.shape[1] // 2], gate_up)
        return _writing(h, stages.Copies.of(found).rows)

    @staticmethod
    def product(a, b, where, out, padded):
        found = _product(a, b, where)
        return _writing((out,), (_padded(found, where, len(out)) if padded else found,))

    @staticmethod
    def swiglu_backward(grad, gate_up, limit, where, rows, panels, h_panels):
        assert limit == LIMIT
        h, gradients = (stages.Copies.of(t) for t in stages.swiglu(grad, gate_up))
        return _writing((*rows, *panels, *h_panels), (*gradients.rows, *gradients.panels, *h.panels))

    @staticmethod
    def weight_grad(a, b, where, first, outs, mode):
        values = [codes.double() * scales.double().unsqueeze(-1) for codes, scales in (a, b)]
        found, begin = [], 0
        for size in where.tolist():
            end = begin + -(-size // 128)
            left, right = (v[begin:end].transpose(0, 1).flatten(1) for v in values)
            found.append((left @ right.T).to(outs[0].dtype))
            begin = end
        assert first == 0
        assert outs[0].dtype == (torch.bfloat16 if mode == Plan.BF16 else torch.float32)
        return _writing(outs, torch.stack(found).split([out.shape[1] for out in outs], dim=1))


def _padded(rows, counts, padded):
    found = rows.new_zeros(padded, rows.shape[1])
    found[peers.Packing.of(counts).own] = rows
    return found


def _product(a, b, counts):
    where = peers.Packing.of(counts)
    places = len(where.source)
    out = torch.empty(places, b[0].shape[1], dtype=torch.bfloat16)
    m_grouped((a[0][:places], a[1][:, :places].contiguous().t()), b, out, where.experts)
    return where.unpack(out)


def _writing(targets, sources):
    def run():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return SimpleNamespace(run=run)


def needs_deep_gemm() -> None:
    """Skips the test without it."""
    try:
        import deep_gemm  # noqa: F401
    except Exception as error:  # without a CUDA toolkit its import ends in an AssertionError
        pytest.skip(f"requires DeepGEMM (sgl-deep-gemm 0.1.5): {type(error).__name__}: {error}")
