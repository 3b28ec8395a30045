"""Wrong arguments: which error, naming what, of the public functions and the operators, real and traced."""

import contextlib

import pytest
import torch
from fp8_dual_cast import fp8_dual_cast, per_token_cast, per_token_cast_transposed
from torch._subclasses.fake_tensor import FakeTensorMode

CASTS = (fp8_dual_cast, per_token_cast, per_token_cast_transposed)
each_cast = pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.__name__)
real_and_fake = pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
BF16 = torch.bfloat16


def ones(*shape, dtype=BF16):
    """Makes a tensor when called, inside the test's FakeTensorMode."""
    return lambda: torch.ones(shape, dtype=dtype)


def positions(*shape, dtype=torch.int64):
    return lambda: torch.zeros(shape, dtype=dtype)


def table(*shape, dtype=torch.float32):
    return ones(*shape, dtype=dtype)


def made(value):
    return value() if callable(value) else value


def rows(names, cases):
    """Parametrises by cases whose first field is their name."""
    return pytest.mark.parametrize(names.split(), [case[1:] for case in cases], ids=[case[0] for case in cases])


NOT_TENSORS = [("list", [[1.0] * 128]), ("None", None), ("number", 1.0)]
BAD_X = [
    ("0-D", ones(), "^x must have 2 or 3 dimensions, got"),
    ("1-D", ones(128), "^x must have 2 or 3 dimensions, got"),
    ("4-D", ones(2, 2, 2, 128), "^x must have 2 or 3 dimensions, got"),
    ("fp32", ones(4, 256, dtype=torch.float32), "^x must have dtype bfloat16, got float32"),
    ("fp16", ones(4, 256, dtype=torch.float16), "^x must have dtype bfloat16, got float16"),
    ("fp8", ones(4, 256, dtype=torch.float8_e4m3fn), "^x must have dtype bfloat16, got float8_e4m3fn"),
    ("int16", ones(4, 256, dtype=torch.int16), "^x must have dtype bfloat16, got int16"),
    ("no channels", ones(4, 0), "channels of x must be between 1 and .* got 0"),
    ("half a block", ones(4, 64), "channels of x must be a multiple of 128, got 64"),
    ("a block and a bit", ones(4, 136), "channels of x must be a multiple of 128, got 136"),
    ("heads that make no block", ones(4, 3, 64), "channels of x must be a multiple of 128, got 192"),
    ("no tokens, no block", ones(0, 100), "channels of x must be a multiple of 128, got 100"),
    ("too many tokens", lambda: ones(1, 128)().expand(2**24 + 1, 128), "tokens of x must be .* got 16777217"),
]
# What replaces the arguments of a valid rotated call.
VALID = {"x": ones(4, 256), "cos_sin_cache": table(9, 64), "position_ids": positions(4), "head_dim": 128}
PLAIN = {"cos_sin_cache": None, "position_ids": None}
BAD_ROTATIONS = [
    ("no positions", {"position_ids": None}, "^position_ids must be given .* got None"),
    ("no table", {"cos_sin_cache": None}, "^cos_sin_cache must be given .* got None"),
    ("no head_dim", {"head_dim": None}, "^head_dim must be given .* got None"),
    ("head_dim no divisor", {"head_dim": 96}, "^head_dim must divide the 256 channels of x, got 96"),
    ("head_dim larger than C", {"head_dim": 512}, "^head_dim must divide .* got 512"),
    ("head_dim odd", {"x": ones(4, 384), "head_dim": 3}, "^head_dim must be a multiple of 2, got 3"),
    (
        "head_dim odd, no table",
        {"x": ones(4, 384), "head_dim": 3} | dict.fromkeys(("cos_sin_cache", "position_ids")),
        "^head_dim must be a multiple of 2, got 3",
    ),
    ("head_dim negative", {"head_dim": -128}, "^head_dim must be at least 2, got -128"),
    ("table 1-D", {"cos_sin_cache": table(64)}, r"^cos_sin_cache must have 2 dimensions, got shape \(64,\)"),
    ("table 3-D", {"cos_sin_cache": table(1, 9, 64)}, "^cos_sin_cache must have 2 dimensions, got"),
    ("table bf16", {"cos_sin_cache": table(9, 64, dtype=BF16)}, "^cos_sin_cache must have dtype float32, got bfloat16"),
    ("table fp64", {"cos_sin_cache": table(9, 64, dtype=torch.float64)}, "^cos_sin_cache must have dtype float32, got"),
    ("table of odd width", {"cos_sin_cache": table(9, 63)}, "cos_sin_cache must be a multiple of 2, got 63"),
    ("table wider than a head", {"cos_sin_cache": table(9, 130)}, "cos_sin_cache must be between 2 and 128, got 130"),
    ("table of width 0", {"cos_sin_cache": table(9, 0)}, "cos_sin_cache must be .* got 0"),
    ("table without rows", {"cos_sin_cache": table(0, 64)}, "rows of cos_sin_cache must be at least 1, got 0"),
    ("positions float", {"position_ids": ones(4, dtype=torch.float32)}, "^position_ids must have dtype int32 or"),
    (
        "positions bool",
        {"position_ids": positions(4, dtype=torch.bool)},
        "^position_ids must have dtype int32 or",
    ),
    (
        "positions int16",
        {"position_ids": positions(4, dtype=torch.int16)},
        "^position_ids must have dtype .* got int16",
    ),
    ("too few positions", {"position_ids": positions(3)}, r"^position_ids must have shape \(4,\), got \(3,\)"),
    ("too many positions", {"position_ids": positions(5)}, r"^position_ids must have shape \(4,\), got \(5,\)"),
    ("one position for all", {"position_ids": positions(1)}, r"^position_ids must have shape \(4,\), got \(1,\)"),
    ("a column of positions", {"position_ids": positions(4, 1)}, r"^position_ids must have shape .* got \(4, 1\)"),
    ("two rows of positions", {"position_ids": positions(2, 4)}, r"^position_ids must have shape .* got \(2, 4\)"),
    ("0-D positions", {"position_ids": positions()}, r"^position_ids must have shape \(4,\), got \(\)"),
    (
        "table elsewhere",
        {"cos_sin_cache": lambda: table(9, 64)().to("meta")},
        "one device, .*cos_sin_cache on meta",
    ),
    (
        "positions elsewhere",
        {"position_ids": lambda: positions(4)().to("meta")},
        "one device, .*position_ids on meta",
    ),
]
# Of the public function only: what the operator's schema has no room for.
BAD_ARGUMENTS = [
    ("head_dim 0", {"head_dim": 0}, ValueError, "^head_dim must be at least 2, got 0"),
    ("head_dim unlike a 3-D x", {"x": ones(4, 2, 128), "head_dim": 64}, ValueError, "^head_dim must be 128, .* got 64"),
    ("head_dim 0 with a 3-D x", {"x": ones(4, 2, 128), "head_dim": 0}, ValueError, "^head_dim must be 128, .* got 0"),
    ("head_dim a bool", {"head_dim": True}, (TypeError, ValueError), "^head_dim must be"),
    ("head_dim a float", {"head_dim": 128.0}, (TypeError, ValueError), "^head_dim must be"),
    ("head_dim a string", {"head_dim": "128"}, (TypeError, ValueError), "^head_dim must be"),
    ("table a list", {"cos_sin_cache": [1.0]}, TypeError, "^cos_sin_cache must be a torch.Tensor, got list"),
    ("positions a list", {"position_ids": [0, 1, 2, 3]}, TypeError, "^position_ids must be a torch.Tensor, got list"),
]
FLAGS = [("int", 1), ("None", None), ("string", "yes"), ("tensor", lambda: torch.tensor(True))]


OPERATORS_ONLY = [
    ("3-D", ones(4, 2, 128), "^x must have 2 dimensions, got"),
    ("3-D whose second axis would do", ones(4, 128, 128), "^x must have 2 dimensions, got"),
]


@real_and_fake
@rows("x message", BAD_X)
@each_cast
def test_x(cast, x, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        cast(x())


@each_cast
@rows("x", NOT_TENSORS)
def test_x_no_tensor(cast, x):
    with pytest.raises(TypeError, match=r"^x must be a torch\.Tensor, got "):
        cast(x)


@real_and_fake
@rows("changes message", BAD_ROTATIONS)
def test_rotation(changes, message, mode):
    with mode():
        arguments = {name: made(value) for name, value in (VALID | changes).items()}
        with pytest.raises(ValueError, match=message):
            fp8_dual_cast(**arguments)


@rows("changes error message", BAD_ARGUMENTS)
def test_public_arguments(changes, error, message):
    with pytest.raises(error, match=message):
        fp8_dual_cast(**{name: made(value) for name, value in (VALID | changes).items()})


@rows("value", FLAGS)
def test_flags(value):
    for cast in CASTS:
        with pytest.raises(TypeError, match=r"^use_ue8m0 must be a bool, got"):
            cast(ones(4, 128)(), use_ue8m0=made(value))
    with pytest.raises(TypeError, match=r"^inverse must be a bool, got"):
        fp8_dual_cast(ones(4, 128)(), inverse=made(value))


@real_and_fake
@rows("x message", [case for case in BAD_X if "heads" not in case[0]] + OPERATORS_ONLY)
@pytest.mark.parametrize("name", ["dual_cast", "row_cast", "column_cast"])
def test_operators_check_x(name, x, message, mode):
    """They take matrices only: the public functions flatten heads before."""
    rest = (False, None, None, 0, True) if name == "dual_cast" else (False,)
    with mode(), pytest.raises(ValueError, match=message.replace("2 or 3", "2")):
        getattr(torch.ops.fp8_dual_cast, name)(x(), *rest)


@real_and_fake
@rows(
    "changes message", [*BAD_ROTATIONS, ("a row of positions", {"position_ids": positions(1, 4)}, "^position_ids must")]
)
def test_operators_check_the_rotation(changes, message, mode):
    with mode():
        x, table, ids, head_dim = (made(value) for value in (VALID | changes).values())
        with pytest.raises(ValueError, match=message):
            torch.ops.fp8_dual_cast.dual_cast(x, False, table, ids, head_dim or 0, True)
