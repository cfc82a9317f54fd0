"""The trainer's end of a save in another process: what is handed over, and how it is told what became of it.

Owns which saves are away, and what to make of the completion records that come back. The other end is `saving_process`;
the saves themselves are `checkpoint_saver`'s.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import psutil

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import HeldPart, RankStore, unpublish
from ml_flashpoint.core.commit_queue import PendingSave
from ml_flashpoint.core.mailbox import CompletionRecord, Mailbox, lost
from ml_flashpoint.core.save_ticket import SaveTicket
from ml_flashpoint.core.saver import MLFlashpointCheckpointSaver
from ml_flashpoint.core.saving_process import HandOff
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import FlashpointError, SaveError
from ml_flashpoint.format.manifest import manifest_name, object_name, read_manifest
from ml_flashpoint.ranks.rank_group import RankGroup

_NOTICE_POLL_S = 0.002
ABANDONED_POLL_S = 0.1
_TAKE_UP_S = 30.0
"""Seconds that a process may need from the hand-off of a save until it signs for it: it may be started for that, and
import much."""


class HandingOff(MLFlashpointCheckpointSaver):
    """What a saver in the trainer does for saves in other processes."""

    _objects: CheckpointObjectManager
    _lock: threading.RLock
    _handed_off: dict[str, SaveTicket]
    _mailbox: Mailbox | None
    _largest: int
    _taken_size = 0
    """Bytes of the object that came from another process last."""
    _group: RankGroup

    @abstractmethod
    def claim(self, ticket: SaveTicket) -> SaveTicket:
        """Take on a save that was offered."""

    @abstractmethod
    def _resolve(self, ticket: SaveTicket, part: HeldPart, store: RankStore) -> bool: ...

    @abstractmethod
    def _is_worked_on(self, ticket: SaveTicket) -> bool: ...

    @abstractmethod
    def _fail_if_abandoned(self, pending: PendingSave) -> bool: ...

    def hand_off(self, ticket: SaveTicket | None = None) -> HandOff:
        """What to pickle in place of this saver, for a process that is to write a save: the one offered as
        ``ticket``, or a new one.

        Raises:
            SaveError: see :meth:`claim`.
        """
        ticket = self.claim(ticket) if ticket is not None else self.begin(exchanged=True)
        ticket.worker = threading.current_thread()
        store = self._objects.store
        ticket.asked = store is not None and store.base in self._group.asked
        size = max(self._largest, self._taken_size)
        if ticket.staged is None and store is not None and size:
            try:
                # Not under the lock: it may wait for an earlier save, which cannot settle without that.
                ticket.spare = self._acquire(ticket, store, size)
            except FlashpointError as error:
                ticket.error = error
        with self._lock:
            if self._mailbox is None:
                self._mailbox = Mailbox()
            ticket.handed_off_at = time.monotonic()
            self._handed_off[ticket.key] = ticket
            return HandOff(self.rank, self.world_size, self.node, ticket, self._mailbox)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.hand_off().__reduce__()

    def _watch(self, pending: PendingSave) -> float | None:
        """Called by the commit queue while it waits for ``pending``: look for the other process's completion record."""
        for late in [t for t in list(self._handed_off.values()) if t.pending and t.pending.resolved.is_set()]:
            self._look_for_record(late)  # given up at its deadline; until now its process may have been writing
        ticket = next((t for t in list(self._handed_off.values()) if t.pending is pending), None)
        if ticket is None:
            self._fail_if_abandoned(pending)
            return ABANDONED_POLL_S
        return self._look_for_record(ticket)

    def _look_for_record(self, ticket: SaveTicket) -> float:
        assert self._mailbox is not None
        answered = not self._is_worked_on(ticket)
        pid = self._mailbox.process_of(ticket.key)
        may_begin = time.monotonic() < ticket.handed_off_at + _TAKE_UP_S
        alive = may_begin if pid is None else _is_alive(pid)
        # Asked last: a record posted just before the answer or the end is not missed.
        record = self._mailbox.take(ticket.key)
        if record is None and alive and not answered:
            return _NOTICE_POLL_S
        if record is None and pid is None and not self._mailbox.revoke(ticket.key):
            return _NOTICE_POLL_S  # it has signed just now
        self._handed_off.pop(ticket.key, None)
        if (identity := self._mailbox.noted(ticket.key)) is not None:
            self.adopt(ticket, identity)
        if record is None:
            if self._objects.store is not None:
                self._objects.store.withdraw(ticket.attempt, sweep=not alive and not self._handed_off)
            why = "it failed before this rank's part was sealed" if alive else "its process is gone"
            self.fail(ticket, lost(ticket, why, self.rank))
        else:
            self._take(ticket, record)
        return 0.0

    def _take(self, ticket: SaveTicket, record: CompletionRecord) -> None:
        step = CheckpointContainerId.parse_version_container(record.version)
        ticket.others = None if record.others is None else frozenset(record.others)
        if ticket.pending is not None:
            ticket.pending.step = step
        try:
            store = self._objects.open(record.base, self.rank)
            if record.error is not None:
                raise SaveError(record.error, step=step, rank=self.rank)
            manifest = read_manifest(store.base / record.version / manifest_name(self.rank, ticket.attempt))
            part = store.register(manifest, [store.arena_by_path(Path(p)) for p in record.arenas])
        except (FlashpointError, OSError) as error:
            self._disown(ticket, record)
            self.fail(ticket, error)
            return
        self._taken_size = manifest.objects[0].size
        for arena in ticket.arenas - set(part.arenas):
            store.release(arena)
        self._resolve(ticket, part, store)

    def _disown(self, ticket: SaveTicket, record: CompletionRecord) -> None:
        """Remove what the other process has published, whose arenas are about to be another save's. If that fails, the
        arenas stay as they are."""
        if record.version:
            name = object_name(self.rank, ticket.attempt)
            unpublish(Path(record.base), record.version, self.rank, ticket.attempt, [name])
        for path in set(map(Path, record.arenas)) - {arena.path for arena in ticket.arenas}:
            path.unlink(missing_ok=True)  # made there, and not known here


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
