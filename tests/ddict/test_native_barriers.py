"""Barriers of processes and threads: who waits, who gives up, who dies."""

from __future__ import annotations

import contextlib
import pickle
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictTimeoutError
from ml_flashpoint.ddict.native import (
    Barrier,
    BarrierBrokenError,
)
from ml_flashpoint.ddict.native import barrier as native_barrier
from ml_flashpoint.ddict.native.barrier import BARRIERS
from ml_flashpoint.format.errors import AuthenticationError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.client import Connection
from tests.ddict.native_support import DEADLINE_S, barrier_elsewhere, barrier_of, in_threads
from tests.support.forked import wait_until
from tests.support.processes import suspend

pytestmark = pytest.mark.slow


def test_threads_pass_a_barrier_together() -> None:
    passed: list[int] = []
    with barrier_of(3) as barrier:
        for meeting in range(3):
            indices = in_threads(3, lambda _: (barrier.wait(timeout=DEADLINE_S), passed.append(0))[0])
            assert sorted(indices) == [0, 1, 2]
            assert len(passed) == 3 * (meeting + 1)


def test_one_who_gives_up_breaks_the_barrier_until_it_is_reset() -> None:
    with barrier_of(2) as barrier:
        with pytest.raises(DDictTimeoutError, match="barrier"):
            barrier.wait(timeout=0.05)
        wait_until(lambda: barrier.broken, "the end of the connection to be heard")
        with pytest.raises(BarrierBrokenError):
            barrier.wait(timeout=DEADLINE_S)
        with pytest.raises(threading.BrokenBarrierError):
            barrier.wait(timeout=DEADLINE_S)
        barrier.reset()
        assert not barrier.broken
        assert sorted(in_threads(2, lambda _: barrier.wait(timeout=DEADLINE_S))) == [0, 1]


def test_an_abort_is_told_to_those_who_wait() -> None:
    with barrier_of(3) as barrier:

        def wait_or_abort(index: int) -> object:
            if index < 2:
                return barrier.wait(timeout=DEADLINE_S)
            wait_until(lambda: barrier.n_waiting == 2, "two waiting")
            return barrier.abort("enough")

        first, second, _ = in_threads(3, wait_or_abort)
        assert isinstance(first, BarrierBrokenError)
        assert isinstance(second, BarrierBrokenError)
        assert "enough" in str(first)


def test_a_closed_barrier_is_gone_for_all_handles() -> None:
    with barrier_of(2) as barrier:
        copy = pickle.loads(pickle.dumps(barrier))
        assert (copy.parties, copy.n_waiting) == (2, 0)
        barrier.close()
        with pytest.raises(DDictDestroyedError):
            copy.wait(timeout=DEADLINE_S)


def test_a_question_without_an_answer_in_time_breaks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with barrier_elsewhere(tmp_path) as (maker, barrier):

        def meet() -> None:
            other = threading.Thread(target=barrier.wait, args=(DEADLINE_S,))
            other.start()
            assert barrier.wait(DEADLINE_S) in (0, 1)
            other.join(DEADLINE_S)

        meet()  # so this process has connections that have waited
        suspend(maker.pid)
        with monkeypatch.context() as patched:
            patched.setattr(native_barrier, "_REPLY_S", 0.1)
            for ask in (lambda: barrier.n_waiting, lambda: barrier.broken, barrier.reset):
                with pytest.raises(DDictTimeoutError, match="did not answer"):
                    ask()
        maker.send_signal(signal.SIGCONT)
        assert (barrier.n_waiting, barrier.broken) == (0, False)
        meet()


def test_a_barrier_of_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    with barrier_elsewhere(tmp_path) as (maker, barrier):
        assert barrier.n_waiting == 0
        maker.kill()
        maker.wait(DEADLINE_S)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(DDictDestroyedError):
            barrier.wait(timeout=DEADLINE_S)


def test_strangers_and_nonsense_disturb_nobody() -> None:
    with barrier_of(2) as barrier:
        for greeting in (b"wrong\n", b'{"op": "abort"}\n', bytes(10_000), b"\n" * 100):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(barrier._address[1])
                with contextlib.suppress(OSError):
                    stranger.sendall(greeting)
                    stranger.shutdown(socket.SHUT_WR)
                    assert stranger.recv(100) == b""
        with Connection(barrier._address, barrier._secret, BARRIERS, connect_timeout_s=DEADLINE_S) as confused:
            for op, fields in (("abort", {}), ("dance", {})):
                with pytest.raises(ProtocolError):
                    confused.request(op, fields, timeout_s=DEADLINE_S)
        with pytest.raises(AuthenticationError):
            Connection(barrier._address, b"another secret of a barrier", BARRIERS, connect_timeout_s=DEADLINE_S)
        assert not barrier.broken
        assert sorted(in_threads(2, lambda _: barrier.wait(timeout=DEADLINE_S))) == [0, 1]


@pytest.mark.parametrize("parties", [0, -3, True, "2"])
def test_a_barrier_takes_a_positive_number(parties: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="parties"):
        Barrier(parties)


def test_a_barrier_refuses_odd_timeouts() -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        Barrier(2, timeout=-1)
