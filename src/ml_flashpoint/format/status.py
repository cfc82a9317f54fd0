"""Status of saving on one rank: what its events amount to, and the file that shows it to other processes.

A file is one JSON object with ``schema`` and the attributes of `RankStatus`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.format.errors import UnsafePathError
from ml_flashpoint.format.events import (
    AgreementFailed,
    Event,
    LoopHeld,
    PartCommitted,
    PartPersisted,
    PartReplicated,
    PersistFailed,
    RanksMissing,
    ReplicationFailed,
    Resumed,
    SaveFailed,
    SaveSkipped,
    SteppedBack,
    VersionVerified,
    has_types_of,
)
from ml_flashpoint.format.files import read_file
from ml_flashpoint.format.private_folders import open_own

SCHEMA = 1

_MOST_BYTES = 1 << 16
_MOST_OF_AN_ERROR = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """Status of saving on one rank. Steps are None while there is none.

    Attributes:
        rank, node: the rank, and its node.
        pid: its process.
        since_s: time at which a process first opened the base container here, as ``updated_s``.
        starts: number of processes that did, this one included.
        updated_s: time of the newest event, in seconds since the epoch by the node's clock.
        nodes: number of nodes of the job.
        survives: number of nodes that may be lost at once, whichever they are, without a verified version.
        copies_on: nodes that hold copies of this rank's parts.
        resumed: the step that this process went on from.
        committed: newest step of which this rank's part is on its node.
        replicated: newest step whose copies were acknowledged; None also where nobody holds copies.
        verified: newest step that all ranks have, with all copies.
        verified_s: time at which it was verified, as ``updated_s``.
        held_s: seconds that the newest save has held the loop; 0.0 where that is not measured.
        committed_after_s, verified_after_s: seconds from the begin of the newest such save on.
        part_bytes: size of the newest part.
        copied_bytes, copied_in_s: size of the newest part of which copies were made, and seconds that they took.
        persisted: newest step whose part of this rank is in the durable store.
        saves, failures: parts committed, saves failed.
        skipped: saves that found no free slot.
        stepped_back: versions that could not be recovered or loaded.
        error: of the newest failed save; it stays.
        replication_error, agreement_error, persist_error: what is wrong now.
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

    def after(self, event: Event) -> RankStatus:
        """Return the status after one more event of this rank."""
        change: dict[str, object] = {}
        match event:
            case LoopHeld():
                change = {"held_s": event.seconds}
            case PartCommitted():
                change = {"committed": event.step, "committed_after_s": event.seconds, "part_bytes": event.bytes}
                change["saves"] = self.saves + 1
            case PartReplicated():
                change = {"replicated": event.step, "replication_error": None}
                change |= {"copied_bytes": event.bytes, "copied_in_s": event.seconds}
            case VersionVerified():
                change = {"verified": event.step, "verified_s": event.time_s, "verified_after_s": event.seconds}
                change["agreement_error"] = None
            case SaveFailed():
                change = {"failures": self.failures + 1, "error": event.error[:_MOST_OF_AN_ERROR]}
            case SaveSkipped():
                change = {"skipped": self.skipped + 1}
            case ReplicationFailed():
                change = {"replication_error": event.error[:_MOST_OF_AN_ERROR]}
            case AgreementFailed():
                change = {"agreement_error": event.error[:_MOST_OF_AN_ERROR]}
            case RanksMissing():
                change = {"agreement_error": f"{event.text}, for {event.seconds:.0f} s"}
            case PartPersisted():
                change = {"persisted": event.step, "persist_error": None}
            case PersistFailed():
                change = {"persist_error": event.error[:_MOST_OF_AN_ERROR]}
            case SteppedBack():
                change = {"stepped_back": self.stepped_back + 1}
            case Resumed():
                change = {"resumed": event.step}
        return dataclasses.replace(self, updated_s=event.time_s, **change)  # type: ignore[arg-type]

    @property
    def degraded(self) -> bool:
        """True if something is wrong now."""
        return any((self.replication_error, self.agreement_error, self.persist_error))

    def to_json(self) -> str:
        """Return this status as `from_json` takes it."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus | None:
        """Return the status of `to_json`; None if the text is no such thing. Fields of newer releases are left out."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            return None
        if isinstance(found.get("copies_on"), list):
            found["copies_on"] = tuple(found["copies_on"])
        try:
            status = cls(**{f.name: found[f.name] for f in dataclasses.fields(cls) if f.name in found})
        except TypeError:  # something is missing
            return None
        return status if has_types_of(status) else None


def write_status(path: Path, status: RankStatus) -> None:
    """Replace a rank's file, at once or not at all.

    Args:
        path: of the file, in a folder that exists.
        status: its new content.

    Raises:
        OSError, UnsafePathError: it cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    with open(open_own(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w", encoding="utf-8") as file:
        file.write(status.to_json())
    os.replace(new, path)


def read_status(path: Path) -> RankStatus | None:
    """Return the status in a rank's file; None if there is nothing that can be read."""
    try:
        return RankStatus.from_json(read_file(path, _MOST_BYTES))
    except (OSError, UnsafePathError):
        return None
