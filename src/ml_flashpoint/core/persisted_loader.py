"""The loader of a job that also persists: the newest of what is in memory and what is in the durable store.

Owns the choice between the two, and reading persisted parts by verified ranges, each rank only what it needs. Both are
ordered by their save ids, of which later ones are greater: a version in memory is taken where the store has none that
is newer, and one in the store where memory has none, or only older ones: those of an earlier run on a node that came
back, say. Rank 0 looks at the store while all ranks look at memory. A store that does not answer is waited for where
memory has nothing; then nobody can know what it has, which is an error, and never a start from nothing.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from ml_flashpoint.core.checkpoint_loader import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.core.sidecars import restore_sidecars
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    FlashpointError,
    LoadError,
    NothingLoadableError,
    UnreadableError,
)
from ml_flashpoint.format.failure_kinds import is_damage, retrying, text_of
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.stores.bounded import Bounded
from ml_flashpoint.stores.durable import DurableVersions, save_of, version_of
from ml_flashpoint.stores.location import open_durable
from ml_flashpoint.stores.part import check_blocks
from ml_flashpoint.stores.version_store import Version

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BESIDE_MEMORY_S: Final = 10.0
"""Seconds more that the store is waited for where memory has a version: it mostly is the newest one."""

_HINT: Final = (
    "nothing was removed: try again when the store can be read; to go on from elsewhere, pass a fallback, or to start "
    "anew, another URL to persist at"
)


@dataclass(frozen=True, slots=True)
class _Look:
    """What a look at the store has found: versions, newest first, and why others do not count."""

    versions: tuple[Version, ...]
    problems: tuple[str, ...]


class PersistedLoader(MLFlashpointCheckpointLoader):
    """See the module. One caller at a time.

    Args:
        memory: the loader of what is in memory.
        url: where versions are persisted.
        ranks: who loads together.
        open_store: what the URL leads to.

    Attributes:
        tier, last_recovery: see the base class.
    """

    def __init__(
        self,
        memory: DefaultMLFlashpointCheckpointLoader,
        url: str,
        ranks: RankGroup,
        *,
        open_store: Callable[[str], DurableVersions] = open_durable,
    ) -> None:
        self._memory = memory
        self._url = url
        self._ranks = ranks
        self._open_store = open_store
        self._opened: DurableVersions | None = None
        self._look: Bounded[_Look] | None = None
        self._discarded: set[str] = set()
        self._unusable: dict[str, str] = {}
        self._current: Version | None = None
        self._manifests: dict[int, Manifest] = {}
        self.tier = "memory"
        self.last_recovery = None

    def get_latest_complete_checkpoint(
        self, checkpoint_base_container: str | os.PathLike[str]
    ) -> CheckpointContainerId | None:
        """See the base class."""
        base = CheckpointContainerId(checkpoint_base_container)
        if self._look is None and self._ranks.rank == 0:
            self._look = Bounded(self._look_at_store)
        unloadable: NothingLoadableError | None = None
        version = None
        try:
            version = self._memory.get_latest_complete_checkpoint(base)
        except NothingLoadableError as error:
            unloadable = error
        began = time.monotonic()
        self.last_recovery = self._memory.last_recovery
        recovered = self._memory.recovered
        here = recovered.save_id if version is not None and recovered is not None else None
        found, why = self._newest_persisted(here)
        while found is not None and (failure := self._restore_files(base, found)) is not None:
            _log.error("the persisted version %s cannot be used, trying an older one: %s", found.name, failure)
            self._unusable[found.save_id] = failure
            found, why = self._newest_persisted(here)
        newest = None if found is None else found.save_id
        self._ranks.renew_run(newest)  # what is saved from here on is newer, whatever the clocks say
        self._choose(None, "memory")
        if self.last_recovery is not None:
            self._report(detect_s=self.last_recovery.detect_s + time.monotonic() - began)
        if found is not None:
            self._choose(found, "persisted")
            self._report(version=found.name, world_size=found.world_size)
            if unloadable is not None:
                _log.error(
                    "going on from %s at %s, and what is in memory will be overwritten: %s",
                    *(found.name, self._url, unloadable.message),
                )
            elif version is not None:
                _log.warning("%s at %s is newer than %s in memory", found.name, self._url, version.name)
            return CheckpointContainerId.create_child(base, found.name)
        if version is None and why is not None:
            text = f"; and {unloadable.message}" if unloadable is not None else ""
            raise NothingLoadableError(f"{why}{text}", rank=self._ranks.rank, hint=_HINT) from unloadable
        if unloadable is not None:
            raise unloadable
        if why is not None:
            _log.warning("memory is gone on from, without knowing whether there is something newer: %s", why)
        return version

    def get_checkpoint(self, base: CheckpointContainerId, wanted: int) -> CheckpointContainerId:
        """See the base class. Only of what is in memory."""
        self._choose(None, "memory")
        try:
            return self._memory.get_checkpoint(base, wanted)
        finally:
            self.last_recovery = self._memory.last_recovery

    def _choose(self, version: Version | None, tier: Literal["memory", "persisted"]) -> None:
        self._current, self.tier = version, tier
        self._manifests.clear()

    def _report(self, **changes: Any) -> None:
        if self.last_recovery is not None:
            self.last_recovery = replace(self.last_recovery, **changes)

    def _restore_files(self, base: CheckpointContainerId, found: Version) -> str | None:
        """Write what belongs beside the parts, on one rank of each node. Returns why that failed, on all ranks; if it
        did. Where nothing of the version is in memory, the folder goes at the next start."""
        failure = b""
        if self._ranks.is_node_leader:
            version = CheckpointContainerId.create_child(base, found.name)
            self._choose(found, "persisted")
            try:
                own = self.read_manifest(version, self._ranks.rank if self._ranks.rank < found.world_size else 0)
                restore_sidecars(self, version, own, self._memory.store_of(version))
            except Exception as error:  # whatever it is, the other ranks wait
                failure = f"rank {self._ranks.rank}: {text_of(error)}".encode()
        return next((blob.decode() for blob in self._ranks.gather(failure) if blob), None)

    # ---- on rank 0, for all -------------------------------------------------------------------------------

    def _newest_persisted(self, here: str | None) -> tuple[Version | None, str | None]:
        """The newest version in the store that is not discarded, or why that is not known, or why there is none
        although there are some. The same on all ranks. Collective.

        Args:
            here: the save id of what memory has, which none that is older is compared with.
        """
        blob = b""
        if self._ranks.rank == 0:
            try:
                found, why = self._decide(here)
            except Exception as error:  # whatever it is, the other ranks wait
                found, why = None, f"what is persisted at {self._url} cannot be known: {text_of(error)}"
            blob = json.dumps([None if found is None else save_of(found), why]).encode()
        fields, why = json.loads(self._ranks.broadcast(blob))
        return (None if fields is None else version_of(fields)), why

    def _decide(self, here: str | None) -> tuple[Version | None, str | None]:
        assert self._look is not None
        deadline_s = recovery_deadline_s() if here is None else min(_BESIDE_MEMORY_S, recovery_deadline_s())
        look = self._look.result(deadline_s)
        reasons = list(look.problems)
        for version in look.versions:
            if here is not None and version.save_id <= here:
                return None, None
            if version.save_id in self._discarded:
                continue
            if version.save_id in self._unusable:
                reasons.append(f"{version.name} ({self._unusable[version.save_id]})")
                continue
            if not self._memory.lineage.counts(version.save_id):
                if here is None:  # all that there is may be what was gone back from: no reason to start from nothing
                    reasons.append(f"{version.name} (the job has gone back from it)")
                continue
            try:
                self._bounded(lambda version=version: self._store().check_parts(version), deadline_s)  # type: ignore[misc]
                return version, None
            except FlashpointError as error:
                if not is_damage(error):
                    raise
                _log.error("the persisted version %s cannot be used, trying an older one: %s", version.name, error)
                reasons.append(f"{version.name} ({error})")
        if not reasons or self._discarded:
            return None, None
        return None, f"there are versions at {self._url} and none can be loaded: {'; '.join(reasons[:8])}"

    def _look_at_store(self) -> _Look:
        until = time.monotonic() + recovery_deadline_s()
        found = retrying(lambda: self._store().versions(), until, f"looking at {self._url}", also=(LoadError,))
        problems = tuple(f"{each.folder} ({each.problem})" for each in found if each.problem)
        return _Look(tuple(each for each in found if each.counts), problems)

    # ---- on each rank -------------------------------------------------------------------------------------

    def _store(self) -> DurableVersions:
        if self._opened is None:
            self._opened = self._open_store(self._url)
        return self._opened

    def _bounded(self, call: Callable[[], _T], deadline_s: float | None = None) -> _T:
        """What a call to the store returns; tried again, and given up, as what peers have. A store may hang."""
        deadline_s = recovery_deadline_s() if deadline_s is None else deadline_s
        until = time.monotonic() + deadline_s
        what = f"reading at {self._url}"
        try:
            return Bounded(lambda: retrying(call, until, what, also=(LoadError,))).result(deadline_s + 1.0)
        except LoadError as error:
            raise UnreadableError(str(error)) from error

    def discard(self, version: CheckpointContainerId) -> None:
        """See the base class."""
        if self._current is None:
            self._memory.discard(version)
        elif self._current.name == version.name:
            self._discarded.add(self._current.save_id)

    def reconsider(self) -> None:
        """See the base class."""
        self._discarded.clear()
        self._unusable.clear()
        self._look = None
        self._memory.reconsider()

    def _chosen(self, version: CheckpointContainerId) -> Version | None:
        """The persisted version that this one is; None if it is one in memory."""
        found = self._current
        return None if found is None or found.name != version.name or self._memory.saved_since(version) else found

    def read_manifest(self, version: CheckpointContainerId, rank: int) -> Manifest:
        """See the base class."""
        found = self._chosen(version)
        if found is None:
            return self._memory.read_manifest(version, rank)
        if rank not in self._manifests:
            self._manifests[rank] = self._bounded(lambda: self._store().manifest(found, rank))
        return self._manifests[rank]

    def open_object(self, version: CheckpointContainerId, manifest: Manifest, record: ObjectRecord) -> ObjectReader:
        """See the base class."""
        found = self._chosen(version)
        if found is None or found.save_id != manifest.save_id:
            return self._memory.open_object(version, manifest, record)
        path = self._store().path_of(manifest, record)

        def fetch(manifest: Manifest, record: ObjectRecord, first: int, buffer: memoryview) -> None:
            begin = first * record.block_size
            self._bounded(lambda: self._store().read_into(manifest, record, begin, buffer))
            check_blocks(record, begin, buffer, path)

        return ObjectReader(manifest, record, fetch=fetch, path=path)

    def release(self) -> None:
        """See the base class."""
        self._memory.release()
