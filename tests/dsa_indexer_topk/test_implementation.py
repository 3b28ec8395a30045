"""Which implementation the operator chooses, on machines that are pretended: fake CUDA tensors need no GPU."""

import contextlib
import inspect

import pytest
import torch
from dsa_indexer_topk import launch, ops, reference
from hopper_kernels import KernelUnavailable
from hopper_kernels import reference as use_definition
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.dsa_indexer_topk import inputs
from tests.support.implementations import assert_registered
from tests.support.machines import triton_version

HOPPER, AMPERE = "SM90 (NVIDIA H200)", "SM80 (NVIDIA A100)"


def cuda(a):
    return [torch.empty(t.shape, dtype=t.dtype, device="cuda") if isinstance(t, torch.Tensor) else t for t in a]


def call(**changes):
    """The operator's CUDA implementation on fake tensors; its arguments and results."""
    with FakeTensorMode():
        arguments = cuda(inputs.arguments((20, 3), mode="both")._replace(**changes))
        return arguments, ops._index_topk(*arguments)


@pytest.fixture
def ran(monkeypatch):
    """The implementations asked for, as (place, arguments); none runs."""
    seen = []
    for module, place in ((launch, "kernel"), (reference, "definition")):
        monkeypatch.setattr(module, "index_topk", lambda *args, p=place: seen.append((p, args)) or (None, None))
    return seen


def test_sm90_launches(machine, ran):
    """With the arguments of the operator, in their order."""
    machine(HOPPER)
    arguments, _ = call()
    ((place, found),) = ran
    assert place == "kernel"
    assert all(got is given for got, given in zip(found, arguments, strict=True))


def test_both_implementations_take_the_arguments_of_the_operator():
    schema = [argument.name for argument in torch.ops.dsa_indexer_topk.dsv41_index_topk.default._schema.arguments]
    for function in (launch.index_topk, reference.index_topk, ops.dsv41_index_topk):
        assert list(inspect.signature(function).parameters) == schema


def test_another_card_raises(machine, ran):
    machine(AMPERE)
    with pytest.raises(KernelUnavailable, match=r"^dsv41_index_topk requires SM90, found SM80 \(NVIDIA A100"):
        call()
    assert not ran


def test_wrong_arguments_are_reported_first(machine, ran):
    machine(AMPERE)
    with pytest.raises(ValueError, match=r"^topk must be between"):
        call(topk=-1)


def test_a_triton_out_of_range_raises(machine, ran):
    machine(HOPPER)
    with (
        triton_version("2.3"),
        pytest.raises(KernelUnavailable, match=r"^dsa_indexer_topk requires triton.*, found 2\.3"),
    ):
        call()
    assert not ran


@pytest.mark.parametrize("card", [HOPPER, AMPERE])
def test_the_reference_context_runs_the_definition(card, machine, ran):
    machine(card)
    with use_definition():
        call()
    assert [place for place, _ in ran] == ["definition"]


@pytest.mark.parametrize("inside", [False, True])
def test_a_gpu_asserts_and_waits_for_nothing(inside, machine, ran, monkeypatch):
    """Fake tensors have no data: a look at it would raise. The assertions come before the implementation.

    That candidates are unique, the kernels find out themselves.
    """
    machine(HOPPER)
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda fits, message: asserted.append((fits, message, len(ran))))
    with use_definition() if inside else contextlib.nullcontext():
        call()
    for fits, _, before in asserted:
        assert (fits.shape, fits.dtype, fits.device.type) == ((), torch.bool, "cuda")
        assert before == 0
    assert len(ran) == 1
    wanted = ["dsv41_index_topk: max_entries_per_doc must be at least ke - ks in every row"]
    wanted += ["dsv41_index_topk: candidates must name a block once in a row"] if inside else []
    assert [message for _, message, _ in asserted] == wanted


def test_the_definition_on_a_gpu_waits_for_nothing(machine):
    """It runs on fake CUDA tensors, so it looks at no data."""
    machine(AMPERE)
    with use_definition():
        _, (picks, blocks) = call()
    assert (picks.shape, picks.dtype, picks.device.type) == ((23, 5), torch.int64, "cuda")
    assert (blocks.shape, blocks.dtype, blocks.device.type) == ((23, 3), torch.int32, "cuda")


def test_the_operator_is_registered():
    assert_registered(torch.ops.dsa_indexer_topk.dsv41_index_topk)


def test_the_schema_is_the_published_one():
    """Trainers' checkpointing policies and saved graphs know it."""
    assert str(torch.ops.dsa_indexer_topk.dsv41_index_topk.default._schema) == (
        "dsa_indexer_topk::dsv41_index_topk(Tensor q, Tensor k, Tensor w, Tensor ks, Tensor ke, SymInt topk,"
        " Tensor? candidates, bool emit_candidates, SymInt max_entries_per_doc, int block_size, SymInt topk_blocks)"
        " -> (Tensor picks, Tensor candidate_blocks)"
    )
