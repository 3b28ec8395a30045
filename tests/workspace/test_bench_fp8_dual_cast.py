"""The fp8_dual_cast bench: its byte formulas, its verification and its peers."""

from __future__ import annotations

import pytest
import torch
from fp8_dual_cast import reference

from benches import fp8_dual_cast as bench
from tests.support.compare import assert_same_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("tokens", "channels", "rope", "fused", "separate"),
    [(8192, 32768, True, 1.0905, 1.7616), (16384, 5120, False, 0.3408, 0.5086), (8192, 512, False, 0.0170, 0.0254)],
)
def test_byte_formulas(tokens, channels, rope, fused, separate):
    elements = tokens * channels
    table = tokens * (8 + 4 * 64) if rope else 0  # positions, and a row of cosines and sines for each
    assert bench.fused_bytes(tokens, channels, rope) == 4.0625 * elements + table
    assert bench.separate_bytes(tokens, channels, rope) == (6.5625 if rope else 6.0625) * elements + table
    assert bench.fused_bytes(tokens, channels, False) / 1e9 == pytest.approx(fused, abs=5e-5)
    assert (bench.separate_bytes(tokens, channels, rope) - table) / 1e9 == pytest.approx(separate, abs=5e-5)
    padded = 2 * 130 * 128 + 130 * 128 + 128 * 256 + 4 * (132 + 2 * 128)
    assert bench.fused_bytes(130, 128, False) == padded


@pytest.mark.parametrize("rope", [False, True])
def test_verification_of_the_dual_cast(rope):
    inputs = bench.make_inputs(1100, 1024, rope, CPU)
    outputs = bench.prepare_fused(inputs)()
    assert bench.same_as_definition(inputs, outputs).startswith("all bytes")
    assert bench.same_as_definition(inputs, bench.prepare_separate(inputs)()).startswith("all bytes")
    outputs.q_t.view(torch.uint8)[1000, 1150] = 1  # the padding behind the last token
    with pytest.raises(AssertionError, match="'q_t': 1,"):
        bench.same_as_definition(inputs, outputs)
    with pytest.raises(AssertionError, match="layouts"):
        bench.same_as_definition(inputs, (*outputs[:3], outputs[3].contiguous()))


@pytest.mark.parametrize("rope", [False, True])
def test_the_compiled_peer_does_the_same_work(rope):
    from benches.peers.compiled import _casts

    inputs = bench.make_inputs(256, 1024, rope, CPU)
    outputs = _casts(inputs.x, inputs.table, inputs.positions, inputs.head_dim)
    assert bench.close_to_definition(inputs, outputs).startswith("shares that differ")
    outputs[1].mul_(1.01)
    with pytest.raises(AssertionError, match="shares that differ"):
        bench.close_to_definition(inputs, outputs)


def test_cases_of_a_cpu_and_of_a_gpu():
    toy = bench.cases(CPU, False)
    assert len(toy) == len(bench.SHAPES) + len(bench.ROPE_SHAPES)
    assert max(case.bytes for case in toy) < 2 << 20
    full = bench.cases(torch.device("cuda"), False)
    assert full[0].label == "16384 x 32768"
    assert full[-1].label == "16384 x 5120, inverse RoPE"
    assert sum("torch.compile definition" in [c.name for c in case.candidates] for case in full) == len(bench.COMPILED)
    assert all(case.label.startswith("8192") for case in bench.cases(torch.device("cuda"), True))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim", "inverse"), [(64, 512, True), (3, 192, False), (33, 64, True)])
def test_rotation_kernel_equals_the_definition(heads, head_dim, inverse):
    from benches.peers.rotation import rotate_

    x = torch.randn(77, heads * head_dim, dtype=torch.bfloat16, device="cuda")
    table = torch.randn(77, 64, device="cuda")
    table[0, :32], table[0, 32:] = 1, 0
    positions = torch.randint(77, (77,), device="cuda")
    positions[0] = 0
    expected = reference.rotate(x, table, positions, head_dim, inverse)
    rotate_(x, table, positions, head_dim, inverse=inverse)
    assert_same_bytes(x, expected)
