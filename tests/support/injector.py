"""Faults by name: the n-th call of something, on one rank, from one step on, fails as it is told to.

Owns the points at which a process can be hurt and the ways to do it. A fault is plain data, so a test draws it, and a
rank, forked or started by a launcher, installs it. The patches lie at the narrowest edge (a system call, or one
function of the engine), in that process only; nothing in the package knows of them. Usage, in a rank::

    with Injector(rank, [Fault(rank=1, step=3, point="linked", action="kill")], base=folder) as injector:
        for step in ...:
            injector.at(step)
            ...
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

_CONTAINER = "ml_flashpoint.memory.container"

POINTS: dict[str, tuple[str, str, str]] = {
    # of a save, in their order
    "staging": ("ml_flashpoint.engine.committing", "PartWriter.stage", "before"),
    "staged": ("ml_flashpoint.engine.committing", "PartWriter.stage", "after"),
    "reusing": (_CONTAINER, "BaseContainer.reclaim", "before"),
    "committing": (_CONTAINER, "BaseContainer.commit", "before"),
    "linked": (_CONTAINER, "write_manifest", "before"),
    "committed": (_CONTAINER, "write_manifest", "after"),
    "copying": ("ml_flashpoint.net.channel", "Channel.send_payload", "before"),
    "copied": ("ml_flashpoint.net.channel", "Channel.send_payload", "after"),
    "receiving": ("ml_flashpoint.net.channel", "Channel.receive_payload", "before"),
    "received": ("ml_flashpoint.net.channel", "Channel.receive_payload", "after"),
    "answering": ("ml_flashpoint.engine.store", "SignedStore.set", "before"),  # or a verdict is published
    "answered": ("ml_flashpoint.engine.store", "SignedStore.set", "after"),
    "deciding": ("ml_flashpoint.engine.rounds", "Leader.decide", "before"),
    "adopting": ("ml_flashpoint.engine.rounds", "Member.adopt", "before"),
    # of a recovery
    "voting": ("ml_flashpoint.ranks.rank_group", "RankGroup.all_ok", "before"),
    "loading": ("ml_flashpoint.engine.reader", "MemoryParts.open_here", "before"),
    "beginning": ("ml_flashpoint.engine.recovery", "mark_begun", "before"),
    "begun": ("ml_flashpoint.engine.recovery", "mark_begun", "after"),
    # the system
    "open": ("os", "open", "before"),
    "file": ("io", "open", "before"),
    "allocate": ("os", "posix_fallocate", "before"),
    "link": ("os", "link", "before"),
    "rename": ("os", "replace", "before"),
    "mkdir": ("os", "mkdir", "before"),
    "connect": ("socket", "create_connection", "before"),
    "thread": ("threading", "Thread.start", "before"),
}
"""Name of a point: module, function in it, and whether the fault comes before or after the call."""

_EVENTS = "flashpoint-events"
_OF_DCP = "AsyncCheckpointExecutor"
"""Name of the threads that torch starts for ``dcp.async_save``."""
_OF_PATHS = {"open", "file", "link", "rename", "mkdir"}
_ERRNOS = {"emfile": errno.EMFILE, "enospc": errno.ENOSPC, "eio": errno.EIO, "enomem": errno.ENOMEM}
ACTIONS = (*_ERRNOS, "refused", "reset", "no-thread", "slow", "kill", "kill-node")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, once.

    Attributes:
        rank: on which rank.
        step: from which step on calls count; 0 is the recovery before the first.
        point: one of `POINTS`.
        action: one of `ACTIONS`.
        nth: which call, from 1.
    """

    rank: int
    step: int
    point: str
    action: str
    nth: int = 1


@dataclass
class _Armed:
    fault: Fault
    left: int
    fired: bool = False


@dataclass
class Injector:
    """See the module. A context manager: patches are there inside of it only. Calls may come from any thread.

    Args:
        rank: of this process.
        faults: of all ranks; those of others are ignored.
        base: only files in this folder count at points of files.
        on_this_node: process ids that ``kill-node`` kills besides this one, each with its process group.
        clock_s: seconds by which the wall clock is off.
    """

    rank: int
    faults: Iterable[Fault] = ()
    base: str = "/"
    on_this_node: tuple[int, ...] = ()
    clock_s: float = 0.0
    fired: list[tuple[Fault, int]] = field(default_factory=list)  # with the step that this rank was at

    def __post_init__(self) -> None:
        self._armed = [_Armed(fault, fault.nth) for fault in self.faults if fault.rank == self.rank]
        self._step = 0
        self._lock = threading.Lock()
        self._undo: list[tuple[Any, str, Any]] = []

    def at(self, step: int) -> None:
        """Says which step this rank is at."""
        self._step = step

    def __enter__(self) -> Injector:
        for point in {armed.fault.point for armed in self._armed}:
            module, path, when = POINTS[point]
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for each in outer:
                owner = getattr(owner, each)
            self._patch(owner, name, self._wrapped(getattr(owner, name), point, when))
            if point == "file":
                self._patch(importlib.import_module("builtins"), "open", owner.open)
        if self.clock_s:
            real, real_ns = time.time, time.time_ns
            self._patch(time, "time", lambda: real() + self.clock_s)
            self._patch(time, "time_ns", lambda: real_ns() + int(self.clock_s * 1e9))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)

    def _patch(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)

    def _wrapped(self, function: Callable[..., Any], point: str, when: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if when == "before" and self._counts(point, args):
                self._come_to(point)
            result = function(*args, **kwargs)
            if when == "after":
                self._come_to(point)
            return result

        return call

    def _counts(self, point: str, args: tuple[Any, ...]) -> bool:
        started = str(getattr(args[0], "name", "")) if args else ""
        if _EVENTS in (threading.current_thread().name, started):
            return False  # a status that is not written is no fault that matters, and would be one that does not come
        if started.startswith(_OF_DCP):
            return False  # the other ranks' collectives of that save would meet those of the next: deadlines end that
        return point not in _OF_PATHS or any(
            isinstance(each, (str, os.PathLike)) and os.fspath(each).startswith(self.base) for each in args
        )

    def _come_to(self, point: str) -> None:
        for armed in self._armed:
            with self._lock:
                if armed.fired or armed.fault.point != point or self._step < armed.fault.step:
                    continue
                armed.left -= 1
                if armed.left > 0:
                    continue
                armed.fired = True
                self.fired.append((armed.fault, self._step))
            self._act(armed.fault)

    def _act(self, fault: Fault) -> None:
        if fault.action.startswith("kill"):
            for pid in self.on_this_node if fault.action == "kill-node" else ():
                if pid != os.getpid():
                    os.killpg(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.action in _ERRNOS:
            number = _ERRNOS[fault.action]
            raise OSError(number, f"{os.strerror(number)} (injected at {fault.point})")
        elif fault.action == "refused":
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"refused (injected at {fault.point})")
        elif fault.action == "reset":
            raise ConnectionResetError(errno.ECONNRESET, f"reset (injected at {fault.point})")
        elif fault.action == "no-thread":
            raise RuntimeError("can't start new thread")
        elif fault.action == "slow":
            time.sleep(0.4)
        else:
            raise ValueError(fault.action)


class Interrupted:
    """Interrupts system calls of this process by a signal every millisecond: EINTR, wherever it can come."""

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        signal.siginterrupt(signal.SIGALRM, True)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    def __exit__(self, *exc_info: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)
