"""Opening a base container on all ranks or on none."""

from __future__ import annotations

import contextlib
import os
import time

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import FlashpointError, InvalidArgumentError, LoadError, UnreadableError
from ml_flashpoint.format.failure_kinds import is_shortage, retrying
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.ranks.rank_group import RankGroup, boot_id
from ml_flashpoint.state.archive import warn_of_old_torch


def open_together(
    objects: CheckpointObjectManager, base: str | os.PathLike[str], rank: int, group: RankGroup
) -> RankStore:
    """The store of this rank in a base container. Collective.

    Ranks of one node must share the base container, or one of them would be without copies.

    What the system is short of is waited for, for ``FLASHPOINT_RECOVERY_DEADLINE_S``.

    Raises:
        JobInUseError: another process uses it.
        TopologyError: two machines have the same node id, or ranks of one node name different folders.
        UnreadableError: this rank's system is short of descriptors or memory, say.
        FlashpointError: this rank, or another one, cannot use it. Raised on all ranks.
    """

    warn_of_old_torch()

    def open_here() -> RankStore:
        try:
            _refuse_mount_point(base)
            return objects.open(base, rank)
        except FlashpointError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            kind = UnreadableError if is_shortage(error) else LoadError
            raise kind(
                f"the base container cannot be used: {why}", rank=rank, node=group.node, path=str(base)
            ) from error

    another = LoadError(
        "another rank cannot use its base container; its log says why", rank=rank, node=group.node, path=str(base)
    )
    until = time.monotonic() + recovery_deadline_s()
    store = group.together(lambda: retrying(open_here, until, f"opening {os.fspath(base)}"), another)
    group.check_nodes(_place_of(store), "a base container")
    return store


def _place_of(store: RankStore) -> str:
    with contextlib.suppress(OSError):
        found = os.stat(store.base)
        return f"{boot_id()}-{found.st_dev:x}-{found.st_ino:x}"
    return ""


def _refuse_mount_point(base: str | os.PathLike[str]) -> None:
    # A base container belongs to one job; a whole filesystem, such as /dev/shm, to whoever is on the machine.
    if os.path.ismount(base):
        raise InvalidArgumentError(
            "is the mount point of a filesystem",
            argument="base",
            value=os.fspath(base),
            hint=f"name a folder in it that belongs to this job alone, such as {os.fspath(base)}/mlf-jobs/job-145",
        )
