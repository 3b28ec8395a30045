"""The wheels: built from this checkout, read, and installed one by one with nothing else of ours beside them."""

import email
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
UV = os.environ.get("UV") or shutil.which("uv")
PROJECTS = {
    table["project"]["name"]: table
    for table in (
        tomllib.loads(path.read_text())
        for path in (ROOT / "shared/pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml")))
    )
}
KERNELS = sorted(set(PROJECTS) - {"hopper-kernels"})
# Optional at run time: an import or a call on a CPU must not need them.
OPTIONAL = ("triton", "cutlass", "deep_gemm")

pytestmark = pytest.mark.skipif(UV is None, reason="building and installing wheels needs uv")

BLOCK_OPTIONAL = f"""
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ImportError(f"{{name}} is blocked by this test")

sys.meta_path.insert(0, Blocked())
"""

REPORT_STATUS = """
import importlib, json, sys
import hopper_kernels
modules = [importlib.import_module(name) for name in sys.argv[1:]]
files = [module.__file__ for module in (hopper_kernels, *modules)]
print(json.dumps({"files": files, "status": hopper_kernels.status()}))
"""

CALL_FP8_DUAL_CAST = """
import torch, fp8_dual_cast
torch.manual_seed(0)
out = fp8_dual_cast.fp8_dual_cast(torch.randn(130, 256).bfloat16())
found = {name: [list(t.shape), str(t.dtype)] for name, t in out._asdict().items()}
expected = {
    "q": [[130, 256], "torch.float8_e4m3fn"],
    "sf": [[130, 2], "torch.float32"],
    "q_t": [[256, 256], "torch.float8_e4m3fn"],
    "sf_t": [[256, 2], "torch.float32"],
}
assert found == expected, found
assert all(t.isfinite().all() for t in (out.sf, out.sf_t))
"""


def run(*command, env=None):
    """The standard output of a command, which must succeed."""
    __tracebackhide__ = True  # its arguments hold the whole environment, which no log needs
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, f"{command[:3]} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def import_name(project):
    return project.replace("-", "_")


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """A folder with every wheel of the workspace, built once, also when several test processes run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "wheels"
    with FileLock(base / "wheels.lock"):
        if not folder.exists():
            run(UV, "build", "--all-packages", "--wheel", "--out-dir", folder.with_suffix(".partial"))
            folder.with_suffix(".partial").rename(folder)
    return folder


def wheel_of(dist, project):
    (wheel,) = dist.glob(f"{import_name(project)}-*.whl")
    return wheel


def wheel_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def requirements(dist, project):
    return [Requirement(line) for line in wheel_metadata(wheel_of(dist, project)).get_all("Requires-Dist", [])]


@pytest.fixture(scope="session")
def environment(dist, tmp_path_factory):
    """Returns make(project, absent=()) -> Python of a new environment with that wheel, the shared wheel, and torch with
    what it needs, but without the distributions and modules named in `absent`.

    torch is too big to install again, so the environment reads a folder of links to this environment's site-packages.
    Our own editable installs are left out, and .pth files in a folder that is only on the path are not read: what is
    imported of ours can come from the wheels alone.
    """
    site_packages = Path(torch.__file__).resolve().parents[1]

    def make(project, absent=()):
        base = tmp_path_factory.mktemp(import_name(project))
        links = base / "links"
        links.mkdir()
        hidden = {import_name(name) for name in (*PROJECTS, *absent)}
        for entry in site_packages.iterdir():
            if entry.suffix != ".pth" and entry.name.partition("-")[0] not in hidden:
                (links / entry.name).symlink_to(entry)
        run(UV, "venv", "--quiet", "--no-project", "--python", sys.executable, base / "env")
        python = base / "env/bin/python"
        wheels = {project, "hopper-kernels"}
        install = (UV, "pip", "install", "--quiet", "--no-deps", "--no-index", "--find-links", dist, "--python", python)
        run(*install, *wheels)
        (purelib,) = (base / "env").glob("lib/python3.*/site-packages")
        (purelib / "links.pth").write_text(f"{links}\n")
        return python

    return make


def run_isolated(python, script, *args):
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return run(python, "-P", "-c", script, *args, env=env)


def status_from_wheels(python, project, preamble=""):
    """`hopper_kernels.status()` in an environment, after checking that our modules come from the wheels there."""
    names = [] if project == "hopper-kernels" else [import_name(project)]
    report = json.loads(run_isolated(python, preamble + REPORT_STATUS, *names))
    for file in report["files"]:
        assert Path(file).is_relative_to(python.parents[1]), file
    return report["status"]


def test_every_project_has_one_pure_wheel(dist):
    tags = {wheel.name.split("-")[0]: wheel.stem.split("-", 2)[2] for wheel in dist.glob("*.whl")}
    assert tags == {import_name(project): "py3-none-any" for project in PROJECTS}


@pytest.mark.parametrize("project", PROJECTS)
def test_wheel_contains_its_package_and_metadata_only(dist, project):
    wheel = wheel_of(dist, project)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    package, version = import_name(project), PROJECTS[project]["project"]["version"]
    info = f"{package}-{version}.dist-info"
    source = next(ROOT.glob(f"*/src/{package}"), None) or next(ROOT.glob(f"packages/*/src/{package}"))
    modules = {str(path.relative_to(source.parent)) for path in source.rglob("*.py")}
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "licenses/LICENSE")}
    assert names - {f"{info}/entry_points.txt"} == modules | metadata


@pytest.mark.parametrize("project", PROJECTS)
def test_wheel_asks_for_ranges(dist, project):
    for requirement in requirements(dist, project):
        operators = {part.operator for part in requirement.specifier}
        assert ">=" in operators, f"{requirement} has no lower end"
        assert not operators & {"==", "===", "~="}, f"{requirement} is pinned"
        assert requirement.url is None, requirement
        if requirement.name in PROJECTS:
            assert operators == {">=", "<"}, f"{requirement}: a sibling needs both ends"


@pytest.mark.parametrize("project", KERNELS)
def test_kernel_wheel_asks_for_the_shared_wheel(dist, project):
    assert "hopper-kernels" in {r.name for r in requirements(dist, project) if not r.marker}


@pytest.mark.parametrize("project", PROJECTS)
def test_ranges_admit_what_is_locked(dist, project):
    locked = {}
    for package in tomllib.loads((ROOT / "uv.lock").read_text())["package"]:
        locked.setdefault(package["name"], []).append(package["version"])
    for requirement in requirements(dist, project):
        versions = locked[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in versions), f"{requirement}: locked {versions}"


@pytest.mark.parametrize("project", KERNELS)
def test_spec_asks_for_what_the_extras_bring(dist, project):
    """A kernel's KernelSpec and its wheel name the same ranges, so that following a reason in status() resolves it."""
    import hopper_kernels

    offered = {(r.name, r.specifier) for r in requirements(dist, project)}
    wanted = [Requirement(line) for line in hopper_kernels.spec(import_name(project)).requires]
    assert {(r.name, r.specifier) for r in wanted} <= offered


def test_fp8_dual_cast_wheel_computes(environment):
    python = environment("fp8-dual-cast")
    status = status_from_wheels(python, "fp8-dual-cast")
    assert "not installed" not in status["fp8_dual_cast"]
    assert "not installed" in status["moe_experts"]
    run_isolated(python, CALL_FP8_DUAL_CAST)


def test_fp8_dual_cast_wheel_without_triton(environment):
    python = environment("fp8-dual-cast", absent=["triton"])
    status = status_from_wheels(python, "fp8-dual-cast")
    assert "triton, which is not installed" in status["fp8_dual_cast"]
    run_isolated(python, CALL_FP8_DUAL_CAST)


@pytest.mark.parametrize("project", PROJECTS)
def test_import_with_every_optional_module_broken(environment, project):
    python = environment(project)
    status = status_from_wheels(python, project, preamble=BLOCK_OPTIONAL)
    if project == "fp8-dual-cast":
        assert "triton" in status["fp8_dual_cast"]
        run_isolated(python, BLOCK_OPTIONAL + CALL_FP8_DUAL_CAST)
    elif project == "hopper-kernels":
        assert all("not installed" in reason for reason in status.values())
