"""The barrier of processes itself, in the process that made it.

Owns who waits, who is released, and what they are told, over a Unix socket; `native_barrier` has the other end of it,
and says why it is made like that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.util
import os
import secrets
import selectors
import socket
import struct
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

RECEIVED = 4096
"""Bytes to receive at a time."""

_MOST_LINE_BYTES = 4096
_END_S = 10.0


@dataclass(eq=False)
class _Peer:
    sock: socket.socket
    received: bytes = b""
    known: bool = False
    has_waited: bool = False


class BarrierServer:
    """The barrier itself: one thread that hears everybody."""

    def __init__(self, parties: int, action: Callable[[], object] | None) -> None:
        self.token = secrets.token_hex(16)
        self.address = f"\0mlf-barrier-{secrets.token_hex(16)}"
        self._parties, self._action = parties, action
        self._broken = ""
        self._waiting: list[_Peer] = []
        self._passing: list[_Peer] = []
        """Those who wait for the action, and for nobody else."""
        self._acting = False
        self._peers: set[_Peer] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._awake, self._waker = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._awake, selectors.EVENT_READ, lambda: self._awake.recv(RECEIVED))
        _servers.add(self)
        _ensure_finalizer()
        self._thread = threading.Thread(target=self._serve, name="ddict-barrier", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it: all connections close."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        _servers.discard(self)
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_END_S)
        self._close_sockets()

    def abandon(self) -> None:
        """In a forked child: the sockets are the parent's."""
        self._closed = True
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._selector.close()
        for sock in (self._listener, self._awake, self._waker, *(peer.sock for peer in list(self._peers))):
            sock.close()

    def abort(self, reason: str) -> None:
        """Break it, from any thread."""
        with self._lock:
            self._break(reason)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if not self._closed:
                    key.data()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if not is_this_user(sock):
            sock.close()
            return
        sock.setblocking(False)
        peer = _Peer(sock)
        self._peers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._hear(peer))

    def _hear(self, peer: _Peer) -> None:
        if peer not in self._peers:
            return
        try:
            data = peer.sock.recv(RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        with self._lock:
            for line in lines:
                if not self._heed(peer, line):
                    self._drop(peer)
                    return
            if not data or len(peer.received) > _MOST_LINE_BYTES:
                if peer.has_waited:
                    self._break("a process that uses it died, or gave up")
                self._drop(peer)

    def _heed(self, peer: _Peer, line: bytes) -> bool:
        """Do what a peer says; whether to listen on."""
        if not peer.known:
            peer.known = secrets.compare_digest(line, self.token.encode())
            return peer.known
        try:
            message = json.loads(line)
            op = message["op"]
        except (ValueError, KeyError, TypeError):
            return False
        if op == "wait":
            self._join(peer)
        elif op == "state":
            self._reply(peer, waiting=len(self._waiting) + len(self._passing), broken=self._broken)
        elif op == "abort":
            self._break(str(message.get("reason")))
            self._reply(peer)
        elif op == "reset":
            self._break("it was reset")
            self._broken = ""
            self._reply(peer)
        else:
            return False  # a farewell
        return True

    def _join(self, peer: _Peer) -> None:
        if self._broken:
            self._reply(peer, broken=self._broken)
            return
        peer.has_waited = True
        self._waiting.append(peer)
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

    def _act(self, passing: list[_Peer]) -> None:
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
            self._reply(one, index=index)

    def _break(self, reason: str) -> None:
        self._broken = self._broken or reason
        waiting, self._passing, self._waiting = [*self._passing, *self._waiting], [], []
        for peer in waiting:
            self._reply(peer, broken=self._broken)

    def _reply(self, peer: _Peer, **fields: Any) -> None:
        # A few bytes to one who waits for nothing else always fit into the socket; who is gone is heard of later.
        with contextlib.suppress(OSError):
            peer.sock.sendall(json.dumps(fields).encode() + b"\n")

    def _drop(self, peer: _Peer) -> None:
        self._peers.discard(peer)
        for waiting in (self._waiting, self._passing):
            if peer in waiting:
                waiting.remove(peer)
        self._selector.unregister(peer.sock)
        peer.sock.close()


def is_this_user(connection: socket.socket) -> bool:
    """Whether the process at the other end, or the one that listened there, is of this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


_servers: weakref.WeakSet[BarrierServer] = weakref.WeakSet()
_finalizer_of: int | None = None


def _ensure_finalizer() -> None:
    # By multiprocessing's means, since its children end without `atexit`, and forget what was theirs before the fork.
    global _finalizer_of
    if _finalizer_of != os.getpid():
        _finalizer_of = os.getpid()
        multiprocessing.util.Finalize(None, _close_servers, exitpriority=5)


def _close_servers() -> None:
    for server in list(_servers):
        server.close()


def _abandon_servers() -> None:
    # Kept open in a forked child, they would hide the parent's death from the others.
    for server in list(_servers):
        server.abandon()
    _servers.clear()


os.register_at_fork(after_in_child=_abandon_servers)
