"""How persisted checkpoints lie in a durable store, and which of them belong to a run.

Owns the folders below, what makes a checkpoint complete and valid, the history of runs, and the lock on a name:

    <name>/lock                                    held by the coordinator of a live dictionary
    <name>/run-<run id>/run.json                   which runs this one continues, and up to where
    <name>/run-<run id>/step-<id>_ckpt/rank-<manager>-<attempt>.safetensors, .manifest    one part: a pack
    <name>/run-<run id>/step-<id>_ckpt/complete.json    the parts that count; written last

A run's checkpoints are its own and, of the run that it continues, what that one saw up to the checkpoint that was
restored, or gone back to. What the newest run that has a history does not see, does not exist for who comes after it.
Nothing is ever removed from runs that are not of this history: that is left to the user. The files are the stores'
(`stores.files`) and `packs`'.
"""

from __future__ import annotations

import itertools
import logging
import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

from ml_flashpoint.ddict.errors import DDictPersistError
from ml_flashpoint.ddict.persistence.packs import PackReader, Receipt, read_receipt, write_pack
from ml_flashpoint.ddict.persister import (
    MAX_CHECKPOINT_ID,
    CheckpointPersister,
    PersistedCheckpoint,
    check_checkpoint_id,
    check_run_id,
    new_run_id,
)
from ml_flashpoint.format import knobs
from ml_flashpoint.format.arguments import checked_integer
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import (
    DamagedError,
    InvalidArgumentError,
    InvalidNameError,
    JobInUseError,
    ManifestError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.records import MAX_RECORD_BYTES, decode_record, encode_record
from ml_flashpoint.stores.durable import MARKER, MARKER_KIND, RUN_PREFIX, try_to_remove
from ml_flashpoint.stores.files import Files

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_UNNAMED: Final = "unnamed"
_LOCK: Final = "lock"
_RUN_RECORD: Final = "run.json"
_RUN_KIND: Final = "mlflashpoint-run-2"
_RUN_LABEL: Final = "run"
_OPEN_READERS: Final = 8


class _Run(NamedTuple):
    """What `run.json` says."""

    sequence: int  # higher than that of every run that was there when it began, whatever the clocks said
    # the runs that it continues, the newest first, each with the highest id of it that belongs to the history
    lineage: tuple[tuple[str, int], ...] = ()


class StoredCheckpointPersister(CheckpointPersister):
    """Base of the persisters that write files. To use another store, override `open_store`.

    A second live dictionary of one name and path is refused, where the store has locks.

    Args:
        persist_path: where; see the class.
        name: one segment of a path, not beginning with a dot. "": ``unnamed``, which all dictionaries without a
            name share, one at a time.
        managers: see `CheckpointPersister`.

    Attributes:
        home: the folder of this name, in the store.

    Raises:
        InvalidArgumentError: `name` cannot be the name of a folder.
    """

    def __init__(self, persist_path: str = "", *, name: str = "", managers: int = 1) -> None:
        super().__init__(persist_path, name=name, managers=managers)
        try:
            self.home = validate_segment(name or _UNNAMED)
        except InvalidNameError as error:
            raise InvalidArgumentError(f"{error.message}, to be persisted", argument="name", value=name) from error
        if name.startswith("."):
            raise InvalidArgumentError("a name must not begin with a dot", argument="name", value=name)
        self._run: str | None = None
        self._held: AbstractContextManager[object] | None = None
        self._reader = lru_cache(_OPEN_READERS)(self._open)
        self._told: set[str] = set()

    @abstractmethod
    def open_store(self) -> Files:
        """Returns the store; called when it is first needed."""

    @cached_property
    def store(self) -> Files:
        """The store."""
        return self.open_store()

    # -- runs

    def begin_run(self, run_id: str, *, continues: tuple[str, int] | None = None) -> None:
        """See `CheckpointPersister.begin_run`. Waits for a dying owner of the name for `FLASHPOINT_LOCK_DEADLINE_S`.

        Also removes what runs left that never completed a checkpoint, and continue none.
        """
        check_run_id(run_id)
        self._take_lock()
        runs = self._runs()
        lineage = () if continues is None else self._lineage_after(*continues)
        # A folder with nothing in it is what is left where the record could not be written: that may be tried again.
        if self.store.list(self._folder(run_id)) or (continues is not None and continues[0] == run_id):
            raise InvalidArgumentError("a run begins once", argument="run_id", value=run_id)
        sequence = 1 + max((run.sequence for run in runs.values()), default=0)
        content = {"run": run_id, "sequence": sequence, "lineage": lineage}
        self.store.write(f"{self._folder(run_id)}/{_RUN_RECORD}", [encode_record(_RUN_KIND, content)])
        self._run = run_id
        if self._held is not None:
            lineages = [lineage, *(run.lineage for run in runs.values())]
            needed = {run_id, *(ancestor for ancestor, _ in itertools.chain(*lineages))}
            for other in self._run_ids():
                if other not in needed and not self._has_history(other):
                    try_to_remove(self.store.remove_folder, self._folder(other))

    def join_run(self, run_id: str) -> None:
        """See `CheckpointPersister.join_run`."""
        self._run = check_run_id(run_id)

    def _take_lock(self) -> None:
        if self._held is None:
            try:
                self._held = self.store.lock(f"{self.home}/{_LOCK}", knobs.lock_deadline_s())
            except JobInUseError as error:
                raise JobInUseError(
                    f"another live dictionary persists under the name {self.name!r} here",
                    path=error.path,
                    hint="give each dictionary a name, or a persist_path, of its own",
                ) from error

    def _current_run(self) -> str:
        if self._run is None:
            raise DDictPersistError("no run has begun", hint="call begin_run or join_run first")
        return self._run

    def _folder(self, run: str, checkpoint_id: int | None = None) -> str:
        folder = f"{self.home}/{RUN_PREFIX}{run}"
        if checkpoint_id is None:
            return folder
        return f"{folder}/{CheckpointContainerId.format_version_container(checkpoint_id)}"

    def _run_ids(self) -> list[str]:
        found = []
        for name in self.store.list(self.home):
            if name.startswith(RUN_PREFIX):
                try:
                    found.append(check_run_id(name[len(RUN_PREFIX) :]))
                except InvalidArgumentError:
                    continue  # nothing of ours
        return found

    def _runs(self) -> dict[str, _Run]:
        return {run: self._record(run) for run in self._run_ids()}

    def _record(self, run: str) -> _Run:
        name = f"{self._folder(run)}/{_RUN_RECORD}"
        try:
            content = decode_record(_RUN_KIND, self.store.read(name, limit=MAX_RECORD_BYTES), self.store.path_of(name))
            lineage = tuple((check_run_id(each), check_checkpoint_id(highest)) for each, highest in content["lineage"])
            if content["run"] != run or type(content["sequence"]) is not int:
                raise ManifestError("this is the record of another run", path=self.store.path_of(name))
            return _Run(content["sequence"], lineage)
        except ObjectNotFoundError:
            return _Run(0)
        except (DamagedError, InvalidArgumentError, KeyError, TypeError, ValueError) as error:
            self._tell("the history of this run is not known, which another version may have written: %s", error)
            return _Run(0)

    # -- writing

    def write_part(self, checkpoint_id: int, manager: int, index: Buffer, items: Sequence[tuple[str, Buffer]]) -> str:
        """See `CheckpointPersister.write_part`."""
        run = self._current_run()
        version = CheckpointContainerId.format_version_container(check_checkpoint_id(checkpoint_id))
        node = os.uname().nodename or "unknown"
        part = Manifest(version, manager, self.managers, new_run_id(), node, (), {_RUN_LABEL: run})
        return str(write_pack(self.store, self._folder(run, checkpoint_id), part, index, items))

    def complete(self, checkpoint_id: int, receipts: Sequence[str]) -> PersistedCheckpoint:
        """See `CheckpointPersister.complete`."""
        run = self._current_run()
        checkpoint = PersistedCheckpoint(checkpoint_id, run, self.managers, tuple(receipts))
        self._check_parts(checkpoint)
        folder = self._folder(run, checkpoint_id)
        self.store.write(f"{folder}/{MARKER}", [encode_record(MARKER_KIND, checkpoint.to_fields())])
        wanted = itertools.chain([MARKER], *(Receipt.parse(receipt).files for receipt in receipts))
        for name in set(self.store.list(folder)).difference(wanted):
            try_to_remove(self.store.remove, f"{folder}/{name}")
        return checkpoint

    def _check_parts(self, checkpoint: PersistedCheckpoint) -> None:
        folder = self._folder(checkpoint.run, checkpoint.checkpoint_id)
        for manager, receipt in enumerate(checkpoint.parts):
            manifest = read_receipt(self.store, folder, Receipt.parse(receipt))
            self._check_manifest(checkpoint, manager, manifest, self.store.path_of(folder))

    @staticmethod
    def _check_manifest(checkpoint: PersistedCheckpoint, part: int, manifest: Manifest, path: str) -> None:
        found = (manifest.step, manifest.rank, manifest.world_size, manifest.labels.get(_RUN_LABEL))
        if found != (checkpoint.checkpoint_id, part, checkpoint.managers, checkpoint.run):
            raise ManifestError(
                f"this is checkpoint {found[0]}, part {found[1]} of {found[2]}, run {found[3]}, and not"
                f" checkpoint {checkpoint.checkpoint_id}, part {part} of {checkpoint.managers}, run {checkpoint.run}",
                path=path,
            )

    # -- what there is

    def ids(self) -> list[int]:
        """See `CheckpointPersister.ids`."""
        return sorted(self._visible())

    def locate(self, checkpoint_id: int) -> PersistedCheckpoint:
        """See `CheckpointPersister.locate`."""
        found = self._visible()
        if checkpoint_id not in found:
            there = ", ".join(map(str, sorted(found))) or "none"
            raise DDictPersistError(
                f"there is no such persisted checkpoint; there are: {there}",
                checkpoint_id=checkpoint_id,
                path=self.store.path_of(self.home),
            )
        return found[checkpoint_id]

    def _visible(self) -> dict[int, PersistedCheckpoint]:
        """The checkpoints of the run, or, before it has any history, of the newest run that has some."""
        if self._run is not None and self._has_history(self._run):
            return self._history(self._run)
        runs = self._runs()
        for run in sorted(runs, key=lambda run: (runs[run].sequence, run), reverse=True):
            if runs[run].lineage or any(self._valid(run, i) for i in self._marked(run)):
                return self._history(run)
        return {}

    def _has_history(self, run: str) -> bool:
        return bool(self._marked(run) or self._record(run).lineage)

    def _history(self, run: str) -> dict[int, PersistedCheckpoint]:
        """Valid checkpoints of a run and of those that it continues; of two with one id, the latter's is left out."""
        found: dict[int, PersistedCheckpoint] = {}
        for ancestor, limit in [(run, MAX_CHECKPOINT_ID), *self._record(run).lineage]:
            for checkpoint_id in self._marked(ancestor):
                if checkpoint_id not in found and checkpoint_id <= limit:
                    checkpoint = self._valid(ancestor, checkpoint_id)
                    if checkpoint is not None:
                        found[checkpoint_id] = checkpoint
        return found

    def _lineage_after(self, run: str, limit: int) -> tuple[tuple[str, int], ...]:
        """The lineage of a run that continues another one up to a checkpoint."""
        return ((run, limit), *((each, min(limit, highest)) for each, highest in self._record(run).lineage))

    def _steps(self, run: str) -> list[int]:
        parsed = map(CheckpointContainerId.parse_version_container, self.store.list(self._folder(run)))
        return sorted(step for step in parsed if step is not None)

    def _marked(self, run: str) -> list[int]:
        return [i for i in self._steps(run) if MARKER in self.store.list(self._folder(run, i))]

    def _valid(self, run: str, checkpoint_id: int) -> PersistedCheckpoint | None:
        name = f"{self._folder(run, checkpoint_id)}/{MARKER}"
        path = self.store.path_of(name)
        try:
            content = decode_record(MARKER_KIND, self.store.read(name, limit=MAX_RECORD_BYTES), path)
            checkpoint = PersistedCheckpoint.from_fields(content)
            if (checkpoint.run, checkpoint.checkpoint_id) != (run, checkpoint_id):
                raise DamagedError("this is of another checkpoint", path=path)
            self._check_parts(checkpoint)
        except (DamagedError, ObjectNotFoundError, InvalidArgumentError) as error:
            self._tell("a persisted checkpoint cannot be used: %s", error)
            return None
        return checkpoint

    def _tell(self, message: str, error: Exception) -> None:
        """Logs a warning, once: `ids` may be called often."""
        if str(error) not in self._told:
            self._told.add(str(error))
            _log.warning(message, error)

    # -- reading

    def read_index(self, checkpoint: PersistedCheckpoint, part: int) -> bytes:
        """See `CheckpointPersister.read_index`."""
        return self._reader(checkpoint, part).index()

    def read_item(
        self, checkpoint: PersistedCheckpoint, part: int, name: str, into: Buffer | None = None
    ) -> bytes | memoryview:
        """See `CheckpointPersister.read_item`."""
        return self._reader(checkpoint, part).item(name, into)

    def _open(self, checkpoint: PersistedCheckpoint, part: int) -> PackReader:
        checked_integer("part", part, 0, checkpoint.managers - 1)
        folder = self._folder(checkpoint.run, checkpoint.checkpoint_id)
        reader = PackReader(self.store, folder, Receipt.parse(checkpoint.parts[part]))
        self._check_manifest(checkpoint, part, reader.manifest, reader.path)
        return reader

    # -- removing

    def remove(self, checkpoint_id: int) -> None:
        """See `CheckpointPersister.remove`."""
        checkpoint = self._visible().get(checkpoint_id)
        if checkpoint is not None:
            self._remove(checkpoint.run, checkpoint_id)

    def keep(self, count: int) -> None:
        """See `CheckpointPersister.keep`.

        Acts on the history of this run only. Of this run, also removes older ones that are incomplete or damaged; of
        those that it continues, also the folder, once nothing complete is left in it.
        """
        run = self._current_run()
        if checked_integer("count", count, -1) < 1:
            return
        history = self._history(run)
        kept = sorted(history)[-count:]
        if not kept:
            return
        for checkpoint_id in sorted(history.keys() - set(kept)):
            self._remove(history[checkpoint_id].run, checkpoint_id)
        for checkpoint_id in self._steps(run):
            if checkpoint_id < kept[0]:
                self._remove(run, checkpoint_id)
        for ancestor, _ in self._record(run).lineage:
            if not self._marked(ancestor):
                try_to_remove(self.store.remove_folder, self._folder(ancestor))

    def _remove(self, run: str, checkpoint_id: int) -> None:
        folder = self._folder(run, checkpoint_id)
        # The marker first: a checkpoint that is half gone must not look complete.
        self.store.remove(f"{folder}/{MARKER}")
        self.store.remove_folder(folder)

    def close(self) -> None:
        """Gives the name up. May be called twice."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)
        self._reader.cache_clear()
