"""Loaders: which version to go on from, and its bytes.

Owns recovery as a collective: inventories by node, one plan on every rank (`core.recovery`, pure), the fetches
of this rank, verification, and the vote. All ranks go on with the same version or step back together; a copy
that turns out damaged is replaced from another holder, and where there is none the next older version is
taken. Reading into a framework's tensors is the adapters' business.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart, RankStore, list_versions
from ml_flashpoint.checkpoint_object_manager.version_files import write_companions
from ml_flashpoint.core.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.core.companions import carrier_of, companion_files
from ml_flashpoint.core.errors import DamagedError, FlashpointError, LoadError, ObjectNotFoundError
from ml_flashpoint.core.knobs import transfer_deadline_s
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader, RecoveryReport
from ml_flashpoint.core.manifest import Manifest, ObjectRecord, manifest_name
from ml_flashpoint.core.part_reader import (
    ObjectReader,
    find_local_manifest,
    open_local,
    read_local_manifests,
)
from ml_flashpoint.core.rank_group import RankGroup, rank_group
from ml_flashpoint.core.recovery import (
    CompleteVersion,
    NodeInventory,
    PartRecord,
    RecoveryPlan,
    complete_versions,
    plan_recovery,
    superseded,
)
from ml_flashpoint.replication.replication_manager import ReplicationManager
from ml_flashpoint.replication.small_fetch import fetch_blocks, fetch_manifest
from ml_flashpoint.replication.store_backend import IncomingCopy
from ml_flashpoint.replication.transfer_client import Holder, fetch_object_from_holders

_log = logging.getLogger(__name__)

Damage = tuple[str, str, str, int]
"""``(node, version, attempt, rank)`` of a part that is not what it should be."""

__all__ = ["DefaultMLFlashpointCheckpointLoader", "MLFlashpointCheckpointLoader", "RecoveryReport"]


class DefaultMLFlashpointCheckpointLoader(MLFlashpointCheckpointLoader):
    """Recovers from this node's tmpfs and its peers. One caller at a time.

    Args:
        checkpoint_object_manager: where bytes live; one of its own by default.
        replication_manager: how peers are reached; without it only this node's parts can be loaded.
        global_rank_getter: this process's rank; by default from torch.distributed.
    """

    def __init__(
        self,
        checkpoint_object_manager: CheckpointObjectManager | None = None,
        replication_manager: ReplicationManager | None = None,
        global_rank_getter: Callable[[], int] | None = None,
    ) -> None:
        self._objects = checkpoint_object_manager or CheckpointObjectManager()
        self._replication = replication_manager
        self._rank_getter = global_rank_getter
        self._recovered: CompleteVersion | None = None
        self._verified: set[tuple[str, str, str]] = set()
        self._excluded: set[tuple[str, str]] = set()
        self._open = contextlib.ExitStack()
        self.last_recovery: RecoveryReport | None = None

    # ---- recovery -----------------------------------------------------------------------------------------

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        """Collective: find the newest version whose parts all exist, bring here what this node lacks, verify
        it, vote, and step back on any failure.

        Args:
            checkpoint_base_container: base container of the job, on this node.

        Returns:
            The version's id under this node's base container, or None: no version could be recovered.

        Raises:
            FlashpointError: this rank cannot take part (base container unusable or in use, a peer is gone).
        """
        base = CheckpointContainerId(checkpoint_base_container)
        group = rank_group()
        store = self._open_store(base, group)
        damaged: set[Damage] = set()
        detect_s = plan_s = fetch_s = 0.0
        fetched = tries = 0
        while True:
            began = time.monotonic()
            inventories = self._gather(store, group, damaged)
            gathered = time.monotonic()
            strategy = self._replication.strategy if self._reaches_peers() and self._replication else None
            plan = plan_recovery(
                inventories, group.topology, strategy=strategy, damaged=damaged, excluded=self._excluded
            )
            tries += 1
            planned = time.monotonic()
            detect_s += gathered - began
            plan_s += planned - gathered
            if plan is None:
                break
            share = self._carry_out(plan, store, group)
            fetched += share.count
            done, protected = self._vote(plan, group, share, damaged)
            fetch_s += time.monotonic() - planned
            if done:
                # Not at once: what is loaded now may turn out unusable, and be discarded for an older version.
                superseded_here = _superseded(store, plan.version, inventories, group.run_id) if protected else []
                store.drop_before_next_save(superseded_here)
                break
        version = plan.version.version if plan is not None else None
        self._recovered = plan.version if plan is not None else None
        world_size = plan.version.world_size if plan is not None else None
        self.last_recovery = RecoveryReport(version, detect_s, plan_s, fetch_s, fetched, tries, world_size)
        newest = max((p.attempt for i in inventories for p in i.parts), default=None)
        group.renew_run(newest)
        return CheckpointContainerId.create_child(base, version) if version is not None else None

    def _open_store(self, base: CheckpointContainerId, group: RankGroup) -> RankStore:
        rank = self._rank_getter() if self._rank_getter is not None else group.rank
        store: RankStore | None = None
        error: FlashpointError | None = None
        try:
            store = self._objects.open(base, rank)
        except (FlashpointError, OSError) as caught:
            error = _as_ours(caught)
        # A vote, so that one rank's unusable folder is an error everywhere and not a hang of the others.
        if not group.all_ok(error is None):
            raise error or LoadError(
                "another rank could not open its base container", rank=rank, node=group.node, path=str(base)
            )
        assert store is not None
        return store

    def _gather(self, store: RankStore, group: RankGroup, damaged: set[Damage]) -> list[NodeInventory]:
        """The inventory of every node; one rank a node reads the manifests there."""
        blob = b""
        if group.is_node_leader:
            parts: list[PartRecord] = []
            try:
                for version in list_versions(store.base):
                    manifests, errors = read_local_manifests(store.base, version)
                    parts += [_part_record(m) for m in manifests if _has_objects(store, m)]
                    for error in errors:
                        _log.warning("ignoring a part: %s", error)
            except (FlashpointError, OSError) as unreadable:  # not raised: the other ranks wait for what is here
                _log.error("not all versions of this node can be read: %s", unreadable)
            blob = NodeInventory(group.node, tuple(parts)).to_json()
        return [NodeInventory.from_json(found) for found in group.gather(blob) if found]

    def _carry_out(self, plan: RecoveryPlan, store: RankStore, group: RankGroup) -> _Share:
        """This rank's share of a plan."""
        version = plan.version
        share = _Share(protected=plan.same_topology)
        for fetch in plan.fetches:
            if fetch.target_rank != store.rank:
                continue
            needed = fetch.part_rank == store.rank
            try:
                share.count += self._fetch_part(version, fetch.part_rank, fetch.source_node, store, group)
            except (FlashpointError, OSError) as caught:
                error = _as_ours(caught)
                share.protected = False
                if isinstance(error, (DamagedError, ObjectNotFoundError)):
                    share.damage.append((fetch.source_node, version.version, version.attempt, fetch.part_rank))
                if needed:
                    _log.warning("cannot fetch the part of rank %d: %s", fetch.part_rank, error)
                    share.error = error
                    return share
                # A copy for the next loss: good to have, and no reason to lose this recovery.
                _log.warning("cannot restore the copy of rank %d: %s", fetch.part_rank, error)
        if plan.same_topology:
            try:
                self._verify_own(version, store)
            except (FlashpointError, OSError) as caught:
                error = _as_ours(caught)
                _log.warning("the part of rank %d is damaged: %s", store.rank, error)
                share.damage.append((group.node, version.version, version.attempt, store.rank))
                share.error = error
                return share
        if group.is_node_leader:
            try:
                self._restore_companions(version, store)
            except (FlashpointError, OSError) as caught:
                share.error = _as_ours(caught)
                _log.warning("the files beside the parts of %s cannot be restored: %s", version.version, share.error)
        return share

    def _restore_companions(self, version: CompleteVersion, store: RankStore) -> None:
        """Write the files that belong beside the parts of a version on this node: see `core.companions`."""
        self._recovered = version  # where holders are looked up
        path = CheckpointContainerId.create_child(store.base, version.version)
        own = find_local_manifest(store.base, version.version, store.rank, version.attempt)
        carrier = carrier_of(own or self.read_manifest(path, 0))
        if carrier is None:
            return
        manifest = self.read_manifest(path, carrier)
        try:
            files = companion_files(self.open_object(path, manifest, manifest.objects[0]))
        finally:
            self.release()
        write_companions(store.base, version.version, files)

    def _verify_own(self, version: CompleteVersion, store: RankStore) -> None:
        manifest = find_local_manifest(store.base, version.version, store.rank, version.attempt)
        if manifest is None:
            raise ObjectNotFoundError("the manifest is gone", rank=store.rank, path=store.base / version.version)
        for record in manifest.objects:
            key = (version.version, version.attempt, record.name)
            if key not in self._verified:
                _, stack = open_local(store, manifest, record, verified=False)
                stack.close()
                self._verified.add(key)

    def _fetch_part(self, version: CompleteVersion, rank: int, source: str, store: RankStore, group: RankGroup) -> int:
        manifest = self._remote_manifest(version, rank, source, group)
        incoming = IncomingCopy(store, manifest)
        try:
            holders = self._holders(version, rank, group, first=source)
            for record, buffer in zip(manifest.objects, incoming.buffers, strict=True):
                fetch_object_from_holders(
                    holders,
                    group.secret,
                    version.version,
                    record,
                    buffer,
                    rank=rank,
                    deadline_s=transfer_deadline_s(),
                )
            incoming.commit()
        except BaseException:
            incoming.abort()
            raise
        for record in manifest.objects:
            self._verified.add((version.version, version.attempt, record.name))
        return manifest.total_size

    def _vote(self, plan: RecoveryPlan, group: RankGroup, share: _Share, damaged: set[Damage]) -> tuple[bool, bool]:
        """Share what was found.

        Returns:
            Whether all ranks go on with the plan's version; if not, ``damaged`` or the excluded versions have
            grown, so that the next plan differs. And whether every copy of it is in its place, so that it
            survives what the strategy claims.
        """
        before = len(damaged)
        blob = b""
        if share.damage or share.error is not None or not share.protected:
            blob = json.dumps([share.error is None, share.protected, share.damage]).encode()
        unanimous = protected = True
        for said in group.gather(blob):
            if said:
                ok, all_copies, parts = json.loads(said)
                unanimous = unanimous and bool(ok)
                protected = protected and bool(all_copies)
                damaged.update((str(n), str(v), str(a), int(r)) for n, v, a, r in parts)
        if unanimous:
            return True, protected
        if len(damaged) == before:
            # Nothing to be replaced, so the version itself is out of reach.
            _log.error("version %s cannot be recovered, stepping back", plan.version.version)
            self._excluded.add((plan.version.version, plan.version.attempt))
        return False, False

    def discard(self, version: CheckpointContainerId) -> None:
        """See `MLFlashpointCheckpointLoader.discard`."""
        if self._recovered is not None and self._recovered.version == version.name:
            self._excluded.add((self._recovered.version, self._recovered.attempt))
            self._store_of(version).drop_before_next_save([])
        self.release()

    # ---- reading ------------------------------------------------------------------------------------------

    def read_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        """The manifest of one rank's part.

        Raises:
            ObjectNotFoundError: neither this node nor a known holder has it.
        """
        store = self._store_of(version)
        known = self._known(version)
        if known is not None:
            if rank >= known.world_size:
                raise ObjectNotFoundError(
                    f"it was saved by {known.world_size} ranks", step=version.step, rank=rank, path=str(version)
                )
            found = find_local_manifest(store.base, version.name, rank, known.attempt)
            if found is not None:
                return found
        manifests, errors = read_local_manifests(store.base, version.name)
        # What was recovered is gone from here if the same step was saved again since.
        mine = [m for m in manifests if m.rank == rank and (known is None or m.attempt > known.attempt)]
        if not mine and known is not None:
            return self._remote_manifest(known, rank, known.holders[rank][0], rank_group())
        if not mine:
            raise ObjectNotFoundError(
                f"this node has no part of it{f' ({errors[0]})' if errors else ''}",
                step=version.step,
                rank=rank,
                path=str(version),
                hint="call get_latest_complete_checkpoint() first: it finds parts on other nodes",
            )
        return max(mine, key=lambda m: m.attempt)

    def open_object(self, version: CheckpointContainerId, manifest: Manifest, record: ObjectRecord) -> ObjectReader:
        """A verified reader of one object, local or remote.

        Raises:
            FlashpointError: it is damaged here, or no holder is known.
        """
        store = self._store_of(version)
        key = (version.name, manifest.attempt, record.name)
        if (store.base / version.name / record.name).exists():
            try:
                reader, stack = open_local(store, manifest, record, verified=key in self._verified)
            except DamagedError as error:
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
        if known is None or known.attempt != manifest.attempt or not self._reaches_peers():
            return False
        return bool(self._holders(known, manifest.rank, rank_group()))

    def release(self) -> None:
        """See `MLFlashpointCheckpointLoader.release`."""
        self._open.close()
        self._open = contextlib.ExitStack()

    def _store_of(self, version: CheckpointContainerId) -> RankStore:
        rank = self._rank_getter() if self._rank_getter is not None else rank_group().rank
        return self._objects.open(version.parent, rank)

    def _known(self, version: CheckpointContainerId) -> CompleteVersion | None:
        known = self._recovered
        return known if known is not None and known.version == version.name else None

    def _fetch_blocks(self, manifest: Manifest, record: ObjectRecord, first: int, buffer: memoryview) -> None:
        known = self._recovered
        if known is None or known.attempt != manifest.attempt:
            raise ObjectNotFoundError("no holder of this object is known", rank=manifest.rank, step=manifest.step)
        group = rank_group()
        failure: FlashpointError | None = None
        for holder in self._holders(known, manifest.rank, group):
            try:
                fetch_blocks(
                    holder,
                    group.secret,
                    manifest.version,
                    record,
                    first,
                    buffer,
                    deadline_s=transfer_deadline_s(),
                )
                return
            except FlashpointError as error:
                _log.warning("%s cannot give %s: %s", holder.node, record.name, error)
                failure = error
        raise failure or ObjectNotFoundError("no holder is reachable", rank=manifest.rank, step=manifest.step)

    # ---- peers --------------------------------------------------------------------------------------------

    def _reaches_peers(self) -> bool:
        return self._replication is not None and self._replication.initialized

    def _holders(self, version: CompleteVersion, rank: int, group: RankGroup, first: str | None = None) -> list[Holder]:
        """Services that can give a rank's part, ``first`` in front. Ranks of a node share the load."""
        if not self._reaches_peers() or self._replication is None:
            raise LoadError(
                "the part is on another node, and there is no replication manager to reach it",
                rank=rank,
                hint="pass an initialized ReplicationManager to the loader",
            )
        nodes = sorted(version.holders[rank], key=lambda node: node != first)
        holders = []
        for node in nodes:
            if node != group.node and node in group.topology.node_order:
                ranks = group.topology.ranks_of(node)
                address = self._replication.address_of(ranks[rank % len(ranks)])
                holders.append(Holder(node, address))
        return holders

    def _remote_manifest(self, version: CompleteVersion, rank: int, source: str, group: RankGroup) -> Manifest:
        holders = self._holders(version, rank, group, first=source)
        failure: FlashpointError | None = None
        for holder in holders:
            try:
                return fetch_manifest(
                    holder,
                    group.secret,
                    version.version,
                    rank,
                    version.attempt,
                    deadline_s=transfer_deadline_s(),
                )
            except FlashpointError as error:
                failure = error
        raise failure or ObjectNotFoundError("no holder is reachable", rank=rank, step=version.step)


@dataclass(slots=True)
class _Share:
    """What became of one rank's share of a plan.

    Attributes:
        count: bytes fetched.
        damage: parts found damaged.
        error: why this rank votes no.
        protected: whether this rank has all the copies that the strategy asks of it.
    """

    count: int = 0
    damage: list[Damage] = field(default_factory=list)
    error: FlashpointError | None = None
    protected: bool = True


def _superseded(
    store: RankStore, version: CompleteVersion, inventories: Sequence[NodeInventory], run_id: str
) -> list[HeldPart]:
    """Parts that a recovered version, verified on all ranks and with all its copies, makes useless: what is older,
    and what an earlier run began and did not complete. If they stayed, a job that crashes again and again before
    its first verified save would fill the memory."""
    complete = {found.attempt for found in complete_versions(inventories)}
    return [
        part
        for part in store.held()
        if superseded(part.attempt, version.attempt)
        or (part.attempt > version.attempt and part.attempt not in complete and not part.attempt.startswith(run_id))
    ]


def _as_ours(error: FlashpointError | OSError) -> FlashpointError:
    """An error to vote with: raised where the other ranks wait, it would leave them to their deadline."""
    return error if isinstance(error, FlashpointError) else LoadError(f"{type(error).__name__}: {error}")


def _part_record(manifest: Manifest) -> PartRecord:
    return PartRecord(
        manifest.version,
        manifest.step,
        manifest.rank,
        manifest.world_size,
        manifest.attempt,
        manifest.total_size,
    )


def _has_objects(store: RankStore, manifest: Manifest) -> bool:
    """Whether the files of a part are there and long enough; their content is checked by who needs it."""
    for record in manifest.objects:
        path = store.base / manifest.version / record.name
        try:
            size = os.stat(path).st_size
        except OSError as error:
            if (path.parent / manifest_name(manifest.rank, manifest.attempt)).exists():  # else pruned meanwhile
                _log.warning("ignoring the part of rank %d in %s: %s", manifest.rank, manifest.version, error)
            return False
        if size < record.size:
            _log.warning("ignoring the part of rank %d: %s has %d bytes of %d", manifest.rank, path, size, record.size)
            return False
    return True
