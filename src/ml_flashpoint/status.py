"""Status of saving on one rank: a reducer over its events, and the file that shows it to other processes.

The file, ``<base>/.flashpoint/status/<rank>``, is one JSON object with ``schema`` and the attributes of `Status`. Also
two views for a training loop: `Health` and `Recovery`.
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
from typing import TYPE_CHECKING, Literal, TypeAlias

from ml_flashpoint import events
from ml_flashpoint.format.errors import JobInUseError, UnsafePathError
from ml_flashpoint.format.files import make_tree, read_file, replace_file
from ml_flashpoint.memory.container import STATUS, BaseContainer

if TYPE_CHECKING:
    from ml_flashpoint.memory.container import JobLock
    from ml_flashpoint.ranks.rank_group import RankGroup
    from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

Source: TypeAlias = Literal["memory", "persisted", "fallback", "nothing"]

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
        held_s: seconds that the newest save has held the loop; 0.0 where that is not measured.
        committed_after_s, verified_after_s: seconds from the begin of the newest such save on.
        part_bytes: size of the newest part.
        copied_bytes, copied_in_s: size of the newest part of which copies were made, and seconds that they took.
        persisted: newest step whose part of this rank is in the durable store.
        saves, failures: parts committed, saves failed.
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
    error: str | None = None
    replication_error: str | None = None
    agreement_error: str | None = None
    persist_error: str | None = None

    def after(self, event: events.Event) -> Status:
        """Return the status after one more event of this rank."""
        step, error = event.step, getattr(event, "error", "")[:_MOST_OF_AN_ERROR]
        change: dict[str, object] = {}
        match event:
            case events.LoopHeld():
                change = {"held_s": event.seconds}
            case events.PartCommitted():
                change = {"committed": step, "committed_after_s": event.seconds, "part_bytes": event.bytes}
                change["saves"] = self.saves + 1
            case events.PartReplicated():
                change = {"replicated": step, "copied_bytes": event.bytes, "copied_in_s": event.seconds}
                change["replication_error"] = None
            case events.VersionVerified():
                change = {"verified": step, "verified_s": event.time_s, "verified_after_s": event.seconds}
                change["agreement_error"] = None
            case events.SaveFailed():
                change = {"failures": self.failures + 1, "error": error}
            case events.SaveSkipped():
                change = {"skipped": self.skipped + 1}
            case events.ReplicationFailed():
                change = {"replication_error": error}
            case events.AgreementFailed():
                change = {"agreement_error": error}
            case events.RanksMissing():
                named = ", ".join(map(str, event.ranks[:8])) + (", ..." if len(event.ranks) > 8 else "")
                text = f"ranks {named} have not come to the save of step {step}, for {event.seconds:.0f} s"
                change = {"agreement_error": text}
            case events.PartPersisted():
                change = {"persisted": step, "persist_error": None}
            case events.PersistFailed():
                change = {"persist_error": error}
            case events.SteppedBack():
                change = {"stepped_back": self.stepped_back + 1}
            case events.Resumed():
                change = {"resumed": step}
        return replace(self, updated_s=event.time_s, **change)  # type: ignore[arg-type]

    @property
    def degraded(self) -> bool:
        """True if something is amiss now."""
        return any((self.replication_error, self.agreement_error, self.persist_error))


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
    """The newest `status` of this rank, and its file, which is not written once the job's lock is lost. Events change
    both, on the thread of events."""

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
        self._writing = threading.Lock()
        with contextlib.suppress(OSError, UnsafePathError):  # which writing the file reports
            make_tree(container.base, self._path.parent)
        self._write()
        self._subscription = contextlib.ExitStack()
        self._subscription.enter_context(events.subscribe(self._note, container.base))

    def _note(self, event: events.Event) -> None:
        if event.rank == self.status.rank:
            self.status = self.status.after(event)
            if not isinstance(event, _NOT_WRITTEN_AFTER):
                self._write()

    def _write(self) -> None:
        try:
            with self._writing:  # a close may come while the thread of events writes
                self._lock.check()
                write_status(self._path, self.status)
        except (OSError, JobInUseError) as error:
            if not self._has_failed:
                _log.warning("the status of rank %d cannot be written: %s", self.status.rank, error)
            self._has_failed = True
        else:
            self._has_failed = False
        self._written = self.status

    def close(self) -> None:
        """Write what is not in the file yet, and end. Safe to call twice."""
        self._subscription.close()
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
        agreement_error: reason why no new version can be verified now; otherwise None.
        blocked_s: seconds for which the latest save blocked the training loop, without the time in which its CUDA
            device finished earlier work.
        blocked_total_s: the same for all saves.
        committed_s: seconds from the start of the latest successful save until this rank's part was committed.
        bytes: bytes of this rank's part of its newest version.
        degraded: True if something needs attention: the latest save failed, copies are missing, no version can be
            verified, or a version that is due is not persisted.
        persisted: step of the newest persisted version; on ranks other than 0, of the newest persisted part.
        persist_error: reason why the latest version that was due is not persisted; otherwise None.
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


@dataclass(frozen=True, slots=True)
class Recovery:
    """Result of a `Checkpointer.load`, or `Flashpoint.resume`, on this rank. Times are in seconds.

    Attributes:
        step: number of steps done.
        source: source of the state.
        version: name of the loaded version, from memory or persisted; otherwise None.
        detect_s, plan_s: time to read and gather inventories, and to plan, for the version that was tried last.
        fetch_s, fetched_bytes: time to fetch that version from peers, check and vote; bytes that this rank received.
        load_s: time to load into the tracked objects, including versions that were tried before.
        total_s: total time, including the fallback.
        discarded: complete versions that could not be loaded, newest first.
    """

    step: int
    source: Source
    version: str | None
    detect_s: float
    plan_s: float
    fetch_s: float
    load_s: float
    total_s: float
    fetched_bytes: int
    discarded: tuple[str, ...]

    def in_words(self, base: str) -> str:
        """Return one line about it, which names the base container."""
        left = f"; {len(self.discarded)} newer could not be loaded" if self.discarded else ""
        if self.source == "memory":
            return f"resumed at step {self.step} from memory ({base}/{self.version}) in {self.total_s:.2f} s{left}"
        if self.source == "persisted":
            return f"resumed at step {self.step} from the persisted {self.version} in {self.total_s:.2f} s{left}"
        if self.source == "fallback":
            return f"no version in memory ({base}){left}: resumed at step {self.step} from the fallback"
        return f"no version in {base}{left}: training starts at step {self.step}"
