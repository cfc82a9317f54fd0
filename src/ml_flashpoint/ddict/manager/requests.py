"""What the requests to a manager mean.

Owns the registry of a manager's operations, and reading and writing the shard for clients. Layout, handshake and
connections are those of `ml_flashpoint.net`; on a Unix socket each side also checks that the other runs as the same
user, on TCP each message carries a code.

An operation on keys and values is a function ``(manager, session, fields, blobs) -> (fields, blobs)``; what else is
asked of managers, and of the coordinator, their methods answer. Times are in seconds; ``t`` is what is left to the
client. ``c`` is a checkpoint, ``f`` the flags of a new entry (`shard.Entry`), ``w`` the writing handle, ``g`` the
generation of its request, ``e`` the epoch, ``v`` a value id; the key is the first blob.
"""

from __future__ import annotations

import contextlib
import struct
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

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
from ml_flashpoint.ddict.manager.part_ref import PartRef, part_ref
from ml_flashpoint.ddict.manager.shard import BROADCAST, DIRECT, Entry, InlineValue, Value
from ml_flashpoint.ddict.manager.slots import in_pieces, inline_number, number_to_inline
from ml_flashpoint.ddict.options import check_checkpoint_id
from ml_flashpoint.ddict.wire.fields import ARGUMENTS, Result, asking, deadline_of
from ml_flashpoint.ddict.wire.keys import MAX_KEY_BYTES, place
from ml_flashpoint.format.errors import CapacityError, FlashpointError, ProtocolError
from ml_flashpoint.net.messages import Fields, integer, list_of, number, text
from ml_flashpoint.stores.durable import version_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from ml_flashpoint.ddict.manager.manager import Manager, Session

Operation: TypeAlias = "Callable[[Manager, Session, Fields, list[bytes]], Result]"

OPERATIONS: dict[str, Operation] = {}  # by name
AT_ONCE: Final = frozenset(
    ("abandon", "begin", "discard", "drop_copies", "freeze", "hello", "prepare", "seal", "settle", "stats")
)
"""Those that are answered also while the manager recovers; all others wait until it has."""
_NUMBER_BYTES = 100
_AT_ONCE = 2000  # keys that are looked at under one lock
_LENGTH = struct.Struct(">I")


def operation(function: Operation) -> Operation:
    """Enter a function under its name, without the underscore."""
    OPERATIONS[function.__name__.lstrip("_")] = function
    return function


class SealedPart(NamedTuple):
    """The snapshot that a manager has of a cut, whose number is its step."""

    ref: PartRef
    checkpoint_id: int


def sealed_part(name: object, cut: object, checkpoint_id: object) -> SealedPart:
    """A sealed part as the coordinator tells of it."""
    return SealedPart(part_ref(name, cut), check_checkpoint_id(checkpoint_id))


@operation
def _put(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Write a key: an inline value (blob), one that lies in a slot (``v``), or one to be put there (``v``, blobs).

    With ``x``, only if the key's entry has this sequence number now, 0 for no such key; else ``ok`` is false. ``b`` in
    the answer of a change: `bput` wrote the key, so the client is to make the change at all other managers.
    """
    deadline = deadline_of(fields)
    key, flags = _key(blobs), _flags(fields)
    checkpoint_id, writer = integer(fields, "c"), sys.intern(text(fields, "w"))  # one text for all of its entries
    value_id = fields.get("v")
    if value_id is not None:
        if value_id not in session.reserved:
            raise ProtocolError(f"this connection has no reservation called {value_id!a}")
        if len(blobs) > 1:
            manager.slots.fill(value_id, blobs[1:])
    elif len(blobs) < 2:
        raise ProtocolError("a put needs a value")
    with manager.changed:
        if value_id is None:
            value: Value = InlineValue(blobs[1])
            manager.make_room(value.nbytes, key, checkpoint_id, writer, deadline)
        else:
            value = manager.slots.adopt(value_id)
            session.reserved.discard(value_id)
        answer = _check_change(manager, fields)
        if not _is_as_expected(manager, key, fields):
            return {"ok": False, **answer}, ()
        others = _others(manager.shard.find(key, checkpoint_id), flags)
        manager.put(Entry(key, checkpoint_id, writer, value, flags | BROADCAST if others else flags))
    return {"ok": True, **others, **answer}, ()


@operation
def _add(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Add ``amount`` to a number, which is ``default`` where there is none."""
    deadline = deadline_of(fields)
    key, checkpoint_id, writer = _key(blobs), integer(fields, "c"), text(fields, "w")
    amount, before = number(fields, "amount"), number(fields, "default")
    with manager.changed:
        manager.make_room(_NUMBER_BYTES, key, checkpoint_id, writer, deadline)
        answer = _check_change(manager, fields)
        found = manager.shard.find(key, checkpoint_id)
        if found is not None:
            known = inline_number(found.value.data) if isinstance(found.value, InlineValue) else None
            if known is None:
                raise DDictError("fetch_add needs a number, and the key has another value", manager=manager.number)
            before = known
        value = InlineValue(number_to_inline(before + amount))
        manager.put(Entry(key, checkpoint_id, writer, value, found.flags if found else _flags(fields)))
    return {"before": before, **_others(found, _flags(fields)), **answer}, ()


@operation
def _delete(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Delete a key; ``x`` as for a put."""
    key, checkpoint_id = _key(blobs), integer(fields, "c")
    with manager.changed:
        answer = _check_change(manager, fields)
        found = manager.shard.find(key, checkpoint_id)
        if found is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
        if not _is_as_expected(manager, key, fields):
            return {"ok": False}, ()
        manager.put(Entry(key, checkpoint_id, text(fields, "w"), None, found.flags))
    return {"ok": True, **_others(found, _flags(fields)), **answer}, ()


@operation
def _allocate(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Room for a value of ``n`` bytes of this key, for the client to fill."""
    deadline = deadline_of(fields)
    size, checkpoint_id = integer(fields, "n"), integer(fields, "c")
    with manager.changed:
        manager.check_epoch(fields.get("e"))
        _check_writable(manager)
        manager.shard.check_readable(checkpoint_id)
        manager.make_room(size, _key(blobs), checkpoint_id, text(fields, "w"), deadline)
        try:
            reservation = manager.slots.allocate(size)
        except CapacityError as error:  # of the filesystem, although it is within the manager's share
            told = {name: getattr(error, name) for name in ("needed_bytes", "available_bytes", "path", "hint")}
            raise DDictFullError(error.message, manager=manager.number, **told) from error
    session.reserved.add(reservation.value_id)
    return {"v": reservation.value_id, "path": reservation.path, "size": reservation.size}, ()


@operation
def _abandon(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """The client does not need this reservation."""
    if fields.get("v") in session.reserved:
        session.reserved.discard(fields["v"])
        manager.slots.abandon([fields["v"]])
    return {}, ()


@operation
def _get(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Read a key: a blob, or where the value lies; with ``remote``, always a blob.

    With ``wait``, and a dictionary that waits for keys, it waits for the key to be written at this checkpoint.
    """
    key, checkpoint_id = _key(blobs), integer(fields, "c")
    with manager.changed:
        _check_read(manager, fields)
        if manager.rules.wait_for_keys and fields.get("wait"):
            _wait_for_key(manager, session, key, checkpoint_id, deadline_of(fields))
        entry = _seen(manager, key, checkpoint_id)
        if entry is None:
            raise DDictKeyError("no such key", checkpoint_id=checkpoint_id)
    value = entry.value  # whose slot is not used again while this refers to it
    answer: Fields = {"s": entry.sequence}
    if isinstance(value, InlineValue):
        return answer, (value.data,)
    assert value is not None
    answer["v"], answer["size"] = value.value_id, value.slot.size
    if not fields.get("remote"):
        answer["path"] = str(value.slot.path)
        return answer, ()
    with value.slot.buffer[: value.size] as whole:  # a copy, so that nothing keeps it while the network is slow
        return answer, [bytes(piece) for piece in in_pieces(whole)]


@operation
def _contains(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    with manager.changed:
        _check_read(manager, fields)
        entry = _seen(manager, _key(blobs), integer(fields, "c"))
        return {"found": entry is not None}, ()


@operation
def _wait_for(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Wait until a key has an entry other than the one with sequence number ``s``. Returns whether it has."""
    deadline = deadline_of(fields)
    key, checkpoint_id, seen = _key(blobs), integer(fields, "c"), integer(fields, "s")

    def has_changed() -> bool:
        entry = _seen(manager, key, checkpoint_id)
        return entry is not None and entry.sequence != seen

    with manager.changed:
        _check_read(manager, fields)
        return {"ok": manager.wait_for(has_changed, deadline, session.peer.is_gone)}, ()


@operation
def _keys(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """All keys at a checkpoint: each with its length before it; with ``count``, only how many. With ``once``, what
    `bput` wrote only at one manager. Holds the lock for some keys at a time."""
    count, once, checkpoint_id = manager.configuration.managers, bool(fields.get("once")), integer(fields, "c")
    with manager.changed:
        _check_read(manager, fields)
        manager.shard.check_readable(checkpoint_id)
        newest = manager.shard.newest()
    found = [entry for entry in newest if entry.checkpoint_id <= checkpoint_id and entry.value is not None]
    later = [entry.key for entry in newest if entry.checkpoint_id > checkpoint_id]
    for at in range(0, len(later), _AT_ONCE):
        with manager.changed:
            manager.check_epoch(fields.get("e"))
            seen = (manager.shard.find(key, checkpoint_id) for key in later[at : at + _AT_ONCE])
            found += [entry for entry in seen if entry is not None]
    if manager.rules.wait_for_keys:
        found = [entry for entry in found if entry.is_written_at(checkpoint_id)]
    keys = [
        entry.key for entry in found if not (once and entry.broadcast and place(entry.key, count) != manager.number)
    ]
    told = b"" if fields.get("count") else b"".join(_LENGTH.pack(len(key)) + key for key in keys)
    return {"n": len(keys)}, (told,)


@operation
def _clear(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Delete all keys."""
    checkpoint_id, writer = integer(fields, "c"), text(fields, "w")
    with manager.changed:
        answer = _check_change(manager, fields)
        for found in list(manager.shard.entries(checkpoint_id)):
            manager.put(Entry(found.key, checkpoint_id, writer, None, found.flags))
    return answer, ()


@operation
def _many(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Several operations on data, ``[[operation, fields, number of blobs], ...]``, each with its own outcome. Fields
    that they have in common come with the request itself."""
    deadline = deadline_of(fields)
    outcomes: list[list[Any]] = []
    is_full, late = False, -1
    answers: list[Buffer] = []
    at = 0
    for each in list_of(fields, "ops"):
        if not isinstance(each, list) or len(each) != 3 or each[0] not in ("put", "delete", "get", "contains"):
            raise ProtocolError("not an operation that many can be made of")
        operation, own, count = each
        if not isinstance(own, dict) or type(count) is not int or not 0 <= count <= len(blobs) - at:
            raise ProtocolError("not the fields of an operation")
        own = {**fields, **own}
        own["t"] = 0.0 if is_full else max(0.0, deadline - time.monotonic())
        try:
            found, data = OPERATIONS[operation](manager, session, own, blobs[at : at + count])
            late = max(late, found.get("late", -1))
            outcomes.append([None, found, len(data)])
            answers.extend(data)
        except (StaleEpochError, StaleRequestError):
            raise  # for all of them: what was done is of an epoch that is over, or can be done again
        except FlashpointError as error:
            is_full = is_full or isinstance(error, DDictFullError)  # all the others need not wait for room
            outcomes.append([REQUESTS.describe(error), {}, 0])
        at += count
    return {"outcomes": outcomes, "late": late}, answers


def _key(blobs: list[bytes]) -> bytes:
    if not blobs or not 0 < len(blobs[0]) <= MAX_KEY_BYTES:
        raise ProtocolError("a key must come first")
    return blobs[0]


def _check_read(manager: Manager, fields: Fields) -> None:
    """Under the lock, immediately before a read: refuse one of another epoch, and what its handle gave up before."""
    manager.check_epoch(fields.get("e"))
    if "g" in fields:
        with contextlib.suppress(StaleRequestError):  # a read that comes late does no harm
            manager.fence.hear(text(fields, "w"), integer(fields, "g"), manager.epoch)


def _check_change(manager: Manager, fields: Fields) -> Fields:
    """Under the lock, immediately before a change: refuse one that came too late, or may not be made. Return what all
    changes answer; see `Manager.late_for`."""
    manager.check_epoch(fields.get("e"))
    handle = text(fields, "w")
    manager.fence.hear(handle, integer(fields, "g"), manager.epoch)
    if manager.is_dead(handle):
        raise StaleEpochError("the connection of this handle's process broke", manager=manager.number)
    _check_writable(manager)
    return manager.late_for(integer(fields, "c"))


def _check_writable(manager: Manager) -> None:
    if manager.frozen:
        raise DDictReadOnlyError("the dictionary is frozen", manager=manager.number, hint="unfreeze() it first")
    if manager.rules.read_only:
        raise DDictReadOnlyError("the dictionary is read-only", manager=manager.number)


def _seen(manager: Manager, key: bytes, checkpoint_id: int) -> Entry | None:
    """The entry that a reader sees who does not wait; where keys are waited for, none that has to be written yet."""
    return manager.shard.find(key, checkpoint_id, written=manager.rules.wait_for_keys)


def _flags(fields: Fields) -> int:
    return integer(fields, "f") if "f" in fields else 0


def _others(found: Entry | None, flags: int) -> Fields:
    """What tells a client to change a key at the other managers, too."""
    return {"b": True} if found is not None and found.broadcast and not flags & (BROADCAST | DIRECT) else {}


def _is_as_expected(manager: Manager, key: bytes, fields: Fields) -> bool:
    if "x" not in fields:
        return True
    entry = _seen(manager, key, integer(fields, "c"))
    return (0 if entry is None else entry.sequence) == integer(fields, "x")


def _wait_for_key(manager: Manager, session: Session, key: bytes, checkpoint_id: int, deadline: float) -> None:
    if manager.wait_for(lambda: manager.shard.is_written(key, checkpoint_id), deadline, session.peer.is_gone):
        return
    if manager.shard.find(key, checkpoint_id) is not None:
        raise DDictTimeoutError(
            f"the key was not written at checkpoint {checkpoint_id} in time", checkpoint_id=checkpoint_id
        )
    raise DDictKeyError("no such key, and none came in time", checkpoint_id=checkpoint_id)


# ---- what peers and the coordinator ask for -----------------------------------------------------------------


ARGUMENTS |= {
    "restored": lambda session, fields: version_of(found) if (found := fields["restored"]) else None,
    "version": lambda session, fields: version_of(fields["version"]),
    "sealed": lambda session, fields: [sealed_part(*each) for each in list_of(fields, "sealed")],
}

OPERATIONS |= {name: asking(name) for name in ("begin", "discard", "freeze", "hello", "prepare", "settle", "stats")}
OPERATIONS |= {
    "complete": asking("wait_for_keys"),
    "drop_copies": asking("snapshots.drop_copies"),
    "persist": asking("persist"),
    "replicate": asking("replicate_later"),
    "restore_abort": asking("parts.abort"),
    "restore_prepare": asking("parts.prepare"),
    "seal": asking("seal", gives="attempt"),
}
