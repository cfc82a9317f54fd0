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

from ml_flashpoint.core.mailbox import CompletionRecord, Mailbox


@pytest.fixture(autouse=True)
def _own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_notice_is_there_until_it_is_cleared() -> None:
    mailbox = Mailbox()
    posting = pickle.loads(pickle.dumps(mailbox))
    record = CompletionRecord("/base", "step-1_ckpt", arenas=("/base/a",), others=("x",))
    assert mailbox.record_of("attempt") is None
    posting.sign("attempt")
    assert mailbox.process_of("attempt") == os.getpid()
    posting.post("attempt", record)
    for _ in range(2):  # what could not be taken over just now is looked for again
        assert mailbox.record_of("attempt") == record
    mailbox.clear("attempt")
    assert mailbox.record_of("attempt") is None
    assert mailbox.process_of("attempt") is None
    posting.remove()


@pytest.mark.slow
def test_boards_of_killed_owners_are_swept_and_of_live_ones_kept(tmp_path: Path) -> None:
    script = """
from ml_flashpoint.core.mailbox import Mailbox
mailbox = Mailbox()
print(mailbox.directory, flush=True)
input()
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert theirs.is_relative_to(tmp_path)
        mine = Mailbox()
        assert theirs.is_dir()
        owner.send_signal(signal.SIGKILL)
        owner.wait(30)
    another = Mailbox()
    assert not theirs.exists()
    assert mine.directory.is_dir()
    for mailbox in (mine, another):
        mailbox.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_somebody_planted_is_not_waited_for_and_stays(tmp_path: Path) -> None:
    mailbox = Mailbox()
    prefix = mailbox.directory.name[: -len("12345678")]
    planted = tmp_path / f"{prefix}planted"
    planted.mkdir()
    os.mkfifo(planted / "owner")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner").touch()
    (tmp_path / f"{prefix}link").symlink_to(victim)
    Mailbox().remove()  # opening the FIFO would wait for good
    assert (planted / "owner").is_fifo()
    assert (victim / "owner").exists()
    mailbox.remove()


def test_a_forked_child_leaves_its_parents_board() -> None:
    mailbox = Mailbox()
    child = os.fork()
    if not child:
        mailbox.remove()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert mailbox.directory.is_dir()
    mailbox.remove()
    assert not mailbox.directory.exists()
