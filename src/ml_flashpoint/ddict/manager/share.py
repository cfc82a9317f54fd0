"""One manager's share of the keys: which requests take effect, in which epoch and cut. Pure: a simulation drives it.

It knows neither threads, bytes nor a network; its manager guards it by a lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictManagerLostError,
    DDictPersistError,
    DDictReadOnlyError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.manager.shard import Entry, Shard, StoredValue
from ml_flashpoint.ddict.options import Options
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.fence import Fence
from ml_flashpoint.ddict.wire.requests import Whose
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.net.messages import Fields


@dataclass(eq=False, slots=True)
class Cut:
    """The part of a cut that this manager has."""

    checkpoint_id: int
    entries: list[Entry]  # of all keys that there are
    part: SaveId | None = None  # its snapshot, once that is sealed
    needs: frozenset[SaveId] = frozenset()  # the parts without which the snapshot cannot be read, itself among them
    lines: list[bytes] = field(default_factory=list)  # of the index of the newest snapshot, for the next one

    def seal(self, part: SaveId) -> None:
        """Note its snapshot."""
        values = [entry.value for entry in self.entries if isinstance(entry.value, StoredValue)]
        self.needs, self.part = frozenset((part, *map(part_of, values))), part


def part_of(value: StoredValue) -> SaveId:
    """The part that a large value is, once it was sealed."""
    assert value.part is not None
    return value.part


class CutTable:
    """The cuts of a manager, by their numbers. Thread-safe: it is never changed, but replaced, by one at a time.
    ``is_less``: one that was sealed was let go, or may have been, so that there may be parts that nothing needs."""

    def __init__(self) -> None:
        self._cuts: dict[int, Cut] = {}  # ascending
        self.is_less = True

    def add(self, number: int, checkpoint_id: int, entries: list[Entry]) -> Cut:
        """Have a cut."""
        cut = Cut(checkpoint_id, entries)
        self._cuts = dict(sorted([*self._cuts.items(), (number, cut)]))
        return cut

    def retain(self, is_wanted: Callable[[int], bool]) -> None:
        """Keep some cuts."""
        before, self._cuts = self._cuts, {each: cut for each, cut in self._cuts.items() if is_wanted(each)}
        gone = [cut for each, cut in before.items() if each not in self._cuts]
        self.is_less = self.is_less or any(cut.part is not None for cut in gone)

    def get(self, number: int) -> Cut | None:
        """Return a cut, if it is there."""
        return self._cuts.get(number)

    def find(self, number: int) -> Cut:
        """Return a cut. Raises `DDictPersistError`: it was not prepared here."""
        if (cut := self._cuts.get(number)) is None:
            raise DDictPersistError(f"cut {number} was not prepared here")
        return cut

    def some(self, numbers: tuple[int, ...]) -> list[Cut]:
        """Return those of some cuts that are there."""
        return [self._cuts[each] for each in numbers if each in self._cuts]

    def sealed(self) -> dict[int, Cut]:
        """Return the cuts that are sealed."""
        return {number: cut for number, cut in self._cuts.items() if cut.part is not None}

    def newest_sealed(self, below: int | None = None) -> Cut | None:
        """Return the newest of these; ``below``: before a cut."""
        its = [cut for number, cut in self.sealed().items() if below is None or number < below]
        return its[-1] if its else None

    def needed(self) -> set[SaveId]:
        """Return the parts that snapshots need."""
        return set[SaveId]().union(*(cut.needs for cut in self._cuts.values()))


class _Discarded(NamedTuple):
    """The last that was said of a handle that went back, or whose process was killed (``dead``)."""

    epoch: int
    number: int
    dead: bool = False


class Share:
    """See the module.

    Attributes:
        epoch: requests of another one are refused, and all before it has begun any (-1).
        lost: why it never will, if that is so.
        fence: of the handles that have written in this epoch. Requests of earlier ones are refused anyhow.
    """

    def __init__(self, number: int, options: Options, table: CutTable, *, epoch: int = 0) -> None:
        self.number, self.options, self.table, self.epoch = number, options, table, epoch
        self.shard = Shard(is_final=not options.snapshots)
        self.fence = Fence()
        self.lost: DDictManagerLostError | None = None
        self.frozen, self._frozen_by = False, 0  # by the request of this number
        self._discarded: dict[str, _Discarded] = {}
        self._settled = 0  # the newest cut that is known to be committed
        # The newest cut that was prepared, or that this epoch began with, and its checkpoint.
        self._cut, self._cut_at = 0, -1

    def check_epoch(self, epoch: int) -> None:
        """Refuse what belongs to another epoch."""
        if epoch != self.epoch:
            raise self.lost or StaleEpochError(f"manager {self.number} is in epoch {self.epoch}", manager=self.number)

    def check_read(self, whose: Whose) -> None:
        """Refuse a read of another epoch, and what its handle gave up before."""
        self.check_epoch(whose.epoch)
        with contextlib.suppress(StaleRequestError):  # a read that comes late does no harm
            self.fence.hear(whose.handle, whose.generation, self.epoch)

    def check_change(self, whose: Whose) -> Fields:
        """Refuse a change that comes too late, or may not be made. Return the newest cut that it is ``late`` for, if
        any."""
        self.check_epoch(whose.epoch)
        self.fence.hear(whose.handle, whose.generation, self.epoch)
        if whose.handle in self._discarded and self._discarded[whose.handle].dead:
            raise StaleEpochError("the connection of this handle's process broke", manager=self.number)
        self.check_writable()
        return {"late": self._cut} if whose.checkpoint_id <= self._cut_at else {}

    def check_writable(self) -> None:
        """Refuse writes where none may be made."""
        if self.frozen:
            raise DDictReadOnlyError("the dictionary is frozen", hint="unfreeze() it first")
        if self.options.read_only:
            raise DDictReadOnlyError("the dictionary is read-only")

    def freeze(self, frozen: bool, number: int) -> None:
        """See `Freeze`."""
        if number >= self._frozen_by:
            self.frozen, self._frozen_by = frozen, number

    def begin(self, told: asked.Begin) -> bool:
        """Begin an epoch; see `Begin`. Return False if what it begins with is not here."""
        if self.options.snapshots:
            wanted = {cut.checkpoint_id: cut.entries for cut in self.table.some(told.keep)}
            if told.base >= 0 and told.base not in wanted:
                return False
            self.shard.load(wanted.items())
            self.shard.committed, self.shard.kept = told.base, frozenset(wanted)
            self._cut, self._cut_at = told.cut, told.base
        else:
            self.shard.rollback(None, told.base)
        self.epoch, self._settled = told.epoch, 0
        self.fence.begin(told.epoch)
        self._discarded = {handle: each for handle, each in self._discarded.items() if each.epoch >= told.epoch}
        self.table.retain(lambda each: each in told.keep or each in told.pinned)
        return True

    def discard(self, told: asked.Discard) -> None:
        """Discard what a handle wrote above a checkpoint; see `Discard`."""
        handle, to, epoch, generation = told.whose
        if epoch < self.epoch or told.number <= self._discarded.get(handle, _Discarded(0, 0)).number:
            return
        if not told.dead:
            try:
                self.fence.hear(handle, generation, epoch)
            except StaleRequestError:
                return
        self._discarded[handle] = _Discarded(epoch, told.number, told.dead)
        self.shard.rollback(handle, to)

    def prepare(self, told: asked.Prepare) -> None:
        """Note what belongs to a cut; see `Prepare`."""
        self.check_epoch(told.epoch)
        if told.cut <= self._cut:
            raise DDictError(f"cut {self._cut} has been asked for since", manager=self.number)
        self.table.retain(lambda each: each <= told.committed)
        self.table.add(told.cut, told.checkpoint_id, self.shard.cut(told.checkpoint_id))
        self._cut, self._cut_at = told.cut, told.checkpoint_id

    def settle(self, told: asked.Settle) -> None:
        """Let go of what no one needs any more; see `Settle`."""
        self.check_epoch(told.epoch)
        if told.cut < self._settled:
            return  # the coordinator has given this request up
        self._settled = told.cut
        self.shard.retire(told.oldest)
        kept = frozenset(cut.checkpoint_id for cut in self.table.some(told.keep))
        self.shard.committed, self.shard.kept = told.committed, kept
        wanted = {*told.keep, *told.pinned}
        self.table.retain(lambda each: each in wanted or each > told.cut)
