"""A barrier of processes, in the process that made it, and its picklable handles."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import weakref
from collections.abc import Sequence
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
"""A client says ``wait``, which is answered when all are there, ``state``, ``abort`` or ``reset``."""

_REPLY_S = 30.0
_NO_END_S = 1e6
_MOST_REASON = 1000


class _Meeting:
    """The barrier itself, as the handler of its server. A connection that ends while it waits breaks it."""

    def __init__(self, parties: int, secret: bytes, host: str | None) -> None:
        self._parties = parties
        self._broken = ""
        self._waiting: list[Channel] = []
        self._lock = threading.Lock()
        # An abstract name: there is no file that could outlive a process.
        unix_path = f"\0mlf-barrier-{secrets.token_hex(16)}" if host is None else None
        most = 4 * parties + 100
        self._server = RequestServer(secret, self, BARRIERS, unix_path=unix_path, tcp_host=host, max_connections=most)
        self.address: Address = self._server.addresses[0]

    def open(self, peer: Peer) -> Channel:
        """See `RequestHandler`."""
        assert peer.channel is not None
        return peer.channel

    def handle(
        self, session: Channel, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Any]] | None:
        """See `RequestHandler`."""
        with self._lock:
            if op == "wait":
                if self._broken:
                    raise self._error()
                self._waiting.append(session)
                if len(self._waiting) == self._parties:
                    self._answer(None, [{"index": index} for index in range(self._parties)])
                return None  # told by whoever releases it
            if op == "state":
                return {"waiting": len(self._waiting), "broken": self._broken}, ()
            if op not in ("abort", "reset"):
                raise ProtocolError(f"there is no operation {op!a}")
            self._break(text(fields, "reason"))
            self._broken = self._broken if op == "abort" else ""
            return {}, ()

    def closed(self, session: Channel) -> None:
        """See `RequestHandler`."""
        with self._lock:
            if session in self._waiting:
                self._waiting.remove(session)
                self._break("a process that waited at it died, or gave up")

    def close(self) -> None:
        """End it: all connections close."""
        with self._lock:
            self._waiting.clear()  # or the first connection that ends would break it for the others
        self._server.close()

    def _error(self) -> BarrierBrokenError:
        return BarrierBrokenError(f"the barrier is broken: {self._broken}")

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._answer(BARRIERS.describe(self._error()), [{}] * len(self._waiting))

    def _answer(self, subject: dict[str, Any] | None, answers: list[Fields]) -> None:
        released, self._waiting = self._waiting, []
        for session, fields in zip(released, answers, strict=True):
            # A few bytes to one who waits for nothing else always fit into the socket; who is gone is heard of later.
            try:
                session.send(subject, fields)
            except FlashpointError as error:
                _log.debug("a process could not be told of a barrier: %s", error)


class Barrier:
    """A place where processes, or threads, wait for each other; reusable.

    It is broken when one who waits gives up or dies, when a member of a `ProcessGroup` that it is an argument of fails,
    or by `abort`: then all who wait, and all who come later, get `BarrierBrokenError` until `reset`. A handle is
    thread-safe and picklable; the process that made it has to live as long as it is used.

    Args:
        parties: how many have to wait for all to pass.
        timeout: seconds, for every `wait` that does not give its own; None: without end.
    """

    def __init__(self, parties: int, *, timeout: float | None = None) -> None:
        self._parties = checked_integer("parties", parties, 1)
        self._timeout = _checked_timeout(timeout)
        self._secret = secrets.token_bytes(32)
        host = native_ray.own_host() if native_ray.is_on_ray() else None
        self._meeting: _Meeting | None = _Meeting(parties, self._secret, host)
        self._address = self._meeting.address
        weakref.finalize(self, self._meeting.close)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_meeting": None}

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
        """Wait until as many as there are parties do. Return a number from 0, another one for each of them.

        Raises:
            BarrierBrokenError: not all came: one died, or gave up.
            DDictTimeoutError: not in ``timeout`` seconds, or those of the barrier: this one gives up, which breaks it.
            DDictDestroyedError: the process that made the barrier is gone, or has closed it.
        """
        timeout = self._timeout if timeout is None else _checked_timeout(timeout)
        too_late = f"not all came to the barrier within {timeout} s"
        return int(self._request("wait", {}, _NO_END_S if timeout is None else timeout, too_late)["index"])

    def abort(self, reason: str = "it was aborted") -> None:
        """Break it: all who wait and who come get `BarrierBrokenError`."""
        self._ask("abort", reason=reason[:_MOST_REASON])

    def reset(self) -> None:
        """Make a broken one usable again. Those who wait get `BarrierBrokenError`."""
        self._ask("reset", reason="it was reset")

    def close(self) -> None:
        """End it for all, in the process that made it; elsewhere nothing happens."""
        if self._meeting is not None:
            self._meeting.close()

    def _ask(self, op: str, **fields: Any) -> Fields:
        return self._request(op, fields, _REPLY_S, f"the barrier did not answer within {_REPLY_S} s")

    def _request(self, op: str, fields: Fields, timeout_s: float, too_late: str) -> Fields:
        """Ask by a connection of its own: the end of one that waits tells that its process is gone."""
        try:
            with Connection(self._address, self._secret, BARRIERS, connect_timeout_s=_REPLY_S) as line:
                return line.request(op, fields, timeout_s=timeout_s).fields
        except DDictTimeoutError as error:
            raise DDictTimeoutError(too_late) from error
        except (ConnectionLostError, AuthenticationError) as error:
            raise DDictDestroyedError(f"the barrier is gone: {error.message}") from error


def _checked_timeout(timeout: float | None) -> float | None:
    if timeout is not None and not 0 <= timeout < float("inf"):
        raise InvalidArgumentError("must be a number of seconds", argument="timeout", value=timeout)
    return timeout
