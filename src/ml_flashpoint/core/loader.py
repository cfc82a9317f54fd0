"""What a door needs to load, and what a recovery reports. Owns no behaviour: that is `checkpoint_loader`'s."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import LoadError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery did, on this rank; times in seconds.

    Attributes:
        version: the version recovered, None if there was none.
        detect_s: reading and gathering inventories. plan_s: planning. fetch_s: fetching and verifying.
        fetched_bytes: bytes that this rank received from peers.
        tries: plans made; more than one means that something was damaged.
        world_size: number of ranks that saved the version, None if there was none.
    """

    version: str | None
    detect_s: float
    plan_s: float
    fetch_s: float
    fetched_bytes: int
    tries: int
    world_size: int | None = None


class MLFlashpointCheckpointLoader(ABC):
    """What a door needs to load.

    Attributes:
        tier: where the version is that was found last: in memory, or in a durable store.
        last_recovery: what the last search did; None before, and where nothing is told about it.
    """

    tier: Literal["memory", "persisted"] = "memory"
    last_recovery: RecoveryReport | None = None

    @abstractmethod
    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        """Collective: the newest version that every rank can load, made loadable here; None if there is none.

        Raises:
            NothingLoadableError: there are some, and none can be loaded.
        """

    def get_checkpoint(self, base: CheckpointContainerId, wanted: int) -> CheckpointContainerId:
        """Collective: the version of a step, made loadable here.

        Raises:
            LoadError: there is no such version, or it cannot be loaded.
        """
        raise LoadError("this loader knows the newest version only", path=str(base))

    @abstractmethod
    def discard(self, version: CheckpointContainerId) -> None:
        """Collective: do not return this version again until :meth:`reconsider`; it could not be loaded."""

    def reconsider(self) -> None:  # noqa: B027 - most loaders have nothing to forget
        """Collective: forget what was discarded. To be called before a recovery that is not the next try of the last
        one: what could not be loaded then may be loadable now."""

    @abstractmethod
    def read_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        """The manifest of one rank's part of a version, from this node or a holder."""

    @abstractmethod
    def open_object(self, version: CheckpointContainerId, manifest: Manifest, record: ObjectRecord) -> ObjectReader:
        """A reader of one object. It stays valid until :meth:`release`."""

    @abstractmethod
    def release(self) -> None:
        """Let go of everything that was opened."""
