"""`flashpoint status`, once and with `--watch`: jobs of this node, and the cost of losing a node."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pty
import select
import shutil
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
from ml_flashpoint.cli.status import Loss, losses
from ml_flashpoint.cli.view import VersionView, find_bases
from ml_flashpoint.events import ReplicationFailed, flush
from ml_flashpoint.format.manifest import MAX_BLOCK_SIZE, Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import JobLock
from ml_flashpoint.status import Status, read_status, write_status
from ml_flashpoint.stores.version_store import Version
from ml_flashpoint.tools.check import CheckedPart
from tests.flashpoint.test_overlap import Job
from tests.support.forked import Team, call_team, preload
from tests.support.processes import child_environment
from tests.workers import recovery_faults as faults


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


# ---- `flashpoint ls` without an argument: the base containers on this node -----------------------------------------


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


# ---- what a node says that the loss of a node would cost: no more than it knows, and what then happens ---------------


preload("tests.workers.recovery_faults")

PART = 1000


def rank_status(rank: int = 0, **changes: Any) -> Status:
    """A rank of four nodes with copies on the next one: step 40 verified, 41 committed, 1000 bytes copied in 2 s."""
    usual: dict[str, Any] = {"nodes": 4, "survives": 1, "copies_on": ("b",), "committed": 41, "verified": 40}
    usual |= {"part_bytes": PART, "copied_bytes": PART, "copied_in_s": 2.0, "updated_s": 1.0}
    return Status(rank=rank, node="a", **(usual | changes))


def version(step: int = 40, own: tuple[int, ...] = (0,), problems: tuple[tuple[str, str], ...] = ()) -> VersionView:
    """With the parts of own ranks, and a copy of rank 3 on node d that is twice as large."""
    parts = []
    for rank, node, size in [*((rank, "a", PART) for rank in own), (3, "d", 2 * PART)]:
        record = ObjectRecord(size, size, ("0" * 16,), MAX_BLOCK_SIZE)
        manifest = Manifest(SaveId(1, step), rank, 4, node, record)
        parts.append(CheckedPart(rank, manifest, problems))
    listed = Version(SaveId(1, step), f"step-{step}_ckpt", (*own, 3), 4, True)
    return VersionView(listed, "replicated", tuple(parts), copied=(3,))


def test_this_node_those_that_it_holds_and_the_others() -> None:
    own, peer, others = losses([rank_status()], [version(41), version()])
    assert own == Loss("a", here=True, step=40, steps_lost=1, seconds=4.0, sources=("b",))
    assert own.text() == "if a (this node) died now: 1 step lost, back at step 40 in about 4 s, from b"
    assert peer == Loss("d", step=40, steps_lost=1, seconds=8.0, sources=("a",))
    assert peer.text() == "if d died now: 1 step lost, back at step 40 in about 8 s, from a"
    assert others == Loss(None, step=40, steps_lost=1)
    assert (
        others.text() == "if another node died now: 1 step lost, back at step 40, from the nodes that hold its copies"
    )
    assert len(losses([rank_status(nodes=2)], [version()])) == 2


def test_no_more_is_promised_than_is_known() -> None:
    two = version(own=(0, 1))
    assert losses([rank_status(), rank_status(1, copied_in_s=100.0)], [two])[0].seconds == 200.0, (
        "the slowest rank counts"
    )
    unmeasured, peer, _ = losses([rank_status(), rank_status(1, copied_bytes=0, copied_in_s=0.0)], [two])
    assert unmeasured.seconds is peer.seconds is None
    bare = {"survives": 0, "copies_on": ()}
    own, others = losses([rank_status(**bare)], [version()])
    assert own.text() == ("if a (this node) died now: no version would be left in memory, and nothing is persisted")
    assert (others.step, "cannot be told" in others.text()) == (None, True)
    own, _ = losses([rank_status(**bare, persisted=30), rank_status(1, **bare, persisted=20)], [two])
    assert (own.step, own.persisted, "its ranks have persisted step 20" in own.text()) == (None, 20, True)
    assert len(losses([rank_status(**bare, nodes=1)], [version()])) == 1


@pytest.mark.parametrize(
    ("ranks", "versions"),
    [
        ([], [version()]),
        ([rank_status(verified=None)], [version()]),
        ([rank_status()], []),
        ([rank_status()], [version(39), version(41)]),
        ([rank_status(), rank_status(1)], [version()]),  # rank 1 has no part of it any more
        ([rank_status()], [version(problems=(("x", "missing"),))]),
        ([rank_status()], [dataclasses.replace(version(), abandoned=True)]),
        ([rank_status(), dataclasses.replace(rank_status(1), node="z")], [version(own=(0, 1))]),
    ],
)
def test_what_cannot_be_known_is_not_told(ranks: list[Status], versions: list[VersionView]) -> None:
    assert losses(ranks, versions) == []


def status_of(base: Path) -> dict[str, Any]:
    """In another process: who asks who holds a lock is not told of its own."""
    argv = [sys.executable, "-m", "ml_flashpoint.cli.main", "status", str(base), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, env=child_environment(), timeout=60, check=True)
    shown: dict[str, Any] = json.loads(done.stdout)
    return shown


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_what_is_said_is_what_happens(tmpfs: Path, lost: int) -> None:
    with Team(faults.facade_saves, tmpfs, 2, 3, True) as ranks:
        for child in ranks.ranks:
            child.next_report("saved")
        said = [status_of(tmpfs / f"node-{node}" / "job")["losses"] for node in (0, 1)]
    for node, (own, peer) in enumerate(said):
        assert (own["node"], own["here"], own["from"]) == (f"node-{node}", True, [f"node-{1 - node}"])
        assert (peer["node"], peer["here"], peer["from"]) == (f"node-{1 - node}", False, [f"node-{node}"])
        assert own["step"] == peer["step"] == 3
        assert own["steps_lost"] == peer["steps_lost"] == 0
        assert 0 < own["seconds"] < 60
    shutil.rmtree(tmpfs / f"node-{lost}")
    assert call_team(faults.facade_goes_on, tmpfs, 2) == [said[lost][0]["step"]] * 2
