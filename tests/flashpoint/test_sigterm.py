"""SIGTERM: left alone, or held up until the newest version is persisted; then comes whatever would have come.

Every test begins with the default action.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, Report, call
from tests.support.loops import Stored, train, versions
from tests.support.persisting import persisted_steps
from tests.support.processes import child_environment
from tests.workers.training import Job


def persisting(base: Path, **options: Any) -> Flashpoint:
    """Whose versions are persisted once they have to be, and not before."""
    return Flashpoint(base, persist=f"{base}-store", persist_every=10**6, **options)


def persisted_at(base: Path) -> list[int]:
    return persisted_steps(Path(f"{base}-store"))


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_without_a_durable_tier_it_is_left_alone(base: Path) -> None:
    with Flashpoint(base):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1


# ---- jobs that end ---------------------------------------------------------------------------------------------


class SignalsItself(Stored):
    """Sends SIGTERM to its process while its state is taken for the third save."""

    def state_dict(self) -> dict[str, Any]:
        self.value += 1
        if self.value == 3:
            terminate()
        return super().state_dict()


def terminate_while_saving(report: Report, base: Path, how: str) -> None:
    """Gets SIGTERM right after a save has begun (`after`), or in the midst of its begin (`within`)."""
    fp = persisting(base, grace_s=30)
    fp.track(big=nn.Linear(2048, 2048), **({"self": SignalsItself(0)} if how == "within" else {})).resume()
    for _ in range(3):
        fp.wait()
        fp.step()
    if how == "after":
        terminate()
    report("goes on")
    fp.step()
    report("survived")


@pytest.mark.parametrize("how", ["after", "within"])
def test_the_next_step_persists_the_save_in_flight_and_ends(base: Path, how: str) -> None:
    with Child(terminate_while_saving, base, how) as child:
        child.next_report("goes on")
        assert child.wait() == -signal.SIGTERM
    assert versions(base)[-1] == 3, "no new one is begun"
    assert persisted_at(base)[0] == 3


def come_to_no_step(report: Report, base: Path, how: str, grace_s: float) -> None:
    """Gets SIGTERM, and does something else for long: at once, after a second one, or where no handler runs."""
    fp = persisting(base, grace_s=grace_s)
    fp.track(big=nn.Linear(1024, 1024)).step()
    if how == "hangs":
        threading.Timer(0.5, terminate).start()
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):
            library.pthread_mutex_lock(mutex)
    for _ in range(2 if how == "twice" else 1):
        terminate()
    for _ in range(600):
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("how", "grace_s", "persisted"),
    [("sleeps", 2.0, True), ("hangs", 1000.0, True), ("twice", 1000.0, False)],
)
def test_a_main_thread_that_comes_to_no_step_is_ended_at_last(
    base: Path, how: str, grace_s: float, persisted: bool
) -> None:
    """At the end of the grace; where no handler runs, once all is persisted; and at once by a second one."""
    with Child(come_to_no_step, base, how, grace_s) as child:
        assert child.wait(50) == -signal.SIGTERM
    if persisted:
        assert persisted_at(base) == [1]


def terminate_with_handler(report: Report, base: Path) -> list[str]:
    """Chains to a handler of the program's own; says in which order things happened."""
    said: list[str] = []
    signal.signal(signal.SIGTERM, lambda number, frame: said.append(f"handler, persisted {fp.health.persisted}"))
    with persisting(base) as fp:
        fp.track(big=nn.Linear(64, 64)).save(1)
        terminate()
        said.append("goes on")
        fp.save(2)
        said.append("saved")
        terminate()
    said.append("closed")
    terminate()
    return said


def test_it_is_chained_to_the_handler_before(base: Path) -> None:
    said = ["goes on", "handler, persisted 1", "saved", "handler, persisted 2", "closed", "handler, persisted 2"]
    assert call(terminate_with_handler, base) == said


# ---- handlers of the program's own -----------------------------------------------------------------------------


def test_an_event_loop_keeps_its_signals(base: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            with persisting(base):
                pass
            assert signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(before)
    with persisting(base):
        assert signal.set_wakeup_fd(-1) != -1
    assert signal.set_wakeup_fd(-1) == -1


def test_the_handler_before_is_put_back(base: Path, tmpfs: Path) -> None:
    first, second = persisting(base), persisting(tmpfs / "second")
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    second.close()
    first.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with persisting(base, handle_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    installed, theirs = persisting(base), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: theirs.append(number))
    installed.close()
    terminate()
    assert theirs == [signal.SIGTERM], "a handler installed later stays"


@pytest.mark.parametrize("comes", ["once both are open", "before the second is opened"])
def test_the_chain_stays_whole_whatever_is_opened_and_closed_first(base: Path, tmpfs: Path, comes: str) -> None:
    said: list[str] = []

    def on_top(number: int, frame: Any) -> None:
        said.append("on top")
        inner(number, frame)

    def programs(number: int, frame: Any) -> None:
        said.append("program")

    signal.signal(signal.SIGTERM, programs)
    first = persisting(base)
    inner: Any = signal.signal(signal.SIGTERM, on_top)
    if comes == "before the second is opened":
        terminate()
        said.clear()
    second = persisting(tmpfs / "second")
    if comes == "once both are open":
        first.close()
        terminate()
    assert said == [], "until the next step, save or close"
    second.close()
    assert said[-1] == "program"
    assert said.count("program") == 1
    first.close()
    assert signal.getsignal(signal.SIGTERM) == on_top
    signal.signal(signal.SIGTERM, programs)
    with persisting(base):
        pass
    assert signal.getsignal(signal.SIGTERM) == programs


@pytest.mark.parametrize("is_open", [True, False])
def test_a_handler_that_passes_nothing_on_is_held_up_for_what_is_opened_later(
    base: Path, tmpfs: Path, is_open: bool
) -> None:
    said: list[int] = []

    def programs(number: int, frame: Any) -> None:
        said.append(number)

    first = persisting(base)
    if not is_open:
        closing = threading.Thread(target=first.close)  # where no handler can be put back
        closing.start()
        closing.join()
    signal.signal(signal.SIGTERM, programs)
    second = persisting(tmpfs / "second")
    terminate()
    assert said == []
    second.close()
    assert said == [signal.SIGTERM]
    first.close()
    assert signal.getsignal(signal.SIGTERM) == programs
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_there_is_no_handler(base: Path) -> None:
    found = list[Any]()

    def run() -> None:
        train(base, Job(), 3, persist=f"{base}-store")
        found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert found == [signal.SIG_DFL]
    assert versions(base)[-1] == 3


# ---- forks -----------------------------------------------------------------------------------------------------

# What is registered before the library is imported runs in the child before anything of the library's does.
_BEFORE_IMPORTS = """
import ctypes, os, signal, threading

hooks = []
os.register_at_fork(after_in_child=lambda: [hook() for hook in hooks])
from ml_flashpoint.engine.signals import InFlight, hold_up_sigterm, let_go_of_sigterm

def programs(number, frame):
    os._exit(7)

def engine():
    return InFlight(hurry=lambda: None, finish=lambda seconds: None, grace_s=30)

def end_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def mask():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())

def in_a_thread(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(60)
"""

_ENDED_AS_SOON_AS_THEY_ARE_THERE = """
ours = engine()
hold_up_sigterm(ours)
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
    before = mask()
    assert end_of(fork()) == -signal.SIGTERM
    assert mask() == before
    ended.append(True)

assert watched()
ended = []
end_child()
in_a_thread(end_child)
# One that forks while it is about to fork.
inner = []
os.register_at_fork(before=lambda: None if inner else (inner.append(True), end_child()))
end_child()
assert len(ended) == 4
threading.Event().wait(2)  # longer than it takes to find that the main thread does not respond
assert watched()
let_go_of_sigterm(ours)
assert not watched()
os.waitpid(fork(), 0)
assert not watched()
"""

# A child that waits in native code runs no handler of Python's: only the default action ends it.
_HAVE_THE_HANDLER_FROM_BEFORE = """
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

def check(before, expected):
    for child in (signal.pause, wait_in_native_code)[: 1 if before == programs else 2]:
        pid = fork(child)
        os.kill(pid, signal.SIGTERM)
        assert end_of(pid) == expected
    assert end_of(fork(lambda: os._exit(signal.getsignal(signal.SIGTERM) != before))) == 0
    done.append(before)

done = []
for before, expected in ((signal.SIG_DFL, -signal.SIGTERM), (programs, 7)):
    signal.signal(signal.SIGTERM, before)
    engines = [engine(), engine()]
    for each in engines:
        hold_up_sigterm(each)
        handler = signal.getsignal(signal.SIGTERM)
        check(before, expected)
        in_a_thread(check, before, expected)
        assert signal.getsignal(signal.SIGTERM) == handler
    for each in reversed(engines):
        let_go_of_sigterm(each)
assert len(done) == 8
"""

_ENDED_BEFORE_THEY_HAVE_RUN_ANYTHING = """
def end_at_once():
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reads, 1)
        os._exit(9)
    os.kill(pid, signal.SIGTERM)
    os.write(writes, b"1")  # a child that has forgotten the signal goes on
    return end_of(pid)

for before, expected in ((signal.SIG_DFL, -signal.SIGTERM), (programs, 7)):
    signal.signal(signal.SIGTERM, before)
    ours = engine()
    hold_up_sigterm(ours)
    blocked = mask()
    ends = [end_at_once() for _ in range(16)]
    assert ends == [expected] * 16, ends
    assert mask() == blocked
    let_go_of_sigterm(ours)
"""


@pytest.mark.parametrize(
    "script",
    [_ENDED_AS_SOON_AS_THEY_ARE_THERE, _HAVE_THE_HANDLER_FROM_BEFORE, _ENDED_BEFORE_THEY_HAVE_RUN_ANYTHING],
    ids=["ended as soon as they are there", "have the handler from before", "ended before they have run anything"],
)
def test_forked_children_get_their_own_sigterm_and_their_parent_is_watched_over_as_before(script: str) -> None:
    argv = [sys.executable, "-c", f"{_BEFORE_IMPORTS}\n{script}\nprint('ended')"]
    done = subprocess.run(argv, env=child_environment(), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
