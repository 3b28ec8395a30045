"""The documentation: every Python block runs, every kernel has a page, and the site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SITE = [path for path in sorted(ROOT.glob("docs/**/*.md")) if "_build" not in path.parts]
READMES = [ROOT / "README.md", ROOT / "shared/README.md", *sorted(ROOT.glob("packages/*/README.md"))]
PAGES = [*READMES, ROOT / "CONTRIBUTING.md", *SITE]
KERNELS = {path.name: path.parents[1] for path in ROOT.glob("packages/*/src/*")}
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Any way to open a block of Python, of which only one is allowed, so that none is overlooked.
OPENING = re.compile(r"^[ \t>*-]*(?:`{3,}|~{3,})[^\n]*\bpy(?:thon|con)?3?\b[^\n]*$", re.MULTILINE | re.IGNORECASE)


def relative(path: Path) -> str:
    """The path as it stands in the repository."""
    return str(path.relative_to(ROOT))


def blocks(path: Path) -> list:
    """The page's Python blocks, compiled so that tracebacks have the lines of the page."""
    text = path.read_text()
    return [
        compile("\n" * text.count("\n", 0, found.start(1)) + found[1], relative(path), "exec")
        for found in BLOCK.finditer(text)
    ]


@pytest.fixture
def usual_mode():
    """PyTorch's mode is the usual one again when the test ends."""
    yield
    if torch.are_deterministic_algorithms_enabled():  # the other call imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("path", [path for path in PAGES if OPENING.search(path.read_text())], ids=relative)
def test_every_python_block_runs(path, usual_mode):
    """In order, in one namespace, on the device that the page chooses."""
    compiled = blocks(path)
    assert len(compiled) == len(OPENING.findall(path.read_text())), "a block of Python does not begin with ```python"
    scope = {"__name__": path.stem}
    for block in compiled:
        exec(block, scope)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_a_page(kernel):
    """It has the package's README and the plots of its benches."""
    text = (ROOT / f"docs/kernels/{kernel}.md").read_text()
    assert f"```{{include}} ../../{relative(KERNELS[kernel])}/README.md\n" in text
    plots = sorted(path.name for path in ROOT.glob(f"benches/plots/{kernel}*.svg"))
    assert re.findall(r"!\[.+\]\(\.\./\.\./benches/plots/(.*)\)", text) == plots


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="sphinx is not installed: uv sync --group docs")
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "parsed")]
    command = [sys.executable, "-m", "sphinx", *options, str(ROOT / "docs"), str(tmp_path / "site")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in SITE]
    assert not [page for page in pages if not (tmp_path / "site" / page).is_file()]
