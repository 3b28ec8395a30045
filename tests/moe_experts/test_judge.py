"""What the GPU tests judge the kernels by takes the definition's results, and none with a fault."""

import math

import pytest
import torch

from tests.moe_experts import inputs, on_gpu


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(on_gpu, "DEVICE", torch.device("cpu"))


@pytest.fixture
def call():
    """Gates and ups on both sides of the clamps, and the definition's results."""
    t, dout = on_gpu.operands((45, 0, 20), 3, 64, 40, gate_std=7.0)
    return t, dout, on_gpu.definition(t, dout)


def assert_noticed(t, dout, found):
    with pytest.raises(AssertionError):
        on_gpu.assert_right(t, dout, found)


@on_gpu.each_form
@pytest.mark.parametrize("gate_std", [1.0, 7.0])
@pytest.mark.parametrize(("groups", "tail", "hidden", "inner"), inputs.SHAPES)
def test_the_definition_is_right(groups, tail, hidden, inner, gate_std, packed):
    t, dout = on_gpu.operands(groups, tail, hidden, inner, packed=packed, gate_std=gate_std)
    on_gpu.assert_right(t, dout, on_gpu.definition(t, dout))


@pytest.mark.parametrize("name", [*on_gpu.ROWS, *on_gpu.WEIGHTS])
@pytest.mark.parametrize("factor", [1.05, -1.0, 0.0, math.nan])
def test_one_wrong_element_is_noticed(name, factor, call):
    """The largest of a row: 5% of it are more than what sums may be off."""
    t, dout, found = call
    result = found[name].clone()
    row = result[0].view(-1)
    row[row.float().abs().argmax()] *= factor
    assert_noticed(t, dout, found | {name: result})


@pytest.mark.parametrize("name", [*on_gpu.ROWS, *on_gpu.WEIGHTS])
def test_a_wrong_band_is_noticed(name, call):
    """Every second one of 16 columns, as where halves of a tile are swapped."""
    t, dout, found = call
    result = found[name].clone()
    result[..., :16], result[..., 16:32] = found[name][..., 16:32], found[name][..., :16]
    assert_noticed(t, dout, found | {name: result})


def test_swapped_gate_and_up_are_noticed(call):
    """In all that is made of them, or in the result of each alone; and the SwiGLU of the wrong operand."""
    t, dout, found = call
    swapped = t._replace(gate_proj=t.up_proj, up_proj=t.gate_proj)
    assert_noticed(t, dout, on_gpu.definition(swapped, dout))
    for one, other in (("gate", "up"), ("dw1", "dw3")):
        assert_noticed(t, dout, found | {one: found[other], other: found[one]})
    halves = found["dgate_dup"].chunk(2, dim=1)
    assert_noticed(t, dout, found | {"dgate_dup": torch.cat(halves[::-1], dim=1)})
    gate, up = (found[name].float().clamp(max=t.swiglu_limit) for name in ("gate", "up"))
    assert_noticed(t, dout, found | {"h": (torch.nn.functional.silu(up) * gate).bfloat16()})


@pytest.mark.parametrize("name", ["out", "dx"])
@pytest.mark.parametrize("value", [-0.0, 1e-30, math.nan])
def test_what_is_not_zero_after_the_last_expert_is_noticed(name, value, call):
    t, dout, found = call
    result = found[name].clone()
    result[-1, 5] = value
    assert_noticed(t, dout, found | {name: result})


@pytest.mark.parametrize("name", on_gpu.WEIGHTS)
def test_a_gradient_of_an_expert_without_rows_is_noticed(name, call):
    t, dout, found = call
    result = found[name].clone()
    result[1, 3, 5] = 1e-30
    assert_noticed(t, dout, found | {name: result})


def test_only_the_sign_of_zeros_is_left_out():
    signs = {"out": torch.tensor([-0.0, 0.0, 1e-40, -1e-40, -2.0, math.inf]).bfloat16()}
    found = on_gpu.without_signs_of_zeros(signs)["out"]
    assert found.view(torch.int16).tolist()[:2] == [0, 0]
    assert torch.equal(found[2:].view(torch.int16), signs["out"][2:].view(torch.int16))
