"""The processes of managers, as seen by the process that made the dictionary.

Owns one thread for each manager, which starts it, and again when it dies. What a process does, and is told, is
`served`'s; what a dictionary does with its managers is `embedded`'s.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing.spawn
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ml_flashpoint.net.channel import timeval, track

_log = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds or before it serves, stays down."""

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 2.0
"""Seconds until a process that could not be made is tried once more: twice as long each time, and at most."""
_END_S = 30.0
_SEND_S = 10.0
# Not `-m`: that would put the current directory first on the path, whatever lies there.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ml_flashpoint.ddict.manager.served import main; main(int(sys.argv[1]))"
)


class _Process:
    """A manager's process, and the socket that leads to it. Raises `OSError`: it cannot be made."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            for each in (self.control, theirs):
                track(each)  # a child that is forked meanwhile must not hide the end of the manager
            self.control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(_SEND_S))
            argv = [multiprocessing.spawn.get_executable(), "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)]
            try:
                self._popen = subprocess.Popen(
                    argv,
                    pass_fds=[theirs.fileno()],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=_standard_error(),
                    # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
                    start_new_session=True,
                )
            except BaseException:
                self.control.close()
                raise
        self.pid = self._popen.pid

    def say(self, line: bytes) -> None:
        """Send it a line; its end is noticed by reading."""
        with contextlib.suppress(OSError):
            self.control.sendall(line)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._popen.poll() is None

    def kill(self) -> None:
        """SIGKILL, to this process and no other that has its id by now."""
        self._popen.kill()

    def reap(self) -> str:
        """Make sure that it has ended; how it did. One that is ending anyway keeps its exit code."""
        self.kill()
        self.control.close()
        try:
            code = self._popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            _log.error("the process %d of a manager does not end although it was killed", self.pid)
            return "does not end"
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def abandon(self) -> None:
        """In a forked child: it is not this process's child, and there is nothing to wait for."""
        self._popen.returncode = 0


class Processes:
    """Makes the processes of a dictionary's managers. Thread-safe. ``env``: of each. ``spare``: whether to have one
    more than there are managers, which has imported what it needs already: so a manager that dies is back at once."""

    def __init__(self, env: Mapping[str, str], *, spare: bool) -> None:
        self._env = env
        self._has_spare = spare
        self._spare: _Process | None = None
        self._lock = threading.Lock()

    def take(self) -> _Process:
        """A process that waits to be told which manager it is. Raises `OSError`: none can be made."""
        with self._lock:
            found, self._spare = self._spare, None
        if found is not None and found.is_alive():
            return found
        return _Process(self._env)

    def prepare(self) -> None:
        """Have a spare one, if there is to be one."""
        with self._lock, contextlib.suppress(OSError):  # then the next one is made when it is needed
            if self._has_spare and self._spare is None:
                self._spare = _Process(self._env)

    def close(self) -> None:
        """End the spare one, and have none any more."""
        with self._lock:
            self._has_spare, found, self._spare = False, self._spare, None
        if found is not None:
            found.reap()

    def abandon(self) -> None:
        """In a forked child: it is not the child's."""
        if self._spare is not None:
            self._spare.abandon()


class Supervised:
    """A manager, and the thread that looks after it. ``told``: what it is told, but for its configuration: `entry`,
    `folder`, `cwd`. ``processes``: makes its process. ``config``: its configuration, without what is another one for
    each process. ``changed``: held while anything here changes, and notified then."""

    def __init__(
        self,
        number: int,
        told: Mapping[str, Any],
        processes: Processes,
        config: Mapping[str, Any],
        changed: threading.Condition,
    ) -> None:
        self.number = number
        self.pid: int | None = None  # of its process, while there is one
        self.ready_pid: int | None = None  # of its process, while that serves
        self.failure = ""  # why it could not start
        self.down = ""  # how it died for the last time
        self._told, self._processes, self._config = dict(told), processes, dict(config)
        self._changed = changed
        self._stopping = threading.Event()
        self._has_begun = False
        self._error = ""
        self._process: _Process | None = None
        self._deaths: deque[float] = deque()
        self._thread = threading.Thread(target=self._supervise, name=f"ddict-supervisor-{number}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell it to end."""
        with self._changed:
            self._stopping.set()
            process = self._process
        if process is not None:
            process.say(b"stop\n")

    def join(self, give_up: float) -> None:
        """Wait for its end until then, and kill it if it has not come. Whoever calls this has called `stop`."""
        self._thread.join(max(0.0, give_up - time.monotonic()))
        process = self._process
        if self._thread.is_alive() and process is not None:
            process.kill()
        self._thread.join(_END_S)

    def abandon(self) -> None:
        """In a forked child: it is not the child's."""
        if self._process is not None:
            self._process.abandon()

    # ---- the thread ---------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        restarted = False
        while not self._stopping.is_set():
            process = self._start(restarted)
            if process is None:
                return
            self._listen(process)
            how = process.reap()
            with self._changed:
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

    def _start(self, restarted: bool) -> _Process | None:
        retry_s = _FIRST_RETRY_S
        while not self._stopping.is_set():
            try:
                process = self._processes.take()
            except (OSError, ValueError) as error:
                if not restarted:
                    with self._changed:
                        self.failure = f"its process cannot be made: {error}"
                        self._changed.notify_all()
                    return None
                # No death, so it does not count as one: what the system lacks now, it may have whenever others end.
                _log.warning(
                    "manager %d of %s could not be started again, and is tried once more in %g s: %s",
                    *(self.number, self._told["folder"], retry_s, error),
                )
                self._stopping.wait(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                continue
            with self._changed:
                self._process, self.pid, self._error = process, process.pid, ""
                self._changed.notify_all()
            config = {**self._config, "incarnation": secrets.token_hex(8), "restarted": restarted}
            told = {**self._told, "manager": self.number, "config": config}
            process.say(json.dumps(told).encode() + b"\n" + (b"stop\n" * self._stopping.is_set()))
            if restarted:
                self._processes.prepare()
            return process
        return None

    def _listen(self, process: _Process) -> None:
        """Hear what a process says, until it ends."""
        with contextlib.suppress(OSError), process.control.makefile("rb") as lines:
            for line in lines:
                said = json.loads(line) if line.endswith(b"\n") else {}  # it may have been killed in the midst of it
                with self._changed:
                    self._error = said.get("error", "")
                    if "ready" in said:
                        self.ready_pid = process.pid
                    self._changed.notify_all()
                if "ready" in said:
                    self._processes.prepare()

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


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _standard_error() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
