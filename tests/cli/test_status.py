"""`flashpoint status`, once and with `--watch`, and the jobs of this node: those that run, and dead ones."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from ml_flashpoint import status as status_board
from ml_flashpoint.cli import view
from ml_flashpoint.cli.view import find_bases
from ml_flashpoint.events import ReplicationFailed, flush
from ml_flashpoint.memory.container import JobLock
from ml_flashpoint.status import Status, read_status, write_status
from tests.flashpoint.test_overlap import Job
from tests.support.processes import child_environment


def _status(base: Path, *options: str) -> tuple[int, str]:
    """In another process: who asks who holds a lock is not told of its own."""
    return _run("status", str(base), *options)


def _run(*words: str) -> tuple[int, str]:
    script = "import sys; from ml_flashpoint.cli.main import app; code = app(sys.argv[1:], standalone_mode=False); "
    script += "assert 'torch' not in sys.modules; sys.exit(code)"
    argv = [sys.executable, "-c", script, *words]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60)
    return done.returncode, done.stdout


def _told(base: Path) -> tuple[int, list[dict[str, Any]]]:
    code, text = _status(base, "--json")
    ranks: list[dict[str, Any]] = json.loads(text)["ranks"]
    return code, ranks


@pytest.mark.slow
def test_a_job_that_runs_and_then_ends(tmpfs: Path) -> None:
    base, job = tmpfs / "job", Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        code, (rank,) = _told(base)
        assert (code, rank["pid"]) == (0, os.getpid())
        for _ in range(2):
            fp.step()
            assert fp.wait()
        size = fp.health.bytes
    code, (rank,) = _told(base)
    assert (code, rank["state"], rank["pid"]) == (0, "ended", None)
    told = rank["status"]
    assert (told["committed"], told["verified"], told["saves"], told["failures"]) == (2, 2, 2, 0)
    assert told["part_bytes"] == size
    assert told["held_s"] > 0
    assert abs(time.time() - told["verified_s"]) < 60
    code, text = _status(base)
    assert code == 0
    head, row = (line.split() for line in text.splitlines() if line.startswith(("rank ", "0 ")))
    assert head[:5] == ["rank", "state", "committed", "copied", "verified"]
    assert row[:5] == ["0", "ended", "2", "-", "2"]
    with Flashpoint(base) as fp:  # which begins anew
        assert fp.track(**job.tracked).resume() == 2
        code, (rank,) = _told(base)
        assert rank["state"] in ("ok", "silent")


@pytest.mark.slow
def test_a_rank_that_is_degraded(tmpfs: Path) -> None:
    lock = JobLock(tmpfs / "job", "a job", 1.0)
    path = tmpfs / "job" / ".flashpoint" / "status" / "0"
    path.parent.mkdir()
    try:
        status = Status(rank=0, node="n", pid=os.getpid())
        write_status(path, status.after(ReplicationFailed(time_s=1.0, error="no [peer]")))
        code, (rank,) = _told(tmpfs / "job")
        assert (code, rank["state"]) == (1, "degraded")
        code, text = _status(tmpfs / "job")
        assert code == 1
        assert "rank 0: no [peer]" in text
        path.write_text("torn")
        code, (rank,) = _told(tmpfs / "job")
        assert (code, rank["state"]) == (0, "ended")
    finally:
        lock.release()


@pytest.mark.slow
def test_watching_in_a_terminal(tmpfs: Path) -> None:
    base, job = tmpfs / "job", Job()
    with Flashpoint(base) as fp:
        fp.track(**job.tracked).resume()
        fp.step()
        assert fp.wait()
        ours, theirs = pty.openpty()
        argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "status", str(base), "--watch", "--every", "0.1"]
        env = {**child_environment(), "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
        watching = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        try:
            _await_text(ours, "verified")
            for _ in range(3):
                fp.step()
            assert fp.wait()
            _await_text(ours, "no version would be left in memory")
            _await_text(ours, " 4 ")
            watching.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # when there is nobody any more who could write
                while True:
                    _await_text(ours, "")
            assert watching.wait(30) == 0
        finally:
            watching.kill()
            os.close(ours)


def _await_text(terminal: int, text: str) -> None:
    seen, give_up = "", time.monotonic() + 60
    while not seen or text not in seen:
        assert select.select([terminal], [], [], give_up - time.monotonic())[0], seen
        seen += os.read(terminal, 1 << 16).decode(errors="replace")


def test_a_status_that_cannot_be_written_stops_nothing(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(directory: Path, status: Status) -> None:
        raise OSError(errno.ENOSPC, "no room")

    with Flashpoint(tmpfs / "job", strict=True) as fp:
        fp.track(**Job().tracked).resume()
        with monkeypatch.context() as patched:
            patched.setattr(status_board, "write_status", fail)
            for _ in range(3):
                fp.step()
                assert fp.wait()
            assert flush()
        assert [record.levelname for record in caplog.records if "status of rank 0" in record.message] == ["WARNING"]
        fp.step()
    told = read_status(tmpfs / "job" / ".flashpoint" / "status" / "0")
    assert told is not None
    assert (told.verified, told.saves, told.failures) == (4, 4, 0)


# ---- `flashpoint ls` without an argument: the base containers on this node ------------------------------------------


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
    code, text = _run("ls", "--json")
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
    code, text = _run("ls")
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
