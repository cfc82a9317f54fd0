"""A manager: its share of the keys, their values, and what it does for the others.

Owns the lock around the shard, the memory that values may take, what checkpoints hold of it, how one that was started
anew comes to hold what the one before it held, and the meaning of each request. On a Unix socket each side also checks
that the other runs as the same user.
"""

from __future__ import annotations

import logging
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from ml_flashpoint.ddict.errors import (
    REQUESTS,
    DDictError,
    DDictFullError,
    DDictKeyError,
    DDictManagerLostError,
    DDictTimeoutError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.links import Links, allow_many_files, locator
from ml_flashpoint.ddict.manager.cuts import Cuts
from ml_flashpoint.ddict.manager.parts import PersistedParts
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, ENTRY_BYTES, Entry, InlineValue, Value
from ml_flashpoint.ddict.manager.share import CutTable, Share
from ml_flashpoint.ddict.manager.store import (
    PartStore,
    ValueSlots,
    in_pieces,
    inline_number,
    number_to_inline,
)
from ml_flashpoint.ddict.options import COORDINATOR, Configuration
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.keys import MAX_KEY_BYTES, place
from ml_flashpoint.ddict.wire.requests import Request, Result, SealedPart, Whose
from ml_flashpoint.format.errors import CapacityError, FlashpointError, ProtocolError
from ml_flashpoint.format.knobs import seal_deadline_s
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.stores.durable import version_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_PEER_S = 10.0
_ROOM_S = 0.5
_LOOK_S = 1.0
_RETURN_S = 60.0


@dataclass(eq=False, slots=True)
class Session:
    """A connection of a client or another manager."""

    peer: Peer
    reserved: set[str] = field(default_factory=set)  # values that it has a reservation for and has not put yet


class Manager:
    """See the module. Thread-safe. Serves from construction until `close`.

    Args:
        config: ``configuration`` as JSON, number of the ``manager``, its ``incarnation`` (16 hexadecimal digits),
            whether it was ``restarted``, so that it is to have the values of the one before it, and, where other
            machines are to reach it, its ``host`` and the ``place`` (node) that it runs on, not always the same one.

    Attributes:
        changed: guards the share; notified when it changes while somebody waits.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        allow_many_files()
        self.configuration = configuration = Configuration.from_json(config["configuration"])
        self.number = number = int(config["manager"])
        self.rules, host = configuration.options, config.get("host")
        self.place = config.get("place") or str(self.rules.nodes[number])
        self.incarnation = str(config["incarnation"])
        self.changed = threading.Condition(threading.RLock())
        self.waiting = 0
        self.ended = threading.Event()
        self.links = Links(locator(configuration, config.get("place")), configuration.secret)
        self._restarted = config.get("restarted") is True
        self.table = CutTable()
        self.share = Share(number, self.rules, self.table, epoch=-1 if self._restarted else 0)
        self.shard = self.share.shard
        self._begun = threading.Lock()
        self.store = PartStore(configuration.node_folder(number), number, configuration.managers)
        self.slots = ValueSlots(self.store, self.incarnation, limit_bytes=self.rules.limit_bytes)
        self.cuts = Cuts(self.store, self.slots, self.table, configuration, self._ask_peer, host or "127.0.0.1")
        self.parts = PersistedParts(configuration, number, self.slots)
        self._ready = threading.Event()  # requests may come before
        self._failures: dict[int, FlashpointError] = {}
        unix_path = str(Path(configuration.base, f"m-{number}.sock"))
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
            if self._restarted:
                threading.Thread(target=self._return, name="ddict-return", daemon=True).start()
            else:
                self._say_where(time.monotonic() + _RETURN_S)
                self._ready.set()
        except BaseException:
            self._end()
            raise

    # ---- requests -----------------------------------------------------------------------------------------

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(self, session: Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        request, deadline = asked.decode(operation, fields)
        found = _OPERATIONS.get(type(request))
        if found is None:
            raise ProtocolError(f"a manager has no operation {operation!a}")
        if type(request) not in _AT_ANY_TIME:
            self._wait_until_ready(deadline)
        try:
            answer = found(_Call(self, session, blobs, deadline), request)
            return answer if isinstance(answer, tuple) else (answer or {}, ())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which refer to values, for as long as the error is anywhere
            raise
        finally:
            self.slots.collect()

    def closed(self, session: Session) -> None:
        """See `RequestHandler`."""
        self.slots.abandon(session.reserved)

    # ---- life ---------------------------------------------------------------------------------------------

    def _say_where(self, deadline: float) -> None:
        """Say where this is to the coordinator, which tells all others: on Ray managers can be anywhere."""
        if len(self._server.addresses) > 1:
            (_, unix), (_, host, port) = self._server.addresses  # type: ignore[misc]
            self.links.call(COORDINATOR, asked.Here(self.number, self.place, unix, host, port), deadline=deadline)

    def _return(self) -> None:
        """Have what the manager before this one had sealed, and an epoch begin; and then copies again where its death
        has cost some: its own at those who hold them, if they were away too, and here those of others."""
        deadline = time.monotonic() + _RETURN_S
        try:
            self._say_where(deadline)
            if not self.rules.replicated:
                raise DDictManagerLostError("without replication its values are gone")
            with self._begun:
                told = self.links.call(COORDINATOR, asked.SealedBy(self.number), deadline=deadline)
                self._failures = self.cuts.recover([SealedPart(*each) for each in told.fields["sealed"]])
            returned = asked.Returned(self.number, self.incarnation)
            self.links.call(COORDINATOR, returned, deadline=time.monotonic() + _RETURN_S)
        except Exception as error:  # lost with its thread, it would leave every client waiting
            _log.exception("manager %d cannot go on from where the one before it was", self.number)
            self._give_up(error.message if isinstance(error, FlashpointError) else repr(error))
        self._ready.wait()
        if self.share.lost is None:
            _log.warning("manager %d is back", self.number)
            self._replicate()
            for owner in self.cuts.held:
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
            self.share.lost = error
            self._ready.set()
        return error

    def close(self) -> None:
        """Stop serving, and let go of everything. Files stay where they are."""
        self.ended.set()
        self._server.close()
        self._end()

    def _end(self) -> None:
        self.ended.set()
        self.links.close()
        self.cuts.close()
        self.store.close()

    def _wait_until_ready(self, deadline: float) -> None:
        """Wait until this manager has what it is to have. Raises `DDictManagerLostError`: it has not, or never will."""
        if not self._ready.is_set() and not self._ready.wait(max(0.0, deadline - time.monotonic())):
            raise DDictManagerLostError("the manager has not begun yet", manager=self.number)
        if self.share.lost is not None:
            raise self.share.lost

    def _replicate(self) -> None:
        """Push what holders lack of the snapshots here."""
        try:
            self.cuts.replicate(seal_deadline_s())
        except FlashpointError as error:
            _log.warning("copies of manager %d are not complete yet: %s", self.number, error)

    def replicate_later(self) -> None:
        """Push what holders lack: one came back, perhaps without its copies, and does not wait for them."""
        threading.Thread(target=self._replicate, name="ddict-replicate", daemon=True).start()

    def hello(self) -> Fields:
        """See `Hello`."""
        return {"manager": self.number, "transfers": self.cuts.address, "incarnation": self.incarnation}

    def stats(self) -> Fields:
        """Return what `ManagerStats` is made of."""
        with self.changed:
            sealed = {cut.checkpoint_id for cut in self.table.sealed().values()}
            return {
                "keys": len(self.shard),
                "used_bytes": self.used_bytes,
                "oldest": self.shard.oldest,
                "sealed": sorted(sealed),
                "frozen": self.share.frozen,
                "holders": self.cuts.holders,
                "copies": self.cuts.copied_to(),
                "place": self.place,
            }

    def freeze(self, frozen: bool, number: int) -> None:
        """See `Freeze`."""
        with self.changed:
            self.share.freeze(frozen, number)

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
        self.notify()

    def notify(self) -> None:
        """Wake those who wait for a change, if any; under the lock."""
        if self.waiting:
            self.changed.notify_all()

    def make_room(self, nbytes: int, key: bytes, whose: Whose, deadline: float) -> None:
        """Wait a moment for checkpoints that are about to retire, if there is no room for a value in place of what its
        put replaces; under the lock, which is let go of meanwhile: look at the shard after this, not before."""
        limit = self.rules.limit_bytes
        nbytes += ENTRY_BYTES + len(key)

        def fits() -> bool:
            more = nbytes - self.shard.replaced_bytes(key, whose.checkpoint_id, whose.handle)
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
        """Wait until ``holds()``; under the lock, which is let go of meanwhile. Return whether it does."""
        self.waiting += 1
        epoch = self.share.epoch
        try:
            while not holds():
                self.share.check_epoch(epoch)
                left = deadline - time.monotonic()
                if left <= 0 or self.ended.is_set() or is_gone():
                    return False
                self.changed.wait(min(left, _LOOK_S))
            return True
        finally:
            self.waiting -= 1

    # ---- epochs and checkpoints ---------------------------------------------------------------------------

    def begin(self, told: asked.Begin) -> None:
        """Begin an epoch; see `Begin`."""
        with self._begun:  # the coordinator may ask again before it has heard an answer
            if self.share.lost is not None:
                raise self.share.lost
            if told.epoch < self.share.epoch:
                return  # the coordinator has given this request up
            if told.epoch > self.share.epoch or not self._ready.is_set():
                if not self._ready.is_set():
                    self._failures |= self.cuts.recover(told.sealed)  # what was committed since it asked
                if told.restored is not None and self.table.get(told.keep[0]) is None:
                    entries = self.parts.take(version_of(told.restored))
                    with self.changed:
                        self.table.retain(lambda cut: False)
                        self.table.add(told.keep[0], told.base, entries)
                    self.cuts.sweep()
                with self.changed:
                    if not self.share.begin(told):
                        causes = self._failures.get(told.base, "")
                        raise self._give_up(f"no whole copy of checkpoint {told.base} is left. {causes}")
                    self.changed.notify_all()
                self._ready.set()
        self.freeze(told.frozen, told.number)

    def discard(self, told: asked.Discard) -> None:
        """See `Discard`."""
        with self.changed:
            self.share.discard(told)
            self.notify()

    def prepare(self, told: asked.Prepare) -> None:
        """See `Prepare`."""
        with self.changed:
            self.share.prepare(told)
        self.cuts.sweep()

    def seal(self, told: asked.Seal, deadline: float) -> Fields:
        """See `Seal`."""
        with self.changed:
            self.share.check_epoch(told.epoch)
        return {"part": self.cuts.seal(told.cut, deadline)}

    def settle(self, told: asked.Settle) -> None:
        """See `Settle`."""
        with self.changed:
            self.share.settle(told)
            self.notify()
        self.cuts.sweep()

    def await_keys(self, checkpoint_id: int, deadline: float, is_gone: Callable[[], bool]) -> None:
        """See `AwaitKeys`."""
        with self.changed:
            if not self.wait_for(lambda: self.shard.missing_after(checkpoint_id) is None, deadline, is_gone):
                raise DDictTimeoutError(
                    f"checkpoint {checkpoint_id} cannot retire: not all of its keys are written at a later one, "
                    f"such as {self.shard.missing_after(checkpoint_id)!r}",
                    manager=self.number,
                    checkpoint_id=checkpoint_id,
                    hint="write every key at each checkpoint, or once with pput()",
                )

    def persist(self, told: asked.Persist) -> None:
        """See `Persist`."""
        self.parts.write(version_of(told.version), self.table.find(told.cut).entries)


_NUMBER_BYTES: Final = 100
_AT_ONCE: Final = 2000  # keys that are looked at under one lock
_LENGTH: Final = struct.Struct(">I")


@dataclass(slots=True)
class _Call:
    """A request: its receiver, and what it comes with."""

    manager: Manager
    session: Session
    blobs: list[bytes]
    deadline: float

    @property
    def is_gone(self) -> Callable[[], bool]:
        """See `Peer`."""
        return self.session.peer.is_gone

    @property
    def key(self) -> bytes:
        """The key, which comes first."""
        if not self.blobs or not 0 < len(self.blobs[0]) <= MAX_KEY_BYTES:
            raise ProtocolError("a key must come first")
        return self.blobs[0]

    def seen(self, key: bytes, checkpoint_id: int) -> Entry | None:
        """Return the entry that a reader sees who does not wait; where keys are waited for, none that has to be written
        yet."""
        return self.manager.shard.find(key, checkpoint_id, written=self.manager.rules.wait_for_keys)

    def change(
        self,
        request: asked.Put | asked.Add | asked.Delete,
        make: Callable[[Entry | None], Value | None],
        expected: int = -1,
    ) -> Fields:
        """Write the value that ``make`` has for the entry that is there; None deletes that. Return what a client is
        told, see `Put`. Under the lock."""
        whose, flags = request.whose, request.flags
        manager, key, at = self.manager, self.key, whose.checkpoint_id
        late = manager.share.check_change(whose)
        if expected >= 0:
            seen = self.seen(key, at)
            if (0 if seen is None else seen.sequence) != expected:
                return {"ok": False, **late}
        found = manager.shard.find(key, at)
        value = make(found)
        others = found is not None and found.broadcast and not flags & (BROADCAST | DIRECT)
        if found is not None and not isinstance(request, asked.Put):
            flags = found.flags
        manager.put(Entry(key, at, sys.intern(whose.handle), value, flags | BROADCAST if others else flags))
        return {"ok": True, **({"b": True} if others else {}), **late}


# ---- what clients ask for -------------------------------------------------------------------------------------------


def _put(call: _Call, request: asked.Put) -> Fields:
    manager, blobs, value_id, reserved = call.manager, call.blobs, request.value_id, call.session.reserved
    if value_id:
        if value_id not in reserved:
            raise ProtocolError(f"this connection has no reservation called {value_id!a}")
        if len(blobs) > 1:
            manager.slots.fill(value_id, blobs[1:])
    elif len(blobs) < 2:
        raise ProtocolError("a put needs a value")
    with manager.changed:
        if value_id:
            value: Value = manager.slots.adopt(value_id)
            reserved.discard(value_id)
        else:
            value = InlineValue(blobs[1])
            manager.make_room(value.nbytes, call.key, request.whose, call.deadline)
        return call.change(request, lambda found: value, request.expected)


def _put_many(call: _Call, request: asked.PutMany) -> Result:
    put = asked.Put(request.whose, request.flags)
    if len(call.blobs) % 2:
        raise ProtocolError("a put needs a value")
    return _many(call, 2, lambda one: (_put(one, put), ()))


def _get_many(call: _Call, request: asked.GetMany) -> Result:
    get = asked.Get(request.whose, remote=request.remote)
    return _many(call, 1, lambda one: _get(one, get))


def _many(call: _Call, count: int, make: Callable[[_Call], Result]) -> Result:
    """Do the same for every ``count`` blobs, each with its own outcome."""
    outcomes: list[list[Any]] = []
    answers: list[Buffer] = []
    deadline, late = call.deadline, -1
    for at in range(0, len(call.blobs), count):
        try:
            found, data = make(replace(call, blobs=call.blobs[at : at + count], deadline=deadline))
            late = max(late, found.get("late", -1))
            outcomes.append([None, found, len(data)])
            answers.extend(data)
        except (StaleEpochError, StaleRequestError):
            raise  # for all of them: what was done is of an epoch that is over, or can be done again
        except FlashpointError as error:
            if isinstance(error, DDictFullError):
                deadline = time.monotonic()  # all the others need not wait for room
            outcomes.append([REQUESTS.describe(error), {}, 0])
    return {"outcomes": outcomes, "late": late}, answers


def _add(call: _Call, request: asked.Add) -> Fields:
    before = request.default

    def add(found: Entry | None) -> Value:
        nonlocal before
        if found is not None:
            known = inline_number(found.value.data) if isinstance(found.value, InlineValue) else None
            if known is None:
                raise DDictError("fetch_add needs a number, and the key has another value", manager=call.manager.number)
            before = known
        return InlineValue(number_to_inline(before + request.amount))

    with call.manager.changed:
        call.manager.make_room(_NUMBER_BYTES, call.key, request.whose, call.deadline)
        return {**call.change(request, add), "before": before}


def _delete(call: _Call, request: asked.Delete) -> Fields:
    def delete(found: Entry | None) -> None:
        if found is None:
            raise DDictKeyError("no such key", checkpoint_id=request.whose.checkpoint_id)

    with call.manager.changed:
        return call.change(request, delete, request.expected)


def _clear(call: _Call, request: asked.Clear) -> Fields:
    manager, whose = call.manager, request.whose
    with manager.changed:
        answer = manager.share.check_change(whose)
        for found in list(manager.shard.entries(whose.checkpoint_id)):
            manager.put(Entry(found.key, whose.checkpoint_id, whose.handle, None, found.flags))
    return answer


def _allocate(call: _Call, request: asked.Allocate) -> Fields:
    manager, whose = call.manager, request.whose
    with manager.changed:
        manager.share.check_epoch(whose.epoch)
        manager.share.check_writable()
        manager.shard.check_readable(whose.checkpoint_id)
        manager.make_room(request.nbytes, call.key, whose, call.deadline)
        try:
            reservation = manager.slots.allocate(request.nbytes)
        except CapacityError as error:  # of the filesystem, although it is within the manager's share
            told = {name: getattr(error, name) for name in ("needed_bytes", "available_bytes", "path", "hint")}
            raise DDictFullError(error.message, manager=manager.number, **told) from error
    call.session.reserved.add(reservation.value_id)
    return {"v": reservation.value_id, "path": reservation.path}


def _abandon(call: _Call, request: asked.Abandon) -> Fields:
    if request.value_id in call.session.reserved:
        call.session.reserved.discard(request.value_id)
        call.manager.slots.abandon([request.value_id])
    return {}


def _get(call: _Call, request: asked.Get) -> Result:
    manager, key, checkpoint_id = call.manager, call.key, request.whose.checkpoint_id
    with manager.changed:
        call.manager.share.check_read(request.whose)
        if manager.rules.wait_for_keys and request.wait:
            _wait_for_key(call, key, checkpoint_id)
        entry = call.seen(key, checkpoint_id)
        if entry is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
    value = entry.value  # whose slot is not used again while this refers to it
    answer: Fields = {"s": entry.sequence}
    if isinstance(value, InlineValue):
        return answer, (value.data,)
    assert value is not None
    answer["v"] = value.value_id
    if not request.remote:
        answer["path"] = str(value.slot.path)
        return answer, ()
    with value.slot.buffer[: value.size] as whole:  # a copy, so that nothing keeps it while the network is slow
        return answer, [bytes(piece) for piece in in_pieces(whole)]


def _wait_for_key(call: _Call, key: bytes, checkpoint_id: int) -> None:
    shard = call.manager.shard
    if call.manager.wait_for(lambda: shard.is_written(key, checkpoint_id), call.deadline, call.is_gone):
        return
    if shard.find(key, checkpoint_id) is not None:
        raise DDictTimeoutError(
            f"the key was not written at checkpoint {checkpoint_id} in time", checkpoint_id=checkpoint_id
        )
    raise DDictKeyError("no such key, and none came in time", checkpoint_id=checkpoint_id)


def _contains(call: _Call, request: asked.Contains) -> Fields:
    with call.manager.changed:
        call.manager.share.check_read(request.whose)
        return {"found": call.seen(call.key, request.whose.checkpoint_id) is not None}


def _wait_for(call: _Call, request: asked.WaitFor) -> Fields:
    key = call.key

    def has_changed() -> bool:
        entry = call.seen(key, request.whose.checkpoint_id)
        return entry is not None and entry.sequence != request.seen

    with call.manager.changed:
        call.manager.share.check_read(request.whose)
        return {"ok": call.manager.wait_for(has_changed, call.deadline, call.is_gone)}


def _keys(call: _Call, request: asked.Keys) -> Result:
    """Hold the lock for some keys at a time."""
    manager, checkpoint_id, managers = call.manager, request.whose.checkpoint_id, call.manager.configuration.managers
    with manager.changed:
        call.manager.share.check_read(request.whose)
        manager.shard.check_readable(checkpoint_id)
        newest = manager.shard.newest()
    found = [entry for entry in newest if entry.checkpoint_id <= checkpoint_id and entry.value is not None]
    later = [entry.key for entry in newest if entry.checkpoint_id > checkpoint_id]
    for at in range(0, len(later), _AT_ONCE):
        with manager.changed:
            manager.share.check_epoch(request.whose.epoch)
            seen = (manager.shard.find(key, checkpoint_id) for key in later[at : at + _AT_ONCE])
            found += [entry for entry in seen if entry is not None]
    if manager.rules.wait_for_keys:
        found = [entry for entry in found if entry.is_written_at(checkpoint_id)]
    keys = [
        entry.key
        for entry in found
        if not (request.once and entry.broadcast and place(entry.key, managers) != manager.number)
    ]
    return {"n": len(keys)}, (b"" if request.only_count else b"".join(_LENGTH.pack(len(key)) + key for key in keys),)


_Operation: TypeAlias = "Callable[[_Call, Any], Fields | Result | None]"
_OPERATIONS: Final[dict[type[Request], _Operation]] = {
    asked.Put: _put,
    asked.PutMany: _put_many,
    asked.Add: _add,
    asked.Delete: _delete,
    asked.Clear: _clear,
    asked.Allocate: _allocate,
    asked.Abandon: _abandon,
    asked.Get: _get,
    asked.GetMany: _get_many,
    asked.Contains: _contains,
    asked.WaitFor: _wait_for,
    asked.Keys: _keys,
    # What the coordinator and other managers ask for.
    asked.Hello: lambda call, its: call.manager.hello(),
    asked.Stats: lambda call, its: call.manager.stats(),
    asked.Freeze: lambda call, its: call.manager.freeze(its.frozen, its.number),
    asked.Begin: lambda call, its: call.manager.begin(its),
    asked.Discard: lambda call, its: call.manager.discard(its),
    asked.Prepare: lambda call, its: call.manager.prepare(its),
    asked.Seal: lambda call, its: call.manager.seal(its, call.deadline),
    asked.Settle: lambda call, its: call.manager.settle(its),
    asked.AwaitKeys: lambda call, its: call.manager.await_keys(its.checkpoint_id, call.deadline, call.is_gone),
    asked.Persist: lambda call, its: call.manager.persist(its),
    asked.PrepareRestore: lambda call, its: call.manager.parts.prepare(its.version and version_of(its.version)),
    asked.Replicate: lambda call, its: call.manager.replicate_later(),
    asked.DropCopies: lambda call, its: call.manager.cuts.drop_copies(its),
}
_AT_ANY_TIME: Final = frozenset(
    (
        *(asked.Abandon, asked.Begin, asked.Discard, asked.DropCopies, asked.Freeze),
        *(asked.Hello, asked.Prepare, asked.Seal, asked.Settle, asked.Stats),
    )
)
"""Those that are answered also while the manager recovers; all others wait until it has."""
