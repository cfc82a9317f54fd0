"""Errors that a dictionary, or what a program needs around one, raises on purpose, and how they travel."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, Final

from ml_flashpoint.format import errors as core_errors
from ml_flashpoint.format.errors import CapacityError, DeadlineError, FlashpointError
from ml_flashpoint.net.messages import Dialect, errors_of


class DDictError(FlashpointError):
    """Base of the errors of dictionaries. ``manager`` and ``checkpoint_id`` are those concerned, if any; ``retryable``
    errors are of calls that may succeed later, without anything else being done."""

    retryable = False

    def __init__(
        self, message: str, *, manager: int | None = None, checkpoint_id: int | None = None, **context: Any
    ) -> None:
        super().__init__(message, **context)
        self.manager, self.checkpoint_id = manager, checkpoint_id

    def _context(self) -> list[str]:
        named = [("manager", self.manager), ("checkpoint", self.checkpoint_id)]
        return [f"{name} {value}" for name, value in named if value is not None] + super()._context()


class DDictKeyError(DDictError, KeyError):
    """There is no such key at the checkpoint of this handle."""

    __str__ = DDictError.__str__


class DDictTimeoutError(DDictError, DeadlineError):
    """A call did not end within the dictionary's `timeout`. Nothing is known of a write that raised it."""

    retryable = True


class DDictFullError(DDictError, CapacityError):
    """The manager has no room for the value within its share of `total_mem`, or the tmpfs that it is in has none."""


class DDictReadOnlyError(DDictError):
    """The handle or the dictionary was made read-only, or the dictionary is frozen."""


class DDictCheckpointRetiredError(DDictError):
    """The checkpoint can be neither read nor written any more: it has left the working set, or one above it is
    committed and it never was itself, or it was committed and was taken back.

    `checkpoint_id` is the oldest one above it that can; where it was taken back, the one that all go on from.
    """


def retired(checkpoint_id: int, oldest: int, committed: int, kept: Iterable[int]) -> DDictCheckpointRetiredError:
    """Return the error for a checkpoint that is older than the oldest, or that commits have skipped."""
    if checkpoint_id < oldest:
        return DDictCheckpointRetiredError(
            f"checkpoint {checkpoint_id} has left the working set; the oldest is {oldest}",
            checkpoint_id=oldest,
            hint="sync_to_newest_checkpoint() goes to the newest committed one; a larger working_set_size keeps "
            "checkpoints longer",
        )
    return DDictCheckpointRetiredError(
        f"checkpoint {checkpoint_id} was never committed by itself, and {committed} is: nobody can go back to it",
        checkpoint_id=min((each for each in kept if each > checkpoint_id), default=committed),
        hint="wait_for_commit() after each checkpoint() that is to be gone back to",
    )


class DDictManagerLostError(DDictError):
    """A manager is not there at the moment: it died, or its node did. With `replication`, it comes back.

    The one error to retry on: call again, or give the dictionary a longer `timeout`.
    """

    retryable = True


class DDictWritesLostError(DDictError):
    """A new epoch has begun, in which what this handle wrote is gone: a manager was lost with what was not committed,
    somebody went back below what was, or a persisted checkpoint was restored.

    `checkpoint_id` is the one to go on from: ``d.rollback(to=error.checkpoint_id)``, or `sync_to_newest_checkpoint`,
    and write again from there. Until then calls of this handle that write or move raise it again, and commits wait for
    it. The loss of what handles had written that are gone is told once, to one who moves or syncs.
    """


def writes_lost(why: str, base: int, manager: int | None) -> DDictWritesLostError:
    """Return the error that tells of them, where all go on from checkpoint ``base``."""
    to = max(base, 0)
    return DDictWritesLostError(
        f"what was written since is lost: {why}",
        manager=manager,
        checkpoint_id=to,
        hint=f"go back with rollback(to={to}) and write again from there",
    )


class DDictDestroyedError(DDictError):
    """The dictionary was destroyed, or this handle detached."""


class DDictPersistError(DDictError):
    """A checkpoint could not be persisted or restored."""


class StaleValueError(DDictError):
    """A large value is not where it was any more, or not yet. Not seen by users: the manager is asked again."""

    retryable = True


class StaleEpochError(DDictError):
    """The request is of another epoch than whoever got it. Not seen by users: the coordinator is asked what began."""

    retryable = True


class StaleRequestError(DDictError):
    """The handle that made the request has made later ones, so that this one came too late, and changed nothing. Not
    seen by users: who still waits for the answer asks again."""

    retryable = True


class ProcessFailedError(DDictError):
    """A process of a group, ``puid``, ended with an ``exit_code`` other than 0, negative for the number of a signal."""

    def __init__(self, message: str, *, puid: int | None = None, exit_code: int | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.puid, self.exit_code = puid, exit_code


class BarrierBrokenError(DDictError, threading.BrokenBarrierError):
    """A process cannot pass a barrier: another one died, gave up, or aborted it."""


REQUESTS: Final = Dialect(
    purpose=b"ml_flashpoint.ddict requests",
    errors=errors_of(core_errors, sys.modules[__name__]),
    failure=DDictError,
    timeout=DDictTimeoutError,
)
"""The dialect that clients, managers and the coordinator of a dictionary speak."""
