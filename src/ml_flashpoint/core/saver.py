"""What every saver is: from tensors and bytes to a committed part of a version, in a few calls.

Owns the order of those calls. The saver of a trainer is `checkpoint_saver`'s, that of another process
`saving_process`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from ml_flashpoint.core.object_stages import BytesItem, TensorItem
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import UnaskedVersionsError
from ml_flashpoint.format.manifest import Manifest


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
