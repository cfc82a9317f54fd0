"""SIGTERM: left alone, or held up until the newest version is persisted; then comes whatever would have come."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint import Flashpoint
from tests.support.forked import Child, call
from tests.support.loops import train, versions
from tests.support.persisting import persisted_steps
from tests.workers import training
from tests.workers.training import Job


def persisting(base: Path, **options: Any) -> Flashpoint:
    return Flashpoint(base, persist=f"{base}-store", **options)


def store_of(base: Path) -> Path:
    return Path(f"{base}-store")


def test_without_a_durable_tier_it_is_left_alone(base: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Flashpoint(base):
        assert signal.getsignal(signal.SIGTERM) == before
        assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("how", ["after", "within"])
def test_the_next_step_persists_the_save_in_flight_and_ends(base: Path, how: str) -> None:
    with Child(training.terminate_while_saving, str(base), how) as child:
        child.next_report("goes on")
        assert child.wait() == -signal.SIGTERM
    assert versions(base)[-1] == 3, "no new one is begun"
    assert persisted_steps(store_of(base))[0] == 3


@pytest.mark.slow
def test_a_main_thread_that_comes_to_no_step_is_ended_at_the_end_of_the_grace(base: Path) -> None:
    with Child(training.terminate_and_come_to_no_step, str(base)) as child:
        child.next_report("goes on")
        assert child.wait(40) == -signal.SIGTERM
    assert persisted_steps(store_of(base)) == [1]


@pytest.mark.slow
def test_a_main_thread_that_hangs_is_ended_once_the_newest_version_is_persisted(base: Path) -> None:
    with Child(training.hang_in_native_code, str(base)) as child:
        child.next_report("hangs")
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(25) == -signal.SIGTERM, "the grace is 30 s"
    assert persisted_steps(store_of(base)) == [1]


def test_a_second_one_is_not_held_up(base: Path) -> None:
    with Child(training.terminate_twice, str(base)) as child:
        child.next_report("goes on")
        assert child.wait(25) == -signal.SIGTERM


def test_one_for_a_forked_child_is_its_own(base: Path) -> None:
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
            with persisting(base):
                pass
            assert signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(before)
    with persisting(base):
        assert signal.set_wakeup_fd(-1) != -1
    assert signal.set_wakeup_fd(-1) == -1


def test_it_is_chained_to_the_handler_before(base: Path) -> None:
    said = call(training.terminate_with_handler, str(base))
    assert said == [
        *("goes on", "handler, persisted 1", "saved"),
        *("handler, persisted 2", "closed", "handler, persisted 2"),
    ]


def test_the_handler_before_is_put_back(base: Path, tmpfs: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second = persisting(base), persisting(tmpfs / "second")
    assert signal.getsignal(signal.SIGTERM) != before
    second.close()
    first.close()
    assert signal.getsignal(signal.SIGTERM) == before
    with persisting(base, handle_sigterm=False):
        assert signal.getsignal(signal.SIGTERM) == before
    installed = persisting(base)
    theirs: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: theirs.append(number))
    try:
        installed.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert theirs == [signal.SIGTERM], "a handler installed later stays"
    finally:
        signal.signal(signal.SIGTERM, before)


def test_closing_in_another_order_leaves_the_chain_whole(base: Path, tmpfs: Path) -> None:
    said: list[str] = []

    def on_top(number: int, frame: Any) -> None:
        said.append("on top")
        inner(number, frame)

    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append("program"))
    earlier = signal.getsignal(signal.SIGTERM)
    try:
        first = persisting(base)
        inner: Any = signal.signal(signal.SIGTERM, on_top)
        second = persisting(tmpfs / "second")
        first.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == [], "until the next step, save or close"
        second.close()
        assert said == ["on top", "program"]
        assert signal.getsignal(signal.SIGTERM) == on_top
        signal.signal(signal.SIGTERM, before)
        with persisting(base):
            pass
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)
    assert earlier != before


@pytest.mark.parametrize("is_open", [True, False])
def test_a_handler_that_passes_nothing_on_is_held_up_for_what_is_opened_later(
    base: Path, tmpfs: Path, is_open: bool
) -> None:
    said: list[int] = []

    def programs(number: int, frame: Any) -> None:
        said.append(number)

    before = signal.getsignal(signal.SIGTERM)
    try:
        first = persisting(base)
        if not is_open:
            closing = threading.Thread(target=first.close)  # where no handler can be put back
            closing.start()
            closing.join()
        signal.signal(signal.SIGTERM, programs)
        second = persisting(tmpfs / "second")
        os.kill(os.getpid(), signal.SIGTERM)
        assert said == []
        second.close()
        assert said == [signal.SIGTERM]
        first.close()
        assert signal.getsignal(signal.SIGTERM) == programs
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGTERM, before)


def test_one_that_has_come_is_answered_by_what_is_opened_later(base: Path, tmpfs: Path) -> None:
    said: list[str] = []

    def on_top(number: int, frame: Any) -> None:
        inner(number, frame)

    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append("program"))
    try:
        first = persisting(base)
        inner: Any = signal.signal(signal.SIGTERM, on_top)
        os.kill(os.getpid(), signal.SIGTERM)
        second = persisting(tmpfs / "second")
        assert said == []
        second.close()
        assert said == ["program"]
        first.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_there_is_no_handler(base: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    caught: list[BaseException] = []

    def run() -> None:
        try:
            train(base, Job(), 3, persist=f"{base}-store")
            assert signal.getsignal(signal.SIGTERM) == before
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not caught
    assert versions(base)[-1] == 3
