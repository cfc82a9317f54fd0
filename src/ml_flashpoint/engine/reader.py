"""Reads the parts of one version, from whatever store has them. Nothing is handed out before its block was checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.object_format import Entry, Layout
from ml_flashpoint.format.save_id import SaveId

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What a recovery did on this rank; times in seconds.

    Attributes:
        version: the version recovered, None if there was none.
        detect_s: reading and gathering inventories. plan_s: planning. fetch_s: fetching and checking.
        fetched_bytes: bytes that this rank received from peers.
        tries: plans made; more than one means that something was damaged.
        world_size: number of ranks that saved the version, None if there was none.
        tier: store that the version was found in.
    """

    version: str | None
    detect_s: float
    plan_s: float
    fetch_s: float
    fetched_bytes: int
    tries: int
    world_size: int | None = None
    tier: Literal["memory", "persisted"] = "memory"


class ObjectReader:
    """The bytes of one object, checked before use. Not thread-safe.

    Attributes:
        manifest, record: of the object. path: for errors.
    """

    manifest: Manifest
    record: ObjectRecord
    path: str

    def ensure(self, begin: int, end: int) -> None:
        """Have bytes ``begin:end`` here and checked."""
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        """What the header says."""
        raise NotImplementedError

    def entry(self, key: str) -> Entry:
        """Return where an item lies. Raises `ObjectNotFoundError`."""
        raise NotImplementedError

    def tensor(self, key: str) -> torch.Tensor:
        """Return an item over the object's own memory: copy out of it, and do not write to it."""
        raise NotImplementedError

    def rows(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor; of a remote object only the blocks of its rows are fetched."""
        raise NotImplementedError

    def bytes_of(self, key: str) -> memoryview:
        """Return an item as plain bytes."""
        raise NotImplementedError


class VersionReader:
    """The parts of one version. One caller at a time; a context manager. While a part of this node is open its slot is
    locked against reuse, so that its bytes stay as they are.

    Attributes:
        version: its path. save: the save. world_size: number of its parts. tier: where it is read from.
    """

    version: CheckpointContainerId
    save: SaveId
    world_size: int
    tier: Literal["memory", "persisted"]

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of one rank's part. Raises `ObjectNotFoundError`."""
        raise NotImplementedError

    def open(self, rank: int) -> ObjectReader:
        """Return a reader of the object of one rank's part; it stays valid until `release`."""
        raise NotImplementedError

    def release(self) -> None:
        """Unlock everything that was opened."""
        raise NotImplementedError
