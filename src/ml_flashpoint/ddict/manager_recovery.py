"""How a manager that was started anew comes to hold what the one before it held.

Owns finding whole snapshots, telling the coordinator, and having copies again afterwards. What it goes on from is the
epoch's that the coordinator has all managers begin then. Reading snapshots is `snapshots`'.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from ml_flashpoint.ddict.configuration import COORDINATOR
from ml_flashpoint.ddict.entries import Entry
from ml_flashpoint.ddict.errors import DDictManagerLostError
from ml_flashpoint.ddict.manager import Manager
from ml_flashpoint.ddict.snapshot_format import SnapshotRecord
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

_RECOVERY_S = 60.0
_COPIES_S = 10.0


class ManagerRecovery:
    """See the module. Thread-safe.

    Args:
        manager: fresh, and of the number of one that was there before.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._ready = threading.Event()
        self._searched = threading.Event()
        self._failure: DDictManagerLostError | None = None
        self._found: dict[int, Sequence[Entry]] = {}

    def start(self) -> None:
        """Begin, in the background."""
        threading.Thread(target=self._recover, name="ddict-recover", daemon=True).start()

    def wait(self, until: float) -> None:
        """Wait for the end.

        Raises:
            DDictManagerLostError: it did not, or there is nothing to recover from.
        """
        if not self._ready.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the manager is still recovering", manager=self._manager.number)
        if self._failure is not None:
            raise self._failure

    def found(self, until: float) -> dict[int, Sequence[Entry]]:
        """Entries of the checkpoints that there are whole snapshots of, once that is known."""
        if not self._searched.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the manager is still recovering", manager=self._manager.number)
        if self._failure is not None:
            raise self._failure
        return self._found

    def end(self, failure: DDictManagerLostError | None) -> None:
        """The manager holds what it goes on from; or it cannot."""
        self._failure, self._found = failure, {}
        self._ready.set()

    def _recover(self) -> None:
        manager = self._manager
        try:
            if not manager.rules.replicated:
                raise DDictManagerLostError("without replication its values are gone", manager=manager.number)
            found = manager.snapshots.recover(self._ask_holder)
            self._found = {each.checkpoint_id: each.entries for each in found}
            self._searched.set()
            me = {"manager": manager.number, "incarnation": manager.incarnation}
            manager.links.call(COORDINATOR, "returned", me, until=time.monotonic() + _RECOVERY_S)
            self._ready.wait()
            if self._failure is None:
                _log.warning("manager %d is back", manager.number)
                self._make_up_copies()
        except Exception as error:  # lost with its thread, it would leave every client waiting
            _log.exception("manager %d cannot recover", manager.number)
            said = error.message if isinstance(error, FlashpointError) else repr(error)
            failure = DDictManagerLostError(
                f"manager {manager.number} came back without its values: {said}",
                manager=manager.number,
                hint="make the dictionary anew, and restore() what was persisted",
            )
            failure.retryable = False
            self.end(failure)
        finally:
            self._searched.set()

    def _ask_holder(self, holder: int) -> list[SnapshotRecord]:
        until = time.monotonic() + _RECOVERY_S / 2
        answer = self._manager.links.call(holder, "inventory", {"of": self._manager.number}, until=until)
        return [SnapshotRecord.from_json(each) for each in answer.fields["records"]]

    def _make_up_copies(self) -> None:
        """Have copies again where this manager's death has cost some, before the next loss: its own at those who hold
        them, if they were away too, and here those of others."""
        manager = self._manager
        manager.replicate()
        for owner in manager.snapshots.held:
            try:
                manager.links.call(owner, "replicate", {}, until=time.monotonic() + _COPIES_S)
            except FlashpointError as error:
                _log.warning("manager %d was not asked for new copies: %s", owner, error)
