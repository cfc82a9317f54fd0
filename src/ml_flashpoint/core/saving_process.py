"""Saving in another process, to which a save travels by pickle.

Owns the saver there. It has no store and no way to call the trainer: it fills the arena that came along, commits
the part, and leaves a completion record (`mailbox`).
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import with_headroom
from ml_flashpoint.checkpoint_object_manager.arena_tensor import mapped_arena
from ml_flashpoint.checkpoint_object_manager.base_marks import holds_parts
from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import resolved_base
from ml_flashpoint.checkpoint_object_manager.job_lock import JobFile
from ml_flashpoint.checkpoint_object_manager.unlocked_store import UnlockedStore
from ml_flashpoint.checkpoint_object_manager.version_files import commit_part
from ml_flashpoint.core.mailbox import CompletionRecord, Mailbox
from ml_flashpoint.core.object_stages import StagedObject
from ml_flashpoint.core.object_writer import ObjectWriter
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity, newest_of_other_runs
from ml_flashpoint.core.saver import ArenaSource, MLFlashpointCheckpointSaver, unasked_versions
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import SaveError
from ml_flashpoint.format.manifest import Manifest


@dataclass(frozen=True)
class HandOff:
    """A save on its way to another process: unpickled there, it is a :class:`HandedOffSaver`."""

    rank: int
    world_size: int
    node: str
    save: Save
    mailbox: Mailbox
    asked: bool
    spare: Path | None
    trainer: int
    job_file: JobFile | None

    def __reduce__(self) -> tuple[Any, ...]:
        where = self.rank, self.world_size, self.node
        what = self.save, self.mailbox, self.asked, self.spare, self.trainer, self.job_file
        return HandedOffSaver, (*where, *what)


class HandedOffSaver(MLFlashpointCheckpointSaver):
    """A saver in another process: it writes and commits the one save that came with it, and posts a completion record.

    It owns no arenas: it fills the one that was staged, or makes a new one, which the trainer takes over.

    Args:
        asked: whether the trainer knows what earlier runs have left in the base container.
        spare: an arena to fill where nothing was staged, so that no new one need be made.
        trainer: pid of the process that handed the save over.
        job_file: the file that the job has locked; None where the trainer has not opened the base container.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        node: str,
        save: Save,
        mailbox: Mailbox,
        asked: bool,
        spare: Path | None,
        trainer: int,
        job_file: JobFile | None,
    ) -> None:
        self.rank, self.world_size, self.node = rank, world_size, node
        self._save: Save | None = save
        self._begun: Save | None = None
        self._trainer, self._job_file = trainer, job_file
        self._asked = asked
        self._spare = spare
        self._lent = (spare, save.staged.arena_path if save.staged is not None else None)
        self._mailbox = mailbox
        self._writer = _process_writer()
        self._hold: BinaryIO | None = None
        for path in self._lent:
            if path is not None:
                self._begin_work(UnlockedStore(path.parents[2], rank, trainer))
        try:
            mailbox.sign(save.key)
        except SaveError:
            self._end_work()
            raise

    def _check_job(self) -> None:
        if self._job_file is not None:
            self._job_file.check()

    def _begin_work(self, store: UnlockedStore) -> None:
        if self._hold is None:
            self._hold = store.hold()
            trainer = multiprocessing.parent_process()
            if trainer is not None and not trainer.is_alive():
                # The next one may have taken over the arenas before they were held.
                self._end_work()
                raise SaveError("the trainer is gone", rank=self.rank)

    def _end_work(self) -> None:
        if self._hold is not None:
            self._hold.close()
            self._hold = None

    def begin(self, *, exchanged: bool = False) -> Save:
        """Start a save; see the base class."""
        save, self._save = self._save, None
        if save is None:
            raise SaveError("this process was handed one save and has done it", rank=self.rank)
        self._begun = save
        return save

    def propose(self, version: CheckpointContainerId | None, save: Save | None = None) -> SaveIdentity:
        """See the base class."""
        save = save or self._begun or self._save
        assert save is not None
        run_id, own = save.identity.run_id, save.identity.is_of_saver
        if version is not None and not self._asked and holds_parts(Path(version.parent.path), but_of=own):
            raise unasked_versions(self.rank, self.node, str(version.parent))
        if version is None or version.step is None:
            return SaveIdentity(run_id, save.sequence)
        newest = newest_of_other_runs(Path(version.parent.path), run_id)
        return SaveIdentity(run_id, save.sequence, version.step, newest)

    def adopt(self, save: Save, identity: SaveIdentity) -> None:
        """See the base class."""
        if not save.adopted:
            self._mailbox.note(save.key, identity)
        super().adopt(save, identity)

    def fail(self, save: Save, error: BaseException) -> None:
        """Give a save up; see the base class."""
        base = str(save.version.parent) if save.version is not None else ""
        version = save.version.name if save.version is not None else ""
        others = None if save.others is None else tuple(save.others)
        record = CompletionRecord(base, version, others=others, error=f"{type(error).__name__}: {error}")
        try:
            self._mailbox.post(save.key, record)
            if save.filled is not None and save.version is not None:
                self._release(save, self._store(save.version.parent), save.filled.arena)
        finally:
            self._end_work()

    def _store(self, base: CheckpointContainerId) -> UnlockedStore:
        return UnlockedStore(resolved_base(base), self.rank, self._trainer)

    def _acquire(self, save: Save, store: ArenaSource, size: int) -> Arena:
        self._check_job()
        self._begin_work(UnlockedStore(store.base, self.rank, self._trainer))
        path, self._spare = self._spare, None
        if path is None or not path.is_relative_to(store.base):
            return store.acquire(size)
        arena = mapped_arena(path)
        if size > arena.size:
            arena.grow(with_headroom(size))
        return arena

    def _release(self, save: Save, store: ArenaSource, arena: Arena) -> None:
        if arena.path not in self._lent:
            store.release(arena)

    def _arena_of(self, staged: StagedObject) -> Arena:
        self._check_job()
        return mapped_arena(staged.arena_path)

    def _commit_part(self, save: Save, manifest: Manifest, arena: Arena) -> None:
        assert save.version is not None
        self._check_job()
        commit_part(Path(str(save.version.parent)), manifest, [arena.path])
        record = CompletionRecord(
            str(save.version.parent),
            manifest.version,
            arenas=(str(arena.path),),
            others=None if save.others is None else tuple(save.others),
            complete=save.complete,
        )
        self._mailbox.post(save.key, record)
        self._end_work()

    def note_complete(self, save: Save) -> None:
        """See the base class."""
        super().note_complete(save)
        self._mailbox.note_complete(save.key)


_writer_of_process: ObjectWriter | None = None


def _process_writer() -> ObjectWriter:
    # The saver comes anew with every save; what it learned about the layout should not.
    global _writer_of_process
    if _writer_of_process is None:
        _writer_of_process = ObjectWriter()
    return _writer_of_process
