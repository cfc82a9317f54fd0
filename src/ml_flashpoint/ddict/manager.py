"""One manager: its share of the keys, their values, and what it does for the others.

Owns the lock around the shard, the memory that values may take, and a manager's life: fresh, recovering, lost. What
requests mean is `operations`'. It knows neither how its process was started nor how peers find it: that is given to it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.errors import FlashpointError, ProtocolError
from ml_flashpoint.core.knobs import seal_deadline_s
from ml_flashpoint.ddict import persisted_parts
from ml_flashpoint.ddict.accounts import Needs, from_list, merge, writers_of
from ml_flashpoint.ddict.checkpoint_persister import PersistedCheckpoint, new_run_id
from ml_flashpoint.ddict.configuration import Configuration
from ml_flashpoint.ddict.connection import Peer
from ml_flashpoint.ddict.coordinator import Coordinator
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue, Value
from ml_flashpoint.ddict.errors import DDictFullError, DDictManagerLostError, DDictPersistError
from ml_flashpoint.ddict.links import Links, Locate
from ml_flashpoint.ddict.persisted_run import PersistedRun
from ml_flashpoint.ddict.room import Room
from ml_flashpoint.ddict.shard import Shard
from ml_flashpoint.ddict.snapshots import Pin, SnapshotRecord, Snapshots
from ml_flashpoint.ddict.value_arenas import ValueArenas, is_unused

if TYPE_CHECKING:
    from typing_extensions import Buffer


_log = logging.getLogger(__name__)

_PEER_S = 10.0
_RECOVERY_S = 60.0
_SETTLE_S = 2.0
_ROOM_S = 0.5
_LOOK_S = 1.0
_ENTRY_BYTES = 200  # what Python needs for a key and its entry, about


@dataclass(eq=False, slots=True)
class Session:
    """One connection of a client or another manager.

    Attributes:
        allocated: values that it has room for and has not put yet.
        lease: that it keeps alive.
    """

    peer: Peer
    allocated: set[str] = field(default_factory=set)
    lease: str | None = None


class Manager:
    """See the module. Thread-safe.

    Args:
        configuration: of the dictionary.
        number: of this manager.
        locate: where the other managers are.
        operations: what requests mean, by name: functions of the manager, the session, fields and blobs.
        incarnation: of this process, 16 hexadecimal digits.
        restarted: whether one of this number was there before.
        host: address to serve other nodes on.
    """

    def __init__(
        self,
        configuration: Configuration,
        number: int,
        locate: Locate,
        operations: Mapping[str, Callable[..., tuple[dict[str, Any], Sequence[Buffer]]]],
        *,
        incarnation: str,
        restarted: bool = False,
        host: str = "127.0.0.1",
    ) -> None:
        self.configuration = configuration
        self.number = number
        self._operations = operations
        self.rules = configuration.rules
        self.incarnation = incarnation
        self.changed = threading.Condition(threading.RLock())
        """Guards the shard; notified when it changes while somebody waits."""
        self.waiting = 0
        self.frozen = False
        self.ended = threading.Event()
        self.coordinator: Coordinator | None = None
        self.links = Links(locate, configuration.secret)
        self.run = PersistedRun(configuration, is_main=number == 0)
        self.persister = self.run.persister
        self._restarted = restarted
        self._ready = threading.Event()
        self._found = threading.Event()
        self._failure: FlashpointError | None = None
        self._recoverable: dict[int, Sequence[Entry]] = {}
        self.writers: dict[str, tuple[str, int | None]] = {}
        """Handles that wrote at the last commit, as the main manager said: see `Attendance.writers`."""
        self.taken: Needs = {}
        """See `Attendance`, as the main manager said."""
        self._restored_run = ""
        self._again: PersistedCheckpoint | None = None
        self._incarnations = {number: incarnation}
        self._inline_bytes = 0
        self._stored: set[str] = set()
        self._prepared: dict[int, tuple[list[Entry], Pin]] = {}
        self._restoring: tuple[PersistedCheckpoint, list[Entry]] | None = None
        self.store = RankStore(configuration.node_folder(number), number, reusable=is_unused)
        self.arenas = ValueArenas(self.store, self.incarnation, limit_bytes=configuration.limit_bytes)
        self.shard = Shard(self._let_go)
        self.snapshots = Snapshots(
            self.store,
            nodes=[f"node-{node}" for node in configuration.nodes],
            strategy=configuration.make_strategy(),
            secret=configuration.secret,
            peer_address=self._peer_address,
            tell_holder=self._tell_holder,
            in_use=self._is_in_use,
            incarnation=self.incarnation,
            host=host,
        )

    # ---- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to serve; recovery, if there is anything to recover, goes on in the background."""
        if self.rules.replicated:
            self.snapshots.start()
        if not self._restarted:
            self._found.set()
            if self.number == 0:
                self.coordinator = self._new_coordinator()
            self._ready.set()
            return
        threading.Thread(target=self._recover, name="ddict-recover", daemon=True).start()

    def close(self) -> None:
        """End. Files stay where they are."""
        self.ended.set()
        if self.coordinator is not None:
            self.coordinator.close()
        self.links.close()
        self.snapshots.close()
        self.persister.close()
        self.store.close()

    def _new_coordinator(self, **taken_over: Any) -> Coordinator:
        self.run.begin()
        return Coordinator(self.rules, self._call, self.run.complete, unpersist=self.run.remove_above, **taken_over)

    def _take_over(self, committed: int, sealed: Sequence[int], restored_only: bool) -> Coordinator:
        alive = {
            handle: lease for handle, (lease, pid) in self.writers.items() if pid is None or psutil.pid_exists(pid)
        }
        coordinator = self._new_coordinator(
            committed=committed,
            sealed=sealed,
            to_persist=self._due(sealed),
            expected=alive,
            pids={handle: pid for handle, (_, pid) in self.writers.items() if handle in alive and pid is not None},
            died=self.writers.keys() - alive.keys(),
            taken={place: need for place, need in self.taken.items() if need > committed},
            takes_over=True,
            restored=self.run.restored.checkpoint_id if restored_only and self.run.restored is not None else None,
            incarnations=self._incarnations,
            settle_s=_SETTLE_S,
        )
        coordinator.recovering(0, self.incarnation)
        return coordinator

    def _due(self, sealed: Sequence[int]) -> list[int]:
        """What the main manager that died had not persisted yet."""
        due = [each for each in sealed if self.rules.is_due(each)]
        try:
            newest = self.run.newest() if due else -1
        except FlashpointError as error:
            _log.error("what was due to be persisted when the main manager died is not: %s", error)
            return []
        return [each for each in due if each > newest]

    def wait_until_ready(self, until: float) -> None:
        """Wait for recovery to end.

        Raises:
            DDictManagerLostError: it did not, or there is nothing to recover from.
        """
        if not self._ready.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the manager is still recovering", manager=self.number)
        if self._failure is not None:
            raise self._failure

    def _recover(self) -> None:
        until = time.monotonic() + _RECOVERY_S
        try:
            if not self.rules.replicated:
                raise DDictManagerLostError("it died, and without replication its values are gone", manager=self.number)
            self._find_snapshots()
            committed, common, restored_only = self._agree(until)
            if restored_only:
                self._take_up_restored()
            else:
                self._take_up(committed)
            if self.number == 0:
                self.coordinator = self._take_over(committed, common, restored_only)
            _log.warning("manager %d is back at checkpoint %d", self.number, committed)
            self._ready.set()
            self._make_up_copies()
        except FlashpointError as error:
            _log.error("manager %d cannot recover: %s", self.number, error)
            self._failure = DDictManagerLostError(
                f"manager {self.number} came back without its values: {error.message}",
                manager=self.number,
                hint="make the dictionary anew, and restore() what was persisted",
            )
            self._failure.retryable = False
        except Exception as error:  # lost with its thread, it would leave every client waiting
            _log.exception("manager %d cannot recover", self.number)
            self._failure = DDictManagerLostError(f"cannot recover: {error}", manager=self.number)
        finally:
            self._found.set()
            self._ready.set()

    def _find_snapshots(self) -> None:
        found = self.snapshots.recover(self._ask_holder)
        self._recoverable = {each.checkpoint_id: each.entries for each in found}
        self._found.set()

    def _agree(self, until: float) -> tuple[int, tuple[int, ...], bool]:
        """The checkpoint to go on from: what the coordinator says; for the coordinator itself, the newest one that
        every manager has, with all that they have. And whether that is what was restored, of which there may be no
        copies yet but the persisted ones."""
        if self.number != 0:
            me = {"manager": self.number, "incarnation": self.incarnation}
            state = self.links.call(0, "recovering", me, until=until).fields
            self.frozen = bool(state["frozen"])
            self.run.use(str(state["run"]), state["restored"])
            committed = int(state["committed"])
            # The main manager may not have taken up itself what it has others take up.
            again = state["restoring"]
            self._again = PersistedCheckpoint.from_fields(again) if again is not None else self.run.restored
            return committed, (), again is not None or (self._again is not None and committed < 0)
        runs, known = set(), set(self._recoverable)
        common = set(self._recoverable)
        for manager in range(1, self.configuration.managers):
            told = self.links.call(manager, "sealed", {}, until=until)
            answer, self._incarnations[manager] = told.fields, told.incarnation
            common &= {int(each) for each in answer["ids"]}
            known.update(int(each) for each in answer["ids"])
            runs.add(str(answer["run"]))
            self.run.use(str(answer["run"]), answer["restored"])
            self.frozen = self.frozen or bool(answer["frozen"])
            self.writers.update(writers_of(answer["writers"]))
            merge(self.taken, from_list(answer["taken"]))
        if len(runs) > 1:
            raise DDictManagerLostError("it died when not all managers held what was to be restored")
        restored = self.run.restored
        # Not if there has been anything since: then it is lost what all had last.
        self._again = restored
        restored_only = restored is not None and not common and known <= {restored.checkpoint_id}
        return max(common, default=-1), tuple(sorted(common)), restored_only

    def _take_up(self, committed: int) -> None:
        if committed < 0 and self.run.restored is not None:
            raise DDictManagerLostError("not all managers have a whole copy of any checkpoint since the restore")
        if committed >= 0 and committed not in self._recoverable:
            causes = "; ".join(str(error) for _, error in self.snapshots.recovery_failures)
            raise DDictManagerLostError(f"no whole copy of checkpoint {committed} is left. {causes}")
        with self.changed:
            self.shard.load([(each, entries) for each, entries in self._recoverable.items() if each <= committed])
            for value in self.shard.values():
                if isinstance(value, StoredValue):
                    self.arenas.count(value)
            self._count_values()
        self.snapshots.forget_after(committed)
        if self.persister.persists:
            for checkpoint_id in sorted(each for each in self._recoverable if each <= committed):
                self.prepare(checkpoint_id)
        self._recoverable = {}

    def _take_up_restored(self) -> None:
        assert self._again is not None
        self.restore_prepare(self._again)
        self._hold_restored()
        self._recoverable = {}

    def _make_up_copies(self) -> None:
        """Have copies again where this manager's death has cost some, before the next loss: its own at those who hold
        them, if they were away too, and here those of others."""
        self.replicate()
        for owner in self.snapshots.held:
            try:
                self.links.call(owner, "replicate", {}, until=time.monotonic() + _PEER_S)
            except FlashpointError as error:
                _log.warning("manager %d was not asked for new copies: %s", owner, error)

    def replicate(self) -> None:
        """Push what holders lack of the snapshots here."""
        try:
            self.snapshots.replicate(seal_deadline_s())
        except FlashpointError as error:
            _log.warning("copies of manager %d are not complete yet: %s", self.number, error)

    def sealed(self, until: float) -> list[int]:
        """Checkpoints that this manager has a snapshot of, once it knows."""
        if not self._found.wait(max(0.0, until - time.monotonic())):
            raise DDictManagerLostError("the manager is still recovering", manager=self.number)
        return sorted(set(self._recoverable) or set(self.snapshots.sealed()))

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(
        self, session: Session, operation: str, fields: dict[str, Any], blobs: list[bytes]
    ) -> tuple[dict[str, Any], Sequence[Buffer]]:
        """See `RequestHandler`."""
        found = self._operations.get(operation)
        if found is None:
            raise ProtocolError(f"there is no operation {operation!a}")
        return found(self, session, fields, blobs)

    def closed(self, session: Session) -> None:
        """See `RequestHandler`."""
        self.arenas.abandon(session.allocated)
        if session.lease is not None and self.coordinator is not None:
            self.coordinator.lease_ended(session.lease, session)

    def _call(self, manager: int, operation: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Ask a manager for the coordinator."""
        until = time.monotonic() + timeout_s
        if manager == self.number:
            return self.handle(
                Session(Peer("the coordinator", None, lambda: False)), operation, {**fields, "t": timeout_s}, []
            )[0]
        return self.links.call(manager, operation, dict(fields), until=until).fields

    def _peer_address(self, manager: int) -> tuple[str, int] | None:
        try:
            found = self.links.call(manager, "hello", {}, until=time.monotonic() + _PEER_S).fields["transfers"]
        except FlashpointError:
            return None
        return None if found is None else (str(found[0]), int(found[1]))

    def _tell_holder(self, holder: int, keep: list[str], before: str) -> None:
        fields = {"of": self.number, "keep": keep, "before": before}
        self.links.call(holder, "drop_copies", fields, until=time.monotonic() + _PEER_S)

    def _ask_holder(self, holder: int) -> list[SnapshotRecord]:
        answer = self.links.call(holder, "inventory", {"of": self.number}, until=time.monotonic() + _RECOVERY_S / 2)
        return [SnapshotRecord.from_json(each) for each in answer.fields["records"]]

    # ---- values -------------------------------------------------------------------------------------------

    def _let_go(self, value: Value) -> None:
        if isinstance(value, InlineValue):
            self._inline_bytes -= value.nbytes + _ENTRY_BYTES
            return
        self._stored.discard(value.value_id)
        if self.snapshots.let_go(value):
            self.arenas.discount(value)  # it is a snapshot's now, beside what users may have
        else:
            self.arenas.release(value)

    def _is_in_use(self, value_id: str) -> bool:
        return value_id in self._stored

    def _count_values(self) -> None:
        """After the shard was loaded."""
        values = list(self.shard.values())
        self._stored = {v.value_id for v in values if isinstance(v, StoredValue)}
        self._inline_bytes = sum(v.nbytes + _ENTRY_BYTES for v in values if isinstance(v, InlineValue))

    @property
    def used_bytes(self) -> int:
        """Bytes of all values, older checkpoints included."""
        return self._inline_bytes + self.arenas.used_bytes

    def put(self, entry: Entry) -> Entry:
        """Add an entry for which there is room; under the lock."""
        value = entry.value
        added = self.shard.put(entry)
        if isinstance(value, InlineValue):
            self._inline_bytes += value.nbytes + _ENTRY_BYTES
        elif value is not None:
            self._stored.add(value.value_id)
        if self.waiting:
            self.changed.notify_all()
        return added

    def make_room(self, nbytes: int, until: float) -> None:
        """Wait a moment for checkpoints that are about to retire, if there is no room; under the lock, which is let go
        of meanwhile: look at the shard after this, not before.

        Raises:
            DDictFullError: there still is none.
        """
        limit = self.configuration.limit_bytes
        nbytes += _ENTRY_BYTES
        if self.used_bytes + nbytes <= limit:
            return
        self.wait_for(lambda: self.used_bytes + nbytes <= limit, min(until, time.monotonic() + _ROOM_S))
        if self.used_bytes + nbytes > limit:
            raise DDictFullError(
                f"manager {self.number} has {limit} bytes for values, of which {self.used_bytes} are in use",
                needed_bytes=nbytes,
                available_bytes=max(0, limit - self.used_bytes),
                manager=self.number,
                hint="make the dictionary with a larger total_mem, or keep fewer checkpoints (working_set_size)",
            )

    def wait_for(self, holds: Callable[[], bool], until: float, is_gone: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``holds()``; under the lock, which is let go of meanwhile. Returns whether it does.

        Args:
            is_gone: whether nobody waits for the answer any more.
        """
        self.waiting += 1
        try:
            while not holds():
                left = until - time.monotonic()
                if left <= 0 or self.ended.is_set() or is_gone():
                    return False
                self.changed.wait(min(left, _LOOK_S))
            return True
        finally:
            self.waiting -= 1

    # ---- checkpoints --------------------------------------------------------------------------------------

    def prepare(self, checkpoint_id: int) -> None:
        """Note what belongs to a checkpoint, before anything of it can change."""
        with self.changed:
            entries = list(self.shard.entries(checkpoint_id))
            pin = self.snapshots.pin(entries)
            before = self._prepared.pop(checkpoint_id, None)
            self._prepared[checkpoint_id] = (entries, pin)
        if before is not None:
            before[1].release()

    def seal(self, checkpoint_id: int, until: float) -> None:
        """Have verified copies of a prepared checkpoint.

        Raises:
            FlashpointError: not now.
        """
        with self._prepared_entries(checkpoint_id) as entries:
            self.snapshots.seal(checkpoint_id, entries, max(0.1, until - time.monotonic()))

    @contextlib.contextmanager
    def _prepared_entries(self, checkpoint_id: int) -> Iterator[list[Entry]]:
        """What was prepared, which stays as it is meanwhile, whoever lets go of it."""
        with self.changed:
            found = self._prepared.get(checkpoint_id)
            if found is None:
                raise DDictPersistError("this checkpoint was not prepared here", checkpoint_id=checkpoint_id)
            pin = self.snapshots.pin(found[0])
        with pin:
            yield found[0]

    def unprepare(self, wanted: Any) -> None:
        """Let go of prepared checkpoints of which ``wanted(checkpoint_id)`` is false."""
        with self.changed:
            gone = [self._prepared.pop(each) for each in list(self._prepared) if not wanted(each)]
        for _, pin in gone:
            pin.release()

    def settle(self, oldest: int, keep: Sequence[int], pinned: Sequence[int], committed: int) -> None:
        """Let go of what no one needs any more."""
        with self.changed:
            self.shard.retire(oldest)
            if self.waiting:
                self.changed.notify_all()
        self.unprepare(lambda each: each in pinned or each > committed)
        if self.rules.replicated:
            self.snapshots.retain(keep)

    def forget(self, above: int) -> None:
        """Checkpoints above this one were rolled back."""
        self.unprepare(lambda each: each <= above)
        if self.rules.replicated:
            self.snapshots.forget_after(above)

    def persist(self, checkpoint_id: int) -> str:
        """Write this manager's part of a prepared checkpoint; returns the receipt."""
        with self._prepared_entries(checkpoint_id) as entries:
            index, items = persisted_parts.encode(entries)
            return self.persister.write_part(checkpoint_id, self.number, index, items)

    def restore_prepare(self, checkpoint: PersistedCheckpoint) -> None:
        """Read and verify this manager's share of a persisted checkpoint, and change nothing yet."""
        self.restore_abort()
        entries = persisted_parts.read(
            self.persister,
            checkpoint,
            self.number,
            self.configuration.managers,
            self._room_for,
            self.arenas.release,
        )
        with self.changed:
            self._restoring = (checkpoint, entries)

    def _room_for(self, nbytes: int) -> Room:
        return Room(self.arenas, self.store, nbytes)

    def restore_abort(self) -> None:
        """Forget what was read."""
        with self.changed:
            restoring, self._restoring = self._restoring, None
        for entry in restoring[1] if restoring is not None else ():
            if isinstance(entry.value, StoredValue):
                self.arenas.release(entry.value)

    def restore_commit(self, checkpoint_id: int, run_id: str, restored: dict[str, Any]) -> None:
        """Hold what was read, in place of everything else. If this process has done so, it does nothing."""
        # Not the run that it is in: one that was started anew meanwhile has been told that, and holds what was before.
        if self._restored_run == run_id:
            self.restore_abort()
            return
        with self.changed:
            restoring = self._restoring
        if restoring is None or restoring[0].checkpoint_id != checkpoint_id:
            raise DDictPersistError("this checkpoint was not read here", checkpoint_id=checkpoint_id)
        self._hold_restored()
        self.taken = {}
        self.run.use(run_id, restored)
        self._restored_run = run_id

    def _hold_restored(self) -> None:
        with self.changed:
            assert self._restoring is not None  # asked for by the main manager only, one thing after the other
            (checkpoint, entries), self._restoring = self._restoring, None
            self.shard.load([(checkpoint.checkpoint_id, entries)])
            self._count_values()
            self.changed.notify_all()
        self.forget(-1)

    def restore(self, checkpoint_id: int, until: float) -> None:
        """For the main manager: bring back a persisted checkpoint on all managers; see `Coordinator.restore`.

        Raises:
            DDictPersistError: there is no such checkpoint.
        """
        assert self.coordinator is not None
        checkpoint = self.persister.locate(checkpoint_id)
        run_id = new_run_id()
        left = max(0.1, until - time.monotonic())
        fields = {"checkpoint": checkpoint.to_fields(), "checkpoint_id": checkpoint_id, "run": run_id}
        self.coordinator.restore(checkpoint_id, fields, left)
        self.run.begin()
