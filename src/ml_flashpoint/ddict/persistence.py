"""The persisted checkpoints of a dictionary: one more holder of its committed cuts, which outlives it.

Owns which of them count, and the coordinator's background thread that has them written. A checkpoint is a version of
`stores.durable`, a part a manager; each attempt to persist one has a number of its own in place of a run. What counts
is listed in one small file, written whole or not at all, anew with each change::

    lock                                           held by the coordinator of a live dictionary
    history-<number>.json                          the checkpoints that count; of several such files, the newest
    run-<attempt>/step-<checkpoint>_ckpt/...       parts and marker of one attempt

A dictionary begins a file of its own when it first persists something, and with each restore: then with what led to the
restored checkpoint. So what another one has persisted is never changed, and only a dictionary that goes on from it
removes any of it. It takes the first number as soon as it has the lock, and counts on from there: what a dictionary
that has ended may still write is never newer than the next one's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import xxhash

from ml_flashpoint.ddict.errors import DDictPersistError, DDictTimeoutError
from ml_flashpoint.ddict.options import Configuration, next_number
from ml_flashpoint.format import knobs
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.files import as_octets
from ml_flashpoint.format.manifest import MAX_RECORD_BYTES, Manifest, ObjectRecord, decode_record, encode_record
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.stores.durable import MARKER, DurableVersions, save_of, version_of
from ml_flashpoint.stores.version_store import StoredObject, Version, stored_object

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 1 << 20  # to read one item means to read and check all of the blocks that it lies in
_PIECE_BYTES: Final = 1 << 16
_LOCK: Final = "lock"
_HISTORY: Final = re.compile(r"history-([0-9]{8,12})\.json")
_KIND: Final = "mlflashpoint-dictionary-1"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 30.0

Checkpoints = dict[int, Version]


# ---- parts ----------------------------------------------------------------------------------------------------------


def write_part(store: DurableVersions, version: Version, manager: int, items: Sequence[tuple[str, Buffer]]) -> None:
    """Write one manager's part of a checkpoint, durably: one safetensors file, and its manifest.

    Args:
        store: where to.
        version: that the part is of.
        manager: number of the manager.
        items: distinct names, and contiguous buffers that do not change meanwhile.
    """
    views = [as_octets(buffer) for _, buffer in items]
    layout = plan_layout([], [(name, len(view)) for (name, _), view in zip(items, views, strict=True)], reserve=0)
    chunks = [memoryview(encode_header(layout, layout.size, {"flashpoint": "dictionary"})), *views]
    record = ObjectRecord(layout.size, layout.size, tuple(_digests(chunks)), _BLOCK_BYTES)
    manifest = Manifest(version.save, manager, version.world_size, os.uname().nodename or "unknown", record)
    store.write_part(manifest, lambda: chunks)


def open_part(store: DurableVersions, version: Version, manager: int) -> StoredObject:
    """Return a part to read from; whatever it returns was compared with its digests."""
    return stored_object(store.manifest(version, manager), [store])


def _digests(chunks: Sequence[memoryview]) -> Iterator[str]:
    block, room = xxhash.xxh3_64(), _BLOCK_BYTES
    for chunk in chunks:
        for at in range(0, len(chunk), _PIECE_BYTES):
            piece = chunk[at : at + _PIECE_BYTES]
            while len(piece):
                some, piece = piece[:room], piece[room:]
                block.update(some)
                room -= len(some)
                if not room:
                    yield block.hexdigest()
                    block, room = xxhash.xxh3_64(), _BLOCK_BYTES
    if room < _BLOCK_BYTES:
        yield block.hexdigest()


# ---- what counts ----------------------------------------------------------------------------------------------------


class History:
    """The persisted checkpoints of one dictionary. Thread-safe. ``configuration``: of the dictionary, which has a
    persister."""

    def __init__(self, configuration: Configuration) -> None:
        persister = configuration.options.make_persister()
        assert persister is not None
        self._persister = persister
        self._is_ours = not configuration.options.read_only
        self._lock = threading.Lock()  # for as long as a file of the history takes
        self._held: AbstractContextManager[object] | None = None
        self._number = 0  # of the file that this dictionary writes
        self._checkpoints: Checkpoints | None = None  # that count; None: those of the newest file
        self._limit: int | None = None  # of a rollback that the store does not know of: what is above counts no more
        self._own: set[SaveId] = set()  # what this dictionary has written
        self._listed: list[Version] = []  # by lists of ours that could not be written: those may be there all the same
        self._newest = 0
        self._told: set[str] = set()

    @cached_property
    def store(self) -> DurableVersions:
        """The versions."""
        return DurableVersions(self._persister.open_store())

    def begin(self) -> None:
        """Take the right to write here, and remove what others have not completed. Wait for a dying owner for
        `FLASHPOINT_LOCK_DEADLINE_S`. Raises `JobInUseError`: another live dictionary writes here."""
        if not self._is_ours:
            return
        try:
            self._held = self.store.files.lock(_LOCK, knobs.lock_deadline_s())
        except JobInUseError as error:
            raise JobInUseError(
                f"another live dictionary persists under the name {self._persister.name!r} here",
                path=error.path,
                hint="give each dictionary a name, or a persist_path, of its own",
            ) from error
        self._number = next_number(max(self._files(), default=0))  # with the lock: a later owner's is higher
        if self._held is not None:
            for version in self.store.versions():
                if not version.counts and not version.problem:
                    self.remove(version)

    def close(self) -> None:
        """Give the name up: whoever is next goes on from what is listed, and this one removes none of it any more. Safe
        to call twice."""
        self._is_ours = False
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

    # ---- reading ------------------------------------------------------------------------------------------

    def ids(self) -> list[int]:
        """Return the ids, ascending, of the checkpoints that can be restored: complete and valid."""
        return sorted(self._usable())

    def locate(self, checkpoint_id: int) -> Version:
        """Return one of `ids`. Raise a `DDictPersistError` if it is none; the message names those there are."""
        found = self._usable()
        if checkpoint_id not in found:
            there = ", ".join(map(str, sorted(found))) or "none"
            text = f"there is no such persisted checkpoint; there are: {there}"
            raise DDictPersistError(text, checkpoint_id=checkpoint_id, path=self.store.path)
        return found[checkpoint_id]

    def _usable(self) -> Checkpoints:
        return self._whole(self._newest_file() if self._checkpoints is None else self._counting())

    def _counting(self) -> Checkpoints:
        limit, its = self._limit, self._checkpoints or {}
        return its if limit is None else {each: version for each, version in its.items() if each <= limit}

    def _whole(self, checkpoints: Checkpoints) -> Checkpoints:
        there = {version.save: version for version in self.store.versions()} if checkpoints else {}
        return {each: version for each, version in checkpoints.items() if self._is_whole(version, there)}

    def _is_whole(self, version: Version, there: dict[SaveId, Version]) -> bool:
        found = there.get(version.save)
        try:
            if found is None or not found.counts:
                raise DamagedError(found.problem if found else "it is gone", path=version.folder)
            self.store.check_parts(version)
        except (DamagedError, ObjectNotFoundError, InvalidArgumentError) as error:
            self._tell("a persisted checkpoint cannot be used: %s", error)
            return False
        return True

    def _files(self) -> list[int]:
        return sorted(int(found[1]) for each in self.store.files.list() if (found := _HISTORY.fullmatch(each)))

    def _newest_file(self) -> Checkpoints:
        for number in reversed(self._files()):
            name = _name_of(number)
            path = self.store.files.path_of(name)
            try:
                data = self.store.files.read(name, limit=MAX_RECORD_BYTES)
                listed = map(version_of, decode_record(_KIND, data, path)["checkpoints"])
                return {version.step: version for version in listed}
            except (
                DamagedError,
                ObjectNotFoundError,
                InvalidArgumentError,
                KeyError,
                TypeError,
                AttributeError,
            ) as error:
                self._tell("a list of persisted checkpoints cannot be used, and an older one is: %s", error)
        return {}

    def _tell(self, message: str, error: Exception) -> None:
        """Log a warning, once: `ids` may be called often."""
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.warning(message, error)

    # ---- writing ------------------------------------------------------------------------------------------

    def new_attempt(self, checkpoint_id: int) -> Version:
        """Return the version that an attempt to persist a checkpoint writes."""
        self._newest = next_number(self._newest)
        save = SaveId(self._newest, checkpoint_id)
        return version_of({"step": checkpoint_id, "save_id": save.text, "world_size": self._persister.managers})

    def complete(self, version: Version, keep: int, is_off: Callable[[], bool]) -> None:
        """Have a checkpoint count, after all managers have written their parts.

        Args:
            version: of the attempt.
            keep: how many of the newest stay; -1 or 0: all.
            is_off: returns true if the checkpoint was rolled back, or the dictionary has ended: then it does not count.

        Raises:
            FlashpointError: a part is not there, or the store failed: nothing has changed. See `remove_failed`.
        """
        self.store.complete(version.save, version.world_size)
        with self._writing() as limit:
            if is_off():
                self.remove(version)
                return
            before = self._counting()
            after = {**before, version.step: version}
            if keep > 0:
                oldest = sorted({*self._whole(before), version.step})[-keep:][0]
                after = {each: its for each, its in after.items() if each >= oldest}
            self._listed.append(version)
            self._record(after, limit)
            goes, self._listed = [*before.values(), *self._listed], []
            self._own.add(version.save)
            for its in goes:
                if self._is_ours and after.get(its.step) is not its:
                    self.remove(its)

    def restored(self, checkpoint_id: int) -> None:
        """Go on from a checkpoint: what leads to it counts, and what comes. Raises `FlashpointError`: the store
        refuses; nothing has changed."""
        if self._is_ours:
            with self._writing() as limit:
                self._number += 1
                self._record({each: its for each, its in self._usable().items() if each <= checkpoint_id}, limit)

    def take_back(self, to: int) -> None:
        """Let the checkpoints above one count no more, from now on here, and with `record` in the store."""
        self._limit = to if self._limit is None else min(to, self._limit)

    def record(self, deadline: float | None = None) -> None:
        """Have the store know of a rollback, and remove what this dictionary has written above.

        Raises:
            DDictTimeoutError: the store was at work for too long.
            FlashpointError: it refuses: what was taken back is still offered there.
        """
        if self._limit is None:
            return
        with self._writing(deadline) as limit:
            before, after = self._checkpoints or {}, self._counting()
            if len(after) < len(before):
                self._record(after, limit)
            elif self._limit == limit:
                self._limit = None
            for each in before.keys() - after.keys():
                if self._is_ours and before[each].save in self._own:
                    self.remove(before[each])

    @contextlib.contextmanager
    def _writing(self, deadline: float | None = None) -> Iterator[int | None]:
        """Return the limit before anything is decided: a rollback from then on is another one's to record."""
        if not self._lock.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("the store of persisted checkpoints is at work")
        try:
            yield self._limit
        finally:
            self._lock.release()

    def _record(self, checkpoints: Checkpoints, limit: int | None) -> None:
        content = {"checkpoints": [save_of(checkpoints[each]) for each in sorted(checkpoints)]}
        self.store.files.write(_name_of(self._number), [encode_record(_KIND, content)])
        self._checkpoints = checkpoints
        if self._limit == limit:
            self._limit = None

    def remove_failed(self, version: Version) -> None:
        """Remove an attempt that has failed. One that a list may name stays until a list without it is written."""
        if version not in self._listed:
            self.remove(version)

    def remove(self, version: Version) -> None:
        """Remove an attempt. Log it if the store refuses."""
        try:
            # The marker first: what is half gone must not look complete.
            self.store.files.remove(f"{version.folder}/{MARKER}")
            self.store.files.remove_folder(version.folder.partition("/")[0])
        except Exception as error:  # of a persister of the user's own, perhaps
            _log.warning("a persisted checkpoint that is not wanted any more cannot be removed: %s", error)


def _name_of(number: int) -> str:
    return f"history-{number:08d}.json"


# ---- writing in the background --------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Wanted:
    """A checkpoint that is to be persisted."""

    checkpoint_id: int
    due: bool  # tried again where that fails, until it works or a later one was tried
    pause_s: float = 0.0  # before the next try, if one has failed
    again_at: float = 0.0


class Persisting:
    """The coordinator's thread that has committed checkpoints persisted. Thread-safe; what says so is called with the
    coordinator's lock held.

    Args:
        changed: the coordinator's lock; notified of what changes here.
        write: has all managers write their parts of a checkpoint as this version.
        history: what is persisted; None: nothing can be.
        keep: how many stay.
    """

    def __init__(
        self,
        changed: threading.Condition,
        write: Callable[[int, Version], object],
        history: History | None,
        keep: int,
    ) -> None:
        self._changed, self._write, self._history, self._keep = changed, write, history, keep
        self._waiting: list[_Wanted] = []
        self._current = -1
        self._called_off = False  # the current one was rolled back, or all has ended
        self._outdated = False  # it was committed again
        self._done: set[int] = set()
        self._error: FlashpointError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ddict-persist", daemon=True)
        self._thread.start()

    @property
    def history(self) -> History:
        """The account of what is persisted. Raises `DDictPersistError`: there is no persister."""
        if self._history is None:
            raise DDictPersistError("this dictionary was made without a persister", hint="pass persister_class")
        return self._history

    # ---- with the lock held -------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[int]:
        """Checkpoints that managers must keep until they are persisted. With the lock held."""
        return [each.checkpoint_id for each in self._waiting]

    def add(self, checkpoint_id: int, *, due: bool = False) -> None:
        """Have a committed checkpoint persisted, unless it is. With the lock held. ``due``: if it fails, try again
        until that works, or the next one is due."""
        found = next((each for each in self._waiting if each.checkpoint_id == checkpoint_id), None)
        if found is not None:
            found.due, found.pause_s, found.again_at = found.due or due, 0.0, 0.0  # at once: somebody waits
        elif checkpoint_id not in self._done:
            self._waiting.append(_Wanted(checkpoint_id, due))
        self._changed.notify_all()

    def state(self) -> dict[str, Any]:
        """Return the newest checkpoint that is ``persisted`` (-1: none), and the ``persist_error`` of the last that
        could not be, unless a later one was. With the lock held."""
        error = None if self._error is None else str(self._error)
        return {"persisted": max(self._done, default=-1), "persist_error": error}

    def committed(self, checkpoint_id: int) -> None:
        """Note that this was committed, perhaps again: what is persisted of it lacks late writes. With the lock
        held."""
        self._done.discard(checkpoint_id)
        self._outdated = self._outdated or self._current == checkpoint_id

    def take_back(self, to: int) -> None:
        """Note that what is above is committed no more: `record` it. With the lock held."""
        self._done = {each for each in self._done if each <= to}
        self._waiting = [each for each in self._waiting if each.checkpoint_id <= to]
        self._called_off = self._called_off or self._current > to
        self._error = None
        if self._history is not None:
            self._history.take_back(to)

    def restored(self, checkpoint_id: int) -> None:
        """Note that this persisted checkpoint is held, and nothing else. With the lock held."""
        self._done = {checkpoint_id}

    # ---- without it ---------------------------------------------------------------------------------------

    def record(self, deadline: float | None = None) -> None:
        """Have the store know of a rollback; see `History.record`. Nothing is persisted before."""
        if self._history is not None:
            self._history.record(deadline)

    def await_persisted(self, checkpoint_id: int, deadline: float) -> None:
        """Wait until a checkpoint that was added is persisted. Raises `DDictTimeoutError`: not in time;
        `FlashpointError`: it could not be persisted."""
        with self._changed:
            self._await(
                lambda: all(each.pause_s for each in self._waiting if each.checkpoint_id == checkpoint_id), deadline
            )
            if checkpoint_id not in self._done:
                raise self._error or DDictPersistError("it was rolled back", checkpoint_id=checkpoint_id)

    def await_idle(self, deadline: float) -> None:
        """Wait until nothing is to be persisted. What could not be is given up. Raises `DDictTimeoutError`: not in
        time."""

        def is_idle() -> bool:
            self._waiting = [each for each in self._waiting if not each.pause_s]
            return not self._waiting and self._current < 0

        with self._changed:
            self._await(is_idle, deadline)

    def _await(self, holds: Callable[[], bool], deadline: float) -> None:
        if not self._changed.wait_for(holds, max(0.0, deadline - time.monotonic())):
            raise DDictTimeoutError("checkpoints are still being persisted")

    def close(self) -> None:
        """Begin nothing more, and let what is under way not count."""
        with self._changed:
            self._closing = self._called_off = True
            self._changed.notify_all()
        self._thread.join(1.0)

    # ---- the thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (wanted := self._await_next()) is not None:
            failure = self._try(wanted.checkpoint_id)
            with self._changed:
                if not (self._called_off or self._outdated):
                    self._note(wanted, failure)
                    if failure is not None:
                        _log.error("checkpoint %d was not persisted: %s", wanted.checkpoint_id, failure)
                self._current = -1
                self._changed.notify_all()

    def _await_next(self) -> _Wanted | None:
        with self._changed:
            while not self._closing:
                now = time.monotonic()
                for wanted in self._waiting:
                    if wanted.again_at <= now:
                        self._current, self._called_off, self._outdated = wanted.checkpoint_id, False, False
                        return wanted
                again_at = min((each.again_at for each in self._waiting), default=None)
                self._changed.wait(None if again_at is None else again_at - now)
        return None

    def _note(self, wanted: _Wanted, failure: FlashpointError | None) -> None:
        self._error = failure
        is_wanted = wanted in self._waiting  # nobody has given it up meanwhile
        self._waiting = [each for each in self._waiting if each is not wanted and not each.pause_s]
        if failure is None:
            self._done.add(wanted.checkpoint_id)
        elif wanted.due and is_wanted:
            wanted.pause_s = min(2 * wanted.pause_s, _LONGEST_RETRY_S) or _FIRST_RETRY_S
            wanted.again_at = time.monotonic() + wanted.pause_s
            self._waiting.append(wanted)  # after those that are new: one of them takes its place

    def _try(self, checkpoint_id: int) -> FlashpointError | None:
        version = None
        try:
            self.record()
            version = self.history.new_attempt(checkpoint_id)
            self._write(checkpoint_id, version)
            self.history.complete(version, self._keep, lambda: self._called_off)
            return None
        except Exception as error:  # the thread must go on
            if version is not None:
                self.history.remove_failed(version)
            if isinstance(error, FlashpointError):
                return error
            _log.exception("persisting checkpoint %d failed", checkpoint_id)
            return DDictPersistError(f"{type(error).__name__}: {error}", checkpoint_id=checkpoint_id)
