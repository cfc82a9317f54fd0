"""Recovery: the newest version of the lineage whose parts all exist, brought to where it is needed.

One loop over all stores in order of speed: own memory, peers, the durable store. The lowest rank of each node reads
the node's manifests, rank 0 lists the durable store, and all ranks plan alike (`ranks.recovery`). Each rank fetches its
own part if its node lacks the part, and checks the part. Then all vote. Damage found here is replaced from another
holder. A version that some rank cannot have is given up by all, for the next older one. Last, each rank fetches the
copies that it lacks. A copy that cannot be fetched is left to the first rounds of the run (`Verdict.recovered`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

from ml_flashpoint import events
from ml_flashpoint.engine.copying import Copies, Failures
from ml_flashpoint.engine.inventory import NodeReport, gather_reports, why_nothing
from ml_flashpoint.engine.reader import DurableParts, MemoryParts, VersionReader, waited_for
from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.engine.sidecars import carrier_of, sidecar_files
from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    LoadError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
    as_ours,
    is_damage,
    is_transient,
    retrying,
    text_of,
)
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.memory.capacity import available_bytes
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lineage import (
    RunRecord,
    mark_begun,
    mark_verified,
    newest_begun,
    next_run,
    read_records,
    write_record,
)
from ml_flashpoint.memory.pool import ROOM, Pool, slot_size
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import (
    CompleteVersion,
    Damage,
    Fetch,
    complete_versions,
    is_protected,
    parts_to_check,
    plan_fetches,
)
from ml_flashpoint.ranks.retention import Keep, kept
from ml_flashpoint.ranks.strategies import ReplicationStrategy
from ml_flashpoint.stores.durable import DurableVersions, save_of, version_of
from ml_flashpoint.stores.location import open_durable
from ml_flashpoint.stores.version_store import Version

_log = logging.getLogger(__name__)

_BESIDE_MEMORY_S = 10.0
"""Seconds that the durable store is waited for where memory has a version: it mostly is the newest one."""

Found: TypeAlias = CompleteVersion | Version
"""A version that every rank can load: in memory, or in the durable store."""


def tier_of(found: Found | None) -> Literal["memory", "persisted"]:
    """Return the tier that a version was found in."""
    return "persisted" if isinstance(found, Version) else "memory"


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that can be gone back to: every part of it is on some node of the job.

    Attributes:
        verified: True if it is complete on all ranks, with every copy that the replication strategy asks for.
        bytes: of the parts of all ranks, each counted once.
        world_size: number of ranks that saved it.
    """

    step: int
    verified: bool
    bytes: int
    world_size: int
    save: SaveId


@dataclass(slots=True)
class RecoveryReport:
    """The work of one recovery on this rank; times in seconds.

    Attributes:
        version: the version recovered, None if there was none.
        detect_s: reading and gathering inventories. plan_s: planning. fetch_s: fetching and checking.
        fetched_bytes: bytes that this rank received from peers.
        tries: plans made; more than one means that something was damaged.
        world_size: number of ranks that saved the version, None if there was none.
        tier: store that the version was found in.
    """

    version: str | None = None
    detect_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    tries: int = 0
    world_size: int | None = None
    tier: Literal["memory", "persisted"] = "memory"


class Listing(NamedTuple):
    """The content of a durable store: the versions that count, newest first, and the problems of others. ``unknown`` is
    the reason why that is not known. ``run`` is the highest run of which anything is there, be it whole or not."""

    versions: tuple[Version, ...] = ()
    problems: tuple[str, ...] = ()
    unknown: str = ""
    run: int = 0


class DurableTier:
    """The durable store of a job, which rank 0 lists for all ranks. Without a URL it is empty."""

    def __init__(self, url: str | None, ranks: RankGroup, open_store: Callable[[str], DurableVersions]) -> None:
        self.url, self._ranks, self._open_store = url, ranks, open_store
        self._store: DurableVersions | None = None
        self.forget()

    @property
    def store(self) -> DurableVersions:
        """The store, which is opened when it is needed first. That may hang, so no lock is held."""
        if self._store is None:
            assert self.url is not None
            self._store = self._open_store(self.url)
        return self._store

    def forget(self) -> None:
        """List the store anew when that is needed next."""
        self._listing, self._waited_s = None if self.url else Listing(), 0.0

    def list(self, most_s: float = math.inf) -> Listing:
        """Return the content of the store. Collective. A store that did not answer is not waited for as long again: for
        ``FLASHPOINT_RECOVERY_DEADLINE_S``, or ``most_s`` if that is less.
        """
        deadline_s = min(recovery_deadline_s(), most_s)
        if self._listing is not None and (not self._listing.unknown or deadline_s <= self._waited_s):
            return self._listing
        self._waited_s, blob = deadline_s, b""
        if self._ranks.rank == 0:
            try:
                found = waited_for(lambda: self.store.versions(), str(self.url), deadline_s)
                problems = tuple(f"{each.folder} ({each.problem})" for each in found if each.problem)
                run = max((each.save.run for each in found), default=0)
                listing = Listing(tuple(each for each in found if each.counts), problems, run=run)
            except Exception as error:  # the other ranks wait
                listing = Listing(unknown=f"what is persisted at {self.url} cannot be known: {text_of(error)}")
            blob = json.dumps([list(map(save_of, listing.versions)), *listing[1:]]).encode()
        saves, problems, unknown, run = json.loads(self._ranks.broadcast(blob))
        self._listing = Listing(tuple(map(version_of, saves)), tuple(problems), unknown, run)
        return self._listing

    def give_up(self, why: str) -> None:
        """Take the store for one that does not answer, until it is listed anew. On all ranks."""
        self._listing, self._waited_s = Listing(unknown=f"{self.url} cannot be read: {why}"), math.inf


class Recovery:
    """Finds versions, brings them to this node, and records runs. Made on all ranks; all methods but `reader` and
    `heard` are collective. ``pool`` is of this rank's own parts; ``held`` are those of the copies that this rank holds,
    by rank; ``durable`` is the URL of the durable store.

    Attributes:
        found: the version that was found last; None if there was none.
        report: report of the last `find`; None before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        container: BaseContainer,
        pool: Pool,
        copies: Copies,
        strategy: ReplicationStrategy,
        keep: Keep,
        *,
        held: Mapping[int, Pool] | None = None,
        durable: str | None = None,
        open_store: Callable[[str], DurableVersions] = open_durable,
    ) -> None:
        self.pools = {**(held or {}), ranks.rank: pool}
        self.ranks, self.container, self.pool, self.copies = ranks, container, pool, copies
        self.strategy, self.keep = strategy, keep
        self.durable = DurableTier(durable, ranks, open_store)
        self.found: Found | None = None
        self.report: RecoveryReport | None = None
        self.damaged: set[Damage] = set()
        self.checked: set[tuple[SaveId, int]] = set()
        self._record = RunRecord(0)

    # ---- finding -------------------------------------------------------------------------------------------

    def any_versions(self) -> bool:
        """Return True if any node, or the durable store, may have a version. Raise a `LoadError` if that cannot be
        known."""
        if any(report.inventory.parts or report.unread for report in self.gather()):
            return True
        listed = self.durable.list()
        return bool(listed.versions or listed.problems or listed.unknown)

    def gather(self) -> list[NodeReport]:
        """Return the state of every node. Raise a `LoadError`, on all ranks, if one cannot be known."""
        return gather_reports(self.container, self.ranks, time.monotonic() + recovery_deadline_s())

    def find(
        self, wanted: int | None = None, *, excluded: Collection[SaveId] = (), retained: Collection[SaveId] = ()
    ) -> Found | None:
        """Find the newest version that every rank can load, and bring here what this node lacks of it.

        Args:
            wanted: step of the version; None for any.
            excluded: saves that are not looked at.
            retained: saves whose slots are not taken; by default those that the run is going to list as verified.

        Returns:
            The version; None if no version was ever complete, or all are excluded.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
            LoadError: there is no version of the step, or it cannot be loaded. On all ranks.
        """
        self.damaged.clear()
        self.durable.forget()
        search = _Search(self, wanted, excluded, retained)
        self.found, self.report = None, search.report
        self.found = search.run()
        return self.found

    # ---- runs ----------------------------------------------------------------------------------------------

    def record(self, chosen: Found | None) -> tuple[int, Verdict]:
        """Choose the number of a run that goes on from a version, have all nodes record it, and begin it. Return the
        run and its first verdict. Raise a `SaveError` or `CapacityError`, on all ranks, if a node cannot record the
        run."""
        reports, listed = self.gather(), self.durable.list(_BESIDE_MEMORY_S)
        records = [record for report in reports for record in report.records]
        if listed.unknown and not records:
            raise SaveError(f"no number can be chosen for the run: {listed.unknown}", rank=self.ranks.rank)
        save = None if chosen is None else chosen.save
        if tier_of(chosen) == "memory" and save not in {None, *(each.save for each in self.existing(reports))}:
            raise SaveError("the version is not whole any more: find one anew", rank=self.ranks.rank)
        found = [part.save for report in reports for part in report.inventory.parts]
        found.append(SaveId(listed.run, 0))  # what is not whole there must not be taken for parts of this run
        record = next_run(records, found if save is None else [*found, save], save)
        self._on_each_node(lambda: self._write(record))
        self._on_each_node(lambda: mark_begun(self.container, record.run))
        self._record = record
        return record.run, self._first_verdict(record, chosen, reports)

    def _write(self, record: RunRecord) -> None:
        for node, save, rank in self.damaged:
            if node == self.ranks.node:  # else its rank would take it for a sound copy
                self.container.remove_part(save, rank)
        write_record(self.container, record)

    def _on_each_node(self, action: Callable[[], None]) -> None:
        ranks = self.ranks
        other = SaveError("another node cannot record the run; its log says why", rank=ranks.rank, node=ranks.node)
        ranks.together(action if ranks.is_node_leader else lambda: None, other)

    def _first_verdict(self, record: RunRecord, chosen: Found | None, reports: Sequence[NodeReport]) -> Verdict:
        start, world_size = SaveId(record.run, 0), self.ranks.world_size
        if chosen is None:
            return Verdict(0, (), start)
        line = self.lasting(self.existing(reports), chosen.save)
        if isinstance(chosen, Version) or chosen.save in line:
            return Verdict(0, line, start)
        if chosen.world_size == world_size:
            return Verdict(0, line, chosen.save, recovered=chosen.save)
        # No round can be about it, for other ranks have written it: until a save of these is verified, the newest
        # version with all copies is the one that survives a loss.
        listed = (*line[1 - self.keep.versions or -1 :], chosen.save)
        try:
            needed, free = self._room([sum(chosen.sizes) // world_size] * world_size, listed)
        except FlashpointError as error:  # the other ranks wait
            _log.warning("%s alone is retained: %s", chosen.save.version, error)
            needed, free = 1, 0
        return Verdict(0, listed if self.ranks.all_ok(needed <= free) else (chosen.save,), start)

    # ---- room ----------------------------------------------------------------------------------------------

    def check_room(self, expected_bytes: int) -> None:
        """See `Checkpointer.check_room`."""
        ranks, versions = self.ranks, 1 + self.keep.versions
        sizes = [json.loads(blob) for blob in ranks.gather(json.dumps(expected_bytes).encode())]

        def check() -> None:
            needed, free = self._room(sizes, ())
            needed *= versions
            if needed > free:
                raise CapacityError(
                    f"{versions} versions of the ranks of this node, and of the parts that they hold copies of, need"
                    f" {needed} bytes, and {free} are available",
                    needed_bytes=needed,
                    available_bytes=free,
                    path=self.container.base,
                    hint="enlarge the tmpfs (mount -o remount,size=...) or the container, free memory, keep fewer"
                    " versions, or replicate less",
                )

        text = "another node has too little room, or cannot tell how much; its log says more"
        ranks.together(check, CapacityError(text, rank=ranks.rank))

    def _room(self, sizes: Sequence[int], listed: Collection[SaveId]) -> tuple[int, int]:
        """Return the bytes that a save of all ranks needs on this node, with copies, and those that new slots can have:
        free ones, and those of slots that are not listed. Raise an `UnreadableError` if that cannot be known."""
        topology = self.ranks.topology
        here = topology.ranks_of(self.ranks.node)
        held = [each for rank in here for each in self.strategy.held_by(rank, topology)]
        needed = sum(slot_size(sizes[rank]) for rank in (*here, *held))
        try:
            committed, free = self.container.committed(), available_bytes(self.container.base) - ROOM
            for path in self.container.slot_paths():
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    save, _ = committed.get(status.st_ino, (None, 0))
                    free += status.st_size if save not in listed else 0
        except (FlashpointError, OSError) as error:
            text = f"cannot tell how much room there is: {text_of(error)}"
            raise UnreadableError(text, path=self.container.base, rank=self.ranks.rank) from error
        return needed, free

    def heard(self, verdict: Verdict) -> None:
        """Take note, once a run, that a version is verified: if all are lost later, that is an error."""
        if verdict.total and not self._record.verified and self.ranks.is_node_leader:
            self._record = RunRecord(self._record.run, self._record.lineage, begun=True, verified=True)
            try:
                mark_verified(self.container, self._record.run)
            except SaveError as error:
                _log.warning("if all versions are lost, the job will start from nothing: %s", error)

    # ---- versions ------------------------------------------------------------------------------------------

    def existing(self, reports: Iterable[NodeReport]) -> list[CompleteVersion]:
        """Return the complete versions of the lineage in memory, newest first."""
        reports = list(reports)
        record = _newest(reports)
        complete = complete_versions((report.inventory for report in reports), damaged=self.damaged)
        return [each for each in complete if record is None or record.has(each.save)]

    def lasting(self, complete: Iterable[CompleteVersion], newest: SaveId) -> tuple[SaveId, ...]:
        """Return the saves that a run going on from ``newest`` retains, oldest first: those that have all copies."""
        line = [each.save for each in complete if each.save <= newest and self._has_copies(each)]
        return tuple(kept(sorted(line), self.keep))

    def _has_copies(self, version: CompleteVersion) -> bool:
        return is_protected(version, self.ranks.topology, self.strategy)

    def versions(self) -> list[KeptVersion]:
        """Return what can be gone back to, newest first. Collective."""
        return [
            KeptVersion(each.save.step, self._has_copies(each), sum(each.sizes), each.world_size, each.save)
            for each in self.existing(self.gather())
        ]

    def reader(self, path: str | os.PathLike[str]) -> VersionReader:
        """Return a reader of a version: the one that was found last, or a newer save of the step in memory. Raise an
        `ObjectNotFoundError` if this node has no part of it."""
        version = CheckpointContainerId(path)
        record = newest_begun(read_records(self.container))
        named = [save for save in self.container.list_versions() if save.version == version.name]
        newest = max((save for save in named if record is None or record.has(save)), default=None)
        found = self.found
        if found is not None and found.save.version == version.name and (newest is None or newest <= found.save):
            return self.reader_of(found)
        if newest is None:
            hint = "call `newest` or `latest` first: it finds parts on other nodes"
            raise ObjectNotFoundError("this node has no part of it", step=version.step, path=str(version), hint=hint)
        return self.reader_of(self._here(newest))

    def _here(self, save: SaveId) -> CompleteVersion:
        """Return a version of which this node has a part. Its holders are those that the strategy names."""
        rank = min(self.container.list_versions().get(save, {self.ranks.rank}))
        size = self.container.read_manifest(save, rank).world_size
        topology = self.ranks.topology
        if size != topology.world_size:
            return CompleteVersion(save, size, ((),) * size, ())
        homes = ((rank, *self.strategy.copies_of(rank, topology)) for rank in range(size))
        return CompleteVersion(save, size, tuple(tuple(map(topology.node_of, home)) for home in homes), ())

    def reader_of(self, found: Found) -> VersionReader:
        """Return a reader of a version that was found."""
        version = CheckpointContainerId.create_child(CheckpointContainerId(self.container.base), found.save.version)
        parts = DurableParts(self.durable.store, found) if isinstance(found, Version) else self.parts_of(found)
        return VersionReader(version, found.save, found.world_size, parts, tier_of(found))

    def parts_of(self, found: CompleteVersion) -> MemoryParts:
        """Return the parts of a version in memory."""

        def nodes_of(rank: int) -> list[str]:
            return [node for node in found.holders[rank] if node != self.ranks.node]

        return MemoryParts(found.save, self.container, self.pool, self.copies, nodes_of, self.checked)


def _newest(reports: Iterable[NodeReport]) -> RunRecord | None:
    return newest_begun(record for report in reports for record in report.records)


class _Search:
    """One recovery. Made and run on all ranks."""

    def __init__(
        self, recovery: Recovery, wanted: int | None, excluded: Collection[SaveId], retained: Collection[SaveId]
    ) -> None:
        self._recovery, self._ranks = recovery, recovery.ranks
        self._wanted, self._excluded, self._retained = wanted, frozenset(excluded), frozenset(retained)
        self._until = time.monotonic() + recovery_deadline_s()
        self._target: SaveId | None = None
        self._given_up: set[SaveId] = set()
        self._why: dict[SaveId, str] = {}
        self._reports: list[NodeReport] = []
        self._complete: list[CompleteVersion] = []
        # Since the last vote, on this rank: parts found damaged, and parts that are sound again.
        self._damage: list[Damage] = []
        self._mended: list[Damage] = []
        self.report = RecoveryReport()

    def run(self) -> Found | None:
        """Try one version after the other, until all ranks have one or there is none. Collective."""
        recovery, report = self._recovery, self.report
        tried: Found | None = None
        while True:
            began = time.monotonic()
            self._reports = gather_reports(recovery.container, recovery.ranks, self._until)
            gathered = time.monotonic()
            found = self._choose()
            planned = time.monotonic()
            report.tries += 1
            report.detect_s, report.plan_s = report.detect_s + gathered - began, report.plan_s + planned - gathered
            if tried is not None and (found is None or found.save != tried.save):
                why = self._why[tried.save]
                _log.error("%s cannot be recovered, stepping back: %s", tried.save.version, why)
                self._tell(events.SteppedBack, tried.save, error=why)
            if found is None:
                self._raise_if_lost()
                return None
            has_all = self._vote(found, self._take(found))
            if has_all:
                self._restore(found)
            report.fetch_s += time.monotonic() - planned
            if has_all:
                report.version, report.world_size, report.tier = found.save.version, found.world_size, tier_of(found)
                times = {"detect_s": report.detect_s, "plan_s": report.plan_s, "fetch_s": report.fetch_s}
                counts = {"fetched_bytes": report.fetched_bytes, "tries": report.tries}
                self._tell(events.VersionRecovered, found.save, **times, **counts)
                return found
            tried = found

    def _tell(self, kind: type[events.Event], save: SaveId, **fields: Any) -> None:
        events.emit(kind, self._ranks, self._recovery.container.base, save.step, **fields)

    # ---- choosing: the same on all ranks -------------------------------------------------------------------

    def _choose(self) -> Found | None:
        """Return the newest version that was neither given up nor excluded; of two tiers, memory goes first."""
        self._complete = self._recovery.existing(self._reports)
        memory = next((each for each in self._complete if self._is_wanted(each.save)), None)
        record = _newest(self._reports)
        listed = self._recovery.durable.list(math.inf if memory is None else _BESIDE_MEMORY_S)
        for stored in listed.versions:
            if memory is not None and stored.save <= memory.save:
                break
            # Of a run later than all records here, other nodes had the record: what is here is older.
            exists = record is None or record.has(stored.save) or stored.save.run > record.run
            if exists and self._is_wanted(stored.save):
                return stored
        if memory is not None and listed.unknown:
            _log.warning("going on from memory, and there may be a newer version: %s", listed.unknown)
        return memory

    def _is_wanted(self, save: SaveId) -> bool:
        if self._wanted is not None:
            self._target = self._target or (save if save.step == self._wanted else None)
            if save != self._target:
                return False
        return save not in self._excluded and save not in self._given_up

    def _raise_if_lost(self) -> None:
        """Raise if a version was lost, or the wanted one is not there."""
        recovery, ranks = self._recovery, self._ranks
        if self._wanted is not None:
            there = ", ".join(dict.fromkeys(str(each.save.step) for each in self._complete))
            text = f"no version of step {self._wanted} is held by this job; there are {there or 'none'}"
            if self._why:
                text = f"the version of step {self._wanted} cannot be loaded: {'; '.join(self._why.values())}"
            raise LoadError(text, rank=ranks.rank, path=recovery.container.base)
        listed = recovery.durable.list(0.0)
        problems = [*listed.problems, *filter(None, [listed.unknown])]
        error = why_nothing(self._reports, self._why, self._excluded, world_size=ranks.world_size, durable=problems)
        if error is not None:
            error.rank, error.node, error.path = ranks.rank, ranks.node, str(recovery.container.base)
            raise error
        if any(report.inventory.parts for report in self._reports) and not self._excluded:
            _log.warning("starting anew: no version of this job was ever complete")

    # ---- trying --------------------------------------------------------------------------------------------

    def _take(self, found: Found) -> FlashpointError | None:
        """Have this rank's own part here, and check what this rank has to check. Return the error, for the other ranks
        wait for the vote."""
        try:
            if isinstance(found, Version):
                self._check_stored(found)
            else:
                for fetch in self._mine(found):
                    if fetch.rank == self._ranks.rank:
                        self._fetch(found, fetch, self._retained_beside(found.save), self._until)
                self._check(found)
            if self._ranks.is_node_leader:
                retrying(lambda: self._restore_sidecars(found), self._until, "restoring the files beside the parts")
        except Exception as caught:
            error = as_ours(caught)
            unexpected = None if isinstance(caught, (FlashpointError, OSError, MemoryError)) else caught
            _log.warning("%s cannot be recovered here: %s", found.save.version, error, exc_info=unexpected)
            return error
        return None

    def _check_stored(self, version: Version) -> None:
        """Check that this rank's share of the parts is there, with the right sizes."""
        store, share = self._recovery.durable.store, version.ranks[self._ranks.rank :: self._ranks.world_size]
        for part in share:
            waited_for(partial(_check_size, store, version, part), store.path)

    def _check(self, version: CompleteVersion) -> None:
        parts, save = self._recovery.parts_of(version), version.save
        for rank in parts_to_check(version, self._ranks.topology, self._ranks.rank):
            with contextlib.ExitStack() as stack:
                try:
                    retrying(partial(parts.open_here, rank, stack), self._until, f"checking the part of rank {rank}")
                except FlashpointError as error:
                    if is_damage(error):
                        self._damage.append((self._ranks.node, save, rank))
                    raise

    def _restore_sidecars(self, found: Found) -> None:
        """Write the files that belong beside the parts of this node."""
        with self._recovery.reader_of(found) as reader:
            carrier = carrier_of(reader.manifest(self._ranks.rank if self._ranks.rank < found.world_size else 0))
            if carrier is not None:
                self._recovery.container.write_sidecars(found.save, sidecar_files(reader.open(carrier)))

    # ---- fetching ------------------------------------------------------------------------------------------

    def _mine(self, version: CompleteVersion) -> list[Fetch]:
        planned = plan_fetches(version, self._ranks.topology, self._recovery.strategy)
        return [each for each in planned if each.target == self._ranks.rank and each.rank in self._recovery.pools]

    def _restore(self, found: Found) -> None:
        """Fetch what this rank lacks of the version, and of the others that stay, as far as there is room. Collective:
        all ranks hear of damage."""
        recovery, size, keep = self._recovery, self._ranks.world_size, self._recovery.keep
        alike = [each for each in self._complete if each.save <= found.save and each.world_size == size]
        line = set(kept(sorted(each.save for each in alike), keep)) | {found.save}
        for version in (each for each in alike if each.save in line):
            retained = self._retained_beside(found.save) if version.save == found.save else line
            for fetch in self._mine(version):
                if (version.save, fetch.rank) in recovery.checked:
                    continue  # it was fetched before the vote
                try:
                    self._fetch(version, fetch, retained, 0.0)
                except Exception as error:  # good to have, and no reason to lose this recovery, or to wait
                    _log.warning("cannot restore the part of rank %d in %s: %s", fetch.rank, version.save, error)
        self._vote(found, None)

    def _fetch(self, version: CompleteVersion, fetch: Fetch, retained: Collection[SaveId], until: float) -> None:
        recovery, save, rank = self._recovery, version.save, fetch.rank
        nodes = sorted(version.holders[rank], key=lambda node: node != fetch.source)
        failures: Failures = []
        began = time.monotonic()
        try:
            manifest = recovery.copies.fetch_part(
                save, rank, nodes, recovery.pools[rank], retained, until=until, failures=failures
            )
        finally:
            self._damage += [(node, save, rank) for node, error in failures if is_damage(error)]
        self._mended.append((self._ranks.node, save, rank))
        self.report.fetched_bytes += manifest.record.size
        recovery.checked.add((save, rank))
        seconds = time.monotonic() - began
        self._tell(events.PartFetched, save, part_rank=rank, bytes=manifest.record.size, seconds=seconds)

    def _retained_beside(self, save: SaveId) -> set[SaveId]:
        """Return a version and those that the run is going to list: their slots are taken by nothing."""
        return {save, *(self._retained or self._recovery.lasting(self._complete, save))}

    # ---- voting --------------------------------------------------------------------------------------------

    def _vote(self, found: Found, error: FlashpointError | None) -> bool:
        """Return True if all ranks have the version. If not, the next choice is another one: something was found
        damaged, or the version is given up. Collective."""
        recovery, ranks = self._recovery, self._ranks
        before, blob = len(recovery.damaged), b""
        if error is not None or self._damage or self._mended:
            why = None if error is None else f"rank {ranks.rank} on {ranks.node}: {error}"
            passes = error is not None and is_transient(error)
            blob = json.dumps([why, passes, self._damage, self._mended]).encode()
        self._damage, self._mended = [], []
        reasons: list[tuple[str, bool]] = []
        mended: set[Damage] = set()
        for reported in filter(None, ranks.gather(blob)):
            why, passes, damage, repaired = json.loads(reported)
            recovery.damaged.update((node, SaveId(*save), rank) for node, save, rank in damage)
            mended.update((node, SaveId(*save), rank) for node, save, rank in repaired)
            reasons += [] if why is None else [(why, passes)]
        grown = len(recovery.damaged) > before
        recovery.damaged -= mended
        if not reasons:
            return True
        self._why[found.save] = reasons[0][0]
        if isinstance(found, CompleteVersion):
            if not grown:  # else the next plan replaces what is damaged, if it can
                self._given_up.add(found.save)
        elif all(passes for _, passes in reasons):
            recovery.durable.give_up(reasons[0][0])
        else:
            self._given_up.add(found.save)
        return False


def _check_size(store: DurableVersions, version: Version, rank: int) -> None:
    store.check_size(store.manifest(version, rank))
