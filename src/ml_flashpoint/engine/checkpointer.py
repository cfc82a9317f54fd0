"""`Checkpointer`: a base container that is open on all ranks of a job, with everything that serves it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ml_flashpoint.config import Config
from ml_flashpoint.engine.reader import RecoveryReport, VersionReader
from ml_flashpoint.engine.recovery import KeptVersion
from ml_flashpoint.engine.save import Save, SaveStats
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.status import RankStatus
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.strategies import ReplicationStrategy

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self

    from ml_flashpoint.copy.late import LateCopy

TensorItem = tuple[str, "torch.Tensor"]
BytesItem = tuple[str, bytes]


class Checkpointer:
    """A base container that is open on all ranks. Collective to construct; a context manager. Thread-safe for saves.

    Args:
        base: absolute path of a folder on a tmpfs of this node that belongs to this job alone.
        config: settings; the same on all ranks.
        discard_existing: versions that are there do not count any more, and are removed, on all nodes.

    Attributes:
        base: base container. ranks: the ranks that use it together. strategy: who holds copies of whose parts.
        container: the store of versions on this node.
        stats: counters of what became of the saves of this rank.
        last_recovery: report of the last `newest`, `bring` or `latest`; None before.

    Raises:
        InvalidArgumentError: an argument is unusable, or differs between ranks.
        JobInUseError: another job has the base container open.
        FlashpointError: this rank, or another one, cannot use it. Raised on all ranks.
    """

    base: CheckpointContainerId
    ranks: RankGroup
    config: Config
    strategy: ReplicationStrategy
    container: BaseContainer
    stats: SaveStats
    last_recovery: RecoveryReport | None

    def __init__(
        self, base: str | os.PathLike[str], config: Config | None = None, *, discard_existing: bool = False
    ) -> None:
        raise NotImplementedError

    def version(self, step: int) -> CheckpointContainerId:
        """Return the name of the version of a step, whether there is one or not."""
        raise NotImplementedError

    def holds(self, path: object) -> bool:
        """Return True if a path is that of a version in the base container. Whole paths are compared."""
        raise NotImplementedError

    # ---- one save ------------------------------------------------------------------------------------------

    def begin(self, step: int | None = None, *, explicit: bool = False, table: str = "") -> Save:
        """Start a save. The order of its calls is begin, stage (optional), fill, commit; or fail.

        Args:
            step: above all that were saved in this run; None if it is not known before `name`.
            explicit: somebody waits for this save: without a slot it waits, up to its deadline, where another save is
                skipped at once.
            table: name of what ranks have agreed on about who writes what (`engine.replicas`): a save is verified only
                if all ranks have written it by one table.

        Raises:
            InvalidArgumentError: the step is not above those saved before in this run.
            UnaskedVersionsError: there are versions that nobody has asked about.
            SaveError: the checkpointer is closed, or this process is a forked child.
        """
        raise NotImplementedError

    def name(self, save: Save, step: int) -> None:
        """Give a save that was begun without a step its step. Raises as `begin` does; the save has failed then."""
        raise NotImplementedError

    def stage(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        byte_keys: Sequence[str] = (),
        *,
        kind: object = None,
        late: LateCopy | None = None,
    ) -> Sequence[torch.Tensor]:
        """Take a slot and copy tensors into it, to be named by `fill`.

        Args:
            tensors: names (which only size the header) and plain strided tensors on any device.
            byte_keys: names of byte items, if they are known and many.
            kind: the same object as before only if keys, dtypes and shapes are the same, in the same order; None: they
                are compared.
            late: is started for those of the tensors that it takes.

        Returns:
            The copies, in order.

        Raises:
            SkippedError: there is no free slot. `SaveError`, `CapacityError`: no room, or the save has ended.
        """
        raise NotImplementedError

    def place_of(self, save: Save, tensor: torch.Tensor) -> tuple[str, int] | None:
        """Return where a staged tensor lies, so that another process can map it: the file of the save's slot, and the
        offset in it. None if the tensor is not one of the copies in the slot, or no contiguous view of one."""
        raise NotImplementedError

    def tensor_at(self, save: Save, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the staged bytes at an offset of the save's slot as a tensor, without a copy: for `fill`, which takes
        it as it lies. The inverse of `place_of`.

        Raises:
            SaveError: the save has no slot, or nothing was staged there.
        """
        raise NotImplementedError

    def fill(
        self,
        save: Save,
        tensors: Sequence[TensorItem],
        byte_items: Sequence[BytesItem] = (),
        *,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Bring all items into one object. Tensors that were staged are not copied again.

        Raises:
            SkippedError, CapacityError, SaveError: see `stage`.
        """
        raise NotImplementedError

    def commit(self, save: Save, *, extra: Sequence[BytesItem] = (), labels: Mapping[str, str] | None = None) -> None:
        """Have the committing executor seal and commit what was filled; `Save.committed` ends then. Does not wait.

        Args:
            extra: further byte items, known only now.
            labels: short strings for the manifest.
        """
        raise NotImplementedError

    def fail(self, save: Save, error: BaseException) -> None:
        """Give a save up that is not committed: its futures end with the error, its slot is free. Safe to repeat."""
        raise NotImplementedError

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all futures of all saves that were begun have ended. Return True if that was so in time."""
        raise NotImplementedError

    # ---- loading -------------------------------------------------------------------------------------------

    def newest(self) -> CheckpointContainerId | None:
        """Find the newest version that every rank can load, and bring here what this node lacks of it, checked.
        Collective. Saves go on as before until `go_on_from`.

        Returns:
            The version; None if there never was one.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
        """
        raise NotImplementedError

    def bring(self, step: int) -> CheckpointContainerId:
        """Do the same with the version of a step. Collective.

        Raises:
            LoadError: there is no such version, or it cannot be loaded. On all ranks.
        """
        raise NotImplementedError

    def go_on_from(self, version: CheckpointContainerId | None) -> None:
        """Begin a new run, which goes on from a version that `newest` or `bring` has returned, or from none of those
        there are. Collective. Versions outside the run's lineage do not exist any more.

        Raises:
            SaveError, CapacityError: the run cannot be recorded on some node. On all ranks.
        """
        raise NotImplementedError

    def latest(self) -> CheckpointContainerId | None:
        """Find and bring the newest version (`newest`) and go on from it (`go_on_from`). Collective."""
        raise NotImplementedError

    def go_back(self, step: int) -> CheckpointContainerId:
        """Bring the version of a step (`bring`) and go on from it (`go_on_from`). Collective."""
        raise NotImplementedError

    def discard(self, version: CheckpointContainerId) -> None:
        """Do not find a version again until `reconsider`: it could not be loaded. The same on all ranks."""
        raise NotImplementedError

    def reconsider(self) -> None:
        """Forget what was discarded."""
        raise NotImplementedError

    def versions(self) -> list[KeptVersion]:
        """Return what can be gone back to, newest first. Collective."""
        raise NotImplementedError

    def reader(self, version: CheckpointContainerId | str | os.PathLike[str]) -> VersionReader:
        """Return a reader of a version: the one that was found last, or another one that is in memory here or at the
        holders of this job's ranks."""
        raise NotImplementedError

    # ---- life ----------------------------------------------------------------------------------------------

    @property
    def run(self) -> int:
        """Number of the run; 0 while versions are there that nobody has asked about."""
        raise NotImplementedError

    def check_asked(self, call: str, *, hint: str | None = None) -> None:
        """Raise, on all ranks, if there are versions that nobody has asked about.

        Args:
            call: what the user calls to ask.

        Raises:
            UnaskedVersionsError: there are.
        """
        raise NotImplementedError

    @property
    def status(self) -> RankStatus:
        """How saving goes on this rank."""
        raise NotImplementedError

    def finish(self, deadline_s: float) -> bool:
        """Have saves in flight committed and copied, and the newest version persisted. Not collective.

        Returns:
            True if all was done in time.
        """
        raise NotImplementedError

    def remove_versions(self) -> None:
        """Remove every version from memory, on all nodes, at a planned end; a failure is logged. Collective."""
        raise NotImplementedError

    def close(self, persist_deadline_s: float | None = None) -> None:
        """End everything, saves in flight within ``FLASHPOINT_EXIT_DEADLINE_S``. Versions stay. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
