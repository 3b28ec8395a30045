"""Checks of the Triton kernels under Triton's interpreter; those in Gluon cannot be interpreted.

`TRITON_INTERPRET=1 python -m tests.mhc_projection.interpreted` prints a JSON object: for each of CASES what failed, ""
if nothing did. The variable is read when triton is imported, hence a process of its own; test_interpreter.py starts it.
"""

import itertools
import math

import torch
from mhc_projection import launch, plan, reference
from mhc_projection.arguments import MAX_LOGITS, logits
from torch import Tensor

from tests.support.compare import assert_same_bytes
from tests.support.interpreted import main
from tests.support.memory import Guarded, guarded

NAN, INF = math.nan, math.inf
BF16 = torch.bfloat16
# tokens, streams, channels, logits, splits: no block is full.
PROJECTIONS = [(1, 1, 8, 1, 1), (31, 4, 24, 24, 3), (33, 2, 16, 8, 2), (70, 3, 24, 32, 3), (5, 4, 64, 23, 8)]
# tokens, streams, iterations, eps.
GATES = [
    *itertools.product((1,), (1, 2, 4), (1, 3), (1e-6, 0.0)),
    *itertools.product((67,), (1, 2), (1, 20), (1e-6, 0.0)),
    *((67, 4, 3, 0.0), (129, 4, 20, 1e-6), (300, 2, 3, 1e-6)),
]
FP32 = 5e-7  # relative to float64: a few roundings
GATE_GRADIENT = 5e-6


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tailed(t: Tensor) -> Tensor:
    """t with NaN behind its end, where a read past it would meet it."""
    wide = t.new_full((t.numel() + 8192,), NAN)
    return wide[: t.numel()].view(t.shape).copy_(t)


def outputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Guarded]:
    return [guarded(shape, dtype) for shape in shapes]


def tensors(guards: list[Guarded]) -> list[Tensor]:
    return [g.tensor for g in guards]


def assert_near(name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    """Relative to the norm of what is expected, which is finite; equal where that is zero."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference, size = (actual.double() - expected.double()).norm().item(), expected.double().norm().item()
    assert difference <= bound * size, f"{name}: error {difference / size if size else difference:.2e}, bound {bound}"


def assert_all_near(name: str, found, expected, bound: float) -> None:
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_near(f"{name}, result {index}", actual, wanted, bound)


def parts_of(x: Tensor, weight: Tensor, splits: int) -> Tensor:
    """What the projection's kernel leaves (splits, n + 1, T): products and, last, scaled sums of squares."""
    flat, w = x.double(), weight.bfloat16().double().unflatten(1, x.shape[1:])
    ranges = [(i * x.shape[2] // splits, (i + 1) * x.shape[2] // splits) for i in range(splits)]
    products = torch.stack([torch.einsum("tic,nic->nt", flat[..., a:b], w[..., a:b]) for a, b in ranges])
    squares = torch.stack([flat[..., a:b].square().sum((1, 2)) for a, b in ranges]) * plan.SQUARES_SCALE
    return tailed(torch.cat([products, squares[:, None]], 1).float())


def projected(tokens: int, hc: int, d: int, n: int) -> tuple[Tensor, Tensor]:
    return random(tokens, hc, d, seed=tokens).bfloat16(), random(n, hc * d, seed=n) * 0.2


def check_finish() -> None:
    for tokens, hc, d, n, splits in PROJECTIONS:
        x, weight = projected(tokens, hc, d, n)
        results = outputs((tokens, n), (tokens,))
        plan.finish(parts_of(x, weight, splits), *tensors(results), 1e-20, hc * d).run()
        expected = reference.projection_forward(x.double(), weight, None, 1e-20)
        assert_all_near(f"{tokens} x {hc} x {d}, {n}", tensors(results), expected[:2], FP32)
        for result in results:
            result.check()


def check_finish_of_odd_tokens() -> None:
    """All zeros, where eps counts; squares that overflow; NaN and infinity, which stay in their token."""
    x, weight = projected(33, 2, 16, 8)
    clean = torch.empty(33, 8), torch.empty(33)
    plan.finish(parts_of(x, weight, 2), *clean, 1e-20, 32).run()
    odd = {3: 0.0, 7: 1e20, 11: NAN, 32: INF}
    for token, value in odd.items():
        x[token] = value
    found = torch.empty(33, 8), torch.empty(33)
    plan.finish(parts_of(x, weight, 2), *found, 1e-20, 32).run()
    assert abs(found[1][3].item() / 1e10 - 1) < FP32
    assert not found[0][3].any()
    assert found[1][7] == 0
    assert not found[0][7].any()
    assert found[0][11].isnan().all()
    assert found[0][32].isnan().all()
    others = [t for t in range(33) if t not in odd]
    for name, a, b in zip(("mixes", "rstd"), found, clean, strict=True):
        assert_same_bytes(a[others], b[others], name)


def expected_q(rstd: Tensor, grad_mixes: Tensor, mixes: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """r g in float64, and coef: what `reference.projection_backward` forms of them."""
    r, g = rstd.double(), grad_mixes.double()
    return r[:, None] * g, -(r * r / width) * (g * mixes.double()).sum(-1)


def assert_q(name: str, q: Tensor, coef: Tensor, wanted: tuple[Tensor, Tensor], bound: float) -> None:
    """q (T, 64) is high and low parts, the low one less than half an ulp of the high one, zeros behind the logits."""
    n = wanted[0].shape[1]
    high, low = q.double().split(MAX_LOGITS, dim=1)
    assert_near(f"{name}: q", (high + low)[:, :n], wanted[0], max(bound, 2**-16))
    assert (low.abs() <= high.abs() * 2**-8).all(), f"{name}: the parts are no split"
    assert not high[:, n:].any(), f"{name}: q has numbers behind the logits"
    assert not low[:, n:].any(), f"{name}: q has numbers behind the logits"
    assert_near(f"{name}: coef", coef, wanted[1], bound)


def prepared(tokens: int, weight: Tensor) -> tuple[list[Guarded], tuple[Tensor, ...]]:
    """Guarded q, coef, bf16 weight and count of the items taken; and the results that `plan.prepare` takes."""
    shapes = ((tokens, 2 * MAX_LOGITS), BF16), ((tokens,), torch.float32), (weight.shape, BF16), ((1,), torch.int32)
    guards = [guarded(*shape) for shape in shapes]
    q, coef, narrow, taken = tensors(guards)
    return guards, (q, coef, tailed(weight), narrow, taken)


def assert_prepared(guards: list[Guarded], results: tuple[Tensor, ...]) -> None:
    """The weight rounded, nothing taken yet, and nothing written past an end."""
    _, _, weight, narrow, taken = results
    assert_same_bytes(narrow, weight.bfloat16(), "weight")
    assert taken.item() == 0
    for guard in guards:
        guard.check()


def check_prepare() -> None:
    for tokens, hc, d, n, _ in PROJECTIONS:
        mixes, rstd, grad = (random(*s, seed=n) for s in ((tokens, n), (tokens,), (tokens, n)))
        mixes, grad = tailed(mixes), tailed(grad)
        guards, results = prepared(tokens, random(n, hc * d, seed=d))
        q, coef = guards[:2]
        plan.prepare(mixes, rstd, grad, *results, hc * d).run()
        wanted = expected_q(rstd, grad, mixes, hc * d)
        assert_q(f"{tokens}, {n}", q.tensor, coef.tensor, wanted, FP32)
        assert_prepared(guards, results)
        clean = q.tensor.clone(), coef.tensor.clone()
        grad[tokens // 2, n // 2] = NAN
        plan.prepare(mixes, rstd, grad, *results, hc * d).run()
        others = [t for t in range(tokens) if t != tokens // 2]
        assert_same_bytes(q.tensor[others], clean[0][others], "q")
        assert_same_bytes(coef.tensor[others], clean[1][others], "coef")
        assert coef.tensor[tokens // 2].isnan()


def check_sum() -> None:
    """The three sums of the backward, each alone and all in one launch, with the same bits."""
    for chunks, n, width, blocks, hc, tokens in ((1, 3, 8, 1, 1, 1), (2, 8, 85, 9, 2, 67), (17, 24, 40, 17, 4, 130)):
        weight = tailed(random(chunks, n, width, seed=chunks))
        pre_mix = tailed(random(blocks, hc, tokens, seed=blocks))
        parts = [tailed(random(logits(hc), tokens, seed=seed)) for seed in (hc, n)]
        grads = [guarded(s, torch.float32) for s in ((logits(hc),), (3,), (n, width), (tokens, hc))]
        grad_base, grad_scale, grad_weight, grad_pre_mix = tensors(grads)
        pairs = (parts, (grad_base, grad_scale)), (weight, grad_weight), (pre_mix, grad_pre_mix)
        sections = parts[1].double().sum(1).split((hc, hc, hc * hc))
        expected = (
            parts[0].double().sum(1),
            torch.stack([section.sum() for section in sections]),
            weight.double().sum(0),
            pre_mix.double().sum(0).t(),
        )
        alone = []
        for i in range(3):
            plan.sums(hc, tokens, *(pair if i == j else None for j, pair in enumerate(pairs))).run()
            changed = [[0, 1], [2], [3]][i]
            assert_all_near(f"{i}, {tokens}", [grads[k].tensor for k in changed], [expected[k] for k in changed], 2e-6)
            alone += [grads[k].tensor.clone() for k in changed]
            for k in changed:
                grads[k].tensor.fill_(NAN)
        plan.sums(hc, tokens, *pairs).run()
        for guard, before in zip(grads, alone, strict=True):
            assert_same_bytes(guard.tensor, before, "all sums together")
            guard.check()


def gate_operands(tokens: int, hc: int, spread: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    n = logits(hc)
    mixes = tailed(random(tokens, n, seed=tokens + hc) * spread)
    return mixes, random(3, seed=hc).abs() + 0.5, random(n, seed=n) * 0.5


def gate_shapes(tokens: int, hc: int) -> list[tuple[int, ...]]:
    return [(tokens, hc), (tokens, hc), (tokens, hc, hc)]


def gate_gradients(tokens: int, hc: int) -> list[Tensor]:
    return [tailed(random(*shape, seed=i)) for i, shape in enumerate(gate_shapes(tokens, hc))]


def doubles(values) -> list[Tensor]:
    return [v.double() for v in values]


def check_gates() -> None:
    """Results in guarded memory, and those that gates_forward allocates; parameters also in bf16."""
    for tokens, hc, iters, eps in GATES:
        mixes, *parameters = gate_operands(tokens, hc)
        for narrow in (False, True):
            used = [p.to(BF16) for p in parameters] if narrow else parameters
            results = outputs(*gate_shapes(tokens, hc))
            plan.gates(None, mixes, None, *used, tensors(results), 0, eps, 1, iters).run()
            expected = reference.gates_forward(mixes.double(), *doubles(used), hc, iters, eps)
            assert_all_near(f"{tokens} x {hc}, {iters}, {eps}", tensors(results), expected, FP32)
            for result in results:
                result.check()
            if tokens == 1:
                found = launch.gates_forward(mixes, *used, hc, iters, eps)
                for got, want in zip(found, tensors(results), strict=True):
                    assert_same_bytes(got, want, "gates_forward")
    strided = gate_operands(33, 4)[0].t().contiguous().t()
    for got, want in zip(
        launch.gates_forward(strided, *parameters_of(4), 4, 1, 0.0),
        launch.gates_forward(strided.contiguous(), *parameters_of(4), 4, 1, 0.0),
        strict=True,
    ):
        assert_same_bytes(got, want, "strided mixes")


def check_leading_dimensions() -> None:
    """The bytes of the tokens in a row."""
    (mixes, *parameters), grads = gate_operands(33, 4), gate_gradients(33, 4)
    for lead in ((3, 11), (33, 1)):
        found = launch.gates_forward(mixes.view(*lead, 24), *parameters, 4, 20, 1e-6)
        found += launch.gates_backward(
            mixes.view(*lead, 24), *parameters, *(g.view(*lead, *g.shape[1:]) for g in grads), 4, 20, 1e-6
        )
        wanted = launch.gates_forward(mixes, *parameters, 4, 20, 1e-6)
        wanted += launch.gates_backward(mixes, *parameters, *grads, 4, 20, 1e-6)
        shapes = [(*lead, *w.shape[1:]) for w in wanted[:4]]
        assert [g.shape for g in found] == [*shapes, (3,), (24,)]
        for got, want in zip(found, wanted, strict=True):
            assert_same_bytes(got.view(want.shape), want, "leading dimensions")


def parameters_of(hc: int) -> tuple[Tensor, Tensor]:
    return gate_operands(1, hc)[1:]


def check_gates_from_parts() -> None:
    """With FINISH: mixes by logit and rstd with the bits of finish_kernel, gates with those of mixes."""
    for (tokens, hc, iters, eps), splits in itertools.product([g for g in GATES if g[0] != 300][::3], (1, 3)):
        n, d = logits(hc), 24
        x, weight = projected(tokens, hc, d, n)
        parts, parameters = parts_of(x, weight, splits), parameters_of(hc)
        gates, saved = outputs(*gate_shapes(tokens, hc)), outputs((n, tokens), (tokens,))
        plan.gates(parts, *tensors(saved), *parameters, tensors(gates), 1e-20, eps, hc * d, iters).run()
        name = f"{tokens} x {hc}, {iters}, {eps}, {splits}"
        wide = x.double(), weight, *doubles(parameters), None
        expected = reference.hyper_connection_forward(*wide, 1e-20, eps, iters)
        assert_all_near(name, tensors(gates), expected[:3], FP32)
        assert_all_near(name, tensors(saved), expected[4:], FP32)
        for result in (*gates, *saved):
            result.check()
        mixes, rstd = torch.empty(tokens, n), torch.empty(tokens)
        plan.finish(parts, mixes, rstd, 1e-20, hc * d).run()
        assert_same_bytes(saved[0].tensor, mixes.t(), "mixes", strides=False)
        assert_same_bytes(saved[1].tensor, rstd, "rstd")
        for got, want in zip(tensors(gates), launch.gates_forward(mixes, *parameters, hc, iters, eps), strict=True):
            assert_same_bytes(got, want, "gates of the same mixes")


def gate_workspace(tokens: int, hc: int, iters: int) -> list[Guarded]:
    return outputs(*(tuple(t.shape) for t in plan.gate_workspace(torch.empty(0), tokens, hc, iters)))


def check_gates_backward() -> None:
    for tokens, hc, iters, eps in GATES:
        n = logits(hc)
        (mixes, *parameters), grads = gate_operands(tokens, hc), gate_gradients(tokens, hc)
        grad_mixes, parts = guarded((tokens, n), torch.float32), gate_workspace(tokens, hc, iters)
        results = (grad_mixes.tensor,)
        plan.gates_backward(mixes, None, *parameters, grads, results, tensors(parts), eps, 1, iters).run()
        grad_scale, grad_base = outputs((3,), (n,))
        plan.sums(hc, tokens, gates=(tensors(parts)[:2], (grad_base.tensor, grad_scale.tensor))).run()
        found = [t.tensor for t in (grad_mixes, grad_scale, grad_base)]
        expected = reference.gates_backward(mixes.double(), *doubles(parameters), *doubles(grads), hc, iters, eps)
        name = f"{tokens} x {hc}, {iters}, {eps}"
        if hc == 1 and eps == 0:  # one stream's comb is constant: its gradient is 0 but for the last bits
            found, expected = without_comb(found), without_comb(expected)
        assert_all_near(name, found, expected, GATE_GRADIENT)
        for result in (grad_mixes, *parts, grad_scale, grad_base):
            result.check()
        if tokens == 1:
            for got, want in zip(
                launch.gates_backward(mixes, *parameters, *grads, hc, iters, eps),
                [t.tensor for t in (grad_mixes, grad_scale, grad_base)],
                strict=True,
            ):
                assert_same_bytes(got, want, "gates_backward")


def without_comb(gradients) -> list[Tensor]:
    grad_mixes, grad_scale, grad_base = gradients
    assert grad_mixes[:, 2].abs().max() < 1e-6
    return [grad_mixes[:, :2], grad_scale[:2], grad_base[:2]]


def check_gates_backward_for_the_projection() -> None:
    """With PREPARE: q and coef from mixes by logit, the sums over tokens with the bits of the other way."""
    for tokens, hc, iters, eps in GATES[::2]:
        n, width = logits(hc), hc * 24
        (mixes, *parameters), grads = gate_operands(tokens, hc), gate_gradients(tokens, hc)
        rstd = random(tokens, seed=tokens).abs() + 0.1
        guards, results = prepared(tokens, random(n, width, seed=hc))
        q, coef = guards[:2]
        parts = gate_workspace(tokens, hc, iters)
        by_logit = tailed(mixes.t())
        plan.gates_backward(by_logit, rstd, *parameters, grads, results, tensors(parts), eps, width, iters).run()
        grad_mixes, *_ = reference.gates_backward(mixes.double(), *doubles(parameters), *doubles(grads), hc, iters, eps)
        wanted = expected_q(rstd, grad_mixes, mixes, width)
        assert_q(f"{tokens} x {hc}, {iters}, {eps}", q.tensor, coef.tensor, wanted, 2 * GATE_GRADIENT)
        assert_prepared(guards, results)
        for result in parts:
            result.check()
        other, grad = plan.gate_workspace(mixes, tokens, hc, iters), torch.empty(tokens, n)
        plan.gates_backward(mixes, None, *parameters, grads, (grad,), other, eps, 1, iters).run()
        for got, want in zip(tensors(parts)[:2], other[:2], strict=True):
            assert_same_bytes(got, want, "sums over tokens")


def check_parameters() -> None:
    """More parts than are added at a time, in guarded memory."""
    for hc, parts in itertools.product((1, 2, 4), (1, 127, 129, 300)):
        n = logits(hc)
        base, scale = (tailed(random(n, parts, seed=seed)) for seed in (hc, parts))
        grad_base, grad_scale = outputs((n,), (3,))
        plan.sums(hc, 1, gates=((base, scale), (grad_base.tensor, grad_scale.tensor))).run()
        sections = scale.double().sum(1).split((hc, hc, hc * hc))
        name = f"{hc}, {parts} parts"
        assert_near(name, grad_base.tensor, base.double().sum(1), 2e-6)
        assert_near(name, grad_scale.tensor, torch.stack([s.sum() for s in sections]), 2e-6)
        grad_base.check()
        grad_scale.check()


def run_gates(mixes, parameters, grads, iters, eps) -> tuple[list[Tensor], list[Tensor]]:
    hc = grads[0].shape[1]
    forward = launch.gates_forward(mixes, *parameters, hc, iters, eps)
    return list(forward), list(launch.gates_backward(mixes, *parameters, *grads, hc, iters, eps))


def check_nan_stays_in_its_token() -> None:
    """Other tokens keep their bits, the token's other sections too; only the sums over tokens meet it."""
    mixes, *parameters = gate_operands(67, 4)
    grads = gate_gradients(67, 4)
    clean, clean_grads = run_gates(mixes, parameters, grads, 3, 1e-6)
    others = [t for t in range(67) if t != 41]
    for value in (NAN, INF, -INF):
        spoilt = mixes.clone()
        spoilt[41, 9] = value
        found, found_grads = run_gates(spoilt, parameters, grads, 3, 1e-6)
        for got, want in zip((*found, found_grads[0]), (*clean, clean_grads[0]), strict=True):
            assert_same_bytes(got[others], want[others], f"other tokens, {value}")
        for got, want in zip(found[:2], clean[:2], strict=True):
            assert_same_bytes(got, want, f"pre and post, {value}")
        expected = reference.gates_forward(spoilt, *parameters, 4, 3, 1e-6)
        expected_grads = reference.gates_backward(spoilt, *parameters, *grads, 4, 3, 1e-6)
        for got, want in zip((*found, *found_grads), (*expected, *expected_grads), strict=True):
            assert torch.equal(got.isnan(), want.isnan()), f"NaN elsewhere than in the definition, {value}"


def check_saturated() -> None:
    """Logits of 30, 100 and 1e4: finite, and as the definition in fp32 has it."""
    for size in (30.0, 100.0, 1e4):
        mixes = random(67, 24, seed=3).sign() * size
        parameters, grads = (torch.ones(3), torch.zeros(24)), gate_gradients(67, 4)
        found, found_grads = run_gates(mixes, parameters, grads, 20, 1e-6)
        assert all(t.isfinite().all() for t in (*found, *found_grads)), f"not finite, {size}"
        expected = reference.gates_forward(mixes.double(), *doubles(parameters), 4, 20, 1e-6)
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=1e-6)
        exact = reference.gates_backward(mixes.double(), *doubles((*parameters, *grads)), 4, 20, 1e-6)
        torch.testing.assert_close(found_grads[0][:, :8].double(), exact[0][:, :8], rtol=1e-5, atol=1e-37)


def check_equal_logits() -> None:
    for value in (0.0, 1.5, 1e4):
        mixes, parameters = torch.full((33, 24), value), (torch.ones(3), torch.full((24,), -value))
        (pre, post, comb), _ = run_gates(mixes, parameters, gate_gradients(33, 4), 20, 0.0)
        assert torch.equal(comb, torch.full((33, 4, 4), 0.25))
        assert torch.equal(pre, torch.full((33, 4), 0.5))
        assert torch.equal(post, torch.ones(33, 4))


def check_padding_of_the_last_block() -> None:
    """Tokens behind the last have logits of 0, for which this base gives NaN: the sums over tokens must not meet it."""
    mixes, scale, base = random(33, 24, seed=1), torch.ones(3), torch.zeros(24)
    base[8::4] = -300  # a column of comb, which underflows
    mixes[:, 8::4] += 300
    found, found_grads = run_gates(mixes, (scale, base), gate_gradients(33, 4), 3, 0.0)
    exact = doubles((mixes, scale, base))
    assert_all_near("gates", found, reference.gates_forward(*exact, 4, 3, 0.0), 5e-6)
    expected = reference.gates_backward(*exact, *doubles(gate_gradients(33, 4)), 4, 3, 0.0)
    assert_all_near("gradients", found_grads, expected, 1e-4)


CASES = {
    "finish": check_finish,
    "finish of odd tokens": check_finish_of_odd_tokens,
    "prepare": check_prepare,
    "sum": check_sum,
    "gates": check_gates,
    "gates from parts": check_gates_from_parts,
    "gates backward": check_gates_backward,
    "gates backward for the projection": check_gates_backward_for_the_projection,
    "parameters": check_parameters,
    "nan stays in its token": check_nan_stays_in_its_token,
    "saturated": check_saturated,
    "equal logits": check_equal_logits,
    "padding of the last block": check_padding_of_the_last_block,
}


if __name__ == "__main__":
    main(CASES)
