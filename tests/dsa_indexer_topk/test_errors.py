"""Wrong arguments: which error, naming what, of the public function and the operator, real and traced."""

import contextlib

import pytest
import torch
from dsa_indexer_topk import MAX_TOPK, dsv41_index_topk, reference, unsupported_shape_reason
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.dsa_indexer_topk import inputs

real_and_fake = pytest.mark.parametrize("mode", [contextlib.nullcontext, FakeTensorMode], ids=["real", "fake"])
BF16, INT32 = torch.bfloat16, torch.int32
OPERATOR = torch.ops.dsa_indexer_topk.dsv41_index_topk


def ones(*shape, dtype=BF16, device="cpu"):
    """Makes a tensor when called, inside the test's FakeTensorMode."""
    return lambda: torch.ones(shape, dtype=dtype, device=device)


VALID = {
    "q": ones(3, 16, 64),
    "k": ones(5, 64),
    "w": ones(3, 16),
    "ks": ones(3, dtype=INT32),
    "ke": ones(3, dtype=INT32),
    "topk": 4,
    "candidates": lambda: torch.tensor([[0, 1]] * 3, dtype=INT32),
    "emit_candidates": True,
    "max_entries_per_doc": 5,
    "block_size": 2,
    "topk_blocks": 3,
}
TENSORS = ("q", "k", "w", "ks", "ke", "candidates")


def made(changes):
    return {name: value() if callable(value) else value for name, value in (VALID | changes).items()}


def rows(names, cases):
    """Parametrises by cases whose first field is their name."""
    return pytest.mark.parametrize(names.split(), [case[1:] for case in cases], ids=[case[0] for case in cases])


def q(heads, head_dim):
    return {"q": ones(3, heads, head_dim), "k": ones(5, head_dim), "w": ones(3, heads)}


BAD = [
    ("q 2-D", {"q": ones(3, 64)}, r"^q must have 3 dimensions, got shape \(3, 64\)"),
    ("q 4-D", {"q": ones(1, 3, 16, 64)}, "^q must have 3 dimensions, got shape"),
    ("k 1-D", {"k": ones(64)}, "^k must have 2 dimensions, got shape"),
    ("k by heads", {"k": ones(5, 1, 64)}, "^k must have 2 dimensions, got shape"),
    ("w 1-D", {"w": ones(16)}, r"^w must have shape \(3, 16\), got \(16,\)"),
    ("w 3-D", {"w": ones(3, 16, 1)}, r"^w must have shape \(3, 16\), got \(3, 16, 1\)"),
    ("w of other queries", {"w": ones(2, 16)}, r"^w must have shape \(3, 16\), got \(2, 16\)"),
    ("w of other heads", {"w": ones(3, 32)}, r"^w must have shape \(3, 16\), got \(3, 32\)"),
    ("k of another D", {"k": ones(5, 128)}, r"^k must have shape \(n, 64\), got \(5, 128\)"),
    ("q fp16", {"q": ones(3, 16, 64, dtype=torch.float16)}, "^q must have dtype bfloat16, got float16"),
    ("q fp32", {"q": ones(3, 16, 64, dtype=torch.float32)}, "^q must have dtype bfloat16, got float32"),
    ("q fp64", {"q": ones(3, 16, 64, dtype=torch.float64)}, "^q must have dtype bfloat16, got float64"),
    ("q int", {"q": ones(3, 16, 64, dtype=INT32)}, "^q must have dtype bfloat16, got int32"),
    ("k fp16", {"k": ones(5, 64, dtype=torch.float16)}, "^k must have dtype bfloat16, got float16"),
    ("k fp32", {"k": ones(5, 64, dtype=torch.float32)}, "^k must have dtype bfloat16, got float32"),
    ("k int", {"k": ones(5, 64, dtype=torch.int64)}, "^k must have dtype bfloat16, got int64"),
    ("w fp16", {"w": ones(3, 16, dtype=torch.float16)}, "^w must have dtype bfloat16 or float32, got float16"),
    ("w fp64", {"w": ones(3, 16, dtype=torch.float64)}, "^w must have dtype bfloat16 or float32, got float64"),
    ("w int", {"w": ones(3, 16, dtype=torch.int64)}, "^w must have dtype bfloat16 or float32, got int64"),
    ("H 8", q(8, 64), "^the number of heads H of q must be one of 16, 32, 64, got 8"),
    ("H 24", q(24, 64), "^the number of heads H of q must be one of 16, 32, 64, got 24"),
    ("H 128", q(128, 64), "^the number of heads H of q must be one of 16, 32, 64, got 128"),
    ("H 0", q(0, 64), "^the number of heads H of q must be one of 16, 32, 64, got 0"),
    ("D 32", q(16, 32), "^the number of channels D of q must be one of 64, 128, got 32"),
    ("D 96", q(16, 96), "^the number of channels D of q must be one of 64, 128, got 96"),
    ("D 0", q(16, 0), "^the number of channels D of q must be one of 64, 128, got 0"),
    ("blocks of 0", {"block_size": 0}, "^block_size must be one of 1, 2, 4, 8, 16, got 0"),
    ("blocks of 3", {"block_size": 3}, "^block_size must be one of 1, 2, 4, 8, 16, got 3"),
    ("blocks of 32", {"block_size": 32}, "^block_size must be one of 1, 2, 4, 8, 16, got 32"),
    ("blocks of -2", {"block_size": -2}, "^block_size must be one of 1, 2, 4, 8, 16, got -2"),
    ("ks of other queries", {"ks": ones(2, dtype=INT32)}, r"^ks must have shape \(3,\), got \(2,\)"),
    ("ks as a column", {"ks": ones(3, 1, dtype=INT32)}, r"^ks must have shape \(3,\), got \(3, 1\)"),
    ("ke 0-D", {"ke": ones(dtype=INT32)}, r"^ke must have shape \(3,\), got \(\)"),
    ("ks fp32", {"ks": ones(3, dtype=torch.float32)}, "^ks must have dtype int32 or int64, got float32"),
    ("ke int16", {"ke": ones(3, dtype=torch.int16)}, "^ke must have dtype int32 or int64, got int16"),
    ("ke bool", {"ke": ones(3, dtype=torch.bool)}, "^ke must have dtype int32 or int64, got bool"),
    ("topk -1", {"topk": -1}, f"^topk must be between 0 and {MAX_TOPK}, got -1"),
    ("topk large", {"topk": MAX_TOPK + 1}, f"^topk must be between 0 and {MAX_TOPK}, got {MAX_TOPK + 1}"),
    ("topk_blocks -1", {"topk_blocks": -1}, "^topk_blocks must be at least 0, got -1"),
    ("max_entries_per_doc -1", {"max_entries_per_doc": -1}, "^max_entries_per_doc must be at least 0, got -1"),
    ("candidates 1-D", {"candidates": ones(3, dtype=INT32)}, r"^candidates must have shape \(3, n\), got \(3,\)"),
    ("candidates 3-D", {"candidates": ones(3, 2, 1, dtype=INT32)}, r"^candidates must have shape \(3, n\), got"),
    ("candidates of others", {"candidates": ones(4, 2, dtype=INT32)}, r"^candidates must have shape \(3, n\), got"),
    ("candidates bf16", {"candidates": ones(3, 2)}, "^candidates must have dtype int32 or int64, got bfloat16"),
    ("candidates int16", {"candidates": ones(3, 2, dtype=torch.int16)}, "^candidates must have dtype int32 or int64"),
    ("candidates bool", {"candidates": ones(3, 2, dtype=torch.bool)}, "^candidates must have dtype int32 or int64"),
]
BAD += [
    (f"{name} elsewhere", {name: ones(*shape, dtype=dtype, device="meta")}, rf"must be on one device, .*{name} on meta")
    for name, shape, dtype in (
        ("q", (3, 16, 64), BF16),
        ("k", (5, 64), BF16),
        ("w", (3, 16), BF16),
        ("ks", (3,), INT32),
        ("ke", (3,), INT32),
        ("candidates", (3, 2), INT32),
    )
]
NOT_TYPED_SO = [  # what the schema of the operator would refuse in its own words
    ("topk a float", {"topk": 4.0}, "^topk must be an integer, got 4.0"),
    ("topk a bool", {"topk": True}, "^topk must be an integer, got True"),
    ("topk_blocks None", {"topk_blocks": None}, "^topk_blocks must be an integer, got None"),
    ("max_entries_per_doc a float", {"max_entries_per_doc": 5.0}, "^max_entries_per_doc must be an integer, got 5.0"),
    ("block_size a float", {"block_size": 2.0}, "^block_size must be an integer, got 2.0"),
]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    monkeypatch.setattr(reference, "index_topk", lambda *args: pytest.fail("something ran"))


@real_and_fake
@rows("changes message", BAD + NOT_TYPED_SO)
def test_the_function(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        dsv41_index_topk(**made(changes))


@real_and_fake
@rows("changes message", BAD)
def test_the_operator(changes, message, mode):
    with mode(), pytest.raises(ValueError, match=message):
        OPERATOR(*made(changes).values())


@real_and_fake
@rows("changes message", BAD)
def test_after_a_good_call(changes, message, mode, monkeypatch):
    """Checks that remember what they accepted take nothing else for it."""
    monkeypatch.setattr(reference, "index_topk", lambda *args: (torch.empty(0), torch.empty(0)))
    with mode():
        OPERATOR(*made({}).values())
        with pytest.raises(ValueError, match=message):
            dsv41_index_topk(**made(changes))


@rows("changes message", [case for case in BAD if case[0] in ("topk -1", "H 24", "ks fp32", "candidates 1-D")])
@pytest.mark.parametrize("call", [dsv41_index_topk, OPERATOR], ids=["function", "operator"])
def test_in_a_compiled_graph(call, changes, message):
    """While it is traced, in the compiler's own exception, which has the words."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda **arguments: call(**arguments), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=message.removeprefix("^")):
        compiled(**made(changes))
    torch._dynamo.reset()


@pytest.mark.parametrize("value", [[1.0] * 16, 1.0, "x"], ids=["list", "number", "string"])
@pytest.mark.parametrize("name", TENSORS)
def test_no_tensors(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got {type(value).__name__}"):
        dsv41_index_topk(**made({name: value}))


@pytest.mark.parametrize("name", TENSORS[:5])
def test_only_candidates_may_be_none(name):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, got NoneType"):
        dsv41_index_topk(**made({name: None}))


@pytest.mark.parametrize("value", [0, 1, None, "yes"])
def test_emit_candidates_is_a_bool(value):
    with pytest.raises(TypeError, match=f"^emit_candidates must be a bool, got {type(value).__name__}"):
        dsv41_index_topk(**made({"emit_candidates": value}))


def test_every_argument_is_required():
    for name in VALID:
        arguments = made({})
        del arguments[name]
        with pytest.raises(TypeError, match=name):
            dsv41_index_topk(**arguments)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("call", [dsv41_index_topk, OPERATOR], ids=["function", "operator"])
def test_documents_longer_than_said(call, dtype):
    """The values themselves: the row that is the longest is named. Fake tensors have none."""
    a = inputs.arguments((4, 9, 6))
    a = a._replace(ks=a.ks.to(dtype), ke=a.ke.to(dtype))
    with pytest.raises(ValueError, match=r"^max_entries_per_doc must be at least 9, ke - ks of row 12, got 8$"):
        call(*a._replace(max_entries_per_doc=8))
    mode = FakeTensorMode()
    with mode:
        call(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in a._replace(max_entries_per_doc=8)))


def test_documents_longer_than_said_beyond_the_keys():
    """The bound is that of ke - ks, whatever of it exists; a difference of int32 does not wrap."""
    a = inputs.arguments((4, 9)).rows(slice(0, 2))
    with pytest.raises(ValueError, match=r"^max_entries_per_doc must be at least 40, ke - ks of row 1, got 39$"):
        dsv41_index_topk(*a._replace(ke=torch.tensor([1, 40], dtype=INT32), max_entries_per_doc=39))
    ks, ke = torch.tensor([0, -(2**31)], dtype=INT32), torch.tensor([1, 2**31 - 1], dtype=INT32)
    with pytest.raises(ValueError, match=f"at least {2**32 - 1}, ke - ks of row 1, got 39$"):
        dsv41_index_topk(*a._replace(ks=ks, ke=ke, max_entries_per_doc=39))


def test_documents_longer_than_said_in_a_compiled_graph():
    """The check is part of the operator, so that a graph cannot lose it."""
    torch._dynamo.reset()
    compiled = torch.compile(dsv41_index_topk, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^max_entries_per_doc must be at least 9, ke - ks of row 8, got 8$"):
        compiled(*inputs.arguments((9,))._replace(max_entries_per_doc=8))
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("call", [dsv41_index_topk, OPERATOR], ids=["function", "operator"])
def test_candidates_that_are_named_twice(call, dtype, monkeypatch):
    """The first row that has one is named, whatever is sorted together; not that of repeated negative numbers."""
    a = inputs.arguments((4, 9))
    candidates = torch.tensor([[-1, 2, -7, -1, 0, -7]] * 13, dtype=dtype)
    candidates[7, 3] = candidates[12, 3] = 2
    for size in (1, 6, 30, 2**22):
        monkeypatch.setattr("dsa_indexer_topk.arguments._SORTED", size)
        with pytest.raises(ValueError, match=r"^candidates must name a block once in a row, got 2 twice in row 7$"):
            call(*a._replace(candidates=candidates))
    mode = FakeTensorMode()
    with mode:
        call(*(mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in a._replace(candidates=candidates)))


def test_candidates_that_are_named_twice_in_a_compiled_graph():
    torch._dynamo.reset()
    compiled = torch.compile(dsv41_index_topk, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"^candidates must name a block once in a row, got 3 twice in row 0$"):
        compiled(*inputs.arguments((9,))._replace(candidates=torch.full((9, 2), 3)))
    torch._dynamo.reset()


@pytest.mark.parametrize("heads", [0, 1, 8, 16, 24, 32, 48, 64, 128])
def test_unsupported_shape_reason_is_what_the_call_does(heads, monkeypatch):
    """The same words as the error, or None where the call works."""
    monkeypatch.setattr(reference, "index_topk", lambda *args: (torch.empty(0), torch.empty(0)))
    taken = set()
    for head_dim in (0, 16, 32, 64, 96, 128, 256):
        for block_size in (-1, 0, 1, 2, 3, 4, 8, 12, 16, 32):
            reason = unsupported_shape_reason(heads, head_dim, block_size)
            try:
                dsv41_index_topk(**made({**q(heads, head_dim), "block_size": block_size}))
                error = None
            except ValueError as caught:
                error = str(caught)
            assert error == reason, (head_dim, block_size)
            taken |= {(head_dim, block_size)} if reason is None else set()
    sizes = {(d, b) for d in (64, 128) for b in (1, 2, 4, 8, 16)}
    assert taken == (sizes if heads in (16, 32, 64) else set())


def test_unsupported_shape_reason_of_what_is_no_size():
    for sizes in ((16.0, 64, 8), (16, "64", 8), (16, 64, True), (None, 64, 8)):
        assert "must be an integer, got" in unsupported_shape_reason(*sizes)
