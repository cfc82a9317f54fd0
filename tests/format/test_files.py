"""Children that a process forks do not keep its locks and connections."""

from __future__ import annotations

import fcntl
import multiprocessing
import threading
from pathlib import Path

import pytest

from ml_flashpoint.format.files import close_in_children


def test_forked_children_hold_neither_pipes_nor_locks_of_their_parent(tmp_path: Path) -> None:
    theirs, ours = multiprocessing.Pipe()
    lock = open(tmp_path / "lock", "wb")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    for opened in (ours, lock):
        close_in_children(opened)
    runs = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=lambda: (runs.set(), threading.Event().wait()))
    child.start()
    try:
        assert runs.wait(20)
        ours.close()
        lock.close()
        assert theirs.poll(0), "the child has it open"
        with theirs, pytest.raises(EOFError):
            theirs.recv()
        with open(tmp_path / "lock", "rb") as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        child.kill()
        child.join()
