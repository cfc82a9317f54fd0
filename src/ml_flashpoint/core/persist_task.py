"""The part of a version that is to be persisted, and its bytes.

Owns the hold on it, and how it is read. It stays in memory on loan: where a save needs its arena and there is no room
for another one, the save gets it. Bytes are compared with the digests of the manifest as they are read, so what was
overwritten is noticed, and what was damaged in memory is not persisted.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.save import Save
from ml_flashpoint.format.errors import CapacityError, DigestMismatchError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.stores.directory import read_fully
from ml_flashpoint.stores.part import PieceMemory, StoredObject, check_blocks

_SLICE_BYTES: Final = 4 << 20


@dataclass(eq=False, slots=True)
class PersistTask:
    """A version to persist, held until its part is written."""

    save_id: str
    step: int
    part: HeldPart
    manifest: Manifest
    arenas: RankStore
    descriptor: int = -1
    superseded: threading.Event = field(default_factory=threading.Event)
    hold: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def of(cls, save: Save) -> PersistTask | None:
        """Take hold of the part of a save; None if it went meanwhile, or was never here."""
        part, arenas = save.part, save.store
        if part is None or part.manifest is None or arenas is None or arenas.closed:
            return None
        task = cls(save.save_id, part.manifest.step, part, part.manifest, arenas)
        with contextlib.ExitStack() as undo:
            undo.callback(task.hold.close)
            if not task.hold.enter_context(arenas.pinned(part, loan=True)):
                return None
            path = arenas.base / part.version / part.names[0]
            # Not the mapping, whose pages may go: a file that is open keeps them.
            task.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            task.hold.callback(os.close, task.descriptor)
            undo.pop_all()
        return task

    @property
    def is_held(self) -> bool:
        """Whether it is still in memory."""
        return self.arenas.find(self.save_id, self.part.rank) is self.part

    def content(
        self, record: ObjectRecord, pause: Callable[[int], object], buffer: PieceMemory
    ) -> Iterator[memoryview]:
        """The bytes of an object, compared as they are read; then zeros, where its file has unused room.

        Args:
            record: one of the manifest.
            pause: called before each slice with its length, and once at the end, when all were used; may raise.
            buffer: of the thread that reads.

        Raises:
            CapacityError: its memory was needed for a save.
            DigestMismatchError: it is damaged.
        """
        path = os.fspath(self.arenas.base / self.part.version / record.name)

        def read(begin: int, into: memoryview) -> None:
            if not read_fully(self.descriptor, into, begin):
                raise DigestMismatchError("the object is too short", path=path)
            check_blocks(record, begin, into, path)

        try:
            for content in StoredObject(record, read, path).pieces(buffer):
                yield from _slices(content, pause)
        except DigestMismatchError as error:
            if self.is_held:
                raise
            hint = "leave room in memory for one more version of each rank, or persist faster"
            raise CapacityError("its memory was needed for a newer save", step=self.step, hint=hint) from error
        pause(0)  # what is written from here on may count


def _slices(content: memoryview, pause: Callable[[int], object]) -> Iterator[memoryview]:
    for begin in range(0, len(content), _SLICE_BYTES):
        part = content[begin : begin + _SLICE_BYTES]
        pause(len(part))
        yield part
