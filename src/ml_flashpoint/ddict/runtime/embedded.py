"""Managers as child processes of the creator: the runtime for one machine.

Owns the managers of one dictionary as seen from its creator: their folder, their processes, of which one thread each
starts another one when it dies, and their end; and the fork server of this process, which is started when the first
manager is, and ends with this process. What is forked, and how, is the business of `fork_server`; what managers do is
that of `manager`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime.folder import make_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.fork_server import END_GRACE_S, MANAGER_ENTRY, READY
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.files import close_in_children

_log = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds or before it serves, stays down."""

_RETRY_S = 0.5
"""Seconds until a manager that could not be forked again is tried once more."""
_ANSWER_S = 30.0
_END_S = 30.0
_MOST_ANSWER = 4096
# Not `-m`: that would put the current directory first on the path, whatever lies there.
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from ml_flashpoint.ddict.runtime.fork_server import main; main(int(sys.argv[1]))"
)


@dataclass(eq=False)
class Forked:
    """A manager's process. ``watched``: a descriptor of it, so that no other one that has its id by now is killed."""

    pid: int
    control: Connection
    watched: int

    def kill(self) -> None:
        """SIGKILL. Not after `reap`."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.watched, signal.SIGKILL)

    def reap(self) -> None:
        """Make sure that it has ended, and let go of it."""
        self.kill()
        if not wait([self.watched], _END_S):
            _log.error("the process %d of a manager does not end although it was killed", self.pid)
        self.control.close()
        os.close(self.watched)


class ForkServer:
    """A fork server's process. Thread-safe. Managers that it has forked outlive it."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._socket, its_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, its_socket):
            close_in_children(each)
        with its_socket:
            its_arguments = [str(its_socket.fileno()), json.dumps(sys.path)]
            self.process = subprocess.Popen(
                [multiprocessing.spawn.get_executable(), "-c", _PROGRAM, *its_arguments],
                pass_fds=[its_socket.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # until it is standard error
                # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
                start_new_session=True,
            )
        self.pid = self.process.pid

    def fork(self) -> Forked:
        """Fork a manager, which waits for what it is told."""
        control, its_control = multiprocessing.Pipe()
        with contextlib.ExitStack() as undo:
            undo.enter_context(control)
            for each in (control, its_control):
                close_in_children(each)
            with its_control, self._asking:
                pid, error = self._ask(its_control)
            if error:
                raise OSError(error)
            watched = os.pidfd_open(pid)
            undo.callback(os.close, watched)
            if control.poll(0):  # it has died, and its id may be another's
                raise OSError("its process ended at once")
            undo.pop_all()
        return Forked(pid, control, watched)

    def _ask(self, its_control: Connection) -> tuple[int, str]:
        try:
            self._socket.settimeout(_ANSWER_S)
            socket.send_fds(self._socket, [b"f"], [its_control.fileno()])
            if answer := self._socket.recv(_MOST_ANSWER):
                pid, error = json.loads(answer)
                return int(pid), str(error)
        except (TimeoutError, ConnectionError):
            pass
        self.end()  # if it answers after all, nobody waits for that any more
        raise ConnectionError(f"the fork server (pid {self.pid}) has ended, or does not answer")

    def is_alive(self) -> bool:
        """Return True if its process runs."""
        return self.process.poll() is None

    def end(self) -> None:
        """Kill it. Idempotent."""
        self.process.kill()
        self.process.wait()


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
    try:
        return fork_server().fork()
    except ConnectionError:
        return fork_server().fork()


@atexit.register  # after the dictionaries, which are made later than this is imported
def _end_at_exit() -> None:
    if _current is not None:
        _current.end()


def _after_fork_in_child() -> None:
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.process.returncode = 0  # it is not this process's child: there is nothing to wait for, or to end
    _current = None


os.register_at_fork(after_in_child=_after_fork_in_child)


class Supervised:
    """A manager, and the thread that looks after it.

    Args:
        told: what it is told (see `fork_server`). Its ``config`` gets what is another one for each process.
        changed: held while anything here changes, and notified then.
        restarted: whether there was one before, in another place.
    """

    def __init__(self, told: Mapping[str, Any], changed: threading.Condition, restarted: bool = False) -> None:
        self.number = int(told["config"]["manager"])
        self.process: Forked | None = None
        """While there is one."""
        self.ready_pid: int | None = None
        """Of its process, while that serves."""
        self.down = ""
        """Why there is none, and none is started again."""
        self.error: dict[str, Any] = {}
        """What it said of why its last process failed, see `Dialect.describe`."""
        self._told = told
        self._changed = changed
        self._stopping = threading.Event()
        self._deaths: deque[float] = deque()
        name = f"ddict-supervisor-{self.number}"
        self._thread = threading.Thread(target=self._supervise, args=(restarted,), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell it to end."""
        with self._changed:
            self._stopping.set()
            if self.process is not None:
                self._tell(self.process, "stop")

    def join(self, give_up: float) -> None:
        """Wait for its end until then, and kill it if it has not come. Whoever calls this has called `stop`."""
        self._thread.join(max(0.0, give_up - time.monotonic()))
        with self._changed:
            if self.process is not None:
                self.process.kill()
        self._thread.join(_END_S)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _supervise(self, restarted: bool) -> None:
        while (process := self._start(restarted)) is not None:
            self._listen(process)
            with self._changed:
                served, self.process, self.ready_pid = self.ready_pid is not None, None, None
                if not self._stopping.is_set():
                    self._note_death(process.pid, served=served)
                self._changed.notify_all()
            process.reap()
            restarted = True

    def _start(self, restarted: bool) -> Forked | None:
        """Its next process, which is waited for if it is not the first; None: there is to be none."""
        while not self._stopping.is_set():
            try:
                process = _fork()
            except (OSError, ValueError) as error:
                if not restarted:
                    with self._changed:
                        self.down = f"its process cannot be made: {error}"
                        self._changed.notify_all()
                    break
                # No death, so it does not count as one: what the system lacks now, it may have whenever others end.
                _log.warning(
                    "manager %d of %s could not be forked again, and is tried once more in %g s: %s",
                    *(self.number, self._told["folder"], _RETRY_S, error),
                )
                self._stopping.wait(_RETRY_S)
                continue
            config = {**self._told["config"], "incarnation": secrets.token_hex(8), "restarted": restarted}
            self._tell(process, {**self._told, "config": config})
            with self._changed:
                self.process, self.error = process, {}
                if self._stopping.is_set():
                    self._tell(process, "stop")
                self._changed.notify_all()
            return process
        return None

    @staticmethod
    def _tell(process: Forked, what: object) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by listening
            process.control.send(what)

    def _listen(self, process: Forked) -> None:
        """Hear what a process says, until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while said := process.control.recv():
                with self._changed:
                    if said == READY:
                        self.ready_pid = process.pid
                    else:
                        self.error = said
                    self._changed.notify_all()

    def _note_death(self, pid: int, *, served: bool) -> None:
        how = f"failed: {self.error['message']}" if self.error else "ended without a word"
        if not served and not self._deaths:
            self.down = f"its process {how}"
            self._stopping.set()
            return
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


START_TIMEOUT_S = 60.0


class Runtime:
    """The runtime of a dictionary's managers. Thread-safe. It is stopped at the end of this process at the latest."""

    def __init__(self) -> None:
        self._creator = os.getpid()
        self._stopping = threading.Lock()
        self._is_stopped = False
        atexit.register(self.stop)

    @property
    def is_stopped(self) -> bool:
        """True if it was stopped, or is that of the parent of this process."""
        return self._is_stopped or self._creator != os.getpid()

    def stop(self, timeout_s: float = END_GRACE_S) -> None:
        """End all managers, and with them their folders. Nothing happens the second time, or in a forked child."""
        if self._creator == os.getpid():
            with self._stopping:
                atexit.unregister(self.stop)
                if not self._is_stopped:
                    self._is_stopped = True
                    self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        raise NotImplementedError


class EmbeddedRuntime(Runtime):
    """The managers of one dictionary on this machine.

    Making one makes the dictionary's folder, removes those of dictionaries that nobody uses any more, and begins to
    import the managers' code in the fork server. Managers that die are started again; when this process ends, in
    whatever way, they end too and the folder goes. Raises `DDictError`: the folder cannot be made; `OSError`: nor the
    fork server.

    Args:
        entry: ``module:function`` that a manager process runs, see `fork_server.Entry`.
        root: folder to make the dictionary's folder in; by default `folder.runtime_root`.
    """

    def __init__(self, *, entry: str = MANAGER_ENTRY, root: Path | None = None) -> None:
        root = runtime_root() if root is None else root
        sweep(root)
        self._entry = entry
        self._hold = make_folder(root)
        self.base = self._hold.folder
        self._changed = threading.Condition()
        self._managers: list[Supervised] = []
        super().__init__()
        try:
            fork_server()
        except BaseException:
            self.stop()
            raise

    def start(
        self, configs: Sequence[Mapping[str, Any]], *, timeout_s: float = START_TIMEOUT_S, restarted: bool = False
    ) -> None:
        """Start a manager for each configuration, and wait until all are ready. To be called once.

        Args:
            configs: one JSON-able dictionary for each ``manager``. It gets ``incarnation`` (16 hex characters, others
                for every process) and ``restarted`` (bool) added. They travel by socket, so they may hold secrets.
            restarted: True if there were managers before these, so that all count as started again.

        Raises:
            FlashpointError: a manager could not start; ``manager`` says which, the message why. All have ended then.
            DDictTimeoutError: not all were ready in time. All have ended then.
        """
        if self.is_stopped:
            raise DDictDestroyedError("the managers were stopped, or are those of the parent of this process")
        told = {
            "entry": self._entry,
            "folder": str(self.base),
            "env": {name: value for name, value in os.environ.items() if name.startswith("FLASHPOINT_")},
            "cwd": os.getcwd(),
            "sys_path": sys.path,
        }

        def is_settled() -> bool:
            return all(one.ready_pid for one in self._managers) or any(one.down for one in self._managers)

        try:
            for config in configs:
                self._managers.append(Supervised({**told, "config": config}, self._changed, restarted))
            with self._changed:
                if not self._changed.wait_for(is_settled, timeout_s):
                    raise DDictTimeoutError(
                        f"no start of all managers within {timeout_s} s", hint="managers write their errors to stderr"
                    )
                failed = next((one for one in self._managers if one.down), None)
            if failed is not None:
                raise _error_of(failed)
        except BaseException:
            self.stop()
            raise

    def pids(self) -> dict[int, int]:
        """Process ids of the managers that run, by number."""
        with self._changed:
            return {one.number: one.process.pid for one in self._managers if one.process is not None}

    def _end(self, timeout_s: float) -> None:
        try:
            for one in self._managers:
                one.stop()
            give_up = time.monotonic() + timeout_s
            for one in self._managers:
                one.join(give_up)
        finally:
            self._hold.close()
            if not remove_unused(self.base):
                _log.error("a manager did not end; its folder stays: %s", self.base)


def _error_of(failed: Supervised) -> FlashpointError:
    """Return what a manager that did not start has raised, if that is one of ours."""
    error = REQUESTS.rebuild(failed.error)
    if not failed.error or type(error) is DDictError:
        error = DDictError(
            f"a manager did not start: {failed.down}", manager=failed.number, hint="its stderr has the stack trace"
        )
    return error
