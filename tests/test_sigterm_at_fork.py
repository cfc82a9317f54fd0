"""SIGTERM at the moment of a fork: it is the child's that it was sent to, and the parent is watched over as before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import child_environment

# What is registered before the library is imported runs in the child before anything of the library's does.
_SCRIPT = """
import os, signal, threading

hooks = []
os.register_at_fork(after_in_child=lambda: [hook() for hook in hooks])
from ml_flashpoint.core.signals import InFlight, hold_up_sigterm, let_go_of_sigterm

engine = InFlight(hurry=lambda: None, finish=lambda deadline_s: None, grace_s=30)
hold_up_sigterm(engine)
hooks.append(lambda: os.kill(os.getpid(), signal.SIGTERM))

def watched():
    pipe = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(pipe, warn_on_full_buffer=False)
    return pipe != -1

def fork():
    child = os.fork()
    if child == 0:
        signal.pause()
    return child

def end_child():
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert os.waitstatus_to_exitcode(os.waitpid(fork(), 0)[1]) == -signal.SIGTERM
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    ended.append(True)

assert watched()
ended = []
end_child()
beside = threading.Thread(target=end_child)
beside.start()
beside.join(30)
# One that forks while it is about to fork.
inner = []
os.register_at_fork(before=lambda: None if inner else (inner.append(True), end_child()))
end_child()
assert len(ended) == 4
threading.Event().wait(2)  # longer than it takes to find that the main thread does not respond
assert watched()
let_go_of_sigterm(engine)
assert not watched()
os.waitpid(fork(), 0)
assert not watched()
print("lives")
"""


@pytest.mark.slow
def test_a_child_that_is_ended_as_soon_as_it_is_there_does_not_end_its_parent() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=child_environment(), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
