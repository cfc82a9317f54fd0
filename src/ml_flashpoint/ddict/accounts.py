"""Who writes to a dictionary, what of that may not be committed, and the rules that its checkpoints follow.

Owns the types that `attendance` keeps its account in, and the error that tells of lost writes. What follows from them
is for it, and for `coordinator`, to say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ml_flashpoint.ddict.errors import DDictWritesLostError
from ml_flashpoint.format.errors import ProtocolError

IsGone: TypeAlias = Callable[[], bool]
"""Whether whoever asked does not wait for the answer any more, so that nobody is told anything by it."""


def never() -> bool:
    """Of somebody who always does."""
    return False


class Write(NamedTuple):
    """What a handle wrote to one incarnation of a manager, as far as it may not be committed.

    Attributes:
        need: the checkpoint whose commit covers it.
        fresh: the handle has not moved since. Then a commit that is under way or done at ``need`` does not cover it,
            the next one does.
    """

    manager: int
    incarnation: str
    need: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    """How a dictionary treats its checkpoints; see `DDict` for what each field means to users.

    Attributes:
        managers: their number.
        replicated: whether commits wait for verified copies.
        snapshots: whether managers take snapshots at all: to replicate or to persist them.
        persist_freq: every so many checkpoints are persisted; 0: none on their own.
    """

    managers: int
    working_set_size: int
    wait_for_keys: bool
    wait_for_writers: bool
    replicated: bool
    snapshots: bool
    persist_freq: int

    def is_due(self, checkpoint_id: int) -> bool:
        """Whether a checkpoint is to be persisted on its own."""
        return self.persist_freq > 0 and (checkpoint_id + 1) % self.persist_freq == 0

    def next_due(self, committed: int) -> int | None:
        """The first checkpoint above ``committed`` that is."""
        if self.persist_freq <= 0:
            return None
        return ((committed + 1) // self.persist_freq + 1) * self.persist_freq - 1


Needs: TypeAlias = "dict[tuple[int, str], int]"
"""For a manager and its incarnation, the checkpoint that must be committed for all writes there to be."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """A connection that keeps a process's handles attached.

    Attributes:
        holder: the connection itself.
        pid: of the process, if that is on this machine.
        is_gone: whether it has ended, although nobody has said so yet.
    """

    holder: object
    pid: int | None
    is_gone: Callable[[], bool]


@dataclass(slots=True)
class Writer:
    """A handle that writes.

    Attributes:
        wrote: where it has writes that may not be committed.
        assumed: where it may have some that were committed, before another handle's rollback took that back.
        lost: what it is to be told: a manager came back without its writes.
        told: it was told that a manager lost what a handle wrote that is gone, and what it would go back to stays there
            until it has gone on or back.
        since: the newest checkpoint of any handle when this one came to where it is.
        moving_to: where it will be as soon as it may; it writes nothing more where it is.
    """

    position: int
    lease: str
    since: int = -1
    moving_to: int = -1
    wrote: Needs = field(default_factory=dict)
    assumed: Needs = field(default_factory=dict)
    lost: DDictWritesLostError | None = None
    told: DDictWritesLostError | None = None


def writes_lost(manager: int, committed: int) -> DDictWritesLostError:
    """The error that says so."""
    to = max(committed, 0)
    at = f"at checkpoint {committed}" if committed >= 0 else "empty, as nothing was committed yet"
    return DDictWritesLostError(
        f"manager {manager} came back {at}, without what was written since",
        manager=manager,
        checkpoint_id=to,
        hint=f"go back with rollback(to={to}) and write again from there",
    )


def listed(needs: Needs) -> list[list[Any]]:
    """As JSON can have it; `from_list` reads it."""
    return [[manager, incarnation, need] for (manager, incarnation), need in needs.items()]


def from_list(listed_needs: list[Any]) -> Needs:
    """What `listed` made a list of.

    Raises:
        ProtocolError: it is something else.
    """
    for each in listed_needs:
        if not (isinstance(each, list) and [type(part) for part in each] == [int, str, int]):
            raise ProtocolError("these are no needs")
    return {(manager, incarnation): need for manager, incarnation, need in listed_needs}


def writers_of(fields: Mapping[Any, Any]) -> dict[str, tuple[str, int | None]]:
    """What `Attendance.writers` returned, after it has been JSON.

    Raises:
        ProtocolError: it is something else.
    """
    for handle, told in fields.items():
        if not (
            isinstance(handle, str)
            and isinstance(told, (list, tuple))
            and [type(part) for part in told] in ([str, int], [str, type(None)])
        ):
            raise ProtocolError("these are no writers")
    return {handle: (told[0], told[1]) for handle, told in fields.items()}


def merge(needs: Needs, other: Needs) -> None:
    """Add what ``other`` needs to ``needs``."""
    for place, need in other.items():
        needs[place] = max(need, needs.get(place, need))
