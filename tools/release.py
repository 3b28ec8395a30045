"""Refuses a wheel that must not be released as it stands, and records those that were.

    uv run python -m tools.release check
    uv run python -m tools.release record <wheel>

`tools/releases.json` holds for each wheel {version: digest}. The digest is of what goes into the wheel: every file of
its package, its README (which is in the metadata) and LICENSE, and what pyproject.toml says of it. The changelog is not
in the wheel, and may be corrected after a release.
"""

import argparse
import ast
import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
RECORD = "tools/releases.json"
SECTION = re.compile(r"^## \[([^\]]+)\](.*)$", re.MULTILINE)
DATE = re.compile(r" - \d{4}-\d{2}-\d{2}")


class Wheel(NamedTuple):
    """A member of the workspace: its folder and the content of its pyproject.toml."""

    folder: Path
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return self.settings["project"]["name"]

    @property
    def version(self) -> str:
        """The version in pyproject.toml."""
        return self.settings["project"]["version"]

    @property
    def package(self) -> Path:
        """The folder that is imported."""
        return self.folder / "src" / self.name.replace("-", "_")


def wheels(root: Path) -> dict[str, Wheel]:
    """All wheels of the workspace by name."""
    paths = [root / "shared/pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]
    found = [Wheel(path.parent, tomllib.loads(path.read_text())) for path in paths]
    return {wheel.name: wheel for wheel in found}


def files(wheel: Wheel) -> list[Path]:
    """The files that go into the wheel, or into its metadata, as they are."""
    code = [path for path in wheel.package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted([*code, wheel.folder / "README.md", wheel.folder / "LICENSE"])


def digest(wheel: Wheel) -> str:
    """A hash of what goes into the wheel."""
    total = hashlib.sha256()
    for path in files(wheel):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(wheel.folder).as_posix()} {content}\n".encode())
    # The other tables of a pyproject.toml are for development, and change no wheel.
    build, hatch = wheel.settings.get("build-system"), wheel.settings.get("tool", {}).get("hatch")
    total.update(json.dumps([build, wheel.settings["project"], hatch], sort_keys=True).encode())
    return total.hexdigest()


def module_version(wheel: Wheel) -> str | None:
    """`__version__` of the package, read without importing it."""
    for node in ast.parse((wheel.package / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__version__"]:
            return ast.literal_eval(node.value)
    return None


def faults(wheel: Wheel, siblings: dict[str, Wheel], recorded: dict[str, str]) -> list[str]:
    """Why this wheel must not be released as it stands; recorded: its versions and their digests."""
    found, version = [], wheel.version
    if version in recorded and recorded[version] != digest(wheel):
        found.append(f"changed since {version} was recorded: it needs a new version")
    if module_version(wheel) != version:
        found.append(f"pyproject.toml has version {version}, __version__ is {module_version(wheel)}")
    later = [other for other in recorded if Version(other) > Version(version)]
    if later:
        found.append(f"version {version} is lower than {max(later, key=Version)}, which is recorded")
    sections = dict(SECTION.findall((wheel.folder / "CHANGELOG.md").read_text()))
    for one in dict.fromkeys([version, *recorded]):
        if one not in sections:
            found.append(f"CHANGELOG.md has no section [{one}]")
        elif one in recorded and not DATE.match(sections[one]):
            found.append(f"the section of a release has a date, but CHANGELOG.md has [{one}]{sections[one]}")
    project = wheel.settings["project"]
    extras = project.get("optional-dependencies", {}).values()
    for line in [*project.get("dependencies", []), *(line for extra in extras for line in extra)]:
        asked = Requirement(line)
        sibling = siblings.get(canonicalize_name(asked.name))
        if sibling and not asked.specifier.contains(sibling.version, prereleases=True):
            found.append(f"asks for {line}, but {sibling.name} here is {sibling.version}")
    return [f"{wheel.name}: {fault}" for fault in found]


def check(root: Path) -> list[str]:
    """The faults of all wheels."""
    found, recorded = wheels(root), json.loads((root / RECORD).read_text())
    return [fault for wheel in found.values() for fault in faults(wheel, found, recorded.get(wheel.name, {}))]


def record(root: Path, name: str) -> list[str]:
    """Writes the digest of a wheel's version, unless it has faults, which it returns; none is ever overwritten."""
    found, recorded = wheels(root), json.loads((root / RECORD).read_text())
    if name not in found:
        return [f"{name}: no such wheel; there are {', '.join(found)}"]
    wheel = found[name]
    versions = {wheel.version: digest(wheel)} | recorded.get(name, {})
    problems = faults(wheel, found, versions)
    if not problems:
        (root / RECORD).write_text(json.dumps(recorded | {name: versions}, indent=2, sort_keys=True) + "\n")
    return problems


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Runs a command; the exit status is 1 if a wheel has faults, each of which is a line."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="look at all wheels")
    commands.add_parser("record", help="note a release").add_argument("wheel")
    options = parser.parse_args(argv)
    problems = check(root) if options.command == "check" else record(root, options.wheel)
    print("\n".join(problems) or f"{options.command}: no faults", file=sys.stderr if problems else sys.stdout)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
