"""Whoever connects, until it has proved that it knows the secret.

Owns the handshakes of a listener: all of them in one thread, none of which is ever waited for, so that a flood of
unauthenticated clients costs an accept and a close each, and peers still get in. What an authenticated connection is
for belongs to `server`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from ml_flashpoint.format.at_exit import close_in_children
from ml_flashpoint.format.errors import AuthenticationError, DeadlineError, FlashpointError
from ml_flashpoint.net.channel import ConnectionLostError
from ml_flashpoint.net.handshake import REFUSED, ServerHandshake, SessionKeys

MAX_HANDSHAKES: Final = 128
"""Connections in the handshake at once; the oldest of the host that has most is dropped for a newcomer."""

_ACCEPTS_IN_A_ROW = 32  # then those who have answered meanwhile are heard
_KNOWN_HOSTS = 4096
_LONGEST_WAIT_S = 1.0
_PAUSE_S = 0.1


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection in the handshake."""

    sock: socket.socket
    host: str
    peer: str
    until: float
    handshake: ServerHandshake
    received: bytearray = field(default_factory=bytearray)


def internet_peer(sock: socket.socket, address: Any) -> tuple[str, str]:
    """The host that somebody connects from over TCP, and what to call the connection."""
    return address[0], f"{address[0]} port {address[1]}"


class Reception:
    """See the module. For one thread.

    Args:
        listener: of the service; made non-blocking.
        secret: what is to be proved, see `handshake.proved_secret`.
        deadline_s: seconds that a whole handshake may take.
        admit: called with each connection that is authenticated, who it is, and its keys. Owns the socket then.
        report: called with a peer that was dropped, and why.
        identify: given a connection and its address, the host it is from and what to call it. A `FlashpointError` drops
            it.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        deadline_s: float,
        admit: Callable[[socket.socket, str, SessionKeys], None],
        report: Callable[[str, FlashpointError | OSError], None],
        identify: Callable[[socket.socket, Any], tuple[str, str]] = internet_peer,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._deadline_s = deadline_s
        self._admit = admit
        self._report = report
        self._identify = identify
        self._guests: OrderedDict[_Guest, None] = OrderedDict()  # oldest first
        self._by_host: dict[str, OrderedDict[_Guest, None]] = {}
        self._known: OrderedDict[str, None] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def run(self, closed: threading.Event, cannot: Callable[[OSError], None]) -> None:
        """Serve until ``closed`` is set and the listener shut down, then hang up on who is not authenticated.

        Args:
            cannot: called with why no connection can be accepted now.
        """
        try:
            while not closed.is_set():
                try:
                    self.serve()
                except OSError as error:
                    if not closed.is_set():
                        cannot(error)
                        closed.wait(_PAUSE_S)  # out of descriptors, say: trying again at once would only spin
        finally:
            self.close()

    def serve(self) -> None:
        """Wait for something to happen, for a second at most, and go on with all handshakes that can.

        Raises:
            OSError: no connection can be accepted now, for want of descriptors, say; or the listener was shut down.
        """
        now = time.monotonic()
        oldest = next(iter(self._guests), None)
        wait_s = _LONGEST_WAIT_S if oldest is None else max(0.0, min(_LONGEST_WAIT_S, oldest.until - now))
        knocked = False
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                knocked = True
            elif key.data in self._guests:
                self._go_on(key.data)
        now = time.monotonic()
        for guest in list(self._guests):
            if guest.until > now:
                break
            self._drop(guest, DeadlineError(f"{guest.peer} did not complete the handshake in time"))
        if knocked:
            self._accept()

    def close(self) -> None:
        """Hang up on everybody who is not authenticated."""
        for guest in list(self._guests):
            self._drop(guest, None)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_IN_A_ROW):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            close_in_children(sock)
            sock.setblocking(False)
            try:
                host, peer = self._identify(sock, address)
            except (FlashpointError, OSError) as error:
                sock.close()
                self._report("somebody", error)
                continue
            until = time.monotonic() + self._deadline_s
            guest = _Guest(sock, host, peer, until, ServerHandshake(self._secret, peer))
            if len(self._guests) >= MAX_HANDSHAKES:
                self._drop(self._least_welcome(), None)
            self._guests[guest] = None
            self._by_host.setdefault(host, OrderedDict())[guest] = None
            self._selector.register(sock, selectors.EVENT_READ, guest)
            self._go_on(guest)  # most have sent their hello by now

    def _least_welcome(self) -> _Guest:
        """Whoever opens connections without end can so delay others, but not lock them out: the oldest of the host that
        has most, and one that nobody was ever authenticated from before one that somebody was."""
        host = max(self._by_host, key=lambda host: (host not in self._known, len(self._by_host[host])))
        return next(iter(self._by_host[host]))

    def _go_on(self, guest: _Guest) -> None:
        handshake = guest.handshake
        try:
            while handshake.keys is None:
                piece = guest.sock.recv(handshake.awaited_bytes - len(guest.received))
                if not piece:
                    raise ConnectionLostError(f"{guest.peer} closed the connection")
                guest.received += piece
                if len(guest.received) == handshake.awaited_bytes:
                    answer = handshake.answer(bytes(guest.received))
                    guest.received.clear()
                    if guest.sock.send(answer, socket.MSG_NOSIGNAL) != len(answer):
                        raise ConnectionLostError(f"{guest.peer} does not read")
        except BlockingIOError:
            return
        except (FlashpointError, OSError) as error:
            if isinstance(error, AuthenticationError):
                with contextlib.suppress(OSError):
                    guest.sock.send(REFUSED, socket.MSG_NOSIGNAL)
            self._drop(guest, error)
            return
        self._forget(guest)
        self._known[guest.host] = None
        self._known.move_to_end(guest.host)
        if len(self._known) > _KNOWN_HOSTS:
            self._known.popitem(last=False)
        self._admit(guest.sock, guest.peer, handshake.keys)

    def _drop(self, guest: _Guest, error: FlashpointError | OSError | None) -> None:
        self._forget(guest)
        guest.sock.close()
        if error is not None:
            self._report(guest.peer, error)

    def _forget(self, guest: _Guest) -> None:
        del self._guests[guest]
        of_host = self._by_host[guest.host]
        del of_host[guest]
        if not of_host:
            del self._by_host[guest.host]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)
