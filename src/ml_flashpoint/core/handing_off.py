"""The trainer's end of a save in another process: what is handed over, and how it learns what became of it.

Owns which saves are away, and what to make of the completion records that come back. The other end is `saving_process`;
the saves themselves are `checkpoint_saver`'s.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import remove_part
from ml_flashpoint.core.mailbox import CompletionRecord, Mailbox, lost
from ml_flashpoint.core.save import Save
from ml_flashpoint.core.saver import MLFlashpointCheckpointSaver
from ml_flashpoint.core.saving_process import HandOff
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, SaveError, UnreadableError
from ml_flashpoint.format.failure_kinds import is_shortage
from ml_flashpoint.format.manifest import object_name
from ml_flashpoint.ranks.rank_group import RankGroup

_log = logging.getLogger(__name__)

_RECORD_POLL_S = 0.002
"""Seconds between two looks for a completion record. No event takes their place: a process that is killed posts none,
so whoever waits has to look for the process again and again in any case, and a look for a file adds little to that."""
DESERTED_POLL_S = 0.1
_TAKE_UP_S = 120.0
"""Seconds that a process may need from the hand-off of a save until it signs for it: it may be started for that, and
import much."""


@dataclass(frozen=True, slots=True)
class _HandedOff:
    """A save in another process, and when it was handed over, in seconds of the monotonic clock."""

    save: Save
    since: float


class HandingOff(MLFlashpointCheckpointSaver):
    """What a saver in the trainer does for saves in other processes."""

    _objects: CheckpointObjectManager
    _lock: threading.RLock
    _largest: int
    _taken_size = 0
    """Bytes of the object that came from another process last."""
    _group: RankGroup

    def __init__(self) -> None:
        self._handed_off: dict[str, _HandedOff] = {}
        self._mailbox: Mailbox | None = None

    @abstractmethod
    def claim(self, save: Save) -> Save:
        """Take on a save that was offered."""

    @abstractmethod
    def _save_in(self, store: RankStore) -> None: ...

    @abstractmethod
    def _pass_on(self, save: Save, part: HeldPart, store: RankStore) -> bool: ...

    @abstractmethod
    def _is_worked_on(self, save: Save) -> bool: ...

    @abstractmethod
    def _fail_if_deserted(self, save: Save) -> bool: ...

    def hand_off(self, save: Save | None = None) -> HandOff:
        """What to pickle in place of this saver, for a process that is to write a save: the one offered as
        ``save``, or a new one.

        Raises:
            SaveError: see :meth:`claim`.
        """
        if save is not None:
            self.claim(save)
        else:
            save = self.begin(exchanged=True)
            save.worker = threading.current_thread()
        store = self._objects.store
        asked = store is not None and store.asked
        spare: Path | None = None
        size = max(self._largest, self._taken_size)
        if save.staged is None and store is not None and size:
            try:
                # Not under the lock: it may wait for an earlier save, which cannot settle without that.
                spare = self._acquire(save, store, size).path
            except FlashpointError as error:
                save.staging_error = error
        with self._lock:
            if self._mailbox is None:
                self._mailbox = Mailbox()
            if not save.decided.is_set():
                self._handed_off[save.key] = _HandedOff(save, time.monotonic())
                where = self.rank, self.world_size, self.node
                job = None if store is None else store.job_file
                return HandOff(*where, save, self._mailbox, asked, spare, os.getpid(), job)
        late = SaveError(f"the save was given up before it was handed over: {save.error}", rank=self.rank)
        self.fail(save, late)
        raise late

    def __reduce__(self) -> tuple[Any, ...]:
        return self.hand_off().__reduce__()

    def _watch(self, save: Save) -> float | None:
        """Called by the commit queue while it waits for a save, and once when it gives it up: look for the other
        process's completion record. What cannot be read for want of descriptors, say, is looked for again."""
        try:
            return self._look(save)
        except OSError as error:
            if not is_shortage(error):
                raise
            _log.warning("cannot see now what became of a save in another process: %s", error)
            return DESERTED_POLL_S

    def _look(self, save: Save) -> float | None:
        for late in [each for each in list(self._handed_off.values()) if each.save.decided.is_set()]:
            self._look_for_record(late)  # given up at its deadline; until now its process may have been writing
        away = self._handed_off.get(save.key)
        if away is None and save.error is not None:
            self.fail(save, save.error)  # at its deadline: nobody may write to its arenas any more
        elif away is None:
            self._fail_if_deserted(save)
        return DESERTED_POLL_S if away is None else self._look_for_record(away)

    def _look_for_record(self, away: _HandedOff) -> float:
        assert self._mailbox is not None
        save = away.save
        pid = self._mailbox.process_of(save.key)
        # A thread that goes on to other saves need not have waited for the process that signed for this one.
        answered = not self._is_worked_on(save) and (pid is None or not _is_running(save.worker))
        may_begin = time.monotonic() < away.since + _TAKE_UP_S
        alive = may_begin if pid is None else _is_alive(pid)
        # Asked last: a record posted just before the answer or the end is not missed.
        record = self._mailbox.record_of(save.key)
        if record is None and alive and not answered:
            return _RECORD_POLL_S
        if record is None and pid is None and not self._mailbox.revoke(save.key):
            return _RECORD_POLL_S  # it has signed just now
        if (identity := self._mailbox.identity_of(save.key)) is not None:
            self.adopt(save, identity)
        taken = None if record is None else self._taken_over(save, record)
        if taken is not None and _may_pass(taken[1]) and not save.decided.is_set():
            _log.debug("cannot take over now what another process has saved: %s", taken[1])
            return DESERTED_POLL_S
        if record is None and self._objects.store is not None:
            sweep = not alive and self._handed_off.keys() == {save.key}
            self._objects.store.withdraw(save.save_id, sweep=sweep)
        # From here on it is not looked for again: whatever could not be read was, before.
        self._handed_off.pop(save.key, None)
        self._mailbox.clear(save.key)
        if record is None or taken is None:
            why = "it failed before this rank's part was committed" if alive else "its process is gone"
            self.fail(save, lost(save, why, self.rank))
        else:
            self._take(save, record, *taken)
        return 0.0

    def _taken_over(
        self, save: Save, record: CompletionRecord
    ) -> tuple[tuple[RankStore, HeldPart] | None, Exception | None]:
        """What another process has committed, or why that cannot be had. May be asked again."""
        save.others = None if record.others is None else frozenset(record.others)
        try:
            if record.version:
                save.version = CheckpointContainerId.create_child(record.base, record.version)
            store = self._objects.open(record.base, self.rank)
            if record.error is not None:
                raise SaveError(record.error, step=save.step, rank=self.rank)
            self._save_in(store)
            return (store, store.take_over_part(record.version, save.save_id, map(Path, record.arenas))), None
        except (FlashpointError, OSError) as error:
            return None, error

    def _take(
        self,
        save: Save,
        record: CompletionRecord,
        taken: tuple[RankStore, HeldPart] | None,
        error: Exception | None,
    ) -> None:
        if taken is None:
            assert error is not None
            self._disown(save, record)
            self.fail(save, error)
            return
        store, part = taken
        assert part.manifest is not None
        self._taken_size = part.manifest.objects[0].size
        save.complete = record.complete
        self._pass_on(save, part, store)

    def _learn_completion(self, saves: list[Save]) -> None:
        """Take note of which of some saves all ranks have committed, where another process has heard of it."""
        newest = None if self._mailbox is None else self._mailbox.newest_complete()
        for save in saves:
            if save.key == newest:
                save.complete = True

    def _disown(self, save: Save, record: CompletionRecord) -> None:
        """Remove what the other process has committed, whose arenas are about to be another save's. If that fails, the
        arenas stay as they are."""
        if record.version:
            name = object_name(self.rank, save.save_id)
            remove_part(Path(record.base), record.version, self.rank, save.save_id, [name])
        # Those that are known here are the store's to free: they may hold something else by now.
        made_there = set(map(Path, record.arenas)) - {arena.path for arena in save.arenas}
        if self._objects.store is not None:
            self._objects.store.arenas.sweep_unknown(made_there)


def _may_pass(error: Exception | None) -> bool:
    """Whether what cannot be read now may be read later: descriptors come back."""
    return error is not None and (isinstance(error, UnreadableError) or is_shortage(error))


def _is_running(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
