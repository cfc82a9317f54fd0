"""What every saver is: from tensors and bytes to a committed part of a version, in a few calls.

Owns the order of those calls and what is common to savers in the trainer (`checkpoint_saver`) and in a saving
process (`saving_process`). Where arenas come from and what a commit entails is theirs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.core.attempts import SaveIdentity, later_than
from ml_flashpoint.core.object_writer import BytesItem, ObjectWriter, StagedObject, TensorItem
from ml_flashpoint.core.save_ticket import SaveTicket
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import InvalidArgumentError, SaveError, UnaskedVersionsError
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
        """Give an arena back."""
        ...


class MLFlashpointCheckpointSaver(ABC):
    """What a door needs to save. The calls of one save come in the order begin, stage (optional), write, seal;
    or, when any of them raises, fail.

    Attributes:
        rank, world_size, node: of this process in the job.
    """

    rank: int
    world_size: int
    node: str
    _writer: ObjectWriter

    @abstractmethod
    def begin(self, *, exchanged: bool = False) -> SaveTicket:
        """Start a save. Every rank must begin the same saves in the same order.

        Args:
            exchanged: ranks will come to the identity of the save together: see :meth:`propose` and :meth:`adopt`.
                It then does no harm if this rank begins one that others do not.
        """

    @abstractmethod
    def propose(self, version: CheckpointContainerId | None, ticket: SaveTicket | None = None) -> SaveIdentity:
        """What this rank proposes as the identity of a save, begun here or not, to a door that lets ranks exchange
        it; `attempts.common_identity` is what comes of all proposals.

        Raises:
            UnaskedVersionsError: there are versions of an earlier run on this node that nobody has asked about: the
                first save that is verified would remove them.
        """

    def adopt(self, ticket: SaveTicket, identity: SaveIdentity) -> None:
        """Take over what ranks have come to, before the write. Idempotent."""
        ticket.attempt, ticket.sequence, ticket.adopted = identity.attempt, identity.sequence, True

    @abstractmethod
    def fail(self, ticket: SaveTicket, error: BaseException) -> None:
        """Give the save up. Its arena is free again; older versions are as before. Idempotent."""

    @abstractmethod
    def _store(self, base: CheckpointContainerId) -> ArenaSource: ...

    @abstractmethod
    def _acquire(self, ticket: SaveTicket, store: ArenaSource, size: int) -> Arena: ...

    def _release(self, store: ArenaSource, arena: Arena) -> None:
        store.release(arena)

    @abstractmethod
    def _arena_of(self, staged: StagedObject) -> Arena: ...

    @abstractmethod
    def _commit(self, ticket: SaveTicket, manifest: Manifest, arena: Arena) -> None: ...

    def write(
        self,
        ticket: SaveTicket,
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
        if ticket.error is not None:
            raise SaveError(f"staging failed: {ticket.error}", step=version.step, rank=self.rank) from ticket.error
        if version.step is None:
            raise InvalidArgumentError(
                "must end in step-<n>_ckpt",
                argument="version",
                value=str(version),
                hint="CheckpointContainerId.create_child(base, CheckpointContainerId.format_version_container(step))",
            )
        ticket.version = version
        if ticket.pending is not None:
            ticket.pending.step = version.step
        if not ticket.adopted:
            self._number_alone(ticket, version)
        store = self._store(version.parent)
        staged = ticket.staged
        arena = self._arena_of(staged) if staged is not None else None
        if staged is not None and arena is not None and not arena.path.is_relative_to(store.base):
            # Staged for another base container: its bytes are as good as any other tensor.
            staged = arena = None
        taken: list[Arena] = []

        def acquire(size: int) -> Arena:
            taken.append(self._acquire(ticket, store, size))
            return taken[-1]

        try:
            ticket.filled = self._writer.fill(
                acquire, tensors, byte_items, staged=staged, arena=arena, metadata=metadata
            )
        except BaseException:
            for each in taken:
                self._release(store, each)
            raise

    def _number_alone(self, ticket: SaveTicket, version: CheckpointContainerId) -> None:
        mine = self.propose(version, ticket)
        # With other ranks, what one finds must not change its own names alone: see `CommitQueue`.
        self.adopt(ticket, later_than(mine, mine.newest_ms if self.world_size == 1 else -1))

    def seal(
        self,
        ticket: SaveTicket,
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
        if ticket.filled is None or ticket.version is None:
            raise SaveError("nothing was written to seal", rank=self.rank)
        written = self._writer.finish(ticket.filled, extra)
        manifest = Manifest(
            version=ticket.version.name,
            rank=self.rank,
            world_size=self.world_size,
            attempt=ticket.attempt,
            node=self.node,
            objects=(written.record(object_name(self.rank, ticket.attempt)),),
            labels=dict(labels or {}),
        )
        self._commit(ticket, manifest, written.arena)
        return manifest

    def save(
        self,
        version: CheckpointContainerId,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        labels: Mapping[str, str] | None = None,
    ) -> Manifest:
        """A whole save in one call: returns when this rank's part is sealed.

        Raises:
            FlashpointError: it failed; nothing of it is left and older versions are as before.
        """
        ticket = self.begin()
        try:
            self.write(ticket, version, tensors, byte_items)
            return self.seal(ticket, labels=labels)
        except BaseException as error:
            self.fail(ticket, error)
            raise


def unasked_versions(rank: int, node: str | None, base: str | None, *, call: str = "") -> UnaskedVersionsError:
    """The error of every door that is to save where nobody has asked for what there is.

    Args:
        call: what asks, where it is not the engine's loader that is called.
    """
    # What to do is in the message: of what DCP passes on, users see no hints.
    return UnaskedVersionsError(
        "there are checkpoints of an earlier run here that nobody has asked about, and saving would overwrite them: "
        f"call {call or 'get_latest_complete_checkpoint(base)'} before the first save, to go on from them or to give "
        "them up, or use another folder",
        rank=rank,
        node=node,
        path=base,
    )
