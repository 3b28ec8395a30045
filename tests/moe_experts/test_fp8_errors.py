"""Wrong arguments of the FP8 path: which error, naming what, of the functions and the operators, real and traced."""

import math

import pytest
import torch
from moe_experts import (
    moe_experts,
    moe_experts_fp8_backward,
    moe_experts_fp8_backward_accumulate,
    moe_experts_fp8_backward_data,
    moe_experts_fp8_forward_quantized,
    moe_experts_fp8_quantize_weights,
    moe_experts_fp8_weight_grad_accumulate,
)
from moe_experts.fp8 import reference

from tests.moe_experts.wrong import (
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
FP8, FP32 = torch.float8_e4m3fn, torch.float32


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    for name in ("quantize_weights", "forward", "backward", "backward_data", "backward_accumulate"):
        monkeypatch.setattr(reference, name, lambda *args: pytest.fail("something ran"))
    monkeypatch.setattr(reference, "weight_grad_accumulate", lambda *args: pytest.fail("something ran"))


def codes(*shape):
    return lambda: torch.zeros(shape, dtype=FP8)


def scales(*shape):
    return ones(*shape, dtype=FP32)


# M = 7, E = 3, H = 256, INNER = 128: Mp = (1 + 3) 128
M, E, H, INNER, MP = 7, 3, 256, 128, 512
WEIGHTS = {"gate_proj": ones(E, INNER, H), "up_proj": ones(E, INNER, H), "down_proj": ones(E, H, INNER)}
FORWARD = {"x": ones(M, H), **WEIGHTS, COUNTS: counts(2, 0, 4), "swiglu_limit": 10.0}
QUANTIZED = {
    "x": ones(M, H),
    COUNTS: counts(2, 0, 4),
    "swiglu_limit": 10.0,
    "w13_q": codes(E, 2 * INNER, H),
    "w13_sf": scales(E, 2, 2),
    "w2_q": codes(E, H, INNER),
    "w2_sf": scales(E, 2, 1),
}
TRANSPOSED = {
    "w13_t": codes(E, H, 2 * INNER),
    "w13_t_sf": scales(E, 2, 2),
    "w2_t": codes(E, INNER, H),
    "w2_t_sf": scales(E, 1, 2),
}
DATA = {"dout": ones(M, H), COUNTS: counts(2, 0, 4), "gate_up": ones(MP, 2 * INNER), **TRANSPOSED, "swiglu_limit": 10.0}
KEPT = {"gate_up": ones(MP, 2 * INNER), "x_t": codes(MP * H), "x_t_sf": scales(4, H)}
JOINT = {"dout": ones(M, H), COUNTS: counts(2, 0, 4), **KEPT, **TRANSPOSED, "swiglu_limit": 10.0}
SUMS = {"dw13": scales(E, 2 * INNER, H), "dw2": scales(E, H, INNER)}
BACKWARD = JOINT | {"packed": False}
ACCUMULATE = JOINT | SUMS | {"accumulate": True}
SECOND = {
    COUNTS: counts(2, 0, 4),
    "dout_t": codes(MP * H),
    "dout_t_sf": scales(4, H),
    "h_t": codes(MP * INNER),
    "h_t_sf": scales(4, INNER),
    "dgu_t": codes(MP * 2 * INNER),
    "dgu_t_sf": scales(4, 2 * INNER),
    "x_t": codes(MP * H),
    "x_t_sf": scales(4, H),
    "num_rows": M,
    **SUMS,
    "accumulate": True,
}
# function, operator, arguments
CALLS = {
    "quantize_weights": (moe_experts_fp8_quantize_weights, OPERATORS.moe_experts_fp8_quantize_weights, WEIGHTS),
    "forward_quantized": (moe_experts_fp8_forward_quantized, OPERATORS.moe_experts_fp8_forward_quantized, QUANTIZED),
    "backward": (moe_experts_fp8_backward, OPERATORS.moe_experts_fp8_backward, BACKWARD),
    "backward_data": (moe_experts_fp8_backward_data, OPERATORS.moe_experts_fp8_backward_data, DATA),
    "backward_accumulate": (
        moe_experts_fp8_backward_accumulate,
        OPERATORS.moe_experts_fp8_backward_accumulate,
        ACCUMULATE,
    ),
    "weight_grad_accumulate": (
        moe_experts_fp8_weight_grad_accumulate,
        OPERATORS.moe_experts_fp8_weight_grad_accumulate,
        SECOND,
    ),
}


def every_second(shape, dtype):
    return lambda: torch.ones((*shape[:-1], 2 * shape[-1])).to(dtype)[..., ::2]


def bad_operand(call, name):
    """Of codes or scales: dtype, shape, device, strides."""
    value = CALLS[call][2][name]()
    shape, dtype = value.shape, value.dtype
    right = rf"{name} must have shape \({shape[0]},"
    cases = {
        "bf16": (ones(*shape), rf"^{name} must have dtype (float8_e4m3fn|float32), got bfloat16"),
        "elsewhere": (elsewhere(*shape, dtype=dtype), rf"must be on one device.*{name} on meta"),
        "strided": (every_second(shape, dtype), rf"^{name} must be contiguous, got shape"),
    }
    if dtype == FP8:
        other = lambda: torch.zeros(shape, dtype=torch.float8_e4m3fnuz)  # noqa: E731
        cases["fnuz"] = (other, rf"^{name} must have dtype float8_e4m3fn, got float8_e4m3fnuz")
        cases["one more"] = (codes(shape[0] + 1, *shape[1:]), f"^{right}")
    else:
        cases["one more"] = (scales(*shape[:-1], shape[-1] + 1), f"^({right}|hidden_size must|intermediate_size must)")
    for text, (given, message) in cases.items():
        yield f"{call}-{name} {text}", call, {name: given}, message


CODES = {
    "forward_quantized": ("w13_q", "w2_q"),
    "backward": ("x_t", "w13_t", "w2_t"),
    "backward_data": ("w13_t", "w2_t"),
    "backward_accumulate": ("x_t", "w13_t", "w2_t"),
    "weight_grad_accumulate": ("dout_t", "h_t", "dgu_t", "x_t"),
}
BAD_QUANTIZED = [
    one
    for call, names in CODES.items()
    for name in names
    for both in (name, name.removesuffix("_q") + "_sf")
    for one in bad_operand(call, both)
]
ROWS = {"forward_quantized": "x", "backward": "dout", "backward_data": "dout", "backward_accumulate": "dout"}
BAD_ROWS = [
    one
    for call, name in ROWS.items()
    for one in (
        (f"{call}-fp32", call, {name: scales(M, H)}, rf"^{name} must have dtype bfloat16, got float32"),
        (f"{call}-1-D", call, {name: ones(H)}, rf"^{name} must have 2 dimensions, got shape \({H},\)"),
        (f"{call}-elsewhere", call, {name: elsewhere(M, H)}, rf"must be on one device.*{name} on meta"),
        (f"{call}-H", call, {name: ones(M, 128)}, rf"^w13_(q|t) must have shape \({E},"),
        (f"{call}-H 136", call, {name: ones(M, 136)}, "^hidden_size must be a positive multiple of 128, got hidden_s"),
        (f"{call}-limit 0", call, {"swiglu_limit": 0.0}, "^swiglu_limit must be a number above 0"),
        (f"{call}-limit NaN", call, {"swiglu_limit": math.nan}, "^swiglu_limit must be a number above 0"),
    )
]
BAD_ROWS.append(
    ("x strided", "forward_quantized", {"x": transposed(M, H)}, "^x must be contiguous, got shape"),
)
BAD_COUNTS = [
    one
    for call in ("forward_quantized", "backward", "backward_data", "backward_accumulate", "weight_grad_accumulate")
    for one in (
        (f"{call}-fp32", call, {COUNTS: scales(E)}, rf"^{COUNTS} must have dtype int32 or int64, got float32"),
        (f"{call}-2-D", call, {COUNTS: ones(1, E, dtype=torch.int64)}, rf"^{COUNTS} must have 1 dimensions"),
        (f"{call}-none", call, {COUNTS: ones(0, dtype=torch.int64)}, f"^{COUNTS}: its number of experts E must be at"),
        (f"{call}-elsewhere", call, {COUNTS: elsewhere(E, dtype=torch.int64)}, f"one device.*{COUNTS} on meta"),
        (f"{call}-other E", call, {COUNTS: counts(2, 4)}, r"must have shape \("),
    )
]
# Mp of 129 rows is a block more, that of 128 the same as of 7.
BAD_KEPT = [
    one
    for call in ("backward", "backward_accumulate", "backward_data")
    for one in (
        (
            f"{call}-another M",
            call,
            {"dout": ones(129, H)},
            rf"^gate_up must have shape \(640, {2 * INNER}\), got",
        ),
        (f"{call}-gate_up fp32", call, {"gate_up": scales(MP, 2 * INNER)}, "^gate_up must have dtype bfloat16"),
        (
            f"{call}-gate_up empty",
            call,
            {"gate_up": ones(0)},
            rf"^gate_up must have shape \({MP}, {2 * INNER}\)",
        ),
        (f"{call}-gate_up strided", call, {"gate_up": transposed(MP, 2 * INNER)}, "^gate_up must be contiguous"),
        (f"{call}-gate_up elsewhere", call, {"gate_up": elsewhere(MP, 2 * INNER)}, "one device.*gate_up on meta"),
    )
]
BAD_KEPT += [
    ("num_rows of another M", "weight_grad_accumulate", {"num_rows": 129}, r"^dout_t must have shape \(163840,\), got"),
    ("num_rows negative", "weight_grad_accumulate", {"num_rows": -1}, "^num_rows must be at least 0, got -1"),
    ("I of h_t", "weight_grad_accumulate", {"h_t_sf": scales(4, 64)}, "^intermediate_size must be a positive mult"),
]


def strided(shape, *strides):
    return lambda: torch.ones(1 << 20).as_strided(shape, strides)


def bad_sums(call, name):
    """Of a buffer of gradients: dtype, shape, device, layout."""
    e, r, c = shape = SUMS[name]().shape
    right = rf"^{name} must have shape \({e}, {r}, {c}\)"
    layout = f"^{name} must have contiguous channels, and rows and experts that do not overlap"
    cases = {
        "bf16": (ones(*shape), f"^{name} must have dtype float32, got bfloat16"),
        "half": (scales(e, r // 2, c), right),
        "other E": (scales(e + 1, r, c), right),
        "2-D": (scales(e * r, c), right),
        "elsewhere": (elsewhere(*shape, dtype=FP32), f"^{name} must be on cpu, .* meta"),
        "transposed": (strided(shape, r * c, 1, r), layout),
        "one row": (strided(shape, c, 0, 1), layout),
        "one expert": (strided(shape, 0, c, 1), layout),
        "rows overlap": (strided(shape, r * c, c - 4, 1), layout),
        "experts overlap": (strided(shape, r * c - 4, c, 1), layout),
        "odd rows": (strided(shape, r * (c + 4), c + 2, 1), layout),
        "odd experts": (strided(shape, r * c + 2, c, 1), layout),
        "experts inside": (strided(shape, c, e * c, 1), layout),
    }
    for text, (value, message) in cases.items():
        yield f"{call}-{name} {text}", call, {name: value}, message


ACCUMULATING = ("backward_accumulate", "weight_grad_accumulate")
BAD_SUMS = [one for call in ACCUMULATING for name in SUMS for one in bad_sums(call, name)]
BAD = [*BAD_QUANTIZED, *BAD_ROWS, *BAD_COUNTS, *BAD_KEPT, *BAD_SUMS]


@rows("call changes message", BAD)
def test_functions(call, changes, message):
    function, _, arguments = CALLS[call]
    with pytest.raises(ValueError, match=message):
        function(**made(arguments | changes))


@real_and_fake
@rows("call changes message", BAD)
def test_operators(call, changes, message, mode):
    _, operator, arguments = CALLS[call]
    with mode(), pytest.raises(ValueError, match=message):
        operator(*made(arguments | changes).values())


PACKED = {"gate_proj": ones(E, 2 * INNER, H), "up_proj": None}
BAD_WEIGHTS = [
    ("gate fp32", {"gate_proj": scales(E, INNER, H)}, "^gate_proj must have dtype bfloat16, got float32"),
    ("up fp16", {"up_proj": ones(E, INNER, H, dtype=torch.float16)}, "^up_proj must have dtype bfloat16, got float16"),
    ("down FP8", {"down_proj": codes(E, H, INNER)}, "^down_proj must have dtype bfloat16, got float8_e4m3fn"),
    ("gate 2-D", {"gate_proj": ones(INNER, H)}, "^gate_proj must have 3 dimensions"),
    (
        "up of other experts",
        {"up_proj": ones(2, INNER, H)},
        rf"^up_proj must have shape \({E}, {INNER}, {H}\)",
    ),
    (
        "gate of another H",
        {"gate_proj": ones(E, INNER, 128)},
        rf"^gate_proj must have shape \({E}, {INNER}, {H}\)",
    ),
    ("up forgotten", {"up_proj": None}, rf"^gate_proj, which is packed .* must have shape \({E}, {2 * INNER}, {H}\)"),
    ("odd packed", PACKED | {"gate_proj": ones(E, 255, H)}, "rows 2I of gate_proj.* must be a multiple of 2, got 255"),
    ("gate transposed", {"gate_proj": transposed(E, INNER, H)}, "^gate_proj must have contiguous rows"),
    ("down transposed", {"down_proj": transposed(E, H, INNER)}, "^down_proj must be contiguous"),
    ("up elsewhere", {"up_proj": elsewhere(E, INNER, H)}, "must be on one device, .*up_proj on meta"),
    (
        "I 136",
        {"gate_proj": ones(E, 136, H), "up_proj": ones(E, 136, H), "down_proj": ones(E, H, 136)},
        "^intermediate_size must be a positive multiple of 128, got hidden_size 256 and intermediate_size 136",
    ),
]
NO_EXPERTS = {"gate_proj": ones(0, INNER, H), "up_proj": ones(0, INNER, H), "down_proj": ones(0, H, INNER)}


@real_and_fake
@rows("changes message", BAD_WEIGHTS)
def test_weights(changes, message, mode):
    calls = [
        lambda: moe_experts_fp8_quantize_weights(**made(WEIGHTS | changes)),
        lambda: OPERATORS.moe_experts_fp8_quantize_weights(*made(WEIGHTS | changes).values()),
        lambda: moe_experts(**made(FORWARD | changes), fp8=True),
        lambda: OPERATORS.moe_experts_fp8_forward(*made(FORWARD | changes).values(), True),
    ]
    for call in calls:
        with mode(), pytest.raises(ValueError, match=message):
            call()


@real_and_fake
@rows(
    "changes message",
    [
        ("x fp32", {"x": scales(M, H)}, "^x must have dtype bfloat16, got float32"),
        ("x transposed", {"x": transposed(M, H)}, "^x must be contiguous"),
        ("x elsewhere", {"x": elsewhere(M, H)}, "must be on one device, .*x on meta"),
        ("counts of other experts", {COUNTS: counts(3, 4)}, rf"^gate_proj must have shape \(2, {INNER}, {H}\)"),
        ("counts fp32", {COUNTS: scales(E)}, f"^{COUNTS} must have dtype int32 or int64"),
        ("limit -1", {"swiglu_limit": -1.0}, "^swiglu_limit must be a number above 0"),
    ],
)
def test_moe_experts(changes, message, mode):
    for call in (
        lambda: moe_experts(**made(FORWARD | changes), fp8=True),
        lambda: OPERATORS.moe_experts_fp8_forward(*made(FORWARD | changes).values(), False),
    ):
        with mode(), pytest.raises(ValueError, match=message):
            call()


def test_no_experts():
    with pytest.raises(ValueError, match=r"^down_proj: its number of experts E must be at least 1, got 0"):
        moe_experts_fp8_quantize_weights(**made(NO_EXPERTS))


@pytest.mark.parametrize("value", [[[1.0] * 8], 1.0, "x"], ids=["list", "number", "string"])
@pytest.mark.parametrize("call", CALLS)
def test_no_tensors(call, value):
    """A scale that was forgotten is one, too."""
    function, _, arguments = CALLS[call]
    tensors = [name for name, v in arguments.items() if callable(v)]
    for name in tensors:
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got {type(value).__name__}"):
            function(**made(arguments | {name: value}))
        if name != "up_proj":
            with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got NoneType"):
                function(**made(arguments | {name: None}))


@pytest.mark.parametrize(
    ("call", "name"),
    [("backward", "packed"), ("backward_accumulate", "accumulate"), ("weight_grad_accumulate", "accumulate")],
)
def test_flags_are_bools(call, name):
    function, _, arguments = CALLS[call]
    with pytest.raises(TypeError, match=f"^{name} must be a bool, got int"):
        function(**made(arguments | {name: 1}))


def test_num_rows_is_an_integer():
    for value in (7.0, True):
        with pytest.raises(ValueError, match=r"^num_rows must be an integer, got"):
            moe_experts_fp8_weight_grad_accumulate(**made(SECOND | {"num_rows": value}))


MEMORY = [(call, name) for call, (*_, arguments) in CALLS.items() for name, v in arguments.items() if callable(v)]


@pytest.mark.parametrize(
    ("call", "name"), [pair for pair in MEMORY if pair[1] not in (COUNTS, "dout")], ids=lambda v: v
)
def test_memory(call, name):
    """Addresses that no vector load reads, and tensors whose storage was freed."""
    function, _, arguments = CALLS[call]
    values = made(arguments)
    past = values[name].element_size()
    with pytest.raises(ValueError, match=rf"^{name} must have an alignment of 16 bytes, got an address {past} past"):
        function(**values | {name: off_by_one(values[name])})
    with pytest.raises(ValueError, match=rf"^{name} must have its storage, got a tensor whose storage was freed"):
        function(**values | {name: freed(values[name].clone())})


@pytest.mark.parametrize("call", ACCUMULATING)
def test_buffers_that_share_memory(call):
    """The same bytes, the last row of one the first of the other, an expert of one within another."""
    function, _, arguments = CALLS[call]
    size = E * 2 * INNER * H
    flat = torch.ones(2 * size)
    dw13 = flat[:size].view(E, 2 * INNER, H)
    second = [
        flat[: size // 2].view(E, H, INNER),
        flat[size - INNER : size - INNER + size // 2].view(E, H, INNER),
        flat[4:].as_strided((E, H, INNER), (2 * INNER * H, INNER, 1)),
        flat.as_strided((E, H, INNER), (H * INNER, INNER, 1), 128),
    ]
    for dw2 in second:
        with pytest.raises(ValueError, match=r"^dw13 and dw2 must not overlap, got buffers that share memory"):
            function(**made(arguments) | {"dw13": dw13, "dw2": dw2})


def test_kept_tensors_of_a_forward_that_saved_nothing():
    """The operator's empty results, given to a backward."""
    empty = {name: v().flatten()[:0] for name, v in (KEPT | TRANSPOSED).items()}
    with pytest.raises(ValueError, match=r"^w2_t must have 3 dimensions"):
        moe_experts_fp8_backward(**made(BACKWARD | empty))
