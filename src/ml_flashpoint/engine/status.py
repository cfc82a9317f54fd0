"""Keeps the file of a rank's status up to date, which ``flashpoint status`` and ``top`` read: see `format.status`.

The file is ``<base>/.flashpoint/status/<rank>``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from ml_flashpoint import events
from ml_flashpoint.format.errors import JobInUseError, UnsafePathError
from ml_flashpoint.format.private_folders import make_tree
from ml_flashpoint.format.status import RankStatus, read_status, write_status
from ml_flashpoint.memory.container import STATUS, BaseContainer
from ml_flashpoint.memory.lock import JobLock
from ml_flashpoint.ranks.rank_group import RankGroup
from ml_flashpoint.ranks.strategies import ReplicationStrategy

_log = logging.getLogger(__name__)

_WRITTEN_AFTER = (
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
"""Events after which the file is written. Others are in the file by the next one of these."""


class StatusBoard:
    """The status of one rank, and its file. Events change it, on the thread of events.

    Args:
        container: base container.
        lock: of the job on this node; nothing is written once it is lost.
        ranks: this rank, and the others.
        strategy: who holds copies of whose parts.

    Attributes:
        status: the newest status.
    """

    def __init__(
        self, container: BaseContainer, lock: JobLock, ranks: RankGroup, strategy: ReplicationStrategy
    ) -> None:
        self._lock = lock
        self._path = container.private / STATUS / str(ranks.rank)
        before, topology = read_status(self._path), ranks.topology
        known = before is not None and before.since_s > 0
        self.status = RankStatus(
            rank=ranks.rank,
            node=ranks.node,
            pid=os.getpid(),
            since_s=before.since_s if before is not None and known else time.time(),
            starts=1 + (before.starts if before is not None and known else 0),
            nodes=len(topology.node_order),
            survives=strategy.survivable_losses(topology),
            copies_on=tuple(topology.node_of(holder) for holder in strategy.copies_of(ranks.rank, topology)),
        )
        self._has_written = self._has_failed = False
        with contextlib.suppress(OSError, UnsafePathError):  # which writing the file reports
            make_tree(container.base, self._path.parent)
        self._write()  # in place of what an earlier process has written
        self._unsubscribe = events.add_subscriber(self._note, container.base, argument="status")

    def _note(self, event: events.Event) -> None:
        if event.rank == self.status.rank:
            self.status, self._has_written = self.status.after(event), False
            if isinstance(event, _WRITTEN_AFTER):
                self._write()

    def _write(self) -> None:
        try:
            self._lock.check()
            write_status(self._path, self.status)
        except (OSError, UnsafePathError, JobInUseError) as error:
            if not self._has_failed:
                _log.warning("the status of rank %d cannot be written: %s", self.status.rank, error)
            self._has_failed = True
        else:
            self._has_failed, self._has_written = False, True

    def close(self) -> None:
        """Write what is not in the file yet, and end. Safe to call twice."""
        self._unsubscribe()
        if not self._has_written and self.status.updated_s:
            self._write()
            self._has_written = True
