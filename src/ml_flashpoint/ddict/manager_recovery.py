"""How a manager that was started anew comes to hold what the one before it held.

Owns finding snapshots, agreeing on the checkpoint to go on from, and, for the main manager, taking over from the one
that died. Reading snapshots is `snapshots`', deciding commits `coordinator`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import psutil

from ml_flashpoint.ddict.accounts import from_list, merge, writers_of
from ml_flashpoint.ddict.checkpoint_persister import PersistedCheckpoint
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.entries import Entry
from ml_flashpoint.ddict.errors import DDictManagerLostError
from ml_flashpoint.ddict.manager import Manager
from ml_flashpoint.ddict.snapshot_format import SnapshotRecord
from ml_flashpoint.format.errors import FlashpointError

_log = logging.getLogger(__name__)

_RECOVERY_S = 60.0
_COPIES_S = 10.0
_SETTLE_S = 2.0


class ManagerRecovery:
    """See the module. Thread-safe.

    Args:
        manager: fresh, and of the number of one that was there before.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._ready = threading.Event()
        self._found = threading.Event()
        self._failure: FlashpointError | None = None
        self._recoverable: dict[int, Sequence[Entry]] = {}
        self._again: PersistedCheckpoint | None = None
        self._incarnations = {manager.number: manager.incarnation}

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

    def sealed(self, until: float) -> list[int]:
        """Checkpoints that snapshots were found of and that are not taken up yet, once that is known."""
        if not self._found.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the manager is still recovering", manager=self._manager.number)
        return sorted(self._recoverable)

    def _recover(self) -> None:
        manager = self._manager
        until = time.monotonic() + _RECOVERY_S
        try:
            if not manager.rules.replicated:
                raise DDictManagerLostError(
                    "it died, and without replication its values are gone", manager=manager.number
                )
            self._find_snapshots()
            committed, common, restored_only = self._agree(until)
            if restored_only:
                self._take_up_restored()
            else:
                self._take_up(committed)
            if manager.number == 0:
                manager.coordinator = self._take_over(committed, common, restored_only)
            _log.warning("manager %d is back at checkpoint %d", manager.number, committed)
            self._ready.set()
            self._make_up_copies()
        except FlashpointError as error:
            _log.error("manager %d cannot recover: %s", manager.number, error)
            self._failure = DDictManagerLostError(
                f"manager {manager.number} came back without its values: {error.message}",
                manager=manager.number,
                hint="make the dictionary anew, and restore() what was persisted",
            )
            self._failure.retryable = False
        except Exception as error:  # lost with its thread, it would leave every client waiting
            _log.exception("manager %d cannot recover", manager.number)
            self._failure = DDictManagerLostError(f"cannot recover: {error}", manager=manager.number)
        finally:
            self._found.set()
            self._ready.set()

    def _find_snapshots(self) -> None:
        found = self._manager.snapshots.recover(self._ask_holder)
        self._recoverable = {each.checkpoint_id: each.entries for each in found}
        self._found.set()

    def _ask_holder(self, holder: int) -> list[SnapshotRecord]:
        until = time.monotonic() + _RECOVERY_S / 2
        answer = self._manager.links.call(holder, "inventory", {"of": self._manager.number}, until=until)
        return [SnapshotRecord.from_json(each) for each in answer.fields["records"]]

    def _agree(self, until: float) -> tuple[int, tuple[int, ...], bool]:
        """The checkpoint to go on from: what the coordinator says; for the coordinator itself, the newest one that
        every manager has, with all that they have. And whether that is what was restored, of which there may be no
        copies yet but the persisted ones."""
        manager = self._manager
        if manager.number != 0:
            me = {"manager": manager.number, "incarnation": manager.incarnation}
            state = manager.links.call(0, "recovering", me, until=until).fields
            manager.frozen = bool(state["frozen"])
            manager.run.use(str(state["run"]), state["restored"])
            committed = int(state["committed"])
            # The main manager may not have taken up itself what it has others take up.
            again = state["restoring"]
            self._again = PersistedCheckpoint.from_fields(again) if again is not None else manager.run.restored
            return committed, (), again is not None or (self._again is not None and committed < 0)
        runs, known = set(), set(self._recoverable)
        common = set(self._recoverable)
        for each in range(1, manager.configuration.managers):
            told = manager.links.call(each, "sealed", {}, until=until)
            answer, self._incarnations[each] = told.fields, told.incarnation
            ids = {int(checkpoint_id) for checkpoint_id in answer["ids"]}
            common &= ids
            known |= ids
            runs.add(str(answer["run"]))
            manager.run.use(str(answer["run"]), answer["restored"])
            manager.frozen = manager.frozen or bool(answer["frozen"])
            manager.writers.update(writers_of(answer["writers"]))
            merge(manager.taken, from_list(answer["taken"]))
        if len(runs) > 1:
            raise DDictManagerLostError("it died when not all managers held what was to be restored")
        restored = manager.run.restored
        # Not if there has been anything since: then it is lost what all had last.
        self._again = restored
        restored_only = restored is not None and not common and known <= {restored.checkpoint_id}
        return max(common, default=-1), tuple(sorted(common)), restored_only

    def _take_up(self, committed: int) -> None:
        manager = self._manager
        if committed < 0 and manager.run.restored is not None:
            raise DDictManagerLostError("not all managers have a whole copy of any checkpoint since the restore")
        if committed >= 0 and committed not in self._recoverable:
            causes = "; ".join(str(error) for _, error in manager.snapshots.recovery_failures)
            raise DDictManagerLostError(f"no whole copy of checkpoint {committed} is left. {causes}")
        manager.load([(each, entries) for each, entries in self._recoverable.items() if each <= committed])
        manager.snapshots.forget_after(committed)
        if manager.persister.persists:
            for checkpoint_id in sorted(each for each in self._recoverable if each <= committed):
                manager.prepare(checkpoint_id)
        self._recoverable = {}

    def _take_up_restored(self) -> None:
        assert self._again is not None
        self._manager.restore_prepare(self._again)
        self._manager.hold_restored()
        self._recoverable = {}

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

    def _take_over(self, committed: int, sealed: Sequence[int], restored_only: bool) -> Coordinator:
        manager = self._manager
        writers, restored = manager.writers, manager.run.restored if restored_only else None
        alive = {name: lease for name, (lease, pid) in writers.items() if pid is None or psutil.pid_exists(pid)}
        coordinator = manager.new_coordinator(
            committed=committed,
            sealed=sealed,
            to_persist=self._due(sealed),
            expected=alive,
            pids={name: pid for name, (_, pid) in writers.items() if name in alive and pid is not None},
            died=writers.keys() - alive.keys(),
            taken={place: need for place, need in manager.taken.items() if need > committed},
            takes_over=True,
            restored=None if restored is None else restored.checkpoint_id,
            incarnations=self._incarnations,
            settle_s=_SETTLE_S,
        )
        coordinator.recovering(0, manager.incarnation)
        return coordinator

    def _due(self, sealed: Sequence[int]) -> list[int]:
        """What the main manager that died had not persisted yet."""
        due = [each for each in sealed if self._manager.rules.is_due(each)]
        try:
            newest = self._manager.run.newest() if due else -1
        except FlashpointError as error:
            _log.error("what was due to be persisted when the main manager died is not: %s", error)
            return []
        return [each for each in due if each > newest]
