"""The inventory of one node: its parts, what could not be read of them, and the records of runs."""

from __future__ import annotations

import json
import logging
import os
from typing import NamedTuple

from ml_flashpoint.format.errors import DamagedError, FlashpointError, LoadError, ObjectNotFoundError
from ml_flashpoint.format.failure_kinds import as_ours, is_transient, pauses, retrying, text_of
from ml_flashpoint.format.save_id import SaveId
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.lineage import RunRecord, read_records
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import NodeInventory, PartRecord

_log = logging.getLogger(__name__)

TABLE_LABEL = "table"
"""Label of manifests: name of what the ranks had agreed on about who writes what."""

_MOST_UNREAD = 1000
_MOST_TEXT = 500
_OVER = object()


class Unread(NamedTuple):
    """A part that is listed on a node and could not be read there.

    Attributes:
        version: name of its version; "" where not even the parts could be listed.
        why: in words.
        transient: True if the part may be sound; else it is damaged.
    """

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
    """Return the state of this node. What cannot be read just now is tried again, with back-off, until ``until``.

    Raises:
        FlashpointError: the records of runs cannot be read, so that nobody knows which saves exist.
    """
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
    """Return the state of every node, which its lowest rank reads. Collective.

    Raises:
        LoadError: the state of a node cannot be known. Raised on all ranks.
    """
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
    record = manifest.objects[0]
    path = container.base / save.version / record.name
    if os.stat(path).st_size != record.file_size:
        raise DamagedError(f"the object does not have {record.file_size} bytes", step=save.step, rank=rank, path=path)
    table = manifest.labels.get(TABLE_LABEL, "")
    return PartRecord(save, manifest.rank, manifest.world_size, manifest.total_size, table)


def _unread(version: str, error: FlashpointError) -> Unread:
    return Unread(version, str(error)[:_MOST_TEXT], is_transient(error))
