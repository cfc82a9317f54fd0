"""The errors of this package, and their classification for recovery. All survive pickling."""

from __future__ import annotations

import enum
import errno
import logging
import os
import reprlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypedDict, TypeVar

if TYPE_CHECKING:  # in `typing` from Python 3.11 on
    from typing_extensions import Unpack


class _Context(TypedDict, total=False):
    """The keywords of `FlashpointError`."""

    step: int | None
    rank: int | None
    node: str | None
    path: str | os.PathLike[str] | None
    hint: str | None


_VERBS = ("must ", "is ", "has ", "cannot ", "needs ")


class FlashpointError(Exception):
    """Base of all errors of this package.

    Args:
        message: what happened, as a sentence without a full stop.
        step: training step of the checkpoint concerned.
        rank: global rank concerned (not always the one that raises).
        node: node id concerned.
        path: file or directory concerned; kept as `str`.
        hint: what the reader can do about it.

    All are kept as attributes, ``None`` where not given, and shown by `str()`.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        node: str | None = None,
        path: str | os.PathLike[str] | None = None,
        hint: str | None = None,
    ) -> None:
        # Unpickling calls the class with `args`, the message alone, and then restores the attributes.
        super().__init__(message)
        self.message = message
        self.step = step
        self.rank = rank
        self.node = node
        self.path = None if path is None else os.fspath(path)
        self.hint = hint

    def _context(self) -> list[str]:
        named = (("step", self.step), ("rank", self.rank), ("node", self.node), ("path", self.path))
        return [f"{name} {value}" for name, value in named if value is not None]

    def __str__(self) -> str:
        context = self._context()
        shown = f"{self._sentence} [{', '.join(context)}]" if context else self._sentence
        return f"{shown}; {self.hint}" if self.hint else shown

    @property
    def _sentence(self) -> str:
        return self.message


class InvalidNameError(FlashpointError, ValueError):
    """A name or path that cannot be an id: relative, escaping, empty, too long, not UTF-8."""


class InvalidArgumentError(FlashpointError, ValueError):
    """An argument is invalid.

    Args:
        message: see `FlashpointError`, as for ``context``. "must be at least 1" is shown as "every_n_steps must be at
            least 1, got 0".
        argument: name of the argument.
        value: the value refused. Only its shortened `repr` is kept, in ``value``.
    """

    def __init__(
        self, message: str, *, argument: str | None = None, value: object = None, **context: Unpack[_Context]
    ) -> None:
        super().__init__(message, **context)
        self.argument = argument
        self.value = reprlib.repr(value)

    def _context(self) -> list[str]:
        is_named = self.argument is None or self._sentence != self.message
        return super()._context() if is_named else [f"{self.argument}={self.value}", *super()._context()]

    @property
    def _sentence(self) -> str:
        is_about_argument = self.argument is not None and self.message.startswith(_VERBS)
        return f"{self.argument} {self.message}, got {self.value}" if is_about_argument else self.message


class DamagedError(FlashpointError):
    """Stored or received bytes differ from the saved bytes."""


class ObjectFormatError(DamagedError):
    """An object is not a valid safetensors file of the form this package writes and reads."""


class ManifestError(DamagedError):
    """A manifest is truncated, altered or inconsistent."""


class DigestMismatchError(DamagedError):
    """A block of an object does not have the digest that its manifest records."""


class CapacityError(FlashpointError):
    """The filesystem has too little room. For ``message`` and ``context`` see `FlashpointError`."""

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int | None = None,
        available_bytes: int | None = None,
        **context: Unpack[_Context],
    ) -> None:
        super().__init__(message, **context)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes

    def _context(self) -> list[str]:
        named = (("needed", self.needed_bytes), ("available", self.available_bytes))
        return [f"{name} {value:,} bytes" for name, value in named if value is not None] + super()._context()


class SaveError(FlashpointError):
    """A save failed; earlier versions are untouched."""


class NotStagedError(SaveError):
    """A save was asked to write state that was not staged for it."""


class LoadError(FlashpointError):
    """A version cannot be loaded."""


class NothingLoadableError(LoadError):
    """Versions exist, and none of them can be loaded.

    Attributes:
        parts_lost: True if each version lacks a part on every node, and as many ranks saved it as there are now: the
            part's node is gone, or was emptied, and nobody had a copy.
    """

    parts_lost = False


class ReshardError(LoadError):
    """The number of ranks has changed, and there is no rule for state that belonged to one rank."""


class UnaskedVersionsError(FlashpointError):
    """A program saves without having looked for existing versions: it would overwrite them unseen."""


class PrunedError(LoadError):
    """A version was removed before or while it was read."""


class UnreadableError(FlashpointError):
    """A part that may be intact could not be read: out of descriptors, out of memory, an I/O error."""


class DeadlineError(FlashpointError, TimeoutError):
    """Something did not happen, or made no progress, within its deadline."""


class ReplicationError(FlashpointError):
    """A copy could not be sent to, or fetched from, a peer."""


class AuthenticationError(ReplicationError):
    """A peer did not prove that it knows the job's secret."""


class ProtocolError(ReplicationError):
    """A peer sent something that the transfer protocol does not allow."""


class ObjectNotFoundError(FlashpointError):
    """An object, manifest or version that was asked for does not exist here."""


class MissingPartsError(ObjectNotFoundError):
    """Versions exist, and each lacks the parts of some ranks here."""


class UnsafeContentError(FlashpointError):
    """Loading would have to unpickle a type that is not on the allow-list."""


class UnsafePathError(FlashpointError):
    """Another user owns a folder or file, or may write to it, or a symbolic link is in its place."""


class JobInUseError(FlashpointError):
    """Another live process of this node uses the base container, or has created it again."""


class TopologyError(FlashpointError):
    """Ranks, nodes and strategy do not fit together."""


class RanksLostError(DeadlineError, TopologyError):
    """A rank of the job died, hangs, or has not made the collective call that the others made."""


class SkippedError(SaveError):
    """A save was skipped, because no slot was free: earlier saves are still being copied. Training continues."""


class SupersededError(SaveError):
    """A save will not be verified: a newer save is verified instead, or the ranks have passed over it."""


# ---- kinds of failures, as recovery asks for them --------------------------------------------------------------------

_log = logging.getLogger(__name__)

_DAMAGE = (DamagedError, ObjectNotFoundError)
_TRANSIENT = (UnreadableError, ReplicationError, DeadlineError, OSError, MemoryError)
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0

_T = TypeVar("_T")


class Blame(enum.IntEnum):
    """The cause of a version that cannot be loaded. Greater ones leave less to try."""

    VERSION = 1  # or the way to it: an older one may be loadable
    OBJECT = 2  # refused the state that it was handed, perhaps for its content: it may take an older one
    RANKS = 3  # lost each other: the same version may be loadable the next time
    PROGRAM = 4  # differs from the one that saved, or has not allowed a type: older versions would fare the same
    CHOICE = 5  # of the user, who has to say what becomes of some of the state


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
    """Return an error in one line, for other ranks. Never raises: they wait."""
    try:
        text = str(error)
    except Exception as caught:  # of the program's class
        text = f"its text cannot be shown ({type(caught).__name__})"
    return text if isinstance(error, FlashpointError) else f"{type(error).__name__}: {text}"


def without_frames(error: BaseException) -> BaseException:
    """Take the tracebacks from an error that is to be kept. Their frames, those of all callers among them, would keep
    what a save had copied, and the program's objects, until a collection. Errors that are not of this package say in a
    note where they were raised (since Python 3.11)."""
    each: BaseException | None = error
    while each is not None and each.__traceback__ is not None:  # a cause may be its own
        if hasattr(each, "add_note") and not isinstance(each, FlashpointError):
            each.add_note("".join(traceback.format_tb(each.__traceback__)))
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error


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
    """Call ``work``, and again while it fails for a reason that may pass, or with an error of ``also``. Raise its last
    failure once ``until`` (`time.monotonic`) has passed. ``what`` is for the log."""
    waiting, has_told = pauses(until), False
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) and not isinstance(error, also):
                raise
            if not has_told:
                _log.warning("%s failed, trying again for %.0f s: %s", what, max(0.0, until - time.monotonic()), error)
            has_told = True
            if next(waiting, True):  # there is no time left; None after a pause
                raise
