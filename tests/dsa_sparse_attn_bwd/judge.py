"""Whether gradients are right for an implementation that rounds p and ds to bf16, as the kernels do."""

import torch
from dsa_sparse_attn_bwd import reference
from torch import Tensor

from tests.dsa_sparse_attn_bwd.inputs import NAMES, Operands
from tests.support.compare import error64

# Relative to the whole result. Storing it in bf16 alone costs 1.7e-3, and p and ds are rounded once before.
BOUNDS = {"dq": 3e-3, "dkv": 3e-3, "dsinks": 1e-3}
ROW = 4e-2  # relative to a row: of a head of a query's, of a latent row's
SMALL = 0.05  # of the median row: smaller ones are bounded by the whole alone
# Of sums in fp32 that are formed in another order: a unit in the last place, and of small numbers a share of the row's.
ULP, NOISE = 2.0**-7, 2.0**-14


def assert_right(found: tuple[Tensor, ...], t: Operands) -> None:
    """All that is promised: dtypes, shapes, exact zeros, nothing but finite numbers, and their errors.

    Zeros are due to queries without slots, to rows that nobody names, and to heads without a sink. The definition
    computes in float64, on the device of t, with the output and lse that t has.
    """
    wanted = reference.backward(*t, dtype=torch.float64)
    zeros = dict(zip(NAMES, _zeros(t), strict=True))
    for name, got, want, like in zip(NAMES, found, wanted, (t.q, t.kv, t.sinks), strict=True):
        assert got.dtype == like.dtype, f"{name}: {got.dtype}"
        assert got.shape == like.shape, f"{name}: shape {tuple(got.shape)}"
        assert got.is_contiguous(), f"{name}: strides {got.stride()}"
        assert got.isfinite().all(), f"{name}: not finite"
        written = (zeros[name] & (got.reshape(len(got), got[:1].numel()) != 0).any(dim=1)).nonzero().flatten()
        assert not len(written), f"{name}: {len(written)} should be zero and are not, the first is {written[0]}"
        if name != "dsinks":
            _assert_rows(name, got, want)
        error = error64(got, want)
        assert error <= BOUNDS[name], f"{name}: error {error:.3e} exceeds {BOUNDS[name]:g}"


def _zeros(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Of which queries, rows and heads the gradients are exact zeros."""
    valid = (t.indices >= 0) & (t.indices < len(t.kv))
    alone = ~valid.any(dim=1)
    unnamed = torch.ones(len(t.kv), dtype=torch.bool, device=t.kv.device)
    unnamed[t.indices[valid].long()] = False
    return alone, unnamed, t.sinks.isneginf() | alone.all()


def _assert_rows(name: str, got: Tensor, want: Tensor) -> None:
    rows, found = (t.reshape(-1, t.shape[-1]) for t in (want, got))
    size = rows.norm(dim=1)
    if not size.any():
        return
    error = (found.double() - rows).norm(dim=1) / size
    wrong = ((error > ROW) & (size > SMALL * size[size > 0].median())).nonzero().flatten()
    assert not len(wrong), f"{name}: {len(wrong)} rows are wrong, first row {wrong[0]}: error {error[wrong[0]]:.3e}"


def assert_reordered(found: Tensor, wanted: Tensor, name: str = "dkv") -> None:
    """Both are roundings of the same sums in fp32, formed in different orders."""
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    assert found.isfinite().all(), f"{name}: not finite"
    got, want = found.double(), wanted.double()
    typical = want.square().mean(dim=-1, keepdim=True).sqrt()
    wrong = ((got - want).abs() > ULP * want.abs() + NOISE * typical).nonzero()
    assert not len(wrong), f"{name}: {len(wrong)} numbers are further apart than an order of sums explains"


def rounded(t: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """The definition in float64, but p and sm_scale ds rounded to bf16, and then the results: the kernels' mathematics.

    For calls whose result is what large terms leave when they cancel.
    """
    valid = (t.indices >= 0) & (t.indices < len(t.kv))
    listed, q, g = valid.any(dim=1), t.q.double(), t.grad_out.double()
    k = t.kv[t.indices.clamp(0, len(t.kv) - 1).long()].double().masked_fill(~valid[..., None], 0.0)
    total = torch.logaddexp(t.lse.masked_fill(~listed[:, None], 0.0).double(), t.sinks.double())
    p = torch.exp(t.sm_scale * torch.einsum("shc,skc->shk", q, k) - total[..., None]).masked_fill(~valid[:, None], 0.0)
    delta = (g * _output(t).double()).sum(dim=-1)
    ds = t.sm_scale * p * (torch.einsum("shc,skc->shk", g, k) - delta[..., None])
    p, ds = p.bfloat16().double(), ds.bfloat16().double()
    of_slots = torch.einsum("shk,shc->skc", ds, q) + torch.einsum("shk,shc->skc", p, g)
    dkv = torch.zeros_like(t.kv, dtype=torch.float64).index_add_(0, t.indices[valid].long(), of_slots[valid])
    dsinks = -(torch.exp(t.sinks - total) * delta)[listed].sum(dim=0)
    return torch.einsum("shk,skc->shc", ds, k).to(t.q.dtype), dkv.to(t.kv.dtype), dsinks.to(t.sinks.dtype)


def _output(t: Operands) -> Tensor:
    if t.out_tail is None:
        return t.out
    return torch.cat([t.out[..., : -t.out_tail.shape[-1]], t.out_tail], dim=-1)
