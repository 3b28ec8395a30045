"""Group sizes that cannot be, on a GPU: noticed before a launch if the environment asks, else by the device."""

import subprocess
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from tests.moe_experts import on_gpu
from tests.moe_experts.inputs import Operands
from tests.support.process import start_python

MESSAGES = "must not be negative", "must add up to at most"


def wrong_counts(t: Operands, dtypes: Iterable[torch.dtype] = (torch.int32, torch.int64)) -> Iterator[tuple]:
    """Counts for these operands, with what the message says of them."""
    rows, (first, *rest) = len(t.x), t.num_tokens_per_expert.tolist()
    for counts, message in zip(([first, *rest[:-1], -1], [rows + 1 - sum(rest), *rest]), MESSAGES, strict=True):
        for dtype in dtypes:
            yield torch.tensor(counts, dtype=dtype, device=on_gpu.DEVICE), message


def report(call: Callable, t: Operands, kind: str, *counts: str) -> None:
    """In a process of its own: prints what a call with these counts comes to.

    Right counts first, to see that it is the counts which fail. No traceback is printed: it would name the argument
    too.
    """
    call(*t)
    torch.cuda.synchronize()
    print("right counts", flush=True)
    wrong = torch.tensor([int(count) for count in counts], dtype=getattr(torch, kind), device="cuda")
    try:
        call(*t._replace(num_tokens_per_expert=wrong))
        torch.cuda.synchronize()
    except Exception as error:
        print(str(error).splitlines()[0], flush=True)
    else:
        print("nothing was noticed", flush=True)


def assert_device_notices(code: str, cases: Iterable[tuple[Tensor, str]]) -> None:
    """`code` passes its arguments to `report`; one process for each case, since its context is unusable afterwards."""
    processes = {}
    for counts, message in cases:
        kind = str(counts.dtype).removeprefix("torch.")
        processes[f"{message}, {kind}"] = start_python(code, kind, *map(str, counts.tolist()))
    for what, process in processes.items():
        try:
            output, errors = process.communicate(timeout=100)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            raise AssertionError(f"{what}: no end\n{output}\n{errors}") from None
        right, *found = output.splitlines()
        assert right == "right counts", f"{what}\n{output}\n{errors}"
        assert any("device-side assert" in line for line in found), f"{what}\n{output}\n{errors}"
        assert "Assertion `num_tokens_per_expert must not be negative" in output + errors, f"{what}\n{errors}"
