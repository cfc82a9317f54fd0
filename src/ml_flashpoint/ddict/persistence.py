"""The persisted checkpoints of a dictionary: one more holder of its committed cuts, which outlives it.

Owns which of them count; when one is written, `rules` decide. A checkpoint is a version of
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
from functools import cached_property
from typing import TYPE_CHECKING, Final

import xxhash

from ml_flashpoint.ddict.errors import DDictPersistError, DDictTimeoutError
from ml_flashpoint.ddict.options import Configuration, next_number
from ml_flashpoint.format import knobs
from ml_flashpoint.format.errors import (
    DamagedError,
    InvalidArgumentError,
    JobInUseError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.files import as_octets
from ml_flashpoint.format.manifest import MAX_RECORD_BYTES, Manifest, ObjectRecord, decode_record, encode_record
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.stores.durable import MARKER, DurableVersions, save_of, version_of
from ml_flashpoint.stores.version_store import StoredObject, Version

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 1 << 20  # to read one item means to read and check all of the blocks that it lies in
_PIECE_BYTES: Final = 1 << 16
_LOCK: Final = "lock"
_HISTORY: Final = re.compile(r"history-([0-9]{8,12})\.json")
_KIND: Final = "mlflashpoint-dictionary-1"
_DAMAGE: Final = (DamagedError, ObjectNotFoundError, InvalidArgumentError, KeyError, TypeError, AttributeError)

Checkpoints = dict[int, Version]


# ---- parts ----------------------------------------------------------------------------------------------------------


def write_part(store: DurableVersions, version: Version, manager: int, items: Sequence[tuple[str, Buffer]]) -> None:
    """Write one manager's part of a checkpoint, durably: a safetensors file with these items, and its manifest."""
    views = [as_octets(buffer) for _, buffer in items]
    layout = plan_layout([], [(name, len(view)) for (name, _), view in zip(items, views, strict=True)], reserve=0)
    chunks = [memoryview(encode_header(layout, layout.size, {"flashpoint": "dictionary"})), *views]
    record = ObjectRecord(layout.size, layout.size, tuple(_digests(chunks)), _BLOCK_BYTES)
    manifest = Manifest(version.save, manager, version.world_size, os.uname().nodename or "unknown", record)
    store.write_part(manifest, lambda: chunks)


def open_part(store: DurableVersions, version: Version, manager: int) -> StoredObject:
    """Return a part to read from; whatever it returns was compared with its digests."""
    return StoredObject(store.manifest(version, manager), [store])


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

    @cached_property
    def store(self) -> DurableVersions:
        """The versions."""
        return DurableVersions(self._persister.open_store())

    def begin(self) -> None:
        """Take the right to write here, and remove what others have not completed."""
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
        """Give the name up: whoever is next goes on from what is listed, and this one removes none of it any more."""
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
        """Return those whose parts are all there."""
        there = {version.save: version for version in self.store.versions()} if checkpoints else {}
        whole: Checkpoints = {}
        for checkpoint_id, version in checkpoints.items():
            found = there.get(version.save)
            try:
                if found is None or not found.counts:
                    raise DamagedError(found.problem if found else "it is gone", path=version.folder)
                self.store.check_parts(version)
                whole[checkpoint_id] = version
            except (DamagedError, ObjectNotFoundError, InvalidArgumentError) as error:
                _log.warning("persisted checkpoint %d cannot be used: %s", checkpoint_id, error)
        return whole

    def _files(self) -> list[int]:
        return sorted(int(found[1]) for each in self.store.files.list() if (found := _HISTORY.fullmatch(each)))

    def _newest_file(self) -> Checkpoints:
        for number in reversed(self._files()):
            name = _name_of(number)
            try:
                data = self.store.files.read(name, limit=MAX_RECORD_BYTES)
                listed = map(version_of, decode_record(_KIND, data, self.store.files.path_of(name))["checkpoints"])
                return {version.step: version for version in listed}
            except _DAMAGE as error:
                _log.warning("a list of persisted checkpoints cannot be used, and an older one is: %s", error)
        return {}

    # ---- writing ------------------------------------------------------------------------------------------

    def new_attempt(self, checkpoint_id: int) -> Version:
        """Return the version that an attempt to persist a checkpoint writes."""
        self._newest = next_number(self._newest)
        save = SaveId(self._newest, checkpoint_id)
        return version_of({"step": checkpoint_id, "save_id": save.text, "world_size": self._persister.managers})

    def complete(self, version: Version, keep: int, is_off: Callable[[], bool]) -> None:
        """Have a checkpoint count, after all managers have written their parts, and the newest ``keep`` (-1 or 0: all).
        Unless ``is_off()``: it was rolled back, or the dictionary has ended. Raises `FlashpointError`: a part is not
        there, or the store failed: nothing has changed; see `remove_failed`."""
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
        """Go on from a checkpoint: what leads to it counts, and what comes."""
        if self._is_ours:
            with self._writing() as limit:
                self._number += 1
                self._record({each: its for each, its in self._usable().items() if each <= checkpoint_id}, limit)

    def take_back(self, to: int) -> None:
        """Let the checkpoints above one count no more, from now on here, and with `record` in the store."""
        self._limit = to if self._limit is None else min(to, self._limit)

    def record(self, deadline: float | None = None) -> None:
        """Have the store know of a rollback, and remove what this dictionary has written above."""
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
