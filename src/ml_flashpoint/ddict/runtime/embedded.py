"""Managers as child processes of the creator: the runtime for one machine.

Owns the managers of one dictionary as seen from its creator: their folder, their start, which processes they are at the
moment, and their end. Starting them, and again when they die, is the `supervisor`'s;
what they do is the `manager`'s.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_flashpoint.ddict.errors import REQUESTS, DDictDestroyedError, DDictError, DDictTimeoutError
from ml_flashpoint.ddict.runtime.folder import make_folder, remove_unused, runtime_root, sweep
from ml_flashpoint.ddict.runtime.fork_server import END_GRACE_S, MANAGER_ENTRY
from ml_flashpoint.ddict.runtime.supervisor import Supervised, fork_server
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

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
