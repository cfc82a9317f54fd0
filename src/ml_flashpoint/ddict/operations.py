"""What the requests for everything but keys and values mean: what peers, coordinators and handles' checkpoints ask for.

Importing it completes the registry of operations. See `request_fields` for the form of all requests.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ml_flashpoint.ddict.accounts import Write, from_list, listed, writers_of
from ml_flashpoint.ddict.checkpoint_persister import PersistedCheckpoint
from ml_flashpoint.ddict.errors import (
    DDictPersistError,
    DDictTimeoutError,
)
from ml_flashpoint.format.errors import ProtocolError

if TYPE_CHECKING:
    from ml_flashpoint.ddict.coordinator import Coordinator
    from ml_flashpoint.ddict.manager import Manager, Session

from ml_flashpoint.ddict.request_fields import Fields, Result, integer, left_of, list_of, operation, text, until_of

_LOOK_S = 0.25

# ---- the manager itself -----------------------------------------------------------------------------------


@operation
def _hello(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Who this is. Answered at once, also while the manager recovers."""
    return {
        "manager": manager.number,
        "incarnation": manager.incarnation,
        "transfers": manager.snapshots.address,
    }, ()


@operation
def _ready(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Answered when the manager has recovered."""
    manager.wait_until_ready(until_of(fields))
    return {}, ()


@operation
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


@operation
def _sealed(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {
        "ids": manager.sealed(until_of(fields)),
        "frozen": manager.frozen,
        "writers": manager.writers,
        "taken": listed(manager.taken),
        **manager.run.fields(),
    }, ()


@operation
def _inventory(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    return {"records": [each.to_json() for each in manager.snapshots.inventory(integer(fields, "of"))]}, ()


@operation
def _replicate(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """A holder came back, perhaps without its copies. The answer does not wait for them."""
    manager.wait_until_ready(until_of(fields))
    threading.Thread(target=manager.replicate, name="ddict-replicate", daemon=True).start()
    return {}, ()


@operation
def _drop_copies(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    keep = [str(each) for each in list_of(fields, "keep")]
    manager.snapshots.drop_copies(integer(fields, "of"), keep, text(fields, "before"))
    return {}, ()


# ---- for the coordinator ----------------------------------------------------------------------------------


@operation
def _prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    writers = fields.get("writers")
    if not isinstance(writers, dict):
        raise ProtocolError("field 'writers' must name handles")
    manager.writers = writers_of(writers)
    manager.prepare(integer(fields, "checkpoint_id"))
    return {"incarnation": manager.incarnation}, ()


@operation
def _seal(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    manager.seal(integer(fields, "checkpoint_id"), until_of(fields))
    return {"incarnation": manager.incarnation}, ()


@operation
def _abort(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    given_up = integer(fields, "checkpoint_id")
    manager.unprepare(lambda each: each != given_up)
    return {}, ()


@operation
def _settle(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    manager.taken = from_list(list_of(fields, "taken"))
    manager.settle(
        integer(fields, "oldest"), list_of(fields, "keep"), list_of(fields, "pinned"), integer(fields, "committed", -1)
    )
    return {}, ()


@operation
def _forget(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    manager.taken = from_list(list_of(fields, "taken"))
    manager.forget(integer(fields, "above", -1))
    return {}, ()


@operation
def _complete(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Wait until all keys of a checkpoint are written again at a later one."""
    until = until_of(fields)
    manager.wait_until_ready(until)
    checkpoint_id = integer(fields, "checkpoint_id")
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


@operation
def _persist(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    return {"receipt": manager.persist(integer(fields, "checkpoint_id"))}, ()


@operation
def _restore_prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    manager.restore_prepare(PersistedCheckpoint.from_fields(fields["checkpoint"]))
    return {}, ()


@operation
def _restore_abort(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.restore_abort()
    return {}, ()


@operation
def _restore_commit(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.wait_until_ready(until_of(fields))
    manager.restore_commit(integer(fields, "checkpoint_id"), text(fields, "run"), fields["checkpoint"])
    return {}, ()


# ---- to the coordinator -----------------------------------------------------------------------------------


@operation
def _lease(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Keep the handles alive that join with this lease, for as long as this connection lasts."""
    coordinator = _coordinator(manager, fields)
    session.lease = text(fields, "lease")
    handles = [str(each) for each in list_of(fields, "handles")]
    coordinator.lease_began(session.lease, session, session.peer.pid, handles, session.peer.is_gone)
    return {}, ()


@operation
def _watch(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Answer when time is up. Meanwhile the end of either process is noticed by the other."""
    until = time.monotonic() + integer(fields, "s")
    while time.monotonic() < until and not manager.ended.wait(_LOOK_S) and not session.peer.is_gone():
        pass
    return {}, ()


@operation
def _note(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """A handle that has not joined wrote something."""
    return {**_coordinator(manager, fields).note(_wrote(manager, fields)), "run": manager.run.run_id}, ()


@operation
def _join(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    position = _position(manager, fields)
    state = coordinator.join(text(fields, "w"), text(fields, "lease"), position, _wrote(manager, fields))
    return {**state, "run": manager.run.run_id}, ()


@operation
def _move(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    state = coordinator.move(
        text(fields, "w"), text(fields, "lease"), integer(fields, "c"), _wrote(manager, fields), left_of(fields)
    )
    return {**state, "run": manager.run.run_id}, ()


@operation
def _go_back(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    lease = None if fields.get("lease") is None else text(fields, "lease")
    wrote, lost = _wrote(manager, fields), _lost(manager, fields)
    return coordinator.rollback(text(fields, "w"), lease, integer(fields, "c"), wrote, left_of(fields), lost), ()


@operation
def _leave(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields).leave(text(fields, "w"), _position(manager, fields), _wrote(manager, fields))
    return {}, ()


@operation
def _newest(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    state = _coordinator(manager, fields).newest(left_of(fields), session.peer.is_gone)
    return {**state, "run": manager.run.run_id}, ()


@operation
def _await_commit(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    coordinator = _coordinator(manager, fields)
    handle, checkpoint_id = text(fields, "w"), integer(fields, "checkpoint_id", -1)
    if_written = fields.get("if_written") is True
    state = coordinator.await_commit(handle, checkpoint_id, left_of(fields), session.peer.is_gone, if_written)
    return {**state, "run": manager.run.run_id}, ()


@operation
def _state(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    state = _coordinator(manager, fields).state()
    return {**state, "frozen": manager.frozen, **manager.run.fields()}, ()


@operation
def _recovering(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Where the dictionary is, for a manager that goes on from there."""
    number, incarnation = integer(fields, "manager"), text(fields, "incarnation")
    if not number < manager.configuration.managers:
        raise ProtocolError("there is no such manager")
    state = _coordinator(manager, fields).recovering(number, incarnation)
    return {**state, "frozen": manager.frozen, **manager.run.fields()}, ()


@operation
def _persist_newest(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    if not manager.persister.persists:
        raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
    coordinator = _coordinator(manager, fields)
    return {"checkpoint_id": coordinator.persist_newest(left_of(fields), session.peer.is_gone)}, ()


@operation
def _persisted_ids(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields)
    return {"ids": manager.persister.ids()}, ()


@operation
def _restore(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _coordinator(manager, fields)
    manager.restore(integer(fields, "checkpoint_id"), until_of(fields))
    return {}, ()


def _coordinator(manager: Manager, fields: Fields) -> Coordinator:
    manager.wait_until_ready(until_of(fields))
    if manager.coordinator is None:
        raise ProtocolError(f"manager {manager.number} is not the main manager")
    return manager.coordinator


def _is_of_before(manager: Manager, fields: Fields) -> bool:
    """Whether the handle has not heard yet that what it wrote was replaced by a restore."""
    return fields.get("run") not in (None, manager.run.run_id)


def _position(manager: Manager, fields: Fields) -> int:
    position = integer(fields, "c")
    restored = manager.run.restored
    return restored.checkpoint_id if restored is not None and _is_of_before(manager, fields) else position


def _wrote(manager: Manager, fields: Fields) -> list[Write]:
    if _is_of_before(manager, fields):
        return []
    found = []
    for each in list_of(fields, "wrote"):
        if not (isinstance(each, list) and [type(part) for part in each] == [int, str, int, bool]):
            raise ProtocolError("field 'wrote' must list writes")
        found.append(Write(*each))
    return found


def _lost(manager: Manager, fields: Fields) -> list[int]:
    found = list_of(fields, "lost")
    if not all(type(each) is int for each in found):
        raise ProtocolError("field 'lost' must list managers")
    return [] if _is_of_before(manager, fields) else found
