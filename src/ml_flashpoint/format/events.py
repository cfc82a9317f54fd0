"""What happens to checkpoints, as plain values, and how they are written as lines of JSON.

Owns the kinds of events and the format of the lines. Who is told of them is `ml_flashpoint.events`'s.

A line is one JSON object (RFC 8259) with ``schema`` (:data:`SCHEMA`), ``event`` (the name of a class below in snake
case) and that class's attributes. Kinds and attributes may be added under the same number: readers leave out what they
do not know.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

SCHEMA = 1

_MOST_OF_A_LINE = 1 << 16
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to checkpoints, as one rank saw it.

    Attributes:
        time_s: when, in seconds since the epoch, by the clock of its node.
        rank: which rank tells.
        node: its node.
        base: base container of the job, on that node.
        step: the training step whose checkpoint it was; None where that is not known, or makes no sense.
    """

    time_s: float = 0.0
    rank: int = 0
    node: str = ""
    base: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHeld(Event):
    """A save has let go of the training loop for good: with the end of its copy, which may be some time after the call.

    Attributes:
        seconds: that it held the loop, all in all.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommitted(Event):
    """This rank's part of a version is on its node, whole.

    Attributes:
        bytes: its size.
        seconds: since the save began.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    """A save found no free slot, since earlier ones are still being copied: this rank has no part of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """This rank has no part of a version, or another rank has none.

    Attributes:
        error: why.
    """

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReplicated(Event):
    """All copies of this rank's part that the strategy asks for are acknowledged.

    Attributes:
        bytes: of the part.
        holders: ranks that hold copies now.
        seconds: that it took to make them.
    """

    bytes: int
    holders: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed(Event):
    """Copies of this rank's part are missing; older versions are kept.

    Attributes:
        error: why.
    """

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionVerified(Event):
    """All ranks have committed their parts, and have all copies: older versions may go.

    Attributes:
        seconds: since the save began on this rank.
    """

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementFailed(Event):
    """This rank cannot use the board: nothing new is verified until it can, and older versions stay.

    Attributes:
        error: the reason.
    """

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMissing(Event):
    """Rank 0 has heard nothing of some ranks about a save, which is not verified therefore. Nothing has failed yet.

    Attributes:
        ranks: these ranks.
        seconds: time since rank 0 has its part and the copies of it.
    """

    ranks: tuple[int, ...]
    seconds: float

    @property
    def text(self) -> str:
        """The event in words."""
        named = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        plural = len(self.ranks) > 1
        step = "" if self.step is None else f" of step {self.step}"
        return f"rank{'s' * plural} {named} {'have' if plural else 'has'} not come to the save{step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPersisted(Event):
    """This rank's part of a verified version is in the durable store.

    Attributes:
        bytes: its size.
        seconds: that it took to write it.
    """

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPersisted(Event):
    """All parts are in the durable store, and the marker that makes them a version. Told by rank 0.

    Attributes:
        url: of the store.
    """

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed(Event):
    """A version that was due is not persisted, or none can be; the next one is tried.

    Attributes:
        error: why.
    """

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFetched(Event):
    """A part that this node did not have was fetched from a peer.

    Attributes:
        part_rank: whose part it is.
        bytes: its size.
        seconds: that it took.
    """

    part_rank: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBack(Event):
    """A version could not be recovered or loaded, and an older one is looked for.

    Attributes:
        error: why.
    """

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecovered(Event):
    """A version is on its nodes, whole and verified.

    Attributes:
        detect_s: seconds for reading and gathering what there is.
        plan_s: seconds for planning.
        fetch_s: seconds for fetching from peers, verifying, voting.
        fetched_bytes: bytes that this rank received from peers.
        tries: plans that were carried out.
    """

    detect_s: float
    plan_s: float
    fetch_s: float
    fetched_bytes: int
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """Training goes on, from :attr:`step`.

    Attributes:
        source: where its state came from; see `Recovery`.
        seconds: that it took, all in all.
    """

    source: str
    seconds: float


KINDS: dict[str, type[Event]] = {
    _WORD.sub("_", kind.__name__).lower(): kind
    for kind in (
        LoopHeld,
        PartCommitted,
        SaveSkipped,
        SaveFailed,
        PartReplicated,
        ReplicationFailed,
        VersionVerified,
        AgreementFailed,
        RanksMissing,
        PartPersisted,
        VersionPersisted,
        PersistFailed,
        PartFetched,
        SteppedBack,
        VersionRecovered,
        Resumed,
    )
}
"""All kinds, by their names in lines."""

_NAMES = {kind: name for name, kind in KINDS.items()}


def name_of(event: Event) -> str:
    """Its kind, as in lines."""
    return _NAMES[type(event)]


def encode_event(event: Event) -> str:
    """One line, with its end."""
    return json.dumps({"schema": SCHEMA, "event": name_of(event), **dataclasses.asdict(event)}) + "\n"


def decode_event(line: str | bytes) -> Event | None:
    """What a line says; None if it is torn, or of a kind, a number of schema or a form that is not known here."""
    try:
        fields = json.loads(line) if len(line) <= _MOST_OF_A_LINE else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        return None
    kind = KINDS.get(str(fields.get("event")))
    if kind is None:
        return None
    known = {field.name: fields[field.name] for field in dataclasses.fields(kind) if field.name in fields}
    known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    try:
        event = kind(**known)
    except TypeError:  # an attribute is missing
        return None
    return event if has_types_of(event) else None


def decode_events(lines: Iterable[str | bytes]) -> Iterator[Event]:
    """What lines say, those left out that cannot be read."""
    return (event for line in lines if (event := decode_event(line)) is not None)


def has_types_of(value: Any) -> bool:
    """Whether the attributes of a dataclass's instance, which came from JSON, are what it says they are."""
    return all(_is_a(getattr(value, field.name), str(field.type)) for field in dataclasses.fields(value))


def _is_a(value: Any, hint: str) -> bool:
    match value:
        case bool():
            return False
        case None:
            return "None" in hint
        case int():
            return hint.startswith(("int", "float"))
        case float():
            return hint.startswith("float")
        case str():
            return hint.startswith("str")
        case tuple():
            kind = str if hint.startswith("tuple[str") else int
            return hint.startswith("tuple") and all(type(each) is kind for each in value)
    return False
