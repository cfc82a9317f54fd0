"""Events: what happens to checkpoints in this process, for whoever wants to know.

::

    from ml_flashpoint import events

    with events.subscribe(lambda event: print(event)):
        ...

Owns the subscribers of a process, the thread that calls them, and the file that ``FLASHPOINT_EVENTS`` names. Nobody who
tells of an event waits for a subscriber: those that are slow miss events, which is logged and counted. The kinds of
events are `format.events`'s, and importable from here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ml_flashpoint.format.at_exit import at_exit
from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.events import (
    KINDS,
    AgreementFailed,
    Event,
    LoopHeld,
    PartCommitted,
    PartFetched,
    PartPersisted,
    PartReplicated,
    PersistFailed,
    RanksMissing,
    ReplicationFailed,
    Resumed,
    SaveFailed,
    SaveSkipped,
    SteppedBack,
    VersionPersisted,
    VersionRecovered,
    VersionVerified,
    decode_event,
    decode_events,
    encode_event,
    name_of,
)
from ml_flashpoint.format.knobs import events_file, exit_deadline_s

__all__ = [
    "KINDS",
    "AgreementFailed",
    "Event",
    "LoopHeld",
    "PartCommitted",
    "PartFetched",
    "PartPersisted",
    "PartReplicated",
    "PersistFailed",
    "RanksMissing",
    "ReplicationFailed",
    "Resumed",
    "SaveFailed",
    "SaveSkipped",
    "SteppedBack",
    "VersionPersisted",
    "VersionRecovered",
    "VersionVerified",
    "decode_event",
    "decode_events",
    "encode_event",
    "name_of",
    "read_events",
    "subscribe",
]

_log = logging.getLogger(__name__)

Subscriber = Callable[[Event], object]
_Subscription = tuple[Subscriber, "str | None"]


class Teller(Protocol):
    """A rank, and its node."""

    @property
    def rank(self) -> int:
        """Its number."""

    @property
    def node(self) -> str:
        """Where it runs."""


class EventBus:
    """Subscribers and who calls them, in the order of the events, one at a time. Thread-safe.

    Args:
        most_waiting: events that wait for slow subscribers, before newer ones are missed.

    Attributes:
        missed: events that subscribers were too slow for.
    """

    def __init__(self, most_waiting: int = 10_000) -> None:
        self._subscribers: tuple[_Subscription, ...] = ()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[Event, tuple[_Subscription, ...]] | threading.Event] = queue.Queue(
            most_waiting
        )
        self._thread: threading.Thread | None = None
        self.missed = 0

    def add(self, subscriber: Subscriber, base: str | None = None) -> Callable[[], None]:
        """Have a subscriber called from now on, for events of one base container or of all; returns what ends that."""
        entry = (subscriber, base)
        with self._lock:
            self._subscribers = (*self._subscribers, entry)

        def remove() -> None:
            with self._lock:
                self._subscribers = tuple(each for each in self._subscribers if each is not entry)

        return remove

    @property
    def wanted(self) -> bool:
        """Whether anybody subscribes."""
        return bool(self._subscribers)

    def put(self, event: Event) -> None:
        """Tell those of an event who subscribe now. Returns at once."""
        try:
            self._ensure_thread()
            self._waiting.put_nowait((event, self._subscribers))
        except (queue.Full, RuntimeError):  # or no thread can be started
            self.missed += 1
            if self.missed.bit_count() == 1:
                _log.warning("subscribers are too slow: %d events were missed", self.missed)

    def flush(self, deadline_s: float) -> bool:
        """Wait until subscribers were told of all events so far; returns whether that was so in time."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        told = threading.Event()
        try:
            self._waiting.put(told, timeout=deadline_s)
        except queue.Full:
            return False
        return told.wait(deadline_s)

    def _ensure_thread(self) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="flashpoint-events", daemon=True)
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        while True:
            waiting = self._waiting.get()
            if isinstance(waiting, threading.Event):
                waiting.set()
                continue
            event, subscribers = waiting
            for subscriber, base in subscribers:
                if base is None or base == event.base:
                    try:
                        subscriber(event)
                    except Exception:  # theirs, of whatever kind
                        _log.exception("a subscriber failed at %s", event)


_resolved = functools.lru_cache(64)(os.path.realpath)  # one base container may be known by several paths
_bus = EventBus()
_to_file: tuple[str, Callable[[], None]] | None = None
_file_lock = threading.Lock()


@contextlib.contextmanager
def subscribe(subscriber: Subscriber, base: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Have a function called for every event, on a thread of its own, inside a ``with`` statement.

    Args:
        subscriber: ``subscriber(event)``; what it raises is logged. It may miss events if it is slow.
        base: base container of which it is told; by default all that this process uses.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    remove = add_subscriber(subscriber, base, argument="subscriber")
    try:
        yield
    finally:
        remove()


def add_subscriber(
    subscriber: Subscriber, base: str | os.PathLike[str] | None = None, *, argument: str
) -> Callable[[], None]:
    """The same without a ``with`` statement.

    Args:
        subscriber, base: see :func:`subscribe`.
        argument: what the caller calls the subscriber, for errors.

    Returns:
        What ends it, once it was told of all that has happened so far.
    """
    if not callable(subscriber):
        raise InvalidArgumentError("must be callable", argument=argument, value=subscriber)
    remove = _bus.add(subscriber, None if base is None else _resolved(os.fspath(base)))

    def end() -> None:
        flush()
        remove()

    return end


def flush(deadline_s: float | None = None) -> bool:
    """Wait until subscribers were told of all that has happened so far.

    Args:
        deadline_s: seconds at most; by default ``FLASHPOINT_EXIT_DEADLINE_S``.

    Returns:
        Whether that was so in time.
    """
    return _bus.flush(exit_deadline_s() if deadline_s is None else deadline_s)


def emit(kind: type[Event], by: Teller, base: object, step: int | None, **fields: Any) -> None:
    """Tell of an event, if anybody wants to know. Never raises, and waits for nobody.

    Args:
        kind: its class; ``fields`` are the attributes that it has beside those of all.
        by: the rank that tells.
        base, step: see `Event`.
    """
    _ensure_file(by)
    if _bus.wanted:
        where = "" if base is None else _resolved(str(base))
        _bus.put(kind(time_s=time.time(), rank=by.rank, node=by.node, base=where, step=step, **fields))


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """The events in a file that was written for ``FLASHPOINT_EVENTS``, those left out that cannot be read: the last
    line of a process that was killed, or what a newer release has added."""
    with open(path, "rb") as lines:
        yield from decode_events(lines)


class _EventFile:
    """Appends lines to a file, which several ranks may share: a line is one write."""

    def __init__(self, path: str) -> None:
        self._path, self._failed = path, False
        self._file: io.RawIOBase | None = None

    def __call__(self, event: Event) -> None:
        # What comes after half a line begins a new one.
        line = b"\n" * self._failed + encode_event(event).encode()
        try:
            if self._file is None:  # here, as who tells of an event must not wait for a filesystem
                self._file = open(self._path, "ab", buffering=0, opener=_without_waiting)  # noqa: SIM115
            error = None if self._file.write(line) == len(line) else "no room for a whole line"
        except OSError as caught:
            error = str(caught)
        if error is not None and not self._failed:
            _log.error("events cannot be written to %s: %s", self._path, error)
        self._failed = error is not None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)  # not for the reader of a pipe, either


def _ensure_file(by: Teller) -> None:
    """Write to the file that the environment names, from the first event after it was named."""
    global _to_file
    pattern = events_file()
    if pattern == ("" if _to_file is None else _to_file[0]):
        return
    with _file_lock:
        if _to_file is not None:
            _to_file[1]()
            _to_file = None
        if not pattern:
            return
        path = pattern.replace("{rank}", str(by.rank)).replace("{node}", by.node.replace(os.sep, "_"))
        _to_file = pattern, _bus.add(_EventFile(path))


def _begin_anew() -> None:
    """In a forked child: it has no thread to call subscribers, and they are its parent's."""
    global _bus, _to_file, _file_lock
    _bus, _to_file, _file_lock = EventBus(), None, threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
at_exit(flush)
