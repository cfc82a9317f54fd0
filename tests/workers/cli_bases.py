"""Base containers for the tests of the command line, made by `memory`, in children.

Owns what the parts hold. In children, since a lock is the process's, and looking at a base container from
the same process would give it up.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.format.digest import digest_blocks
from ml_flashpoint.format.errors import JobInUseError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId, object_name
from ml_flashpoint.memory.container import STATUS, BaseContainer, JobLock, Owner
from ml_flashpoint.memory.slot import PAGE, Slot, round_up
from ml_flashpoint.status import Status, write_status
from tests.workers.fault_engine import Rank

Report = Callable[..., None]

RUN = 3
BLOCK = 4096


@dataclass(frozen=True)
class Part:
    """A part to commit: the part of `rank` of a save of a run."""

    rank: int
    step: int
    world_size: int = 4
    run: int = RUN
    size: int = 3 * BLOCK + 100

    @property
    def save_id(self) -> str:
        return f"{self.run:08d}"

    @property
    def name(self) -> str:
        return object_name(self.rank, self.save_id)


def content_of(part: Part) -> bytes:
    """The whole file of a part: its bytes, then zeros."""
    data = bytes((part.rank + part.step + i) % 251 for i in range(part.size))
    return data.ljust(round_up(max(1, part.size), PAGE), b"\0")


def manifest_of(part: Part) -> Manifest:
    content = content_of(part)
    digests = digest_blocks(content[: part.size], block_size=BLOCK)
    record = ObjectRecord(part.size, len(content), digests, BLOCK)
    return Manifest(SaveId(part.run, part.step), part.rank, part.world_size, f"node-{part.rank // 2}", record)


def commit(container: BaseContainer, part: Part) -> None:
    owner, content = Owner(part.world_size, part.rank), content_of(part)
    path = container.slot_folder(owner) / str(len(container.slot_paths(owner)))
    slot = Slot.make(path, len(content))
    slot.buffer[:] = content
    container.commit(slot, manifest_of(part))
    slot.close()


def make(report: Report, base: Path, ranks: Sequence[int], parts: Sequence[Part]) -> None:
    """Commits parts where ranks run, and ends."""
    _make(base, ranks, parts)


def _make(base: Path, ranks: Sequence[int], parts: Sequence[Part]) -> JobLock:
    lock = JobLock(base, "a job", 1.0)
    container = BaseContainer(base, lock)
    for rank in ranks:
        path = container.private / STATUS / str(rank)
        path.parent.mkdir(exist_ok=True)
        write_status(path, Status(rank=rank, node="node-0", pid=os.getpid(), copies_on=("node-1",)))
    for part in parts:
        commit(container, part)
    return lock


def make_and_live(report: Report, base: Path, ranks: Sequence[int], parts: Sequence[Part]) -> None:
    """Commits parts, and lives on."""
    lock = _make(base, ranks, parts)
    report("ready")
    signal.pause()
    lock.release()


def take(report: Report, base: Path) -> str:
    """Tries to open the base container for another job."""
    try:
        JobLock(base, "another job", 0.1)
    except JobInUseError:
        return "JobInUseError"
    return "open"


def save_for_ever(report: Report, base: Path) -> None:
    """Saves again and again, which uses the slots of earlier saves, with the real engine."""
    rank = Rank(base)
    step = 0
    while True:
        step += 1
        rank.save("small", step, 1)
        if step == 3:
            report("ready")


def save_once(report: Report, base: Path) -> None:
    """One save with the real engine."""
    rank = Rank(base)
    rank.save("small", 7, 1)
    rank.checkpointer.wait(30)
