"""A barrier of processes.

Owns the handles of a barrier, which are picklable, and their lines to it. It lives in the process that made it, behind
a Unix socket (`native_barrier_server`), so that nothing is left locked by a process that was killed; on a Ray cluster,
in an actor.

The socket's address is abstract: there is no file that could outlive a process. So anybody on the machine may connect,
and both ends make sure that the other one is this user's before they say anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.util
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from ml_flashpoint.ddict import native_ray
from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictTimeoutError
from ml_flashpoint.ddict.native_barrier_server import RECEIVED, BarrierServer, is_this_user
from ml_flashpoint.ddict.native_errors import BarrierBrokenError
from ml_flashpoint.format.errors import InvalidArgumentError

_log = logging.getLogger(__name__)

_REPLY_S = 30.0  # on Ray, the first request may wait for a process to start
_SEND_TIMEOUT_S = 10.0

_travelling: ContextVar[list[Barrier] | None] = ContextVar("_travelling", default=None)


class Barrier:
    """Lets processes, or threads, wait for each other; reusable.

    It is broken when a waiting one gives up or dies, when a process that has waited before ends without a farewell
    (SIGKILL), when a member of a `ProcessGroup` that it was given to fails, or by `abort`: then all who wait, and all
    who come later, get `BarrierBrokenError` until `reset`. A handle is thread-safe and picklable; the process that
    made it has to live as long as it is used.

    On Ray, deaths are those that groups tell of: a process that waits and is killed, but is no member of a group that
    the barrier was given to, still counts as one that waits.

    Args:
        parties: how many have to wait for all to pass.
        action: called by the process that made the barrier, on a thread of its own, before each release. It may use
            the barrier, except to wait at it; what it raises breaks the barrier. Not on Ray.
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
        self._address = self._token = ""
        self._local = threading.local()
        if native_ray.is_on_ray():
            if action is not None:
                raise InvalidArgumentError("cannot be called on Ray", argument="action", value=action)
            self._actor = native_ray.make_barrier(parties)
            return
        self._server = server = BarrierServer(parties, action)
        self._address, self._token = server.address, server.token
        weakref.finalize(self, server.close)

    def __reduce__(self) -> tuple[Any, ...]:
        travelling = _travelling.get()
        if travelling is not None:
            travelling.append(self)
        return _handle, (self._address, self._token, self._actor, self._parties, self._timeout)

    @property
    def parties(self) -> int:
        """How many have to wait for all to pass."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """How many wait at the moment."""
        return int(self._ask("state", _REPLY_S)["waiting"])

    @property
    def broken(self) -> bool:
        """Whether it is broken."""
        return bool(self._ask("state", _REPLY_S)["broken"])

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
        reply = self._ask("wait", timeout)
        if reply.get("broken"):
            raise BarrierBrokenError(f"the barrier is broken: {reply['broken']}")
        return int(reply["index"])

    def abort(self, reason: str = "it was aborted") -> None:
        """Break it: all who wait and who come get `BarrierBrokenError`."""
        if self._server is not None:
            self._server.abort(reason)
        else:
            self._ask("abort", _REPLY_S, reason=reason)

    def note_end(self, puid: int, reason: str) -> None:
        """Break it if a process that has ended without a farewell has waited. For Ray: elsewhere, its line says so.

        Args:
            puid: number of the process.
            reason: for those who wait.
        """
        if self._actor is not None:
            self._ask("end", _REPLY_S, who=puid, reason=reason)

    def reset(self) -> None:
        """Make a broken one usable again. Those who wait get `BarrierBrokenError`."""
        self._ask("reset", _REPLY_S)

    def close(self) -> None:
        """In the process that made it: end it for all. Elsewhere: let go of it."""
        if self._actor is not None:
            native_ray.end_barrier(self._actor)
            return
        self._line().close(farewell=True)
        if self._server is not None:
            self._server.close()

    def _ask(self, op: str, timeout_s: float | None, **fields: Any) -> dict[str, Any]:
        if self._actor is not None:
            return native_ray.ask_barrier(self._actor, {"op": op, **fields}, timeout_s)
        return self._line().ask({"op": op, **fields}, timeout_s)

    def _line(self) -> _Line:
        # One for each thread, since each waits for itself, and for each process, since lines do not survive a fork.
        line: _Line | None = getattr(self._local, "line", None)
        if line is None or line.pid != os.getpid():
            line = self._local.line = _Line(self._address, self._token)
        return line


def _handle(address: str, token: str, actor: Any, parties: int, timeout: float | None) -> Barrier:
    barrier = object.__new__(Barrier)
    barrier._actor = actor
    barrier._parties, barrier._timeout, barrier._server = parties, timeout, None
    barrier._address, barrier._token, barrier._local = address, token, threading.local()
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


class _Line:
    """A thread's connection to a barrier, made when it is first used."""

    def __init__(self, address: str, token: str) -> None:
        self.pid = os.getpid()
        self._address, self._token = address, token
        self._socket: socket.socket | None = None
        self._received = b""
        self._owed = 0
        """Replies to come. All but the last are to questions whose time ran out, and for nobody."""

    def ask(self, message: dict[str, Any], timeout_s: float | None) -> dict[str, Any]:
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        waits = message["op"] == "wait"
        try:
            with self._closed_on(BaseException):
                self._send(message)
            # Who waits and gives up hangs up without a farewell: that breaks the barrier for all. Any other question's
            # line stays: its end would do the same, and after a farewell this process's death would not.
            with self._closed_on(BaseException if waits else ConnectionError):
                return self._hear(give_up)
        except TimeoutError as error:
            what = "not all came to the barrier" if waits else "the barrier did not answer"
            raise DDictTimeoutError(f"{what} within {timeout_s} s") from error
        except OSError as error:
            raise DDictDestroyedError(f"the barrier is gone: {error}") from error

    @contextlib.contextmanager
    def _closed_on(self, kind: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except kind:
            self.close()
            raise

    def _send(self, message: dict[str, Any]) -> None:
        connection = self._connected()
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.sendall(json.dumps(message).encode() + b"\n")
        self._owed += 1

    def _hear(self, give_up: float | None) -> dict[str, Any]:
        assert self._socket is not None
        while self._owed:
            while b"\n" not in self._received:
                self._socket.settimeout(None if give_up is None else max(1e-6, give_up - time.monotonic()))
                data = self._socket.recv(RECEIVED)
                if not data:
                    raise ConnectionError("it was closed")
                self._received += data
            line, _, self._received = self._received.partition(b"\n")
            self._owed -= 1
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.settimeout(_SEND_TIMEOUT_S)
            self._socket.connect(self._address)
            if not is_this_user(self._socket):
                raise ConnectionError("another user has its address")
            self._socket.sendall(self._token.encode() + b"\n")
            _lines.add(self)
            _ensure_finalizer()
        return self._socket

    def close(self, farewell: bool = False) -> None:
        connection, self._socket = self._socket, None
        self._received, self._owed = b"", 0
        if connection is not None:
            if farewell:
                with contextlib.suppress(OSError):
                    connection.sendall(b'{"op": "bye"}\n')
            connection.close()

    def __del__(self) -> None:
        if self.pid == os.getpid():
            self.close(farewell=True)


_lines: weakref.WeakSet[_Line] = weakref.WeakSet()


_finalizer_of: int | None = None


def _ensure_finalizer() -> None:
    # As that of the server, and before it: whoever made the barrier says farewell to it, too.
    global _finalizer_of
    if _finalizer_of != os.getpid():
        _finalizer_of = os.getpid()
        multiprocessing.util.Finalize(None, _say_farewell, exitpriority=10)


def _say_farewell() -> None:
    for line in list(_lines):
        line.close(farewell=line.pid == os.getpid())


def _close_inherited() -> None:
    # Kept open in a forked child, they would hide the parent's death from the others.
    for line in list(_lines):
        line.close()


os.register_at_fork(after_in_child=_close_inherited)
