"""What every saver is: from tensors and bytes to a committed part of a version, in a few calls.

Owns the order of those calls, which a saver in another process (`saving_process`) takes like one in the trainer, and
what the latter does to write and commit. Where its arenas come from, and what follows, is `checkpoint_saver`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.core.object_stages import BytesItem, FilledObject, StagedObject, TensorItem
from ml_flashpoint.core.object_writer import ObjectWriter
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity, later_than
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError, UnaskedVersionsError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.manifest import Manifest, object_name


class ArenaSource(Protocol):
    """What a save needs of a store."""

    @property
    def base(self) -> Path:
        """The base container."""
        ...

    def acquire(self, size: int, *, exact: bool = False) -> Arena:
        """Take an arena of at least ``size`` bytes."""
        ...

    def release(self, arena: Arena) -> None:
        """Return an arena."""
        ...


class MLFlashpointCheckpointSaver(ABC):
    """What a door needs to save. The calls of one save come in the order begin, stage (optional), write, commit;
    or, when any of them raises, fail.

    Attributes:
        rank, world_size, node: of this process in the job.
    """

    rank: int
    world_size: int
    node: str

    @abstractmethod
    def begin(self, *, exchanged: bool = False) -> Save:
        """Start a save. Every rank must begin the same saves in the same order.

        Args:
            exchanged: ranks will come to the identity of the save together: see :meth:`propose` and :meth:`adopt`.
                It then does no harm if this rank begins one that others do not.
        """

    @abstractmethod
    def propose(self, version: CheckpointContainerId | None, save: Save | None = None) -> SaveIdentity:
        """What this rank proposes as the identity of a save, begun here or not, to a door that lets ranks exchange
        it; `save_identity.common_identity` is what comes of all proposals.

        Raises:
            UnaskedVersionsError: there are versions of an earlier run on this node that nobody has asked about: the
                first save that is verified would remove them.
        """

    def adopt(self, save: Save, identity: SaveIdentity) -> None:
        """Take over what ranks have come to, before the write. Idempotent."""
        save.adopt(identity)

    def note_complete(self, save: Save) -> None:
        """Take note that all ranks have committed a save."""
        save.complete = True

    @abstractmethod
    def fail(self, save: Save, error: BaseException) -> None:
        """Give the save up. Its arena is free again; older versions are as before. Idempotent."""

    @abstractmethod
    def write(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Make this rank's object of ``version``. Tensors that were staged are not copied again.

        Args:
            tensors: names and plain strided tensors on any device; names are unique.
            byte_items: names and contents of what is no tensor.
            metadata: further strings for the object's header.

        Raises:
            InvalidArgumentError: ``version`` is no version of a base container.
            CapacityError: no room.
            SaveError: staging failed earlier, or a tensor of the plan was not staged.
        """

    @abstractmethod
    def commit(
        self,
        save: Save,
        *,
        extra: Sequence[BytesItem] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """Commit what was written. The part exists when this returns.

        Args:
            extra: further items for the object, known only now.
            labels: short strings for the manifest.

        Raises:
            SaveError, CapacityError: nothing of the part is visible.
        """

    def save(
        self,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """A whole save in one call: returns when this rank's part is committed. Its copies, and the agreement by which
        the version is verified on all ranks, follow in the background.

        Every rank must save the same versions in the same order. One that cannot begins the save and lets it fail.

        Args:
            tensors, byte_items: see :meth:`write`.
            labels: see :meth:`commit`.

        Raises:
            UnaskedVersionsError: there are versions of an earlier run, and nobody has asked the loader for the newest.
            FlashpointError: it failed; nothing of it is left and older versions are as before.
        """
        save = self.begin()
        try:
            self.write(save, version, tensors, byte_items)
            return self.commit(save, labels=labels)
        except BaseException as error:
            self.fail(save, error)
            raise


class WritingSaver(MLFlashpointCheckpointSaver):
    """A saver that writes into arenas of its own process."""

    _writer: ObjectWriter

    @abstractmethod
    def _store(self, base: CheckpointContainerId) -> ArenaSource:
        """Where the arenas of a base container come from."""

    @abstractmethod
    def _acquire(self, save: Save, store: ArenaSource, size: int) -> Arena:
        """An arena of at least ``size`` bytes, which the save then holds."""

    def _release(self, save: Save, store: ArenaSource, arena: Arena) -> None:
        for released in save.release(arena):
            store.release(released)

    @abstractmethod
    def _arena_of(self, staged: StagedObject) -> Arena:
        """This process's mapping of what was staged."""

    @abstractmethod
    def _commit_part(self, save: Save, manifest: Manifest, arena: Arena) -> None:
        """Link the arena and write the manifest (see `version_files`), then hand the save to the commit queue."""

    def write(
        self,
        save: Save,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """See the base class."""
        if (failure := save.staging_error) is not None:
            raise SaveError(f"staging failed: {failure}", step=version.step, rank=self.rank) from failure
        if version.step is None:
            raise InvalidArgumentError(
                "must end in step-<n>_ckpt",
                argument="version",
                value=str(version),
                hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
            )
        save.version = version
        if not save.adopted:
            self._number_alone(save, version)
        with self._at_work(save):
            self._fill(save, version.parent, tensors, byte_items, metadata)

    def _fill(
        self,
        save: Save,
        base: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem],
        metadata: Mapping[str, str] | None,
    ) -> None:
        store = self._store(base)
        staged = save.staged
        if staged is not None and staged.late is not None:
            staged.late.wait(seal_deadline_s())
        arena = self._arena_of(staged) if staged is not None else None
        if staged is not None and arena is not None and not arena.path.is_relative_to(store.base):
            # Staged for another base container: its bytes are as good as any other tensor.
            staged = arena = None
        taken: list[Arena] = []

        def acquire(size: int) -> Arena:
            taken.append(self._acquire(save, store, size))
            return taken[-1]

        try:
            save.fill(self._writer.fill(acquire, tensors, byte_items, staged=staged, arena=arena, metadata=metadata))
        except BaseException:
            for each in taken:
                self._release(save, store, each)
            raise

    @contextmanager
    def _at_work(self, save: Save) -> Iterator[None]:
        # Whoever gives the save up meanwhile, for its deadline, say, leaves the arenas to this thread.
        save.enter()
        try:
            yield
        finally:
            self._leave(save)

    def _leave(self, save: Save) -> None:
        if save.leave() and save.error is not None:
            self.fail(save, save.error)

    def _number_alone(self, save: Save, version: CheckpointContainerId) -> None:
        mine = self.propose(version, save)
        # With other ranks, what one finds must not change its own names alone: see `CommitQueue`.
        self.adopt(save, later_than(mine, mine.newest_ms if self.world_size == 1 else -1))

    def commit(
        self,
        save: Save,
        *,
        extra: Sequence[BytesItem] = (),
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """See the base class."""
        if save.filled is None or save.version is None:
            raise SaveError("nothing was written to commit", rank=self.rank)
        with self._at_work(save):
            manifest = self._commit(save, save.filled, save.version, extra, labels or {})
        save.filled = None  # to let go of thousands of entries takes its time: here, and not where a later save begins
        return manifest

    def _commit(
        self,
        save: Save,
        filled: FilledObject,
        version: CheckpointContainerId,
        extra: Sequence[BytesItem],
        labels: Mapping[str, str],
    ) -> Manifest:
        written = self._writer.finish(filled, extra)
        manifest = Manifest(
            version=version.name,
            rank=self.rank,
            world_size=self.world_size,
            save_id=save.save_id,
            node=self.node,
            objects=(written.record(object_name(self.rank, save.save_id)),),
            labels=dict(labels),
        )
        self._commit_part(save, manifest, written.arena)
        return manifest


def unasked_versions(
    rank: int, node: str | None, base: str | None, *, call: str = "", hint: str | None = None
) -> UnaskedVersionsError:
    """The error of every door that is to save where nobody has asked for what there is.

    Args:
        call: what asks, where it is not the engine's loader that is called.
        hint: what else the user can do.
    """
    # What to do is in the message: of what DCP passes on, users see no hints.
    return UnaskedVersionsError(
        "there are checkpoints of an earlier run here that nobody has asked about, and saving would overwrite them: "
        f"call {call or 'get_latest_complete_checkpoint(base)'} before the first save, to go on from them or to give "
        "them up, or use another folder",
        rank=rank,
        node=node,
        path=base,
        hint=hint,
    )
