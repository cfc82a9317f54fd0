"""`flashpoint rm`: only what is ours goes, and never from under a job."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ml_flashpoint import Flashpoint, open_version
from ml_flashpoint.format.errors import JobInUseError, ObjectNotFoundError, UnsafePathError
from ml_flashpoint.stores.location import BaseContainer
from tests.faults.common import part_files
from tests.support.commands import flashpoint
from tests.support.forked import Child, Team, call_team, preload
from tests.support.loops import Stored, versions
from tests.workers import fault_team
from tests.workers import recovery_faults as faults
from tests.workers.recovery_faults import start

preload("tests.workers.recovery_faults")

pytestmark = pytest.mark.slow


@pytest.fixture
def base(tmpfs: Path) -> Path:
    """Of a job that has ended, with steps 1 to 3."""
    base = tmpfs / "job"
    with Flashpoint(base, keep=3, strict=True) as fp:
        fp.track(value=Stored(1)).resume()
        for step in (1, 2, 3):
            fp.save(step)
            assert fp.wait()
    assert versions(base) == [1, 2, 3]
    return base


def slots(base: Path) -> int:
    return len(list((base / ".flashpoint" / "slots").glob("*/*")))


def test_nothing_is_left_of_a_base_container(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = sum(path.lstat().st_blocks * 512 for path in (base / ".flashpoint/slots").rglob("*") if path.is_file())
    assert flashpoint("rm", base, "--yes", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["versions"] == ["step-1_ckpt", "step-2_ckpt", "step-3_ckpt"]
    assert told["freed_bytes"] >= used
    assert not base.exists()
    assert list(base.parent.iterdir()) == []
    assert flashpoint("rm", base, "--yes") == 2


def test_one_version_goes_with_its_memory(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = slots(base)
    assert flashpoint("rm", f"{base}@2", "--yes") == 0
    assert "removed step-2_ckpt, " in capsys.readouterr().out
    assert versions(base) == [1, 3]
    assert slots(base) == before - 1
    assert flashpoint("rm", f"{base}@2", "--yes") == 2
    with pytest.raises(ObjectNotFoundError), open_version(base, 2):
        pass
    value = Stored()
    with Flashpoint(base, keep=3, strict=True) as fp:
        assert fp.track(value=value).resume() == 3
        assert [version.step for version in fp.versions()] == [3, 1]
        fp.save(4)


def cut_a_save_short(root: Path, step: int) -> None:
    """Rank 0 of two commits its part, and both are killed before rank 1 does."""
    with Team(fault_team.team_obey, root, 2, "small") as ranks:
        for child in ranks.ranks:
            child.next_report("ready")
        ranks[0].say("save", step, 0)
        ranks[0].next_report("committed")
    assert part_files(root / "node-0" / "job", step)


def test_a_job_whose_only_version_was_removed_everywhere_begins_anew(tmpfs: Path) -> None:
    """Also where its first save after that is cut short: nothing was complete that anybody wants back."""
    call_team(faults.save_as, tmpfs, 2, "next", [1])
    assert flashpoint("rm", f"{tmpfs / 'node-0' / 'job'}@1", "--yes") == 0
    assert call_team(faults.load_as, tmpfs, 2, "next") == [(1, 0), (1, 0)], "it comes from the other node"
    for node in (0, 1):
        assert flashpoint("rm", f"{tmpfs / f'node-{node}' / 'job'}@1", "--yes") == 0
    cut_a_save_short(tmpfs, 2)
    assert call_team(faults.load_as, tmpfs, 2, "next") == [None, None]


def test_what_is_not_ours_stays(base: Path, tmpfs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmpfs / "precious").mkdir()
    (tmpfs / "precious" / "data").write_text("all of it")
    (base / "notes.txt").write_text("mine")
    (base / "step-9_ckpt").symlink_to(tmpfs / "precious")
    (base / "step-1_ckpt" / "notes.txt").write_text("mine")
    (base / "step-2_ckpt" / "link").symlink_to(tmpfs / "precious")
    (base / ".flashpoint" / "slots" / "00001-00000" / "77").symlink_to(tmpfs / "precious" / "data")
    assert flashpoint("rm", base, "--yes") == 0
    assert sorted(os.listdir(base)) == ["notes.txt", "step-1_ckpt", "step-2_ckpt", "step-9_ckpt"]
    assert os.listdir(base / "step-1_ckpt") == ["notes.txt"]
    assert os.listdir(base / "step-2_ckpt") == ["link"]
    assert (tmpfs / "precious" / "data").read_text() == "all of it"
    assert "notes.txt, step-1_ckpt, step-2_ckpt, step-9_ckpt" in capsys.readouterr().err.replace("'", "")


def test_not_while_a_process_of_the_job_runs(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(map(str, base.rglob("*")))
    with Child(start, str(base)) as child:
        child.next_report("resumed")
        assert flashpoint("rm", base, "--yes") == 1
        assert "rank 0 is running here" in capsys.readouterr().err
        with pytest.raises(JobInUseError, match="another job has this base container open"):  # since that look
            BaseContainer(base).remove(None)
        with pytest.raises(JobInUseError):
            BaseContainer(base).remove(2)
        assert {path for path in before if "step-" in path} <= set(map(str, base.rglob("*")))
        child.kill()
    assert flashpoint("rm", base, "--yes") == 0


def test_what_is_no_base_container_is_not_touched(base: Path, tmpfs: Path) -> None:
    (tmpfs / "home").mkdir()
    (tmpfs / "home" / "file").write_text("mine")
    for source in (tmpfs / "home", tmpfs / "nothing", f"file://{tmpfs}"):
        assert flashpoint("rm", source, "--yes") == 2
    (tmpfs / "home").chmod(0o777)
    with pytest.raises(UnsafePathError):
        BaseContainer(tmpfs / "home").remove(None)
    assert (tmpfs / "home" / "file").read_text() == "mine"
    other = base.rename(base.with_name("job@2"))  # is no step of another one
    assert flashpoint("rm", other, "--yes") == 0
    assert not other.exists()


def test_the_user_is_asked(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "rm", str(base)]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pass --yes" in done.stderr
    for answer, code in ((b"n\n", 1), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = subprocess.run(argv, stdin=theirs, capture_output=True, text=True)
        os.close(ours)
        os.close(theirs)
        assert done.returncode == code, done.stderr
        assert "step-3_ckpt" in done.stdout
        assert base.exists() == bool(code)
