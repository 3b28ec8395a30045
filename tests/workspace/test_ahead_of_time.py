"""Every kernel compiled for sm_90a, against the committed table of what each variant needs.

A change that costs registers, spills, grows shared memory or loses a matrix or TMA instruction must show in the table.
The table is rewritten with `uv run hopper-kernels precompile --table tests/workspace/ahead_of_time.json`.
"""

import dataclasses
import importlib.metadata
import json
from pathlib import Path

import pytest
from hopper_kernels import precompile, registry
from hopper_kernels.precompile import Report

from tests.support.process import output_of, start_python

TABLE = Path(__file__).with_name("ahead_of_time.json")
REWRITE = f"uv run hopper-kernels precompile --table tests/workspace/{TABLE.name}"
# What a kernel's speed rests on: losing one of these means that the compiler chose another way.
MUST_STAY = ("HGMMA", "QGMMA", "UTMALDG", "UTMASTG", "LDSM", "STSM", "F2FP")
INSTALLED = [name for name in registry.KERNELS if registry.installed_version(name)]
# The number of kernels, and the names of those with another key after all others have theirs than in a new process.
OTHER_KEYS = """
import importlib, json, sys
from pathlib import Path
from triton.runtime.jit import JITCallable

package = importlib.import_module(sys.argv[1])
root = Path(package.__path__[0])
files = [path.relative_to(root.parent).with_suffix("") for path in sorted(root.rglob("kernels/*.py"))]
names = [".".join(path.parts) for path in files if path.name != "__init__"]
members = [f for name in names for f in vars(importlib.import_module(name)).values() if isinstance(f, JITCallable)]
functions = list({id(f): f for f in members}.values())
kernels = [f for f in functions if f.__name__.endswith("_kernel")]

def key_after(kernel, others):
    for f in functions:
        f.hash, f.used_global_vals = None, {}
    return [f.cache_key for f in (*others, kernel)][-1]

different = [k.__name__ for k in kernels if key_after(k, []) != key_after(k, [f for f in kernels if f is not k])]
print(json.dumps([len(kernels), different]))
"""


def _spills(report: Report) -> bool:
    return any(report.instructions.get(opcode) for opcode in precompile.LOCAL_MEMORY)


def regressions(old: list[Report], new: list[Report]) -> list[str]:
    """What is worse in `new` than in `old`, a block of lines for each variant."""
    old, new = {r.variant: r for r in old}, {r.variant: r for r in new}
    found = [f"{name}: in the table, but no longer compiled" for name in old.keys() - new.keys()]
    for name, report in new.items():
        before = old.get(name)
        # Whoever wrote a spill into the table has seen it; that it grows is more stack.
        faults = [f"{report.stack_bytes} bytes of stack in use"] * (
            _spills(report) and not (before and _spills(before))
        )
        faults += [f"no {opcode}, which it expects" for opcode, count in report.instructions.items() if not count]
        if before is None:
            faults.append("not in the table")
        else:
            faults += ["more registers"] * (report.registers > before.registers)
            faults += ["more stack"] * (report.stack_bytes > before.stack_bytes)
            faults += ["more shared memory"] * (report.shared_bytes > before.shared_bytes)
            lost = [op for op in MUST_STAY if before.instructions.get(op) and not report.instructions.get(op)]
            faults += [f"no {op} any more" for op in lost]
        if faults:
            found.append(f"{name}: {', '.join(faults)}\n    old {_text(before)}\n    new {_text(report)}")
    return sorted(found)


def _text(report: Report | None) -> str:
    if report is None:
        return "-"
    counts = ", ".join(f"{opcode} {count}" for opcode, count in report.instructions.items())
    return (
        f"{report.registers} registers, {report.stack_bytes} B stack, {report.shared_bytes} B shared, "
        f"{report.warps} warps, {counts}"
    )


@pytest.fixture(scope="module")
def table():
    triton = pytest.importorskip("triton")
    version, reports = precompile.read_table(TABLE)
    found = importlib.metadata.version("triton")
    if version != found:
        pytest.skip(f"the table is that of triton {version}, found {found}")
    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are interpreted in this process")
    return reports


@pytest.fixture(scope="module")
def pool():
    with precompile.processes(2) as pool:
        yield pool


@pytest.mark.parametrize("kernel", INSTALLED)
def test_no_variant_is_worse_than_in_the_table(kernel, table, pool):
    old = [r for r in table if r.kernel == kernel]
    listed = precompile.variants_of(kernel)
    if not listed and not old:
        pytest.skip(f"{kernel} has no launch.variants()")
    names = [v.name for v in listed]
    assert len(names) == len(set(names)), f"two variants of {kernel} share a name: {names}"
    found = regressions(old, precompile.compile(kernel, pool=pool))
    if found:
        pytest.fail("\n".join([*found, f"If that is meant, rewrite the table: {REWRITE}"]), pytrace=False)


def test_the_table_lists_installed_kernels_only(table):
    assert {r.kernel for r in table} <= set(INSTALLED)


GOOD = Report("k", "v", 168, 0, 164896, 8, {"QGMMA": 16, "F2FP": 4, "STS": 3, "QGMMA.64x128x32.F32.E4M3.E4M3": 16}, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"registers": 169}, "more registers"),
        ({"stack_bytes": 8}, "more stack"),
        ({"stack_bytes": 8, "instructions": {**GOOD.instructions, "STL": 2}}, "8 bytes of stack in use"),
        ({"stack_bytes": 8, "instructions": {**GOOD.instructions, "LDL": 1}}, "8 bytes of stack in use"),
        ({"shared_bytes": 164897}, "more shared memory"),
        ({"instructions": {"QGMMA": 16}}, "no F2FP any more"),
        ({"instructions": {**GOOD.instructions, "UTMALDG": 0}}, "no UTMALDG, which it expects"),
        ({"variant": "w"}, "w: not in the table"),
    ],
    ids=lambda p: p if isinstance(p, str) else "",
)
def test_what_counts_as_worse(change, message):
    found = "\n".join(regressions([GOOD], [dataclasses.replace(GOOD, **change)]))
    assert message in found
    assert f"new {change.get('registers', 168)} registers" in found
    assert "old 168 registers, 0 B stack, 164896 B shared, 8 warps, QGMMA 16" in found or "variant" in change


def test_what_does_not_count_as_worse():
    better = dataclasses.replace(GOOD, registers=100, shared_bytes=0, warps=4, instructions={"QGMMA": 1, "F2FP": 9})
    assert regressions([GOOD], [better]) == []
    unused = dataclasses.replace(GOOD, stack_bytes=8)
    assert regressions([unused], [unused]) == []
    known = dataclasses.replace(unused, instructions={**GOOD.instructions, "STL": 2})
    assert regressions([known], [dataclasses.replace(known, instructions={**GOOD.instructions, "LDL": 3})]) == []
    assert regressions([GOOD], []) == ["v: in the table, but no longer compiled"]


@pytest.mark.parametrize("kernel", INSTALLED)
def test_every_variant_has_what_it_expects(kernel):
    """With any release of Triton, also one that the table is not of."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("kernels are interpreted in this process")
    listed = precompile.variants_of(kernel)
    for variant, report in zip(listed, precompile.compile(kernel, variants=listed), strict=True):
        missing = [opcode for opcode in variant.expect if not report.instructions[opcode]]
        assert not missing, f"{variant.name} lacks {missing}"


@pytest.mark.parametrize("kernel", INSTALLED)
def test_what_was_compiled_ahead_is_found(kernel):
    """A kernel's key in Triton's cache does not depend on which kernels were launched before it.

    Triton 3.6 merges the globals that a function's callees read only if the callees have keys already. A callee that
    two kernels share, and which reads a global of its own, then gives the second kernel another key than it has in a
    process that launches it first.
    """
    pytest.importorskip("triton")
    count, different = json.loads(output_of(start_python(OTHER_KEYS, kernel)))
    assert count
    assert different == []
