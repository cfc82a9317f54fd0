"""The arenas and committed parts of one rank in one base container on this node.

Owns: the directory layout, the parts that sit in the arenas, and the lock that keeps a second process from using
the same arenas. Which arena is free, and when one is made, is `arena_pool`'s; how the files of a part come and go is
`version_files`', what a dead process left is sorted out by `orphans`. It decides nothing about *which* part may
go: the saver does, and `retained`.

::

    <base>/.flashpoint/job                                         locked by all processes of the job; see `memory.lock`
    <base>/.flashpoint/rank-00003/lock, arena-0, arena-1, ...      faulted in for the life of the job
    <base>/.flashpoint/rank-00003/reserve                          pages for manifests
    <base>/step-7_ckpt/rank-00003-<save id>.safetensors            hard link to an arena
    <base>/step-7_ckpt/rank-00003-<save id>.manifest               the commit record
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool, is_arena
from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, mark_complete
from ml_flashpoint.checkpoint_object_manager.capacity import warn_unless_memory
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.orphans import inherit_parts
from ml_flashpoint.checkpoint_object_manager.rank_lock import LOCK, take_lock
from ml_flashpoint.checkpoint_object_manager.reserve import RESERVE, keep_reserve
from ml_flashpoint.checkpoint_object_manager.retained import Retained, VerifiedSave
from ml_flashpoint.checkpoint_object_manager.version_files import (
    commit_part,
    is_read,
    map_object,
    remove_part,
)
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import CapacityError, FlashpointError
from ml_flashpoint.format.lineage import Lineage, read_lineage
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.private_folders import sweep_folder
from ml_flashpoint.memory.lock import JobLock

_log = logging.getLogger(__name__)

# Memory that another rank of the node gives back is not announced to this one.
_ROOM_POLL_S = 0.1


class RankStore:
    """See the module. Thread-safe.

    Args:
        base: base container of the job; created if missing.
        rank: global rank.
        lock_deadline_s: seconds to wait for a dying earlier process of this rank to let go.
        job: id of the job that opens the base container; by default its lock is not taken, for somebody else holds it.
        reusable: see `ArenaPool`.

    Attributes:
        arenas: the files that parts are in; to be taken and given back through this store.
        retained: which versions stay beside the newest verified one.
        asked: True once somebody has looked, in this opening, at the versions that were there before.

    Raises:
        JobInUseError: another job has the base container open, or another live process uses this rank's arenas.
        UnsafePathError: others could have planted the base container, or may write to it.
    """

    def __init__(
        self,
        base: Path,
        rank: int,
        *,
        lock_deadline_s: float = 30.0,
        job: str | None = None,
        reusable: Callable[[Arena], bool] | None = None,
    ) -> None:
        self.base = base
        self.rank = rank
        self.directory = self.directory_of(rank)
        self.retained = Retained()
        self._lock = threading.RLock()
        self._parts: dict[tuple[str, int], HeldPart] = {}
        self._lock_fd = -1
        self.asked = False
        self._released = threading.Condition(self._lock)
        self.evict: Callable[[], bool] | None = None
        """Asked to give up an unverified version of this rank where a copy finds no room; whether it has."""
        self._job = None if job is None else JobLock(base, job, lock_deadline_s)
        try:
            self._lock_fd = take_lock(self, lock_deadline_s)
        except BaseException:
            self._release_job()
            raise
        self.arenas = ArenaPool(self.directory, self._lock, reusable=reusable)
        self.arenas.kept = self._arenas_kept_beside
        self._by_name: dict[tuple[str, str], HeldPart] = {}  # of parts, by version and name of each object
        # A late copy may come after the verdict, but not after this many more of them.
        self._rejected: deque[str] = deque(maxlen=64)
        self._useless: list[HeldPart] = []
        self._release_count = 0
        try:
            warn_unless_memory(base)
            self._inherit()
        except BaseException:  # the lock would keep the next one who tries out
            self.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._lock_fd < 0

    def directory_of(self, rank: int) -> Path:
        """Where the arenas of a rank are."""
        return self.base / PRIVATE_DIR / f"rank-{rank:05d}"

    def check_job(self) -> None:
        """Raise unless the base container at this path is still the one that was opened.

        Raises:
            JobInUseError: see `JobLock.check`.
        """
        if self._job is not None:
            self._job.check()

    # ---- arenas -------------------------------------------------------------------------------------------

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """An arena of at least ``size`` bytes, for the caller alone until committed or released; with old content.

        Args:
            exact: the file must have exactly ``size`` bytes, because it will hold a copy of an object whose
                header accounts for the whole of its file.

        Raises:
            CapacityError: there is none and no room for one.
            JobInUseError: see :meth:`check_job`.
        """
        self.check_job()
        self.drop_useless()
        try:
            return self.arenas.acquire(size, exact=exact)
        except CapacityError:
            if not self._retire_doomed(at_once=True):
                raise
            return self.arenas.acquire(size, exact=exact)

    def acquire_for_copy(self, size: int, rank: int, *, timeout_s: float = 0.0) -> Arena:
        """An arena of exactly ``size`` bytes for a part of another rank. Without room, or beyond the budget, some must
        give way: that rank's copies that will never be verified, and own unverified versions but the newest.

        Args:
            timeout_s: seconds to wait for one if there is no room: this rank, or a neighbour, may be about to learn
                that a version is verified, which frees older ones.

        Raises:
            CapacityError: there is none and no room for one.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            with self._lock:
                freed = self._release_count
            try:
                if self.arenas.has_or_may_make(size) or not self._make_way(rank):
                    return self.acquire(size, exact=True)
            except CapacityError:
                if self._make_way(rank):
                    continue
                left = give_up - time.monotonic()
                with self._released:
                    self._released.wait_for(
                        lambda seen=freed: self._release_count != seen or self.closed,  # type: ignore[misc]
                        min(left, _ROOM_POLL_S),
                    )
                    if self.closed or (left <= 0 and self._release_count == freed):
                        raise

    def _make_way(self, rank: int) -> bool:
        return self._drop_rejected_of(rank) or (self.evict is not None and self.evict())

    def _drop_rejected_of(self, rank: int) -> bool:
        with self._lock:
            parts = [p for p in self.held() if p.rank == rank != self.rank and p.save_id in self._rejected]
            for part in parts:
                self.drop(part)
            return any(not part.pins for part in parts)

    def release(self, arena: Arena) -> None:
        """Return an arena that was acquired and not committed."""
        with self._released:
            self.arenas.release(arena)
            self._release_count += 1
            self._released.notify_all()

    def missing_for_copies(self, own: Collection[Arena]) -> int:
        """Arenas that copies will need beside those that they have. ``own``: those that this rank's versions are in."""
        budget = self.arenas.budget
        return max(0, budget.for_copies - self.arenas.in_use_beside(own)) if budget is not None else 0

    def ensure_free(self, count: int, size: int) -> bool:
        """See `ArenaPool.ensure_free`."""
        if self.arenas.ensure_free(count, size):
            return True
        return self._retire_doomed(at_once=True) and self.arenas.ensure_free(count, size)

    def arena_by_path(self, path: Path) -> Arena:
        """The arena of a file in this store; mapped now if a saving process made it, remapped if it grew. Raises a
        `SaveError` if the file is not in this store."""
        return self.arenas.at(path, self.rank)

    # ---- parts --------------------------------------------------------------------------------------------

    def commit(self, manifest: Manifest, arenas: Sequence[Arena]) -> HeldPart:
        """Link the arenas under the names in ``manifest``, then write the manifest: the part exists from then on.

        Raises:
            JobInUseError: see :meth:`check_job`.
            SaveError, CapacityError: the filesystem refused.
        """
        self.check_job()
        commit_part(self.base, manifest, [arena.path for arena in arenas])
        part = self.add_committed(manifest, arenas)
        self._drop_rejected()
        return part

    def add_committed(self, manifest: Manifest, arenas: Sequence[Arena]) -> HeldPart:
        """Answer from now on for a part that was committed in these arenas, here or by a saving process."""
        part = HeldPart(
            manifest.version,
            manifest.rank,
            manifest.save_id,
            list(arenas),
            manifest,
            names=[o.name for o in manifest.objects],
        )
        with self._lock:
            replaced = self._parts.pop((part.save_id, part.rank), None)
            if replaced is not None:
                self._forget_names(replaced)
            self._note(part)
            self.arenas.use(arenas)
            if replaced is not None:
                if replaced.version != part.version:
                    remove_part(self.base, replaced.version, part.rank, part.save_id, replaced.names)
                replaced.doomed = True
                self._retire(replaced)
        keep_reserve(self.directory, manifest)
        return part

    def find(self, save_id: str, rank: int) -> HeldPart | None:
        """The part of ``rank`` from ``save_id``, if this store holds it."""
        with self._lock:
            return self._parts.get((save_id, rank))

    def drop(self, part: HeldPart) -> None:
        """Forget a part: manifest, then links; its arenas are free once nobody reads them."""
        with self._lock:
            if self._parts.get((part.save_id, part.rank)) is not part:
                return
            part.doomed = True
            self._retire(part)

    def _retire_doomed(self, *, at_once: bool = False) -> bool:
        """Try again what readers held up; whether there was any. ``at_once``: also what is lent."""
        with self._lock:
            doomed = [part for part in self._parts.values() if part.doomed and not part.pins]
            for part in doomed:
                self._retire(part, at_once=at_once)
            return bool(doomed)

    def _retire(self, part: HeldPart, *, at_once: bool = False) -> None:
        """Remove a doomed part once nobody reads it; of one that was replaced, what its successor does not use."""
        lent = part.loans and not at_once
        if part.pins or lent or is_read(self.base, part.version, part.rank, part.save_id):
            return
        key = (part.save_id, part.rank)
        successor = self._parts.get(key)
        if successor is part:
            del self._parts[key]
            self._forget_names(part)
            remove_part(self.base, part.version, part.rank, part.save_id, part.names)
            successor = None
        while part.arenas:  # emptied: the end of a loan comes here again, when they may be others'
            arena = part.arenas.pop(0)
            if successor is None or arena not in successor.arenas:
                self.release(arena)

    def _note(self, part: HeldPart) -> None:
        self._parts[(part.save_id, part.rank)] = part
        self._by_name.update(((part.version, name), part) for name in part.names)

    def _forget_names(self, part: HeldPart) -> None:
        for name in part.names:
            if self._by_name.get((part.version, name)) is part:
                del self._by_name[(part.version, name)]

    def reject(self, save_id: str) -> None:
        """Take note that ``save_id`` will never be verified. Other ranks' copies of it are then only kept until
        there is a newer one of that rank, or copies would pile up for as long as nothing can be verified."""
        with self._lock:
            self._rejected.append(save_id)
        self._drop_rejected()

    def _drop_rejected(self) -> None:
        with self._lock:
            if not self._rejected:
                return
            copies = [part for part in self.held() if part.rank != self.rank]
            newest = {part.rank: part.save_id for part in copies}
            for part in copies:
                if part.save_id in self._rejected and part.save_id < newest[part.rank]:
                    self.drop(part)

    def drop_before_next_save(self, parts: Iterable[HeldPart]) -> None:
        """Drop these parts, and no longer those named before, as soon as an arena is needed."""
        with self._lock:
            self._useless = list(parts)

    def drop_useless(self) -> None:
        """Drop the parts that :meth:`drop_before_next_save` has named, and what readers have let go of."""
        with self._lock:
            for part in self._useless:
                self.drop(part)
            self._useless.clear()
            self._retire_doomed()

    @contextlib.contextmanager
    def pinned(self, part: HeldPart, *, loan: bool = False) -> Iterator[bool]:
        """Keep a part, and what lies in its arenas, while it is read: dropped meanwhile, it goes at the end, or as a
        ``loan``, before a save fails for want of room. Gives whether it was still held."""
        with self._lock:
            held = self._parts.get((part.save_id, part.rank)) is part
            part.pins, part.loans = part.pins + (held and not loan), part.loans + (held and loan)
        try:
            yield held
        finally:
            with self._lock:
                part.pins, part.loans = part.pins - (held and not loan), part.loans - (held and loan)
                if held and part.doomed:
                    self._retire(part)

    @contextlib.contextmanager
    def open_object(self, version: str, name: str) -> Iterator[memoryview]:
        """Bytes of a committed object of this store or of any rank on this node, up to its used size.

        A part of this store cannot be pruned while open. One that belongs to another process of the node can;
        the digests tell.

        Raises:
            ObjectNotFoundError: no such object.
        """
        with contextlib.ExitStack() as opened:
            with self._lock:
                part = self._by_name.get((version, name))
                if part is not None:
                    opened.enter_context(self.pinned(part))
            if part is None or part.manifest is None:
                yield opened.enter_context(map_object(self.base, version, name))
            else:
                index = part.names.index(name)
                yield part.arenas[index].buffer[: part.manifest.objects[index].size]

    # ---- versions that may go -----------------------------------------------------------------------------

    def held(self) -> list[HeldPart]:
        """Parts in this store, own and copies, oldest save id first."""
        with self._lock:
            return [self._parts[key] for key in sorted(self._parts)]

    def held_of(self, save_id: str) -> list[HeldPart]:
        """Parts of one save in this store, own and copies."""
        return [part for part in self.held() if part.save_id == save_id]

    def advance(self, save_id: str, *, step: int | None = None) -> None:
        """Drop every part older than ``save_id``, which is verified on every rank and copy, but for what is retained.

        Args:
            step: of its version; by default that of a part that is here.
        """
        mark_complete(self.base)
        with self._lock:
            if step is None:
                steps = (CheckpointContainerId.parse_version_container(p.version) for p in self.held_of(save_id))
                step = next(steps, None) or 0
            if not self.retained.verify(VerifiedSave(save_id, step)):
                return
        self.prune(save_id)
        with self._lock:
            beside = len(self._arenas_kept_beside())
            used = sum(len(p.arenas) for p in self._parts.values()) - beside
            copies = self.arenas.budget.copies if self.arenas.budget is not None else 0
            self.arenas.trim(used, to_keep=max(0, self.retained.keep.beside_newest * (1 + copies) - beside))
        keep_reserve(self.directory)

    def prune(self, save_id: str) -> None:
        """Drop every part older than ``save_id`` that is not retained."""
        for part in self.held():
            if part.save_id < save_id and not self.retained.keeps(part.save_id):
                self.drop(part)

    def retain(self, line: Iterable[VerifiedSave], lineage: Lineage) -> None:
        """Go on from the newest of these saves; see `Retained.restore`. Nothing is dropped yet."""
        with self._lock:
            self.retained.restore(line, lineage)

    def counts(self, save_id: str, rank: int) -> bool:
        """Return True if a part is here, is not kept beside the newest verified version, and not dropped and only read
        yet."""
        with self._lock:
            part = self._parts.get((save_id, rank))
            return part is not None and not part.doomed and not self.retained.is_beside(save_id)

    def _arenas_kept_beside(self) -> set[Arena]:
        beside = [part for part in self._parts.values() if self.retained.is_beside(part.save_id)]
        return {arena for part in beside for arena in part.arenas}

    # ---- life ---------------------------------------------------------------------------------------------

    def _inherit(self) -> None:
        """Take over what an earlier process of this rank left: committed parts stay, the rest is swept."""
        sweep_folder(self.directory, lambda name: is_arena(Path(name)) or name in (LOCK, RESERVE, "status.json"))
        try:  # it holds until ranks have come together
            self.retained.lineage = read_lineage(self.base / PRIVATE_DIR)
        except (FlashpointError, OSError) as error:
            _log.error("this node does not know any more what the job has gone back from: %s", error)
        arenas = {arena.inode: arena for arena in self.arenas.open_left()}
        for part in inherit_parts(self.base, arenas):
            self._note(part)
        for part in self._parts.values():
            for arena in part.arenas:
                arenas.pop(arena.inode, None)
        for arena in arenas.values():
            self.arenas.release(arena)

    def take_over(self, other: RankStore) -> None:
        """Make the arenas and parts of another rank's store this one's. The other is closed, its directory gone."""
        with self._released, other._lock:
            self.arenas.take_over(other.arenas)
            for part in other.held():
                if (part.save_id, part.rank) in self._parts:
                    for arena in part.arenas:
                        self.arenas.release(arena)
                else:
                    self._note(part)
            other._parts.clear()
            other.delete_and_close()

    def delete_and_close(self) -> None:
        """Delete free arenas, and the directory if no part is left; then close."""
        with self._lock:
            self.arenas.discard(self.arenas.free)
            if not self._parts:
                # The lock's file goes while it is held: who opens it just before finds out, see `take_lock`.
                for name in (RESERVE, "status.json", LOCK):
                    (self.directory / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    self.directory.rmdir()
        self.close()

    def close(self) -> None:
        """Unmap everything and let go of the lock. Files stay: they are the checkpoint."""
        with self._released:
            self.arenas.close()
            self._parts.clear()
            self._by_name.clear()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            self._release_job()
            self._released.notify_all()

    def _release_job(self) -> None:
        if self._job is not None:
            self._job.release()
