"""Events about checkpoints in this process, their subscribers, and their encoding as lines of JSON.

::

    from ml_flashpoint import events

    with events.subscribe(lambda event: print(event)):
        ...

`emit` does not wait for subscribers: a slow subscriber misses events, and the log says so. ``FLASHPOINT_EVENTS`` names
a file for all events of a process.

A line is one JSON object (RFC 8259) with ``schema`` (:data:`SCHEMA`), ``event`` (the name of a class below in snake
case) and the attributes of that class. Readers ignore kinds and attributes that they do not know, so releases may add
some under the same number.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ml_flashpoint.format.errors import InvalidArgumentError
from ml_flashpoint.format.knobs import exit_deadline_s

_log = logging.getLogger(__name__)

SCHEMA = 1

_MOST_OF_A_LINE = 1 << 16
_MOST_WAITING = 10_000
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event about a checkpoint on one rank.

    Subclasses add attributes: ``bytes`` is the size of the rank's part, ``error`` a reason as text, ``seconds`` a
    duration.

    Attributes:
        time_s: time of the event in seconds since the epoch, by the clock of its node.
        rank, node: the rank that emitted it, and its node.
        base: base container of the job, on that node.
        step: training step of the checkpoint; None if no step applies.
    """

    time_s: float = 0.0
    rank: int = 0
    node: str = ""
    base: str = ""
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegun(Event):
    """Saves have run number ``run`` from now on. ``step``: of the version that it goes on from."""

    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopHeld(Event):
    """A save has copied the state, and no longer blocks the loop. ``seconds``: for which it blocked the loop."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCommitted(Event):
    """This rank's part of a version is complete on its node. ``seconds``: since the save began."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSkipped(Event):
    """A save found no free slot, because earlier saves are still being copied. This rank has no part of the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """This rank has no part of a version, or another rank has none."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartReplicated(Event):
    """All copies of this rank's part are acknowledged, after ``seconds``. ``holders``: ranks that have them."""

    bytes: int
    holders: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationFailed(Event):
    """Copies of this rank's part are missing; older versions are kept."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionVerified(Event):
    """All ranks have committed their parts, and have all copies. ``seconds``: since the save began on this rank; 0.0 if
    it is not under way here: for a version that was recovered, or a save that was given up on this rank alone."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementFailed(Event):
    """This rank cannot reach the store on rank 0. No new version is verified until then, and older versions stay."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMissing(Event):
    """Nothing was heard of ``ranks`` about a save, for ``seconds``. Nothing has failed yet.

    Rank 0 has its part and the copies of it, and the save is not verified. Or, on any rank, the state has a new
    structure, and the save waits until all ranks have come to it.
    """

    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPersisted(Event):
    """This rank's part of a verified version is in the durable store. ``seconds``: time of writing."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPersisted(Event):
    """All parts and the marker of a version are in the durable store at ``url``. Emitted by rank 0."""

    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistFailed(Event):
    """A version that was due is not persisted, or no version can be. The next one is tried."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFetched(Event):
    """The part of rank ``part_rank``, which this node did not have, was fetched from a peer, in ``seconds``."""

    part_rank: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedBack(Event):
    """A version could not be recovered or loaded, and an older one is tried."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecovered(Event):
    """All parts of a version are on their nodes, checked.

    Attributes:
        detect_s: seconds for reading and gathering inventories. plan_s: for planning. fetch_s: for fetching, checking.
        fetched_bytes: bytes that this rank received from peers.
        tries: plans made; more than one means that something was damaged.
        tier: store that the version was found in, ``memory`` or ``persisted``.
        world_size: number of ranks that saved it.
    """

    detect_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    tries: int = 0
    tier: str = "memory"
    world_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """Training resumes at ``step``, after ``seconds``, including those of a fallback.

    Attributes:
        source: source of the state: ``memory``, ``persisted``, ``fallback`` or ``nothing``.
        version: name of the loaded version, from memory or persisted; otherwise None.
        detect_s, plan_s, fetch_s, fetched_bytes: of the version that was tried last; see `VersionRecovered`.
        load_s: seconds for loading into the tracked objects, including versions that were tried before.
        discarded: complete versions that could not be loaded, newest first.
    """

    source: str
    seconds: float
    version: str | None = None
    detect_s: float = 0.0
    plan_s: float = 0.0
    fetch_s: float = 0.0
    fetched_bytes: int = 0
    load_s: float = 0.0
    discarded: tuple[str, ...] = ()

    def in_words(self, base: str) -> str:
        """Return one line about it, which names the base container."""
        left = f"; {len(self.discarded)} newer could not be loaded" if self.discarded else ""
        if self.source == "memory":
            return f"resumed at step {self.step} from memory ({base}/{self.version}) in {self.seconds:.2f} s{left}"
        if self.source == "persisted":
            return f"resumed at step {self.step} from the persisted {self.version} in {self.seconds:.2f} s{left}"
        if self.source == "fallback":
            return f"no version in memory ({base}){left}: resumed at step {self.step} from the fallback"
        return f"no version in {base}{left}: training starts at step {self.step}"


KINDS: dict[str, type[Event]] = {
    _WORD.sub("_", name).lower(): kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
"""All kinds of events, by their names in lines."""

_NAMES = {kind: name for name, kind in KINDS.items()}

# ---- lines ----------------------------------------------------------------------------------------------------------


def name_of(event: Event) -> str:
    """Return the kind of an event, as in lines."""
    return _NAMES[type(event)]


def encode_event(event: Event) -> str:
    """Return an event as one line, with its end."""
    return json.dumps({"schema": SCHEMA, "event": name_of(event), **dataclasses.asdict(event)}) + "\n"


def decode_event(line: str | bytes) -> Event | None:
    """Return the event of a line; None if the line is torn, or of a kind, schema or form that is not known."""
    fields = read_object(line)
    kind = KINDS.get(str(fields.get("event")))
    return None if kind is None else from_fields(kind, fields)


def read_events(path: str | os.PathLike[str]) -> Iterator[Event]:
    """Yield the events in a file of ``FLASHPOINT_EVENTS``. Lines that cannot be read are skipped."""
    with open(path, "rb") as lines:
        yield from filter(None, map(decode_event, lines))


_T = TypeVar("_T")
_E = TypeVar("_E", bound=Event)


def read_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object of this module's schema in a text; an empty one if the text is anything else."""
    try:
        found = json.loads(text) if len(text) <= _MOST_OF_A_LINE else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else {}


def from_fields(kind: type[_T], found: Mapping[str, Any]) -> _T | None:
    """Return a dataclass made of those fields that it has; None if one is missing or has another type."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {field.name: found[field.name] for field in fields if field.name in found}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        made = kind(**values)
    except TypeError:
        return None
    return made if all(_is_a(getattr(made, field.name), str(field.type)) for field in fields) else None


_HINTS: dict[type, tuple[str, ...]] = {int: ("int", "float"), float: ("float",), str: ("str",)}


def _is_a(value: object, hint: str) -> bool:
    if value is None:
        return "None" in hint
    if isinstance(value, tuple):
        return hint.startswith("tuple[") and all(_is_a(each, hint[len("tuple[") :]) for each in value)
    return hint.startswith(_HINTS.get(type(value), ()))


# ---- subscribers ----------------------------------------------------------------------------------------------------

Subscriber = Callable[[Event], object]
_Subscription = tuple[Subscriber, "str | None", bool]


class _Bus:
    """The subscribers of a process, and the thread that calls them in the order of events. Thread-safe."""

    def __init__(self) -> None:
        self.subscriptions: tuple[_Subscription, ...] = ()
        self.lock = threading.Lock()
        self._waiting: queue.Queue[Callable[[], object]] = queue.Queue(_MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._missed = 0

    def put(self, event: Event, pattern: str) -> None:
        """Have the present subscribers called, and the file written whose name has this pattern. Returns at once."""
        try:
            if self._thread is None:
                self._start()
            self._waiting.put_nowait(functools.partial(_call, event, self.subscriptions, pattern))
        except (queue.Full, RuntimeError):  # or no thread can be started
            self._missed += 1
            if self._missed.bit_count() == 1:
                _log.warning("subscribers are too slow: %d events were missed", self._missed)

    def flush(self, deadline_s: float) -> bool:
        """See the function of this name."""
        if self._thread is None or threading.current_thread() is self._thread:
            return True
        called = threading.Event()
        try:
            self._waiting.put(called.set, timeout=deadline_s)
        except queue.Full:
            return False
        return called.wait(deadline_s)

    def _start(self) -> None:
        with self.lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="flashpoint-events", daemon=True)
                thread.start()
                self._thread = thread
                # Not at import: since Python 3.13, a child of multiprocessing forgets what its parent registered.
                atexit.unregister(flush)
                atexit.register(flush)

    def _run(self) -> None:
        while True:
            self._waiting.get()()


def _call(event: Event, subscriptions: Iterable[_Subscription], pattern: str) -> None:
    if pattern:
        path = pattern.replace("{rank}", str(event.rank)).replace("{node}", event.node.replace(os.sep, "_"))
        _append(path, event)
    _tell(event, subscriptions, at_once=False)


def _tell(event: Event, subscriptions: Iterable[_Subscription], *, at_once: bool) -> None:
    for subscriber, base, is_at_once in subscriptions:
        if is_at_once == at_once and base in (None, event.base):
            try:
                subscriber(event)
            except Exception:  # theirs, of whatever kind
                _log.exception("a subscriber failed at %s", event)


_resolved = functools.lru_cache(64)(os.path.realpath)  # one base container may be known by several paths
_bus = _Bus()
_broken: set[str] = set()  # files that could not be written the last time


def _begin_anew() -> None:
    """Forget the parent's subscribers and thread, in a forked child."""
    global _bus
    _bus = _Bus()


os.register_at_fork(after_in_child=_begin_anew)


@contextlib.contextmanager
def subscribe(
    subscriber: Subscriber, base: str | os.PathLike[str] | None = None, *, at_once: bool = False
) -> Iterator[None]:
    """Have a function called for every event, on a thread of its own, inside a ``with`` statement.

    Args:
        subscriber: ``subscriber(event)``; its exceptions are logged. A slow one may miss events.
        base: base container whose events it gets; None for all that this process uses.
        at_once: call it where the event happens, before anybody can see the effects: it must not wait.

    Raises:
        InvalidArgumentError: it cannot be called.
    """
    if not callable(subscriber):
        raise InvalidArgumentError("must be callable", argument="subscriber", value=subscriber)
    bus, entry = _bus, (subscriber, None if base is None else _resolved(os.fspath(base)), at_once)
    with bus.lock:
        bus.subscriptions = (*bus.subscriptions, entry)
    try:
        yield
    finally:
        if not at_once:
            flush()
        with bus.lock:
            bus.subscriptions = tuple(each for each in bus.subscriptions if each is not entry)


def flush(deadline_s: float | None = None) -> bool:
    """Wait until subscribers were called for all events so far; return False if they were not in time. The deadline is
    ``FLASHPOINT_EXIT_DEADLINE_S`` by default."""
    return _bus.flush(exit_deadline_s() if deadline_s is None else deadline_s)


class _Emitter(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def node(self) -> str: ...


def emit(kind: type[_E], by: _Emitter, base: object, step: int | None, **fields: Any) -> _E:
    """Emit an event of a rank, with the attributes of its kind, and return it. Never raises, and waits for nobody."""
    where = "" if base is None else _resolved(str(base))
    event = kind(time_s=time.time(), rank=by.rank, node=by.node, base=where, step=step, **fields)
    _tell(event, _bus.subscriptions, at_once=True)
    pattern = os.environ.get("FLASHPOINT_EVENTS", "")
    if _bus.subscriptions or pattern:
        _bus.put(event, pattern)
    return event


def _append(path: str, event: Event) -> None:
    """Append an event to a file, which several ranks may share: each line is one write."""
    line = b"\n" * (path in _broken) + encode_event(event).encode()  # half a line is ended before the next one
    try:
        with open(path, "ab", buffering=0, opener=_open_at_once) as file:
            error = None if file.write(line) == len(line) else "no room for a whole line"
    except OSError as caught:
        error = str(caught)
    if error is None:
        _broken.discard(path)
    elif path not in _broken:
        _log.error("events cannot be written to %s: %s", path, error)
        _broken.add(path)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)  # does not wait for the reader of a pipe


def named(ranks: Sequence[int]) -> str:
    """Return the first ranks of some, in words."""
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def announce(logger: logging.Logger, rank: int, text: str, *values: object) -> None:
    """Log a line at INFO; where the program has not set logging up in any way, print it to stderr on rank 0.

    A level for the logger ``ml_flashpoint`` silences it.
    """
    logger.info(text, *values)
    ours, root = logging.getLogger("ml_flashpoint"), logging.getLogger()
    is_set_up = logger.hasHandlers() or root.level != logging.WARNING or root.manager.disable >= logging.INFO
    if rank == 0 and not is_set_up and ours.level == logging.NOTSET and not ours.disabled:
        print(f"ml_flashpoint: {text % values}", file=sys.stderr, flush=True)
