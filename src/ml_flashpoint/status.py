"""Status of saving on one rank: a reducer over its events, and the file that shows it to other processes.

The file, ``<base>/.flashpoint/status/<rank>``, is one JSON object with ``schema`` and the attributes of `Status`. Also
a view for a training loop: `Health`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ml_flashpoint import events
from ml_flashpoint.format.errors import JobInUseError, UnsafePathError
from ml_flashpoint.format.files import make_tree, read_file, replace_file
from ml_flashpoint.memory.container import STATUS, BaseContainer

if TYPE_CHECKING:
    from ml_flashpoint.memory.container import JobLock
    from ml_flashpoint.ranks.rank_group import RankGroup
    from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 16
_MOST_OF_AN_ERROR = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of saving on one rank. Steps are None while there is none; times are since the epoch, by the node's clock.

    Attributes:
        rank, node: the rank, and its node.
        pid: its process.
        since_s: time at which a process first opened the base container here.
        starts: number of processes that did, this one included.
        updated_s: time of the newest event.
        nodes: number of nodes of the job.
        survives: number of nodes that may be lost at once, whichever they are, without a verified version.
        copies_on: nodes that hold copies of this rank's parts.
        resumed: the step that this process went on from.
        committed: newest step of which this rank's part is on its node.
        replicated: newest step whose copies were acknowledged; None also where nobody holds copies.
        verified: newest step that all ranks have, with all copies.
        verified_s: time at which it was verified.
        held_s, held_total_s: seconds that the newest save has held the loop, and all of them; 0.0 where that is not
            measured.
        committed_after_s, verified_after_s: seconds from the begin of the newest such save on.
        part_bytes: size of the newest part.
        copied_bytes, copied_in_s: size of the newest part of which copies were made, and seconds that they took.
        persisted: newest step that rank 0 has completed in the durable store; on other ranks, whose part is there.
        saves, failures: parts committed, saves failed.
        persist_failures: versions whose part could not be written here, or that could not be completed here.
        skipped: saves that found no free slot.
        stepped_back: versions that could not be recovered or loaded.
        error: of the newest failed save; it stays.
        replication_error, agreement_error, persist_error: reasons why something is amiss now.
    """

    rank: int
    node: str
    pid: int = 0
    since_s: float = 0.0
    starts: int = 0
    updated_s: float = 0.0
    nodes: int = 0
    survives: int = 0
    copies_on: tuple[str, ...] = ()
    resumed: int | None = None
    committed: int | None = None
    replicated: int | None = None
    verified: int | None = None
    verified_s: float = 0.0
    held_s: float = 0.0
    held_total_s: float = 0.0
    committed_after_s: float = 0.0
    verified_after_s: float = 0.0
    part_bytes: int = 0
    copied_bytes: int = 0
    copied_in_s: float = 0.0
    persisted: int | None = None
    saves: int = 0
    failures: int = 0
    skipped: int = 0
    stepped_back: int = 0
    persist_failures: int = 0
    error: str | None = None
    replication_error: str | None = None
    agreement_error: str | None = None
    persist_error: str | None = None

    def after(self, event: events.Event) -> Status:
        """Return the status after one more event of this rank."""
        step, error = event.step, getattr(event, "error", "")[:_MOST_OF_AN_ERROR]
        change: dict[str, object] = {}
        match event:
            case events.RunBegun():
                change = {"committed": None, "replicated": None, "verified": None}
            case events.LoopHeld():
                change = {"held_s": event.seconds, "held_total_s": self.held_total_s + event.seconds}
            case events.PartCommitted():
                change = {"committed": step, "committed_after_s": event.seconds, "part_bytes": event.bytes}
                change["saves"] = self.saves + 1
            case events.PartReplicated():
                change = {"replicated": step, "copied_bytes": event.bytes, "copied_in_s": event.seconds}
                change["replication_error"] = None
            case events.VersionVerified():
                change = {"verified": step, "verified_s": event.time_s, "agreement_error": None}
                change["verified_after_s"] = event.seconds or self.verified_after_s
            case events.SaveFailed():
                change = {"failures": self.failures + 1, "error": error}
            case events.SaveSkipped():
                change = {"skipped": self.skipped + 1}
            case events.ReplicationFailed():
                change = {"replication_error": error}
            case events.AgreementFailed():
                change = {"agreement_error": error}
            case events.RanksMissing():
                ranks = events.named(event.ranks)
                text = f"ranks {ranks} have not come to the save of step {step}, for {event.seconds:.0f} s"
                change = {"agreement_error": text}
            case events.PartPersisted() if self.rank != 0:
                change = {"persisted": step, "persist_error": None}
            case events.VersionPersisted():
                change = {"persisted": step, "persist_error": None}
            case events.PersistFailed():
                change = {"persist_error": error, "persist_failures": self.persist_failures + (step is not None)}
            case events.SteppedBack():
                change = {"stepped_back": self.stepped_back + 1}
            case events.Resumed():
                change = {"resumed": step}
        return replace(self, updated_s=event.time_s, **change)  # type: ignore[arg-type]

    @property
    def degraded(self) -> bool:
        """True if something is amiss now."""
        return any((self.replication_error, self.agreement_error, self.persist_error))

    @property
    def persist_lag(self) -> int | None:
        """Steps from the newest one that is persisted to the newest verified one; None if either is not known."""
        return None if self.persisted is None or self.verified is None else max(0, self.verified - self.persisted)


def write_status(path: Path, status: Status) -> None:
    """Replace a rank's file, at once or not at all; its folder exists. Raise an `OSError` if not."""
    replace_file(path, [json.dumps({"schema": events.SCHEMA, **asdict(status)}).encode()], fsync=False)


def read_status(path: Path) -> Status | None:
    """Return the status in a rank's file; None if there is none that can be read."""
    try:
        return events.from_fields(Status, events.read_object(read_file(path, _MOST_BYTES)))
    except (OSError, UnsafePathError):
        return None


_NOT_WRITTEN_AFTER = (events.LoopHeld, events.PartCommitted, events.SaveSkipped, events.PartReplicated)
"""Events that the next event is soon to follow: the file has them then."""


class StatusFile:
    """The `status` of this rank, which each event changes at once, and its file, which the thread of events writes.
    Not once the job's lock is lost."""

    def __init__(
        self, container: BaseContainer, lock: JobLock, ranks: RankGroup, strategy: ReplicationStrategy
    ) -> None:
        self._lock, topology = lock, ranks.topology
        self._path = container.private / STATUS / str(ranks.rank)
        before = read_status(self._path) or Status(rank=ranks.rank, node=ranks.node)
        self.status = Status(
            rank=ranks.rank,
            node=ranks.node,
            pid=os.getpid(),
            since_s=before.since_s or time.time(),
            starts=1 + before.starts,
            nodes=len(topology.node_order),
            survives=strategy.survivable_losses(topology),
            copies_on=tuple(topology.node_of(holder) for holder in strategy.copies_of(ranks.rank, topology)),
        )
        self._written: Status | None = None
        self._has_failed = False
        self._reducing = threading.RLock()  # a signal handler may save, or close
        self._writing = threading.Lock()
        with contextlib.suppress(OSError, UnsafePathError):  # which writing the file reports
            make_tree(container.base, self._path.parent)
        self._write()
        self._subscriptions = contextlib.ExitStack()
        self._subscriptions.enter_context(events.subscribe(self._reduce, container.base, at_once=True))
        self._subscriptions.enter_context(events.subscribe(self._note, container.base))

    def _reduce(self, event: events.Event) -> None:
        if event.rank == self.status.rank:
            with self._reducing:
                self.status = self.status.after(event)

    def _note(self, event: events.Event) -> None:
        if event.rank == self.status.rank and not isinstance(event, _NOT_WRITTEN_AFTER):
            self._write()

    def _write(self) -> None:
        with self._writing:  # a close may come while the thread of events writes
            status, error = self.status, None
            try:
                self._lock.check()
                write_status(self._path, status)
            except (OSError, JobInUseError) as caught:
                error = caught
            if error is not None and not self._has_failed:
                _log.warning("the status of rank %d cannot be written: %s", status.rank, error)
            self._written, self._has_failed = status, error is not None

    def close(self) -> None:
        """Write what is not in the file yet, and end. Safe to call twice."""
        self._subscriptions.close()
        if self._written is not self.status:
            self._write()


@dataclass(frozen=True, slots=True)
class Health:
    """Counters and errors of saves on this rank, since the construction of the `Flashpoint`.

    Attributes:
        saves: number of saves whose part this rank has committed.
        skipped: number of scheduled saves that found no free slot, because earlier saves are still being copied.
        failures: number of saves that failed.
        last_error: text of the latest failure, kept when later saves succeed; None if no save failed.
        replication_error: reason why copies on other nodes are missing now; otherwise None.
        agreement_error: reason why no new version is verified; None once a version is verified again.
        blocked_s: seconds for which the latest save blocked the training loop, without the time in which its CUDA
            device finished earlier work.
        blocked_total_s: the same for all saves.
        committed_s: seconds from the start of the latest successful save until this rank's part was committed.
        bytes: bytes of this rank's part of its newest version.
        degraded: True if something needs attention: the latest save failed, copies are missing, no version can be
            verified, or a version that is due is not persisted.
        persisted: step of the newest persisted version; on ranks other than 0, of the newest persisted part.
        persist_error: reason why the latest version that was due is not persisted, or why none could be; None once a
            version is persisted.
        persist_lag: steps between `persisted` and the newest verified version; None if either is not known.
    """

    saves: int
    skipped: int
    failures: int
    last_error: str | None
    replication_error: str | None
    agreement_error: str | None
    blocked_s: float
    blocked_total_s: float
    committed_s: float
    bytes: int
    degraded: bool
    persisted: int | None = None
    persist_error: str | None = None
    persist_lag: int | None = None

    def scalars(self, prefix: str = "flashpoint/") -> dict[str, float]:
        """Return all numbers by name, each with a prefix, for TensorBoard or W&B."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {prefix + name: float(value) for name, value in values if isinstance(value, (int, float))}
