"""Rounds: which save the ranks of a job verify next, and what each rank retains meanwhile.

Pure functions and plain state, without clocks, threads, sockets or files, so that a simulation of thousands of
schedules drives the very code that jobs run (``tests/engine/simulation.py``).

A verdict lists the verified saves, and ``first``. The round's save is, on each rank, its first save call that is not
older than ``first``. It follows from the calls alone, so the moment at which a rank learns of a verdict does not
matter. Each rank commits its part of that save, has its holders copy it, and answers once. The leader, rank 0, reads
all answers and decides the next verdict. A rank or a leader that is silent means that nothing new is verified, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ml_flashpoint.format.errors import InvalidArgumentError, ProtocolError
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.pool import SlotRequest

NOTHING = SaveId(0, 0)
"""Stands for "no version": older than every save."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision of the leader.

    Attributes:
        number: position in the run, from 0.
        verified: the newest ``keep`` saves of which every rank has its part and all copies; newest last.
        first: the round's save is each rank's first save call that is not older.
        total: saves of this run that have been verified.
        recovered: the version that the run goes on from, until all its copies are there. Until then every round is
            about it.
    """

    number: int
    verified: tuple[SaveId, ...]
    first: SaveId
    total: int = 0
    recovered: SaveId | None = None

    @property
    def retained(self) -> frozenset[SaveId]:
        """The saves whose parts and copies every rank retains until a newer verdict."""
        return frozenset(self.verified if self.recovered is None else (*self.verified, self.recovered))

    @property
    def newest(self) -> SaveId:
        """The newest verified save; `NOTHING` if there is none."""
        return self.verified[-1] if self.verified else NOTHING

    def to_fields(self) -> dict[str, object]:
        """Return this verdict as values that JSON can hold."""
        recovered = None if self.recovered is None else list(self.recovered)
        return {
            "number": self.number,
            "verified": [list(save) for save in self.verified],
            "first": list(self.first),
            "total": self.total,
            "recovered": recovered,
        }

    @classmethod
    def from_fields(cls, fields: object) -> Verdict:
        """Return the verdict of `to_fields`, which came from another rank.

        Raises:
            ProtocolError: these are not the fields of a verdict.
        """
        if not isinstance(fields, dict):
            raise ProtocolError(f"a verdict must be an object, not {type(fields).__name__}")
        verified, recovered = fields.get("verified"), fields.get("recovered")
        if not isinstance(verified, list):
            raise ProtocolError("field 'verified' of a verdict must be a list")
        return cls(
            number=_natural(fields.get("number"), "number"),
            verified=tuple(_save(each, "verified") for each in verified),
            first=_save(fields.get("first"), "first"),
            total=_natural(fields.get("total"), "total"),
            recovered=None if recovered is None else _save(recovered, "recovered"),
        )


def _natural(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ProtocolError(f"field {name!r} of the board must be an integer from 0, got {value!r}")
    return value


def _save(value: object, name: str) -> SaveId:
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError(f"field {name!r} of the board must be [run, step], got {value!r}")
    return SaveId(_natural(value[0], name), _natural(value[1], name))


@dataclass(frozen=True, slots=True)
class Answer:
    """The word of one rank on a round.

    Attributes:
        number: of the verdict that began the round.
        save: the round's save on this rank.
        copied: True if the part is committed and all its holders have acknowledged a copy.
        late: without a part, the number of saves by which the rank learned of the round too late, or lacked a slot.
    """

    number: int
    save: SaveId
    copied: bool
    late: int = 0

    def to_fields(self) -> list[object]:
        """Return this answer as values that JSON can hold."""
        return [self.number, list(self.save), self.copied, self.late]

    @classmethod
    def from_fields(cls, fields: object) -> Answer:
        """Return the answer of `to_fields`, which came from another rank.

        Raises:
            ProtocolError: these are not the fields of an answer.
        """
        if not isinstance(fields, list) or len(fields) != 4 or not isinstance(fields[2], bool):
            raise ProtocolError(f"an answer must be [number, save, copied, late], got {fields!r}")
        return cls(_natural(fields[0], "number"), _save(fields[1], "save"), fields[2], _natural(fields[3], "late"))


@dataclass(slots=True)
class Member:
    """One rank's side of the rounds. Not thread-safe.

    Args:
        verdict: the first verdict of the run, which `open` has found.
        keep: number of verified versions that are retained.

    Attributes:
        verdict: the newest verdict that this rank knows.
        target: the round's save; None until the rank calls it.
        answer: the answer to the round; None until there is one.
        explicit: the newest save that somebody waits for.
        parts: saves of this run of which this rank has a part or is about to have one; True if the part is committed.
    """

    verdict: Verdict
    keep: int
    calls: list[SaveId] = field(default_factory=list)
    target: SaveId | None = None
    answer: Answer | None = None
    explicit: SaveId | None = None
    parts: dict[SaveId, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.verdict.recovered is not None:
            self.target = self.verdict.recovered
            self.calls.append(self.target)
            self.parts[self.target] = True

    def call(self, save: SaveId, *, explicit: bool = False) -> None:
        """Record that the program saves.

        Args:
            save: newer than all that were called before in this run.
            explicit: True if somebody waits for this save.

        Raises:
            InvalidArgumentError: a newer save was called before.
        """
        if self.calls and save <= self.calls[-1]:
            raise InvalidArgumentError(
                f"step {save.step} is not above step {self.calls[-1].step}, which was saved before in this run",
                argument="step",
                value=save.step,
            )
        self.calls.append(save)
        self.parts[save] = False
        if explicit:
            self.explicit = save
        if self.target is None and save >= self.verdict.first:
            self.target = save

    def request(self, save: SaveId) -> SlotRequest:
        """Return the terms on which a save may take a slot now."""
        retained = self.verdict.retained
        if self.target is not None:
            retained |= {self.target}
        of_round = save == self.target
        spare = 0 if of_round or self.target is not None else 1
        return SlotRequest(save, retained, of_round, spare, may_grow=self.verdict.total > self.keep)

    def commit(self, save: SaveId) -> None:
        """Record that this rank's part of a save is committed."""
        self.parts[save] = True

    def fail(self, save: SaveId, *, late: int = 0) -> None:
        """Record that a save has no part on this rank; if it is the round's save, answer no.

        Args:
            save: failed, or found no slot, or had a slot that another save has taken.
            late: 1 if there was no slot; see `Answer`.
        """
        self.parts.pop(save, None)
        self._answer(save, copied=False, late=late)

    def end_push(self, save: SaveId, *, copied: bool) -> None:
        """Record that the push of a committed part has ended.

        Args:
            save: the round's save; another one has no answer.
            copied: True if all holders have acknowledged a copy.
        """
        self._answer(save, copied=copied)

    def _answer(self, save: SaveId, *, copied: bool, late: int = 0) -> None:
        if save == self.target and self.answer is None:
            self.answer = Answer(self.verdict.number, save, copied, late)

    def adopt(self, verdict: Verdict) -> bool:
        """Take a verdict into use if it is newer, from the board or along with a push. Return True if it was newer."""
        if verdict.number <= self.verdict.number:
            return False
        self.verdict = verdict
        self.calls = [save for save in self.calls if save >= verdict.newest]  # no round is about an older one
        self.answer = None
        due = [save for save in self.calls if save >= verdict.first]
        self.target = due[0] if due else None
        if self.target is not None and self.target not in self.parts:
            self._answer(self.target, copied=False, late=len(due))
        return True


@dataclass(slots=True)
class Leader:
    """The decisions of rank 0, which is a member, too. Not thread-safe.

    Args:
        member: rank 0's own side.
        ranks: number of ranks.

    Attributes:
        slack: saves by which the next round begins later, because ranks have learned of rounds too late.
    """

    member: Member
    ranks: int
    slack: int = 0

    def decide(self, answers: Iterable[Answer]) -> Verdict | None:
        """Return the next verdict; None while the round is open.

        Args:
            answers: of any rounds, at most one from each rank.
        """
        old, explicit = self.member.verdict, self.member.explicit
        found = [answer for answer in answers if answer.number == old.number]
        waiting = explicit is not None and explicit > old.newest
        if any(not answer.copied for answer in found) or len({answer.save for answer in found}) > 1:
            self.slack += max(answer.late for answer in found)
            verified, total, recovered = old.verified, old.total, old.recovered
            first = recovered or self._later()
        elif len(found) == self.ranks:
            self.slack = max(self.slack - 1, 0)
            save = found[0].save
            verified, total, recovered = (*old.verified, save)[-self.member.keep :], old.total + 1, None
            held = [each for each, is_committed in self.member.parts.items() if is_committed and each > save]
            first = max(held) if held and not self.slack else self._later()
            waiting = explicit is not None and explicit > save
        elif self._may_begin_another(old, explicit):
            verified, total, recovered, first = old.verified, old.total, None, self._later()
        else:
            return None
        if waiting and recovered is None and explicit is not None:
            first = explicit
        return Verdict(old.number + 1, verified, first, total, recovered)

    def _may_begin_another(self, old: Verdict, explicit: SaveId | None) -> bool:
        """Return True if somebody waits for a save that the round, whose save has not come yet, would pass over."""
        if explicit is None or self.member.target is not None or old.recovered is not None:
            return False
        return old.newest < explicit < old.first

    def _later(self) -> SaveId:
        """Return the first save that rank 0 has not called, or one later by `slack` saves of the program's stride."""
        calls = self.member.calls
        if not calls:
            return self.member.verdict.first
        stride = calls[-1].step - calls[-2].step if len(calls) > 1 and calls[-1].run == calls[-2].run else 1
        return SaveId(calls[-1].run, calls[-1].step + 1 + self.slack * stride)
