"""A manager: its share of the keys, their values, and what it does for the others.

Owns the lock around the shard, the memory that values may take, what checkpoints hold of it, and how one that was
started anew comes to hold what the one before it held. Reading and writing keys is `service`'s.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictFullError,
    DDictManagerLostError,
    DDictPersistError,
    DDictTimeoutError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.links import Links, allow_many_files, locator
from ml_flashpoint.ddict.manager.parts import PersistedParts
from ml_flashpoint.ddict.manager.shard import ENTRY_BYTES, Entry, Shard
from ml_flashpoint.ddict.manager.snapshots import Snapshots
from ml_flashpoint.ddict.manager.store import PartStore, ValueSlots, part_ref
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.fence import Fence
from ml_flashpoint.ddict.wire.requests import Request, SealedPart
from ml_flashpoint.format.errors import FlashpointError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.net.client import Address
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.stores.durable import version_of

_log = logging.getLogger(__name__)

_PEER_S = 10.0
_ROOM_S = 0.5
_LOOK_S = 1.0
_RETURN_S = 60.0


class _Cut(NamedTuple):
    """A cut, and the checkpoint that it is of."""

    number: int
    checkpoint_id: int


_NO_CUT = _Cut(0, -1)


class _Discarded(NamedTuple):
    """The last that was said of a handle that went back, or whose process was killed."""

    epoch: int
    number: int
    dead: bool = False  # whether its process was killed


class _Prepared(NamedTuple):
    """The part of a cut that this manager has."""

    checkpoint_id: int
    entries: list[Entry]


class Manager:
    """See the module. Thread-safe.

    Args:
        config: ``configuration`` as JSON, number of the ``manager``, its ``incarnation`` (16 hexadecimal digits),
            whether it was ``restarted``, so that it is to have the values of the one before it, and, where other
            machines are to reach it, its ``host`` and the ``place`` (node) that it runs on, not always the same one.

    Attributes:
        changed: guards the shard; notified when it changes while somebody waits.
        epoch: requests of another one are refused, and all before it has begun any (-1). Guarded by the lock.
        fence: of the handles that have written in this epoch. Requests of earlier ones are refused anyhow.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        allow_many_files()
        self.configuration = configuration = Configuration.from_json(config["configuration"])
        self.number = number = int(config["manager"])
        self.rules = configuration.options
        self.place = config.get("place") or str(self.rules.nodes[number])
        self.incarnation = str(config["incarnation"])
        self.changed = threading.Condition(threading.RLock())
        self.waiting = 0
        self.frozen = False
        self.ended = threading.Event()
        self.links = Links(locator(configuration, config.get("place")), configuration.secret)
        self._restarted = config.get("restarted") is True
        self.epoch = -1 if self._restarted else 0
        self.fence = Fence()
        self._discarded: dict[str, _Discarded] = {}
        self._frozen_by = 0  # number of the request that `frozen` is of
        self._begun = threading.Lock()
        self.store = PartStore(configuration.node_folder(number), number, configuration.managers)
        self.slots = ValueSlots(self.store, self.incarnation, limit_bytes=self.rules.limit_bytes)
        self.shard = Shard(is_final=not self.rules.snapshots)
        self.snapshots = Snapshots(
            self.store,
            nodes=[f"node-{node}" for node in self.rules.nodes],
            holders=configuration.holders,
            secret=configuration.secret,
            ask=self._ask_peer,
            values=self.slots,
            host=config.get("host") or "127.0.0.1",
        )
        self._kept: dict[int, _Prepared] = {}  # by the number of the cut
        self._settled = 0  # the newest cut that is known to be committed
        self._cut = _NO_CUT  # the newest that was prepared, or that this epoch began with
        self.parts = PersistedParts(configuration, number, self.slots)
        self._ready = threading.Event()  # requests may come before
        self._lost: DDictManagerLostError | None = None
        self._failures: dict[int, FlashpointError] = {}

    # ---- life ---------------------------------------------------------------------------------------------

    def begin_at(self, addresses: Sequence[Address]) -> None:
        """Begin, reached at these addresses."""
        if self._restarted:
            threading.Thread(target=self._return, args=(addresses,), name="ddict-return", daemon=True).start()
        else:
            self._say_where(addresses, time.monotonic() + _RETURN_S)
            self._ready.set()

    def _say_where(self, addresses: Sequence[Address], deadline: float) -> None:
        """Say where this is to the coordinator, which tells all others: on Ray managers can be anywhere."""
        if len(addresses) > 1:
            (_, unix), (_, host, port) = addresses  # type: ignore[misc]
            self.links.call(COORDINATOR, asked.Here(self.number, self.place, unix, host, port), deadline=deadline)

    def _return(self, addresses: Sequence[Address]) -> None:
        """Have what the manager before this one had sealed, and an epoch begin; and then copies again where its death
        has cost some: its own at those who hold them, if they were away too, and here those of others."""
        deadline = time.monotonic() + _RETURN_S
        try:
            self._say_where(addresses, deadline)
            if not self.rules.replicated:
                raise DDictManagerLostError("without replication its values are gone")
            with self._begun:
                told = self.links.call(COORDINATOR, asked.SealedBy(self.number), deadline=deadline)
                self._recover([SealedPart(*each) for each in told.fields["sealed"]])
            returned = asked.Returned(self.number, self.incarnation)
            self.links.call(COORDINATOR, returned, deadline=time.monotonic() + _RETURN_S)
        except Exception as error:  # lost with its thread, it would leave every client waiting
            _log.exception("manager %d cannot go on from where the one before it was", self.number)
            self._give_up(error.message if isinstance(error, FlashpointError) else repr(error))
        self._ready.wait()
        if self._lost is None:
            _log.warning("manager %d is back", self.number)
            self.replicate()
            for owner in self.snapshots.held:
                try:
                    self._ask_peer(owner, asked.Replicate())
                except FlashpointError as error:
                    _log.warning("manager %d was not asked for new copies: %s", owner, error)

    def _give_up(self, why: str) -> DDictManagerLostError:
        """Note that what this manager is to have is lost. Return the error that everybody gets."""
        error = DDictManagerLostError(
            f"manager {self.number} came back without its values: {why}",
            manager=self.number,
            hint="make the dictionary anew, and restore() what was persisted",
        )
        error.retryable = False
        if not self._ready.is_set():
            self._lost = error
            self._ready.set()
        return error

    def close(self) -> None:
        """Let go of everything. Files stay where they are."""
        self.ended.set()
        self.links.close()
        self.snapshots.close()
        self.store.close()

    @property
    def is_ready(self) -> bool:
        """True if this manager has what it is to have."""
        return self._ready.is_set() and self._lost is None

    def wait_until_ready(self, deadline: float) -> None:
        """Wait until this manager has what it is to have. Raises `DDictManagerLostError`: it has not, or never will."""
        if not self._ready.wait(max(0.0, deadline - time.monotonic())):
            raise DDictManagerLostError("the manager has not begun yet", manager=self.number)
        if self._lost is not None:
            raise self._lost

    def replicate(self) -> None:
        """Push what holders lack of the snapshots here."""
        try:
            self.snapshots.replicate(seal_deadline_s())
        except FlashpointError as error:
            _log.warning("copies of manager %d are not complete yet: %s", self.number, error)

    def replicate_later(self) -> None:
        """The same; a holder came back, perhaps without its copies, and does not wait for them."""
        threading.Thread(target=self.replicate, name="ddict-replicate", daemon=True).start()

    def hello(self) -> Fields:
        """Return who this is, and where peers reach it."""
        return {"manager": self.number, "transfers": self.snapshots.address}

    def stats(self) -> Fields:
        """Return what `ManagerStats` is made of."""
        with self.changed:
            return {
                "keys": len(self.shard),
                "used_bytes": self.used_bytes,
                "oldest": self.shard.oldest,
                "sealed": sorted(
                    {self._kept[cut].checkpoint_id for cut in self.snapshots.sealed() if cut in self._kept}
                ),
                "frozen": self.frozen,
                "holders": self.snapshots.holders,
                "copies": self.snapshots.copied_to(),
                "place": self.place,
            }

    def freeze(self, frozen: bool, number: int) -> None:
        """Refuse writes, or take them again. ``number``: higher in later requests, which may overtake earlier ones."""
        with self.changed:
            if number >= self._frozen_by:
                self.frozen, self._frozen_by = frozen, number

    def _ask_peer(self, manager: int, request: Request) -> Fields:
        return self.links.call(manager, request, deadline=time.monotonic() + _PEER_S).fields

    # ---- values -------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of all values, older checkpoints included."""
        return self.shard.used_bytes + self.slots.promised_bytes

    def put(self, entry: Entry) -> None:
        """Add an entry for which there is room; under the lock."""
        self.shard.put(entry)
        if self.waiting:
            self.changed.notify_all()

    def make_room(self, nbytes: int, key: bytes, checkpoint_id: int, writer: str, deadline: float) -> None:
        """Wait a moment for checkpoints that are about to retire, if there is no room for a value in place of what its
        put replaces; under the lock, which is let go of meanwhile: look at the shard after this, not before."""
        limit = self.rules.limit_bytes
        nbytes += ENTRY_BYTES + len(key)

        def fits() -> bool:
            more = nbytes - self.shard.replaced_bytes(key, checkpoint_id, writer)
            return more <= 0 or self.used_bytes + more <= limit

        if not (fits() or self.wait_for(fits, min(deadline, time.monotonic() + _ROOM_S))):
            raise DDictFullError(
                f"manager {self.number} has {limit} bytes for values, of which {self.used_bytes} are in use",
                needed_bytes=nbytes,
                available_bytes=max(0, limit - self.used_bytes),
                manager=self.number,
                hint="make the dictionary with a larger total_mem, or keep fewer checkpoints (working_set_size)",
            )

    def wait_for(self, holds: Callable[[], bool], deadline: float, is_gone: Callable[[], bool] = lambda: False) -> bool:
        """Wait until ``holds()``; under the lock, which is let go of meanwhile. Returns whether it does."""
        self.waiting += 1
        epoch = self.epoch
        try:
            while not holds():
                self.check_epoch(epoch)
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set() or is_gone():
                    return False
                self.changed.wait(min(left, _LOOK_S))
            return True
        finally:
            self.waiting -= 1

    def wait_for_keys(self, checkpoint_id: int, deadline: float, is_gone: Callable[[], bool]) -> None:
        """Wait until all keys of a checkpoint are written again at a later one."""
        with self.changed:
            if not self.wait_for(lambda: self.shard.missing_after(checkpoint_id) is None, deadline, is_gone):
                raise DDictTimeoutError(
                    f"checkpoint {checkpoint_id} cannot retire: not all of its keys are written at a later one, "
                    f"such as {self.shard.missing_after(checkpoint_id)!r}",
                    manager=self.number,
                    checkpoint_id=checkpoint_id,
                    hint="write every key at each checkpoint, or once with pput()",
                )

    # ---- epochs -------------------------------------------------------------------------------------------

    def check_epoch(self, epoch: object) -> None:
        """Refuse what belongs to another epoch; under the lock."""
        if epoch != self.epoch:
            at = f"is in epoch {self.epoch}" if self.epoch >= 0 else "has not begun any epoch yet"
            raise self._lost or StaleEpochError(f"manager {self.number} {at}", manager=self.number)

    def begin(self, told: asked.Begin) -> None:
        """Begin an epoch; see `Begin`."""
        with self._begun:  # the coordinator may ask again before it has heard an answer
            if self._lost is not None:
                raise self._lost
            if told.epoch < self.epoch:
                return  # the coordinator has given this request up
            if told.epoch > self.epoch or not self._ready.is_set():
                if not self._ready.is_set():
                    self._recover(told.sealed)  # what was committed since it asked
                if told.restored is not None and (self.parts.has_read or told.keep[0] not in self._kept):
                    entries = self.parts.take(version_of(told.restored))
                    self._kept = {told.keep[0]: _Prepared(told.base, entries)}  # what was here is no more
                    self.snapshots.forget_after(-1)
                self._load(told.epoch, _Cut(told.cut, told.base), told.keep)
                self._retain(lambda each: each in told.keep or each in told.pinned)
                self._ready.set()
        self.freeze(told.frozen, told.number)

    def _load(self, epoch: int, cut: _Cut, keep: Sequence[int]) -> None:
        base = cut.checkpoint_id
        with self.changed:
            if self.rules.snapshots:
                wanted = dict(self._kept[each] for each in keep if each in self._kept)
                if base >= 0 and base not in wanted:
                    causes = self._failures.get(base, "")
                    raise self._give_up(f"no whole copy of checkpoint {base} is left. {causes}")
                self.shard.load(wanted.items())
                self.shard.committed, self.shard.kept = base, frozenset(wanted)
                self._cut = cut
            else:
                self.shard.rollback(None, base)
            self.epoch = epoch
            self._settled = 0
            self.fence.begin(epoch)
            self._discarded = {handle: each for handle, each in self._discarded.items() if each.epoch >= epoch}
            self.changed.notify_all()

    def _recover(self, sealed: Sequence[SealedPart]) -> None:
        missing = {part.cut: part for part in sealed if part.cut not in self._kept}
        if missing:
            found, failures = self.snapshots.recover([part_ref(part.name, part.cut) for part in missing.values()])
            self._failures = {missing[cut].checkpoint_id: error for cut, error in failures.items()}
            with self.changed:
                self._kept |= {cut: _Prepared(missing[cut].checkpoint_id, its) for cut, its in found.items()}

    def discard(self, told: asked.Discard) -> None:
        """Discard what a handle wrote above a checkpoint; see `Discard`."""
        handle, to, epoch, generation = told.whose
        with self.changed:
            if epoch < self.epoch or told.number <= self._discarded.get(handle, _Discarded(0, 0)).number:
                return
            if not told.dead:
                try:
                    self.fence.hear(handle, generation, epoch)
                except StaleRequestError:
                    return
            self._discarded[handle] = _Discarded(epoch, told.number, told.dead)
            self.shard.rollback(handle, to)
            if self.waiting:
                self.changed.notify_all()

    def is_dead(self, handle: str) -> bool:
        """Return True if a handle's process was killed, so that what is on its way still comes too late."""
        return handle in self._discarded and self._discarded[handle].dead

    # ---- checkpoints --------------------------------------------------------------------------------------

    def late_for(self, checkpoint_id: int) -> Fields:
        """Return what a write at a checkpoint is told, under the lock: the newest cut that it is late for, if any."""
        return {"late": self._cut.number} if checkpoint_id <= self._cut.checkpoint_id else {}

    def prepare(self, told: asked.Prepare) -> None:
        """Note what belongs to a cut; see `Prepare`."""
        with self.changed:
            self.check_epoch(told.epoch)
            if told.cut <= self._cut.number:
                raise DDictError(f"cut {self._cut.number} has been asked for since", manager=self.number)
            self._retain(lambda each: each <= told.committed)
            self._kept[told.cut] = _Prepared(told.checkpoint_id, self.shard.cut(told.checkpoint_id))
            self._cut = _Cut(told.cut, told.checkpoint_id)
        if any(each > told.committed for each in self.snapshots.sealed()):
            self.snapshots.forget_after(told.committed)

    def seal(self, told: asked.Seal, deadline: float) -> str:
        """Have verified copies of a prepared cut; returns the name of the snapshot's part."""
        with self.changed:
            self.check_epoch(told.epoch)
            entries = self._prepared(told.cut)
        return self.snapshots.seal(told.cut, entries, max(0.1, deadline - time.monotonic())).name

    def settle(self, told: asked.Settle) -> None:
        """Let go of what no one needs any more; see `Settle`."""
        with self.changed:
            self.check_epoch(told.epoch)
            if told.cut < self._settled:
                return  # the coordinator has given this request up
            self._settled = told.cut
            self.shard.retire(told.oldest)
            kept = frozenset(self._kept[each].checkpoint_id for each in told.keep if each in self._kept)
            self.shard.committed, self.shard.kept = told.committed, kept
            if self.waiting:
                self.changed.notify_all()
            self._retain(lambda each: each in told.keep or each in told.pinned or each > told.cut)
        if self.rules.replicated:
            self.snapshots.retain(told.keep)

    def persist(self, told: asked.Persist) -> None:
        """Write this manager's part of a committed cut, durably."""
        self.parts.write(version_of(told.version), self._prepared(told.cut))

    def _prepared(self, cut: int) -> list[Entry]:
        if cut not in self._kept:
            raise DDictPersistError(f"cut {cut} was not prepared here", manager=self.number)
        return self._kept[cut].entries

    def _retain(self, is_wanted: Callable[[int], bool]) -> None:
        with self.changed:
            self._kept = {each: entries for each, entries in self._kept.items() if is_wanted(each)}
