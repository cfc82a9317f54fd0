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
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ml_flashpoint import events
from ml_flashpoint.engine.copying import Copies, Failures
from ml_flashpoint.engine.reader import DurableParts, MemoryParts, VersionReader, waited_for
from ml_flashpoint.engine.rounds import Verdict
from ml_flashpoint.engine.sidecars import carrier_of, sidecar_files
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    LoadError,
    NothingLoadableError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
    as_ours,
    is_damage,
    is_transient,
    pauses,
    retrying,
    text_of,
)
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.manifest import TABLE_LABEL
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
from ml_flashpoint.memory.slot import PAGE, no_room
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import (
    CompleteVersion,
    Damage,
    NodeInventory,
    PartRecord,
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
_MOST_UNREAD, _MOST_TEXT, _MOST_SHOWN = 1000, 500, 8
_HINT = (
    "nothing was removed: try again once the cause is fixed; to resume from another checkpoint, pass a fallback; "
    "to give these versions up, remove the base container on every node (or pass discard_existing=True)"
)

Found: TypeAlias = CompleteVersion | Version
"""A version that every rank can load: in memory, or in the durable store."""


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


# ---- the state of nodes ---------------------------------------------------------------------------------------------


class NodeReport(NamedTuple):
    """The state of one node.

    Attributes:
        inventory: the parts that can be read, also those of saves that do not exist.
        unread: the version ("" where not even the parts could be listed) of each other part, and why it is not read.
        savers: ranks that have saved on this node, or have copies here.
        records: of runs.
    """

    inventory: NodeInventory
    unread: tuple[tuple[str, str], ...] = ()
    savers: frozenset[int] = frozenset()
    records: tuple[RunRecord, ...] = ()

    def encode(self) -> bytes:
        """Return this report as JSON."""
        records = [[each.run, list(each.lineage.items()), each.begun, each.verified] for each in self.records]
        return json.dumps([self.inventory, self.unread, list(self.savers), records]).encode()

    @classmethod
    def decoded(cls, found: Any) -> NodeReport:
        """Return the report of `encode`, decoded from JSON."""
        (node, parts), unread, savers, records = found
        return cls(
            NodeInventory(node, tuple(PartRecord(SaveId(*save), *others) for save, *others in parts)),
            tuple((version, why) for version, why in unread),
            frozenset(savers),
            tuple(RunRecord(run, dict(lineage), *marks) for run, lineage, *marks in records),
        )


def read_node(container: BaseContainer, node: str, until: float) -> NodeReport:
    """Return the state of this node. What cannot be read just now is tried again, with back-off, until ``until``. Raise
    a `FlashpointError` if the records of runs cannot be read: nobody knows which saves exist."""
    for _ in chain((None,), pauses(until)):
        parts, failed = _read_parts(container)
        if not any(is_transient(error) for _, error in failed):
            break
    for version, error in failed:
        _log.warning("cannot use a part of %s: %s", version or container.base, error)
    unread = tuple((version, str(error)[:_MOST_TEXT]) for version, error in failed[:_MOST_UNREAD])
    records = retrying(lambda: read_records(container), until, "reading the records of runs")
    savers = frozenset(owner.rank for owner in container.slot_owners() if container.slot_paths(owner))
    return NodeReport(NodeInventory(node, tuple(parts)), unread, savers, tuple(records))


def _read_parts(container: BaseContainer) -> tuple[list[PartRecord], list[tuple[str, FlashpointError]]]:
    """Return the parts whose objects have the sizes in their manifests, and the errors of others. Who needs the content
    checks the content."""
    parts: list[PartRecord] = []
    failed: list[tuple[str, FlashpointError]] = []
    try:
        listed = container.list_versions()
    except FlashpointError as error:
        return parts, [("", error)]
    for save, rank in [(save, rank) for save, ranks in listed.items() for rank in sorted(ranks)]:
        try:
            manifest = container.read_manifest(save, rank)
            record = manifest.record
            path = container.base / save.version / manifest.object_name
            if os.stat(path).st_size != record.file_size:
                text = f"the object does not have {record.file_size} bytes"
                raise DamagedError(text, step=save.step, rank=rank, path=path)
            table = manifest.labels.get(TABLE_LABEL, "")
            parts.append(PartRecord(save, manifest.rank, manifest.world_size, manifest.record.size, table))
        except (ObjectNotFoundError, FileNotFoundError):
            continue  # removed meanwhile
        except (FlashpointError, OSError) as error:
            failed.append((save.version, as_ours(error)))
    return parts, failed


def _newest(reports: Iterable[NodeReport]) -> RunRecord | None:
    return newest_begun(record for report in reports for record in report.records)


def why_nothing(
    reports: Sequence[NodeReport],
    given_up: Mapping[SaveId, str],
    discarded: Collection[SaveId],
    *,
    world_size: int,
    durable: Sequence[str] = (),
) -> NothingLoadableError | None:
    """Return an error that names the versions that were lost; None if no version was ever complete, but those that the
    program has ``discarded``. ``given_up`` are those that could not be fetched or checked, and why; ``durable`` are
    problems of the durable store."""
    reasons = [f"{save.version} ({why})" for save, why in given_up.items()] + list(durable)
    reasons += [
        f"{version or 'the versions'} on {report.inventory.node} ({why})"
        for report in reports
        for version, why in report.unread
    ]
    parts_lost = False
    if not reasons and not discarded:
        reasons = _lost_parts(reports)
        parts_lost = all(part.world_size == world_size for report in reports for part in report.inventory.parts)
    if not reasons:
        return None
    more = f", and {len(reasons) - _MOST_SHOWN} more" if len(reasons) > _MOST_SHOWN else ""
    text = f"there are versions and none can be loaded: {'; '.join(reasons[:_MOST_SHOWN])}{more}"
    error = NothingLoadableError(text, hint=_HINT)
    error.parts_lost = parts_lost
    return error


def _lost_parts(reports: Sequence[NodeReport]) -> list[str]:
    """Return the saves that are not whole, or do not exist; none if it is certain that no version was ever complete.

    It is certain if the run's record knows of no version, and the save is the only one there (the run's first, cut
    short), or the ranks whose parts are missing have saved on nodes that are here: their parts would be here, too.
    """
    record = _newest(reports)
    saves: dict[tuple[SaveId, int], set[int]] = {}
    for report in reports:
        for part in report.inventory.parts:
            saves.setdefault((part.save, part.world_size), set()).add(part.rank)
    here = frozenset[int]().union(*(report.savers for report in reports))
    exist = {save for save, _ in saves if record is None or record.has(save)}
    reasons, doubtful = [], record is not None and record.had_versions
    for (save, size), ranks in sorted(saves.items(), reverse=True):
        missing = [rank for rank in range(size) if rank not in ranks]
        if save not in exist:
            reasons.append(f"{save.version} of run {save.run} (the job has gone back from it)")
        elif missing:
            shown = ", ".join(map(str, missing[:_MOST_SHOWN]))
            doubtful = doubtful or (len(exist) > 1 and any(rank not in here for rank in missing))
            reasons.append(f"{save.version} (the parts of ranks {shown} of {size} are on no node of this job)")
        else:
            reasons.append(f"{save.version} (its parts were not written by one table)")
    if doubtful and not reasons and record is not None:
        reasons.append(f"the versions of run {record.run} (no part of any is on a node of this job)")
    return reasons if doubtful else []


# ---- the durable store ----------------------------------------------------------------------------------------------


class Listing(NamedTuple):
    """The content of a durable store: versions that count, newest first; problems of others; the reason why that is
    ``unknown``; the highest run of which anything is there, be it whole or not."""

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
        """Return the content of the store. Collective. A store that did not answer is not waited for as long again."""
        deadline_s = min(recovery_deadline_s(), most_s)
        if self._listing is not None and (not self._listing.unknown or deadline_s <= self._waited_s):
            return self._listing
        self._waited_s, blob = deadline_s, b""
        if self._ranks.rank == 0:
            try:
                found = waited_for(lambda: self.store.versions(), str(self.url), deadline_s)
                problems = [f"{each.folder} ({each.problem})" for each in found if each.problem]
                run = max((each.save.run for each in found), default=0)
                listing = [[save_of(each) for each in found if each.counts], problems, "", run]
            except Exception as error:  # the other ranks wait
                listing = [[], [], f"what is persisted at {self.url} cannot be known: {text_of(error)}", 0]
            blob = json.dumps(listing).encode()
        saves, problems, unknown, run = json.loads(self._ranks.broadcast(blob))
        self._listing = Listing(tuple(map(version_of, saves)), tuple(problems), unknown, run)
        return self._listing

    def give_up(self, why: str) -> None:
        """Take the store for one that does not answer, until it is listed anew. On all ranks."""
        self._listing, self._waited_s = Listing(unknown=f"{self.url} cannot be read: {why}"), math.inf


# ---- recovery -------------------------------------------------------------------------------------------------------


class Recovery:
    """Finds versions, brings them to this node, and records runs. Made on all ranks; all methods but `reader` and
    `mark` are collective. ``pool`` is of this rank's own parts; ``held`` are those of the copies that this rank holds,
    by rank; ``durable`` is the URL of the durable store.

    Attributes:
        found: the result of the last `find` that raised no error; None before.
        report: the work of the last `find` on this rank; None if it has found nothing.
        damaged: parts that were found damaged and not replaced yet.
        checked: parts of this node that this process has checked.
        is_marked: True once the run's record says that a version is verified: `mark`.
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
        self.report: events.VersionRecovered | None = None
        self.damaged: set[Damage] = set()
        self.checked: set[tuple[SaveId, int]] = set()
        self._run, self.is_marked = 0, False

    def any_versions(self) -> bool:
        """Return True if any node, or the durable store, may have a version. Raise a `LoadError` if that cannot be
        known."""
        if any(report.inventory.parts or report.unread for report in self.gather()):
            return True
        listed = self.durable.list()
        return bool(listed.versions or listed.problems or listed.unknown)

    def gather(self) -> list[NodeReport]:
        """Return the state of every node, which its lowest rank reads. Raise a `LoadError`, on all ranks, if one cannot
        be known for ``FLASHPOINT_RECOVERY_DEADLINE_S``."""
        ranks, blob, reports = self.ranks, b"", []
        if ranks.is_node_leader:
            try:
                blob = read_node(self.container, ranks.node, time.monotonic() + recovery_deadline_s()).encode()
            except Exception as error:  # the other ranks wait
                blob = json.dumps(f"the state of {ranks.node} cannot be known: {text_of(error)}").encode()
        for found in map(json.loads, filter(None, ranks.gather(blob))):
            if isinstance(found, str):
                raise LoadError(found, rank=ranks.rank, path=self.container.base)
            reports.append(NodeReport.decoded(found))
        return reports

    def existing(self, reports: Sequence[NodeReport]) -> list[CompleteVersion]:
        """Return the complete versions of the lineage in memory, newest first."""
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
        """Return what can be gone back to, newest first."""
        return [
            KeptVersion(each.save.step, self._has_copies(each), sum(each.sizes), each.world_size, each.save)
            for each in self.existing(self.gather())
        ]

    def find(
        self, wanted: int | None = None, *, excluded: Collection[SaveId] = (), retained: Collection[SaveId] = ()
    ) -> Found | None:
        """Find the newest version, of the ``wanted`` step if that is given, that every rank can load and that is not
        excluded. Bring here what this node lacks of it; the slots of ``retained`` saves, by default of those that the
        run is going to list, are not taken. Return None if no version was ever complete.

        Raises:
            NothingLoadableError: there are versions, and none can be loaded. On all ranks.
            LoadError: there is no version of the step, or it cannot be loaded. On all ranks.
        """
        self.damaged.clear()
        self.durable.forget()
        self.report = None
        self.found = _Search(self, wanted, frozenset(excluded), frozenset(retained)).run()
        return self.found

    def record(self, chosen: Found | None) -> tuple[int, Verdict]:
        """Choose the number of a run that goes on from a version, have all nodes record it, and begin it. Return the
        run and its first verdict. Raise a `SaveError` or `CapacityError`, on all ranks, if a node cannot record the
        run."""
        ranks, reports, listed = self.ranks, self.gather(), self.durable.list(_BESIDE_MEMORY_S)
        records = [record for report in reports for record in report.records]
        if listed.unknown and not records:
            raise SaveError(f"no number can be chosen for the run: {listed.unknown}", rank=ranks.rank)
        existing, save = self.existing(reports), None if chosen is None else chosen.save
        if not isinstance(chosen, Version) and save not in {None, *(each.save for each in existing)}:
            raise SaveError("the version is not whole any more: find one anew", rank=ranks.rank)
        found = [part.save for report in reports for part in report.inventory.parts]
        found.append(SaveId(listed.run, 0))  # what is not whole there must not be taken for parts of this run
        record = next_run(records, found if save is None else [*found, save], save)
        self._run, self.is_marked = record.run, False

        def write() -> None:
            for node, damaged, rank in self.damaged:
                if node == ranks.node:  # else its rank would take it for a sound copy
                    self.container.remove_part(damaged, rank)
            try:
                write_record(self.container, record)
            except CapacityError as error:
                raise no_room("the record of a run", PAGE, self.container.base) from error

        for action in (write, partial(mark_begun, self.container, record.run)):
            ranks.together(action if ranks.is_node_leader else lambda: None, SaveError, "recording the run")
        return record.run, self._first_verdict(SaveId(record.run, 0), chosen, existing)

    def _first_verdict(self, start: SaveId, chosen: Found | None, existing: Sequence[CompleteVersion]) -> Verdict:
        if chosen is None:
            return Verdict(0, (), start)
        line, world_size = self.lasting(existing, chosen.save), self.ranks.world_size
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

    def mark(self) -> None:
        """Record, once a run, that a version is verified: if all are lost later, that is an error."""
        self.is_marked = True
        if self.ranks.is_node_leader:
            try:
                mark_verified(self.container, self._run)
            except SaveError as error:
                _log.warning("if all versions are lost, the job will start from scratch: %s", error)

    def check_room(self, expected_bytes: int) -> None:
        """See `Checkpointer.check_room`."""
        ranks, versions = self.ranks, 1 + self.keep.versions
        sizes = [json.loads(blob) for blob in ranks.gather(json.dumps(expected_bytes).encode())]

        def check() -> None:
            needed, free = self._room(sizes, ())
            needed *= versions
            if needed > free:
                what = f"{versions} versions of the ranks of this node, and copies that they hold"
                raise no_room(what, needed, self.container.base, free)

        ranks.together(check, CapacityError, "the check of room")

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
                    free += status.st_size if committed.get(status.st_ino) not in listed else 0
        except (FlashpointError, OSError) as error:
            text = f"cannot tell how much room there is: {text_of(error)}"
            raise UnreadableError(text, path=self.container.base, rank=self.ranks.rank) from error
        return needed, free

    def reader(self, path: str | os.PathLike[str]) -> VersionReader:
        """Return a reader of a version: the one that was found last, or a newer save of the step in memory, whose
        holders are those that the strategy names. Raise an `ObjectNotFoundError` if this node has no part of it."""
        version, container = CheckpointContainerId(path), self.container
        record, there = newest_begun(read_records(container)), container.list_versions()
        named = [save for save in there if save.version == version.name and (record is None or record.has(save))]
        newest, found = max(named, default=None), self.found
        if found is not None and found.save.version == version.name and (newest is None or newest <= found.save):
            return self.reader_of(found)
        if newest is None:
            hint = "call `newest` or `latest` first: it finds parts on other nodes"
            raise ObjectNotFoundError("this node has no part of it", step=version.step, path=str(version), hint=hint)
        size, topology = container.read_manifest(newest, min(there[newest])).world_size, self.ranks.topology
        homes: list[tuple[int, ...]] = [()] * size
        if size == topology.world_size:
            homes = [(rank, *self.strategy.copies_of(rank, topology)) for rank in range(size)]
        holders = tuple(tuple(map(topology.node_of, home)) for home in homes)
        return self.reader_of(CompleteVersion(newest, size, holders, ()))

    def reader_of(self, found: Found) -> VersionReader:
        """Return a reader of a version that was found."""
        version = CheckpointContainerId.create_child(CheckpointContainerId(self.container.base), found.save.version)
        parts = DurableParts(self.durable.store, found) if isinstance(found, Version) else self.parts_of(found)
        return VersionReader(version, found.world_size, parts)

    def parts_of(self, found: CompleteVersion) -> MemoryParts:
        """Return the parts of a version in memory."""
        elsewhere = [[node for node in nodes if node != self.ranks.node] for nodes in found.holders]
        return MemoryParts(found.save, self.container, self.pool, self.copies, elsewhere, self.checked)


@dataclass(slots=True)
class _Search:
    """One recovery. Made and run on all ranks. For the first four see `Recovery.find`."""

    recovery: Recovery
    wanted: int | None
    excluded: frozenset[SaveId]
    retained: frozenset[SaveId]
    fetched_bytes: int = 0
    until: float = 0.0
    why: dict[SaveId, str] = field(default_factory=dict)
    """The reasons, by version, why some rank could not have it."""
    given_up: set[SaveId] = field(default_factory=set)
    target: SaveId | None = None
    """The newest save of the wanted step."""
    reports: list[NodeReport] = field(default_factory=list)
    complete: list[CompleteVersion] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)
    """Parts that this rank has found damaged since the last vote; ``mended``: those that are sound again."""
    mended: list[Damage] = field(default_factory=list)

    def run(self) -> Found | None:
        """Try one version after the other, until all ranks have one or there is none. Collective."""
        recovery, tries, detect_s, plan_s, fetch_s = self.recovery, 0, 0.0, 0.0, 0.0
        ranks, base = recovery.ranks, recovery.container.base
        tried: Found | None = None
        while True:
            began = time.monotonic()
            self.reports = recovery.gather()
            gathered = time.monotonic()
            self.until = gathered + recovery_deadline_s()  # a rank that was late takes no time from these reads
            self.complete = recovery.existing(self.reports)
            found = self._choose()
            planned = time.monotonic()
            tries += 1
            detect_s, plan_s = detect_s + gathered - began, plan_s + planned - gathered
            if tried is not None and (found is None or found.save != tried.save):
                why = self.why[tried.save]
                _log.error("%s cannot be recovered, stepping back: %s", tried.save.version, why)
                events.emit(events.SteppedBack, ranks, base, tried.save.step, error=why)
            if found is None:
                self._raise_if_lost()
                return None
            has_all = self._vote(found, self._take(found))
            if has_all:
                self._restore(found)
            fetch_s += time.monotonic() - planned
            if has_all:
                recovery.report = events.emit(
                    events.VersionRecovered,
                    ranks,
                    base,
                    found.save.step,
                    detect_s=detect_s,
                    plan_s=plan_s,
                    fetch_s=fetch_s,
                    fetched_bytes=self.fetched_bytes,
                    tries=tries,
                    tier="persisted" if isinstance(found, Version) else "memory",
                    world_size=found.world_size,
                )
                return found
            tried = found

    def _choose(self) -> Found | None:
        """Return the newest version that was neither given up nor excluded; of two tiers, memory goes first. The same
        on all ranks."""
        record = _newest(self.reports)
        memory = next((each for each in self.complete if self._is_wanted(each.save)), None)
        listed = self.recovery.durable.list(math.inf if memory is None else _BESIDE_MEMORY_S)
        for stored in listed.versions:
            if memory is not None and stored.save <= memory.save:
                break
            # Of a run later than all records here, other nodes had the record: what is here is older.
            exists = record is None or record.has(stored.save) or stored.save.run > record.run
            if exists and self._is_wanted(stored.save):
                return stored
        if memory is not None and listed.unknown:
            _log.warning("resuming from memory; the store may have a newer version: %s", listed.unknown)
        return memory

    def _is_wanted(self, save: SaveId) -> bool:
        if self.target is None and save.step == self.wanted:
            self.target = save
        return save not in self.excluded and save not in self.given_up and (self.wanted is None or save == self.target)

    def _raise_if_lost(self) -> None:
        """Raise if a version was lost, or the wanted one is not there."""
        recovery, ranks = self.recovery, self.recovery.ranks
        if self.wanted is not None:
            there = ", ".join(dict.fromkeys(str(each.save.step) for each in self.complete))
            text = f"no version of step {self.wanted} is held by this job; there are {there or 'none'}"
            if self.why:
                text = f"the version of step {self.wanted} cannot be loaded: {'; '.join(self.why.values())}"
            raise LoadError(text, rank=ranks.rank, path=recovery.container.base)
        listed = recovery.durable.list(0.0)
        problems = [*listed.problems, *filter(None, [listed.unknown])]
        error = why_nothing(self.reports, self.why, self.excluded, world_size=ranks.world_size, durable=problems)
        if error is not None:
            error.rank, error.node, error.path = ranks.rank, ranks.node, str(recovery.container.base)
            raise error
        if any(report.inventory.parts for report in self.reports) and not self.excluded:
            _log.warning("starting from scratch: no version of this job was ever complete")

    def _take(self, found: Found) -> FlashpointError | None:
        """Have this rank's own part here, and check what this rank has to check. Return the error, for the other ranks
        wait for the vote."""
        recovery, ranks = self.recovery, self.recovery.ranks
        try:
            if isinstance(found, Version):
                store = recovery.durable.store
                for part in found.ranks[ranks.rank :: ranks.world_size]:
                    check = partial(store.check_size, waited_for(partial(store.manifest, found, part), store.path))
                    waited_for(check, store.path)
            else:
                self._fetch(found, self._retained_beside(found.save), copies=False)
                self._check(found)
            if ranks.is_node_leader:
                retrying(lambda: self._restore_sidecars(found), self.until, "restoring the files beside the parts")
        except Exception as caught:
            error = as_ours(caught)
            unexpected = None if isinstance(caught, (FlashpointError, OSError, MemoryError)) else caught
            _log.warning("%s cannot be recovered here: %s", found.save.version, error, exc_info=unexpected)
            return error
        return None

    def _check(self, version: CompleteVersion) -> None:
        parts, ranks = self.recovery.parts_of(version), self.recovery.ranks
        for rank in parts_to_check(version, ranks.topology, ranks.rank):
            try:
                with contextlib.ExitStack() as stack:
                    retrying(partial(parts.open_here, rank, stack), self.until, f"checking the part of rank {rank}")
            except FlashpointError as error:
                if is_damage(error):
                    self.damage.append((ranks.node, version.save, rank))
                raise

    def _restore_sidecars(self, found: Found) -> None:
        """Write the files that belong beside the parts of this node."""
        rank = self.recovery.ranks.rank
        with self.recovery.reader_of(found) as reader:
            carrier = carrier_of(reader.manifest(rank if rank < found.world_size else 0))
            if carrier is not None:
                self.recovery.container.write_sidecars(found.save, sidecar_files(reader.open(carrier)))

    def _restore(self, found: Found) -> None:
        """Fetch what this rank lacks of the version, and of the others that stay, as far as there is room. Collective:
        all ranks hear of damage."""
        recovery = self.recovery
        alike = [
            each for each in self.complete if each.save <= found.save and each.world_size == recovery.ranks.world_size
        ]
        line = {*kept(sorted(each.save for each in alike), recovery.keep), found.save}
        for version in (each for each in alike if each.save in line):
            retained = self._retained_beside(found.save) if version.save == found.save else line
            self._fetch(version, retained, copies=True)
        self._vote(found, None)

    def _retained_beside(self, save: SaveId) -> set[SaveId]:
        """Return a version and those that the run is going to list: their slots are taken by nothing."""
        return {save, *(self.retained or self.recovery.lasting(self.complete, save))}

    def _fetch(self, version: CompleteVersion, retained: Collection[SaveId], *, copies: bool) -> None:
        """Fetch this rank's own part, if its node lacks the part; or, with the copies that it should hold, whatever can
        be had at once."""
        recovery, ranks, save = self.recovery, self.recovery.ranks, version.save
        for fetch in plan_fetches(version, ranks.topology, recovery.strategy):
            rank = fetch.rank
            is_due = (save, rank) not in recovery.checked if copies else rank == ranks.rank
            if fetch.target != ranks.rank or rank not in recovery.pools or not is_due:
                continue
            nodes = [fetch.source, *(node for node in version.holders[rank] if node != fetch.source)]
            failures: Failures = []
            began = time.monotonic()
            try:
                manifest = recovery.copies.fetch_part(
                    save,
                    rank,
                    nodes,
                    recovery.pools[rank],
                    retained,
                    until=0.0 if copies else self.until,
                    failures=failures,
                )
            except Exception as error:  # a copy is good to have, and no reason to lose this recovery, or to wait
                if not copies:
                    raise
                _log.warning("cannot restore the part of rank %d in %s: %s", rank, save, error)
                continue
            finally:
                self.damage += [(node, save, rank) for node, error in failures if is_damage(error)]
            self.mended.append((ranks.node, save, rank))
            self.fetched_bytes += manifest.record.size
            recovery.checked.add((save, rank))
            done = {"part_rank": rank, "bytes": manifest.record.size, "seconds": time.monotonic() - began}
            events.emit(events.PartFetched, ranks, recovery.container.base, save.step, **done)

    def _vote(self, found: Found, error: FlashpointError | None) -> bool:
        """Return True if all ranks have the version. If not, the next choice is another one: something was found
        damaged, or the version is given up. Collective."""
        recovery, ranks = self.recovery, self.recovery.ranks
        before, blob = len(recovery.damaged), b""
        if error is not None or self.damage or self.mended:
            why = None if error is None else [f"rank {ranks.rank} on {ranks.node}: {error}", is_transient(error)]
            blob = json.dumps([why, self.damage, self.mended]).encode()
        self.damage, self.mended = [], []
        told = [json.loads(each) for each in ranks.gather(blob) if each]
        reasons = [why for why, _, _ in told if why is not None]
        recovery.damaged |= {(node, SaveId(*save), rank) for _, each, _ in told for node, save, rank in each}
        grown = len(recovery.damaged) > before
        recovery.damaged -= {(node, SaveId(*save), rank) for _, _, each in told for node, save, rank in each}
        if not reasons:
            return True
        self.why[found.save] = reasons[0][0]
        if isinstance(found, Version) and all(passes for _, passes in reasons):
            recovery.durable.give_up(reasons[0][0])
        elif isinstance(found, Version) or not grown:  # else the next plan replaces what is damaged, if it can
            self.given_up.add(found.save)
        return False
