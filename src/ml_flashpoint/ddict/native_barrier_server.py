"""The barrier of processes itself, in the process that made it.

Owns who waits, who is released, and what they are told: a handler of requests (`net.server`), whose sessions end with
the processes that they are of. `native_barrier` is the other end of it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ml_flashpoint.ddict import errors as ddict_errors
from ml_flashpoint.ddict.errors import BarrierBrokenError, DDictError, DDictTimeoutError
from ml_flashpoint.format import errors as core_errors
from ml_flashpoint.format.errors import FlashpointError, ProtocolError
from ml_flashpoint.net.channel import Channel
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Dialect, Fields, errors_of, text
from ml_flashpoint.net.server import Peer, RequestServer

_log = logging.getLogger(__name__)

BARRIERS: Final = Dialect(
    purpose=b"ml_flashpoint.ddict barrier",
    errors=errors_of(core_errors, ddict_errors),
    failure=DDictError,
    timeout=DDictTimeoutError,
    json_bytes=64 << 10,
    blobs=0,
)
"""A client says ``wait``, which is answered when all are there; ``state``, ``abort``, ``reset``; and ``bye`` before it
leaves in order."""


@dataclass(eq=False, slots=True)
class _Session:
    channel: Channel
    counts: bool = False
    """Whether it has waited, and not said farewell: its end is that of a process that others count on."""


class BarrierServer:
    """The barrier itself.

    Args:
        action: called before each release, on a thread of its own.
        host: address of this machine that processes on others reach it at; None: there are none.
    """

    def __init__(self, parties: int, action: Callable[[], object] | None, host: str | None = None) -> None:
        self._parties, self._action = parties, action
        self._broken = ""
        self._waiting: list[_Session] = []
        self._passing: list[_Session] = []
        """Those who wait for the action, and for nobody else."""
        self._acting = self._is_closed = False
        self._lock = threading.Lock()
        self.secret = secrets.token_bytes(32)
        self._server = RequestServer(
            self.secret,
            self,
            BARRIERS,
            # An abstract name: there is no file that could outlive a process.
            unix_path=f"\0mlf-barrier-{secrets.token_hex(16)}" if host is None else None,
            tcp_host=host,
            max_connections=4 * parties + 100,
        )

    @property
    def address(self) -> Address:
        """Where it is."""
        return self._server.addresses[0]

    def close(self) -> None:
        """End it: all connections close."""
        with self._lock:
            self._is_closed = True
        self._server.close()

    def abort(self, reason: str) -> None:
        """Break it, from any thread."""
        with self._lock:
            self._break(reason)

    # ---- requests: see `RequestHandler` -------------------------------------------------------------------

    def open(self, peer: Peer) -> _Session:
        """A thread of some process has connected."""
        assert peer.channel is not None
        return _Session(peer.channel)

    def handle(
        self, session: _Session, op: str, fields: Fields, blobs: list[bytes]
    ) -> tuple[Fields, Sequence[Any]] | None:
        """Do what it says."""
        with self._lock:
            if op == "wait":
                self._join(session)
                return None  # told by whoever releases it
            if op == "state":
                return {"waiting": len(self._waiting) + len(self._passing), "broken": self._broken}, ()
            if op == "bye":
                session.counts = False
            elif op in ("abort", "reset"):
                self._break(text(fields, "reason"))
                self._broken = self._broken if op == "abort" else ""
            else:
                raise ProtocolError(f"there is no operation {op!a}")
            return {}, ()

    def closed(self, session: _Session) -> None:
        """It has gone, one way or another."""
        with self._lock:
            for waiting in (self._waiting, self._passing):
                if session in waiting:
                    waiting.remove(session)
            if session.counts and not self._is_closed:
                self._break("a process that uses it died, or gave up")

    # ---- the barrier --------------------------------------------------------------------------------------

    def _join(self, session: _Session) -> None:
        if self._broken:
            self._tell(session)
            return
        session.counts = True
        self._waiting.append(session)
        self._pass_if_all_are_here()

    def _pass_if_all_are_here(self) -> None:
        if self._acting or len(self._waiting) < self._parties:
            return
        self._passing, self._waiting = self._waiting[: self._parties], self._waiting[self._parties :]
        if self._action is None:
            self._release()
            return
        # Not on this thread, and not under the lock: the action may use the barrier.
        try:
            threading.Thread(target=self._act, args=(self._passing,), name="ddict-barrier-action", daemon=True).start()
            self._acting = True
        except RuntimeError as error:
            self._break(f"its action cannot be called: {error}")

    def _act(self, passing: list[_Session]) -> None:
        assert self._action is not None
        failure = ""
        try:
            self._action()
        except BaseException as error:
            _log.exception("the action of a barrier failed")
            failure = f"its action failed: {type(error).__name__}: {error}"
        with self._lock:
            self._acting = False
            # Else it was broken meanwhile, and they know. It may be whole again, for others than these.
            if self._passing is passing:
                if failure:
                    self._break(failure)
                else:
                    self._release()
            # Others may have come meanwhile.
            self._pass_if_all_are_here()

    def _release(self) -> None:
        released, self._passing = self._passing, []
        for index, one in enumerate(released):
            self._tell(one, index)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        waiting, self._passing, self._waiting = [*self._passing, *self._waiting], [], []
        for session in waiting:
            self._tell(session)

    def _tell(self, session: _Session, index: int | None = None) -> None:
        # A few bytes to one who waits for nothing else always fit into the socket; who is gone is heard of later.
        broken = BarrierBrokenError(f"the barrier is broken: {self._broken}")
        try:
            if index is None:
                session.channel.send(BARRIERS.describe(broken), {})
            else:
                session.channel.send(None, {"index": index})
        except FlashpointError as error:
            _log.debug("a process could not be told of a barrier: %s", error)
