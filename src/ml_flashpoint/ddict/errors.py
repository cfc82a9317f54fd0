"""Every error that a dictionary raises on purpose.

Owns the types. All are `FlashpointError`s and survive pickling; those that name a checkpoint or a manager keep it as
an attribute.
"""

from __future__ import annotations

from typing import Any

from ml_flashpoint.format.errors import CapacityError, DeadlineError, FlashpointError


class DDictError(FlashpointError):
    """Base of the errors of dictionaries.

    Args:
        message: see `FlashpointError`, as for its other keywords.
        manager: number of the manager concerned.
        checkpoint_id: checkpoint concerned.
    """

    retryable = False
    """Whether the same call may succeed later, without anything else being done."""

    def __init__(
        self, message: str, *, manager: int | None = None, checkpoint_id: int | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.manager = manager
        self.checkpoint_id = checkpoint_id

    def _context(self) -> list[str]:
        named = (("manager", self.manager), ("checkpoint", self.checkpoint_id))
        return [f"{name} {value}" for name, value in named if value is not None] + super()._context()


class DDictKeyError(DDictError, KeyError):
    """There is no such key at the checkpoint of this handle."""

    __str__ = DDictError.__str__


class DDictTimeoutError(DDictError, DeadlineError):
    """A call did not end within the dictionary's `timeout`. Nothing is known of a write that raised it."""

    retryable = True


class DDictFullError(DDictError, CapacityError):
    """The manager has no room for the value within its share of `total_mem`."""


class DDictReadOnlyError(DDictError):
    """The handle or the dictionary was made read-only, or the dictionary is frozen."""


class DDictCheckpointRetiredError(DDictError):
    """The checkpoint has left the working set: it can be neither read nor written any more.

    `checkpoint_id` is the oldest one that can.
    """


class DDictManagerLostError(DDictError):
    """A manager is not there at the moment: it died, or its node did. With `replication`, it comes back.

    The one error to retry on: call again, or give the dictionary a longer `timeout`.
    """

    retryable = True


class DDictWritesLostError(DDictError):
    """A manager came back without what was written there since the last committed checkpoint.

    `checkpoint_id` is the one that it came back at: go back to it, ``d.rollback(to=error.checkpoint_id)``, and write
    again from there. Until then calls of this handle that write or move raise it again, and nothing that it wrote
    above is committed. The loss of what handles had written that are gone is told once, to one who moves or syncs.
    """


class DDictDestroyedError(DDictError):
    """The dictionary was destroyed, or this handle detached."""


class DDictPersistError(DDictError):
    """A checkpoint could not be persisted or restored."""


class StaleValueError(DDictError):
    """A large value is not where it was any more, or not yet. Not seen by users: the manager is asked again."""

    retryable = True
