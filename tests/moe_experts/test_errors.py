"""Wrong arguments: which error, naming what, of the public functions and the operators, real and traced."""

import math

import pytest
import torch
from moe_experts import (
    moe_experts,
    moe_experts_backward,
    moe_experts_backward_data,
    moe_experts_forward,
    moe_experts_weight_grad,
    reference,
)

from tests.moe_experts.wrong import (
    BF16,
    COUNTS,
    counts,
    elsewhere,
    freed,
    made,
    off_by_one,
    ones,
    real_and_fake,
    rows,
    transposed,
)

OPERATORS = torch.ops.moe_experts

# M = 7, E = 3, H = 16, I = 24
FORWARD = {
    "x": ones(7, 16),
    "gate_proj": ones(3, 24, 16),
    "up_proj": ones(3, 24, 16),
    "down_proj": ones(3, 16, 24),
    COUNTS: counts(2, 0, 4),
    "swiglu_limit": 10.0,
}
PACKED = {"gate_proj": ones(3, 48, 16), "up_proj": None}
BAD_X = [
    ("x fp32", {"x": ones(7, 16, dtype=torch.float32)}, "^x must have dtype bfloat16, got float32"),
    ("x fp16", {"x": ones(7, 16, dtype=torch.float16)}, "^x must have dtype bfloat16, got float16"),
    ("x 1-D", {"x": ones(16)}, r"^x must have 2 dimensions, got shape \(16,\)"),
    ("x 3-D", {"x": ones(1, 7, 16)}, r"^x must have 2 dimensions, got shape \(1, 7, 16\)"),
    ("x elsewhere", {"x": elsewhere(7, 16)}, "must be on one device, .*x on meta"),
    ("x transposed", {"x": transposed(7, 16)}, r"^x must be contiguous, got shape \(7, 16\) with strides \(1, 7\)"),
    ("x a slice", {"x": lambda: torch.ones(7, 32, dtype=BF16)[:, :16]}, "^x must be contiguous, got"),
    ("x expanded", {"x": lambda: torch.ones(1, 16, dtype=BF16).expand(7, 16)}, "^x must be contiguous, got"),
]
BAD_WEIGHTS = [
    *(
        (f"{name} {text}", {name: make(*FORWARD[name]().shape)}, f"^{name} must have dtype bfloat16, got {text}")
        for name in ("gate_proj", "up_proj", "down_proj")
        for text, make in (
            ("float32", lambda *shape: ones(*shape, dtype=torch.float32)),
            ("float16", lambda *shape: ones(*shape, dtype=torch.float16)),
        )
    ),
    ("gate 2-D", {"gate_proj": ones(24, 16)}, r"^gate_proj must have 3 dimensions, got shape \(24, 16\)"),
    ("up 4-D", {"up_proj": ones(1, 3, 24, 16)}, r"^up_proj must have 3 dimensions"),
    ("down 2-D", {"down_proj": ones(16, 24)}, r"^down_proj must have 3 dimensions"),
    ("gate of another H", {"gate_proj": ones(3, 24, 8)}, r"^gate_proj must have shape \(3, 24, 16\), got \(3, 24, 8\)"),
    ("gate of another I", {"gate_proj": ones(3, 32, 16)}, r"^gate_proj must have shape \(3, 24, 16\), got \(3, 32,"),
    ("gate of other experts", {"gate_proj": ones(4, 24, 16)}, r"^gate_proj must have shape \(3, 24, 16\), got \(4, 24"),
    ("up of another I", {"up_proj": ones(3, 32, 16)}, r"^up_proj must have shape \(3, 24, 16\), got \(3, 32, 16\)"),
    ("up of another H", {"up_proj": ones(3, 24, 8)}, r"^up_proj must have shape \(3, 24, 16\), got \(3, 24, 8\)"),
    ("up of other experts", {"up_proj": ones(2, 24, 16)}, r"^up_proj must have shape \(3, 24, 16\), got \(2, 24, 16\)"),
    ("down of another H", {"down_proj": ones(3, 8, 24)}, r"^down_proj must have shape \(3, 16, 24\), got \(3, 8, 24\)"),
    (
        "down of other experts",
        {"down_proj": ones(4, 16, 24)},
        r"^down_proj must have shape \(3, 16, 24\), got \(4, 16,",
    ),
    ("gate packed by mistake", {"gate_proj": ones(3, 48, 16)}, r"^gate_proj must have shape \(3, 24, 16\), got \(3"),
    ("up forgotten", {"up_proj": None}, r"^gate_proj, which is packed .* must have shape \(3, 48, 16\), got \(3, 24"),
    ("odd packed", PACKED | {"gate_proj": ones(3, 47, 16)}, r"rows 2I of gate_proj.* must be a multiple of 2, got 47"),
    ("packed of another I", PACKED | {"gate_proj": ones(3, 64, 16)}, r"must have shape \(3, 48, 16\), got \(3, 64"),
    (
        "H 12",
        {"x": ones(7, 12), "gate_proj": ones(3, 24, 12), "up_proj": ones(3, 24, 12), "down_proj": ones(3, 12, 24)},
        "^hidden_size must be a positive multiple of 8, got hidden_size 12 and intermediate_size 24",
    ),
    (
        "I 20",
        {"gate_proj": ones(3, 20, 16), "up_proj": ones(3, 20, 16), "down_proj": ones(3, 16, 20)},
        "^intermediate_size must be a positive multiple of 8, got hidden_size 16 and intermediate_size 20",
    ),
    (
        "H 0",
        {"x": ones(7, 0), "gate_proj": ones(3, 24, 0), "up_proj": ones(3, 24, 0), "down_proj": ones(3, 0, 24)},
        "^hidden_size must be a positive multiple of 8, got hidden_size 0",
    ),
    (
        "I 0",
        {"gate_proj": ones(3, 0, 16), "up_proj": ones(3, 0, 16), "down_proj": ones(3, 16, 0)},
        "^intermediate_size must be a positive multiple of 8, got hidden_size 16 and intermediate_size 0",
    ),
    ("gate transposed", {"gate_proj": transposed(3, 24, 16)}, "^gate_proj must have contiguous rows, .* strides"),
    ("up transposed", {"up_proj": transposed(3, 24, 16)}, "^up_proj must have contiguous rows, .* strides"),
    ("packed transposed", PACKED | {"gate_proj": transposed(3, 48, 16)}, "^gate_proj must have contiguous rows"),
    ("down transposed", {"down_proj": transposed(3, 16, 24)}, "^down_proj must be contiguous, got shape"),
    (
        "gate with a row pitch",
        {"gate_proj": lambda: torch.ones(3, 24, 32, dtype=BF16)[..., :16]},
        "^gate_proj must have contiguous rows",
    ),
    (
        "every second channel of up",
        {"up_proj": lambda: torch.ones(3, 24, 32, dtype=BF16)[..., ::2]},
        "^up_proj must have contiguous rows",
    ),
    (
        "experts that are no whole rows apart",
        {"gate_proj": lambda: torch.ones(3 * 392, dtype=BF16).as_strided((3, 24, 16), (392, 16, 1))},
        "^gate_proj must have .* experts that are whole rows apart",
    ),
    (
        "down of every second expert",
        {"down_proj": lambda: torch.ones(6, 16, 24, dtype=BF16)[::2]},
        "^down_proj must be contiguous",
    ),
    *(
        (f"{name} elsewhere", {name: elsewhere(*FORWARD[name]().shape)}, f"must be on one device, .*{name} on meta")
        for name in ("gate_proj", "up_proj", "down_proj")
    ),
]
BAD_COUNTS = [
    ("counts fp32", {COUNTS: ones(3, dtype=torch.float32)}, f"^{COUNTS} must have dtype int32 or int64, got float32"),
    ("counts int16", {COUNTS: ones(3, dtype=torch.int16)}, f"^{COUNTS} must have dtype int32 or int64, got int16"),
    ("counts bool", {COUNTS: ones(3, dtype=torch.bool)}, f"^{COUNTS} must have dtype int32 or int64, got bool"),
    ("counts 0-D", {COUNTS: ones(dtype=torch.int64)}, rf"^{COUNTS} must have 1 dimensions, got shape \(\)"),
    ("counts 2-D", {COUNTS: ones(1, 3, dtype=torch.int64)}, rf"^{COUNTS} must have 1 dimensions, got shape \(1, 3\)"),
    ("counts of other experts", {COUNTS: counts(2, 4)}, r"^gate_proj must have shape \(2, 24, 16\), got \(3, 24, 16\)"),
    ("counts elsewhere", {COUNTS: elsewhere(3, dtype=torch.int64)}, f"must be on one device, .*{COUNTS} on meta"),
    (
        "no experts",
        {
            COUNTS: ones(0, dtype=torch.int64),
            "gate_proj": ones(0, 24, 16),
            "up_proj": ones(0, 24, 16),
            "down_proj": ones(0, 16, 24),
        },
        f"^{COUNTS}: its number of experts E must be at least 1, got 0",
    ),
]
BAD_LIMITS = [
    ("limit 0", {"swiglu_limit": 0.0}, "^swiglu_limit must be a number above 0, .* got 0.0"),
    ("limit negative", {"swiglu_limit": -10.0}, "^swiglu_limit must be a number above 0, .* got -10.0"),
    ("limit -inf", {"swiglu_limit": -math.inf}, "^swiglu_limit must be a number above 0, .* got -inf"),
    ("limit nan", {"swiglu_limit": math.nan}, "^swiglu_limit must be a number above 0, .* got nan"),
]
BAD_LIMIT_TYPES = [
    ("limit text", {"swiglu_limit": "10"}, "^swiglu_limit must be a number above 0, .* got '10'"),
    ("limit None", {"swiglu_limit": None}, "^swiglu_limit must be a number above 0, .* got None"),
    ("limit bool", {"swiglu_limit": True}, "^swiglu_limit must be a number above 0, .* got True"),
]
BAD = BAD_X + BAD_WEIGHTS + BAD_COUNTS + BAD_LIMITS


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """All is checked before anything is computed."""
    for name in ("forward", "backward", "backward_data", "weight_grad"):
        monkeypatch.setattr(reference, name, lambda *args: pytest.fail("something ran"))


@real_and_fake
@rows("changes message", BAD + BAD_LIMIT_TYPES)
def test_moe_experts(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        moe_experts(**made(FORWARD | changes))


@rows("changes message", BAD_X + BAD_COUNTS + BAD_LIMITS + BAD_LIMIT_TYPES)
def test_forward(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_experts_forward(**made(FORWARD | changes))


@real_and_fake
@rows("changes message", BAD)
def test_the_forward_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.moe_experts_forward(*made(FORWARD | changes).values())


SAVED = {"gate": ones(7, 24), "up": ones(7, 24)}
BAD_SAVED = [
    *(
        case
        for name in ("gate", "up")
        for case in (
            (f"{name} fp32", {name: ones(7, 24, dtype=torch.float32)}, f"^{name} must have dtype bfloat16, got"),
            (f"{name} of other rows", {name: ones(8, 24)}, rf"^{name} must have shape \(7, 24\), got \(8, 24\)"),
            (f"{name} of both", {name: ones(7, 48)}, rf"^{name} must have shape \(7, 24\), got \(7, 48\)"),
            (f"{name} transposed", {name: transposed(7, 24)}, f"^{name} must be contiguous, got shape"),
            (f"{name} elsewhere", {name: elsewhere(7, 24)}, f"^{name} must be on cpu, .* got meta"),
        )
    ),
]
BAD_DOUT = [
    ("dout fp32", {"dout": ones(7, 16, dtype=torch.float32)}, "^dout must have dtype bfloat16, got float32"),
    ("dout of other rows", {"dout": ones(8, 16)}, r"must have shape \(\d, \d+\), got \(\d, \d+\)"),
    ("dout 1-D", {"dout": ones(16)}, r"^dout must have (2 dimensions|shape \(7, 16\)), got"),
    ("dout elsewhere", {"dout": elsewhere(7, 16)}, "dout (must be on cpu|on meta)"),
]
BACKWARD = {"dout": ones(7, 16), **{n: FORWARD[n] for n in list(FORWARD)[:5]}, **SAVED, "swiglu_limit": 10.0}
DATA = {name: value for name, value in BACKWARD.items() if name != "x"}
# Without x, its channels are those of dout, and M its rows.
BAD_DATA = BAD_DOUT + BAD_SAVED + [case for case in BAD_WEIGHTS + BAD_COUNTS + BAD_LIMITS if "x" not in case[1]]


@real_and_fake
@rows("changes message", BAD + BAD_SAVED + BAD_DOUT)
def test_the_backward_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.moe_experts_backward(*made(BACKWARD | changes).values())


@rows("changes message", BAD_X + BAD_LIMITS + BAD_LIMIT_TYPES + BAD_SAVED + BAD_DOUT)
def test_backward(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_experts_backward(**made(BACKWARD | changes))


@real_and_fake
@rows("changes message", BAD_DATA)
def test_the_backward_data_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.moe_experts_backward_data(*made(DATA | changes).values())


@rows("changes message", BAD_LIMITS + BAD_LIMIT_TYPES + BAD_SAVED + BAD_DOUT)
def test_backward_data(changes, message):
    with pytest.raises(ValueError, match=message):
        moe_experts_backward_data(**made(DATA | changes))


WEIGHT_GRAD = {
    "dout": ones(7, 16),
    "x": ones(7, 16),
    COUNTS: counts(2, 0, 4),
    "dgate_dup": ones(7, 48),
    "h": ones(7, 24),
    "packed": False,
}


@real_and_fake
@rows(
    "changes message",
    [
        *BAD_X,
        *(case for case in BAD_COUNTS if case[0] not in ("counts of other experts", "no experts")),
        ("no experts", {COUNTS: ones(0, dtype=torch.int64)}, "its number of experts E must be at least 1, got 0"),
        ("dout fp32", {"dout": ones(7, 16, dtype=torch.float32)}, "^dout must have dtype bfloat16, got float32"),
        ("dout of other rows", {"dout": ones(8, 16)}, r"^dout must have shape \(7, 16\), got \(8, 16\)"),
        ("dout of another H", {"dout": ones(7, 8)}, r"^dout must have shape \(7, 16\), got \(7, 8\)"),
        ("dout elsewhere", {"dout": elsewhere(7, 16)}, "must be on one device, .*dout on meta"),
        ("dgate_dup fp32", {"dgate_dup": ones(7, 48, dtype=torch.float32)}, "^dgate_dup must have dtype bfloat16, got"),
        ("dgate_dup of one", {"dgate_dup": ones(7, 24)}, r"^dgate_dup must have shape \(7, 48\), got \(7, 24\)"),
        ("dgate_dup transposed", {"dgate_dup": transposed(7, 48)}, "^dgate_dup must be contiguous"),
        ("h fp32", {"h": ones(7, 24, dtype=torch.float32)}, "^h must have dtype bfloat16, got"),
        ("h of other rows", {"h": ones(6, 24)}, r"^h must have shape \(7, 24\), got \(6, 24\)"),
        ("h transposed", {"h": transposed(7, 24)}, "^h must be contiguous"),
        ("h elsewhere", {"h": elsewhere(7, 24)}, "must be on one device, .*h on meta"),
        ("H 12", {"x": ones(7, 12), "dout": ones(7, 12)}, "^hidden_size must be a positive multiple of 8, got"),
        ("I 20", {"h": ones(7, 20), "dgate_dup": ones(7, 40)}, "^intermediate_size must be a positive multiple of 8"),
    ],
)
@pytest.mark.parametrize(
    "function", [moe_experts_weight_grad, OPERATORS.moe_experts_weight_grad], ids=["function", "operator"]
)
def test_weight_grad(function, changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        function(*made(WEIGHT_GRAD | changes).values())


def test_packed_is_a_bool():
    with pytest.raises(TypeError, match=r"^packed must be a bool, got int"):
        moe_experts_weight_grad(**made(WEIGHT_GRAD | {"packed": 1}))


@pytest.mark.parametrize("value", [[[1.0] * 8], 1.0, "x"], ids=["list", "number", "string"])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (moe_experts, FORWARD),
        (moe_experts_forward, FORWARD),
        (moe_experts_backward, BACKWARD),
        (moe_experts_backward_data, DATA),
        (moe_experts_weight_grad, WEIGHT_GRAD),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_no_tensors(function, arguments, value):
    for name in arguments.keys() - {"swiglu_limit", "packed"}:
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got {type(value).__name__}"):
            function(**made(arguments | {name: value}))
    for name in arguments.keys() - {"swiglu_limit", "packed", "up_proj"}:
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got NoneType"):
            function(**made(arguments | {name: None}))


CALLS = [
    (moe_experts, FORWARD, ("x", "gate_proj", "up_proj", "down_proj")),
    (moe_experts_backward, BACKWARD, ("x", "gate_proj", "up_proj", "down_proj", "gate", "up")),
    (moe_experts_backward_data, DATA, ("gate_proj", "up_proj", "down_proj", "gate", "up")),
    (moe_experts_weight_grad, WEIGHT_GRAD, ("x", "dgate_dup", "h")),
]


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [(f, a, n) for f, a, names in CALLS for n in names],
    ids=[f"{f.__name__}-{n}" for f, _, names in CALLS for n in names],
)
def test_memory(function, arguments, name):
    """Addresses that no vector load reads, and parameters whose storage was freed."""
    values = made(arguments)
    with pytest.raises(ValueError, match=rf"^{name} must have an alignment of 16 bytes, got an address 2 past"):
        function(**values | {name: off_by_one(values[name])})
    with pytest.raises(ValueError, match=rf"^{name} must have its storage, got a tensor whose storage was freed"):
        function(**values | {name: freed(values[name].clone())})


def test_empty_operands_have_no_address_to_look_at(monkeypatch):
    monkeypatch.undo()
    values = made(FORWARD | {"x": ones(0, 16), COUNTS: counts(0, 0, 0)})
    assert moe_experts(**values).shape == (0, 16)
