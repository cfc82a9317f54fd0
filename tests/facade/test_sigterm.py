"""SIGTERM: the save under way is committed, then comes whatever would have come."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, call
from tests.support.loops import resumed, train, versions
from tests.workers import training
from tests.workers.training import Job


@pytest.mark.parametrize("how", ["after", "within"])
def test_sigterm_commits_the_save_in_flight_and_ends(base: Path, how: str) -> None:
    with Child(training.terminate_while_saving, str(base), how) as child:
        assert child.wait() == -signal.SIGTERM
    tracked: dict[str, Any] = {"big": nn.Linear(4096, 4096)}
    if how == "within":
        tracked["self"] = training.SignalsItself()
    assert resumed(base, **tracked) == 3


@pytest.mark.parametrize("function", ["wait", "notify_all"])
def test_sigterm_where_the_main_thread_holds_a_lock(base: Path, function: str) -> None:
    with Child(training.terminate_inside, str(base), function) as child:
        assert child.wait() == -signal.SIGTERM
        assert "not committed" not in child.log
    assert versions(base) == [1]


@pytest.mark.slow
def test_sigterm_ends_a_process_whose_main_thread_hangs(base: Path) -> None:
    with Child(training.hang_in_native_code, str(base)) as child:
        child.next_report("hangs")
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM
    assert resumed(base, big=nn.Linear(4096, 4096)) == 1


def test_sigterm_for_a_forked_child_is_its_own(base: Path) -> None:
    with Child(training.fork_while_saving, str(base)) as child:
        (_, took) = child.next_report("took")
        assert took < 20, "held up for the grace"
        assert child.result() == (-signal.SIGTERM, True)


def test_an_event_loop_keeps_its_signals(base: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            with Flashpoint(base):
                pass
            assert signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(before)
    with Flashpoint(base):
        assert signal.set_wakeup_fd(-1) != -1
    assert signal.set_wakeup_fd(-1) == -1


def test_sigterm_is_chained_to_the_handler_before(base: Path) -> None:
    said = call(training.terminate_with_handler, str(base))
    assert said == ["handler, saved 1", "goes on", "handler, saved 2", "closed"]


def test_sigterm_handler_is_put_back(base: Path, tmpfs: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first = Flashpoint(base)
    second = Flashpoint(tmpfs / "second")
    assert signal.getsignal(signal.SIGTERM) != before
    second.close()
    first.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with Flashpoint(base, handle_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == before
    installed = Flashpoint(base)
    ours: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ours.append(number))
    try:
        installed.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ours == [signal.SIGTERM], "a handler installed later stays"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_closing_in_another_order_leaves_the_chain_whole(base: Path, tmpfs: Path) -> None:
    said: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append(number))
    earlier = signal.getsignal(signal.SIGTERM)
    try:
        first, second = Flashpoint(base), Flashpoint(tmpfs / "second")
        first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == [signal.SIGTERM]
        second.close()
        assert signal.getsignal(signal.SIGTERM) == earlier, "nothing of ours is left that only passes on"
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_there_is_no_handler(base: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            job = Job()
            train(base, job, 3)
            assert signal.getsignal(signal.SIGTERM) == before
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not caught
    assert versions(base) == [3]
