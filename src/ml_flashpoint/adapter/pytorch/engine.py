"""`Engine`: the checkpointer for those who call ``dcp.save`` and ``dcp.load`` themselves, in one object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.config import Config, Persist
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.format.arguments import checked_globals, checked_grace
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from ml_flashpoint.state.archive import SafeGlobal

if TYPE_CHECKING:
    from typing_extensions import Self


class Engine(Checkpointer):
    """A base container for ``dcp.save``, ``dcp.async_save`` and ``dcp.load``. Collective to open; a context manager.

    ::

        with Engine.open("/dev/shm/mlf-jobs/job-145", replication="pairwise") as engine:
            dcp.save(state, checkpoint_id=engine.version(7), storage_writer=engine.writer)
            if (latest := engine.latest()) is not None:
                dcp.load(state, checkpoint_id=latest, storage_reader=engine.reader(latest))

    Args:
        safe_globals: further types that items which are no tensors may be made of, as for
            ``torch.serialization.safe_globals``.
        replication, keep: see `Config`.
        persist, persist_every, persist_keep, persist_bytes_per_s: see `Persist`.
        handle_sigterm, grace_s: with ``persist``, SIGTERM is held up for so many seconds at most until saves under way
            are committed and copied and the newest version is persisted; then comes the handler that was there before.
            Only where this is constructed in the main thread.
        base, discard_existing: see `Checkpointer`, which also says what is raised.
    """

    def __init__(
        self,
        base: str | os.PathLike[str],
        *,
        replication: ReplicationStrategy | str | None = None,
        discard_existing: bool = False,
        safe_globals: Sequence[SafeGlobal] = (),
        keep: int | Keep = 1,
        persist: str | None = None,
        persist_every: int = 50,
        persist_keep: int = 3,
        persist_bytes_per_s: float | None = None,
        handle_sigterm: bool = True,
        grace_s: float = 20.0,
    ) -> None:
        grace = checked_grace(handle_sigterm, grace_s)
        self._safe_globals = checked_globals(safe_globals)
        durable = Persist.of(persist, persist_every, persist_keep, persist_bytes_per_s)
        config = Config(replication=replication, keep=keep, persist=durable, sigterm_grace_s=grace)
        super().__init__(base, config, discard_existing=discard_existing)

    @classmethod
    def open(cls, base: str | os.PathLike[str], **options: Any) -> Self:
        """Call the class, whose arguments it takes."""
        return cls(base, **options)

    @cached_property
    def writer(self) -> MemoryStorageWriter:
        """Return the writer for all saves of the job."""
        return MemoryStorageWriter(self, safe_globals=self._safe_globals)

    @cached_property
    def stager(self) -> MemoryStager:
        """Return the stager for ``dcp.async_save(..., async_stager=engine.stager)``, by those who wait for
        ``staging_completion``."""
        return MemoryStager(self.writer)

    def reader(self, version: CheckpointContainerId | str | os.PathLike[str]) -> MemoryStorageReader:  # type: ignore[override]
        """Return a storage reader for loading one version."""
        return MemoryStorageReader(version, self, safe_globals=self._safe_globals)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Wait until all futures of all saves that were begun have ended; one that ``dcp.save`` could not finish, for
        it failed on another rank, is given up. Return True if that was so in time."""
        self.writer.give_up()
        return super().wait(deadline_s)

    def close(self, persist_deadline_s: float | None = None) -> None:
        """Do as `Checkpointer.close`. Optimizers are not watched from then on."""
        if (writer := self.__dict__.get("writer")) is not None and os.getpid() == self._pid:
            writer.close()
        super().close(persist_deadline_s)
