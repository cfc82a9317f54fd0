"""Managers as processes of the creator: the runtime for one machine.

Owns the managers of one dictionary as seen from its creator: their folder, their processes, of which one thread each
starts another one when it dies, and their end. What such a process does is the business of `manager_process`.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import multiprocessing
import multiprocessing.spawn
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime.folder import make_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.manager_process import END_GRACE_S, READY
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.files import close_in_children

_log = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds or before it serves, stays down."""
START_TIMEOUT_S = 60.0

_RETRY_S = 0.5
"""Seconds until a manager whose process could not be started again is tried once more."""
_END_S = 30.0
# The current directory, whatever lies there, is first on the path until the second statement: `sys` is built in.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from ml_flashpoint.ddict.runtime.manager_process import main; main(*map(int, sys.argv[1].split()))"
)


@dataclass(eq=False)
class _Process:
    """A manager's process. ``watched``: a descriptor of it, so that no other one that has its id by now is killed."""

    pid: int
    control: Connection
    watched: int
    parent: subprocess.Popen[bytes]  # that has forked it, and ends with the last of those

    def tell(self, what: object) -> None:
        """Send a message. The end of the process is noticed by listening."""
        with contextlib.suppress(OSError):
            self.control.send(what)

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


def _start_processes(count: int, environment: Mapping[str, str]) -> list[_Process]:
    """Start managers, which wait for what they are told. Raises `OSError`: they could not be started, or,
    as a `DDictTimeoutError`, not in time."""
    started, give_up = [], time.monotonic() + START_TIMEOUT_S
    with contextlib.ExitStack() as undo:
        ends = [tuple(map(undo.enter_context, multiprocessing.Pipe())) for _ in range(count)]
        for end in itertools.chain(*ends):
            close_in_children(end)
        its_ends = [its.fileno() for _, its in ends]
        parent = subprocess.Popen(
            [multiprocessing.spawn.get_executable(), "-c", _PROGRAM, " ".join(map(str, its_ends)), *sys.path],
            pass_fds=its_ends,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # until it is standard error
            env=environment,
            # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
            start_new_session=True,
        )
        undo.callback(parent.wait)
        undo.callback(parent.kill)
        for _, its in ends:
            its.close()
        try:
            for control, _ in ends:
                if not control.poll(max(0.0, give_up - time.monotonic())):
                    raise _too_late()
                watched = recv_handle(control)
                undo.callback(os.close, watched)
                os.set_inheritable(watched, False)  # one that is received is
                started.append(_Process(control.recv(), control, watched, parent))
        except EOFError as error:
            raise OSError("one has ended at once") from error
        except RuntimeError as error:  # of `recv_handle`: this process has no descriptor left
            raise OSError(f"no descriptor of one can be had: {error}") from error
        undo.pop_all()
    return started


def _too_late() -> DDictTimeoutError:
    hint = "managers write their errors to stderr"
    return DDictTimeoutError(f"no start of all managers within {START_TIMEOUT_S} s", hint=hint)


class Supervised:
    """A manager, and the thread that looks after it.

    Args:
        process: its first one.
        told: what processes are told (see `manager_process`). The ``config`` gets what is another one for each.
        environment: of its next process.
        changed: held while anything here changes, and notified then.
        restarted: whether there was one before, in another place.

    Attributes:
        process: while there is one.
        ready_pid: of its process, while that serves.
        down: why there is none, and none is started again.
    """

    def __init__(
        self,
        process: _Process,
        told: Mapping[str, Any],
        environment: Mapping[str, str],
        changed: threading.Condition,
        *,
        restarted: bool,
    ) -> None:
        self.number = int(told["config"]["manager"])
        self.process: _Process | None = None
        self.ready_pid: int | None = None
        self.down = ""
        self._error: dict[str, Any] = {}  # what it said of why its last process failed, see `Dialect.describe`
        self._told, self._environment, self._changed = told, environment, changed
        self._name = f"manager {self.number} of {told['folder']}"
        self._parents = [process.parent]  # that may run
        self._stopping = threading.Event()
        self._deaths: deque[float] = deque()
        name = f"ddict-supervisor-{self.number}"
        self._thread = threading.Thread(target=self._supervise, args=(process, restarted), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell it to end."""
        with self._changed:
            self._stopping.set()
            if self.process is not None:
                self.process.tell("stop")

    def join(self, give_up: float) -> None:
        """Wait for its end until then, and kill it if it has not come. Whoever calls this has called `stop`."""
        self._thread.join(max(0.0, give_up - time.monotonic()))
        with self._changed:
            if self.process is not None:
                self.process.kill()
        self._thread.join(_END_S)

    def await_parents(self) -> None:
        """Wait for what has forked its processes. Whoever calls this has called `join` of all managers."""
        for parent in self._parents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                parent.wait(_END_S)

    def error(self) -> FlashpointError:
        """Return the error for a manager that did not start: its own, if that is one of ours."""
        error = REQUESTS.rebuild(self._error)
        if not self._error or type(error) is DDictError:
            hint = "its stderr has the stack trace"
            error = DDictError(f"a manager did not start: {self.down}", manager=self.number, hint=hint)
        return error

    # ---- the thread ---------------------------------------------------------------------------------------

    def _supervise(self, first: _Process, restarted: bool) -> None:
        process: _Process | None = first
        while process is not None:
            config = {**self._told["config"], "incarnation": secrets.token_hex(8), "restarted": restarted}
            process.tell({**self._told, "config": config})
            with self._changed:
                self.process, self._error = process, {}
                if self._stopping.is_set():
                    process.tell("stop")
                self._changed.notify_all()
            self._listen(process)
            with self._changed:
                served, self.process, self.ready_pid = self.ready_pid is not None, None, None
                if not self._stopping.is_set():
                    self._note_death(process.pid, served=served)
                self._changed.notify_all()
            process.reap()
            process, restarted = self._next(), True

    def _next(self) -> _Process | None:
        """Start another process; None: there is to be none."""
        while not self._stopping.is_set():
            try:
                process = _start_processes(1, self._environment)[0]
                self._parents = [*(each for each in self._parents if each.poll() is None), process.parent]
                return process
            except (OSError, ValueError) as error:
                # No death, so it does not count as one: what the system lacks now, it may have whenever others end.
                _log.warning("%s could not be started again, and is tried once more: %s", self._name, error)
                self._stopping.wait(_RETRY_S)
        return None

    def _listen(self, process: _Process) -> None:
        """Hear what a process says, until it ends."""
        with contextlib.suppress(OSError, EOFError):
            while said := process.control.recv():
                with self._changed:
                    if said == READY:
                        self.ready_pid = process.pid
                    else:
                        self._error = said
                    self._changed.notify_all()

    def _note_death(self, pid: int, *, served: bool) -> None:
        how = f"failed: {self._error['message']}" if self._error else "ended without a word"
        if not served and not self._deaths:
            self._give_up(f"its process {how}")
            return
        now = time.monotonic()
        self._deaths.append(now)
        # One that cannot even start may take any time for that, on a busy machine.
        while served and self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) <= MOST_DEATHS:
            _log.warning("%s (pid %d) %s and is started again", self._name, pid, how)
            return
        self._give_up(how)
        _log.error(
            "%s (pid %d) %s, the last of more than %d times within %g s or in a row, and stays down",
            *(self._name, pid, how, MOST_DEATHS, DEATHS_WITHIN_S),
        )

    def _give_up(self, why: str) -> None:
        with self._changed:
            self.down = why
            self._stopping.set()
            self._changed.notify_all()


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

    Making one makes the dictionary's folder, and removes those of dictionaries that nobody uses any more. Managers that
    die are started again; when this process ends, in whatever way, they end too and the folder goes. Raises
    `DDictError`: the folder cannot be made.
    """

    def __init__(self) -> None:
        root = runtime_root()
        sweep(root)
        self._hold = make_folder(root)
        self.base = self._hold.folder
        self._changed = threading.Condition()
        self._managers: list[Supervised] = []
        super().__init__()

    def start(self, configs: Sequence[Mapping[str, Any]], *, restarted: bool = False) -> None:
        """Start a manager for each configuration, and wait until all are ready. To be called once.

        Args:
            configs: those of `Manager`, but for ``incarnation`` and ``restarted``, which they get here. They travel by
                socket, so they may hold secrets.
            restarted: True if there were managers before these, so that all count as started again.

        Raises:
            FlashpointError: a manager could not start; ``manager`` says which, the message why. All have ended then.
            DDictTimeoutError: not all were ready in time. All have ended then.
        """
        if self.is_stopped:
            raise DDictDestroyedError("the managers were stopped, or are those of the parent of this process")
        told, environment = {"folder": str(self.base), "cwd": os.getcwd()}, dict(os.environ)

        def is_settled() -> bool:
            return all(one.ready_pid for one in self._managers) or any(one.down for one in self._managers)

        processes: list[_Process] = []
        try:
            try:
                processes = _start_processes(len(configs), environment)
                for process, config in zip(processes, configs, strict=True):
                    its = {**told, "config": config}
                    self._managers.append(Supervised(process, its, environment, self._changed, restarted=restarted))
            except (OSError, ValueError, RuntimeError) as error:  # the last one: no thread can be started
                if isinstance(error, DDictTimeoutError):
                    raise
                raise DDictError(f"the processes of managers cannot be made: {error}") from error
            with self._changed:
                if not self._changed.wait_for(is_settled, START_TIMEOUT_S):
                    raise _too_late()
                failed = next((one for one in self._managers if one.down), None)
            if failed is not None:
                raise failed.error()
        except BaseException:
            for process in processes[len(self._managers) :]:
                process.reap()
            self.stop()
            if processes and not self._managers:  # which else have waited for it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    processes[0].parent.wait(_END_S)
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
            for one in self._managers:
                one.await_parents()
        finally:
            self._hold.close()
            if not remove_unused(self.base):
                _log.error("a manager did not end; its folder stays: %s", self.base)
