"""Notices of a saving process: they come whole, once, and leave nothing behind when their owner is killed."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ml_flashpoint.core.save_ticket import Notice, NoticeBoard


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_notice_is_taken_once() -> None:
    board = NoticeBoard()
    posting = pickle.loads(pickle.dumps(board))
    notice = Notice("/base", "step-1_ckpt", arenas=("/base/a",), others=("x",))
    assert board.take("attempt") is None
    posting.sign("attempt")
    assert board.process_of("attempt") == os.getpid()
    posting.post("attempt", notice)
    assert board.take("attempt") == notice
    assert board.take("attempt") is None
    assert board.process_of("attempt") is None
    posting.remove()


@pytest.mark.slow
def test_boards_of_killed_owners_are_swept_and_of_live_ones_kept(tmp_path: Path) -> None:
    script = """
from ml_flashpoint.core.save_ticket import NoticeBoard
board = NoticeBoard()
print(board.directory, flush=True)
input()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert theirs.is_relative_to(tmp_path)
        mine = NoticeBoard()
        assert theirs.is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
    another = NoticeBoard()
    assert not theirs.exists()
    assert mine.directory.is_dir()
    for board in (mine, another):
        board.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_planted_is_not_waited_for_and_stays(tmp_path: Path) -> None:
    board = NoticeBoard()
    prefix = board.directory.name[: -len("12345678")]
    planted = tmp_path / f"{prefix}planted"
    planted.mkdir()
    os.mkfifo(planted / "owner")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner").touch()
    (tmp_path / f"{prefix}link").symlink_to(victim)
    NoticeBoard().remove()  # opening the FIFO would wait for good
    assert (planted / "owner").is_fifo()
    assert (victim / "owner").exists()
    board.remove()


def test_a_forked_child_leaves_its_parents_board() -> None:
    board = NoticeBoard()
    child = os.fork()
    if not child:
        board.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert board.directory.is_dir()
    board.remove()
    assert not board.directory.exists()
