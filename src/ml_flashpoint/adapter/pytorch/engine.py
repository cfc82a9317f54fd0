"""`Engine`: the engine for those who call ``dcp.save`` and ``dcp.load`` themselves, in one object.

Owns only what DCP needs beside `core.engine`: the writer that all saves share, and a reader for each version.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ml_flashpoint.adapter.pytorch.memory_stager import MemoryStager
from ml_flashpoint.adapter.pytorch.memory_storage_reader import MemoryStorageReader
from ml_flashpoint.adapter.pytorch.memory_storage_writer import MemoryStorageWriter
from ml_flashpoint.core.engine import CheckpointEngine
from ml_flashpoint.core.persist_options import persist_options
from ml_flashpoint.format.arguments import checked_globals, checked_grace
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.ranks.retention import Keep
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from ml_flashpoint.state.archive import SafeGlobal

if TYPE_CHECKING:
    from typing_extensions import Self


class Engine(CheckpointEngine):
    """A base container for ``dcp.save``, ``dcp.async_save`` and ``dcp.load``. Collective to open; a context manager.

    ::

        with Engine.open("/dev/shm/mlf-jobs/job-145", replication="pairwise") as engine:
            dcp.save(state, checkpoint_id=engine.version(7), storage_writer=engine.writer)
            if (latest := engine.latest()) is not None:
                dcp.load(state, checkpoint_id=latest, storage_reader=engine.reader(latest))

    Args:
        safe_globals: further types that items which are no tensors may be made of, as for
            ``torch.serialization.safe_globals``.
        persist, persist_every, persist_keep, persist_bytes_per_s: see `ml_flashpoint.Flashpoint`.
        handle_sigterm, grace_s: with ``persist``, SIGTERM is held up for so many seconds at most until saves under way
            are committed and copied and the newest version is persisted; then comes the handler that was there before.
            Only where this is constructed in the main thread.
        base, replication, discard_existing, keep: see
            `core.engine.CheckpointEngine`, which also says what is raised.
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
        super().__init__(
            base,
            replication=replication,
            discard_existing=discard_existing,
            keep=keep,
            persist=persist_options(persist, persist_every, persist_keep, persist_bytes_per_s),
            sigterm_grace_s=grace,
        )

    @classmethod
    def open(cls, base: str | os.PathLike[str], **options: Any) -> Self:
        """The same as calling the class, whose arguments it takes."""
        return cls(base, **options)

    @cached_property
    def writer(self) -> MemoryStorageWriter:
        """For all saves of the job: it holds the arenas."""
        return MemoryStorageWriter(self.saver, safe_globals=self._safe_globals)

    @cached_property
    def stager(self) -> MemoryStager:
        """For ``dcp.async_save(..., async_stager=engine.stager)``, by those who wait for ``staging_completion``."""
        return MemoryStager(self.writer)

    def stop(self, persist_deadline_s: float | None = None) -> None:
        """As `CheckpointEngine.stop`. Optimizers are not watched from then on."""
        if "writer" in self.__dict__ and not self.saver.owner.forked:
            self.writer.stop_watching()
        super().stop(persist_deadline_s)

    def reader(self, version: CheckpointContainerId | str | os.PathLike[str]) -> MemoryStorageReader:
        """For loading one version."""
        return MemoryStorageReader(version, self.loader, safe_globals=self._safe_globals)
