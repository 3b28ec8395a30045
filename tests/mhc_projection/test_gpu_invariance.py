"""The same bytes in every run, process, batch, stream and launch grid."""

from functools import partial

import pytest
import torch
from mhc_projection import plan

from tests.mhc_projection import inputs, on_gpu
from tests.support.compare import assert_same_bytes
from tests.support.device import differences_at_once, repeat_bytes
from tests.support.process import output_of, start_python

pytestmark = pytest.mark.gpu

DIGEST = "from tests.mhc_projection import on_gpu; print(on_gpu.digest())"
FUNCTIONS = {"projection": on_gpu.projection, "connection": on_gpu.connection}
NAMES = {"projection": on_gpu.PROJECTION, "connection": on_gpu.CONNECTION}


@pytest.mark.parametrize("sizes", [(2500, 4, 200), (300, 4, 5120), (130, 2, 72), (70, 1, 8)], ids=str)
def test_repeats(sizes):
    """50 calls of everything, the first of them after calls of another shape."""
    other = on_gpu.operands(67, 4, 64)
    on_gpu.connection(other, on_gpu.cotangents(other, *on_gpu.CONNECTION))
    t = on_gpu.operands(*sizes)
    c = on_gpu.all_cotangents(t)
    repeat_bytes(lambda: on_gpu.everything(t, c), 50)


@pytest.mark.slow
def test_repeats_at_the_size_of_the_model():
    t = on_gpu.operands(4097, 4, 5120)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    repeat_bytes(lambda: on_gpu.connection(t, c), 50)


@pytest.mark.timeout(120)
def test_two_processes():
    """No order of sums hangs on what a process did before."""
    expected = on_gpu.digest()
    processes = [start_python(DIGEST, quit_at_once=True) for _ in range(2)]
    assert [output_of(process, timeout=100) for process in processes] == [expected] * 2


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streams"])
@pytest.mark.parametrize(("tokens", "d"), [(2500, 200), (1300, 5120)])
def test_a_token_does_not_depend_on_its_batch(name, streams, tokens, d):
    """Alone, at other positions, in batches of other sizes: its results and gradients keep their bits."""
    function = FUNCTIONS[name]
    t = on_gpu.operands(tokens, 4, d)
    c = on_gpu.cotangents(t, *NAMES[name], *(["streams"] if streams else []))
    whole = function(t, c)
    last = tokens - 1
    chosen = [slice(i, i + 1) for i in (0, 1, 63, 64, 777, 1023, 1024, last)]
    chosen += [slice(100, 1200), slice(5, 70), slice(tokens - 65, tokens), slice(0, tokens, 3)]
    chosen += [torch.randperm(tokens, device=on_gpu.DEVICE), torch.full((130,), last, device=on_gpu.DEVICE)]
    for index in chosen:
        found = function(*on_gpu.rows(t, c, index))
        what = f"tokens {index}"[:60]
        on_gpu.assert_same(on_gpu.of_a_token(found, ...), on_gpu.of_a_token(whole, index), what)


@pytest.mark.parametrize("hc", [1, 2, 4])
def test_the_gates_of_a_token_do_not_depend_on_its_batch(hc):
    n = inputs.logits(hc)
    mixes, scale, base = (torch.randn(shape, device=on_gpu.DEVICE) for shape in ((1000, n), (3,), (n,)))
    shapes = {"pre": (1000, hc), "post": (1000, hc), "comb": (1000, hc, hc)}
    c = {name: torch.randn(shape, device=on_gpu.DEVICE) for name, shape in shapes.items()}
    whole = on_gpu.gates(mixes, scale, base, c, hc)
    for index in (slice(0, 1), slice(127, 128), slice(128, 129), slice(999, 1000), slice(3, 500), slice(0, 1000, 7)):
        part = {name: g[index].clone() for name, g in c.items()}
        found = on_gpu.gates(mixes[index].clone(), scale, base, part, hc)
        on_gpu.assert_same(on_gpu.of_a_token(found, ...), on_gpu.of_a_token(whole, index), str(index))


@pytest.mark.parametrize(
    "sizes", [(2500, 4, 5120, 24), (2500, 4, 200, 24), (1025, 8, 72, 32), (3000, 1, 8, 3)], ids=str
)
@pytest.mark.parametrize("streams", [False, True], ids=["plain", "streams"])
def test_the_grid_changes_no_bit(sizes, streams, monkeypatch, poison):
    """Programs take items of work as they get to them: one program, some, and more than there is work for."""
    tokens, hc, d, n = sizes
    t = on_gpu.operands(tokens, hc, d, n=n)
    c = on_gpu.cotangents(t, *on_gpu.PROJECTION, *(["streams"] if streams else []))
    wanted, grids, make = on_gpu.projection(t, c), [], plan.projection_backward

    def with_grid(*args):
        grids.append(programs)
        return make(*args)._replace(grid=(programs,))

    monkeypatch.setattr(plan, "projection_backward", with_grid)
    for programs in (1, 7, 132, 400):
        poison("nan")
        on_gpu.assert_same(on_gpu.projection(t, c), wanted, f"{programs} programs")
    assert grids == [1, 7, 132, 400]
    on_gpu.assert_accurate(wanted, on_gpu.exact(t, c), t)


@pytest.mark.parametrize("chunk", plan.CHUNKS)
def test_every_chunk_size(chunk, monkeypatch, poison):
    """Not only the one that the plan chooses for these sizes: right, the same 50 times, and no matter to a token."""
    t = on_gpu.operands(2500, 4, 200)
    c = on_gpu.cotangents(t, *on_gpu.CONNECTION, "streams")
    planned, asked = on_gpu.connection(t, c), []
    monkeypatch.setattr(plan, "chunk_size", lambda *sizes: asked.append(sizes) or chunk)
    poison("nan")
    found = repeat_bytes(lambda: on_gpu.connection(t, c), 50)
    assert asked == [(2500, 4, 200)] * 50
    on_gpu.assert_same(on_gpu.of_a_token(found, ...), on_gpu.of_a_token(planned, ...), f"chunks of {chunk}")
    on_gpu.assert_accurate(found, on_gpu.exact(t, c), t)


def test_the_gradient_of_the_weight_is_the_sum_of_its_chunks():
    """Bit for bit for two of them: what a chunk gives does not depend on the tokens beside it."""
    chunk = plan.CHUNKS[0]
    t = on_gpu.operands(chunk + 77, 4, 72)
    assert plan.chunk_size(*t.x.shape) == chunk
    c = on_gpu.cotangents(t, "mixes")
    whole = on_gpu.projection(t, c)["grad_weight"]
    first, second = slice(chunk), slice(chunk, None)
    parts = [on_gpu.projection(*on_gpu.rows(t, c, index))["grad_weight"] for index in (first, second)]
    assert_same_bytes(whole, parts[0] + parts[1])


def test_two_streams_at_once():
    """30 rounds on two streams with different data of their own give what each gives alone."""
    work = []
    for sizes in ((1100, 4, 200), (640, 4, 1280)):
        t = on_gpu.operands(*sizes)
        work.append(partial(on_gpu.everything, t, on_gpu.all_cotangents(t)))
    assert differences_at_once(work, rounds=30) == [0, 0]
