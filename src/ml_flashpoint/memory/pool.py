"""The slots for the parts of one rank on one node: which one a save takes, and when one is made.

The rank's own process has the pool of its parts; on each other node, the rank's holder has the pool of its copies. A
pool has ``keep + 1`` slots. Retained are the saves that the newest verdict lists, and the round's save. A slot that
holds anything else, and is neither written nor read, is free. `choose` decides that, and knows no files.

All slots of a pool have one size: the largest that a save of the rank has needed, with a little headroom so that a
growing header does not need a larger one. So the copies fit into slots of one size, too. Slots that nobody on this node
has a pool for (another number of ranks left them, or a rank that is elsewhere now) are removed where room is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from ml_flashpoint.format.errors import CapacityError, FlashpointError, PrunedError, is_shortage
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.memory.container import BaseContainer, Owner
from ml_flashpoint.memory.slot import PAGE, Slot, State, no_room, round_up

_log = logging.getLogger(__name__)

ROOM: Final = 256 << 10
"""Bytes to leave for manifests and folders: a slot that takes the last page could never be committed."""
_GRAIN: Final = 64 << 10


def slot_size(needed: int) -> int:
    """Return the size of a slot for an object of ``needed`` bytes that may grow a little: by a 64th, at most 64 MiB."""
    size = max(1, needed + min(needed >> 6, 64 << 20))
    return round_up(size, _GRAIN if size >= _GRAIN else PAGE)


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """Terms on which a save may take a slot.

    Attributes:
        save: None for one that `Pool.name` gives its step later.
        retained: saves whose slots must not be taken.
        of_round: True for the round's save, one that somebody waits for, a copy, and a part that recovery fetches. Any
            other save must not take the newest committed part.
        spare: free slots that must be left, for a round's save that is still to come.
        may_grow: True if the pool may have more than ``keep + 1`` slots.
    """

    save: SaveId | None
    retained: Collection[SaveId]
    of_round: bool = True
    spare: int = 0
    may_grow: bool = False

    @property
    def left_alone(self) -> frozenset[SaveId]:
        """The saves whose slots are not removed, whoever left them."""
        return frozenset(self.retained) | ({self.save} if self.save is not None else set())


class SlotView(Protocol):
    """The side of a slot that `choose` looks at; see `Slot`."""

    state: State
    save: SaveId | None


_V = TypeVar("_V", bound=SlotView)


class New:
    """The choice to make one more slot."""


def choose(slots: Sequence[_V], request: SlotRequest, locked: Collection[_V], *, may_make: bool) -> _V | New | None:
    """Return the slot that a save takes: a free one, that of a part that it replaces, or the one unused longest, or a
    new one; None if it gets none.

    Args:
        slots: all slots of the pool, the one unused longest first.
        locked: slots that cannot be had: somebody reads them, say.
        may_make: True if the pool may have one slot more, and there is room for it.
    """
    committed = [slot.save for slot in slots if slot.state is State.COMMITTED and slot.save is not None]
    free = [
        slot
        for slot in slots
        if slot not in locked
        and (slot.state is State.EMPTY or (slot.state is State.COMMITTED and slot.save not in request.retained))
    ]
    if len(free) + may_make <= request.spare:
        return None
    if not request.of_round:
        newest = max(committed, default=None)
        free = [slot for slot in free if slot.state is State.EMPTY or slot.save != newest]
    empty = [slot for slot in free if slot.state is State.EMPTY]
    if may_make and not empty:
        return New()
    replaced = [slot for slot in free if slot.save == request.save]
    return next(iter(empty or replaced or free), None)


def slot_limit(keep: int, *, may_grow: bool, extra: int) -> int:
    """Return the most slots that a pool may have: ``keep + 1``, and ``extra`` more once as many saves are verified."""
    return keep + 1 + (extra if may_grow else 0)


class _Left(NamedTuple):
    """A slot that nobody on this node has a pool for."""

    path: Path
    owner: Owner
    size: int
    save: SaveId | None


class Pool:
    """The slots for the parts of one rank. Thread-safe. One process of a node has it. It is opened while no rank saves.
    Raises an `OSError` if the system is short of something just now.

    Args:
        keep: verified saves that are retained.
        owners: all whose parts or copies the processes of this node keep. Slots for others are left over.
        extra: slots that the pool may have beyond ``keep + 1``: 0 for copies, 2 for the rank's own parts, 3 if they are
            persisted.
    """

    def __init__(
        self, container: BaseContainer, owner: Owner, *, keep: int, owners: Collection[Owner], extra: int = 0
    ) -> None:
        self.container = container
        self.owner = owner
        self.keep = keep
        self.extra = extra
        self._owners = frozenset({owner, *owners})
        self._folder = container.slot_folder(owner)
        self._lock = threading.Lock()
        self._made = threading.Condition(self._lock)
        self._making = 0  # slots that threads make just now
        committed = container.committed()
        self._slots = self._inherited(committed)  # the one unused longest first
        self._left = self._left_over(committed)
        self._numbers = itertools.count(1 + max((int(slot.path.name) for slot in self._slots), default=-1))

    def _inherited(self, committed: Mapping[int, SaveId]) -> list[Slot]:
        slots = []
        for path in self.container.slot_paths(self.owner):
            try:
                slot = Slot.open(path)
            except (FlashpointError, OSError) as error:
                if is_shortage(error):
                    raise
                _log.warning("removing a slot that cannot be used: %s", error)
                path.unlink(missing_ok=True)
                continue
            slot.save = committed.get(slot.inode)
            slot.state = State.EMPTY if slot.save is None else State.COMMITTED
            slots.append(slot)
        return sorted(slots, key=lambda slot: slot.save or SaveId(0, 0))  # the oldest save goes first

    def _left_over(self, committed: Mapping[int, SaveId]) -> list[_Left]:
        found = []
        for owner in sorted(self.container.slot_owners() - self._owners):
            for path in self.container.slot_paths(owner):
                with contextlib.suppress(FileNotFoundError):  # another rank of this node was faster
                    status = os.stat(path)
                    found.append(_Left(path, owner, status.st_size, committed.get(status.st_ino)))
        return found

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, the one unused longest first."""
        with self._lock:
            return tuple(self._slots)

    def slot_of(self, save: SaveId) -> Slot | None:
        """Return the slot that holds the part of a save, or is being filled with it."""
        return next((slot for slot in self.slots if slot.save == save), None)

    @property
    def saves(self) -> set[SaveId]:
        """The saves that have a part in a slot, or are being written. Others have lost their slots."""
        with self._lock:
            return {slot.save for slot in self._slots if slot.save is not None}

    @contextlib.contextmanager
    def reading(self, save: SaveId) -> Iterator[Slot]:
        """Yield the slot of a committed part, which is not reused before the block is left. Raise a `PrunedError` if
        the pool has no such part any more."""
        with self._lock:
            found = [slot for slot in self._slots if slot.save == save and slot.state is State.COMMITTED]
            if not found:
                raise PrunedError("the part has no slot any more", step=save.step, rank=self.owner.rank)
            found[0].readers += 1
        try:
            yield found[0]
        finally:
            with self._lock:
                found[0].readers -= 1

    # ---- taking --------------------------------------------------------------------------------------------

    def take(self, size: int, terms: SlotRequest | Callable[[], SlotRequest], *, exact: bool = False) -> Slot | None:
        """Return a slot to write, in `State.WRITING`, or None if there is none now. End it by `commit` or `free`.

        Args:
            size: bytes of the object.
            terms: the terms; or returns them. Then it is called at each choice, under this pool's lock: a part that was
                copied until then is retained, and one that is yet to be copied has no slot to copy from.
            exact: the slot has just this size: for a copy, or a part that recovery fetches.

        Raises:
            SaveError: the system refuses to make a file.
        """
        least = round_up(size, PAGE)  # is enough where there is no room for more
        unfit: list[Slot] = []
        can_make = True
        while True:
            with self._lock:
                request = terms() if callable(terms) else terms
                wanted = least if exact else self._wanted(size)
                chosen = self._choose(request, wanted, least, unfit, can_make=can_make)
                if chosen is None and self._making:  # another thread makes one, which takes as long as to make one here
                    self._made.wait()
                    continue
                if chosen is None:
                    return None
                if isinstance(chosen, New):
                    self._making += 1
                elif self.container.reclaim(chosen, self.owner.rank):
                    chosen.state, chosen.save = State.WRITING, request.save
                    self._slots.remove(chosen)
                    self._slots.append(chosen)
                else:
                    continue  # a reader was faster
            if isinstance(chosen, New):
                made = self._make(wanted, request, least=least)
                can_make = False
            elif chosen.size == wanted:
                return chosen
            else:
                try:
                    made = self._replaced(chosen, wanted, request, least)
                except BaseException:  # no descriptors, perhaps: the next save takes the slot
                    self.free(chosen)
                    raise
                unfit.append(chosen)
            if made is not None:
                return made

    def _wanted(self, size: int) -> int:
        largest = max([slot.size for slot in self._slots], default=0)
        return slot_size(size) if size > largest else largest

    def _choose(
        self, request: SlotRequest, wanted: int, least: int, unfit: Sequence[Slot], *, can_make: bool
    ) -> Slot | New | None:
        locked = list(unfit)
        for slot in self._slots:
            if slot.state is not State.WRITING and slot.save not in request.retained and slot not in locked:
                if slot.readers or not slot.lock():
                    locked.append(slot)
                else:
                    slot.unlock()
        count = len(self._slots) + self._making
        # The save waits while a slot is made. Beyond ``keep + 1`` that is for `prepare`, unless no slot is free.
        for may_grow in sorted({False, request.may_grow}):
            fits = count < slot_limit(self.keep, may_grow=may_grow, extra=self.extra)
            size_of_new = wanted if count > self.keep else least
            may_make = can_make and fits and self._may_make(size_of_new, request.left_alone, count)
            chosen = choose(self._slots, request, locked, may_make=may_make)
            if chosen is not None:
                return chosen
        return None

    def commit(self, slot: Slot, manifest: Manifest) -> None:
        """Commit the part in a slot that was taken; see `BaseContainer.commit`. Where that fails, the slot is free, or
        removed if its file is gone: no part can ever be committed in it."""
        try:
            self.container.commit(slot, manifest)
        except BaseException:
            (self.free if slot.path.exists() else self.remove)(slot)
            raise
        with self._lock:
            for other in self._slots:  # a damaged part that was fetched again
                if other is not slot and other.save == slot.save:
                    other.state, other.save = State.EMPTY, None
            slot.state = State.COMMITTED

    def name(self, slot: Slot, save: SaveId) -> None:
        """Say which save a slot in `State.WRITING` is for: it was taken before the save had a step."""
        with self._lock:
            slot.save = save

    def shortage(self, size: int, retained: Collection[SaveId]) -> CapacityError | None:
        """Return the error of a save of so many bytes for which no slot can be made, now or later; None if one can.
        Later, all but ``keep`` of the saves that are retained now are not."""
        size = round_up(size, PAGE)
        slots = self.slots
        # Slots that are too small are replaced once they are free, and those of ranks that are elsewhere removed.
        # Before what is free now: threads and other ranks may be removing some.
        available = sum(left.size for left in self._left if left.path.exists()) + self.container.passing()
        available += self._available() + sum(slot.size for slot in slots if slot.size < size)
        stay = sorted(slot.size if slot.size < size else 0 for slot in slots if slot.save in retained)
        available -= sum(stay[: self.keep])
        if len(slots) <= self.keep:
            available -= self._missing_elsewhere(size, len(slots))
        if sum(slot.size >= size for slot in slots) > self.keep or available >= size:
            return None
        error = no_room("one more version", size, self.container.base, available)
        error.rank = self.owner.rank
        return error

    def free(self, slot: Slot) -> None:
        """Return a slot that was taken and will not be committed. Nothing happens if it was."""
        with self._lock:
            if slot.state is State.WRITING:
                slot.state, slot.save = State.EMPTY, None

    def remove(self, slot: Slot) -> None:
        """Remove a slot that was taken and is of no use: much larger than what is to be committed (copies would be as
        large), or without its file."""
        with self._lock:
            self._slots.remove(slot)
        slot.remove()

    # ---- making --------------------------------------------------------------------------------------------

    def prepare(self, size: int, request: SlotRequest) -> bool:
        """Fault in one slot that an earlier process left, or make one ahead of a save to come, of so many bytes and on
        these terms: for one thread beside the training thread. Return True if there was something to do, and may be
        more."""
        with self._lock:
            due = [slot for slot in self._slots if slot.is_due]
        if due:
            due[0].prepare()
            return True
        with self._lock:
            wanted = self._wanted(size)
            count = len(self._slots) + self._making
            most = slot_limit(self.keep, may_grow=request.may_grow, extra=self.extra)
            if count >= most or not self._may_make(wanted, request.left_alone, count):
                return False
            self._making += 1
        return self._make(wanted, replace(request, save=None), State.EMPTY, least=wanted) is not None

    def _may_make(self, size: int, retained: Collection[SaveId], count: int) -> bool:
        """Return True if there is room for one slot more than ``count``, once each other pool of this node has as many,
        up to ``keep + 1``: one that has none may be needed first. A spare one leaves as much for the program."""
        left = sum(each.size for each in self._left if each.save not in retained and each.path.exists())
        needed = self._missing_elsewhere(size, min(count, self.keep + 1)) + (2 * size if count > self.keep else size)
        return self._available() + left >= needed

    def _missing_elsewhere(self, size: int, count: int) -> int:
        """Return the bytes that the other pools of this node lack for ``count`` slots each, of at least ``size``."""
        missing = 0
        for owner in self._owners - {self.owner}:
            sizes = []
            for path in self.container.slot_paths(owner):
                with contextlib.suppress(FileNotFoundError):
                    sizes.append(path.stat().st_size)
            missing += max(0, count * max([size, *sizes]) - sum(sizes))
        return missing

    def _available(self) -> int:
        return available_bytes(self._folder) - ROOM

    def _make(
        self, size: int, request: SlotRequest, state: State = State.WRITING, *, least: int, old: Slot | None = None
    ) -> Slot | None:
        """Make a slot, of the least size where there is no room for more. Remove ``old`` first: it has the memory."""
        slot = None
        try:
            if old is not None:
                old.remove()
            if self._available() < size:
                self.remove_left(request.left_alone, request.left_alone)
            size = size if self._available() >= size else least
            path = self._folder / str(next(self._numbers))
            slot = Slot.make(path, size, go_on=lambda still: self._available() >= still)
        except CapacityError as error:
            _log.warning("no slot was made: %s", error)
        finally:
            with self._lock:
                self._making -= 1
                self._made.notify_all()
                if slot is not None:
                    slot.state, slot.save = state, request.save
                    self._slots.append(slot)
        return slot

    def _replaced(self, slot: Slot, wanted: int, request: SlotRequest, least: int) -> Slot | None:
        """Return a slot of the wanted size, or the least where there is no room, in place of one that was taken."""
        with self._lock:
            # Such a slot is removed: other pools need its room, whose parts grow as well.
            is_extra = slot.size < least and len(self._slots) > self.keep + 1
        room = self._available() + slot.size
        if not is_extra and room < wanted:
            if least <= slot.size and least < wanted:
                return slot
            if room < least:
                self.free(slot)
                return None
        with self._lock:
            self._slots.remove(slot)
            self._making += not is_extra
        if not is_extra:
            return self._make(wanted, request, least=least, old=slot)
        slot.remove()
        return None

    # ---- the end -------------------------------------------------------------------------------------------

    def remove_left(self, retained: Collection[SaveId], lacking: Collection[SaveId] = ()) -> None:
        """Remove the slots on this node that nobody has a pool for, but those with retained saves. Slow.

        Of the saves of as many ranks only those stay that are ``lacking``: some node may lack what it should have of
        them. Of others the rank's own node and its holders have the part.
        """
        for left in self._left:
            if left.save in (lacking if left.owner.world_size == self.owner.world_size else retained):
                continue
            with contextlib.suppress(FlashpointError, OSError):  # another rank was faster
                slot = Slot.open(left.path)
                slot.save = left.save
                if self.container.reclaim(slot, left.owner.rank):
                    slot.remove()
                    left.path.parent.rmdir()
                else:  # somebody reads it
                    slot.close()
        self._left = [left for left in self._left if left.path.exists()]

    def clear(self) -> None:
        """Remove all parts and slots that are neither written nor read. Slow: it frees memory."""
        with self._lock:
            gone = [
                slot
                for slot in self._slots
                if slot.state is not State.WRITING
                and not slot.readers
                and self.container.reclaim(slot, self.owner.rank)
            ]
            self._slots = [slot for slot in self._slots if slot not in gone]
        for slot in gone:
            slot.remove()

    def close(self) -> None:
        """Unmap all slots. The files stay."""
        with self._lock:
            for slot in self._slots:
                with contextlib.suppress(BufferError):  # a thread that hangs still uses it
                    slot.close()
