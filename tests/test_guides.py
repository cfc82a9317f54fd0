"""Pages that are guides: every block of code in them runs as it stands, with folders of the test's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.processes import REPOSITORY, child_environment

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = 'exec "{python}" -c "import sys; from ml_flashpoint.cli.main import main; sys.exit(main())" "$@"\n'


def blocks_of(page: str, language: str) -> list[str]:
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return [block for kind, block in _BLOCK.findall(text) if kind == language]


def here(block: str, folder: Path) -> str:
    return block.replace("/dev/shm/mlf-jobs", str(folder))


@pytest.fixture
def command_line(tmp_path: Path) -> dict[str, str]:
    """An environment in which `python` and `flashpoint` are those of this process."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, script in {"python": 'exec "{python}" "$@"\n', "flashpoint": _COMMAND}.items():
        (programs / name).write_text("#!/bin/sh\n" + script.format(python=sys.executable))
        (programs / name).chmod(0o755)
    return child_environment(PATH=f"{programs}{os.pathsep}{os.environ['PATH']}", OMP_NUM_THREADS="1")


@pytest.mark.slow(60)
def test_the_five_minutes(tmp_path: Path, tmpfs: Path, command_line: dict[str, str]) -> None:
    (program,) = blocks_of("five-minutes.md", "python")
    (tmp_path / "train.py").write_text(program)
    install, *commands = blocks_of("five-minutes.md", "bash")
    assert install.strip() in (REPOSITORY / "README.md").read_text(encoding="utf-8"), "tests/test_release.py installs"
    script = "set -e\n" + here("".join(commands), tmpfs)
    result = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=command_line, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same to the last digit" in result.stdout
    killed = (tmp_path / "killed.log").read_text().splitlines()
    printed = {line.split()[0] for line in killed}
    assert len(printed) >= 599, "the step at which it was killed may be saved and not printed"
    assert list(tmpfs.iterdir()) == [], "`flashpoint rm` has left something"


def test_tests_that_a_page_names_are_there() -> None:
    for page in (REPOSITORY / "docs").glob("*.md"):
        for path, test in re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")):
            assert f"\ndef {test}(" in (REPOSITORY / "tests" / path).read_text(encoding="utf-8"), (page.name, test)


@pytest.mark.damages_on_purpose
def test_a_damaged_version_is_not_loaded(tmpfs: Path, caplog: pytest.LogCaptureFixture) -> None:
    block = blocks_of("bad-copies.md", "python")[0]
    exec(here(block, tmpfs), {})
    assert "step-2_ckpt" in caplog.text


def _start_again(tmpfs: Path, failures: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """The block with the rule, after what a reader has before it."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(failures))
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program: dict[str, Any] = {"model": model, "optimizer": optimizer, "load_from_long_term": lambda: 0}
    exec(here(blocks_of("bad-copies.md", "python")[1], tmpfs), program)
    fp: Flashpoint = program["fp"]
    if program["step"] == 0:
        for step in (100, 200, 230, 231):
            fp.save(step)
            fp.wait()
    fp.close()
    step: int = program["step"]
    return step


def test_a_job_that_fails_again_and_again_goes_back(tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [_start_again(tmpfs, failures, monkeypatch) for failures in range(5)]
    assert steps == [0, 231, 100, 100, 100], "what was gone back from is not taken again"
