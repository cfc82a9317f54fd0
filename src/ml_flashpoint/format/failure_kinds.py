"""What kind of failure it was: one rule for every door.

Owns what recovery asks of an error: whether the bytes are to blame, whether trying again may help, and what is to blame
where a version cannot be loaded. Trying again with back-off is here, too.
"""

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
    """What is to blame where a version cannot be loaded, in the order of what leaves less to try."""

    VERSION = 1
    """This version, or the way to it: an older one may be loadable."""
    OBJECT = 2
    """What the state was handed to, which refused it: perhaps for what is in it, so that it may take an older one."""
    RANKS = 3
    """Ranks lost each other, which says nothing about any version: the same one may be loadable the next time."""
    PROGRAM = 4
    """The program, which differs from the one that saved, or has not allowed a type: older ones would fare the same. If
    one did not, nobody would see that it was gone back to, and what is newer would be overwritten."""
    CHOICE = 5
    """Nobody: the user has to decide what becomes of some of it, and no other version is what they asked for."""


def blame_of(error: BaseException) -> Blame:
    """What is to blame for an error that kept a version from being loaded."""
    if isinstance(error, ReshardError):
        return Blame.CHOICE
    if isinstance(error, RanksLostError):
        return Blame.RANKS
    if isinstance(error, (*_DAMAGE, *_TRANSIENT, PrunedError)):
        return Blame.VERSION
    return Blame.PROGRAM if isinstance(error, FlashpointError) else Blame.OBJECT


def text_of(error: BaseException) -> str:
    """An error in one line, for other ranks."""
    return str(error) if isinstance(error, FlashpointError) else f"{type(error).__name__}: {error}"


def is_damage(error: BaseException) -> bool:
    """Whether a part is not, or not as it was saved, where it was looked for. Looking again finds the same."""
    return isinstance(error, _DAMAGE)


def is_transient(error: BaseException) -> bool:
    """Whether something could not be read just now, which says nothing about what it is."""
    return isinstance(error, _TRANSIENT)


def is_shortage(error: BaseException) -> bool:
    """Whether the system has run out of something that comes back: descriptors, memory. Says nothing about what
    was to be done; what the system refuses for another reason, it will go on to refuse."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _SHORTAGES)


def as_ours(error: Exception) -> FlashpointError:
    """An error to vote with: raised where the other ranks wait, it would leave them to their deadline. What is not of
    ours is out of memory or threads, say, or a bug; either tells nothing about a checkpoint."""
    return error if isinstance(error, FlashpointError) else UnreadableError(text_of(error))


def pauses(until: float) -> Iterator[None]:
    """Sleep before each further try, longer each time, until ``until`` (`time.monotonic`) has passed."""
    pause_s = _FIRST_PAUSE_S
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        yield


def retrying(work: Callable[[], _T], until: float, what: str, *, also: tuple[type[FlashpointError], ...] = ()) -> _T:
    """Do something, and again for as long as it fails for a reason that may pass and ``until`` has not.

    Not for what is collective. It is tried once at least.

    Args:
        what: for the log.
        also: further errors that may pass.

    Raises:
        Exception: the last failure.
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
