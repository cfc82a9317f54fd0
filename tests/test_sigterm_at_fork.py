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
from ml_flashpoint.engine.signals import InFlight, hold_up_sigterm, let_go_of_sigterm

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


# A child that waits in native code runs no handler of Python's: only the default action ends it.
_CHILDREN = """
import ctypes, os, signal, threading
from ml_flashpoint.engine.signals import InFlight, hold_up_sigterm, let_go_of_sigterm

def programs(number, frame):
    os._exit(7)

def fork(child):
    begins, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(tells, b"1")
        child()
        os._exit(9)
    os.read(begins, 1)
    return pid

def wait_in_native_code():
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

def end(pid):
    os.kill(pid, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def check(before, expected):
    for child in (signal.pause, wait_in_native_code):
        if before == programs and child is not signal.pause:
            continue
        assert end(fork(child)) == expected
    pid = fork(lambda: os._exit(signal.getsignal(signal.SIGTERM) != before))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    done.append(before)

done = []
for before, expected in ((signal.SIG_DFL, -signal.SIGTERM), (programs, 7)):
    signal.signal(signal.SIGTERM, before)
    engines = [InFlight(hurry=lambda: None, finish=lambda seconds: None, grace_s=30) for _ in range(2)]
    for engine in engines:
        hold_up_sigterm(engine)
        handler = signal.getsignal(signal.SIGTERM)
        check(before, expected)
        thread = threading.Thread(target=check, args=(before, expected))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) == handler
    for engine in reversed(engines):
        let_go_of_sigterm(engine)
assert len(done) == 8
print("ended")
"""


def test_a_forked_child_has_the_handler_from_before() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _CHILDREN], env=child_environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "ended\n", ended.stderr


_AT_ONCE = """
import os, signal
from ml_flashpoint.engine.signals import InFlight, hold_up_sigterm, let_go_of_sigterm

def programs(number, frame):
    os._exit(7)

def end_at_once():
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reads, 1)
        os._exit(9)
    os.kill(pid, signal.SIGTERM)
    os.write(writes, b"1")  # a child that has forgotten the signal goes on
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for before, expected in ((signal.SIG_DFL, -signal.SIGTERM), (programs, 7)):
    signal.signal(signal.SIGTERM, before)
    engine = InFlight(hurry=lambda: None, finish=lambda seconds: None, grace_s=30)
    hold_up_sigterm(engine)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ends = [end_at_once() for _ in range(16)]
    assert ends == [expected] * 16, ends
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    let_go_of_sigterm(engine)
print("ended")
"""


def test_a_child_that_is_ended_before_it_has_run_anything_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _AT_ONCE], env=child_environment(), capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == "ended\n", ended.stderr
