"""This process's nursery: started when the first dictionary needs it, shared by all, ended after the last.

Owns the nursery's process, the socket to it and the one thread that reads from it. What its messages mean for the
managers of one dictionary is `embedded`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.spawn
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from ml_flashpoint.ddict.errors import DDictError

_log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 10
_END_TIMEOUT_S = 15.0
_MARGIN_S = 5.0
# Not `-m`: that would put the current directory first on the path, whatever lies there.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ml_flashpoint.ddict.nursery import main; main(int(sys.argv[1]))"
)


class NurseryClient:
    """A nursery process and the line to it. Thread-safe.

    Attributes:
        lost: set when the nursery has ended without being asked to; all managers end then, too.
    """

    def __init__(self) -> None:
        self._send_lock = threading.Lock()
        self._listeners: dict[str, Callable[[dict[str, Any] | None], None]] = {}
        self._closing = False
        self.lost = False
        self._socket, remote = socket.socketpair()
        # Sending times out, reading does not.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_TIMEOUT_S, 0))
        with remote:
            argv = [multiprocessing.spawn.get_executable(), "-c", _PROGRAM, str(remote.fileno()), json.dumps(sys.path)]
            self._process = subprocess.Popen(
                argv,
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),
                # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name="ddict-nursery", daemon=True)
        self._reader.start()

    def send(self, op: str, **fields: Any) -> None:
        """Send a message.

        Raises:
            DDictError: the nursery is gone, or does not read.
        """
        data = json.dumps({"op": op, "sys_path": sys.path, **fields}).encode() + b"\n"
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError as error:
            raise DDictError(f"the nursery of the managers (pid {self.pid}) is gone: {error}") from error

    def listen(self, group: str, listener: Callable[[dict[str, Any] | None], None]) -> None:
        """Have a function called, on the reader's thread, with each message about a group, and with None if the
        nursery is lost."""
        self._listeners[group] = listener
        if self.lost:
            listener(None)

    def forget(self, group: str) -> None:
        """Undo `listen`."""
        self._listeners.pop(group, None)

    def kill(self) -> None:
        """SIGKILL, for a nursery that does not answer: managers notice and end."""
        self._process.kill()
        self._reader.join(_END_TIMEOUT_S)

    def close(self) -> None:
        """End the nursery, which has no managers any more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._reader.join(_END_TIMEOUT_S)  # until the nursery's end of the socket is closed
        try:
            self._process.wait(_MARGIN_S)
        except subprocess.TimeoutExpired:
            _log.error("the nursery of the managers (pid %d) did not end and is killed", self.pid)
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)
            self._reader.join(_END_TIMEOUT_S)
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: let go of the socket, which is the parent's."""
        self._closing = True
        self._send_lock = threading.Lock()
        self._listeners = {}
        self._socket.close()
        self._process.returncode = 0  # it is not this process's child: nothing to wait for

    def _read(self) -> None:
        # Not by a file of the socket, which would keep it open in a forked child.
        rest = b""
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    listener = self._listeners.get(message["group"])
                    if listener is not None:
                        listener(message)
        if self._closing:
            return
        # No more is sent once the socket is at its end; a nursery that closed it and lives on is of no use.
        self._process.kill()
        code = self._process.wait()
        _log.error("the nursery of the managers (pid %d) ended with exit code %d", self.pid, code)
        self.lost = True
        for listener in list(self._listeners.values()):
            listener(None)


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2


_lock = threading.Lock()
_current: NurseryClient | None = None
_users: dict[int, int] = {}


def acquire_nursery() -> NurseryClient:
    """This process's nursery, for use until `release_nursery`; started if there is none.

    A program that makes many dictionaries, one after the other, saves a second each time if it keeps a use of its own.
    """
    global _current
    with _lock:
        if _current is None or _current.lost:
            _current = NurseryClient()
        _users[id(_current)] = _users.get(id(_current), 0) + 1
        return _current


def release_nursery(nursery: NurseryClient) -> None:
    """End one use of a nursery, and after the last one its process."""
    global _current
    with _lock:
        left = _users.get(id(nursery), 0) - 1
        if left > 0:
            _users[id(nursery)] = left
            return
        _users.pop(id(nursery), None)
        if nursery is _current:
            _current = None
    nursery.close()


def _after_fork_in_child() -> None:
    # The child has neither the reader's thread nor a right to the managers; kept open, the socket would hide the
    # parent's death from them.
    global _current, _lock
    _lock = threading.Lock()
    for nursery in _open_nurseries():
        nursery.abandon()
    _current = None
    _users.clear()


def _open_nurseries() -> list[NurseryClient]:
    return [] if _current is None else [_current]


os.register_at_fork(after_in_child=_after_fork_in_child)
