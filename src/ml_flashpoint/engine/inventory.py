"""The state of nodes: their parts, what could not be read of them, and why nothing can be loaded of all that."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    LoadError,
    NothingLoadableError,
    ObjectNotFoundError,
    as_ours,
    is_transient,
    pauses,
    retrying,
    text_of,
)
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lineage import RunRecord, newest_begun, read_records
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import NodeInventory, PartRecord

_log = logging.getLogger(__name__)

TABLE_LABEL = "table"
"""Label of manifests: name of what the ranks had agreed on about who writes what."""

_MOST_UNREAD = 1000
_MOST_TEXT = 500
_MOST_SHOWN = 8
_OVER = object()
_HINT = (
    "nothing was removed: try again when the cause is mended; to go on from elsewhere, pass a fallback; "
    "to give these versions up, remove the base container on every node (or pass discard_existing=True)"
)


class Unread(NamedTuple):
    """A part of a version ("" where not even the parts could be listed) that could not be read on its node: because it
    is damaged, or, if ``transient``, just now."""

    version: str
    why: str
    transient: bool


class NodeReport(NamedTuple):
    """The state of one node.

    Attributes:
        inventory: the parts that can be read, also those of saves that do not exist.
        unread: the other parts.
        savers: ranks that have saved on this node, or have copies here.
        records: of runs.
    """

    inventory: NodeInventory
    unread: tuple[Unread, ...] = ()
    savers: frozenset[int] = frozenset()
    records: tuple[RunRecord, ...] = ()

    def encode(self) -> bytes:
        """Return this report as JSON."""
        records = [[each.run, list(each.lineage.items()), each.begun, each.verified] for each in self.records]
        return json.dumps([self.inventory, self.unread, list(self.savers), records]).encode()

    @classmethod
    def decode(cls, blob: bytes) -> NodeReport:
        """Return the report of `encode`."""
        (node, parts), unread, savers, records = json.loads(blob)
        return cls(
            NodeInventory(node, tuple(PartRecord(SaveId(*save), *others) for save, *others in parts)),
            tuple(Unread(*each) for each in unread),
            frozenset(savers),
            tuple(RunRecord(run, dict(lineage), *marks) for run, lineage, *marks in records),
        )


def read_node(container: BaseContainer, node: str, until: float) -> NodeReport:
    """Return the state of this node. What cannot be read just now is tried again, with back-off, until ``until``. Raise
    a `FlashpointError` if the records of runs cannot be read: nobody knows which saves exist."""
    waiting = pauses(until)
    logged: set[str] = set()
    while True:
        parts, unread = _read_parts(container)
        for each in unread:
            if each.why not in logged:
                logged.add(each.why)
                _log.warning("cannot use a part of %s: %s", each.version or container.base, each.why)
        if not any(each.transient for each in unread) or next(waiting, _OVER) is _OVER:
            break
    records = retrying(lambda: read_records(container), until, "reading the records of runs")
    savers = frozenset(owner.rank for owner in container.slot_owners() if container.slot_paths(owner))
    return NodeReport(NodeInventory(node, tuple(parts)), tuple(unread[:_MOST_UNREAD]), savers, tuple(records))


def gather_reports(container: BaseContainer, ranks: RankGroup, until: float) -> list[NodeReport]:
    """Return the state of every node, which its lowest rank reads. Collective. Raise a `LoadError`, on all ranks, if
    one cannot be known."""
    blob = trouble = b""
    if ranks.is_node_leader:
        try:
            blob = read_node(container, ranks.node, until).encode()
        except Exception as error:  # the other ranks wait
            trouble = f"the state of {ranks.node} cannot be known: {text_of(error)}".encode()
    for text in filter(None, ranks.gather(trouble)):
        raise LoadError(text.decode(), rank=ranks.rank, path=container.base)
    return [NodeReport.decode(each) for each in ranks.gather(blob) if each]


def _read_parts(container: BaseContainer) -> tuple[list[PartRecord], list[Unread]]:
    parts: list[PartRecord] = []
    unread: list[Unread] = []
    try:
        listed = container.list_versions()
    except FlashpointError as error:
        return parts, [_unread("", error)]
    for save, ranks in listed.items():
        for rank in sorted(ranks):
            try:
                parts.append(_record_of(container, save, rank))
            except (ObjectNotFoundError, FileNotFoundError):
                continue  # removed meanwhile
            except (FlashpointError, OSError) as error:
                unread.append(_unread(save.version, as_ours(error)))
    return parts, unread


def _record_of(container: BaseContainer, save: SaveId, rank: int) -> PartRecord:
    """Return a part whose object has the size in its manifest. Who needs the content checks the content."""
    manifest = container.read_manifest(save, rank)
    record = manifest.record
    path = container.base / save.version / manifest.object_name
    if os.stat(path).st_size != record.file_size:
        raise DamagedError(f"the object does not have {record.file_size} bytes", step=save.step, rank=rank, path=path)
    table = manifest.labels.get(TABLE_LABEL, "")
    return PartRecord(save, manifest.rank, manifest.world_size, manifest.record.size, table)


def _unread(version: str, error: FlashpointError) -> Unread:
    return Unread(version, str(error)[:_MOST_TEXT], is_transient(error))


def why_nothing(
    reports: Sequence[NodeReport],
    given_up: Mapping[SaveId, str],
    discarded: Collection[SaveId],
    *,
    world_size: int,
    durable: Sequence[str] = (),
) -> NothingLoadableError | None:
    """Return an error that names the versions that were lost; None if no version but the discarded ones was ever
    complete.

    Args:
        reports: of every node.
        given_up: versions that could not be fetched or checked, and why.
        discarded: versions that the program could not load, which its own errors explain.
        world_size: number of ranks now.
        durable: problems of the durable store.
    """
    reasons = [f"{save.version} ({why})" for save, why in given_up.items()] + list(durable)
    reasons += [
        f"{unread.version or 'the versions'} on {report.inventory.node} ({unread.why})"
        for report in reports
        for unread in report.unread
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

    It is certain if no record of the run says that there was a version, and the save is the only one there (the run's
    first, cut short), or the ranks whose parts are missing have saved on nodes that are here: had they committed their
    parts, these would be here, too.
    """
    record = newest_begun(record for report in reports for record in report.records)
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
