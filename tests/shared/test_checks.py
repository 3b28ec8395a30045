"""Every check with good and bad arguments, its message, its cost, and what it does to a compiled graph."""

import time

import pytest
import torch
from hopper_kernels import checks
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF, NAN = float("inf"), float("nan")
X = torch.zeros(24, 4096)

GOOD = {
    "tensor": lambda: checks.tensor("x", X),
    "parameter": lambda: checks.tensor("x", torch.nn.Parameter(X)),
    "dtype": lambda: checks.dtype("x", X, FP32),
    "dtype, the second": lambda: checks.dtype("x", X, BF16, FP32),
    "ndim": lambda: checks.ndim("x", X, 2, 3),
    "shape": lambda: checks.shape("x", X, (24, 4096)),
    "shape, any": lambda: checks.shape("x", X, (None, 4096)),
    "shape, scalar": lambda: checks.shape("x", torch.tensor(1.0), ()),
    "shape, empty": lambda: checks.shape("x", torch.zeros(0, 3), (0, 3)),
    "multiple": lambda: checks.multiple("C", 256, 128),
    "multiple, zero": lambda: checks.multiple("C", 0, 128),
    "in_range, ends": lambda: (checks.in_range("k", 1, 1, 2), checks.in_range("k", 2, 1, 2)),
    "in_range, open": lambda: (checks.in_range("k", -INF, None, 2), checks.in_range("k", INF, 1)),
    "finite": lambda: (checks.finite("eps", 1e-20), checks.finite("eps", 0), checks.finite("eps", 10**400)),
    "integer": lambda: checks.integer("k", 5, 0, 5),
    "integer, open": lambda: checks.integer("k", -5),
    "same_device": lambda: checks.same_device(q=X, k=X, w=X),
    "same_device, optional": lambda: checks.same_device(q=None, k=X, w=None),
    "same_device, none": lambda: checks.same_device(),
}
META = torch.zeros(2, device="meta")
BAD = {
    "tensor": (lambda: checks.tensor("x", [1]), TypeError, "x must be a torch.Tensor, got list"),
    "tensor, None": (lambda: checks.tensor("x", None), TypeError, "x must be a torch.Tensor, got NoneType"),
    "dtype": (lambda: checks.dtype("x", X, BF16), ValueError, "x must have dtype bfloat16, got float32"),
    "dtypes": (
        lambda: checks.dtype("x", X, BF16, FP16),
        ValueError,
        "x must have dtype bfloat16 or float16, got float32",
    ),
    "dtype of a list": (lambda: checks.dtype("x", [1], BF16), TypeError, "x must be a torch.Tensor, got list"),
    "ndim": (lambda: checks.ndim("x", X, 1, 3), ValueError, "x must have 1 or 3 dimensions, got shape (24, 4096)"),
    "ndim of an int": (lambda: checks.ndim("x", 3, 1), TypeError, "x must be a torch.Tensor, got int"),
    "shape": (
        lambda: checks.shape("weight", X, (None, 20480)),
        ValueError,
        "weight must have shape (n, 20480), got (24, 4096)",
    ),
    "shape, rank": (lambda: checks.shape("w", X, (24,)), ValueError, "w must have shape (24,), got (24, 4096)"),
    "shape, rank and any": (
        lambda: checks.shape("w", X, (None, None, 3)),
        ValueError,
        "w must have shape (n, m, 3), got (24, 4096)",
    ),
    "shape of None": (lambda: checks.shape("w", None, (24,)), TypeError, "w must be a torch.Tensor, got NoneType"),
    "multiple": (lambda: checks.multiple("C", 200, 128), ValueError, "C must be a multiple of 128, got 200"),
    "in_range, low": (lambda: checks.in_range("k", 0, 1), ValueError, "k must be at least 1, got 0"),
    "in_range, high": (lambda: checks.in_range("k", 3, None, 2), ValueError, "k must be at most 2, got 3"),
    "in_range, both": (lambda: checks.in_range("k", 3, 1, 2), ValueError, "k must be between 1 and 2, got 3"),
    "in_range, nan": (lambda: checks.in_range("k", NAN, 1), ValueError, "k must be at least 1, got nan"),
    "in_range, nan below": (lambda: checks.in_range("k", NAN, None, 1), ValueError, "k must be at most 1, got nan"),
    "finite, inf": (lambda: checks.finite("eps", INF), ValueError, "eps must be a finite number, got inf"),
    "finite, -inf": (lambda: checks.finite("eps", -INF), ValueError, "eps must be a finite number, got -inf"),
    "finite, nan": (lambda: checks.finite("eps", NAN), ValueError, "eps must be a finite number, got nan"),
    "finite, text": (lambda: checks.finite("eps", "1"), ValueError, "eps must be a finite number, got '1'"),
    "integer, bool": (lambda: checks.integer("k", True, 0), ValueError, "k must be an integer, got True"),
    "integer, float": (lambda: checks.integer("k", 2.0, 0), ValueError, "k must be an integer, got 2.0"),
    "integer, range": (lambda: checks.integer("k", 6, 0, 5), ValueError, "k must be between 0 and 5, got 6"),
    "same_device": (
        lambda: checks.same_device(q=X, bias=None, k=META),
        ValueError,
        "q, bias, k must be on one device, got q on cpu, k on meta",
    ),
    "same_device, 0-dim": (
        lambda: checks.same_device(x=META, scale=torch.tensor(1.0)),
        ValueError,
        "x, scale must be on one device, got x on meta, scale on cpu",
    ),
    "same_device of a list": (lambda: checks.same_device(q=[1]), TypeError, "q must be a torch.Tensor, got list"),
}


@pytest.mark.parametrize("check", GOOD.values(), ids=GOOD)
def test_good_arguments_pass(check):
    check()


@pytest.mark.parametrize(("check", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_arguments_raise(check, kind, message):
    with pytest.raises(kind) as caught:
        check()
    assert str(caught.value) == message
    assert type(caught.value) is kind


def all_checks(x, weight, eps, topk):
    tokens, channels = x.shape
    checks.tensor("x", x)
    checks.dtype("x", x, BF16, FP32)
    checks.ndim("x", x, 2)
    checks.shape("weight", weight, (None, channels))
    checks.shape("x", x, (tokens, None))
    checks.multiple("channels", channels, 128)
    checks.in_range("tokens", tokens, 0)
    checks.integer("tokens", tokens, 0, 2**40)
    checks.integer("topk", topk, 1, 512)
    checks.finite("eps", eps)
    checks.same_device(x=x, weight=weight, bias=None)
    return x + eps


def test_a_compiled_graph_is_not_specialised():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    checked = torch.compile(all_checks, fullgraph=True, dynamic=True, backend=backend)
    for tokens, rows, channels in ((5, 3, 256), (7, 4, 384), (4096, 24, 512)):
        x = torch.randn(tokens, channels)
        torch.testing.assert_close(checked(x, torch.zeros(rows, channels), 1e-3, 8), x + 1e-3)
    assert len(graphs) == 1


def test_checks_inside_an_operator_are_traced_with_symbolic_sizes():
    @torch.library.custom_op("hopper_kernels_test::checked", mutates_args=())
    def checked(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return all_checks(x, weight, 1e-3, 8)

    traced = []

    @checked.register_fake
    def _(x, weight):
        traced.append(type(x.shape[0]))
        return all_checks(x, weight, 1e-3, 8)

    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: checked(x, w) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens, channels in ((5, 256), (7, 384), (4096, 512)):
            out = compiled(torch.randn(tokens, channels), torch.zeros(tokens + 1, channels))
            assert out.shape == (tokens, channels)
    assert torch.SymInt in traced


def test_a_bad_argument_of_a_traced_operator_raises_the_same_words():
    with FakeTensorMode():
        x, weight = torch.empty(5, 200), torch.empty(3, 200)
        with pytest.raises(ValueError, match=r"^channels must be a multiple of 128, got 200$"):
            all_checks(x, weight, 1e-3, 8)


def test_no_check_reads_data():
    # A fake or meta tensor has none: reading it would raise.
    with FakeTensorMode():
        all_checks(torch.empty(5, 256), torch.empty(3, 256), 1e-3, 8)
    all_checks(torch.empty(5, 256, device="meta"), torch.empty(3, 256, device="meta"), 1e-3, 8)


@pytest.mark.parametrize("check", GOOD.values(), ids=GOOD)
def test_success_is_cheap(check):
    # About a microsecond or less on a quiet machine; some of these hold two or three checks and build a tensor.
    best = min(_seconds_per_call(check) for _ in range(5))
    assert best < 20e-6


def _seconds_per_call(check, calls=200):
    start = time.perf_counter()
    for _ in range(calls):
        check()
    return (time.perf_counter() - start) / calls


def test_a_remembered_check_looks_at_sizes_once_and_refuses_every_time():
    seen = []

    @checks.remembered
    def check(x, scale, eps, name):
        """A check."""
        seen.append(x)
        checks.shape(name, x, (2, 3))
        checks.integer("eps", eps)

    def calls(*arguments):
        before = len(seen)
        try:
            check(*arguments)
        except ValueError:
            return -1
        return len(seen) - before

    x, scale = torch.zeros(2, 3), None
    assert check.__doc__ == "A check."
    assert [calls(x, scale, 1, "x"), calls(torch.ones(2, 3), scale, 1, "x")] == [1, 0]
    for other in (x.bfloat16(), x.to("meta"), torch.nn.Parameter(x)):
        assert calls(other, scale, 1, "x") == (0 if isinstance(other, torch.nn.Parameter) else 1)
    assert calls(x, x, 1, "x") == 1  # a tensor instead of None
    assert calls(x, scale, 2, "x") == 1  # another number
    assert [calls(x, scale, True, "x"), calls(x, scale, 1.0, "x")] == [-1, -1]  # equal to 1, of another type
    assert [calls(x.t(), scale, 1, "x") for _ in range(2)] == [-1, -1]  # never remembered
    assert [calls(x, [], 1, "x") for _ in range(2)] == [1, 1]  # not known how to remember


def test_a_remembered_check_forgets_and_lets_fake_tensors_and_graphs_pass(monkeypatch):
    seen = []

    @checks.remembered
    def check(x):
        seen.append(tuple(x.shape))
        checks.multiple("C", x.shape[-1], 8)

    monkeypatch.setattr(checks, "_REMEMBERED", 3)
    for size in (8, 16, 24, 32, 8, 8):
        check(torch.zeros(size))
    assert seen == [(8,), (16,), (24,), (32,), (8,)]
    with FakeTensorMode():
        fake = torch.empty(8)
    seen.clear()
    check(fake)
    check(fake)
    assert len(seen) == 2

    def f(x):
        check(x)
        return x + 1

    compiled = torch.compile(f, fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.zeros(8)), torch.ones(8))
    with pytest.raises(Exception, match="C must be a multiple of 8"):
        compiled(torch.zeros(9))
