"""Whoever connects, until it has proved that it knows the job's secret.

Owns the handshakes of a service: all of them in one thread, none of which is ever waited for, so that a flood of
strangers costs an accept and a close each and peers still get in within milliseconds. What an authenticated connection
is for belongs to `transfer_service`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ml_flashpoint.core.errors import DeadlineError, FlashpointError
from ml_flashpoint.replication import wire
from ml_flashpoint.replication.channel import ConnectionLostError, track

_ACCEPTS_IN_A_ROW = 64
_KNOWN_HOSTS = 4096
_LONGEST_WAIT_S = 1.0


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection in the handshake."""

    sock: socket.socket
    host: str
    peer: str
    until: float
    handshake: wire.ServerHandshake
    received: bytearray = field(default_factory=bytearray)


class Reception:
    """See the module. For one thread.

    Args:
        listener: of the service; made non-blocking.
        secret: the job's.
        deadline_s: seconds that a whole handshake may take.
        admit: called with each connection that is authenticated, who it is, and its keys. Owns the socket then.
        tell: called with a peer that was dropped, and why.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        *,
        deadline_s: float,
        admit: Callable[[socket.socket, str, wire.SessionKeys], None],
        tell: Callable[[str, FlashpointError | OSError], None],
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._deadline_s = deadline_s
        self._admit = admit
        self._tell = tell
        self._guests: OrderedDict[_Guest, None] = OrderedDict()  # oldest first
        self._known: OrderedDict[str, None] = OrderedDict()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

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
            track(sock)
            sock.setblocking(False)
            peer, until = f"{address[0]} port {address[1]}", time.monotonic() + self._deadline_s
            guest = _Guest(sock, address[0], peer, until, wire.ServerHandshake(self._secret, peer))
            if len(self._guests) >= wire.MAX_HANDSHAKES:
                self._drop(self._least_welcome(), None)
            self._guests[guest] = None
            self._selector.register(sock, selectors.EVENT_READ, guest)
            self._go_on(guest)  # most have sent their hello by now

    def _least_welcome(self) -> _Guest:
        """Whoever opens connections without end can so delay others, but not lock them out: the oldest of the host that
        has most, and one that nobody was ever authenticated from before one that somebody was."""
        counts = Counter(guest.host for guest in self._guests)
        return max(self._guests, key=lambda guest: (guest.host not in self._known, counts[guest.host]))

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
            self._drop(guest, error)
            return
        del self._guests[guest]
        self._selector.unregister(guest.sock)
        self._known[guest.host] = None
        self._known.move_to_end(guest.host)
        if len(self._known) > _KNOWN_HOSTS:
            self._known.popitem(last=False)
        self._admit(guest.sock, guest.peer, handshake.keys)

    def _drop(self, guest: _Guest, error: FlashpointError | OSError | None) -> None:
        del self._guests[guest]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.sock)
        guest.sock.close()
        if error is not None:
            self._tell(guest.peer, error)
