"""DeepSeek-V4.1's layers: their schedule, their plain operations, the choices, and the bench around them."""

from __future__ import annotations

import dataclasses
import json

import dsa_indexer_topk.reference
import pytest
import torch
from fp8_dual_cast import fp8_dual_cast
from hopper_kernels import fp8
from torch import Tensor

from benches import v41_layer as bench
from benches.plotting import draw_file
from benches.v41 import config, fp8_linear, model, operations, parallel, plain, plotting, step, table
from benches.v41.choices import Choices, share_in_common
from benches.v41.config import TOY
from tests.support.compare import assert_same_bytes, error64

CPU = torch.device("cpu")
SINGLE = step.Setting("single", dataclasses.replace(TOY, layers=config.SINGLE), 64)
STACK = step.Setting("stack", TOY, 64)
LAST = step.Setting("last rank", TOY, 256, ranks=4, checkpointed=True)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


class TestSchedule:
    def test_the_published_layers(self):
        roles = [config.role(layer) for layer in range(40)]
        assert [role.ratio for role in roles] == [0] * 2 + [2] * 18 + [1] * 20
        assert [role.layer for role in roles if role.makes_entries] == [2, 8, 14, 20]
        assert [role.layer for role in roles if role.makes_picks] == [2, 8, 14, 20, 24, 28, 32, 36]
        assert [role.layer for role in roles if role.makes_candidates] == [20]
        assert [role.layer for role in roles if role.has_candidates] == [24, 28, 32, 36]

    def test_the_stack_has_all_kinds_in_their_order(self):
        roles = config.FLASH.roles
        assert [role.layer for role in roles] == sorted(role.layer for role in roles)
        kinds = {(r.ratio, r.makes_entries, r.makes_picks, r.makes_candidates, r.has_candidates) for r in roles}
        assert len(kinds) == len(roles) == 6
        assert config.role(20).label == "layer 20, ratio 1, makes entries, makes picks, makes candidates"

    @pytest.mark.parametrize("layer", [-1, 40])
    def test_no_other_layer(self, layer):
        with pytest.raises(ValueError, match="layer must be 0 to 39"):
            config.role(layer)

    def test_candidates_bind_beyond_what_they_can_hold(self):
        assert config.FLASH.candidates_bind(16385)
        assert not config.FLASH.candidates_bind(16384)


class TestTokens:
    def test_parts_of_a_document(self):
        parts = [model.make_tokens(TOY, 60, rank, 3, CPU) for rank in range(3)]
        assert torch.equal(torch.cat([part.positions for part in parts]), torch.arange(60))
        whole = model.make_tokens(TOY, 60, 0, 1, CPU)
        assert torch.equal(torch.cat([part.window for part in parts]), whole.window)
        assert whole.window[3].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3]
        assert whole.window[59].tolist() == list(range(52, 60))

    def test_entries_that_end_at_the_token_are_readable(self):
        tokens = model.make_tokens(TOY, 6, 0, 1, CPU)
        assert tokens.readable(2)[1].tolist() == [0, 1, 1, 2, 2, 3]
        assert tokens.readable(1)[1].tolist() == [1, 2, 3, 4, 5, 6]

    def test_unequal_parts_are_refused(self):
        with pytest.raises(ValueError, match="64 tokens are not divisible among 3 ranks"):
            model.make_tokens(TOY, 64, 0, 3, CPU)


class TestPlainOperations:
    def test_attention_and_its_backward(self):
        q, grad, kv = normal(9, 16, 512), normal(9, 16, 512), normal(30, 512)
        indices = torch.stack([torch.randperm(30)[:12] for _ in range(9)]).int()
        indices[3, 4:] = -1
        sinks, scale = torch.randn(16), 512**-0.5
        out, lse = plain.attention(q, kv, indices, sinks, scale)
        leaves = [t.double().requires_grad_() for t in (q, kv, sinks)]
        scores = scale * torch.einsum("shc,skc->shk", leaves[0], leaves[1][indices.clamp_min(0).long()])
        scores = scores.masked_fill((indices < 0)[:, None], -torch.inf)
        p = torch.cat((scores, leaves[2].expand(9, 16)[..., None]), dim=2).softmax(dim=2)[..., :-1]
        exact = torch.einsum("shk,skc->shc", p, leaves[1][indices.clamp_min(0).long()])
        assert error64(out, exact) < 5e-3
        assert torch.allclose(lse.double(), scores.logsumexp(dim=2), atol=1e-5)
        found = plain.attention_backward(q, kv, out, grad, lse, indices, sinks, scale)
        wanted = torch.autograd.grad(exact, leaves, grad.double())
        assert [error64(a, b) < 1e-2 for a, b in zip(found, wanted, strict=True)] == [True] * 3

    @pytest.mark.parametrize("topk", [5, 40])
    def test_picks_and_blocks(self, topk):
        q, k, w = normal(32, 16, 64), normal(32, 64), normal(32, 16)
        ks, ke = torch.zeros(32, dtype=torch.int32), torch.arange(32, dtype=torch.int32)
        first = (q, k, w, ks, ke, topk, None, True, 32, 8, 2)
        picks, blocks = plain.index_topk(*first)
        exact, exact_blocks = dsa_indexer_topk.reference.index_topk(*first)
        assert torch.equal(picks.sort(dim=1).values, exact.sort(dim=1).values)
        assert torch.equal(blocks.sort(dim=1).values.int(), exact_blocks.sort(dim=1).values)
        later = (q, k, w, ks, ke, topk, exact_blocks, False, 32, 8, 2)
        picks, _ = plain.index_topk(*later)
        exact, _ = dsa_indexer_topk.reference.index_topk(*later)
        assert torch.equal(picks.sort(dim=1).values, exact.sort(dim=1).values)

    def test_rotation_and_back(self):
        tokens = model.make_tokens(TOY, 40, 0, 1, CPU)
        x, table = normal(40, 3, 512), tokens.tables[model.FAR]
        turned = plain.rotate(x, table, tokens.positions)
        assert torch.equal(turned[..., :448], x[..., :448])
        pairs, before = (torch.view_as_complex(t[..., 448:].double().unflatten(2, (32, 2))) for t in (turned, x))
        angles = torch.arange(40)[:, None, None] * 160_000.0 ** -(torch.arange(32).double() / 32)
        assert (
            error64(
                torch.view_as_real(pairs), torch.view_as_real(before * torch.polar(torch.ones(()).double(), angles))
            )
            < 3e-3
        )
        assert error64(plain.rotate(turned, table, tokens.positions, inverse=True), x.double()) < 4e-3

    def test_an_fp8_linear_is_the_product_of_what_was_quantised(self):
        x, w = normal(20, 256).requires_grad_(), normal(128, 256).requires_grad_()
        grad = normal(20, 128)
        out = fp8_linear.FP8Linear.apply(x, w, fp8_linear.plain_cast, None, None, 0)
        out.backward(grad)
        x8 = fp8.dequantize(*fp8.per_token(x.detach())).double()
        w8 = fp8.dequantize(*fp8.per_block(w.detach(), floor_on="scale"), (128, 128)).double()
        g8 = fp8.dequantize(*fp8.per_token(grad)).double()
        g8_t, x8_t = (fp8.dequantize(*fp8.per_token_transposed(t)).double() for t in (grad, x.detach()))
        assert error64(out, x8 @ w8.t()) < 3e-3
        assert error64(x.grad, g8 @ w8) < 3e-3
        assert error64(w.grad, g8_t @ x8_t.t()) < 3e-3

    def test_plain_casts_have_the_bytes_of_the_kernel(self):
        tokens = model.make_tokens(TOY, 40, 0, 1, CPU)
        x = normal(40, 1024)
        for rotation in ((None, None, 0), (tokens.tables[model.NEAR], tokens.positions, 512)):
            keywords = dict(zip(("cos_sin_cache", "position_ids"), rotation, strict=False))
            wanted = fp8_dual_cast(x, **keywords, head_dim=rotation[2] or None)
            for a, b in zip(fp8_linear.plain_cast(x, *rotation), wanted, strict=True):
                assert_same_bytes(a, b)

    def test_rows_come_back_to_their_tokens(self):
        x = normal(6, 4).requires_grad_()
        order = torch.randperm(12)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(12))
        rows = model.Rows.apply(x, order, place, 2)
        assert torch.equal(rows, x[order // 2])
        back = model.Moved.apply(rows, place, order).unflatten(0, (6, 2))
        assert torch.equal(back, x[:, None].expand(6, 2, 4))
        grad = torch.randn(6, 2, 4).bfloat16()
        back.backward(grad)
        assert torch.equal(x.grad, grad.sum(dim=1))


class TestChoices:
    def test_shares(self):
        a = torch.tensor([[3, 1, 2], [4, 5, 6]])
        assert share_in_common(a, torch.tensor([[1, 2, 3], [6, 7, 4]])) == pytest.approx(5 / 6)
        assert share_in_common(a, torch.tensor([[9, -1, -1], [5, -1, -1]])) == pytest.approx(1 / 2)
        assert share_in_common(a, torch.full((2, 3), -1)) == 0.0

    def test_replay(self):
        first = Choices()
        kept = torch.tensor([[1, 2], [3, 4]])
        assert first("picks", 7, kept) is kept
        second = Choices(first.rows(slice(1, 2)))
        assert torch.equal(second("picks", 7, torch.tensor([[3, 5]])), kept[1:])
        assert second.shares == {"picks": 0.5}
        with pytest.raises(KeyError):
            second("experts", 7, kept)


class TestSteps:
    def test_every_kernel_gives_the_plain_step(self):
        one = step.Step(SINGLE, CPU)
        first = step.plain_step(one)
        for variant in bench.VARIANTS[1:]:
            entry = bench.verified(one, variant, first)
            assert entry["status"] == "verified", entry
        for name in (operations.FP8_CAST, operations.FP8_EXPERTS):
            (variant,) = [v for v in bench.VARIANTS if v.kernels == (name,)]
            assert step.compare(one, variant.kernels, variant.recipe, first).whole == 0.0

    @pytest.mark.parametrize("setting", [STACK, LAST], ids=lambda setting: setting.label)
    def test_all_kernels_together(self, setting):
        one = step.Step(setting, CPU)
        found = step.compare(one, operations.BF16, (), step.plain_step(one))
        assert all(abs(getattr(found, name)) <= bound for name, bound in bench.BOUNDS.items()), found
        assert set(found.shares) == {"experts", "picks", "blocks"}

    def test_every_parameter_but_the_indexers_has_a_gradient(self):
        one = step.Step(STACK, CPU)
        one.gradients(operations.choose())
        names = {name for name, p in one.model.named_parameters() if p.grad is None}
        assert names == {name for name, _ in one.model.named_parameters() if ".indexer." in name}
        assert all(grad.isfinite().all() and grad.any() for grad in one.found().values())

    def test_steps_lower_the_loss_alike(self):
        losses = []
        for use in (operations.choose(), operations.choose(*operations.BF16)):
            one = step.Step(SINGLE, CPU)
            losses.append([])
            for _ in range(4):
                losses[-1].append(one.gradients(use).item())
                one.optimiser.step()
        assert losses[0][-1] < losses[0][0] - 0.05
        assert losses[1] == pytest.approx(losses[0], rel=5e-3)

    def test_a_checkpoint_changes_no_bit(self):
        found = []
        for checkpointed in (False, True):
            one = step.Step(dataclasses.replace(STACK, checkpointed=checkpointed), CPU)
            found.append((one.gradients(operations.choose(*operations.BF16)), *one.found().values()))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_reset_brings_back_the_first_step(self):
        one = step.Step(SINGLE, CPU)
        first = one.gradients(operations.choose())
        one(operations.choose())
        assert one.gradients(operations.choose()) != first
        one.reset()
        assert one.gradients(operations.choose()) == first

    def test_experts_of_ranks_are_those_of_one(self):
        whole = model.Experts(TOY, config.role(0), 1)
        parts = [model.Experts(TOY, config.role(0), 2) for _ in range(2)]
        stacks = [torch.nn.Module() for _ in range(3)]
        for stack, experts, rank in zip(stacks, [whole, *parts], [0, 0, 1], strict=True):
            stack.experts = experts
            model.reset(stack, 3, rank)
        assert torch.equal(torch.cat([part.gate_up for part in parts]), whole.gate_up)
        assert torch.equal(parts[0].router, whole.router)
        with pytest.raises(ValueError, match="4 experts are not divisible among 3 ranks"):
            model.Experts(TOY, config.role(0), 3)

    def test_others_of_the_last_rank_stay_the_same(self):
        gather = parallel.LastRank(4).gather
        x = normal(5, 3)
        assert torch.equal(gather(x)[15:], x)
        assert torch.equal(gather(x), gather(x))


class TestBench:
    def test_a_wrong_kernel_is_found(self, monkeypatch):
        def wrong(*arguments):
            dq, dkv, dsinks = plain.attention_backward(*arguments)
            return 1.2 * dq, dkv, dsinks

        name = "dsa_sparse_attn_bwd"
        monkeypatch.setitem(operations._KERNELS, name, lambda: {"attention_backward": wrong})
        one = step.Step(SINGLE, CPU)
        first = step.plain_step(one)
        entry = bench.verified(one, bench.Variant(name, (name,)), first)
        assert entry["status"] == "wrong"
        monkeypatch.setitem(operations._KERNELS, name, lambda: {"attention_backward": None})
        assert bench.verified(one, bench.Variant(name, (name,)), first)["status"] == "failed"

    def test_distances(self):
        a = {"layers.0.w": torch.tensor([3.0, 4.0]), "layers.1.w": torch.zeros(1), "v": torch.ones(1)}
        b = {**a, "v": torch.full((1,), 1.5)}
        assert step.distances(a, a) == (0.0, 0.0, "w")
        whole, worst, kind = step.distances(b, a)
        assert (whole, worst, kind) == (pytest.approx(0.5 / 26**0.5), 0.5, "v")
        assert step.distances({**a, "v": torch.full((1,), torch.nan)}, a)[2] == "v"
        with pytest.raises(AssertionError, match="other parameters"):
            step.distances({"v": a["v"]}, a)

    def test_toy_run_table_and_plot(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert bench.main(["--rounds", "1", "--only", "layer 20", "--output", str(tmp_path)]) == 0
        record = json.loads((tmp_path / "v41_layer.json").read_text())
        (setting,) = record["settings"]
        assert [entry["name"] for entry in setting["variants"]] == [variant.name for variant in bench.VARIANTS]
        assert all(entry["step"]["samples"] == 1 for entry in setting["variants"])
        printed = capsys.readouterr()
        assert "no figures to quote" in printed.out
        assert "[###################.] " in printed.err
        lines = table.markdown(record, setting["label"]).splitlines()
        assert len(lines) == 2 + len(bench.VARIANTS)
        assert (tmp_path / "v41_layer.svg").stat().st_size > 1000
        assert draw_file(tmp_path / "v41_layer.json", tmp_path / "again", plotting.draw).exists()
