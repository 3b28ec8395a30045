"""Which implementation the operators choose, on machines that are pretended: fake CUDA tensors need no GPU."""

import contextlib

import pytest
import torch
from fp8_dual_cast import launch, ops
from hopper_kernels import KernelUnavailable
from hopper_kernels import reference as use_definition
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.fp8_dual_cast import inputs
from tests.support.compare import assert_same_bytes
from tests.support.implementations import assert_registered
from tests.support.machines import triton_version

CALLS = {
    "fp8_dual_cast": ("dual_cast", lambda x: ops._dual_cast(x, True, None, None, 64, False)),
    "per_token_cast": ("row_cast", lambda x: ops._row_cast(x, True)),
    "per_token_cast_transposed": ("column_cast", lambda x: ops._column_cast(x, True)),
}
each_call = pytest.mark.parametrize(("name", "launcher", "call"), [(k, *v) for k, v in CALLS.items()], ids=CALLS)


@pytest.fixture
def launched(monkeypatch):
    """The launches asked for, as (name, arguments); none happens."""
    seen = []
    for name in ("dual_cast", "row_cast", "column_cast"):
        monkeypatch.setattr(launch, name, lambda *args, name=name: seen.append((name, args)))
    return seen


def cuda_matrix(dtype=torch.bfloat16):
    return torch.empty(5, 256, dtype=dtype, device="cuda")


@each_call
def test_sm90_launches(name, launcher, call, machine, launched):
    machine("SM90 (NVIDIA H200)")
    with FakeTensorMode():
        x = cuda_matrix()
        call(x)
    ((found, arguments),) = launched
    assert found == launcher
    assert arguments[0] is x
    assert arguments[1:] == ((True, None, None, 64, False) if launcher == "dual_cast" else (True,))


@each_call
def test_another_card_raises(name, launcher, call, machine, launched):
    """Never a silent fallback; wrong arguments are reported first."""
    machine("SM80 (NVIDIA A100)")
    with FakeTensorMode():
        with pytest.raises(KernelUnavailable, match=rf"^{name} requires SM90, found SM80 \(NVIDIA A100\)"):
            call(cuda_matrix())
        with pytest.raises(ValueError, match=r"^x must have dtype bfloat16"):
            call(cuda_matrix(torch.float32))
    assert not launched


@each_call
def test_a_triton_out_of_range_raises(name, launcher, call, machine, launched):
    machine("SM90 (NVIDIA H200)")
    with (
        triton_version("2.3"),
        FakeTensorMode(),
        pytest.raises(KernelUnavailable, match=r"^fp8_dual_cast requires triton.*, found 2\.3"),
    ):
        call(cuda_matrix())
    assert not launched


@each_call
@pytest.mark.parametrize("card", ["SM90 (NVIDIA H200)", "SM80 (NVIDIA A100)"])
def test_the_reference_context_runs_the_definition(name, launcher, call, card, machine, launched):
    machine(card)
    with FakeTensorMode(), use_definition():
        results = call(cuda_matrix())
    assert not launched
    assert len(results) == (4 if launcher == "dual_cast" else 2)
    assert all(t.device.type == "cuda" for t in results)


@each_call
def test_a_cpu_tensor_runs_the_definition(name, launcher, call, machine, launched):
    machine("SM90 (NVIDIA H200)")
    results = call(torch.ones(5, 256, dtype=torch.bfloat16))
    assert not launched
    assert all(t.device.type == "cpu" for t in results)


@each_call
def test_the_operator_is_registered_for_cuda(name, launcher, call):
    assert_registered(getattr(torch.ops.fp8_dual_cast, launcher), keys=("CPU", "CUDA", "Meta"))


def test_what_is_read_in_place():
    """16-byte copies need contiguous channels, an aligned base and an aligned pitch of at most 2**24 elements."""
    x = inputs.matrix(3, 256)
    views = {name: restride(x) for name, restride in inputs.STRIDES.items()} | inputs.broadcasts()
    views |= {f"one row, stride {stride}": inputs.singleton(x, stride) for stride in (0, 977, 2**40)}
    for pitch in (2**24, 2**24 + 8):
        views[f"pitch {pitch}"] = x.new_zeros(pitch + 256).as_strided((2, 256), (pitch, 1))
    read_in_place = set()
    for name, view in views.items():
        readable = launch._readable(view)
        assert_same_bytes(readable, view, name, strides=False)
        assert readable.data_ptr() % 16 == 0
        assert readable.stride(1) == 1
        assert launch._pitch(readable) % 8 == 0
        if readable is view:
            read_in_place.add(name)
    assert read_in_place == {
        "contiguous",
        "aligned column slice",
        "every second row",
        "one row, stride 0",
        "one row, stride 977",
        f"one row, stride {2**40}",
        f"pitch {2**24}",
    }


LAUNCHERS = {
    "dual_cast": lambda x: launch.dual_cast(x, False, None, None, 0, True),
    "row_cast": lambda x: launch.row_cast(x, False),
    "column_cast": lambda x: launch.column_cast(x, False),
}


@pytest.mark.parametrize("call", LAUNCHERS.values(), ids=LAUNCHERS)
def test_launches_are_on_the_device_of_x(call, monkeypatch):
    """One launch, with the device of x made current around it; none where there are no tokens."""
    log = []

    @contextlib.contextmanager
    def device_of(tensor):
        log.append("enter" if tensor is x else "enter another")
        yield
        log.append("leave")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(launch.Launch, "run", lambda self: log.append("launch"))
    x = torch.empty(5, 256, dtype=torch.bfloat16, device="meta")
    call(x)
    assert log == ["enter", "launch", "leave"]
    log.clear()
    assert all(t.shape[-1] == 0 or t.shape[0] == 0 for t in call(x[:0]))
    assert log == []


def test_the_schema_is_the_published_one():
    assert str(torch.ops.fp8_dual_cast.dual_cast.default._schema) == (
        "fp8_dual_cast::dual_cast(Tensor x, bool use_ue8m0, Tensor? cos_sin_cache, Tensor? position_ids,"
        " int head_dim, bool inverse) -> (Tensor q, Tensor sf_storage, Tensor q_t, Tensor sf_t_storage)"
    )


def test_variants_cover_what_a_rotation_can_ask_for():
    """Every pair of constants that sizes lead to is among the variants that are compiled ahead."""
    x = torch.empty(128, 3072, dtype=torch.bfloat16, device="meta")
    results = *launch.row_results(x), *launch.column_results(x)
    found = set()
    for head_dim in (4, 12, 16, 24, 64, 96, 128, 192, 256, 384, 512, 768):
        for rope_dim in {2, 4, 6, 8, 16, 24, 64, 66, 128, head_dim}:
            if rope_dim <= head_dim:
                table = torch.empty(128, rope_dim, device="meta")
                positions = torch.empty(128, dtype=torch.int64, device="meta")
                options = launch._dual(x, *results, False, table, positions, head_dim).options
                found.add((options["FIRST"], options["VECTOR"]))
    compiled = {
        (options["FIRST"], options["VECTOR"])
        for options in (v.compile.__self__.options for v in launch.variants())
        if options.get("ROPE")
    }
    assert found == compiled


@pytest.mark.parametrize(
    ("blocks", "grid"), [(3, (3, 1)), (65535, (65535, 1)), (65537, (65535, 2)), (131072, (65535, 3))]
)
def test_the_grid_covers_all_token_blocks(blocks, grid):
    """The second axis of a grid ends at 65,535; the third goes on."""
    x = torch.empty(128 * blocks - 1, 256, dtype=torch.bfloat16, device="meta")
    found = launch._dual(x, *launch.row_results(x), *launch.column_results(x), False)
    assert found.grid == (2, *grid)
    assert found.args[8] == x.shape[0]


@pytest.mark.parametrize(("inverse", "sign"), [(True, -1.0), (False, 1.0)])
def test_the_transpose_negates_the_sine(inverse, sign):
    x = torch.empty(5, 256, dtype=torch.bfloat16, device="meta")
    table, positions = torch.empty(9, 8, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    results = *launch.row_results(x), *launch.column_results(x)
    assert launch._dual(x, *results, False, table, positions, 64, inverse).args[7] == sign
