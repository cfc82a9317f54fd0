"""A barrier of processes.

Owns the barrier itself (who waits, who is released, and what they are told: a handler of requests, whose sessions end
with the processes that they are of) and its handles, which are picklable. It lives in the process that made it, so that
nothing is left locked by a process that was killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import multiprocessing.util
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Final

from ml_flashpoint.ddict.errors import REQUESTS, BarrierBrokenError, DDictDestroyedError, DDictTimeoutError
from ml_flashpoint.ddict.native import ray as native_ray
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.errors import AuthenticationError, FlashpointError, InvalidArgumentError, ProtocolError
from ml_flashpoint.net.channel import Channel, ConnectionLostError
from ml_flashpoint.net.client import Address, Connection
from ml_flashpoint.net.messages import Fields, text
from ml_flashpoint.net.server import Peer, RequestServer

_log = logging.getLogger(__name__)

BARRIERS: Final = dataclasses.replace(REQUESTS, purpose=b"ml_flashpoint.ddict barrier")
"""A client says ``wait``, which is answered when all are there; ``state``, ``abort``, ``reset``; and ``bye`` before it
leaves in order."""

_REPLY_S = 30.0
_NO_END_S = 1e6
_MOST_REASON = 1000


class BarrierServer:
    """The barrier itself. ``host``: address of this machine that processes on others reach it at; None: there are
    none."""

    def __init__(self, parties: int, secret: bytes, host: str | None = None) -> None:
        self._parties = parties
        self._broken = ""
        self._waiting: list[Channel] = []
        self._members: set[Channel] = set()
        """Of those that have waited, and not said farewell: their end is that of processes that others count on."""
        self._is_closed = False
        self._lock = threading.Lock()
        self._server = RequestServer(
            secret,
            self,
            BARRIERS,
            # An abstract name: there is no file that could outlive a process.
            unix_path=f"\0mlf-barrier-{secrets.token_hex(16)}" if host is None else None,
            tcp_host=host,
            max_connections=4 * parties + 100,
        )
        self.address: Address = self._server.addresses[0]
        """Where it is."""

    def close(self) -> None:
        """End it: all connections close."""
        with self._lock:
            self._is_closed = True
        self._server.close()

    # ---- requests: see `RequestHandler` -------------------------------------------------------------------

    def open(self, peer: Peer) -> Channel:
        """A process has connected."""
        assert peer.channel is not None
        return peer.channel

    def handle(
        self, session: Channel, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Any]] | None:
        """Do what it says."""
        with self._lock:
            if op == "wait":
                self._join(session)
                return None  # told by whoever releases it
            if op == "state":
                return {"waiting": len(self._waiting), "broken": self._broken}, ()
            if op == "bye":
                self._members.discard(session)
            elif op in ("abort", "reset"):
                self._break(text(fields, "reason"))
                self._broken = self._broken if op == "abort" else ""
            else:
                raise ProtocolError(f"there is no operation {op!a}")
            return {}, ()

    def closed(self, session: Channel) -> None:
        """Note that a process has gone, one way or another."""
        with self._lock:
            if session in self._waiting:
                self._waiting.remove(session)
            if session in self._members and not self._is_closed:
                self._members.discard(session)
                self._break("a process that uses it died, or gave up")

    # ---- the barrier --------------------------------------------------------------------------------------

    def _join(self, session: Channel) -> None:
        if self._broken:
            self._tell(session)
            return
        self._members.add(session)
        self._waiting.append(session)
        if len(self._waiting) == self._parties:
            released, self._waiting = self._waiting, []
            for index, one in enumerate(released):
                self._tell(one, index)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        waiting, self._waiting = self._waiting, []
        for session in waiting:
            self._tell(session)

    def _tell(self, session: Channel, index: int | None = None) -> None:
        # A few bytes to one who waits for nothing else always fit into the socket; who is gone is heard of later.
        broken = BarrierBrokenError(f"the barrier is broken: {self._broken}")
        try:
            if index is None:
                session.send(BARRIERS.describe(broken), {})
            else:
                session.send(None, {"index": index})
        except FlashpointError as error:
            _log.debug("a process could not be told of a barrier: %s", error)


class Barrier:
    """A place where processes, or threads, wait for each other; reusable.

    It is broken when a waiting one gives up or dies, when a process that has waited before ends without a farewell
    (SIGKILL), when a member of a `ProcessGroup` that it is an argument of fails, or by `abort`: then all who wait, and
    all who come later, get `BarrierBrokenError` until `reset`. A handle is thread-safe and picklable; the process that
    made it has to live as long as it is used.

    Args:
        parties: how many have to wait for all to pass.
        timeout: seconds, for every `wait` that does not give its own.

    Raises:
        InvalidArgumentError: an argument is out of range.
    """

    def __init__(self, parties: int, *, timeout: float | None = None) -> None:
        checked_integer("parties", parties, 1)
        _check_timeout(timeout)
        secret = secrets.token_bytes(32)
        host = native_ray.own_host() if native_ray.is_on_ray() else None
        self._server: BarrierServer | None = BarrierServer(parties, secret, host)
        weakref.finalize(self, self._server.close)
        self._set_up(self._server.address, secret, parties, timeout)

    def _set_up(self, address: Address, secret: bytes, parties: int, timeout: float | None) -> None:
        self._address, self._secret, self._parties, self._timeout = address, secret, parties, timeout
        self._idle: list[Connection] = []
        """Connections that have waited: whoever waits takes one, or makes one. In a forked child they are closed."""
        self._says_farewell = 0  # process that it is seen to in
        _handles.add(self)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._address, self._secret, self._parties, self._timeout

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._server = None
        self._set_up(*state)

    @property
    def parties(self) -> int:
        """Number of those who have to wait for all to pass."""
        return self._parties

    @property
    def n_waiting(self) -> int:
        """Number of those who wait at the moment."""
        return int(self._ask("state")["waiting"])

    @property
    def broken(self) -> bool:
        """True if it is broken."""
        return bool(self._ask("state")["broken"])

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
        with _gone(f"not all came to the barrier within {timeout} s"):
            line = self._line()
            try:
                # Who gives up hangs up without a farewell: that breaks the barrier for all.
                reply = line.request("wait", {}, timeout_s=_NO_END_S if timeout is None else timeout)
            finally:
                if not line.closed:
                    self._idle.append(line)
            return int(reply.fields["index"])

    def abort(self, reason: str = "it was aborted") -> None:
        """Break it: all who wait and who come get `BarrierBrokenError`."""
        self._ask("abort", reason=reason[:_MOST_REASON])

    def reset(self) -> None:
        """Make a broken one usable again. Those who wait get `BarrierBrokenError`."""
        self._ask("reset", reason="it was reset")

    def close(self) -> None:
        """End it for all, in the process that made it; elsewhere let go of it."""
        if self._server is not None:
            self._server.close()
        _leave(self._idle)

    def _line(self) -> Connection:
        with contextlib.suppress(IndexError):
            while (line := self._idle.pop()).closed:
                pass
            return line
        if self._says_farewell != os.getpid():
            self._says_farewell = os.getpid()
            # By multiprocessing's means, as its children end without `atexit`, and forget what their parents had.
            multiprocessing.util.Finalize(self, _leave, (self._idle,), exitpriority=10)
        return Connection(self._address, self._secret, BARRIERS, connect_timeout_s=_REPLY_S)

    def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Ask something that is answered at once, by a connection whose end breaks nothing."""
        with (
            _gone(f"the barrier did not answer within {_REPLY_S} s"),
            Connection(self._address, self._secret, BARRIERS, connect_timeout_s=_REPLY_S) as line,
        ):
            return line.request(op, fields, timeout_s=_REPLY_S).fields


_handles: weakref.WeakSet[Barrier] = weakref.WeakSet()


def _check_timeout(timeout: float | None) -> None:
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise InvalidArgumentError("must be a number of seconds", argument="timeout", value=timeout)


@contextlib.contextmanager
def _gone(too_late: str) -> Iterator[None]:
    """Errors of the network in the words of barriers."""
    try:
        yield
    except DDictTimeoutError as error:
        raise DDictTimeoutError(too_late) from error
    except (ConnectionLostError, AuthenticationError) as error:
        raise DDictDestroyedError(f"the barrier is gone: {error.message}") from error


def _leave(lines: list[Connection]) -> None:
    """Let go of a barrier in order: what becomes of this process is nothing to it any more."""
    for line in lines:
        line.leave("bye")


def say_farewell() -> None:
    """Let go of all barriers of this process, which ends in order."""
    for barrier in list(_handles):
        _leave(barrier._idle)
