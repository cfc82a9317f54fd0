"""Kinds of failures, as recovery asks for them: damage, what may pass, and blame; and retrying with pauses."""

from __future__ import annotations

import enum
import errno
import logging
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ml_flashpoint.format.errors import (
    DamagedError,
    DeadlineError,
    FlashpointError,
    ObjectNotFoundError,
    PrunedError,
    RanksLostError,
    ReplicationError,
    ReshardError,
    UnreadableError,
)

_log = logging.getLogger(__name__)

_DAMAGE = (DamagedError, ObjectNotFoundError)
_TRANSIENT = (UnreadableError, ReplicationError, DeadlineError, OSError, MemoryError)
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

_T = TypeVar("_T")


class Blame(enum.IntEnum):
    """The cause of a version that cannot be loaded. Greater ones leave less to try."""

    VERSION = 1
    """This version, or the way to it: an older one may be loadable."""
    OBJECT = 2
    """The object that the state was handed to refused it, perhaps for its content: it may take an older one."""
    RANKS = 3
    """Ranks lost each other: the same version may be loadable the next time."""
    PROGRAM = 4
    """The program differs from the one that saved, or has not allowed a type: older versions would fare the same."""
    CHOICE = 5
    """The user has to decide what becomes of some of the state."""


def blame_of(error: BaseException) -> Blame:
    """Return the cause of an error that kept a version from being loaded."""
    if isinstance(error, ReshardError):
        return Blame.CHOICE
    if isinstance(error, RanksLostError):
        return Blame.RANKS
    if isinstance(error, (*_DAMAGE, *_TRANSIENT, PrunedError)):
        return Blame.VERSION
    return Blame.PROGRAM if isinstance(error, FlashpointError) else Blame.OBJECT


def text_of(error: BaseException) -> str:
    """Return an error in one line, for other ranks."""
    return str(error) if isinstance(error, FlashpointError) else f"{type(error).__name__}: {error}"


def is_damage(error: BaseException) -> bool:
    """Return True if a part is missing, or not as it was saved. Looking again finds the same."""
    return isinstance(error, _DAMAGE)


def is_transient(error: BaseException) -> bool:
    """Return True if something could not be read just now, and may be sound."""
    return isinstance(error, _TRANSIENT)


def is_shortage(error: BaseException) -> bool:
    """Return True if the system has run out of something that comes back: descriptors, memory."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)


def as_ours(error: Exception) -> FlashpointError:
    """Return an error as one of this package, to vote with. One of others tells nothing about a checkpoint."""
    return error if isinstance(error, FlashpointError) else UnreadableError(text_of(error))


def pauses(until: float) -> Iterator[None]:
    """Sleep before each further try, longer each time, until ``until`` (`time.monotonic`) has passed."""
    pause_s = _FIRST_PAUSE_S
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield


def retrying(work: Callable[[], _T], until: float, what: str, *, also: tuple[type[FlashpointError], ...] = ()) -> _T:
    """Call ``work`` once, and again while it fails for a reason that may pass and ``until`` has not. Not collective.

    Args:
        work: called; its last failure is raised.
        until: of `time.monotonic`.
        what: for the log.
        also: further errors that may pass.
    """
    waiting = pauses(until)
    tries = 0
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) and not isinstance(error, also):
                raise
            tries += 1
            if tries == 1:
                _log.warning("%s failed, trying again for %.0f s: %s", what, max(0.0, until - time.monotonic()), error)
            try:
                next(waiting)
            except StopIteration:
                raise error from None
