"""Loaders: which version to go on from, and its bytes.

Owns recovery as a collective: inventories by node, one plan on every rank (`ranks.recovery`, pure), the fetches
of this rank, verification, and the vote. All ranks go on with the same version or step back together; a copy
that turns out damaged is replaced from another holder, and where there is none the next older version is
taken. What cannot be read just now is tried again, and a version is never taken for one that does not exist because of
that: where nothing can be loaded, `core.unloadable` says whether that is an error. Reading into a framework's tensors
is the adapters' business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader, RecoveryReport
from ml_flashpoint.core.opening import open_together
from ml_flashpoint.core.part_reader import (
    ObjectReader,
    find_local_manifest,
    open_local,
    read_local_manifests,
)
from ml_flashpoint.core.part_source import PartSource
from ml_flashpoint.core.recovery_plan import (
    CompleteVersion,
)
from ml_flashpoint.core.recovery_run import RecoveryRun
from ml_flashpoint.core.sidecars import restore_sidecars
from ml_flashpoint.core.unloadable import why_nothing
from ml_flashpoint.format.arguments import ignored
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    DamagedError,
    LoadError,
    ObjectNotFoundError,
    UnreadableError,
)
from ml_flashpoint.format.failure_kinds import retrying
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.lineage import Lineage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.ranks.rank_group import rank_group
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)

__all__ = ["DefaultMLFlashpointCheckpointLoader", "MLFlashpointCheckpointLoader", "RecoveryReport"]


class DefaultMLFlashpointCheckpointLoader(MLFlashpointCheckpointLoader):
    """Recovers from this node's tmpfs and its peers. One caller at a time.

    Args:
        checkpoint_object_manager: where bytes live; one of its own by default.
        replication_manager: how peers are reached; without it only this node's parts can be loaded.
        global_rank_getter: this process's rank; by default from torch.distributed.
        local_rank_getter, broadcast_object_list_func, all_gather_object_func, world_size_getter: accepted for callers
            that pass them, and never called.
    """

    def __init__(
        self,
        checkpoint_object_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        global_rank_getter: Callable[[], int] | None = None,
        *,
        local_rank_getter: Callable[[], int] | None = None,
        broadcast_object_list_func: Callable[..., object] | None = None,
        all_gather_object_func: Callable[..., object] | None = None,
        world_size_getter: Callable[[], int] | None = None,
    ) -> None:
        ignored(
            "DefaultMLFlashpointCheckpointLoader",
            local_rank_getter=local_rank_getter,
            broadcast_object_list_func=broadcast_object_list_func,
            all_gather_object_func=all_gather_object_func,
            world_size_getter=world_size_getter,
        )
        self._objects = checkpoint_object_manager or CheckpointObjectManager()
        self._source = PartSource(replication_manager)
        self._rank_getter = global_rank_getter
        self._recovered: CompleteVersion | None = None
        self._lineage = Lineage()
        self._line_then: set[str] = set()  # what was verified by then: a later save of that step is another version
        self._verified: set[tuple[str, str, str]] = set()
        self._discarded: set[tuple[str, str]] = set()
        self._open = contextlib.ExitStack()
        self.last_recovery = None

    # ---- recovery -----------------------------------------------------------------------------------------

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        """Collective: find the newest version whose parts all exist, bring here what this node lacks, verify
        it, vote, and step back on any failure. What cannot be read just now is tried again for
        ``FLASHPOINT_RECOVERY_DEADLINE_S`` first. Nothing is remembered of a call that failed.

        Args:
            checkpoint_base_container: base container of the job, on this node.

        Returns:
            The version's id under this node's base container, or None: no version was ever complete, or those that
            were are discarded.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. Raised on all ranks.
            FlashpointError: this rank cannot take part (base container unusable or in use, a peer is gone).
        """
        base = CheckpointContainerId(checkpoint_base_container)
        run = self._recover(base, None)
        if self._recovered is not None:
            return CheckpointContainerId.create_child(base, self._recovered.version)
        group = rank_group()
        why = why_nothing(run.reports, run.given_up, self._discarded, run.lineage, world_size=group.world_size)
        if why is not None:
            why.rank, why.node, why.path = group.rank, group.node, str(base)
            raise why
        if any(report.inventory.parts for report in run.reports) and not self._discarded:
            _log.warning("starting anew: the first save of this job was cut short, and no other was ever complete")
        return None

    def _recover(self, base: CheckpointContainerId, wanted: int | None) -> RecoveryRun:
        group = rank_group()
        rank = self._rank_getter() if self._rank_getter is not None else group.rank
        store = open_together(self._objects, base, rank, group)
        store.asked = True
        run = RecoveryRun(
            store,
            group,
            self._source,
            verified=self._verified,
            discarded=self._discarded,
            finish=lambda version: self._restore_sidecars(version, store),
            wanted=wanted,
        )
        self._note(run.run(), store)
        self._lineage = run.lineage
        self.last_recovery = run.report()
        found = [part.save_id for report in run.reports for part in report.inventory.parts]
        group.renew_run(max((*found, run.lineage.newest)) or None)
        return run

    def _note(self, recovered: CompleteVersion | None, store: RankStore) -> None:
        self._recovered = recovered
        self._line_then = {each.save_id for each in store.retained.line}
        if recovered is not None:
            self._line_then.add(recovered.save_id)

    def get_checkpoint(self, base: CheckpointContainerId, wanted: int) -> CheckpointContainerId:
        """Collective: bring one version here, verify it, vote. What is newer stays the newest, until
        `Retention.leave_newer`.

        Args:
            wanted: a step; of several saves of it, the newest.

        Raises:
            LoadError: there is no such version, or it cannot be loaded. On all ranks.
            FlashpointError: this rank cannot take part.
        """
        run = self._recover(base, wanted)
        if self._recovered is not None:
            return CheckpointContainerId.create_child(base, self._recovered.version)
        reasons = [f"{version}: {why}" for (version, _), why in run.given_up.items()]
        steps = ", ".join(str(each.step) for each in run.complete)
        there = f"steps {steps}" if steps else "none"
        raise LoadError(
            f"the version of step {wanted} cannot be loaded: {'; '.join(reasons)}"
            if reasons
            else f"no version of step {wanted} is held by this job; there are {there}",
            rank=rank_group().rank,
            path=str(base),
        )

    @property
    def source(self) -> PartSource:
        """Where parts come from that are elsewhere."""
        return self._source

    @property
    def lineage(self) -> Lineage:
        """The lineage of this job when it was last recovered, as all nodes together knew it."""
        return self._lineage

    def saved_since(self, version: CheckpointContainerId) -> bool:
        """Whether a save of a step was verified here since the last recovery, which then is another version."""
        line = self.store_of(version).retained.line
        return any(each.step == version.step and each.save_id not in self._line_then for each in line)

    @property
    def recovered(self) -> CompleteVersion | None:
        """The version that was recovered last."""
        return self._recovered

    def _restore_sidecars(self, version: CompleteVersion, store: RankStore) -> None:
        """Write the files that belong beside the parts of a version on this node: see `core.sidecars`."""
        self._note(version, store)  # where holders are looked up
        path = CheckpointContainerId.create_child(store.base, version.version)
        own = find_local_manifest(store.base, version.version, store.rank, version.save_id)
        restore_sidecars(self, path, own or self.read_manifest(path, 0), store)

    def discard(self, version: CheckpointContainerId) -> None:
        """See `MLFlashpointCheckpointLoader.discard`."""
        if self._recovered is not None and self._recovered.version == version.name:
            self._discarded.add((self._recovered.version, self._recovered.save_id))
            self.store_of(version).drop_before_next_save([])
        self.release()

    def reconsider(self) -> None:
        """See `MLFlashpointCheckpointLoader.reconsider`."""
        self._discarded.clear()

    # ---- reading ------------------------------------------------------------------------------------------

    def read_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        """The manifest of one rank's part.

        Raises:
            ObjectNotFoundError: neither this node nor a known holder has it.
        """
        until = time.monotonic() + recovery_deadline_s()
        found = retrying(lambda: self._find_manifest(version, rank), until, f"reading a manifest of {version.name}")
        self.store_of(version).asked = True  # who reads one that is named knows that there are versions
        return found

    def _find_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        store = self.store_of(version)
        known = self._known(version)
        if known is not None:
            if rank >= known.world_size:
                raise ObjectNotFoundError(
                    f"it was saved by {known.world_size} ranks", step=version.step, rank=rank, path=str(version)
                )
            found = find_local_manifest(store.base, version.name, rank, known.save_id)
            if found is not None:
                return found
        manifests, errors = read_local_manifests(store.base, version.name)
        # What was recovered is gone, from everywhere, if the same step was saved again since. If it is elsewhere, a
        # later one that is here was cut short.
        mine = [m for m in manifests if m.rank == rank and (known is None or m.save_id > known.save_id)]
        if known is not None:
            try:
                return self._source.manifest(known, rank, rank_group())
            except (LoadError, ObjectNotFoundError):
                if not mine:
                    raise
        if not mine:
            raise ObjectNotFoundError(
                f"this node has no part of it{f' ({errors[0]})' if errors else ''}",
                step=version.step,
                rank=rank,
                path=str(version),
                hint="call get_latest_complete_checkpoint() first: it finds parts on other nodes",
            )
        return max(mine, key=lambda m: m.save_id)

    def open_object(self, version: CheckpointContainerId, manifest: Manifest, record: ObjectRecord) -> ObjectReader:
        """A verified reader of one object, local or remote.

        Raises:
            FlashpointError: it is damaged here, or no holder is known.
        """
        store = self.store_of(version)
        key = (version.name, manifest.save_id, record.name)
        path = store.base / version.name / record.name
        if path.exists():
            until = time.monotonic() + recovery_deadline_s()
            try:
                reader, stack = retrying(
                    lambda: open_local(store, manifest, record, verified=key in self._verified),
                    until,
                    f"opening {path}",
                )
            except (DamagedError, UnreadableError) as error:
                if not self._is_elsewhere(version, manifest):
                    raise
                _log.warning("reading another node's copy: %s", error)
            else:
                self._verified.add(key)
                self._open.enter_context(stack)
                return reader
        return ObjectReader(manifest, record, fetch=self._fetch_blocks, path=f"{version.name}/{record.name}")

    def _is_elsewhere(self, version: CheckpointContainerId, manifest: Manifest) -> bool:
        known = self._known(version)
        if known is None or known.save_id != manifest.save_id or self._source.strategy is None:
            return False
        return bool(self._source.holders(known, manifest.rank, rank_group()))

    def release(self) -> None:
        """See `MLFlashpointCheckpointLoader.release`."""
        self._open.close()
        self._open = contextlib.ExitStack()

    def store_of(self, version: CheckpointContainerId) -> RankStore:
        """The store of this rank in the base container of a version."""
        rank = self._rank_getter() if self._rank_getter is not None else rank_group().rank
        return self._objects.open(version.parent, rank)

    def _known(self, version: CheckpointContainerId) -> CompleteVersion | None:
        known = self._recovered
        if known is None or known.version != version.name:
            return None
        return None if self.saved_since(version) else known

    def _fetch_blocks(self, manifest: Manifest, record: ObjectRecord, first: int, buffer: memoryview) -> None:
        known = self._recovered
        if known is None or known.save_id != manifest.save_id:
            raise ObjectNotFoundError("no holder of this object is known", rank=manifest.rank, step=manifest.step)
        self._source.blocks(known, manifest, record, first, buffer, rank_group())
