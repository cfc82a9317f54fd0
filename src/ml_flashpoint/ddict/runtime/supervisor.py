"""The process that starts the managers of a dictionary on one machine, and starts again each that dies.

It imports what they need, and forks them: that takes a hundredth of a second. Its creator has the other end of a pipe,
the *control*, says what there is to do, and then at most how long they get to end. If the pipe ends, the creator is
gone. What it hears is a tuple: what happened, to which manager, and more (`STARTED`: the process id, `READY`, `DIED`
and `DOWN`: the error). Managers end with this process, by a signal of the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import secrets
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS
from ml_flashpoint.ddict.runtime.folder import LAST_WORDS_S, FolderHold, remove_unused

END_GRACE_S = 10.0
"""Seconds that managers get to end by themselves when their creator is gone."""
STARTED, READY, DIED, DOWN = "started", "ready", "died", "down"

_RETRY_S = 0.5
_PR_SET_PDEATHSIG = 1


def main(control: int, detached: int) -> None:
    """Serve a creator. ``detached``: not as its child: Ray kills the children of an actor that ends, and the folder is
    yet to be removed then."""
    if detached and os.fork():
        os._exit(0)
    importlib.import_module("ml_flashpoint.ddict.manager.manager")  # once for all
    gc.freeze()  # a collection in a manager would copy all pages of what was imported
    gc.enable()
    code = 1
    try:
        with contextlib.suppress(OSError):  # unless standard error is closed
            os.dup2(2, 1)
        with contextlib.suppress(EOFError, ConnectionError):  # the creator is gone already
            _Supervisor(Connection(control)).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # without tearing down what was imported for the managers


class _Manager:
    """A manager, and the process that it has at the moment, if any."""

    def __init__(self, config: Mapping[str, Any], *, restarted: bool) -> None:
        self.config, self.restarted = config, restarted
        self.number = int(config["manager"])
        self.pid = 0
        self.has_served = False
        self.error: dict[str, Any] = {}  # what its process said of why it failed, see `Dialect.describe`
        self.deaths: deque[float] = deque()


class _Supervisor:
    def __init__(self, control: Connection) -> None:
        self._control = control
        told = control.recv()
        self._most_deaths: int = told["most_deaths"]
        self._within_s: float = told["within_s"]
        with contextlib.suppress(OSError):
            os.chdir(told["cwd"])
        self._hold = FolderHold(Path(told["folder"]))
        self._to_start = [_Manager(config, restarted=told["restarted"]) for config in told["configs"]]
        self._running: dict[Connection, _Manager] = {}

    def run(self) -> None:
        """Serve until the creator says to stop, or is gone."""
        grace_s: float | None = None
        while grace_s is None:
            for manager in self._to_start[:]:
                # What the system lacks now, it may have whenever others end.
                with contextlib.suppress(OSError):
                    self._start(manager)
                    self._to_start.remove(manager)
            ready = wait([self._control, *self._running], _RETRY_S if self._to_start else None)
            for pipe in [each for each in self._running if each in ready]:
                self._hear(pipe, _said(pipe))
            if self._control in ready:
                grace_s = _said(self._control) or END_GRACE_S
        self._end(grace_s)

    def _start(self, manager: _Manager) -> None:
        ours, its = Pipe(duplex=False)
        me = os.getpid()
        with its:
            manager.pid = os.fork()
            if not manager.pid:
                for other in (self._control, ours, *self._running):
                    other.close()
                _serve(manager, its, me)
        manager.has_served, manager.error = False, {}
        self._running[ours] = manager
        self._tell(STARTED, manager, manager.pid)

    def _tell(self, what: str, manager: _Manager, more: Any = None) -> None:
        with contextlib.suppress(OSError):  # the creator is gone, which `run` hears
            self._control.send((what, manager.number, more))

    def _hear(self, pipe: Connection, said: Any) -> None:
        manager = self._running[pipe]
        if said == READY:
            manager.has_served = True
            self._tell(READY, manager)
        elif said is not None:
            manager.error = said
        else:
            del self._running[pipe]
            pipe.close()
            os.waitpid(manager.pid, 0)
            may_start = self._may_start_again(manager)
            self._tell(DIED if may_start else DOWN, manager, manager.error)
            if may_start:
                manager.restarted = True
                self._to_start.append(manager)

    def _may_start_again(self, manager: _Manager) -> bool:
        if not manager.has_served and not manager.restarted:
            return False
        now = time.monotonic()
        manager.deaths.append(now)
        # One that cannot even start may take any time for that, on a busy machine.
        while manager.has_served and manager.deaths[0] < now - self._within_s:
            manager.deaths.popleft()
        return len(manager.deaths) <= self._most_deaths

    def _end(self, grace_s: float) -> None:
        for manager in self._running.values():
            os.kill(manager.pid, signal.SIGTERM)
        give_up, left = time.monotonic() + grace_s, dict(self._running)
        while left and (ready := wait(list(left), max(0.0, give_up - time.monotonic()))):
            left = {pipe: its for pipe, its in left.items() if pipe not in ready or _said(pipe) is not None}
        for manager in left.values():
            os.kill(manager.pid, signal.SIGKILL)
        for manager in self._running.values():
            os.waitpid(manager.pid, 0)
        self._hold.close()
        remove_unused(self._hold.folder, LAST_WORDS_S)  # works where the creator is gone


def _said(pipe: Connection) -> Any:
    """Return what the other end said; None: it is gone."""
    with contextlib.suppress(EOFError, OSError):
        return pipe.recv()
    return None


def _serve(manager: _Manager, supervisor: Connection, parent: int) -> None:
    """Be a manager, and end the process."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # in its threads, too
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it ended before it could be said
            with contextlib.closing(_made(manager)):
                supervisor.send(READY)
                signal.sigwait([signal.SIGTERM])
            code = 0
    except BaseException as error:
        print(f"manager {manager.number} of a dictionary failed:", file=sys.stderr)
        traceback.print_exc()
        supervisor.send(REQUESTS.describe(error))
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)  # whatever happened: this is a copy of the supervisor


def _made(manager: _Manager) -> Any:
    from ml_flashpoint.ddict.manager.manager import Manager  # the creator, which imports this module, needs none

    return Manager({**manager.config, "incarnation": secrets.token_hex(8), "restarted": manager.restarted})
