"""Holds that readers outside of the job have on parts, as the store that owns a part sees them.

Owns the protocol. A reader takes a shared lock (``flock``) on the manifest of a part. Before the store lets a part go,
it asks for an exclusive one, and waits with the part while it does not get it: for some seconds, and only while there
is room for other arenas, so a reader never costs a save. Then the part goes, its manifest first; so a reader whose
manifest has no name any more knows that what it read since may be anything.

A loan is the same within the process, for as long as it takes (see `HeldPart`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.format.knobs import reader_hold_s
from ml_flashpoint.format.manifest import manifest_name

_log = logging.getLogger(__name__)


class ReaderHolds:
    """See the module. Its user sees to it that only one thread is in it at a time.

    Args:
        base: base container of the parts.
    """

    def __init__(self, base: Path) -> None:
        self._base = base
        self._since: dict[tuple[str, int], float] = {}

    def keeps(self, part: HeldPart, *, at_once: bool = False) -> bool:
        """Whether a part has to stay for now.

        Args:
            at_once: it has to go now, whoever reads it.
        """
        key = (part.save_id, part.rank)
        if part.loans and not at_once:
            return True
        if at_once or not self._is_locked(part):
            self._since.pop(key, None)
            return False
        if time.monotonic() - self._since.setdefault(key, time.monotonic()) < reader_hold_s():
            return True
        _log.warning("%s of rank %d goes, although it is being read, for too long", part.version, part.rank)
        del self._since[key]
        return False

    def _is_locked(self, part: HeldPart) -> bool:
        path = self._base / part.version / manifest_name(part.rank, part.save_id)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False
