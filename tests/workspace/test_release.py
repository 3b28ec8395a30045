"""The release check refuses what it should, on a small workspace that is made up, and has nothing against this one."""

import json
from pathlib import Path

import pytest

from tools import release

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
readme = "README.md"
requires-python = ">=3.11"
dependencies = [{dependencies}]

[tool.hatch.build.targets.wheel]
packages = ["src/{package}"]

[tool.uv.sources]
base-wheel = {{ workspace = true }}
"""


def write_wheel(folder: Path, name: str, version: str = "0.1.0", dependencies: str = "") -> None:
    """A wheel of one module, with a dated section for its version."""
    package = name.replace("-", "_")
    (folder / "src" / package).mkdir(parents=True)
    settings = PYPROJECT.format(name=name, version=version, dependencies=dependencies, package=package)
    (folder / "pyproject.toml").write_text(settings)
    (folder / "README.md").write_text(f"# {name}\n")
    (folder / "LICENSE").write_text("Free.\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## [{version}] - 2026-01-02\n\n### Added\n- All.\n")
    (folder / "src" / package / "__init__.py").write_text(f'"""A module."""\n\n__version__ = "{version}"\n')
    (folder / "src" / package / "data.py").write_text("ONE = 1\n")


@pytest.fixture
def root(tmp_path):
    """A workspace of base-wheel 0.1.0 and leaf-wheel 0.1.0, which asks for it; base-wheel is recorded."""
    write_wheel(tmp_path / "shared", "base-wheel")
    write_wheel(tmp_path / "packages/leaf-wheel", "leaf-wheel", dependencies='"base_wheel>=0.1,<0.2", "torch>=2.11"')
    (tmp_path / "tools").mkdir()
    (tmp_path / release.RECORD).write_text("{}\n")
    assert release.check(tmp_path) == []
    assert release.record(tmp_path, "base-wheel") == []
    return tmp_path


def replace(path: Path, old: str, new: str) -> None:
    """Edits a file, which must hold the old text."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def start_version(folder: Path, old: str, new: str) -> None:
    """Gives a wheel another version, with a section above that of the old one."""
    for path in (folder / "pyproject.toml", next(folder.glob("src/*/__init__.py"))):
        replace(path, old, new)
    replace(folder / "CHANGELOG.md", f"## [{old}]", f"## [{new}] - unreleased\n\n## [{old}]")


def recorded(root: Path) -> dict:
    """What the record holds."""
    return json.loads((root / release.RECORD).read_text())


def test_this_repository_has_no_faults():
    assert release.check(ROOT) == []


def test_a_recorded_wheel_that_did_not_change_passes(root):
    assert list(recorded(root)) == ["base-wheel"]
    assert len(recorded(root)["base-wheel"]["0.1.0"]) == 64
    before = recorded(root)
    assert release.check(root) == []
    assert release.record(root, "base-wheel") == []
    assert recorded(root) == before


CHANGES = {
    "a module": lambda base: replace(base / "src/base_wheel/__init__.py", "A module", "The module"),
    "another module": lambda base: (base / "src/base_wheel/more.py").write_text("TWO = 2\n"),
    "a marker": lambda base: (base / "src/base_wheel/py.typed").touch(),
    "a name": lambda base: (base / "src/base_wheel/data.py").rename(base / "src/base_wheel/numbers.py"),
    "the README": lambda base: replace(base / "README.md", "base-wheel", "Base wheel"),
    "the licence": lambda base: replace(base / "LICENSE", "Free", "Quite free"),
    "a requirement": lambda base: replace(base / "pyproject.toml", "dependencies = []", 'dependencies = ["numpy>=2"]'),
    "what is packed": lambda base: replace(base / "pyproject.toml", "[tool.uv", "exclude = ['x']\n[tool.uv"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_wheel_needs_a_new_version(root, change):
    before = recorded(root)
    change(root / "shared")
    message = "base-wheel: changed since 0.1.0 was recorded: it needs a new version"
    assert release.check(root) == [message]
    assert release.record(root, "base-wheel") == [message]
    assert recorded(root) == before
    start_version(root / "shared", "0.1.0", "0.1.1")
    assert release.check(root) == []


def test_what_is_not_in_the_wheel_may_change(root):
    shared = root / "shared"
    replace(shared / "CHANGELOG.md", "2026-01-02", "2026-01-03")
    replace(shared / "pyproject.toml", "[tool.uv.sources]", "[dependency-groups]\ndev = []\n\n[tool.uv.sources]")
    (shared / "src/base_wheel/__pycache__").mkdir()
    (shared / "src/base_wheel/__pycache__/__init__.cpython-312.pyc").write_bytes(b"code")
    assert release.check(root) == []


def test_the_versions_of_a_wheel_agree(root):
    module = root / "packages/leaf-wheel/src/leaf_wheel/__init__.py"
    replace(module, "0.1.0", "0.2.0")
    assert release.check(root) == ["leaf-wheel: pyproject.toml has version 0.1.0, __version__ is 0.2.0"]
    module.write_text("")
    assert release.check(root) == ["leaf-wheel: pyproject.toml has version 0.1.0, __version__ is None"]


def test_the_changelog_has_a_section(root):
    (root / "packages/leaf-wheel/CHANGELOG.md").write_text("# Changelog\n\n## [0.0.9] - 2026-01-02\n")
    assert release.check(root) == ["leaf-wheel: CHANGELOG.md has no section [0.1.0]"]


def test_a_release_has_a_date(root):
    replace(root / "packages/leaf-wheel/CHANGELOG.md", "2026-01-02", "unreleased")
    assert release.check(root) == []
    message = "the section of a release has a date, but CHANGELOG.md has [0.1.0] - unreleased"
    assert release.record(root, "leaf-wheel") == [f"leaf-wheel: {message}"]
    assert list(recorded(root)) == ["base-wheel"]
    replace(root / "shared/CHANGELOG.md", "2026-01-02", "unreleased")
    assert release.check(root) == [f"base-wheel: {message}"]


def test_siblings_are_in_the_ranges(root):
    start_version(root / "shared", "0.1.0", "0.2.0")
    assert release.check(root) == ["leaf-wheel: asks for base_wheel>=0.1,<0.2, but base-wheel here is 0.2.0"]
    replace(root / "packages/leaf-wheel/pyproject.toml", "<0.2", "<0.3")
    assert release.check(root) == []


def test_no_version_is_lower_than_a_recorded_one(root):
    start_version(root / "shared", "0.1.0", "0.1.10")
    replace(root / "shared/CHANGELOG.md", "unreleased", "2026-01-04")
    assert release.record(root, "base-wheel") == []
    assert list(recorded(root)["base-wheel"]) == ["0.1.0", "0.1.10"]
    start_version(root / "shared", "0.1.10", "0.1.9")
    assert release.check(root) == ["base-wheel: version 0.1.9 is lower than 0.1.10, which is recorded"]


def test_only_wheels_are_recorded(root):
    assert release.record(root, "base_wheel") == ["base_wheel: no such wheel; there are base-wheel, leaf-wheel"]


def test_the_command_says_what_is_wrong(root, capsys):
    assert release.main(["check"], root) == 0
    assert capsys.readouterr().out == "check: no faults\n"
    replace(root / "shared/README.md", "base", "Base")
    assert release.main(["check"], root) == 1
    assert "base-wheel: changed since 0.1.0" in capsys.readouterr().err
    assert release.main(["record", "leaf-wheel"], root) == 0
    assert list(recorded(root)) == ["base-wheel", "leaf-wheel"]
