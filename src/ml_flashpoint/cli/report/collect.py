"""What a report is about, from files of events: sums by step and by rank, failures, recoveries.

Owns what is kept of events, which may be many: a few numbers for each step and rank. Nothing in a file is trusted: what
is no event, or says what cannot be, is left out and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ml_flashpoint.format import events
from ml_flashpoint.format.errors import ObjectNotFoundError
from ml_flashpoint.format.events import Event, decode_event, name_of
from ml_flashpoint.format.recoveries import Recoveries, Recovery

MOST_FAILURES = 500
MOST_RECOVERIES = 4000

_MOST_OF_A_LINE = 1 << 17
_TELL_EVERY = 4096
_LATEST_S = 2.0**33
_MOST_SECONDS = 1e9
_MOST = 2**53

FAILURES: tuple[type[Event], ...] = (
    events.SaveFailed,
    events.ReplicationFailed,
    events.AgreementFailed,
    events.PersistFailed,
    events.SteppedBack,
)
"""Kinds of events that have an ``error``."""


@dataclass(slots=True)
class Sum:
    """Of some numbers: how many, all together, and the greatest."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, value: float) -> None:
        """One more."""
        self.count, self.total, self.most = self.count + 1, self.total + value, max(self.most, value)

    @property
    def mean(self) -> float:
        """0.0 of none."""
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class OfRank:
    """What a rank has told, over all of its lives.

    Attributes:
        node: that it was on last.
        held: seconds of the loop.
        saves, failures: parts committed, and events that tell of a failure.
        part_bytes: of its newest part.
        verified: greatest step that was.
    """

    node: str = ""
    held: Sum = field(default_factory=Sum)
    saves: int = 0
    failures: int = 0
    part_bytes: int = 0
    verified: int | None = None


@dataclass(slots=True)
class Collected:
    """See the module.

    Attributes:
        files: their names.
        events, left_out: lines that were understood, and those that were not.
        kinds: how many events of each kind.
        bases: base containers.
        first_s, last_s: time of the first and of the last event.
        held, committed, verified, copied: seconds, by step: of the loop; until a part was committed; until the version
            was verified; for its copies.
        progress: when which step was committed, verified and persisted, as the first rank that told of one has it.
        ranks: by number.
        failures: the newest `MOST_FAILURES` of them, oldest first once all is read.
        recoveries: of all ranks, likewise.
    """

    files: list[str] = field(default_factory=list)
    events: int = 0
    left_out: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    bases: set[str] = field(default_factory=set)
    first_s: float = _LATEST_S
    last_s: float = 0.0
    held: dict[int, Sum] = field(default_factory=dict)
    committed: dict[int, Sum] = field(default_factory=dict)
    verified: dict[int, Sum] = field(default_factory=dict)
    copied: dict[int, Sum] = field(default_factory=dict)
    progress: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    ranks: dict[int, OfRank] = field(default_factory=dict)
    failures: list[Event] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    _tellers: dict[str, int] = field(default_factory=dict)

    @property
    def failure_count(self) -> int:
        """How many events tell of a failure, those that are not kept included."""
        return sum(rank.failures for rank in self.ranks.values())

    def add(self, event: Event) -> None:
        """Take one more event into account."""
        self.events += 1
        self.kinds[name_of(event)] += 1
        self.bases.add(event.base)
        self.first_s, self.last_s = min(self.first_s, event.time_s), max(self.last_s, event.time_s)
        rank = self.ranks.setdefault(event.rank, OfRank())
        rank.node = event.node
        match event:
            case events.LoopHeld():
                self._note(self.held, event, event.seconds)
                rank.held.add(event.seconds)
            case events.PartCommitted():
                self._note(self.committed, event, event.seconds)
                self._reach("committed", event)
                rank.saves, rank.part_bytes = rank.saves + 1, event.bytes
            case events.PartReplicated():
                self._note(self.copied, event, event.seconds)
            case events.VersionVerified():
                self._note(self.verified, event, event.seconds)
                self._reach("verified", event)
                rank.verified = max(rank.verified or 0, event.step or 0)
            case events.VersionPersisted():
                self._reach("persisted", event)
        if isinstance(event, FAILURES):
            rank.failures += 1
            self.failures.append(event)
            if len(self.failures) >= 2 * MOST_FAILURES:
                self._keep_newest()

    @staticmethod
    def _note(by_step: dict[int, Sum], event: Event, seconds: float) -> None:
        if event.step is not None:
            by_step.setdefault(event.step, Sum()).add(seconds)

    def _reach(self, what: str, event: Event) -> None:
        if event.step is not None and self._tellers.setdefault(what, event.rank) == event.rank:
            self.progress.setdefault(what, []).append((event.time_s, event.step))

    def end(self, recoveries: Iterable[Recovery]) -> None:
        """Some recoveries are over: those that had something to recover."""
        self.recoveries.extend(each for each in recoveries if each.source != "nothing" or each.stepped_back)
        if len(self.recoveries) >= 2 * MOST_RECOVERIES:
            self._keep_newest()

    def _keep_newest(self) -> None:
        self.failures = sorted(self.failures, key=lambda each: each.time_s)[-MOST_FAILURES:]
        self.recoveries = sorted(self.recoveries, key=lambda each: each.began_s)[-MOST_RECOVERIES:]

    def finish(self) -> None:
        """All is read."""
        self._keep_newest()
        for reached in self.progress.values():
            reached.sort()


def collect(paths: Sequence[str], tell: Callable[[int, int], object] = lambda done, total: None) -> Collected:
    """Read files of events.

    Args:
        tell: called now and then with the bytes that are read, and those that there are.

    Raises:
        ObjectNotFoundError: one cannot be read.
    """
    collected = Collected()
    total, done = sum(os.path.getsize(path) for path in paths if os.path.isfile(path)), 0
    for path in paths:
        recoveries = Recoveries()
        collected.files.append(path)
        try:
            if not os.path.isfile(path):
                raise ObjectNotFoundError("this is no file", path=path, hint="give what FLASHPOINT_EVENTS names")
            with open(path, "rb") as lines:
                # By pieces: a line of any length must not be taken into memory.
                for number in itertools.count():
                    line = lines.readline(_MOST_OF_A_LINE)
                    if not line:
                        break
                    done += len(line)
                    if number % _TELL_EVERY == 0:
                        tell(done, total)
                    _take(collected, recoveries, line)
        except OSError as error:
            raise ObjectNotFoundError(f"cannot be read: {error.strerror}", path=path) from error
        collected.end(recoveries.rest())
    collected.finish()
    return collected


def _take(collected: Collected, recoveries: Recoveries, line: bytes) -> None:
    if not line.strip():
        return
    event = decode_event(line)
    if event is None or not _can_be(event):
        collected.left_out += 1
        return
    collected.add(event)
    collected.end(recoveries.add(event))


def _can_be(event: Event) -> bool:
    """Whether its numbers are such as happen: `json` reads NaN and integers of any length."""
    return 0 < event.time_s < _LATEST_S and all(
        _is_sound(field.name, getattr(event, field.name)) for field in dataclasses.fields(event)
    )


def _is_sound(name: str, value: Any) -> bool:
    if isinstance(value, float) or name.endswith("_s") or name == "seconds":
        return bool(0 <= value < (_LATEST_S if name == "time_s" else _MOST_SECONDS))
    return not isinstance(value, int) or 0 <= value < _MOST
