"""The arenas of one rank: which are free, which hold something, and when one is made, grown or deleted.

Owns the choice of an arena for a size, and the pool's files by their numbers. What lies in the arenas, and when
that may go, is `rank_store`'s.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import Arena, round_up
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.format.errors import CapacityError, FlashpointError, SaveError
from ml_flashpoint.format.failure_kinds import is_shortage

_log = logging.getLogger(__name__)

_NAME = re.compile(r"arena-(\d+)")
# An arena much larger than what is asked for is left for something of its size.
_FIT_FACTOR = 4
_FIT_HEADROOM = 256 << 10
_MAX_GROWTH_ROOM = 64 << 20
# Calls of `trim` during which an arena must have been spare before it is deleted: a job whose
# replication lags now and then must not pay for the page faults of a new arena each time.
_TRIM_AFTER = 20
_OUTGROWN = 9, 8


def with_headroom(size: int) -> int:
    """Size of an arena for ``size`` bytes: items that vary in length must not make it grow at every save."""
    return round_up(size + min(size >> 6, _MAX_GROWTH_ROOM), 64 << 10)


class ArenaPool:
    """See the module. Thread-safe.

    Args:
        directory: where the files are, ``arena-0``, ``arena-1`` and so on.
        lock: guards the pool; reentrant, so that its owner can hold it across calls.
        reusable: asked before a free arena is given out, with the lock held; one that is not stays free. Without, all
            are. For pools whose arenas other processes may still read although they hold nothing any more.
    """

    def __init__(
        self, directory: Path, lock: threading.RLock, *, reusable: Callable[[Arena], bool] | None = None
    ) -> None:
        self.directory = directory
        self._reusable = reusable
        self._lock: threading.RLock = lock
        self._free: list[Arena] = []
        self._in_use: set[Arena] = set()
        self._next = 0
        self._spare_for = 0
        self._wanted: deque[int] = deque(maxlen=_TRIM_AFTER)
        self.budget: Budget | None = None
        """How many arenas there may be, if that is limited."""
        self.kept: Callable[[], Collection[Arena]] = tuple
        """Those that hold what is kept beside the newest verified version, and do not count."""
        self.for_loans = 0
        """Arenas that parts are in now and then for longer than they are needed: so many more are left to saves."""

    # ---- taking and releasing -----------------------------------------------------------------------------

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """An arena of at least ``size`` bytes, in use from now on. Its content is whatever it held last.

        Args:
            exact: the file must have exactly ``size`` bytes.

        Raises:
            CapacityError: there is none and no room for one, not even in place of the free ones.
            SaveError: the system refuses to make one.
        """
        with self._lock:
            try:
                arena = self._fit(size, exact)
            except CapacityError:
                if not self._free:
                    raise
                # None of these fits, and there is no room beside them: slow, and better than a save that fails.
                self.discard(self._free)
                arena = self._make(size if exact else with_headroom(size))
            self._in_use.add(arena)
            arena.exact = exact
            if not exact:
                self._wanted.append(size)
        arena.join_prefault()
        return arena

    def _fit(self, size: int, exact: bool) -> Arena:
        fitting = [a for a in self._free if (a.size == size if exact else _fits(a, size))]
        # Copies of others' parts come over the network, and leave what is page-locked to what comes from devices.
        arena = self._first_reusable(sorted(fitting, key=lambda a: (a.is_page_locked == exact, a.size)))
        if arena is not None:
            self._free.remove(arena)
            return arena
        wanted = size if exact else with_headroom(size)
        self._discard_outgrown(wanted)
        growable = [a for a in self._free if a.size < size <= _FIT_FACTOR * a.size]
        arena = self._first_reusable(sorted(growable, key=lambda a: a.size, reverse=True))
        if arena is None:
            return self._create(wanted)
        self._free.remove(arena)  # or it would make room for itself
        try:
            arena.grow(wanted)
        except BaseException:
            self._free.append(arena)
            raise
        return arena

    def _discard_outgrown(self, size: int) -> None:
        """Delete the free arenas that are too small and may not grow: the budget had room for them while the states of
        this rank and its neighbours were smaller."""
        for arena in [a for a in self._free if a.size < size]:
            if self.budget is not None and not self.budget.has_room(self.count - 1, size, given_back=arena.size):
                self.discard([arena])

    def _first_reusable(self, arenas: Iterable[Arena]) -> Arena | None:
        return next((arena for arena in arenas if self._reusable is None or self._reusable(arena)), None)

    def _create(self, size: int) -> Arena:
        """A new arena; beyond the budget, in place of free ones, which do not fit if this is called."""
        while self._free and self.budget is not None and not self.budget.has_room(self.count, size):
            self.discard(self._free[:1])
        return self._make(size)

    def _make(self, size: int) -> Arena:
        while True:
            path = self.directory / f"arena-{self._next}"
            self._next += 1
            with contextlib.suppress(FileExistsError):
                arena = Arena.create(path, size)
                arena.make_room = self._make_room
                return arena

    def _open(self, path: Path) -> Arena:
        arena = Arena.open(path)
        arena.make_room = self._make_room
        return arena

    def _make_room(self) -> bool:
        """For an arena that cannot grow: delete the free ones. Returns whether there were any."""
        with self._lock:
            spare = list(self._free)
            self.discard(spare)
        return bool(spare)

    def release(self, arena: Arena) -> None:
        """Make an arena free, if it is in use here, with what a saving process may have appended to it."""
        with self._lock:
            if arena in self._in_use:
                with contextlib.suppress(OSError):  # it is as good as before, then
                    arena.refresh()
                self._in_use.remove(arena)
                self._free.append(arena)

    def use(self, arenas: Iterable[Arena]) -> None:
        """Take note that these are in use, known so far or not."""
        with self._lock:
            self._in_use.update(arenas)

    def has_free(self, size: int, *, beside: int = 0) -> bool:
        """Whether :meth:`acquire` would find a free arena for ``size`` bytes, and ``beside`` it there are so many."""
        with self._lock:
            return len(self._free) > beside and any(_fits(a, size) for a in self._free)

    def ensure_free(self, count: int, size: int) -> bool:
        """Have ``count`` free arenas, of ``size`` bytes if they are to be made. Returns whether there are: not where
        the budget or the filesystem has no room for them."""
        with self._lock:
            self._discard_outgrown(with_headroom(size))
            while len(self._free) < count:
                if not self.is_within_budget(with_headroom(size)):
                    return False
                try:
                    self._free.append(self._make(with_headroom(size)))
                except CapacityError:
                    return False
            return True

    def is_within_budget(self, size: int) -> bool:
        """Whether there may be one arena more, of ``size`` bytes."""
        with self._lock:
            return self.budget is None or self.budget.has_room(self.count, size)

    def has_or_may_make(self, size: int) -> bool:
        """Whether :meth:`acquire` would not go beyond the budget."""
        with self._lock:
            self._discard_outgrown(size)
            return bool(self._free) or self.is_within_budget(size)

    @property
    def count(self) -> int:
        """Arenas that there are, but for those that are `kept`."""
        with self._lock:
            return len(self._free) + len(self._in_use.difference(self.kept()))

    def in_use_beside(self, arenas: Collection[Arena]) -> int:
        """Arenas in use that are not among these, but for those that are `kept`."""
        with self._lock:
            return len(self._in_use.difference(arenas, self.kept()))

    def prepare_spare(self, size: int, *, beside: int = 0) -> bool:
        """Make sure that one more arena of ``size`` bytes is free and faulted in, in the background, ``beside`` so many
        free ones; whether it is."""
        with self._lock:
            if self.has_free(size, beside=beside):
                return True
            try:
                arena = self._create(with_headroom(size))
            except FlashpointError as error:
                _log.warning("no room for a further arena yet: %s", error)
                return False
            arena.prefault_in_background()
            self._free.append(arena)
            return True

    def trim(self, expected: int, *, to_keep: int = 0) -> None:
        """Delete free arenas beyond ``expected``, if there were too many at the last calls, too; those beyond what
        there may be at all (taken over from other ranks, say) at once. One that is larger than all that was asked for
        lately (once, a rank staged what others write) makes way for one of that size. ``to_keep`` more are wanted for
        what will be `kept`."""
        self._replace_outgrown()
        expected += to_keep + self.for_loans
        with self._lock:
            if self.budget is not None:
                self.discard(self._free[: max(0, self.count - self.budget.most - to_keep)])
            self._spare_for = self._spare_for + 1 if len(self._free) > expected else 0
            if self._spare_for < _TRIM_AFTER:
                return
            self._spare_for = 0
            self._free.sort(key=lambda a: a.size, reverse=True)
            spare = self._free[expected:]
            del self._free[expected:]
        self.discard(spare)

    def _replace_outgrown(self) -> None:
        with self._lock:
            if len(self._wanted) < _TRIM_AFTER:
                return
            largest = max(self._wanted)
            limit = with_headroom(largest) * _OUTGROWN[0] // _OUTGROWN[1]
            outgrown = next((arena for arena in self._free if arena.size > limit and not arena.exact), None)
            if outgrown is None:
                return
            self._free.remove(outgrown)
        self.discard([outgrown])
        self.prepare_spare(largest)

    def delete_free(self, keep_bytes: int) -> int:
        """Delete free arenas, those free for longest first, until they have no more than ``keep_bytes`` together.

        Returns:
            The bytes of those deleted. Slow for large ones: pages are freed.
        """
        spare = []
        with self._lock:
            left = sum(arena.size for arena in self._free)
            while left > keep_bytes:
                spare.append(self._free.pop(0))
                left -= spare[-1].size
        freed = sum(arena.size for arena in spare)
        self.discard(spare)
        return freed

    def discard(self, arenas: Collection[Arena]) -> None:
        """Delete arenas that are not in use."""
        for arena in list(arenas):
            with self._lock:
                if arena in self._free:
                    self._free.remove(arena)
            arena.unlink()
            if self._reusable is None:  # readers of the others rely on the bytes
                arena.free_pages()
            arena.close()

    # ---- files --------------------------------------------------------------------------------------------

    def open_left(self) -> list[Arena]:
        """The arenas that an earlier process left, in use until they are released; what cannot be one is swept.

        Raises:
            OSError: they cannot be opened just now.
        """
        found = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            self._next = max(self._next, int(match[1]) + 1)
            try:
                arena = self._open(path)
            except (FlashpointError, OSError) as error:
                if is_shortage(error):
                    raise
                _log.warning("sweeping unusable arena: %s", error)
                path.unlink(missing_ok=True)
                continue
            found.append(arena)
            self.use([arena])
        return found

    def take_over(self, other: ArenaPool) -> None:
        """Move the arenas of another pool here, with both locked by the caller."""
        for arena in (*other._free, *other._in_use):
            path = self.directory / f"arena-{self._next}"
            self._next += 1
            os.rename(arena.path, path)
            arena.path = path
            arena.make_room = self._make_room
        self._free += other._free
        self._in_use |= other._in_use
        other._free.clear()
        other._in_use.clear()

    def at(self, path: Path, rank: int) -> Arena:
        """The arena of a file of this pool; mapped now if another process made it, remapped if it grew.

        Raises:
            SaveError: the file is elsewhere.
        """
        with self._lock:
            arena = next((a for a in (*self._free, *self._in_use) if a.path == path), None)
            if arena is None:
                if path.parent != self.directory:
                    raise SaveError("no arena of this rank", rank=rank, path=path)
                arena = self._open(path)
                self._in_use.add(arena)
            arena.refresh()
            return arena

    def resident_bytes(self) -> tuple[int, int]:
        """``(bytes of arenas in use, bytes of free arenas)``."""
        with self._lock:
            return sum(a.size for a in self._in_use), sum(a.size for a in self._free)

    @property
    def free(self) -> tuple[Arena, ...]:
        """Arenas that hold nothing."""
        with self._lock:
            return tuple(self._free)

    def close(self) -> None:
        """Unmap everything. Files stay."""
        with self._lock:
            for arena in [*self._free, *self._in_use]:
                arena.close()
            self._free.clear()
            self._in_use.clear()


def is_arena(path: Path) -> bool:
    """Whether a file has the name of an arena."""
    return _NAME.fullmatch(path.name) is not None


def _fits(arena: Arena, size: int) -> bool:
    return size <= arena.size <= _FIT_FACTOR * size + _FIT_HEADROOM
