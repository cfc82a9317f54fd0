"""What is done at the end of a process is done in forked ones, whatever `multiprocessing` makes them forget."""

from __future__ import annotations

import fcntl
import multiprocessing
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ml_flashpoint.format.at_exit import close_in_children
from tests.support.processes import child_environment

_BEGIN = """
import atexit, multiprocessing, os
from multiprocessing import util
from ml_flashpoint.format.at_exit import at_exit
at_exit(lambda: print("first", os.getpid() == parent, flush=True))
at_exit(lambda: print("second", os.getpid() == parent, flush=True))
parent = os.getpid()
"""
# In the order of Python 3.13, on every release.
_FORKED = """
if not (pid := os.fork()):
    atexit._clear()
    util._run_after_forkers()
    atexit._run_exitfuncs()
    os._exit(0)
os.waitpid(pid, 0)
"""
_A_CHILD = """
child = multiprocessing.get_context("fork").Process(target=atexit._run_exitfuncs)
child.start()
child.join()
"""


@pytest.mark.parametrize("program", [_FORKED, _A_CHILD], ids=["as 3.13 does it", "by multiprocessing"])
def test_forked_processes_do_it_too(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + program], capture_output=True, text=True, env=child_environment()
    )
    assert done.stderr == ""
    assert done.stdout.split("\n")[:-1] == ["second False", "first False", "second True", "first True"]


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
