"""Wrong arguments: which error, naming what, of the public functions and the operators, real and traced."""

import contextlib

import pytest
import torch
from mhc_projection import (
    MAX_LOGITS,
    hyper_connection,
    hyper_connection_streams,
    mhc_gates,
    mhc_projection,
    mhc_projection_streams,
    unsupported_shape_reason,
)
from torch._subclasses.fake_tensor import FakeTensorMode

real_and_fake = pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
PROJECTIONS = (mhc_projection, mhc_projection_streams)
CONNECTIONS = (hyper_connection, hyper_connection_streams)
BF16, NAN, INF = torch.bfloat16, float("nan"), float("inf")
OPERATORS = torch.ops.mhc_projection


def ones(*shape, dtype=torch.float32):
    """Makes a tensor when called, inside the test's FakeTensorMode."""
    return lambda: torch.ones(shape, dtype=dtype)


def streams(*shape):
    return ones(*shape, dtype=BF16)


def elsewhere(*shape, dtype=torch.float32):
    return lambda: torch.ones(shape, dtype=dtype, device="meta")


def made(arguments):
    return {name: value() if callable(value) else value for name, value in arguments.items()}


def rows(names, cases):
    """Parametrises by cases whose first field is their name."""
    return pytest.mark.parametrize(names.split(), [case[1:] for case in cases], ids=[case[0] for case in cases])


NOT_TENSORS = [("list", [[1.0] * 8]), ("number", 1.0), ("string", "x")]
PROJECTION = {"x": streams(3, 4, 16), "weight": ones(24, 64), "pre_mix": ones(3, 4)}
BAD_PROJECTIONS = [
    ("x 0-D", {"x": streams()}, "^x must have at least 2 dimensions, got"),
    ("x 1-D", {"x": streams(64)}, r"^x must have at least 2 dimensions, got shape \(64,\)"),
    ("x fp32", {"x": ones(3, 4, 16)}, "^x must have dtype bfloat16, got float32"),
    ("x fp16", {"x": ones(3, 4, 16, dtype=torch.float16)}, "^x must have dtype bfloat16, got float16"),
    ("x int", {"x": ones(3, 4, 16, dtype=torch.int16)}, "^x must have dtype bfloat16, got int16"),
    ("d 12", {"x": streams(3, 4, 12), "weight": ones(24, 48)}, "channels d of x must be a multiple of 8, got 12"),
    ("d 0", {"x": streams(3, 4, 0), "weight": ones(24, 0)}, "channels d of x must be at least 1, got 0"),
    ("hc 0", {"x": streams(3, 0, 16), "weight": ones(24, 0)}, "streams hc of x must be at least 1, got 0"),
    ("weight 1-D", {"weight": ones(64)}, r"^weight must have 2 dimensions, got shape \(64,\)"),
    ("weight 3-D", {"weight": ones(24, 4, 16)}, "^weight must have 2 dimensions"),
    ("weight of another K", {"weight": ones(24, 63)}, r"^weight must have shape \(n, 64\), got \(24, 63\)"),
    ("weight transposed", {"weight": ones(64, 24)}, "rows n of weight must be between 1 and 32, got 64"),
    ("weight without rows", {"weight": ones(0, 64)}, "rows n of weight must be between 1 and 32, got 0"),
    ("n 33", {"weight": ones(33, 64)}, "rows n of weight must be between 1 and 32, got 33"),
    ("weight fp16", {"weight": ones(24, 64, dtype=torch.float16)}, "^weight must have dtype float32 or bfloat16, got"),
    ("weight fp64", {"weight": ones(24, 64, dtype=torch.float64)}, "^weight must have dtype float32 or bfloat16, got"),
    ("pre_mix of other tokens", {"pre_mix": ones(2, 4)}, r"^pre_mix must have shape \(3, 4\), got \(2, 4\)"),
    ("pre_mix of other streams", {"pre_mix": ones(3, 2)}, r"^pre_mix must have shape \(3, 4\), got \(3, 2\)"),
    ("pre_mix to broadcast", {"pre_mix": ones(1, 4)}, r"^pre_mix must have shape \(3, 4\), got \(1, 4\)"),
    ("pre_mix with an axis more", {"pre_mix": ones(3, 4, 1)}, r"^pre_mix must have shape \(3, 4\), got \(3, 4, 1\)"),
    ("pre_mix int", {"pre_mix": ones(3, 4, dtype=torch.int64)}, "^pre_mix must have a floating-point dtype, got int64"),
    ("pre_mix bool", {"pre_mix": ones(3, 4, dtype=torch.bool)}, "^pre_mix must have a floating-point dtype, got bool"),
    ("weight elsewhere", {"weight": elsewhere(24, 64)}, "must be on one device, .*weight on meta"),
    ("pre_mix elsewhere", {"pre_mix": elsewhere(3, 4)}, "must be on one device, .*pre_mix on meta"),
    ("eps negative", {"eps": -1e-20}, "^eps must be at least 0, got -1e-20"),
    ("eps nan", {"eps": NAN}, "^eps must be a finite number, got nan"),
    ("eps inf", {"eps": INF}, "^eps must be a finite number, got inf"),
    ("eps text", {"eps": "1"}, "^eps must be a finite number, got '1'"),
]
GATES = {"mixes": ones(3, 24), "scale": ones(3), "base": ones(24), "hc": 4, "iters": 20, "eps": 1e-6}
BAD_GATES = [
    ("mixes 0-D", {"mixes": ones()}, "^mixes must have at least 1 dimension, got"),
    ("mixes bf16", {"mixes": ones(3, 24, dtype=BF16)}, "^mixes must have dtype float32, got bfloat16"),
    ("mixes fp64", {"mixes": ones(3, 24, dtype=torch.float64)}, "^mixes must have dtype float32, got float64"),
    ("mixes of another hc", {"mixes": ones(3, 8)}, r"^mixes must have shape \(3, 24\), got \(3, 8\)"),
    ("hc 3", {"hc": 3, "mixes": ones(3, 15), "base": ones(15)}, "^hc must be one of 1, 2, 4 for the gates, got 3"),
    ("hc 8", {"hc": 8, "mixes": ones(3, 80), "base": ones(80)}, "^hc must be one of 1, 2, 4 for the gates, got 8"),
    ("hc 0", {"hc": 0, "mixes": ones(3, 0), "base": ones(0)}, "^hc must be one of"),
    ("iters 0", {"iters": 0}, "^iters must be at least 1, got 0"),
    ("iters negative", {"iters": -1}, "^iters must be at least 1, got -1"),
    ("scale 4", {"scale": ones(4)}, r"^scale must have shape \(3,\), got \(4,\)"),
    ("scale 0-D", {"scale": ones()}, r"^scale must have shape \(3,\), got \(\)"),
    ("scale fp16", {"scale": ones(3, dtype=torch.float16)}, "^scale must have dtype float32 or bfloat16, got float16"),
    ("base of another hc", {"base": ones(8)}, r"^base must have shape \(24,\), got \(8,\)"),
    ("base as a row", {"base": ones(1, 24)}, r"^base must have shape \(24,\), got \(1, 24\)"),
    ("base int", {"base": ones(24, dtype=torch.int64)}, "^base must have dtype float32 or bfloat16, got int64"),
    ("scale elsewhere", {"scale": elsewhere(3)}, "must be on one device, .*scale on meta"),
    ("base elsewhere", {"base": elsewhere(24)}, "must be on one device, .*base on meta"),
    ("eps negative", {"eps": -1e-6}, "^eps must be at least 0, got"),
    ("eps nan", {"eps": NAN}, "^eps must be a finite number, got nan"),
    ("eps inf", {"eps": INF}, "^eps must be a finite number, got inf"),
]
CONNECTION = PROJECTION | {
    "scale": ones(3),
    "base": ones(24),
    "rms_eps": 1e-20,
    "hc_eps": 1e-6,
    "sinkhorn_iters": 20,
}
BAD_CONNECTIONS = [
    ("weight of other gates", {"weight": ones(23, 64)}, r"^weight must have shape \(24, 64\), got \(23, 64\)"),
    (
        "hc 3",
        {"x": streams(3, 3, 16), "weight": ones(15, 48), "pre_mix": None},
        "streams hc of x must be one of 1, 2, 4",
    ),
    ("scale 2", {"scale": ones(2)}, "^scale must have shape"),
    ("base 23", {"base": ones(23)}, "^base must have shape"),
    ("base elsewhere", {"base": elsewhere(24)}, "must be on one device, .*base on meta"),
    ("rms_eps negative", {"rms_eps": -1.0}, "^rms_eps must be at least 0, got"),
    ("rms_eps nan", {"rms_eps": NAN}, "^rms_eps must be a finite number, got nan"),
    ("hc_eps negative", {"hc_eps": -1.0}, "^hc_eps must be at least 0, got"),
    ("hc_eps inf", {"hc_eps": INF}, "^hc_eps must be a finite number, got inf"),
    ("sinkhorn_iters 0", {"sinkhorn_iters": 0}, "^sinkhorn_iters must be at least 1, got 0"),
    ("sinkhorn_iters a float", {"sinkhorn_iters": 2.0}, "^sinkhorn_iters must be an integer, got"),
]


@real_and_fake
@rows("changes message", BAD_PROJECTIONS)
@pytest.mark.parametrize("function", PROJECTIONS, ids=lambda f: f.__name__)
def test_projection(function, changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        function(**made(PROJECTION | changes))


@real_and_fake
@rows("changes message", BAD_GATES)
def test_gates(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        mhc_gates(**made(GATES | changes))


@rows("changes message", [("hc a bool", {"hc": True}, "^hc must be"), ("iters a float", {"iters": 2.0}, "^iters must")])
def test_gates_take_integers(changes, message):
    with pytest.raises(ValueError, match=message):
        mhc_gates(**made(GATES | changes))


@real_and_fake
@rows("changes message", [case for case in BAD_PROJECTIONS if "eps" not in case[0]] + BAD_CONNECTIONS)
@pytest.mark.parametrize("function", CONNECTIONS, ids=lambda f: f.__name__)
def test_hyper_connection(function, changes, message, mode, monkeypatch):
    """All is checked before the projection runs."""
    monkeypatch.setattr("mhc_projection.operators._use_kernel", lambda *args: pytest.fail("something ran"))
    with mode(), pytest.raises(ValueError, match=message):
        function(**made(CONNECTION | changes))


@rows("value", NOT_TENSORS)
def test_no_tensors(value):
    calls = [(function, PROJECTION) for function in PROJECTIONS]
    calls += [(function, CONNECTION) for function in CONNECTIONS] + [(mhc_gates, GATES)]
    for function, arguments in calls:
        for name in arguments.keys() & {"x", "weight", "pre_mix", "mixes", "scale", "base"}:
            with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got {type(value).__name__}"):
                function(**made(arguments | {name: value}))


@real_and_fake
@rows("changes message", [case for case in BAD_PROJECTIONS if case[0] not in ("eps text", "x 0-D", "x 1-D")])
def test_the_forward_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.projection_forward(*made(PROJECTION | {"eps": 1e-20} | changes).values())


@real_and_fake
@rows("changes message", [case for case in BAD_GATES if case[0] != "mixes 0-D"])
def test_the_gates_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.gates_forward(*made(GATES | changes).values())


OPERATOR_CONNECTION = {name: CONNECTION[name] for name in ("x", "weight", "scale", "base", "pre_mix")} | {
    "rms_eps": 1e-20,
    "hc_eps": 1e-6,
    "sinkhorn_iters": 20,
}
NOT_TYPED_SO = ("x 0-D", "x 1-D", "eps text", "sinkhorn_iters a float")  # the schema, or another check, comes first


@real_and_fake
@rows(
    "changes message",
    [case for case in BAD_PROJECTIONS if "eps" not in case[0] and case[0] not in NOT_TYPED_SO]
    + [case for case in BAD_CONNECTIONS if case[0] not in NOT_TYPED_SO]
    + [
        ("x flat", {"x": streams(3, 64), "pre_mix": None}, "^weight must have shape"),
        ("x with an axis more", {"x": streams(1, 3, 4, 16)}, r"^pre_mix must have shape \(1, 3, 4\), got \(3, 4\)"),
        ("pre_mix bf16", {"pre_mix": streams(3, 4)}, "^pre_mix must have dtype float32, got bfloat16"),
    ],
)
def test_the_hyper_connection_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.hyper_connection_forward(*made(OPERATOR_CONNECTION | changes).values())


BACKWARD = PROJECTION | {
    "mixes": ones(3, 24),
    "rstd": ones(3),
    "grad_mixes": ones(3, 24),
    "grad_collapsed": streams(3, 16),
    "grad_x_addend": streams(3, 4, 16),
}
BAD_BACKWARDS = [
    ("x flat", {"x": streams(3, 64), "pre_mix": None}, "^weight must have shape"),
    ("x with an axis more", {"x": streams(1, 3, 4, 16), "pre_mix": ones(1, 3, 4)}, "^[a-z_]+ must have shape"),
    ("pre_mix bf16", {"pre_mix": streams(3, 4)}, "^pre_mix must have dtype float32, got bfloat16"),
    ("no pre_mix", {"pre_mix": None}, "^pre_mix must be given with grad_collapsed, got None"),
    ("mixes bf16", {"mixes": streams(3, 24)}, "^mixes must have dtype float32, got"),
    ("mixes of other tokens", {"mixes": ones(4, 24)}, "^mixes must have shape"),
    ("rstd as a column", {"rstd": ones(3, 1)}, "^rstd must have shape"),
    ("grad_mixes narrower", {"grad_mixes": ones(3, 23)}, "^grad_mixes must have shape"),
    ("grad_collapsed fp32", {"grad_collapsed": ones(3, 16)}, "^grad_collapsed must have dtype bfloat16, got"),
    ("grad_collapsed wider", {"grad_collapsed": streams(3, 64)}, "^grad_collapsed must have shape"),
    ("grad_x_addend fp32", {"grad_x_addend": ones(3, 4, 16)}, "^grad_x_addend must have dtype bfloat16, got"),
    ("grad_x_addend flat", {"grad_x_addend": streams(3, 64)}, "^grad_x_addend must have shape"),
    ("rstd elsewhere", {"rstd": elsewhere(3)}, "^rstd must be on cpu, .* got meta"),
]


@real_and_fake
@rows("changes message", BAD_BACKWARDS)
def test_the_backward_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.projection_backward(*made(BACKWARD | changes).values())


@real_and_fake
@rows(
    "changes message",
    [
        ("grad_pre wider", {"grad_pre": ones(3, 5)}, "^grad_pre must have shape"),
        ("grad_post bf16", {"grad_post": streams(3, 4)}, "^grad_post must have dtype float32, got"),
        ("grad_comb flat", {"grad_comb": ones(3, 16)}, "^grad_comb must have shape"),
        ("mixes 3-D", {"mixes": ones(1, 3, 24)}, r"^grad_pre must have shape \(1, 3, 4\), got \(3, 4\)"),
    ],
)
def test_the_gates_backward_operator_checks(changes, message, mode):
    valid = {"mixes": ones(3, 24), "scale": ones(3), "base": ones(24)}
    valid |= {"grad_pre": ones(3, 4), "grad_post": ones(3, 4), "grad_comb": ones(3, 4, 4)}
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.gates_backward(*made(valid | changes).values(), 4, 20, 1e-6)


CONNECTION_BACKWARD = {name: CONNECTION[name] for name in ("x", "weight", "scale", "base", "pre_mix")} | {
    "mixes": ones(24, 3),
    "rstd": ones(3),
    "grad_pre": ones(3, 4),
    "grad_post": ones(3, 4),
    "grad_comb": ones(3, 4, 4),
    "grad_collapsed": streams(3, 16),
    "grad_x_addend": streams(3, 4, 16),
    "hc_eps": 1e-6,
    "iters": 20,
}


@real_and_fake
@rows(
    "changes message",
    [case for case in BAD_BACKWARDS if "mixes" not in case[0]]
    + [case for case in BAD_CONNECTIONS if "sinkhorn" not in case[0] and "rms_eps" not in case[0]]
    + [
        ("mixes bf16", {"mixes": streams(24, 3)}, "^mixes must have dtype float32, got"),
        ("mixes by token", {"mixes": ones(3, 24)}, r"^mixes must have shape \(24, 3\), got \(3, 24\)"),
        ("mixes 3-D", {"mixes": ones(1, 24, 3)}, r"^mixes must have shape \(24, 3\), got"),
        ("grad_pre wider", {"grad_pre": ones(3, 5)}, "^grad_pre must have shape"),
        ("grad_post bf16", {"grad_post": streams(3, 4)}, "^grad_post must have dtype float32, got"),
        ("grad_comb flat", {"grad_comb": ones(3, 16)}, "^grad_comb must have shape"),
        ("grad_comb elsewhere", {"grad_comb": elsewhere(3, 4, 4)}, "^grad_comb must be on cpu, .* got meta"),
        ("iters 0", {"iters": 0}, "iters must be at least 1, got 0"),
    ],
)
def test_the_hyper_connection_backward_operator_checks(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATORS.hyper_connection_backward(*made(CONNECTION_BACKWARD | changes).values())


def accepted(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("hc", [0, 1, 2, 3, 4, 5, 8])
def test_unsupported_shape_reason_is_what_the_call_does(hc):
    """A reason where the call raises ValueError, None where it works: the projection, and the whole connection."""
    for d in (0, 1, 4, 8, 12, 16, 200):
        x = torch.ones(2, hc, d, dtype=BF16)
        for n in (0, 1, 3, 24, MAX_LOGITS, MAX_LOGITS + 1):
            reason = unsupported_shape_reason(hc, d, n)
            assert accepted(mhc_projection, x, torch.ones(n, hc * d)) == (reason is None), (d, n, reason)
            assert reason is None or "got" in reason
        n = (2 + hc) * hc
        arguments = (x, torch.ones(n, hc * d), torch.ones(3), torch.ones(n))
        taken = accepted(hyper_connection, *arguments, rms_eps=0.0, hc_eps=0.0, sinkhorn_iters=1)
        assert taken == (unsupported_shape_reason(hc, d) is None)
        assert taken == (hc in (1, 2, 4) and d % 8 == 0 and d > 0)


def test_unsupported_shape_reason_of_what_is_no_size():
    for sizes in ((4.0, 64), (4, "64"), (True, 64), (4, 64, 24.0)):
        assert "must be an integer, got" in unsupported_shape_reason(*sizes)
