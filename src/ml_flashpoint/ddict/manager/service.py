"""A manager as clients, other managers and the coordinator reach it: its server, and the meaning of each request.

Owns reading and writing the shard for clients. On a Unix socket each side also checks that the other runs as the same
user.
"""

from __future__ import annotations

import contextlib
import struct
import sys
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
    DDictReadOnlyError,
    DDictTimeoutError,
    StaleEpochError,
    StaleRequestError,
)
from ml_flashpoint.ddict.manager.manager import Manager
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, Entry, InlineValue, Value
from ml_flashpoint.ddict.manager.slots import in_pieces, inline_number, number_to_inline
from ml_flashpoint.ddict.wire import requests as asked
from ml_flashpoint.ddict.wire.keys import MAX_KEY_BYTES, place
from ml_flashpoint.ddict.wire.requests import Request, Result, Whose
from ml_flashpoint.format.errors import CapacityError, FlashpointError, ProtocolError
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.server import Peer, RequestServer
from ml_flashpoint.stores.durable import version_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NUMBER_BYTES: Final = 100
_AT_ONCE: Final = 2000  # keys that are looked at under one lock
_LENGTH: Final = struct.Struct(">I")


@dataclass(eq=False, slots=True)
class Session:
    """A connection of a client or another manager."""

    peer: Peer
    reserved: set[str] = field(default_factory=set)  # values that it has a reservation for and has not put yet


class ManagerService:
    """See the module. Serves from construction until `close`. ``config``: see `Manager`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._manager = manager = Manager(config)
        configuration = manager.configuration
        unix_path, host = str(Path(configuration.base, f"m-{manager.number}.sock")), config.get("host")
        try:
            self._server = RequestServer(configuration.secret, self, REQUESTS, unix_path=unix_path, tcp_host=host)
            manager.begin_at(self._server.addresses)
        except BaseException:
            manager.close()
            raise

    def close(self) -> None:
        """Stop serving. Files stay where they are."""
        self._manager.ended.set()
        self._server.close()
        self._manager.close()

    def open(self, peer: Peer) -> Session:
        """See `RequestHandler`."""
        return Session(peer)

    def handle(self, session: Session, operation: str, fields: Fields, blobs: list[bytes]) -> Result:
        """See `RequestHandler`."""
        manager = self._manager
        request, deadline = asked.decode(operation, fields)
        found = _OPERATIONS.get(type(request))
        if found is None:
            raise ProtocolError(f"a manager has no operation {operation!a}")
        if not manager.is_ready and type(request) not in _AT_ANY_TIME:
            manager.wait_until_ready(deadline)
        try:
            return found(_Call(manager, session, blobs, deadline), request)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # which refer to values, for as long as the error is anywhere
            raise
        finally:
            manager.slots.collect()

    def closed(self, session: Session) -> None:
        """See `RequestHandler`."""
        self._manager.slots.abandon(session.reserved)


@dataclass(slots=True)
class _Call:
    """A request: its receiver, and what it comes with."""

    manager: Manager
    session: Session
    blobs: list[bytes]
    deadline: float

    @property
    def key(self) -> bytes:
        """The key, which comes first."""
        if not self.blobs or not 0 < len(self.blobs[0]) <= MAX_KEY_BYTES:
            raise ProtocolError("a key must come first")
        return self.blobs[0]

    def check_read(self, whose: Whose) -> None:
        """Refuse a read of another epoch, and what its handle gave up before. Under the lock, just before the read."""
        self.manager.check_epoch(whose.epoch)
        with contextlib.suppress(StaleRequestError):  # a read that comes late does no harm
            self.manager.fence.hear(whose.handle, whose.generation, self.manager.epoch)

    def check_change(self, whose: Whose) -> Fields:
        """Refuse a change that came too late, or may not be made. Under the lock, just before the change. Return what
        all changes answer."""
        manager = self.manager
        manager.check_epoch(whose.epoch)
        manager.fence.hear(whose.handle, whose.generation, manager.epoch)
        if manager.is_dead(whose.handle):
            raise StaleEpochError("the connection of this handle's process broke", manager=manager.number)
        self.check_writable()
        return manager.late_for(whose.checkpoint_id)

    def check_writable(self) -> None:
        """Refuse writes where none may be made."""
        if self.manager.frozen:
            raise DDictReadOnlyError(
                "the dictionary is frozen", manager=self.manager.number, hint="unfreeze() it first"
            )
        if self.manager.rules.read_only:
            raise DDictReadOnlyError("the dictionary is read-only", manager=self.manager.number)

    def seen(self, key: bytes, checkpoint_id: int) -> Entry | None:
        """Return the entry that a reader sees who does not wait; where keys are waited for, none that has to be written
        yet."""
        return self.manager.shard.find(key, checkpoint_id, written=self.manager.rules.wait_for_keys)

    def is_as_expected(self, key: bytes, checkpoint_id: int, expected: int) -> bool:
        """Return True if a key's entry has this number; 0: if there is none; -1: in any case."""
        entry = None if expected < 0 else self.seen(key, checkpoint_id)
        return expected < 0 or (0 if entry is None else entry.sequence) == expected


def _others(found: Entry | None, flags: int) -> Fields:
    """Return what tells a client to change a key at the other managers, too."""
    return {"b": True} if found is not None and found.broadcast and not flags & (BROADCAST | DIRECT) else {}


# ---- what clients ask for -------------------------------------------------------------------------------------------


def _put(call: _Call, request: asked.Put) -> Result:
    manager, key, blobs = call.manager, call.key, call.blobs
    value_id, reserved = request.value_id, call.session.reserved
    checkpoint_id, writer = request.whose.checkpoint_id, sys.intern(request.whose.handle)  # one text for all entries
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
            manager.make_room(value.nbytes, key, checkpoint_id, writer, call.deadline)
        answer = call.check_change(request.whose)
        if not call.is_as_expected(key, checkpoint_id, request.expected):
            return {"ok": False, **answer}, ()
        others = _others(manager.shard.find(key, checkpoint_id), request.flags)
        flags = request.flags | BROADCAST if others else request.flags
        manager.put(Entry(key, checkpoint_id, writer, value, flags))
    return {"ok": True, **others, **answer}, ()


def _put_many(call: _Call, request: asked.PutMany) -> Result:
    put = asked.Put(request.whose, request.flags)
    if len(call.blobs) % 2:
        raise ProtocolError("a put needs a value")
    return _many(call, 2, lambda one: _put(one, put))


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


def _add(call: _Call, request: asked.Add) -> Result:
    manager, key, before = call.manager, call.key, request.default
    checkpoint_id, writer = request.whose.checkpoint_id, request.whose.handle
    with manager.changed:
        manager.make_room(_NUMBER_BYTES, key, checkpoint_id, writer, call.deadline)
        answer = call.check_change(request.whose)
        found = manager.shard.find(key, checkpoint_id)
        if found is not None:
            known = inline_number(found.value.data) if isinstance(found.value, InlineValue) else None
            if known is None:
                raise DDictError("fetch_add needs a number, and the key has another value", manager=manager.number)
            before = known
        value = InlineValue(number_to_inline(before + request.amount))
        manager.put(Entry(key, checkpoint_id, writer, value, found.flags if found else request.flags))
    return {"before": before, **_others(found, request.flags), **answer}, ()


def _delete(call: _Call, request: asked.Delete) -> Result:
    manager, key, checkpoint_id = call.manager, call.key, request.whose.checkpoint_id
    with manager.changed:
        answer = call.check_change(request.whose)
        found = manager.shard.find(key, checkpoint_id)
        if found is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
        if not call.is_as_expected(key, checkpoint_id, request.expected):
            return {"ok": False}, ()
        manager.put(Entry(key, checkpoint_id, request.whose.handle, None, found.flags))
    return {"ok": True, **_others(found, request.flags), **answer}, ()


def _clear(call: _Call, request: asked.Clear) -> Result:
    manager, whose = call.manager, request.whose
    with manager.changed:
        answer = call.check_change(whose)
        for found in list(manager.shard.entries(whose.checkpoint_id)):
            manager.put(Entry(found.key, whose.checkpoint_id, whose.handle, None, found.flags))
    return answer, ()


def _allocate(call: _Call, request: asked.Allocate) -> Result:
    manager, whose = call.manager, request.whose
    with manager.changed:
        manager.check_epoch(whose.epoch)
        call.check_writable()
        manager.shard.check_readable(whose.checkpoint_id)
        manager.make_room(request.nbytes, call.key, whose.checkpoint_id, whose.handle, call.deadline)
        try:
            reservation = manager.slots.allocate(request.nbytes)
        except CapacityError as error:  # of the filesystem, although it is within the manager's share
            told = {name: getattr(error, name) for name in ("needed_bytes", "available_bytes", "path", "hint")}
            raise DDictFullError(error.message, manager=manager.number, **told) from error
    call.session.reserved.add(reservation.value_id)
    return {"v": reservation.value_id, "path": reservation.path, "size": reservation.size}, ()


def _abandon(call: _Call, request: asked.Abandon) -> Result:
    if request.value_id in call.session.reserved:
        call.session.reserved.discard(request.value_id)
        call.manager.slots.abandon([request.value_id])
    return {}, ()


def _get(call: _Call, request: asked.Get) -> Result:
    manager, key, checkpoint_id = call.manager, call.key, request.whose.checkpoint_id
    with manager.changed:
        call.check_read(request.whose)
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
    answer["v"], answer["size"] = value.value_id, value.slot.size
    if not request.remote:
        answer["path"] = str(value.slot.path)
        return answer, ()
    with value.slot.buffer[: value.size] as whole:  # a copy, so that nothing keeps it while the network is slow
        return answer, [bytes(piece) for piece in in_pieces(whole)]


def _wait_for_key(call: _Call, key: bytes, checkpoint_id: int) -> None:
    shard = call.manager.shard
    if call.manager.wait_for(lambda: shard.is_written(key, checkpoint_id), call.deadline, call.session.peer.is_gone):
        return
    if shard.find(key, checkpoint_id) is not None:
        raise DDictTimeoutError(
            f"the key was not written at checkpoint {checkpoint_id} in time", checkpoint_id=checkpoint_id
        )
    raise DDictKeyError("no such key, and none came in time", checkpoint_id=checkpoint_id)


def _contains(call: _Call, request: asked.Contains) -> Result:
    with call.manager.changed:
        call.check_read(request.whose)
        return {"found": call.seen(call.key, request.whose.checkpoint_id) is not None}, ()


def _wait_for(call: _Call, request: asked.WaitFor) -> Result:
    key = call.key

    def has_changed() -> bool:
        entry = call.seen(key, request.whose.checkpoint_id)
        return entry is not None and entry.sequence != request.seen

    with call.manager.changed:
        call.check_read(request.whose)
        return {"ok": call.manager.wait_for(has_changed, call.deadline, call.session.peer.is_gone)}, ()


def _keys(call: _Call, request: asked.Keys) -> Result:
    """Hold the lock for some keys at a time."""
    manager, checkpoint_id, managers = call.manager, request.whose.checkpoint_id, call.manager.configuration.managers
    with manager.changed:
        call.check_read(request.whose)
        manager.shard.check_readable(checkpoint_id)
        newest = manager.shard.newest()
    found = [entry for entry in newest if entry.checkpoint_id <= checkpoint_id and entry.value is not None]
    later = [entry.key for entry in newest if entry.checkpoint_id > checkpoint_id]
    for at in range(0, len(later), _AT_ONCE):
        with manager.changed:
            manager.check_epoch(request.whose.epoch)
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


# ---- what the coordinator and other managers ask for ----------------------------------------------------------------


def _telling(method: Callable[[Manager], Fields]) -> Callable[[_Call, Any], Result]:
    return lambda call, request: (method(call.manager), ())


def _having(method: Callable[[Manager, Any], None]) -> Callable[[_Call, Any], Result]:
    def have(call: _Call, request: Request) -> Result:
        method(call.manager, request)
        return {}, ()

    return have


def _seal(call: _Call, request: asked.Seal) -> Result:
    return {"name": call.manager.seal(request, call.deadline)}, ()


def _await_keys(call: _Call, request: asked.AwaitKeys) -> Result:
    call.manager.wait_for_keys(request.checkpoint_id, call.deadline, call.session.peer.is_gone)
    return {}, ()


_Operation: TypeAlias = Callable[[_Call, Any], Result]
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
    asked.Hello: _telling(Manager.hello),
    asked.Stats: _telling(Manager.stats),
    asked.Freeze: _having(lambda manager, request: manager.freeze(request.frozen, request.number)),
    asked.Begin: _having(lambda manager, request: manager.begin(request)),
    asked.Discard: _having(Manager.discard),
    asked.Prepare: _having(Manager.prepare),
    asked.Seal: _seal,
    asked.Settle: _having(Manager.settle),
    asked.AwaitKeys: _await_keys,
    asked.Persist: _having(Manager.persist),
    asked.PrepareRestore: _having(lambda manager, request: manager.parts.prepare(version_of(request.version))),
    asked.AbortRestore: _having(lambda manager, request: manager.parts.abort()),
    asked.Replicate: _having(lambda manager, request: manager.replicate_later()),
    asked.DropCopies: _having(
        lambda manager, request: manager.snapshots.drop_copies(request.of, request.keep, request.before)
    ),
}
_AT_ANY_TIME: Final = frozenset(
    (
        *(asked.Abandon, asked.Begin, asked.Discard, asked.DropCopies, asked.Freeze),
        *(asked.Hello, asked.Prepare, asked.Seal, asked.Settle, asked.Stats),
    )
)
"""Those that are answered also while the manager recovers; all others wait until it has."""
