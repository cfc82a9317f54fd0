"""Keeps a rank's file up to date that says how saving goes: see `format.status`. Owns when it is written."""

from __future__ import annotations

import logging
import os
import time

from ml_flashpoint import events
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import JobInUseError, UnsafePathError
from ml_flashpoint.format.status import RankStatus, read_status, write_status
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

_WRITTEN_FOR = (
    events.VersionVerified,
    events.SaveFailed,
    events.ReplicationFailed,
    events.AgreementFailed,
    events.RanksMissing,
    events.PartPersisted,
    events.PersistFailed,
    events.SteppedBack,
    events.Resumed,
)


class StatusBoard:
    """Of one engine. What is not worth a write by itself is written with what comes next.

    Args:
        store: of this rank; the file is in its directory.
        group: the ranks, of which this is one.
        strategy: who holds copies of whom.
    """

    def __init__(self, store: RankStore, group: RankGroup, strategy: ReplicationStrategy) -> None:
        self._store, self._path = store, store.directory / "status.json"
        before = read_status(self._path)
        since_s, starts = (before.since_s, before.starts) if before is not None and before.since_s else (time.time(), 0)
        topology = group.topology
        self._status = RankStatus(
            rank=group.rank,
            node=group.node,
            pid=os.getpid(),
            since_s=since_s,
            starts=starts + 1,
            nodes=len(topology.node_order),
            survives=strategy.survivable_losses(topology),
            copies_on=tuple(topology.node_of(holder) for holder in strategy.copies_of(group.rank, topology)),
        )
        self._written = self._failed = False
        self._write()  # in the place of what an earlier process has told
        self._unsubscribe = events.add_subscriber(self._note, store.base, argument="status")

    @property
    def status(self) -> RankStatus:
        """As far as events have told."""
        return self._status

    def _note(self, event: events.Event) -> None:
        """On the thread of events."""
        if event.rank != self._status.rank:
            return
        self._status, self._written = self._status.after(event), False
        if isinstance(event, _WRITTEN_FOR):
            self._write()

    def _write(self) -> None:
        try:
            self._store.check_job()
            write_status(self._path, self._status)
        except (OSError, UnsafePathError, JobInUseError) as error:
            if not self._failed:
                _log.warning("the status of rank %d cannot be written: %s", self._status.rank, error)
            self._failed = True
        else:
            self._failed, self._written = False, True

    def close(self) -> None:
        """Write what has not been written, and end. Idempotent."""
        self._unsubscribe()
        if not self._written and self._status.updated_s:
            self._write()
            self._written = True
