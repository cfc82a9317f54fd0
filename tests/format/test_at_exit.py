"""What is done at the end of a process is done in forked ones, whatever `multiprocessing` makes them forget."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
