"""Rounds: which save the ranks of a job verify next, and what each rank retains meanwhile.

Plain state, without clocks, threads, sockets or files, so that a simulation of thousands of schedules drives the very
code that jobs run (``tests/engine/simulation.py``).

A verdict lists the verified saves, and ``first``. The round's save is, on each rank, its first save call that is not
older than ``first``. It follows from the calls alone, so the moment at which a rank learns of a verdict does not
matter. A rank retains what its newest verdict lists, and its part of the round's save. It has the holders copy that
part, answers once, and keeps the part until a newer verdict. The leader, rank 0, decides: all have copied the same
save, or the ranks go on without it.

Ranks may be ahead of rank 0, for ever where no collective holds them together. So the leader begins a round later than
with its own next save by ``slack`` saves: by as many as some rank was ahead when it learned of a round. That is the
number of saves by which the rank came too late, counted from where the round had begun. A success halves the slack.

Until the save of such a round comes, rank 0's program may wait for an explicit save, and call no more. After a moment
without a call, the leader passes over older explicit saves if some rank has answered, for that rank has passed them.
Else it gives the round up for the newest explicit save. If that one is lost, the round that was given up goes on: a
program that only trains for longer than a moment would otherwise have every round given up before its save comes. A
rank that has no part of the round's save keeps its part of the round that was given up meanwhile, in the same slot.
Where a rank comes too late for such a round all the same, the moment was too short: it doubles, and each success halves
it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from ml_flashpoint.format.errors import InvalidArgumentError, ProtocolError
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.pool import SlotRequest
from ml_flashpoint.ranks.retention import Keep, kept, passes_multiple

NOTHING = SaveId(0, 0)
"""Older than every save."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_IDLE_S = 0.05
"""After so long without a save, rank 0's program may be waiting for one."""
_MOST_LOST, _MOST_DOUBLINGS = 16, 10


class Fate(enum.Enum):
    """State of a save under a verdict. One that is superseded will not be verified any more."""

    OPEN = "open"
    VERIFIED = "verified"
    SUPERSEDED = "superseded"


class Verdict(NamedTuple):
    """A decision of the leader. Travels as JSON.

    Attributes:
        number: position in the run, from 0.
        verified: the saves that stay of those of which every rank has its part and all copies; newest last.
        first: the round's save is each rank's first save call that is not older.
        total: saves of this run that have been verified.
        recovered: the version that the run goes on from, until all its copies are there. Until then every round is
            about it.
        persist: the newest verified save that was due to be persisted. Every rank hears of it while it is listed.
        lost: newer saves that somebody waits for in vain, for some rank has no part of them, or no room for a copy.
    """

    number: int
    verified: tuple[SaveId, ...]
    first: SaveId
    total: int = 0
    recovered: SaveId | None = None
    persist: SaveId | None = None
    lost: tuple[SaveId, ...] = ()

    @property
    def retained(self) -> frozenset[SaveId]:
        """The saves whose parts and copies every rank retains until a newer verdict."""
        return frozenset(self.verified if self.recovered is None else (*self.verified, self.recovered))

    @property
    def newest(self) -> SaveId:
        """The newest verified save; `NOTHING` if there is none."""
        return self.verified[-1] if self.verified else NOTHING

    def fate(self, save: SaveId, *, explicit: bool) -> Fate:
        """Return the state of a save of this run under this verdict, and all later ones unless it is `Fate.OPEN`. To be
        asked at the call, and for each verdict that the rank hears: a verified save is listed for a while only."""
        if save in self.verified:
            return Fate.VERIFIED
        # A round may still go back to an explicit save, unless that is lost.
        if save < self.newest or save in self.lost or (save < self.first and not explicit):
            return Fate.SUPERSEDED
        return Fate.OPEN

    @classmethod
    def parsed(cls, found: Any) -> Verdict:
        """Return the verdict that another rank has sent, decoded from JSON. Raise `ProtocolError` if it is none."""
        try:
            number, verified, first, total, *others, lost = found
            recovered, persist = [None if each is None else _saves([each])[0] for each in others]
            return cls(int(number), _saves(verified), _saves([first])[0], int(total), recovered, persist, _saves(lost))
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"the board has not a verdict, but {str(found)[:80]}: {error}") from error


def _saves(found: Any) -> tuple[SaveId, ...]:
    return tuple([SaveId(int(run), int(step)) for run, step in found])


class Outcome(str, enum.Enum):
    """Result of a round on one rank."""

    COPIED = "copied"
    """The part is committed, and all its holders have acknowledged a copy."""
    UNCOPIED = "uncopied"
    """The part is committed, and a holder has no copy."""
    LOST = "lost"
    """The rank has no part of the save, or a holder no room for its copy, and never will."""


class Answer(NamedTuple):
    """The word of one rank on a round. Travels as JSON.

    Attributes:
        number: of the verdict that began the round.
        save: the round's save on this rank.
        late: if lost, the number of saves by which the rank learned of the round too late, or lacked a slot.
        table: name of the agreement on who writes what by which the part was written.
    """

    number: int
    save: SaveId
    outcome: Outcome
    late: int = 0
    table: str = ""

    @classmethod
    def parsed(cls, found: Any) -> Answer:
        """Return the answer that another rank has sent, decoded from JSON. Raise `ProtocolError` if it is none."""
        try:
            number, (run, step), outcome, late, table = found
            return cls(int(number), SaveId(int(run), int(step)), Outcome(outcome), int(late), str(table))
        except (TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"the board has not an answer, but {str(found)[:80]}: {error}") from error


@dataclass(slots=True)
class Member:
    """One rank's side of the rounds. Not thread-safe.

    Attributes:
        verdict: the newest verdict that this rank knows; at first that which recovery has found.
        calls: saves that the program has called, newest last, and the agreement on who writes what of each.
        target: the round's save; None until the rank calls it.
        answer: the answer to the round; None until there is one.
        explicit: saves newer than the newest verified one that somebody waits for; newest last.
        parts: saves of this run of which this rank has a part or is about to have one; True once the part is committed.
        highest: the newest `Verdict.first` that this rank has heard of.
    """

    verdict: Verdict
    keep: Keep
    calls: dict[SaveId, str] = field(default_factory=dict)
    target: SaveId | None = None
    answer: Answer | None = None
    explicit: list[SaveId] = field(default_factory=list)
    parts: dict[SaveId, bool] = field(default_factory=dict)
    highest: SaveId = NOTHING

    def __post_init__(self) -> None:
        self.highest = self.verdict.first
        if self.verdict.recovered is not None:
            self.target = self.verdict.recovered
            self.calls[self.target], self.parts[self.target] = "", True

    def call(self, save: SaveId, *, explicit: bool = False, table: str = "") -> None:
        """Record that the program saves; somebody waits for an ``explicit`` save. ``table`` names the agreement on who
        writes what. Raise an `InvalidArgumentError` if a newer save was called before."""
        if self.calls and save <= (last := next(reversed(self.calls))):
            text = f"step {save.step} is not above step {last.step}, which was saved before in this run"
            raise InvalidArgumentError(text, argument="step", value=save.step)
        self.calls[save], self.parts[save] = table, False
        if explicit:
            self.explicit.append(save)
        if self.target is None and save >= self.verdict.first:
            self.target = save

    def ask(self, save: SaveId) -> None:
        """Record that somebody waits for the save that was called last, and may have been a loop's."""
        if save in self.calls and save not in self.explicit and save > self.verdict.newest:
            self.explicit.append(save)

    @property
    def retained(self) -> frozenset[SaveId]:
        """The saves whose parts this rank retains: those of the newest verdict, and the round's. If this rank has no
        part of the round's, the one of a round that was given up for it, and may go on."""
        target = self.target
        if target is not None and target not in self.parts:
            target = next((save for save in self.calls if save >= self.highest), None)
        return self.verdict.retained if target is None else self.verdict.retained | {target}

    def request(self, save: SaveId | None, *, explicit: bool = False) -> SlotRequest:
        """Return the terms on which a save may take a slot now: one that was called, or None for one whose step is not
        known yet, which somebody may wait for (``explicit``)."""
        is_coming = self.target is None
        if save is None:
            comes_first, spare = explicit or is_coming, 0  # as long as the round's save has not come, this may be it
        else:
            # A save that somebody waits for: were it to wait for a round, that round could wait for it.
            comes_first = save == self.target or save in self.explicit
            spare = int(is_coming and not comes_first)
        return SlotRequest(save, self.retained, comes_first, spare, may_grow=self.verdict.total > self.keep.versions)

    def fail(self, save: SaveId, *, late: int = 0) -> None:
        """Record that a save has no part on this rank: it failed, or found no slot (``late`` is 1 then), or its slot
        was taken. If it is the round's save, answer so."""
        self.parts.pop(save, None)
        self.end(save, Outcome.LOST, late)

    def end(self, save: SaveId, outcome: Outcome, late: int = 0) -> None:
        """Answer with an outcome, if a save is the round's and there is no answer yet."""
        if outcome is Outcome.LOST and save == self.verdict.recovered:  # which is never lost
            outcome = Outcome.UNCOPIED
        if save == self.target and self.answer is None:
            self.answer = Answer(self.verdict.number, save, outcome, late, self.calls.get(save, ""))

    def adopt(self, verdict: Verdict) -> bool:
        """Take a verdict into use if it is newer, from the board or along with a push. Return True if it was newer."""
        if verdict.number <= self.verdict.number:
            return False
        self.verdict, self.highest, newest = verdict, max(self.highest, verdict.first), verdict.newest
        self.calls = {save: table for save, table in self.calls.items() if save >= newest}  # no round is about others
        self.parts = {save: committed for save, committed in self.parts.items() if save >= newest}
        self.explicit = [save for save in self.explicit if save > newest]
        due = [save for save in self.calls if save >= verdict.first]
        self.target, self.answer = due[0] if due else None, None
        if due and due[0] not in self.parts:
            self.end(due[0], Outcome.LOST, late=len(due))
        return True


@dataclass(slots=True)
class Leader:
    """The decisions of rank 0, which is a member, too. Not thread-safe.

    Attributes:
        persist_every: steps. The first verified save at or after each multiple is due to be persisted; 0 for none.
        stride: steps between the last two saves of rank 0's program.
        slack: saves by which the next round begins later than with rank 0's next save, because ranks are ahead.
        offset: saves by which this round began later than that; negative if rank 0 had called its save before.
        given_up: `Verdict.first` of the round that was given up for an explicit save, and is to go on; `NOTHING` if
            there is none.
        spoilt: rounds that were given up, and then came too late for a rank; one less after each success. Each doubles
            the time without a call after which a round is given up.
        lost: saves that some rank has no part of, newer than the newest verified one. No round begins with one.
        tries: rounds in a row that began about the save of the round before, because that one had no result.
        due_after: step of the last save that was due to be persisted, or that the run goes on from.
    """

    member: Member
    ranks: int
    persist_every: int = 0
    stride: int = 1
    slack: int = 0
    offset: int = 0
    given_up: SaveId = NOTHING
    spoilt: int = 0
    lost: set[SaveId] = field(default_factory=set)
    tries: int = 0
    due_after: int = 0

    def __post_init__(self) -> None:
        self.due_after = max(self.member.verdict.retained, default=NOTHING).step

    def decide(
        self,
        answers: Iterable[Answer],
        *,
        since_s: float = math.inf,
        idle_s: float = math.inf,
        persister_is_busy: bool = False,
    ) -> Verdict | None:
        """Return the next verdict; None while the round is open.

        Args:
            answers: of any rounds, at most one from each rank.
            since_s: seconds since the newest verdict. Rounds about one save begin with pauses that grow.
            idle_s: seconds since rank 0 has called a save.
            persister_is_busy: nothing becomes due to be persisted just now.
        """
        old, last = self.member.verdict, list(islice(reversed(self.member.calls), 2))
        if len(last) == 2 and last[0].run == last[1].run:
            self.stride = last[0].step - last[1].step
        found = [answer for answer in answers if answer.number == old.number]
        written = {(answer.save, answer.table) for answer in found}
        if len(written) > 1 or {answer.outcome for answer in found} - {Outcome.COPIED}:
            verdict = self._go_on_without(old, found, since_s)
        elif len(found) == self.ranks:
            verdict = self._verify(old, found[0].save, persister_is_busy)
        else:
            verdict = self._go_back(old, found, idle_s)
        if verdict is not None and verdict.first != old.first:
            self.offset = self._offset(verdict.first)
        return verdict

    def may_be_waited_for(self, idle_s: float) -> bool:
        """Return True if rank 0's program may wait for an explicit save that is older than the round's: the answers of
        some ranks decide then."""
        verdict = self.member.verdict
        waited = (save < verdict.first and save not in verdict.lost for save in self.member.explicit)
        return idle_s >= _IDLE_S * 2 ** min(self.spoilt, _MOST_DOUBLINGS) and any(waited)

    def _go_back(self, old: Verdict, found: Sequence[Answer], idle_s: float) -> Verdict | None:
        """Return the verdict by which an open round passes over explicit saves, or ends for one; None to leave it."""
        first, has_come, may_wait = old.first, self.member.target is not None, self.may_be_waited_for(idle_s)
        waited = [save for save in self._explicit(old.newest)[0] if save < first]
        if has_come or (found and may_wait):  # some rank has passed these, and the round is not given up for them
            self.lost.update(waited)
        elif not may_wait:
            return None
        elif waited and old.recovered is None:
            first, self.given_up = waited[-1], first
        lost = tuple(save for save in self._explicit(old.newest)[1] if save < old.first or save in old.lost)
        if (first, lost) == (old.first, old.lost):
            return None
        return old._replace(number=old.number + 1, first=first, lost=lost)

    def _go_on_without(self, old: Verdict, found: Sequence[Answer], since_s: float) -> Verdict | None:
        """Return the verdict after a round without result; None if it would be about the same save too soon."""
        newest = max(answer.save for answer in found)
        # A rank whose first call is newer has not made the others' call, and never will.
        lost = {answer.save for answer in found if answer.outcome is Outcome.LOST or answer.save < newest}
        if len({answer.table for answer in found if answer.save == newest}) > 1:
            lost.add(newest)
        late = max(answer.late for answer in found)
        slack = max(self.slack, self.offset + late)
        waited = [save for save in self._explicit(old.newest)[0] if save not in lost]
        if old.recovered is not None:
            first = old.recovered
        elif waited and not (slack and late):
            first = waited[-1]  # older ones have slots that this one may need
        elif self.given_up > max([old.first, *self.member.calls]):
            first = self.given_up
        else:
            first = max([self._later(slack), *(SaveId(save.run, save.step + 1) for save in lost)])
        is_repeat = old.first <= first <= newest
        pause_s = min(_SHORTEST_PAUSE_S * 2 ** min(self.tries - 1, 9), _LONGEST_PAUSE_S)
        if is_repeat and self.tries and since_s < pause_s:
            return None
        self.lost |= lost
        self.spoilt += bool(late and old.first == self.given_up)
        self.given_up = first if first == self.given_up else NOTHING
        self.slack, self.tries = slack, self.tries + 1 if is_repeat else 0
        return old._replace(number=old.number + 1, first=first, lost=self._explicit(old.newest)[1])

    def _verify(self, old: Verdict, save: SaveId, persister_is_busy: bool) -> Verdict:
        """Return the verdict that lists a save."""
        self.slack, self.spoilt, self.tries, self.given_up = self.slack // 2, max(self.spoilt - 1, 0), 0, NOTHING
        self.lost = {each for each in self.lost if each > save}
        parts = [each for each, is_committed in self.member.parts.items() if is_committed and each not in self.lost]
        held = [each for each in parts if each > save and each >= self.member.highest]
        first, (waited, lost) = self._later(self.slack), self._explicit(save)
        if not self.slack:
            first = waited[0] if waited else max(held, default=first)
        persist = old.persist
        if not persister_is_busy and passes_multiple(self.persist_every, self.due_after, save.step):
            persist, self.due_after = save, save.step
        verified = tuple(kept([*old.verified, save], self.member.keep))
        return Verdict(old.number + 1, verified, first, old.total + 1, persist=persist, lost=lost)

    def _explicit(self, newest: SaveId) -> tuple[list[SaveId], tuple[SaveId, ...]]:
        """Return the saves that somebody waits for: those that every rank may have, and a few that some rank lacks."""
        there = self.member.parts.keys() - self.lost
        waiting = [save for save in self.member.explicit if save > newest]
        lacked = [save for save in waiting if save not in there]
        return [save for save in waiting if save in there], tuple(lacked[-_MOST_LOST:])

    def _later(self, slack: int) -> SaveId:
        """Return the first save that rank 0 has not called, or one later by ``slack`` saves of the program's stride."""
        last, least = next(reversed(self.member.calls), None), self.member.highest  # older ones are superseded
        return max(least, SaveId(last.run, last.step + 1 + slack * self.stride)) if last else least

    def _offset(self, first: SaveId) -> int:
        """Return the number of saves by which one comes after rank 0's next; negative if rank 0 has called it."""
        if called := sum(save >= first for save in self.member.calls):
            return -called
        last = next(reversed(self.member.calls), first)
        return max(first.step - last.step - 1, 0) // self.stride if last.run == first.run else 0
