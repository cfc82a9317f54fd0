"""One save of one rank: its three futures, and what it has on its way to a committed part."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.save_id import SaveId


class Save:
    """One rank's part of a version on its way: staged, committed, verified. Made by `Checkpointer.begin`.

    Attributes:
        id: run and step; None while a save that was staged before its step was known has no name.
        version: path of the version; None as long as `id` is.
        staged: done once the program may change the tensors.
        committed: the manifest, once this rank's part is committed.
        verified: done once all ranks have committed their parts and have all copies of them. Fails with
            `SupersededError` when a newer save is verified instead, or the ranks pass over this one.

    All three end by the deadline of the save (``FLASHPOINT_SEAL_DEADLINE_S``).
    """

    id: SaveId | None
    version: CheckpointContainerId | None
    staged: Future[None]
    committed: Future[Manifest]
    verified: Future[None]


@dataclass(slots=True)
class SaveStats:
    """Counters of the saves of one rank. Steps are None before the first.

    Attributes:
        committed, verified, skipped, failed: number of saves that were. One that is skipped has not failed.
        last_committed, last_verified: their newest steps.
        copied_bytes, copied_s: bytes of this rank's parts that holders have acknowledged, and the time that took.
        copy_error: reason why copies are missing now; None while copying works.
        error: reason of the newest save that failed.
    """

    committed: int = 0
    verified: int = 0
    skipped: int = 0
    failed: int = 0
    last_committed: int | None = None
    last_verified: int | None = None
    copied_bytes: int = 0
    copied_s: float = 0.0
    copy_error: str | None = None
    error: str | None = None
