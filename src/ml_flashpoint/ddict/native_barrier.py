"""A barrier of processes.

Owns the handles of a barrier, which are picklable, and their connections to it. It lives in the process that made it
(`native_barrier_server`), so that nothing is left locked by a process that was killed; where that is no process of the
Ray cluster, but a client of it, in an actor.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from ml_flashpoint.ddict import native_ray
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictTimeoutError
from ml_flashpoint.ddict.native_barrier_server import BARRIERS, BarrierServer
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.client import Address, Connection

_REPLY_S = 30.0
_NO_END_S = 1e6
_MOST_REASON = 1000

_travelling: ContextVar[list[Barrier] | None] = ContextVar("_travelling", default=None)


class Barrier:
    """Lets processes, or threads, wait for each other; reusable.

    It is broken when a waiting one gives up or dies, when a process that has waited before ends without a farewell
    (SIGKILL), when a member of a `ProcessGroup` that it was given to fails, or by `abort`: then all who wait, and all
    who come later, get `BarrierBrokenError` until `reset`. A handle is thread-safe and picklable; the process that
    made it has to live as long as it is used.

    Args:
        parties: how many have to wait for all to pass.
        action: called by the process that made the barrier, on a thread of its own, before each release. It may use
            the barrier, except to wait at it; what it raises breaks the barrier. Not in a client of a Ray cluster.
        timeout: seconds, for every `wait` that does not give its own.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(self, parties: int, action: Callable[[], object] | None = None, timeout: float | None = None) -> None:
        if isinstance(parties, bool) or not isinstance(parties, int) or parties < 1:
            raise InvalidArgumentError("must be a positive number of processes", argument="parties", value=parties)
        _check_timeout(timeout)
        self._parties = parties
        self._timeout = timeout
        self._server: BarrierServer | None = None
        self._actor: Any = None
        if native_ray.is_client():
            if action is not None:
                raise InvalidArgumentError("cannot be called in a client of Ray", argument="action", value=action)
            self._actor, found = native_ray.make_barrier(parties)
            self._address, self._secret = found
        else:
            host = native_ray.own_host() if native_ray.is_on_ray() else None
            self._server = server = BarrierServer(parties, action, host)
            self._address, self._secret = server.address, server.secret
            weakref.finalize(self, server.close)
        self._lines = _Lines(self._address, self._secret)

    def __reduce__(self) -> tuple[Any, ...]:
        travelling = _travelling.get()
        if travelling is not None:
            travelling.append(self)
        return _handle, (self._address, self._secret, self._parties, self._timeout)

    @property
    def parties(self) -> int:
        """How many have to wait for all to pass."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """How many wait at the moment."""
        return int(self._lines.ask("state")["waiting"])

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        return bool(self._lines.ask("state")["broken"])

    def wait(self, timeout: float | None = None) -> int:
        """Wait until as many as there are parties do; a number from 0, another one for each of them.

        Args:
            timeout: seconds; by default those of the barrier, or without end.

        Raises:
            BarrierBrokenError: not all came: one died, or gave up.
            DDictTimeoutError: this one gave up, which breaks the barrier.
            DDictDestroyedError: the process that made the barrier is gone, or has closed it.
        """
        timeout = self._timeout if timeout is None else timeout
        _check_timeout(timeout)
        return self._lines.wait(timeout)

    def abort(self, reason: str = "it was aborted") -> None:
        """Break it: all who wait and who come get `BarrierBrokenError`."""
        if self._server is not None:
            self._server.abort(reason)
        else:
            self._lines.ask("abort", reason=reason[:_MOST_REASON])

    def reset(self) -> None:
        """Make a broken one usable again. Those who wait get `BarrierBrokenError`."""
        self._lines.ask("reset", reason="it was reset")

    def close(self) -> None:
        """In the process that made it: end it for all. Elsewhere: let go of it."""
        if self._server is not None:
            self._server.close()
        if self._actor is not None:
            native_ray.end_barrier(self._actor)
        self._lines.leave()


def _handle(address: Address, secret: bytes, parties: int, timeout: float | None) -> Barrier:
    barrier = object.__new__(Barrier)
    barrier._actor = barrier._server = None
    barrier._parties, barrier._timeout = parties, timeout
    barrier._address, barrier._secret = address, secret
    barrier._lines = _Lines(address, secret)
    return barrier


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise InvalidArgumentError("must be a number of seconds", argument="timeout", value=timeout)


@contextlib.contextmanager
def barriers_in_pickles() -> Iterator[list[Barrier]]:
    """Collects the barriers that are pickled meanwhile by this thread."""
    found: list[Barrier] = []
    reset = _travelling.set(found)
    try:
        yield found
    finally:
        _travelling.reset(reset)


class _Line(Connection):
    """A connection of a thread that waits. When nothing refers to it any more, as after the thread's end, it says
    farewell."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was never made
            self.leave("bye")


class _Lines:
    """This process's connections to a barrier, made when they are first used: one for each thread that waits, since
    each waits for itself, and one for all questions, whose end breaks nothing. In a forked child they are made anew."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self._to = address, secret, BARRIERS
        self._of_thread = threading.local()
        self._waiting: weakref.WeakSet[_Line] = weakref.WeakSet()
        self._asking: Connection | None = None
        _all.add(self)
        _ensure_farewell()

    def wait(self, timeout_s: float | None) -> int:
        """Wait until all are there. Who gives up hangs up without a farewell: that breaks the barrier for all."""
        within_s = _NO_END_S if timeout_s is None else timeout_s
        try:
            with _gone():
                line: _Line | None = getattr(self._of_thread, "line", None)
                if line is None or line.closed:
                    line = self._of_thread.line = _Line(*self._to, connect_timeout_s=_REPLY_S)
                    self._waiting.add(line)
                try:
                    return int(line.request("wait", {}, timeout_s=within_s).fields["index"])
                except BaseException as error:
                    if not isinstance(error, FlashpointError):
                        line.close()  # it would hear the answer to this in place of that to the next question
                    raise
        except DDictTimeoutError as error:
            raise DDictTimeoutError(f"not all came to the barrier within {timeout_s} s") from error

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask something that is answered at once."""
        try:
            with _gone():
                if self._asking is None or self._asking.closed:
                    self._asking = Connection(*self._to, connect_timeout_s=_REPLY_S)
                return self._asking.request(op, fields, timeout_s=_REPLY_S).fields
        except DDictTimeoutError as error:
            raise DDictTimeoutError(f"the barrier did not answer within {_REPLY_S} s") from error

    def leave(self) -> None:
        """Let go of the barrier in order: what becomes of this thread is nothing to it any more."""
        line: _Line | None = getattr(self._of_thread, "line", None)
        if line is not None:
            line.leave("bye")

    def close(self) -> None:
        """Let go of the barrier in order: what becomes of this process is nothing to it any more."""
        for line in list(self._waiting):
            line.leave("bye")
        if self._asking is not None:
            self._asking.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a half-made one; the end of the interpreter
            self.close()


@contextlib.contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except (ConnectionLostError, AuthenticationError) as error:
        raise DDictDestroyedError(f"the barrier is gone: {error.message}") from error


_all: weakref.WeakSet[_Lines] = weakref.WeakSet()
_farewell_of: int | None = None


def _ensure_farewell() -> None:
    # By multiprocessing's means, since its children end without `atexit`, and forget what was theirs before the fork.
    global _farewell_of
    if _farewell_of != os.getpid():
        _farewell_of = os.getpid()
        multiprocessing.util.Finalize(None, say_farewell, exitpriority=10)


def say_farewell() -> None:
    """Let go of all barriers of this process, which ends in order."""
    for lines in list(_all):
        lines.close()
