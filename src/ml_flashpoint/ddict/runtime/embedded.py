"""Managers as processes of the creator: the runtime for one machine, as seen from the creator.

What starts them, and starts each again that dies, is a process of its own: see `supervisor`.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing.spawn
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime.folder import make_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.supervisor import DIED, END_GRACE_S, READY, STARTED
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.files import close_in_children

_log = logging.getLogger(__name__)

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds or before it serves, stays down."""
START_TIMEOUT_S = 60.0

# The current directory, whatever lies there, is first on the path at first: what is imported then is built in.
# Collections take a sixth of the time of all imports; `main` has them again.
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[2:]; "
    "from ml_flashpoint.ddict.runtime.supervisor import main; main(*map(int, sys.argv[1].split()))"
)


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

    Making one makes the dictionary's folder, and removes those of dictionaries that nobody uses any more. When this
    process ends, in whatever way, the managers end too and the folder goes. ``detached``: see `supervisor.main`. Raises
    `DDictError`: the folder cannot be made.
    """

    def __init__(self, *, detached: bool = False) -> None:
        root = runtime_root()
        sweep(root)
        self._hold = make_folder(root)
        self.base = self._hold.folder
        self.ready: dict[int, int] = {}  # process id of each manager that serves
        self.down: dict[int, FlashpointError] = {}  # why a manager has no process, and gets none any more
        self._pids: dict[int, int] = {}
        self._detached = detached
        self._changed = threading.Condition()
        self._control: Connection | None = None  # of the supervisor
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        super().__init__()

    def start(self, configs: Sequence[Mapping[str, Any]], *, restarted: bool = False) -> None:
        """Start a manager for each configuration, and wait until all are ready. To be called once.

        ``configs``: those of `Manager`, but for ``incarnation`` and ``restarted``; they may hold secrets.
        ``restarted``: there were managers before these. Raises `FlashpointError` if a manager could not start, or not
        in time: all have ended then."""
        if self.is_stopped:
            raise DDictDestroyedError("the managers were stopped, or are those of the parent of this process")
        told = {"folder": str(self.base), "cwd": os.getcwd(), "environment": dict(os.environ), "restarted": restarted}
        told |= {"configs": list(configs), "most_deaths": MOST_DEATHS, "within_s": DEATHS_WITHIN_S}

        def is_settled() -> bool:
            return bool(self.down) or len(self.ready) == len(configs)

        self._thread = threading.Thread(target=self._supervise, args=(told,), name="ddict-supervisor", daemon=True)
        try:
            self._thread.start()
            with self._changed:
                if not self._changed.wait_for(is_settled, START_TIMEOUT_S):
                    hint = "managers write their errors to stderr"
                    raise DDictTimeoutError(f"no start of all managers within {START_TIMEOUT_S} s", hint=hint)
                if self.down:
                    raise next(iter(self.down.values()))
        except BaseException as error:
            self.stop()
            if isinstance(error, RuntimeError):  # no thread can be started
                raise DDictError(f"managers cannot be watched: {error}") from error
            raise

    def _spawn(self, told: Mapping[str, Any]) -> tuple[Connection, subprocess.Popen[bytes]]:
        argv = [multiprocessing.spawn.get_executable(), "-c", _PROGRAM, "", *sys.path]
        try:
            control, its = multiprocessing.Pipe()
            close_in_children(control)
            with its:
                close_in_children(its)
                argv[3] = f"{its.fileno()} {int(self._detached)}"
                process = subprocess.Popen(
                    argv,
                    pass_fds=[its.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # until it is standard error
                    env=told["environment"],
                    # Signals of the terminal are for the creator: what it leaves behind then ends by itself.
                    start_new_session=True,
                )
            with contextlib.suppress(OSError):  # it ended at once, which is heard next
                control.send(told)
            return control, process
        except (OSError, ValueError) as error:
            raise DDictError(f"the processes of managers cannot be made: {error}") from error

    def _supervise(self, told: Mapping[str, Any]) -> None:
        """Start what supervises the managers, hear of them, and start it again if it ends."""
        served = True
        try:
            while True:
                with self._changed:
                    if self.is_stopped:
                        return
                    if not served:
                        raise DDictError("the processes of managers cannot be made: what starts them ended at once")
                    if self.ready:
                        _log.warning("what starts the managers of %s ended, and is started again with them", self.base)
                    self._pids.clear()
                    self.ready.clear()
                    self.down.clear()
                    self._control, self._process = self._spawn(told)
                with contextlib.suppress(OSError, EOFError), self._control as control:
                    while True:
                        self._hear(*control.recv())
                self._process.wait()
                served, told = bool(self.ready), {**told, "restarted": True}
        except FlashpointError as error:
            with self._changed:
                self.down[-1] = error
                self._changed.notify_all()

    def _hear(self, what: str, number: int, more: Any) -> None:
        with self._changed:
            if what == STARTED:
                self._pids[number] = more
            elif what == READY:
                self.ready[number] = self._pids[number]
            else:
                pid = self._pids.pop(number)
                self.ready.pop(number, None)
                how = f"failed: {more['message']}" if more else "ended without a word"
                name = f"manager {number} of {self.base} (pid {pid}) {how}"
                if what == DIED:
                    _log.warning("%s and is started again", name)
                else:
                    self.down[number] = _start_error(number, more, how)
                    _log.error("%s and stays down", name)
            self._changed.notify_all()

    def pids(self) -> dict[int, int]:
        """Process ids of the managers that run, by number."""
        with self._changed:
            return dict(self._pids)

    def _end(self, timeout_s: float) -> None:
        try:
            with self._changed:
                if self._control is not None:
                    with contextlib.suppress(OSError):
                        self._control.send(timeout_s)
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join(timeout_s + END_GRACE_S)
                if self._thread.is_alive() and self._process is not None:
                    self._process.kill()  # it is stopped, perhaps; managers end with it
                    self._thread.join(END_GRACE_S)
        finally:
            self._hold.close()
            if not remove_unused(self.base):
                _log.error("a manager did not end; its folder stays: %s", self.base)


def _start_error(number: int, described: dict[str, Any], how: str) -> FlashpointError:
    """Return the error for a manager that did not start: its own, if that is one of ours."""
    error = REQUESTS.rebuild(described)
    if not described or type(error) is DDictError:
        hint = "its stderr has the stack trace"
        return DDictError(f"a manager did not start: its process {how}", manager=number, hint=hint)
    return error
