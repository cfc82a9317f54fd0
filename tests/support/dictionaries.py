"""Dictionaries of this machine for tests, and what becomes of their processes and files.

Owns looking at them from outside, and waiting with a deadline. What a child process does with one is
`tests.workers.ddict_handles`'.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path

import psutil

from ml_flashpoint.ddict import DDict
from ml_flashpoint.ddict.runtime.embedded import EmbeddedRuntime
from tests.support.processes import suspend

DEADLINE_S = 30.0


@dataclass(frozen=True)
class Created:
    """A dictionary that another process has made, whose checkpoint 0 is committed."""

    creator: SpawnProcess
    serialized: str
    managers: list[int]

    @property
    def pid(self) -> int:
        """Process id of the creator."""
        assert self.creator.pid is not None
        return self.creator.pid

    def kill(self) -> None:
        """SIGKILL the creator."""
        self.creator.kill()
        self.creator.join(DEADLINE_S)


def runtime_of(dictionary: DDict) -> EmbeddedRuntime:
    """What runs the managers of a dictionary that this process made."""
    runtime = dictionary._runtime
    assert isinstance(runtime, EmbeddedRuntime)
    return runtime


def pid_of(dictionary: DDict, manager: int) -> int:
    """The process of a manager at the moment, once it is there."""
    runtime, found = runtime_of(dictionary), dict[int, int]()

    def is_there() -> bool:
        found.update(runtime.pids())
        return manager in found

    await_that(is_there)
    return found[manager]


def kill_manager(dictionary: DDict, manager: int, *, lose_node: bool = False) -> int:
    """SIGKILL a manager, and delete what its node had in memory; returns the process id that it had."""
    pid = pid_of(dictionary, manager)
    with contextlib.suppress(ProcessLookupError):
        if lose_node:
            suspend(pid)  # its successor, which comes at once, must not find anything
            node = dictionary._configuration.node_folder(manager)
            shutil.rmtree(node, ignore_errors=True)
        os.kill(pid, signal.SIGKILL)
    return pid


def wait_until_ready(runtime: EmbeddedRuntime, manager: int, *, other_than: int = 0) -> int:
    """The process of a manager, once one serves that is not a former one, or the manager stays down."""
    await_that(lambda: runtime.ready.get(manager) not in (None, other_than) or manager in runtime.down)
    ready = runtime.ready.get(manager)
    assert ready is not None, f"manager {manager} stays down: {runtime.down}"
    return ready


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    try:
        suspend(pid)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def await_that(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for what has no event; fails if it does not come about in time."""
    give_up = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def files_in(base: str | Path) -> list[Path]:
    """Everything in a folder, and the folder, if it is there."""
    base = Path(base)
    return [base, *base.rglob("*")] if base.exists() else []


def await_copies(dictionary: DDict, checkpoint_id: int) -> None:
    """Wait until the copies of a committed checkpoint are where they should be: with replication "ring", one manager a
    node, each at the next."""
    if checkpoint_id < 0:
        return
    base, nodes = Path(dictionary._configuration.base), dictionary._configuration.options.nodes
    assert dictionary._coordinator is not None
    rules = dictionary._coordinator.rules

    def has_copy(of: int) -> bool:
        part = next(part for part in rules.sealed_by(of) if part.checkpoint_id == checkpoint_id)
        version = base / f"node-{nodes[(of + 1) % len(nodes)]}" / f"step-{part.step}_ckpt"
        return (version / f"rank-{of:05d}-{part.run:08d}.manifest").exists()

    await_that(lambda: all(has_copy(manager) for manager in range(len(nodes))))
