"""Which implementation the operator chooses, on machines that are pretended: fake CUDA tensors need no GPU."""

import inspect

import pytest
import torch
from dsa_sparse_attn_bwd import dsa_sparse_attn_backward, launch, ops, reference, sparse_attn_backward_flat
from hopper_kernels import KernelUnavailable, registry
from hopper_kernels import reference as use_definition
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.dsa_sparse_attn_bwd import inputs
from tests.support.device import deterministic_algorithms
from tests.support.implementations import assert_registered
from tests.support.machines import triton_version

HOPPER, AMPERE = "SM90 (NVIDIA H200)", "SM80 (NVIDIA A100)"
OPERATOR = torch.ops.dsa_sparse_attn_bwd.dsa_sparse_attn_backward


def call(**changes):
    """The operator's CUDA implementation on fake tensors; its arguments and results."""
    with FakeTensorMode():
        arguments = inputs.with_tail(inputs.small(), 64).batched() | {"deterministic": False} | changes
        fake = {
            name: torch.empty(t.shape, dtype=t.dtype, device="cuda") if isinstance(t, Tensor) else t
            for name, t in arguments.items()
        }
        return fake, ops._backward(*fake.values())


@pytest.fixture
def ran(monkeypatch):
    """The implementations asked for, as (place, arguments); none runs."""
    seen = []
    for module, place in ((launch, "kernel"), (reference, "definition")):
        monkeypatch.setattr(module, "backward", lambda *args, p=place: seen.append((p, args)) or (args[1], *args[1:3]))
    return seen


@pytest.fixture
def hopper(machine, monkeypatch):
    """A card and software that the kernels run on, whatever is here."""
    machine(HOPPER)
    monkeypatch.setattr(registry, "software_reason", lambda kernel: None)


def test_sm90_launches(hopper, ran):
    """With the arguments of the operator, in their order, without the dimensions of size 1."""
    given, _ = call()
    ((place, found),) = ran
    assert place == "kernel"
    assert len(found) == len(given)
    for name, got, wanted in zip(given, found, given.values(), strict=True):
        if isinstance(wanted, Tensor):
            assert got.untyped_storage() is wanted.untyped_storage() or name == "sinks", name
            assert got.shape == tuple(size for size in wanted.shape if size != 1), name
        elif name != "deterministic":
            assert got == wanted, name


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("algorithms", [False, True])
def test_deterministic_by_argument_or_by_pytorchs_flag(deterministic, algorithms, hopper, ran):
    with deterministic_algorithms(algorithms):
        call(deterministic=deterministic)
    ((_, (*_, ordered)),) = ran
    assert ordered is (deterministic or algorithms)


def test_both_implementations_take_the_arguments_of_the_operator():
    """But for the last one: launch knows the order of sums, which the definition has."""
    schema = [argument.name for argument in OPERATOR.default._schema.arguments]
    assert list(inspect.signature(launch.backward).parameters) == [*schema[:-1], "ordered"]
    assert list(inspect.signature(reference.backward).parameters) == [*schema[:-1], "dtype"]
    for function in (dsa_sparse_attn_backward, ops._backward):
        assert list(inspect.signature(function).parameters) == schema
    assert set(inspect.signature(sparse_attn_backward_flat).parameters) == set(schema)


def test_another_card_raises(machine, ran):
    machine(AMPERE)
    with pytest.raises(KernelUnavailable, match=r"^dsa_sparse_attn_backward requires SM90, found SM80 \(NVIDIA A100"):
        call()
    assert not ran


@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_wrong_arguments_are_reported_first(card, machine, ran):
    machine(card)
    with pytest.raises(ValueError, match=r"^sm_scale must be a finite number"):
        call(sm_scale=float("nan"))
    with pytest.raises(ValueError, match=r"^sinks must have shape \(16,\)"):
        call(sinks=torch.ones(8))
    assert not ran


@pytest.mark.parametrize("version", ["2.3", "3.5.1", "3.10.0"])
def test_a_triton_out_of_range_raises(version, machine, ran):
    machine(HOPPER)
    with (
        triton_version(version),
        pytest.raises(KernelUnavailable, match=rf"^dsa_sparse_attn_bwd requires triton.*, found {version}"),
    ):
        call()
    assert not ran


@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_the_reference_context_runs_the_definition(card, machine, ran):
    machine(card)
    with use_definition():
        call()
    assert [place for place, _ in ran] == ["definition"]


def test_a_cpu_runs_the_definition(machine, ran):
    for card in (HOPPER, AMPERE):
        machine(card)
        dsa_sparse_attn_backward(**inputs.small().batched())
    assert [place for place, _ in ran] == ["definition"] * 2


def test_results_have_the_dtypes_of_the_operands(machine, ran):
    """Whatever the definition computes in."""
    machine(HOPPER)
    with use_definition():
        given, results = call(sinks=torch.ones(16, dtype=torch.float16))
    assert [r.dtype for r in results] == [given[name].dtype for name in ("q", "kv", "sinks")]


def test_the_operator_is_registered():
    assert_registered(OPERATOR)
    assert dsa_sparse_attn_backward._opoverload is OPERATOR.default


def test_the_schema_is_the_published_one():
    """Trainers' checkpointing policies and saved graphs know it."""
    assert str(OPERATOR.default._schema) == (
        "dsa_sparse_attn_bwd::dsa_sparse_attn_backward(Tensor grad_out, Tensor q, Tensor kv, Tensor out, Tensor lse,"
        " Tensor indices, Tensor sinks, float sm_scale, Tensor? out_tail=None, bool deterministic=False)"
        " -> (Tensor dq, Tensor dkv, Tensor dsinks)"
    )
