"""`flashpoint ls` without an argument: the base containers on this node, of jobs that run and of dead ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint.cli import output, view
from ml_flashpoint.cli.view import find_bases
from tests.flashpoint.test_overlap import Job
from tests.support.processes import child_environment


def _run(*options: str) -> tuple[int, str, str]:
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "ls", *options]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_jobs_that_run_and_what_dead_ones_have_left(tmpfs: Path) -> None:
    for name in ("dead", "running"):
        fp = Flashpoint(tmpfs / name)
        fp.track(**Job().tracked).resume()
        fp.step()
        assert fp.wait()
        if name == "dead":
            fp.close()
    (tmpfs / "nothing").mkdir()
    code, text, _ = _run("--json")
    assert code == 0
    found: dict[str, dict[str, Any]] = {each["base"]: each for each in json.loads(text)["bases"]}
    ours = {Path(base).name: each for base, each in found.items() if Path(base).parent == tmpfs}
    assert set(ours) == {"dead", "running"}
    assert (ours["dead"]["leftover"], ours["dead"]["live"]) == (True, [])
    assert (ours["running"]["leftover"], ours["running"]["live"]) == (False, [0])
    for each in ours.values():
        assert (each["steps"], each["complete"]) == ([1], 1)
        assert each["resident_bytes"] > 0
        assert each["updated_s"] > 0
    code, text, _ = _run()
    assert code == 0
    told = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line.startswith(str(tmpfs))}
    assert told[f"{tmpfs}/dead"][:2] == ["left", "over"]
    assert told[f"{tmpfs}/running"][:1] == ["running"]
    assert "To remove: flashpoint rm " in text
    fp.close()


def test_links_other_filesystems_and_folders_of_others_are_let_alone(
    tmpfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmpfs.joinpath(*"abcdef")
    for base in (tmpfs / "job", tmpfs / "job" / "inner", tmp_path / "elsewhere", deep):
        (base / ".flashpoint").mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", tmpfs / "link")
    (tmpfs / "gone").mkdir()
    monkeypatch.setattr(view.psutil, "disk_partitions", lambda all: [_Mount(str(tmpfs)), _Mount(str(tmp_path), "ext4")])
    assert find_bases() == [tmpfs / "job"], "not below one, not too deep, not behind a link"
    monkeypatch.setattr(view.psutil, "disk_partitions", lambda all: [_Mount(str(tmpfs / "no-such"))])
    assert find_bases() == []


class _Mount:
    def __init__(self, mountpoint: str, fstype: str = "tmpfs") -> None:
        self.mountpoint, self.fstype = mountpoint, fstype


def test_durations_for_people() -> None:
    told = ["0.19 s", "5.0 s", "119.0 s", "2.0 min", "2.0 h", "2.3 days"]
    assert [output.time_text(each) for each in (0.19, 5, 119, 121, 7300, 200000)] == told
