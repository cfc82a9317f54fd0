"""What the requests to a manager mean.

Owns the operations by name, and checking their fields: a peer that knows the secret may still be wrong. Each is a
function ``(manager, session, fields, blobs) -> (fields, blobs)``. Times are in seconds; ``t`` is what is left to the
client. ``c`` is a checkpoint, ``w`` the writing handle, ``v`` a value id; the key is the first blob.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ml_flashpoint.core.errors import FlashpointError, ProtocolError
from ml_flashpoint.ddict.checkpoint_persister import PersistedCheckpoint
from ml_flashpoint.ddict.coordinator import Write
from ml_flashpoint.ddict.entries import Entry, InlineValue, StoredValue, Value
from ml_flashpoint.ddict.errors import (
    DDictError,
    DDictFullError,
    DDictKeyError,
    DDictPersistError,
    DDictReadOnlyError,
    DDictTimeoutError,
)
from ml_flashpoint.ddict.keys import MAX_KEY_BYTES, place
from ml_flashpoint.ddict.messages import describe_error
from ml_flashpoint.ddict.values import encode, inline_number, to_inline

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.coordinator import Coordinator
    from ml_flashpoint.ddict.manager import Manager, Session

Fields: TypeAlias = "dict[str, Any]"
Result: TypeAlias = "tuple[Fields, Sequence[Buffer]]"
Operation: TypeAlias = "Callable[[Manager, Session, Fields, list[bytes]], Result]"

OPERATIONS: dict[str, Operation] = {}

PERSISTENT, BROADCAST = 1, 2
"""Flags of a put, field ``f``."""
_LONGEST_S = 1e6
_LOOK_S = 0.25
_NUMBER_BYTES = 100
_LENGTH = struct.Struct(">I")


def _operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__.lstrip("_")] = function
    return function


# ---- data -------------------------------------------------------------------------------------------------


@_operation
def _put(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Write a key: an inline value (blob), one that lies in an arena (``v``), or one to be put there (``v``, blobs).

    With ``x``, only if the key's entry has this sequence number now, 0 for no such key; else ``ok`` is false.
    """
    until = _until(fields)
    manager.wait_until_ready(until)
    key, flags = _key(blobs), _integer(fields, "f") if "f" in fields else 0
    value_id = fields.get("v")
    if value_id is not None:
        _check_own(session, value_id)
        if len(blobs) > 1:
            manager.arenas.fill(value_id, blobs[1:])
        value: Value | None = manager.arenas.adopt(value_id)
        session.allocated.discard(value_id)
    else:
        if len(blobs) < 2:
            raise ProtocolError("a put needs a value")
        value = InlineValue(blobs[1])
    entry = Entry(
        key,
        _integer(fields, "c"),
        _text(fields, "w"),
        value,
        persistent=bool(flags & PERSISTENT),
        broadcast=bool(flags & BROADCAST),
    )
    with manager.changed:
        try:
            if isinstance(value, InlineValue):
                manager.make_room(value.nbytes, until)
            _check_writable(manager)
            if not _is_as_expected(manager, key, fields):
                _release(manager, value)
                return {"ok": False}, ()
            added = manager.put(entry)
        except BaseException:
            _release(manager, value)
            raise
    return {"ok": True, "s": added.sequence}, ()


@_operation
def _add(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Add ``amount`` to a number, which is ``default`` where there is none."""
    until = _until(fields)
    manager.wait_until_ready(until)
    key, checkpoint_id = _key(blobs), _integer(fields, "c")
    amount, before = _number(fields, "amount"), _number(fields, "default")
    with manager.changed:
        manager.make_room(_NUMBER_BYTES, until)
        _check_writable(manager)
        found = manager.shard.find(key, checkpoint_id)
        if found is not None:
            number = inline_number(found.value.data) if isinstance(found.value, InlineValue) else None
            if number is None:
                raise DDictError("fetch_add needs a number, and the key has another value", manager=manager.number)
            before = number
        value = InlineValue(to_inline(encode(before + amount)))
        persistent, broadcast = (found.persistent, found.broadcast) if found else (False, False)
        manager.put(Entry(key, checkpoint_id, _text(fields, "w"), value, persistent, broadcast))
    return {"before": before}, ()


@_operation
def _delete(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Delete a key; ``x`` as for a put."""
    manager.wait_until_ready(_until(fields))
    key, checkpoint_id = _key(blobs), _integer(fields, "c")
    with manager.changed:
        _check_writable(manager)
        found = manager.shard.find(key, checkpoint_id)
        if found is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
        if not _is_as_expected(manager, key, fields):
            return {"ok": False}, ()
        manager.put(Entry(key, checkpoint_id, _text(fields, "w"), None, found.persistent, found.broadcast))
    return {"ok": True}, ()


@_operation
def _allocate(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Room for a value of ``n`` bytes, for the client to fill."""
    until = _until(fields)
    manager.wait_until_ready(until)
    size = _integer(fields, "n")
    with manager.changed:
        _check_writable(manager)
        manager.shard.check_readable(_integer(fields, "c"))
        manager.make_room(size, until)
        room = manager.arenas.allocate(size)
    session.allocated.add(room.value_id)
    return {"v": room.value_id, "path": room.path, "size": room.size}, ()


@_operation
def _abandon(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """The client does not need this room."""
    if fields.get("v") in session.allocated:
        session.allocated.discard(fields["v"])
        manager.arenas.abandon([fields["v"]])
    return {}, ()


@_operation
def _get(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Read a key: a blob, or where the value lies; with ``remote``, always a blob.

    With ``wait``, and a dictionary that waits for keys, it waits for the key to be written at this checkpoint.
    """
    until = _until(fields)
    manager.wait_until_ready(until)
    key, checkpoint_id = _key(blobs), _integer(fields, "c")
    with manager.changed:
        if manager.rules.wait_for_keys and fields.get("wait"):
            _wait_for_key(manager, session, key, checkpoint_id, until)
        entry = manager.shard.find(key, checkpoint_id)
        if entry is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
        value = entry.value
        reader = manager.arenas.reading(value) if isinstance(value, StoredValue) and fields.get("remote") else None
    answer: Fields = {"s": entry.sequence, "p": entry.persistent}
    if isinstance(value, InlineValue):
        return answer, (value.data,)
    assert value is not None
    answer["v"], answer["size"] = value.value_id, value.arena.size
    if reader is None:
        answer["path"] = str(value.arena.path)
        return answer, ()
    with reader as buffer:  # copied, so that nothing keeps the arena while the network is slow
        return answer, (bytes(buffer),)


@_operation
def _contains(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    with manager.changed:
        entry = manager.shard.find(_key(blobs), _integer(fields, "c"))
        return {"found": entry is not None, "s": 0 if entry is None else entry.sequence}, ()


@_operation
def _wait_for(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Wait until a key has an entry other than the one with sequence number ``s``. Returns whether it has."""
    until = _until(fields)
    manager.wait_until_ready(until)
    key, checkpoint_id, seen = _key(blobs), _integer(fields, "c"), _integer(fields, "s")

    def has_changed() -> bool:
        entry = manager.shard.find(key, checkpoint_id)
        return entry is not None and entry.sequence != seen

    with manager.changed:
        return {"ok": manager.wait_for(has_changed, until, session.peer.is_gone)}, ()


@_operation
def _keys(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """All keys at a checkpoint: each with its length before it. With ``once``, what `bput` wrote only at one
    manager."""
    manager.wait_until_ready(_until(fields))
    with manager.changed:
        keys = _visible_keys(manager, fields)
    return {"n": len(keys)}, (b"".join(_LENGTH.pack(len(key)) + key for key in keys),)


@_operation
def _length(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    with manager.changed:
        return {"n": len(_visible_keys(manager, fields))}, ()


@_operation
def _clear(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Delete all keys."""
    manager.wait_until_ready(_until(fields))
    checkpoint_id, writer = _integer(fields, "c"), _text(fields, "w")
    with manager.changed:
        _check_writable(manager)
        for found in list(manager.shard.entries(checkpoint_id)):
            manager.put(Entry(found.key, checkpoint_id, writer, None, found.persistent, found.broadcast))
    return {}, ()


@_operation
def _many(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Several operations on data, ``[[operation, fields, number of blobs], ...]``, each with its own outcome."""
    until = _until(fields)
    outcomes: list[list[Any]] = []
    is_full = False
    answers: list[Buffer] = []
    at = 0
    for each in _list(fields, "ops"):
        if not isinstance(each, list) or len(each) != 3 or each[0] not in ("put", "delete", "get", "contains"):
            raise ProtocolError("not an operation that many can be made of")
        operation, own, count = each
        if not isinstance(own, dict) or type(count) is not int or not 0 <= count <= len(blobs) - at:
            raise ProtocolError("not the fields of an operation")
        own["t"] = 0.0 if is_full else max(0.0, until - time.monotonic())
        try:
            found, data = OPERATIONS[operation](manager, session, own, blobs[at : at + count])
            outcomes.append([None, found, len(data)])
            answers.extend(data)
        except FlashpointError as error:
            is_full = is_full or isinstance(error, DDictFullError)  # all the others need not wait for room
            outcomes.append([describe_error(error), {}, 0])
        at += count
    return {"outcomes": outcomes}, answers


@_operation
def _rollback(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Discard what ``w`` wrote above ``to``."""
    manager.wait_until_ready(_until(fields))
    with manager.changed:
        manager.shard.rollback(_text(fields, "w"), _integer(fields, "to"))
        if manager.waiting:
            manager.changed.notify_all()
    return {}, ()


@_operation
def _freeze(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    with manager.changed:
        manager.frozen = bool(fields.get("frozen"))
    return {}, ()


# ---- the manager itself -----------------------------------------------------------------------------------


@_operation
def _hello(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Who this is. Answered at once, also while the manager recovers."""
    return {
        "manager": manager.number,
        "incarnation": manager.incarnation,
        "transfers": manager.snapshots.address,
    }, ()


@_operation
def _ready(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Answered when the manager has recovered."""
    manager.wait_until_ready(_until(fields))
    return {}, ()


@_operation
def _stats(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    with manager.changed:
        return {
            "manager": manager.number,
            "node": manager.configuration.nodes[manager.number],
            "keys": len(manager.shard),
            "used_bytes": manager.used_bytes,
            "limit_bytes": manager.configuration.limit_bytes,
            "oldest": manager.shard.oldest,
            "sealed": sorted(manager.snapshots.sealed()),
            "frozen": manager.frozen,
        }, ()


@_operation
def _sealed(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {"ids": manager.sealed(_until(fields)), "frozen": manager.frozen, **manager.run_fields()}, ()


@_operation
def _inventory(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {"records": [each.to_json() for each in manager.snapshots.inventory(_integer(fields, "of"))]}, ()


@_operation
def _replicate(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """A holder came back, perhaps without its copies. The answer does not wait for them."""
    manager.wait_until_ready(_until(fields))
    threading.Thread(target=manager.replicate, name="ddict-replicate", daemon=True).start()
    return {}, ()


@_operation
def _drop_copies(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    keep = [str(each) for each in _list(fields, "keep")]
    manager.snapshots.drop_copies(_integer(fields, "of"), keep, _text(fields, "before"))
    return {}, ()


# ---- for the coordinator ----------------------------------------------------------------------------------


@_operation
def _prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    manager.prepare(_integer(fields, "checkpoint_id"))
    return {"incarnation": manager.incarnation}, ()


@_operation
def _seal(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.seal(_integer(fields, "checkpoint_id"), _until(fields))
    return {"incarnation": manager.incarnation}, ()


@_operation
def _abort(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    given_up = _integer(fields, "checkpoint_id")
    manager.unprepare(lambda each: each != given_up)
    return {}, ()


@_operation
def _settle(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    manager.settle(
        _integer(fields, "oldest"), _list(fields, "keep"), _list(fields, "pinned"), _integer(fields, "committed", -1)
    )
    return {}, ()


@_operation
def _forget(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    manager.forget(_integer(fields, "above", -1))
    return {}, ()


@_operation
def _complete(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Wait until all keys of a checkpoint are written again at a later one."""
    until = _until(fields)
    manager.wait_until_ready(until)
    checkpoint_id = _integer(fields, "checkpoint_id")
    with manager.changed:
        if not manager.wait_for(
            lambda: manager.shard.missing_after(checkpoint_id) is None, until, session.peer.is_gone
        ):
            raise DDictTimeoutError(
                f"checkpoint {checkpoint_id} cannot retire: not all of its keys are written at a later one, "
                f"such as {manager.shard.missing_after(checkpoint_id)!r}",
                manager=manager.number,
                checkpoint_id=checkpoint_id,
                hint="write every key at each checkpoint, or once with pput()",
            )
    return {}, ()


@_operation
def _persist(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {"receipt": manager.persist(_integer(fields, "checkpoint_id"))}, ()


@_operation
def _restore_prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(_until(fields))
    manager.restore_prepare(PersistedCheckpoint.from_fields(fields["checkpoint"]))
    return {}, ()


@_operation
def _restore_abort(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.restore_abort()
    return {}, ()


@_operation
def _restore_commit(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.restore_commit(_integer(fields, "checkpoint_id"), _text(fields, "run"), fields["checkpoint"])
    return {}, ()


# ---- to the coordinator -----------------------------------------------------------------------------------


@_operation
def _lease(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Keep the handles alive that join with this lease, for as long as this connection lasts."""
    coordinator = _coordinator(manager, fields)
    session.lease = _text(fields, "lease")
    coordinator.lease_began(session.lease, session)
    return {}, ()


@_operation
def _watch(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Answer when time is up. Meanwhile the end of either process is noticed by the other."""
    until = time.monotonic() + _integer(fields, "s")
    while time.monotonic() < until and not manager.ended.wait(_LOOK_S) and not session.peer.is_gone():
        pass
    return {}, ()


@_operation
def _note(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """A handle that has not joined wrote something."""
    return {**_coordinator(manager, fields).note(_wrote(fields)), "run": manager.run_id}, ()


@_operation
def _join(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    return coordinator.join(_text(fields, "w"), _text(fields, "lease"), _integer(fields, "c"), _wrote(fields)), ()


@_operation
def _move(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    state = coordinator.move(
        _text(fields, "w"), _text(fields, "lease"), _integer(fields, "c"), _wrote(fields), _left(fields)
    )
    return {**state, "run": manager.run_id}, ()


@_operation
def _go_back(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    lease = None if fields.get("lease") is None else _text(fields, "lease")
    return coordinator.rollback(_text(fields, "w"), lease, _integer(fields, "c"), _wrote(fields), _left(fields)), ()


@_operation
def _leave(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields).leave(_text(fields, "w"))
    return {}, ()


@_operation
def _newest(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {**_coordinator(manager, fields).newest(_left(fields)), "run": manager.run_id}, ()


@_operation
def _state(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    state = _coordinator(manager, fields).state()
    return {**state, "frozen": manager.frozen, **manager.run_fields()}, ()


@_operation
def _recovering(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Where the dictionary is, for a manager that goes on from there."""
    number, incarnation = _integer(fields, "manager"), _text(fields, "incarnation")
    if not number < manager.configuration.managers:
        raise ProtocolError("there is no such manager")
    state = _coordinator(manager, fields).recovering(number, incarnation)
    return {**state, "frozen": manager.frozen, **manager.run_fields()}, ()


@_operation
def _persist_newest(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    if not manager.persister.persists:
        raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
    return {"checkpoint_id": _coordinator(manager, fields).persist_newest(_left(fields))}, ()


@_operation
def _persisted_ids(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields)
    return {"ids": manager.persister.ids()}, ()


@_operation
def _restore(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields)
    manager.restore(_integer(fields, "checkpoint_id"), _until(fields))
    return {}, ()


# ---- fields -----------------------------------------------------------------------------------------------


def _coordinator(manager: Manager, fields: Fields) -> Coordinator:
    manager.wait_until_ready(_until(fields))
    if manager.coordinator is None:
        raise ProtocolError(f"manager {manager.number} is not the main manager")
    return manager.coordinator


def _left(fields: Fields) -> float:
    left = fields.get("t")
    if not isinstance(left, (int, float)) or not 0 <= left <= _LONGEST_S:
        raise ProtocolError("field 't' must be the seconds that are left")
    return float(left)


def _until(fields: Fields) -> float:
    return time.monotonic() + _left(fields)


def _integer(fields: Fields, name: str, least: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value < 1 << 63:
        raise ProtocolError(f"field {name!r} must be an integer from {least}")
    return value


def _number(fields: Fields, name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ProtocolError(f"field {name!r} must be a number")
    return value


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > 200:
        raise ProtocolError(f"field {name!r} must be a short text")
    return value


def _list(fields: Fields, name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise ProtocolError(f"field {name!r} must be a list")
    return value


def _wrote(fields: Fields) -> list[Write]:
    found = []
    for each in _list(fields, "wrote"):
        if not (isinstance(each, list) and [type(part) for part in each] == [int, str, int, bool]):
            raise ProtocolError("field 'wrote' must list writes")
        found.append(Write(*each))
    return found


def _key(blobs: list[bytes]) -> bytes:
    if not blobs or not 0 < len(blobs[0]) <= MAX_KEY_BYTES:
        raise ProtocolError("a key must come first")
    return blobs[0]


def _check_own(session: Session, value_id: object) -> None:
    if value_id not in session.allocated:
        raise ProtocolError(f"this connection has no room called {value_id!a}")


def _release(manager: Manager, value: Value | None) -> None:
    if isinstance(value, StoredValue):
        manager.arenas.release(value)


def _check_writable(manager: Manager) -> None:
    if manager.frozen:
        raise DDictReadOnlyError("the dictionary is frozen", manager=manager.number, hint="unfreeze() it first")
    if manager.configuration.read_only:
        raise DDictReadOnlyError("the dictionary is read-only", manager=manager.number)


def _is_as_expected(manager: Manager, key: bytes, fields: Fields) -> bool:
    if "x" not in fields:
        return True
    entry = manager.shard.find(key, _integer(fields, "c"))
    return (0 if entry is None else entry.sequence) == _integer(fields, "x")


def _wait_for_key(manager: Manager, session: Session, key: bytes, checkpoint_id: int, until: float) -> None:
    if manager.wait_for(lambda: manager.shard.is_written(key, checkpoint_id), until, session.peer.is_gone):
        return
    if manager.shard.find(key, checkpoint_id) is not None:
        raise DDictTimeoutError(
            f"the key was not written at checkpoint {checkpoint_id} in time", checkpoint_id=checkpoint_id
        )
    raise DDictKeyError("no such key, and none came in time", checkpoint_id=checkpoint_id)


def _visible_keys(manager: Manager, fields: Fields) -> list[bytes]:
    count = manager.configuration.managers
    once = bool(fields.get("once"))
    return [
        entry.key
        for entry in manager.shard.entries(_integer(fields, "c"))
        if not (once and entry.broadcast and place(entry.key, count) != manager.number)
    ]
