"""The helper process that managers are forked from, and that starts them again when they die.

Owns the life of manager processes: fork, restart, orderly end, and the end of all of them when their creator is gone.
It imports the managers' code once, so that a fork takes milliseconds; it stays free of threads, so that a fork
is safe. What a manager does is an *entry*, a function that is named to it; the creator's side is `nursery_client`.

Messages in both directions are lines of JSON. From the creator: ``preload``, then ``start`` and ``stop`` of a *group*,
the managers of one dictionary. To the creator: ``forked``, ``ready``, ``died`` and ``unforked`` (could not be forked
again yet) of one manager; ``started`` or ``failed`` of a start, and ``stopped``, of a group.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ml_flashpoint.ddict.runtime_folder import LAST_WORDS_S, FolderHold, remove_unused

Entry: TypeAlias = "Callable[[dict[str, Any], Callable[[], None], threading.Event], None]"
"""What a manager process runs: ``run(config, ready, stop)``. It calls ``ready()`` once it serves, and returns soon
after ``stop`` is set."""

END_GRACE_S = 10.0
"""Seconds that managers get to end by themselves when their creator or the nursery is gone."""

MOST_DEATHS, DEATHS_WITHIN_S = 5, 10.0
"""A manager that dies more often than this, within so many seconds, stays down."""

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.25, 2.0
"""Seconds until a manager that could not be forked again is tried once more: twice as long each time, and at most."""

_STOP = b"stop\n"
_READY = b"ready"
_RECEIVED = 1 << 16
_MOST_ERROR_CHARACTERS = 20_000


@dataclass(eq=False)
class _Manager:
    number: int
    config: dict[str, Any]
    pid: int = 0
    sock: socket.socket | None = None
    received: bytes = b""
    ready: bool = False
    error: str = ""
    deaths: deque[float] = field(default_factory=deque)
    retry_s: float = _FIRST_RETRY_S
    fork_at: float | None = None
    """Set: there is no process, and a new one is to be forked at that time."""


@dataclass(eq=False)
class _Group:
    name: str
    entry: Entry
    hold: FolderHold
    env: dict[str, str]
    cwd: str
    managers: list[_Manager]
    started: bool = False
    failure: dict[str, Any] | None = None
    kill_at: float | None = None
    """Set: the group is stopping, and who is left at that time is killed."""

    @property
    def alive(self) -> Iterator[_Manager]:
        return (manager for manager in self.managers if manager.sock is not None)


class Nursery:
    """The loop of the nursery process.

    Args:
        creator: a connected stream socket; its end is the end of all managers.
    """

    def __init__(self, creator: socket.socket) -> None:
        self._creator: socket.socket | None = creator
        self._received = b""
        self._groups: dict[str, _Group] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(creator, selectors.EVENT_READ, self._on_creator)

    def run(self) -> None:
        """Serve until the creator is gone and every manager has ended."""
        while self._creator is not None or self._groups:
            for key, _ in self._selector.select(self._time_left()):
                key.data()
            self._kill_late_ones()
            self._fork_again()

    def _time_left(self) -> float | None:
        times = [group.kill_at for group in self._groups.values() if group.kill_at is not None]
        times += [manager.fork_at for _, manager in self._to_fork() if manager.fork_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _to_fork(self) -> Iterator[tuple[_Group, _Manager]]:
        for group in self._groups.values():
            if group.kill_at is None:
                yield from ((group, manager) for manager in group.managers if manager.fork_at is not None)

    def _fork_again(self) -> None:
        for group, manager in list(self._to_fork()):
            if manager.fork_at is not None and time.monotonic() >= manager.fork_at:
                self._restart(group, manager)

    def _kill_late_ones(self) -> None:
        for group in list(self._groups.values()):
            if group.kill_at is not None and time.monotonic() >= group.kill_at:
                for manager in list(group.alive):
                    self._bury(group, manager)
                self._finish_if_stopped(group)

    # -- the creator -----------------------------------------------------------------------------------------

    def _on_creator(self) -> None:
        assert self._creator is not None
        try:
            data = self._creator.recv(_RECEIVED)
        except OSError:
            data = b""
        if not data:
            self._lose_creator()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message["op"] == "preload":
                self._preload(message)
            elif message["op"] == "start":
                self._start(message)
            elif (group := self._groups.get(message["group"])) is not None:
                self._stop(group, message["timeout_s"])
            else:
                self._tell("stopped", message["group"])  # never started, or failed to

    def _lose_creator(self) -> None:
        assert self._creator is not None
        self._selector.unregister(self._creator)
        self._creator.close()
        self._creator = None
        for group in list(self._groups.values()):
            self._stop(group, END_GRACE_S)

    def _tell(self, event: str, group: str, **more: Any) -> None:
        if self._creator is not None:
            with contextlib.suppress(OSError):  # its end is noticed by reading
                self._creator.sendall(json.dumps({"event": event, "group": group, **more}).encode() + b"\n")

    # -- groups ----------------------------------------------------------------------------------------------

    def _preload(self, message: dict[str, Any]) -> None:
        sys.path[:] = message["sys_path"]
        with contextlib.suppress(Exception):  # told when it is used
            _load(message["entry"])
        gc.collect()
        gc.freeze()  # a collection in a manager would copy all pages of what was imported here

    def _start(self, message: dict[str, Any]) -> None:
        name = message["group"]
        sys.path[:] = message["sys_path"]
        try:
            entry = _load(message["entry"])
            hold = FolderHold(Path(message["folder"]))
        except Exception:
            self._tell("failed", name, manager=None, error=traceback.format_exc()[-_MOST_ERROR_CHARACTERS:])
            return
        managers = [_Manager(number, config) for number, config in enumerate(message["managers"])]
        group = self._groups[name] = _Group(name, entry, hold, message["env"], message["cwd"], managers)
        for manager in managers:
            try:
                self._fork(group, manager, restarted=False)
            except OSError as error:
                self._fail(group, manager, f"its process cannot be made: {error}")
                return
        if not managers:
            self._start_if_ready(group)

    def _start_if_ready(self, group: _Group) -> None:
        if not group.started and group.kill_at is None and all(manager.ready for manager in group.managers):
            group.started = True
            self._tell("started", group.name)

    def _fail(self, group: _Group, manager: _Manager, error: str) -> None:
        if group.failure is None:
            group.failure = {"manager": manager.number, "error": error}
        self._stop(group, END_GRACE_S)

    def _stop(self, group: _Group, timeout_s: float) -> None:
        kill_at = time.monotonic() + timeout_s
        group.kill_at = kill_at if group.kill_at is None else min(group.kill_at, kill_at)
        for manager in group.alive:
            assert manager.sock is not None
            with contextlib.suppress(OSError):
                manager.sock.send(_STOP)
        self._finish_if_stopped(group)

    def _finish_if_stopped(self, group: _Group) -> None:
        if any(group.alive) or group.name not in self._groups:
            return
        del self._groups[group.name]
        group.hold.close()
        if self._creator is None:
            remove_unused(group.hold.folder, LAST_WORDS_S)
        if group.failure is not None:
            self._tell("failed", group.name, **group.failure)
        else:
            self._tell("stopped", group.name)

    # -- managers --------------------------------------------------------------------------------------------

    def _fork(self, group: _Group, manager: _Manager, *, restarted: bool) -> None:
        """Make a manager's process.

        Raises:
            OSError: the system has none, or no descriptors, to give away.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            manager.config = {**manager.config, "incarnation": secrets.token_hex(8), "restarted": restarted}
            try:
                self._selector.register(ours, selectors.EVENT_READ, lambda: self._on_manager(group, manager, ours))
                pid = _fork_process()
            except OSError:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(ours)
                ours.close()
                raise
            if pid == 0:
                self._become_manager(group, manager, ours, theirs)
        ours.setblocking(False)
        manager.pid, manager.sock, manager.received, manager.ready, manager.error = pid, ours, b"", False, ""
        self._tell("forked", group.name, manager=manager.number, pid=pid, restarted=restarted)

    def _restart(self, group: _Group, manager: _Manager) -> None:
        manager.fork_at = None
        try:
            self._fork(group, manager, restarted=True)
        except OSError as error:
            # No death, so it does not count as one: what the system lacks now, it may have whenever others end.
            self._tell("unforked", group.name, manager=manager.number, error=str(error), retry_s=manager.retry_s)
            manager.fork_at = time.monotonic() + manager.retry_s
            manager.retry_s = min(2 * manager.retry_s, _LONGEST_RETRY_S)
        else:
            manager.retry_s = _FIRST_RETRY_S

    def _on_manager(self, group: _Group, manager: _Manager, sock: socket.socket) -> None:
        if manager.sock is not sock:
            return  # buried since the loop was woken
        try:
            data = sock.recv(_RECEIVED)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose_manager(group, manager)
            return
        *lines, manager.received = (manager.received + data).split(b"\n")
        for line in lines:
            if line == _READY:
                manager.ready = True
                self._tell("ready", group.name, manager=manager.number, pid=manager.pid)
                self._start_if_ready(group)
            else:
                manager.error = json.loads(line)["error"]

    def _lose_manager(self, group: _Group, manager: _Manager) -> None:
        how = self._bury(group, manager)
        if group.kill_at is not None:
            self._finish_if_stopped(group)
            return
        if not group.started:
            self._fail(group, manager, manager.error or f"its process {how}")
            return
        if self._note_death(group, manager, how):
            self._restart(group, manager)

    def _note_death(self, group: _Group, manager: _Manager, how: str) -> bool:
        """Count a death and tell of it; whether the manager is to be started again."""
        now = time.monotonic()
        manager.deaths.append(now)
        while manager.deaths[0] < now - DEATHS_WITHIN_S:
            manager.deaths.popleft()
        again = len(manager.deaths) <= MOST_DEATHS
        told = {"manager": manager.number, "pid": manager.pid, "how": how, "error": manager.error, "again": again}
        self._tell("died", group.name, **told)
        return again

    def _bury(self, group: _Group, manager: _Manager) -> str:
        """Make sure that a manager has ended; how it did."""
        assert manager.sock is not None
        self._selector.unregister(manager.sock)
        manager.sock.close()
        manager.sock = None
        # Not reaped yet, so the id is still its own. One that is ending anyway keeps its exit code.
        os.kill(manager.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(manager.pid, 0)[1])
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"

    def _become_manager(self, group: _Group, manager: _Manager, ours: socket.socket, theirs: socket.socket) -> None:
        code = 1
        try:
            # Whatever is left open here would hide the end of another process.
            self._selector.close()
            ours.close()
            for other in self._groups.values():
                for sibling in other.alive:
                    assert sibling.sock is not None
                    sibling.sock.close()
            if self._creator is not None:
                self._creator.close()
            hold = FolderHold(group.hold.folder)
            for other in self._groups.values():
                other.hold.close()
            code = _run_manager(group, manager, theirs, hold)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _fork_process() -> int:
    with warnings.catch_warnings():
        # Threads that a library keeps for its computations are not seen by the managers and not needed by them.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _run_manager(group: _Group, manager: _Manager, nursery: socket.socket, hold: FolderHold) -> int:
    stop, orphaned = threading.Event(), threading.Event()
    watch = threading.Thread(target=_watch, args=(nursery, stop, orphaned, hold), name="ddict-lifeline", daemon=True)
    watch.start()
    for name in [name for name in os.environ if name.startswith("FLASHPOINT_")]:
        del os.environ[name]
    os.environ.update(group.env)
    with contextlib.suppress(OSError):
        os.chdir(group.cwd)
    code = 1
    try:
        group.entry(manager.config, lambda: nursery.sendall(_READY + b"\n"), stop)
        code = 0
    except BaseException:
        error = traceback.format_exc()
        print(f"manager {manager.number} of a dictionary failed:\n{error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            nursery.sendall(json.dumps({"error": error[-_MOST_ERROR_CHARACTERS:]}).encode() + b"\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if orphaned.is_set():
        _leave(hold)
    return code


def _watch(nursery: socket.socket, stop: threading.Event, orphaned: threading.Event, hold: FolderHold) -> None:
    with contextlib.suppress(OSError):
        while nursery.recv(_RECEIVED):
            stop.set()
    # The nursery is gone: nobody else would end a manager that does not end by itself.
    orphaned.set()
    stop.set()
    time.sleep(END_GRACE_S)
    _leave(hold)
    os._exit(1)


def _leave(hold: FolderHold) -> None:
    # The last one of all takes the folder away: when the creator and the nursery are gone, that is a manager.
    hold.close()
    remove_unused(hold.folder, LAST_WORDS_S)


def _load(entry: str) -> Entry:
    module, _, name = entry.partition(":")
    loaded: Entry = getattr(importlib.import_module(module), name)
    return loaded


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(descriptor: int) -> None:
    """Run a nursery.

    Args:
        descriptor: of the socket to the creator.
    """
    # Ctrl-C is for the creator: when it ends, so does all this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    creator = socket.socket(fileno=descriptor)
    creator.set_inheritable(False)
    Nursery(creator).run()
    sys.stderr.flush()
    os._exit(0)  # without tearing down what was imported for the managers
