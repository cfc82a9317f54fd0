"""What the package is called, and what happens beside somebody else's of the same import name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ml_flashpoint
from tests.support.processes import REPOSITORY

tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
SOURCE = Path(ml_flashpoint.__file__).parent.parent


def run(code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, folders))
    argv = [sys.executable, "-c", code]
    return subprocess.run(
        argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60, check=False
    )


def test_everything_says_the_same_name() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == ml_flashpoint.DISTRIBUTION
    for requirements in project["optional-dependencies"].values():
        assert not [each for each in requirements if each.startswith("ml-flashpoint")]
    for page in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        assert "install ml-flashpoint" not in page.read_text(encoding="utf-8").replace('"', "").replace("'", "")


def test_command_tells_that_the_package_is_somebody_elses(tmp_path: Path) -> None:
    package = tmp_path / "ml_flashpoint"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "cli").symlink_to(SOURCE / "ml_flashpoint" / "cli")
    done = run("from ml_flashpoint.cli.main import main; main()", tmp_path)
    assert "is of another distribution" in done.stderr
    assert done.returncode == 1


def test_import_takes_neither_torch_nor_metadata() -> None:
    code = "import sys, ml_flashpoint; print(*sorted({'torch', 'numpy', 'importlib.metadata'} & set(sys.modules)))"
    assert run(code, SOURCE).stdout.strip() in ("", "importlib.metadata")  # some interpreters load it for .pth files
