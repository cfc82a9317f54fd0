"""Managers as child processes of the creator: the runtime for one machine.

Owns the managers of one dictionary as seen from its creator: their folder, their start, which processes they are at the
moment, and their end. Forking and restarting them is the `nursery`'s; what they do is the `manager`'s.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.ddict.errors import DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.messages import rebuild_error
from ml_flashpoint.ddict.nursery import DEATHS_WITHIN_S, END_GRACE_S, MOST_DEATHS
from ml_flashpoint.ddict.nursery_client import NurseryClient, acquire_nursery, release_nursery
from ml_flashpoint.ddict.runtime_folder import make_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

MANAGER_ENTRY = "ml_flashpoint.ddict.manager_main:run"
START_TIMEOUT_S = 60.0
_MARGIN_S = 5.0


class EmbeddedRuntime:
    """The managers of one dictionary. Thread-safe.

    Making one makes the dictionary's folder, removes those of dictionaries that nobody uses any more, and begins to
    import the managers' code in the nursery. Managers that die are started again; when this process ends, in whatever
    way, they end too and the folder goes.

    Args:
        entry: ``module:function`` that a manager process runs, see `nursery.Entry`.
        root: folder to make the dictionary's folder in; by default `runtime_folder.runtime_root`.

    Attributes:
        base: the dictionary's folder.

    Raises:
        DDictError: the folder cannot be made.
    """

    def __init__(self, *, entry: str = MANAGER_ENTRY, root: Path | None = None) -> None:
        root = runtime_root() if root is None else root
        sweep(root)
        self._entry = entry
        self._hold = make_folder(root)
        self.base = self._hold.folder
        self._group = self.base.name
        self._changed = threading.Condition()
        self._pids: dict[int, int] = {}
        self._handles: dict[int, int] = {}  # pid -> descriptor that names the process even after its death
        self._ready: dict[int, int] = {}
        self._down: dict[int, str] = {}
        self._started = self._over = self._stopped = self._lost = self._foreign = False
        self._failure: dict[str, Any] | None = None
        self._stop_lock = threading.Lock()
        self._nursery: NurseryClient | None = None
        try:
            self._nursery = acquire_nursery()
            self._nursery.listen(self._group, self._on_message)
            self._nursery.send("preload", group=self._group, entry=entry)
        except BaseException:
            self.stop()
            raise
        _runtimes.add(self)

    def start(self, configs: Sequence[Mapping[str, Any]], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start a manager for each configuration, and wait until all are ready. To be called once.

        Args:
            configs: one JSON-able dictionary a manager, by number. Each manager gets its own with ``incarnation``
                (16 hex characters, another one for every process) and ``restarted`` (bool) added. They travel by
                socket, so they may hold secrets.
            timeout_s: seconds.

        Raises:
            FlashpointError: a manager could not start, for this reason. All have ended then.
            DDictError: likewise, for another reason; ``manager`` says which, the message why.
            DDictTimeoutError: not all were ready in time. All have ended then.
        """
        try:
            nursery = self._nursery_or_raise()
            nursery.send(
                "start",
                group=self._group,
                entry=self._entry,
                folder=str(self.base),
                managers=[dict(config) for config in configs],
                env={name: value for name, value in os.environ.items() if name.startswith("FLASHPOINT_")},
                cwd=os.getcwd(),
            )
            with self._changed:
                self._await(lambda: self._started or self._failure is not None, "no start of all managers", timeout_s)
                failure = self._failure
            if failure is not None:
                raise _error_of(str(failure["error"]).strip(), failure["manager"])
        except BaseException:
            self.stop()
            raise

    def pids(self) -> dict[int, int]:
        """Process ids of the managers that run, by number."""
        with self._changed:
            return dict(self._pids)

    def down(self) -> dict[int, str]:
        """Managers that died too often to be started again, by number, and how they ended."""
        with self._changed:
            return dict(self._down)

    @property
    def nursery_pid(self) -> int:
        """Process id of the nursery.

        Raises:
            DDictDestroyedError: the managers were stopped.
        """
        return self._nursery_or_raise().pid

    @property
    def lost(self) -> bool:
        """Whether the nursery has died: managers have ended with it, or are about to, and none comes back."""
        return self._lost

    def wait_until_ready(self, manager: int, *, other_than: int = 0, timeout_s: float) -> int:
        """Wait until a manager serves, in a process other than a former one; the process's id.

        Raises:
            DDictTimeoutError: it did not in time.
            DDictError: it stays down, or the nursery is lost.
        """

        def is_settled() -> bool:
            return self._ready.get(manager, other_than) != other_than or manager in self._down or self._foreign

        with self._changed:
            self._await(is_settled, f"manager {manager} is not ready", timeout_s)
            if manager in self._down:
                raise DDictError(f"it stays down: {self._down[manager]}", manager=manager)
            return self._ready[manager]

    def stop(self, timeout_s: float = END_GRACE_S) -> None:
        """End all managers and remove the folder. Nothing happens the second time, or in a forked child.

        Args:
            timeout_s: seconds that managers get to end by themselves; then they are killed.
        """
        with self._stop_lock:
            if self._stopped or self._foreign:
                return
            self._stopped = True
            _runtimes.discard(self)
            nursery, self._nursery = self._nursery, None
            try:
                if nursery is not None:
                    self._end_managers(nursery, timeout_s)
            finally:
                if nursery is not None:
                    nursery.forget(self._group)
                    release_nursery(nursery)
                self._hold.close()
                if not remove_unused(self.base):
                    _log.error("a manager did not end; its folder stays: %s", self.base)
                with self._changed:
                    self._pids.clear()
                    self._ready.clear()
                    for descriptor in self._handles.values():
                        os.close(descriptor)
                    self._handles.clear()

    # -- inside ----------------------------------------------------------------------------------------------

    def _nursery_or_raise(self) -> NurseryClient:
        nursery = self._nursery
        if nursery is None or self._foreign:
            raise DDictDestroyedError("the managers were stopped, or are those of the parent of this process")
        return nursery

    def _await(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: condition() or self._lost, timeout_s):
            raise DDictTimeoutError(f"{what} within {timeout_s} s", hint="managers write their errors to stderr")
        if self._lost and not condition():
            raise DDictError("the nursery of the managers died, and they with it")

    def _end_managers(self, nursery: NurseryClient, timeout_s: float) -> None:
        with contextlib.suppress(DDictError):
            nursery.send("stop", group=self._group, timeout_s=timeout_s)
        with self._changed:
            over = self._changed.wait_for(lambda: self._over or self._lost, timeout_s + _MARGIN_S)
        if not over:
            _log.error("the nursery of the managers (pid %d) does not answer and is killed", nursery.pid)
            nursery.kill()
        if self._lost:
            self._end_orphans(timeout_s)

    def _end_orphans(self, timeout_s: float) -> None:
        """Without a nursery: wait for the managers, which have noticed, and kill those that do not end."""
        give_up = time.monotonic() + timeout_s
        late = {descriptor for descriptor in self._handles.values() if not _ends(descriptor, give_up)}
        for descriptor in late:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        for descriptor in late:
            _ends(descriptor, time.monotonic() + _MARGIN_S)

    def _on_message(self, message: dict[str, Any] | None) -> None:
        with self._changed:
            if message is None:
                self._lost = True
                self._pids.clear()
                self._ready.clear()
            else:
                self._heed(message)
            self._changed.notify_all()

    def _heed(self, message: Mapping[str, Any]) -> None:
        event = message["event"]
        if event == "forked":
            self._pids[message["manager"]] = message["pid"]
            self._keep_handle(message["pid"])
        elif event == "ready":
            self._ready[message["manager"]] = message["pid"]
        elif event == "died":
            self._note_death(message["manager"], message)
        elif event == "unforked":
            _log.warning(
                "manager %d of %s could not be forked again, and is tried once more in %g s: %s",
                *(message["manager"], self.base, message["retry_s"], message["error"]),
            )
        elif event == "started":
            self._started = True
        elif event == "failed":
            self._failure = dict(message)
        elif event == "stopped":
            self._over = True

    def _note_death(self, manager: int, message: Mapping[str, Any]) -> None:
        pid, how = message["pid"], message["how"]
        for known in (self._pids, self._ready):
            known.pop(manager, None)
        if pid in self._handles:
            os.close(self._handles.pop(pid))
        if message["again"]:
            _log.warning("manager %d of %s (pid %d) %s and is started again", manager, self.base, pid, how)
        else:
            self._down[manager] = how
            _log.error(
                "manager %d of %s (pid %d) %s, the last of more than %d times within %g s, and stays down",
                *(manager, self.base, pid, how, MOST_DEATHS, DEATHS_WITHIN_S),
            )

    def _keep_handle(self, pid: int) -> None:
        nursery = self._nursery
        with contextlib.suppress(OSError, psutil.Error):
            descriptor = os.pidfd_open(pid)
            # The id may be another process's by now, but then it is no child of the nursery.
            if nursery is not None and psutil.Process(pid).ppid() == nursery.pid:
                self._handles[pid] = descriptor
            else:
                os.close(descriptor)

    def _abandon(self) -> None:
        """In a forked child: nothing of this is the child's."""
        self._foreign = True
        self._changed, self._stop_lock = threading.Condition(), threading.Lock()
        self._hold.close()
        for descriptor in self._handles.values():
            os.close(descriptor)
        self._handles = {}


def _ends(process: int, give_up: float) -> bool:
    """Whether a process ends before a time of the monotonic clock."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(max(0.0, give_up - time.monotonic()) * 1000))


_runtimes: weakref.WeakSet[EmbeddedRuntime] = weakref.WeakSet()


def _stop_all() -> None:
    for runtime in list(_runtimes):
        runtime.stop()


def _abandon_all() -> None:
    for runtime in list(_runtimes):
        runtime._abandon()
    _runtimes.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_abandon_all)


def _error_of(text: str, manager: int) -> FlashpointError:
    """The error that a manager's stack trace ends with, if it is one of ours."""
    name, _, message = text.splitlines()[-1].partition(": ") if text else ("", "", "")
    error = rebuild_error({"error": name.rpartition(".")[2], "message": message})
    if type(error).__name__ == name.rpartition(".")[2]:
        return error
    return DDictError(f"a manager did not start: {text}", manager=manager)
