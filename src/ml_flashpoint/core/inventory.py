"""What one node has of a job: its parts, what it could not read of them, and whether a version was ever complete.

Owns reading that from the node's files, and how it travels to the other ranks. What follows from the inventories of
all nodes is `recovery`'s (a plan) and `unloadable`'s (why there is none).
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR, ranks_with_arenas, was_complete
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core.part_reader import read_local_manifests
from ml_flashpoint.core.recovery_plan import NodeInventory, PartRecord
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    ObjectNotFoundError,
    ProtocolError,
    UnreadableError,
)
from ml_flashpoint.format.failure_kinds import as_ours, is_transient, pauses
from ml_flashpoint.format.lineage import Lineage, lineage_from_json, lineage_to_json, read_lineage
from ml_flashpoint.format.manifest import Manifest, manifest_name
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

_NOT_ONE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_MAX_UNREAD = 1000
_MAX_TEXT = 500


@dataclass(frozen=True, slots=True)
class Unread:
    """Something of a version that is listed on a node and could not be read there.

    Attributes:
        version: its name; "" where not even the versions could be listed.
        why: in words.
        transient: whether it may be sound; else it is damaged.
    """

    version: str
    why: str
    transient: bool


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What one node has.

    Attributes:
        inventory: the parts that can be read.
        unread: the others.
        was_complete: whether a version of this job was once complete on all ranks, as far as this node knows.
        savers: ranks that have saved on this node, or held copies here, in this run or an earlier one.
        lineage: which saves count, as far as this node knows.
    """

    inventory: NodeInventory
    unread: tuple[Unread, ...] = ()
    was_complete: bool = False
    savers: frozenset[int] = frozenset()
    lineage: Lineage = field(default_factory=Lineage)

    def to_json(self) -> bytes:
        """To be read by `from_json`."""
        document = {
            "inventory": self.inventory.to_json().decode(),
            "unread": [[u.version, u.why, u.transient] for u in self.unread],
            "was_complete": self.was_complete,
            "savers": sorted(self.savers),
            "lineage": lineage_to_json(self.lineage),
        }
        return json.dumps(document).encode()

    @classmethod
    def from_json(cls, data: bytes) -> NodeReport:
        """Reads what `to_json` wrote.

        Raises:
            ProtocolError: it is anything else.
        """
        try:
            document = json.loads(data)
            return cls(
                NodeInventory.from_json(document["inventory"].encode()),
                tuple(
                    Unread(str(version), str(why), bool(transient)) for version, why, transient in document["unread"]
                ),
                bool(document["was_complete"]),
                frozenset(int(rank) for rank in document["savers"]),
                lineage_from_json(document["lineage"]),
            )
        except (*_NOT_ONE, DamagedError) as error:
            raise ProtocolError(f"a node's report is not one: {error}") from None


def read_node(base: Path, node: str, until: float) -> NodeReport:
    """What a node has. What cannot be read just now is tried again, with back-off, until `until`.

    Nothing is raised: the other ranks wait for the report.
    """
    waiting = pauses(until)
    reported: set[str] = set()
    while True:
        parts, unread = _read_parts(base)
        for each in unread:
            if each.why not in reported:
                reported.add(each.why)
                _log.warning("cannot use something of %s: %s", each.version or base, each.why)
        if not any(each.transient for each in unread) or next(waiting, _OVER) is _OVER:
            break
    complete, savers = False, frozenset[int]()
    try:
        complete, savers = was_complete(base), ranks_with_arenas(base)
    except Exception as error:
        unread.append(Unread("", f"{type(error).__name__}: {error}"[:_MAX_TEXT], True))
    return NodeReport(
        NodeInventory(node, tuple(parts)), tuple(unread[:_MAX_UNREAD]), complete, savers, _lineage_of(base)
    )


def _lineage_of(base: Path) -> Lineage:
    try:
        return read_lineage(base / PRIVATE_DIR)
    except (FlashpointError, OSError) as error:
        _log.error("what this node knows of the lineage is not used: %s", error)
        return Lineage()


def gather_reports(base: Path, group: RankGroup, until: float) -> list[NodeReport]:
    """The report of every node; one rank a node reads the manifests there. Collective."""
    blob = read_node(base, group.node, until).to_json() if group.is_node_leader else b""
    return [NodeReport.from_json(found) for found in group.gather(blob) if found]


_OVER = object()


def _read_parts(base: Path) -> tuple[list[PartRecord], list[Unread]]:
    parts: list[PartRecord] = []
    unread: list[Unread] = []
    try:
        versions = list_versions(base)
    except Exception as error:
        return parts, [_unread("", error)]
    for version in versions:
        try:
            manifests, errors = read_local_manifests(base, version)
        except Exception as error:
            unread.append(_unread(version, error))
            continue
        unread += [_unread(version, error) for error in errors]
        for manifest in manifests:
            try:
                if has_objects(base, manifest):
                    parts.append(part_record(manifest))
            except Exception as error:
                unread.append(_unread(version, error))
    return parts, unread


def _unread(version: str, error: Exception) -> Unread:
    ours = as_ours(error)
    return Unread(version, str(ours)[:_MAX_TEXT], is_transient(ours))


def part_record(manifest: Manifest) -> PartRecord:
    """A manifest, as inventories have it."""
    return PartRecord(
        manifest.version,
        manifest.step,
        manifest.rank,
        manifest.world_size,
        manifest.save_id,
        manifest.total_size,
    )


def has_objects(base: Path, manifest: Manifest) -> bool:
    """Whether the files of a part are there and long enough; their content is checked by who needs it.

    Returns:
        False if the part was pruned meanwhile.

    Raises:
        DamagedError, ObjectNotFoundError: the part is there, and a file is gone or too short.
        UnreadableError: that cannot be known just now.
    """
    for record in manifest.objects:
        path = base / manifest.version / record.name
        try:
            found = os.stat(path).st_size
        except FileNotFoundError as error:
            if not (path.parent / manifest_name(manifest.rank, manifest.save_id)).exists():
                return False
            raise ObjectNotFoundError("an object of the part is gone", rank=manifest.rank, path=path) from error
        except OSError as error:
            raise UnreadableError(f"an object: {error.strerror}", rank=manifest.rank, path=path) from error
        if found < record.size:
            raise DamagedError(f"the object has {found} bytes of {record.size}", rank=manifest.rank, path=path)
    return True
