"""Rules for every file of the repository: what may be imported where, and what must not be written anywhere."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for path in ROOT.glob("*/src/*/**/*.py")) + sorted(ROOT.glob("packages/*/src/*/**/*.py"))
PYPROJECTS = [ROOT / "pyproject.toml", ROOT / "shared/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
KERNELS = {path.name for path in ROOT.glob("packages/*/src/*")}
OPTIONAL = {"cutlass", "deep_gemm", "numpy", "triton"}
DEVICE_CODE = [path for path in SOURCES if path.parent.name == "kernels"]
# What only a launch or a precompilation imports may need them at once.
IMPORTED_LATE = {"fp8_device.py", "gluon_names.py", "precompile.py"}
HOST_CODE = [path for path in SOURCES if path not in DEVICE_CODE and path.name not in IMPORTED_LATE]
# Folders that exist on one machine only, written so that this file does not name one.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|tmp)/[\w.]")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
INDEX_SETTINGS = {"index", "index-url", "extra-index-url", "default-index", "find-links", "no-index"}


def relative(path):
    return str(path.relative_to(ROOT))


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported(node, inside_functions):
    """Top-level names of the absolute imports below a node; those in functions only if asked, those for types never."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield child.module.partition(".")[0]
        elif is_type_checking(child):
            continue
        elif inside_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(child, inside_functions)


def imports_of(path, inside_functions=False):
    return set(imported(ast.parse(path.read_text()), inside_functions))


def repository_files():
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    paths = (ROOT / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file()]


def test_import_walk_sees_what_runs_on_import():
    tree = ast.parse(
        "import os.path\nfrom .near import a\nif x:\n    from triton import b\nelse:\n    import c\n"
        "try:\n    import d\nexcept ImportError:\n    import e\nclass K:\n    import f\n"
        "if TYPE_CHECKING:\n    import hidden\ndef g():\n    import inner\n"
    )
    assert set(imported(tree, inside_functions=False)) == {"os", "triton", "c", "d", "e", "f"}
    assert set(imported(tree, inside_functions=True)) == {"os", "triton", "c", "d", "e", "f", "inner"}


def test_sources_are_found():
    assert {"hopper_kernels", *KERNELS} == {path.parts[path.parts.index("src") + 1] for path in SOURCES}


@pytest.mark.parametrize("path", HOST_CODE, ids=relative)
def test_optional_packages_are_imported_late(path):
    assert not imports_of(path) & OPTIONAL


@pytest.mark.parametrize("path", DEVICE_CODE, ids=relative)
def test_device_code_imports_no_torch(path):
    assert "torch" not in imports_of(path, inside_functions=True)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_kernel_is_imported_from_outside_its_package(path):
    package = path.parts[path.parts.index("src") + 1]
    assert not imports_of(path, inside_functions=True) & (KERNELS - {package})


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_is_autotuned(path):
    """A kernel that is tuned at its first call runs many times then, which a stream capture does not bear."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert not names & {"autotune", "Autotuner"}


def test_no_file_names_a_path_of_one_machine():
    found = []
    for path in repository_files():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        found += [f"{relative(path)}:{n}: {line[:120]}" for n, line in enumerate(lines, 1) if MACHINE_PATH.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", PYPROJECTS, ids=relative)
def test_pyproject_pins_nothing_and_names_no_index(path):
    table = tomllib.loads(path.read_text())
    project, settings = table["project"], table.get("tool", {}).get("uv", {})
    extras = project.get("optional-dependencies", {}).values()
    for line in [*project.get("dependencies", []), *(line for extra in extras for line in extra)]:
        operators = {part.operator for part in Requirement(line).specifier}
        assert not operators & {"==", "===", "~="}, f"{line} is pinned"
    assert not INDEX_SETTINGS & (settings.keys() | settings.get("pip", {}).keys())
    sources = settings.get("sources", {})
    assert all(source == {"workspace": True} for source in sources.values()), sources


def test_every_project_says_what_a_reader_looks_for():
    for path in PYPROJECTS[1:]:
        missing = [name for name in ("README.md", "CHANGELOG.md", "LICENSE") if not (path.parent / name).is_file()]
        assert not missing, f"{relative(path.parent)} lacks {missing}"
        assert (path.parent / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("path", PYPROJECTS[1:], ids=relative)
def test_what_a_wheel_asks_for_has_two_ends(path):
    """A release that nobody tried is not let in unseen. Tools with stable interfaces need no upper end."""
    project = tomllib.loads(path.read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    for line in [*project["dependencies"], *(line for extra in extras for line in extra)]:
        requirement = Requirement(line)
        ends = {part.operator for part in requirement.specifier}
        assert ends == ({">="} if requirement.name == "packaging" else {">=", "<"}), line


def test_rooms_without_code_are_outside_the_workspace():
    excluded = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"].get("exclude", []))
    rooms = {relative(path) for path in ROOT.glob("packages/*") if path.is_dir()}
    members = {relative(path.parent) for path in PYPROJECTS}
    assert excluded == rooms - members


def test_the_tests_named_in_their_readme_exist():
    text = (ROOT / "tests/README.md").read_text()
    named = NAMED_TEST.findall(text)
    assert len(named) == text.count("::") > 0, "a name is not written as `tests/<file>.py::<test>`"
    defined = {}
    for file in {file for file, _ in named}:
        body = ast.parse((ROOT / file).read_text()).body if (ROOT / file).is_file() else []
        defined[file] = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    missing = [f"{file}::{test}" for file, test in named if not test.startswith("test_") or test not in defined[file]]
    assert not missing, missing
