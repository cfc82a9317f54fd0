"""The right to complete and remove versions in a store, which one process has at a time: by a lock, or by a record.

Where files have no locks, the right belongs to the process that has written its name last. A job that begins anew takes
over at once; the one before it finds that out before it completes or removes anything, and takes nothing back.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from contextlib import AbstractContextManager
from typing import Final

from ml_flashpoint.format.errors import DamagedError, FlashpointError, JobInUseError, ObjectNotFoundError
from ml_flashpoint.format.records import MAX_RECORD_BYTES, decode_record, encode_record
from ml_flashpoint.stores.files import Files

_LOCK: Final = "lock"
_OWNER: Final = "owner.json"
_KIND: Final = "mlflashpoint-owner-1"


class Ownership:
    """The right of one process to complete and remove versions. Not thread-safe.

    Attributes:
        taken: True if this process has it.
    """

    def __init__(self, files: Files) -> None:
        self._files = files
        self._own = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._lock: AbstractContextManager[object] | None = None
        self._is_lost = self.taken = False

    def take(self) -> None:
        """Take it. To be called again until that works.

        Raises:
            JobInUseError: another process has the lock, or has taken over from this one.
            FlashpointError: the store failed.
        """
        self._lock = locked(self._files)
        if self._lock is None:
            if self._is_lost and self._owner() is not None:
                raise self._taken_over()
            self._files.write(_OWNER, [encode_record(_KIND, {"owner": self._own})])
        self.taken, self._is_lost = True, False

    def check(self) -> None:
        """Raise a `JobInUseError` if another process has it, or the error of a store that fails."""
        if self.taken and self._lock is None and self._owner() != self._own:
            self.taken, self._is_lost = False, True
            raise self._taken_over()

    def release(self) -> None:
        """Let another process have it. Safe to call twice."""
        was_taken, self.taken = self.taken, False
        if self._lock is not None:
            self._lock.__exit__(None, None, None)
        elif was_taken:
            with contextlib.suppress(FlashpointError):  # the next owner replaces the record
                if self._owner() == self._own:
                    self._files.remove(_OWNER)

    def _owner(self) -> str | None:
        try:
            return str(decode_record(_KIND, self._files.read(_OWNER, limit=MAX_RECORD_BYTES)).get("owner"))
        except (ObjectNotFoundError, DamagedError):
            return None

    def _taken_over(self) -> JobInUseError:
        hint = "give each job a URL of its own"
        return JobInUseError("another process has taken this over", path=self._files.path_of(_OWNER), hint=hint)


def locked(files: Files) -> AbstractContextManager[object] | None:
    """Return the lock of the owner, held; None where files have no locks. Raise a `JobInUseError` if another process
    has it."""
    try:
        return files.lock(_LOCK, 0.0)
    except JobInUseError as error:
        hint = "wait until that job has ended, or give another URL"
        raise JobInUseError(f"somebody persists there: {error.message}", path=error.path, hint=hint) from error
