"""What the requests to managers for everything but keys and values mean: what peers and the coordinator ask for.

Importing it completes the registry of operations. See `requests` for the form of all requests.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ml_flashpoint.ddict.checkpoints.index import part_ref
from ml_flashpoint.ddict.errors import DDictTimeoutError
from ml_flashpoint.ddict.manager.requests import (
    Fields,
    Result,
    deadline_of,
    integer,
    integers,
    list_of,
    operation,
    operation_at_once,
    text,
)
from ml_flashpoint.ddict.persistence.persister import PersistedCheckpoint

if TYPE_CHECKING:
    from ml_flashpoint.ddict.manager.manager import Manager, Session

# ---- the manager itself -----------------------------------------------------------------------------------


@operation_at_once
def _hello(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Who this is. Answered at once, also while the manager recovers."""
    return {"manager": manager.number, "transfers": manager.snapshots.address}, ()


@operation_at_once
def _stats(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    with manager.changed:
        return {
            "manager": manager.number,
            "node": manager.configuration.options.nodes[manager.number],
            "keys": len(manager.shard),
            "used_bytes": manager.used_bytes,
            "limit_bytes": manager.configuration.options.limit_bytes,
            "oldest": manager.shard.oldest,
            "sealed": sorted(manager.snapshots.sealed()),
            "frozen": manager.frozen,
            "holders": manager.snapshots.holders,
            "copies": manager.snapshots.copied_to(),
            "place": manager.place,
        }, ()


@operation
def _replicate(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """A holder came back, perhaps without its copies. The answer does not wait for them."""
    threading.Thread(target=manager.replicate, name="ddict-replicate", daemon=True).start()
    return {}, ()


@operation_at_once
def _drop_copies(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    keep = [str(each) for each in list_of(fields, "keep")]
    manager.snapshots.drop_copies(integer(fields, "of"), keep, text(fields, "before"))
    return {}, ()


# ---- for the coordinator ----------------------------------------------------------------------------------


def _check(manager: Manager, fields: Fields) -> None:
    """Refuse at once what is not of the epoch, which a manager that was lost has yet to begin."""
    manager.wait_until_ready(0.0)
    with manager.changed:
        manager.check_epoch(integer(fields, "e"))


@operation_at_once
def _begin(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """See `Manager.begin`."""
    run, restored = fields["run"], fields.get("restored")
    checkpoint = None if restored is None else PersistedCheckpoint.from_fields(restored)
    keep, pinned = integers(fields, "keep"), integers(fields, "pinned")
    sealed = [part_ref(*each) for each in list_of(fields, "sealed")]
    manager.begin(integer(fields, "e"), integer(fields, "base", -1), keep, pinned, sealed, checkpoint)
    manager.run.use(text(run, "run"), run["restored"])
    manager.frozen = bool(fields.get("frozen"))
    return {"incarnation": manager.incarnation}, ()


@operation_at_once
def _discard(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """See `Manager.discard`. A manager that was lost has nothing to discard, but whatever comes yet."""
    to, number = integer(fields, "to", -1), integer(fields, "n")
    manager.discard(text(fields, "w"), to, number, dead=fields.get("dead") is True)
    return {}, ()


@operation_at_once
def _prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _check(manager, fields)
    manager.prepare(integer(fields, "checkpoint_id"), integer(fields, "committed", -1))
    return {}, ()


@operation_at_once
def _seal(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _check(manager, fields)
    return {"attempt": manager.seal(integer(fields, "checkpoint_id"), deadline_of(fields))}, ()


@operation_at_once
def _settle(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    _check(manager, fields)
    keep, pinned = integers(fields, "keep"), integers(fields, "pinned")
    manager.settle(integer(fields, "oldest"), keep, pinned, integer(fields, "committed", -1))
    return {}, ()


@operation
def _complete(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    """Wait until all keys of a checkpoint are written again at a later one."""
    deadline, checkpoint_id = deadline_of(fields), integer(fields, "checkpoint_id")
    with manager.changed:
        if not manager.wait_for(
            lambda: manager.shard.missing_after(checkpoint_id) is None, deadline, session.peer.is_gone
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
    return {"receipt": manager.persist(integer(fields, "checkpoint_id"))}, ()


@operation
def _restore_prepare(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.parts.prepare(PersistedCheckpoint.from_fields(fields["checkpoint"]))
    return {}, ()


@operation
def _restore_abort(manager: Manager, session: Session, fields: Fields, blobs: list[bytes]) -> Result:
    manager.parts.abort()
    return {}, ()
