"""What ranks tell each other about a save in DCP's own messages: the name that it gets, and that it is complete.

Owns what rides on a plan as its ``storage_data`` and on the metadata as its ``storage_meta``, and how it is noted. DCP
sends every plan as a pickle, from each rank to the coordinator and back, and a planner may then go on with another plan
than the one it is given, such as one it has kept from an earlier save. A rider is therefore noted when it is unpickled,
on the thread that saves, and not looked for in the plan afterwards. The metadata goes to all ranks in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from ml_flashpoint.core.save_identity import SaveIdentity, common_identity
from ml_flashpoint.format.errors import DivergedError

Note = Callable[["PlanRider"], None]


class PlanRider:
    """Rides on a plan.

    Args:
        identity: from a rank to the coordinator, what the rank proposes; back, what the coordinator has found.
        diverged: only back: why there is no common identity. Told to the ranks instead of raised on the coordinator,
            since each has to know what the others were to save in order to be in step with them again.
    """

    def __init__(self, identity: SaveIdentity, diverged: DivergedError | None = None) -> None:
        self.identity = identity
        self.diverged = diverged

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.identity, self.diverged)

    @classmethod
    def answering(cls, proposals: tuple[SaveIdentity, ...]) -> PlanRider:
        """What the coordinator answers to the proposals of all ranks, in rank order."""
        try:
            return cls(common_identity(proposals))
        except DivergedError as error:
            return cls(max(proposals, key=lambda each: each.sequence), error)


class CompletionRider(StorageMeta):
    """Rides on the metadata that the coordinator sends to all ranks once it has committed the last part."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _completed, (vars(self),)


class _Listener(threading.local):
    note: Note | None = None
    completed: Callable[[], None] | None = None


_listener = _Listener()


def listen(note: Note | None) -> None:
    """Have riders on plans that arrive on the calling thread noted from now on, or (with None) no longer."""
    _listener.note, _listener.completed = note, None


def listen_for_completion(completed: Callable[[], None]) -> None:
    """Have it noted when the calling thread hears that its save is complete."""
    _listener.completed = completed


def _arrived(identity: SaveIdentity, diverged: DivergedError | None) -> PlanRider:
    rider = PlanRider(identity, diverged)
    if _listener.note is not None:
        _listener.note(rider)
    return rider


def _completed(fields: dict[str, Any]) -> StorageMeta:
    completed, _listener.completed = _listener.completed, None
    if completed is not None:
        completed()
    return StorageMeta(**fields)
