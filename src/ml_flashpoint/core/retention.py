"""What an engine's user sees of the versions that are kept: which there are, pins, and going back to one.

Owns the calls that all ranks make together, and the order in which each takes effect: on every node or, where a crash
comes between, on all of them or none, as the record with the highest revision says. What a store keeps because of it
is `checkpoint_object_manager`'s; bringing a version here is the loader's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ml_flashpoint.checkpoint_object_manager.base_marks import PRIVATE_DIR
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.reserve import give_up_reserve
from ml_flashpoint.core.inventory import NodeReport, gather_reports
from ml_flashpoint.core.part_source import PartSource
from ml_flashpoint.core.retaining import protect, retained_line, shown_versions
from ml_flashpoint.core.room import check_capacity
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import (
    CapacityError,
    DeadlineError,
    FlashpointError,
    InvalidArgumentError,
    LoadError,
    SaveError,
)
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.format.retention_record import Pin, RetentionRecord, checked_label, newest_record, write_record
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.recovery import CompleteVersion, complete_versions, is_protected
from ml_flashpoint.replication.replication_manager import ReplicationManager

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version that can be gone back to: every part of it is on some node of the job.

    Attributes:
        step: its step.
        labels: of pins; empty if it is not pinned.
        verified: whether it is complete on all ranks, with every copy that the replication strategy asks for.
        bytes: of the parts of all ranks, each counted once, however many copies there are.
        world_size: number of ranks that saved it.
        abandoned: whether the job has gone back behind it. It is then never taken for the newest, and stays only as
            long as it is pinned, or until the next save.
        save_id: the save, since there may be several of one step; later ones compare greater.
    """

    step: int
    labels: tuple[str, ...]
    verified: bool
    bytes: int
    world_size: int
    abandoned: bool
    save_id: str


class Retention:
    """See the module. All methods are collective.

    Args:
        store: of this rank.
        group: who decides together.
        replication: who holds copies.
        source: where parts come from that are elsewhere.
        settle: waits until no save is under way; whether that was so in time.
    """

    def __init__(
        self,
        store: RankStore,
        group: RankGroup,
        replication: ReplicationManager,
        source: PartSource,
        settle: Callable[[float], bool],
    ) -> None:
        self._store = store
        self._group = group
        self._replication = replication
        self._source = source
        self._settle = settle

    def versions(self) -> list[KeptVersion]:
        """What this job holds and can go back to, newest save first; what could not be read is left out."""
        reports, record = self._look()
        complete = complete_versions(report.inventory for report in reports)
        sizes: dict[tuple[str, int], int] = {}
        for part in (part for report in reports for part in report.inventory.parts):
            key = (part.save_id, part.rank)
            sizes[key] = max(part.size, sizes.get(key, 0))
        topology, strategy = self._group.topology, self._replication.strategy
        return [
            KeptVersion(
                each.step,
                record.labels_of(each.save_id),
                is_protected(each, topology, strategy),
                sum(sizes[each.save_id, rank] for rank in range(each.world_size)),
                each.world_size,
                record.is_abandoned(each.save_id),
                each.save_id,
            )
            for each in complete
        ]

    def settle(self) -> None:
        """Wait until no save is under way on any rank.

        Raises:
            DeadlineError: it took too long. On all ranks.
        """
        late = DeadlineError("a save is still under way", rank=self._group.rank)

        def wait() -> None:
            if not self._settle(seal_deadline_s()):
                raise late

        self._group.together(wait, DeadlineError("a save of another rank is still under way", rank=self._group.rank))

    def pin(self, label: str, step: int | None = None) -> int:
        """Keep a version until it is unpinned, whatever the rule says, and whatever room there is.

        Args:
            label: by which it is unpinned; a new one.
            step: of the version; by default the newest.

        Returns:
            Its step.

        Raises:
            InvalidArgumentError: the label is none, or taken.
            LoadError: no such version is verified.
            CapacityError: there is no room to keep one version more.
            SaveError: it cannot be recorded on some node.
        """
        checked_label(label)
        self._group.agree_on(label=label, step=str(step))
        self.settle()
        versions = self.versions()
        _, record = self._look()
        if label in record.labels:
            hint = "unpin it first, or take another label"
            raise InvalidArgumentError("is taken", argument="label", value=label, rank=self._group.rank, hint=hint)
        usable = [each for each in versions if each.verified and not each.abandoned]
        chosen = next((each for each in usable if step is None or each.step == step), None)
        if chosen is None:
            what = "version" if step is None else f"version of step {step}"
            there = shown_versions((each.step, each.labels) for each in usable)
            raise LoadError(f"no {what} is verified, to be pinned; there are {there}", rank=self._group.rank)
        if not chosen.labels:
            mine = sum(part.manifest.total_size for part in self._own(chosen.save_id) if part.manifest is not None)
            check_capacity(self._group, mine, self._store, self._replication, kept=1)
        version = CheckpointContainerId.format_version_container(chosen.step)
        self._change(record, record.with_pins((*record.pins, Pin(label, version, chosen.save_id))))
        return chosen.step

    def unpin(self, label: str) -> None:
        """Let a version go like any other, if nothing else keeps it.

        Raises:
            InvalidArgumentError: there is no such pin.
            SaveError: it cannot be recorded on some node; it is pinned then.
        """
        checked_label(label)
        self._group.agree_on(label=label)
        _, record = self._look()
        if label not in record.labels:
            there = f"there are {sorted(record.labels)}" if record.pins else "there are none"
            raise InvalidArgumentError(f"is no label of a pin; {there}", argument="label", value=label)
        self._change(record, record.with_pins(pin for pin in record.pins if pin.label != label))

    def leave_newer(self, version: CompleteVersion) -> None:
        """Go on from a version that was brought here: newer ones are never taken for the newest again, not even after
        a crash. Those that are pinned stay; the others go before the next save.

        Raises:
            SaveError: it cannot be recorded on some node. Nothing has changed then.
        """
        reports, record = self._look()
        newest = max((part.save_id for report in reports for part in report.inventory.parts), default="")
        before, record = record, record.gone_back_to(version.save_id, self._group.begin_run(newest))
        self._record(before, record, "what was gone back from")
        complete = complete_versions(report.inventory for report in reports)
        self._store.retain(retained_line(complete, record, version.save_id, self._store.retained.keep), record)
        kept = [each for each in complete if self._store.retained.is_beside(each.save_id)]
        inventories = [report.inventory for report in reports]
        protect(kept, self._store, self._group, self._source, inventories, ())
        self._store.drop_before_next_save(
            part
            for part in self._store.held()
            if record.is_abandoned(part.save_id) and not self._store.retained.keeps(part.save_id)
        )
        left = shown_versions((e.step, record.labels_of(e.save_id)) for e in complete if e.save_id > version.save_id)
        if self._group.rank == 0:
            _log.warning("went back to step %d; newer versions are left: %s", version.step, left)

    def _look(self) -> tuple[list[NodeReport], RetentionRecord]:
        reports = gather_reports(self._store.base, self._group, time.monotonic())
        return reports, newest_record(report.record for report in reports)

    def _own(self, save_id: str) -> list[HeldPart]:
        return [part for part in self._store.held_of(save_id) if part.rank == self._group.rank]

    def _change(self, before: RetentionRecord, after: RetentionRecord) -> None:
        """Have other pins from now on, on all ranks and nodes."""
        # While it is not sure which are in force, both are.
        self._store.retained.record = before.with_pins({*before.pins, *after.pins})
        try:
            self._record(before, after, "pins")
        except FlashpointError:
            self._store.retained.record = before
            raise
        self._store.retained.record = before
        self._store.note_pins(after)

    def _record(self, before: RetentionRecord, after: RetentionRecord, what: str) -> None:
        """Write a record on all nodes, or go back to the one before on all."""

        def write() -> None:
            if self._group.is_node_leader:
                self._write(after)

        another = SaveError(f"another rank could not record {what}; its log says why", rank=self._group.rank)
        try:
            self._group.together(write, another)
        except FlashpointError:
            if self._group.is_node_leader:
                self._undo(replace(before, revision=after.revision + 1))
            raise

    def _undo(self, record: RetentionRecord) -> None:
        try:
            self._write(record)
        except FlashpointError as error:
            _log.error("pins may be others on this node after a restart: %s", error)

    def _write(self, record: RetentionRecord) -> None:
        folder = self._store.base / PRIVATE_DIR
        try:
            write_record(folder, record)
        except CapacityError:  # where pins take all the room there is, they must be let go of
            if not give_up_reserve(self._store.directory):
                raise
            write_record(folder, record)
