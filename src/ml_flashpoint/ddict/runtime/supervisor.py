"""The processes of managers, as seen by the process that made the dictionary.

Owns this process's fork server (started when the first manager is, and ended with this process), and one thread for
each manager, which starts it again when it dies. What is forked, and how, is `fork_server`'s; what a dictionary does
with its managers is `embedded`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import multiprocessing.spawn
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ml_flashpoint.net.channel import timeval, track

_log = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds or before it serves, stays down."""

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 2.0
"""Seconds until a manager that could not be forked again is tried once more: twice as long each time, and at most."""
_ANSWER_S = 30.0
_END_S = 30.0
_SEND_S = 10.0
_WITHOUT_END = bytes(len(timeval(1.0)))  # no limit
_RECEIVED = 1 << 16
# Not `-m`: that would put the current directory first on the path, whatever lies there.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ml_flashpoint.ddict.runtime.fork_server import main; main(int(sys.argv[1]))"
)


@dataclass(eq=False)
class Forked:
    """A manager's process."""

    pid: int
    control: socket.socket
    _watched: int
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kill(self) -> None:
        """SIGKILL, to this process and no other that has its id, or its descriptor, by now."""
        with self._lock, contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._watched, signal.SIGKILL)

    def reap(self) -> None:
        """Make sure that it has ended."""
        self.kill()
        poll = select.poll()
        poll.register(self._watched, select.POLLIN)
        if not poll.poll(_END_S * 1000):
            _log.error("the process %d of a manager does not end although it was killed", self.pid)
        self.close()

    def close(self) -> None:
        """Let go of it, without ending it."""
        self.control.close()
        with self._lock:
            watched, self._watched = self._watched, -1
            if watched >= 0:
                os.close(watched)


class ForkServer:
    """A fork server's process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            track(ours)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(_SEND_S))
            executable = multiprocessing.spawn.get_executable()
            self._process = subprocess.Popen(
                [executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),
                # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
                start_new_session=True,
            )
        self._socket = ours
        self.pid = self._process.pid

    def fork(self) -> Forked:
        """Fork a manager, which waits for its first line.

        Raises:
            OSError: there is none; `ConnectionError`, if the fork server has ended, or does not answer.
        """
        with contextlib.ExitStack() as undo:
            control, its_control = socket.socketpair()
            undo.enter_context(control)
            track(control)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(_ANSWER_S))
            control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(_SEND_S))
            with its_control:
                socket.send_fds(self._socket, [b"f"], [its_control.fileno()])
            try:
                answer, watched, _, _ = socket.recv_fds(control, _RECEIVED, 1)
            except (BlockingIOError, ConnectionError) as error:
                raise ConnectionError(f"the fork server (pid {self.pid}) does not answer") from error
            if not answer and not self.is_alive():
                raise ConnectionError(f"the fork server (pid {self.pid}) has ended")
            said: dict[str, Any] = json.loads(answer or b"{}")
            if not watched:  # without a word: it could not take the socket, or this process not the descriptor
                raise OSError(said.get("error") or os.strerror(errno.EMFILE))
            control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _WITHOUT_END)
            undo.pop_all()
        return Forked(int(said["pid"]), control, watched[0])

    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill it. Managers that it has forked live on."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def abandon(self) -> None:
        """In a forked child: it is not this process's child, and there is nothing to wait for."""
        self._process.returncode = 0


_lock = threading.Lock()
_current: ForkServer | None = None


def fork_server() -> ForkServer:
    """This process's fork server, started if there is none."""
    global _current
    with _lock:
        if _current is None or not _current.is_alive():
            if _current is not None:
                _log.error("the fork server of the managers (pid %d) has ended; there is another one now", _current.pid)
            _current = ForkServer()
        return _current


def _fork() -> Forked:
    server = fork_server()
    try:
        return server.fork()
    except ConnectionError:
        server.end()
        return fork_server().fork()


def _end_at_exit() -> None:
    if _current is not None:
        _current.end()


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.abandon()
    _current = None


atexit.register(_end_at_exit)  # after those of whoever imports this
os.register_at_fork(after_in_child=_after_fork_in_child)


class Supervised:
    """A manager, and the thread that looks after it.

    Args:
        told: what it is told, but for its configuration: `entry`, `folder`, `env`, `cwd`.
        config: its configuration, without what is another one for each process.
        changed: held while anything here changes, and notified then.
        restarted: whether there was one before, in another place.
    """

    def __init__(
        self,
        number: int,
        told: Mapping[str, Any],
        config: Mapping[str, Any],
        changed: threading.Condition,
        restarted: bool = False,
    ) -> None:
        self.number = number
        self.pid: int | None = None
        """Of its process, while there is one."""
        self.ready_pid: int | None = None
        """Of its process, while that serves."""
        self.failure = ""
        """Why it could not start."""
        self.down = ""
        """How it died for the last time."""
        self._told, self._config = dict(told), dict(config)
        self._changed = changed
        self._stopping = threading.Event()
        self._has_begun = False
        self._error = ""
        self._process: Forked | None = None
        self._deaths: deque[float] = deque()
        name = f"ddict-supervisor-{number}"
        self._thread = threading.Thread(target=self._supervise, args=(restarted,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell it to end."""
        with self._changed:
            self._stopping.set()
            process = self._process
        if process is not None:
            with contextlib.suppress(OSError):
                process.control.send(b"stop\n")

    def join(self, give_up: float) -> None:
        """Wait for its end until then, and kill it if it has not come. Whoever calls this has called `stop`."""
        self._thread.join(max(0.0, give_up - time.monotonic()))
        process = self._process
        if self._thread.is_alive() and process is not None:
            process.kill()
        self._thread.join(_ANSWER_S)

    def abandon(self) -> None:
        """In a forked child: it is not the child's."""
        if self._process is not None:
            self._process._lock = threading.Lock()  # may be held by a thread that does not exist here
            self._process.close()

    # ---- the thread ---------------------------------------------------------------------------------------

    def _supervise(self, restarted: bool) -> None:
        while not self._stopping.is_set():
            process = self._start(restarted)
            if process is None:
                return
            self._listen(process)
            process.reap()
            with self._changed:
                how = f"failed: {self._error.splitlines()[-1]}" if self._error else "ended without a word"
                served, self._process, self.pid, self.ready_pid = self.ready_pid is not None, None, None, None
                self._has_begun |= served
                if not self._stopping.is_set():
                    if not self._has_begun:
                        self.failure = self._error or f"its process {how}"
                        self._stopping.set()
                    else:
                        self._note_death(process.pid, how, served=served)
                self._changed.notify_all()
            restarted = True

    def _start(self, restarted: bool) -> Forked | None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                process = _fork()
            except (OSError, ValueError) as error:
                if not restarted:
                    with self._changed:
                        self.failure = f"its process cannot be made: {error}"
                        self._changed.notify_all()
                    return None
                # No death, so it does not count as one: what the system lacks now, it may have whenever others end.
                _log.warning(
                    "manager %d of %s could not be forked again, and is tried once more in %g s: %s",
                    *(self.number, self._told["folder"], retry_s, error),
                )
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            with self._changed:
                self._process, self.pid, self._error = process, process.pid, ""
                self._changed.notify_all()
            config = {**self._config, "incarnation": secrets.token_hex(8), "restarted": restarted}
            told = {**self._told, "manager": self.number, "config": config, "sys_path": sys.path}
            with contextlib.suppress(OSError):  # its end is noticed by reading
                process.control.sendall(json.dumps(told).encode() + b"\n" + (b"stop\n" * self._stopping.is_set()))
            return process
        return None

    def _listen(self, process: Forked) -> None:
        """Hear what a process says, until it ends."""
        rest = b""
        with contextlib.suppress(OSError):
            while data := process.control.recv(_RECEIVED):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    said = json.loads(line)
                    with self._changed:
                        self._error = said.get("error", "")
                        if "ready" in said:
                            self.ready_pid = process.pid
                        self._changed.notify_all()

    def _note_death(self, pid: int, how: str, *, served: bool) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        # One that cannot even start may take any time for that, on a busy machine.
        while served and self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) <= MOST_DEATHS:
            _log.warning(
                "manager %d of %s (pid %d) %s and is started again", self.number, self._told["folder"], pid, how
            )
            return
        self.down = how
        self._stopping.set()
        _log.error(
            "manager %d of %s (pid %d) %s, the last of more than %d times within %g s or in a row, and stays down",
            *(self.number, self._told["folder"], pid, how, MOST_DEATHS, DEATHS_WITHIN_S),
        )


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
