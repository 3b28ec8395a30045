"""Wrong arguments: which error, naming what, of both functions and the operator, real and traced."""

import contextlib
import math
import re
from typing import NamedTuple

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, launch, reference, sparse_attn_backward_flat
from dsa_sparse_attn_bwd import unsupported_shape_reason as reason_of
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT16, INT32, INT64, BOOL = torch.int16, torch.int32, torch.int64, torch.bool
FUNCTIONS = {"batched": dsa_sparse_attn_backward, "flat": sparse_attn_backward_flat}
OPERATOR = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward

each_form = pytest.mark.parametrize("form", FUNCTIONS)


class Ones(NamedTuple):
    """A tensor, made inside the test's FakeTensorMode. Its shape is that of the flat function, unless `whole`."""

    shape: tuple[int, ...]
    dtype: torch.dtype = BF16
    device: str = "cpu"
    whole: bool = False


VALID = {
    "grad_out": Ones((3, 16, 512)),
    "q": Ones((3, 16, 512)),
    "kv": Ones((5, 512)),
    "out": Ones((3, 16, 512)),
    "lse": Ones((3, 16), FP32),
    "indices": Ones((3, 4), INT32),
    "sinks": Ones((16,), FP32),
    "sm_scale": 0.5,
    "out_tail": Ones((3, 16, 64)),
    "deterministic": False,
}
TENSORS = tuple(name for name, value in VALID.items() if isinstance(value, Ones))
OTHERS = ("sm_scale", "out_tail", "deterministic")
ORDER = {"batched": tuple(VALID), "flat": ("q", "kv", "out", "grad_out", "lse", "indices", "sinks", *OTHERS)}


def shape_of(form, name, shape):
    if form == "flat" or name == "sinks":
        return shape
    return (1, shape[0], 1, *shape[1:]) if name in ("kv", "indices") else (1, *shape)


def made(form, changes):
    """Arguments by name, in the order of the function."""

    def value_of(name, value):
        if not isinstance(value, Ones):
            return value
        shape = value.shape if value.whole else shape_of(form, name, value.shape)
        return torch.ones(shape, dtype=value.dtype, device=value.device)

    values = VALID | changes
    return {name: value_of(name, values[name]) for name in ORDER[form]}


def shown(shape):
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def dtype_case(name, dtype, allowed):
    given = str(dtype).removeprefix("torch.")
    return (
        f"{name} {given}",
        {name: VALID[name]._replace(dtype=dtype)},
        f"{name} must have dtype {allowed}, got {given}",
    )


def shape_case(name, shape, wanted):
    """Messages have the shapes of the function that was called: made by `text`."""
    return f"{name} {shape}", {name: VALID[name]._replace(shape=shape)}, (name, wanted, shape)


def text(form, message):
    if isinstance(message, str):
        return message
    name, wanted, shape = message
    return f"{name} must have shape {shown(shape_of(form, name, wanted))}, got {shown(shape_of(form, name, shape))}"


def device_case(name):
    found = ", ".join(f"{other} on {'meta' if other == name else 'cpu'}" for other in TENSORS)
    changes = {name: VALID[name]._replace(device="meta")}
    return f"{name} elsewhere", changes, f"{', '.join(TENSORS)} must be on one device, got {found}"


def size_case(heads, channels, message):
    return f"{heads} x {channels}", {"q": Ones((3, heads, channels))}, message


HEADS = "the number of heads of q must be one of 16, 32, 64, 128, got"
CHANNELS = "the number of channels of q must be 512, got"
TAIL = "the number of channels of out_tail must be"
FLOATS = "float32 or float64 or bfloat16 or float16"

BAD = [
    *(dtype_case(name, dtype, "bfloat16") for name in ("q", "kv", "out", "grad_out") for dtype in (FP16, FP32)),
    *(dtype_case("out_tail", dtype, "bfloat16") for dtype in (FP16, FP32, INT32)),
    *(dtype_case("lse", dtype, "float32") for dtype in (BF16, FP64, INT32)),
    *(dtype_case("indices", dtype, "int32 or int64") for dtype in (INT16, torch.uint8, BOOL, FP32, BF16)),
    *(dtype_case("sinks", dtype, FLOATS) for dtype in (INT32, INT64, BOOL, torch.float8_e4m3fn)),
    *(size_case(heads, 512, f"{HEADS} {heads}") for heads in (0, 1, 8, 24, 48, 256)),
    *(size_case(16, channels, f"{CHANNELS} {channels}") for channels in (0, 64, 448, 576, 1024)),
    shape_case("kv", (5, 256), ("n", 512)),
    shape_case("kv", (512,), ("n", 512)),
    shape_case("kv", (5, 1, 512), ("n", 512)),
    *(
        shape_case(name, shape, (3, 16, 512))
        for name in ("out", "grad_out")
        for shape in ((2, 16, 512), (3, 32, 512), (3, 16, 448), (48, 512), (3, 16, 512, 1))
    ),
    *(shape_case("lse", shape, (3, 16)) for shape in ((4, 16), (3, 32), (3, 1), (3,), (3, 16, 1))),
    *(shape_case("indices", shape, (3, "n")) for shape in ((2, 4), (3, 4, 1), (3,))),
    *(shape_case("sinks", shape, (16,)) for shape in ((32,), (1,), (16, 1), (1, 16), ())),
    *(shape_case("out_tail", shape, (3, 16, "n")) for shape in ((2, 16, 64), (3, 32, 64), (3, 64), (3, 16, 64, 1))),
    *(
        (f"a tail of {channels}", {"out_tail": Ones((3, 16, channels))}, f"{TAIL} between 16 and 512, got {channels}")
        for channels in (0, 8, 528)
    ),
    *(
        (f"a tail of {channels}", {"out_tail": Ones((3, 16, channels))}, f"{TAIL} a multiple of 16, got {channels}")
        for channels in (17, 24, 511)
    ),
    *(device_case(name) for name in TENSORS),
    *((f"sm_scale {v}", {"sm_scale": v}, f"sm_scale must be a finite number, got {v}") for v in (math.inf, math.nan)),
]
ALONE = "a batch of 1, as all packed documents are one, got shape"
BAD_BATCHED = [
    ("q 3-D", {"q": Ones((3, 16, 512), whole=True)}, "q must have 4 dimensions, got shape (3, 16, 512)"),
    ("q 5-D", {"q": Ones((1, 1, 3, 16, 512), whole=True)}, "q must have 4 dimensions, got shape (1, 1, 3, 16, 512)"),
    ("two batches", {"q": Ones((2, 3, 16, 512), whole=True)}, f"q must have {ALONE} (2, 3, 16, 512)"),
    ("no batch", {"q": Ones((0, 3, 16, 512), whole=True)}, f"q must have {ALONE} (0, 3, 16, 512)"),
    *(
        (f"{name} {shape}", {name: VALID[name]._replace(shape=shape, whole=True)}, f"{name} must have shape {wanted}")
        for name, shape, wanted in (
            ("kv", (2, 5, 1, 512), "(1, n, 1, 512), got (2, 5, 1, 512)"),
            ("kv", (1, 5, 2, 512), "(1, n, 1, 512), got (1, 5, 2, 512)"),
            ("kv", (5, 512), "(1, n, 1, 512), got (5, 512)"),
            ("grad_out", (2, 3, 16, 512), "(1, 3, 16, 512), got (2, 3, 16, 512)"),
            ("out", (3, 16, 512), "(1, 3, 16, 512), got (3, 16, 512)"),
            ("lse", (2, 3, 16), "(1, 3, 16), got (2, 3, 16)"),
            ("indices", (1, 3, 2, 4), "(1, 3, 1, n), got (1, 3, 2, 4)"),
            ("indices", (1, 3, 4), "(1, 3, 1, n), got (1, 3, 4)"),
            ("out_tail", (2, 3, 16, 64), "(1, 3, 16, n), got (2, 3, 16, 64)"),
        )
    ),
]
BAD_FLAT = [
    ("q 2-D", {"q": Ones((48, 512))}, "q must have 3 dimensions, got shape (48, 512)"),
    ("q 4-D", {"q": Ones((1, 3, 16, 512))}, "q must have 3 dimensions, got shape (1, 3, 16, 512)"),
]
CASES = [(f"{form} {case[0]}", form, *case[1:]) for form in FUNCTIONS for case in BAD]
CASES += [(f"batched {case[0]}", "batched", *case[1:]) for case in BAD_BATCHED]
CASES += [(f"flat {case[0]}", "flat", *case[1:]) for case in BAD_FLAT]


def rows(cases):
    """Parametrises by cases whose first field is their name."""
    names = ("form", "changes", "message")
    return pytest.mark.parametrize(names, [case[1:] for case in cases], ids=[case[0] for case in cases])


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    for module in (reference, launch):
        monkeypatch.setattr(module, "backward", lambda *args: pytest.fail("something ran"))


def gradients(grad_out, q, kv, out, lse, indices, sinks, *_):
    """In place of the definition, where calls are right."""
    return q, kv, sinks


@rows(CASES)
def test_wrong_arguments(form, changes, message, monkeypatch):
    """Of the function and the operator, real and fake; after a good call, too, which the checks remember."""
    refused = pytest.raises(ValueError, match=f"^{re.escape(text(form, message))}$")
    for mode in (contextlib.nullcontext, FakeTensorMode):
        with mode(), monkeypatch.context() as patched:
            wrong = made(form, changes)
            with refused:
                FUNCTIONS[form](**wrong)
            if form == "batched":
                with refused:
                    OPERATOR(*wrong.values())
            patched.setattr(reference, "backward", gradients)
            FUNCTIONS[form](**made(form, {}))
            patched.undo()
            with refused:
                FUNCTIONS[form](**wrong)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("batched", {"q": Ones((3, 24, 512))}, f"{HEADS} 24"),
        ("batched", {"indices": Ones((3, 4), FP32)}, "indices must have dtype int32 or int64, got float32"),
        ("flat", {"kv": Ones((5, 64))}, r"kv must have shape \(n, 512\), got \(5, 64\)"),
    ],
)
def test_in_a_compiled_graph(form, changes, message):
    """While it is traced, in the compiler's own exception, which has the words."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda **a: FUNCTIONS[form](**a), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=message):
        compiled(**made(form, changes))
    torch._dynamo.reset()


@each_form
@pytest.mark.parametrize("value", [[1.0] * 16, 1.0, "x"], ids=["list", "number", "string"])
@pytest.mark.parametrize("name", TENSORS)
def test_no_tensors(form, name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got {type(value).__name__}$"):
        FUNCTIONS[form](**made(form, {name: value}))


@each_form
@pytest.mark.parametrize("name", [name for name in TENSORS if name != "out_tail"])
def test_only_the_tail_may_be_none(form, name):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got NoneType$"):
        FUNCTIONS[form](**made(form, {name: None}))


@each_form
@pytest.mark.parametrize("value", ["0.5", None, [0.5], 1j], ids=repr)
def test_the_scale_is_a_number(form, value):
    with pytest.raises(ValueError, match=r"^sm_scale must be a finite number, got "):
        FUNCTIONS[form](**made(form, {"sm_scale": value}))


@each_form
@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_deterministic_is_a_bool(form, value, monkeypatch):
    """After a call with the bool that is equal to it, too."""
    monkeypatch.setattr(reference, "backward", gradients)
    for flag in (False, True):
        FUNCTIONS[form](**made(form, {"deterministic": flag}))
    with pytest.raises(TypeError, match=f"^deterministic must be a bool, got {type(value).__name__}$"):
        FUNCTIONS[form](**made(form, {"deterministic": value}))


@each_form
def test_what_is_required(form, monkeypatch):
    monkeypatch.setattr(reference, "backward", gradients)
    for name in ORDER[form]:
        arguments = made(form, {})
        del arguments[name]
        if name in ("out_tail", "deterministic"):
            FUNCTIONS[form](**arguments)
            continue
        with pytest.raises(TypeError, match=name):
            FUNCTIONS[form](**arguments)


@each_form
def test_unsupported_shape_reason_is_what_the_call_does(form, monkeypatch):
    """The same words as the error, or None where the call works."""
    monkeypatch.setattr(reference, "backward", gradients)
    taken = set()
    for heads in (0, 1, 8, 16, 24, 32, 48, 64, 96, 128, 256):
        for channels in (0, 64, 128, 448, 512, 576):
            whole, of_heads = Ones((3, heads, channels)), Ones((3, heads), FP32)
            sizes = dict.fromkeys(("q", "out", "grad_out"), whole)
            sizes |= {"kv": Ones((5, channels)), "lse": of_heads, "sinks": Ones((heads,), FP32), "out_tail": None}
            try:
                FUNCTIONS[form](**made(form, sizes))
                error = None
                taken.add((heads, channels))
            except ValueError as caught:
                error = str(caught)
            assert error == reason_of(heads, channels), (heads, channels)
    assert taken == {(heads, 512) for heads in (16, 32, 64, 128)}


def test_sizes_of_the_model_are_taken():
    assert reason_of(64, 512) is None
    assert reason_of(num_heads=24, head_dim=512) == f"{HEADS} 24"
    assert reason_of(num_heads=64, head_dim=576) == f"{CHANNELS} 576"
