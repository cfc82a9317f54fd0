"""The lineage of a job's saves: which of them count, after the job has gone back to older ones.

Owns the record of it, a small file on each node: its content, encoding and atomic write. A job that goes back to a save
adds a range, and ranges are never taken out again. So the records of several nodes need no order: all their ranges
together count, whichever node was away while the job went back.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    SaveError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.manifest import manifest_name
from ml_flashpoint.format.private_folders import open_folder, open_own

RECORD = "lineage"
"""Name of the file, in the private folder of a base container."""

_MOST = 1000
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Lineage:
    """The saves that a job has gone back from, as ranges of save ids.

    Attributes:
        gone_back: ``(target, begin)`` of each time that the job went back: saves between the target and the begin of
            the run that went on from it do not count.

    Raises:
        InvalidArgumentError: a save id has the wrong form, or there are too many ranges.
    """

    gone_back: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self.gone_back) > _MOST:
            raise InvalidArgumentError(f"at most {_MOST} ranges", argument="gone_back", value=len(self.gone_back))
        for save_id in (each for pair in self.gone_back for each in pair):
            manifest_name(0, save_id)

    def counts(self, save_id: str) -> bool:
        """Return True unless the job has gone back from a save."""
        return not any(target < save_id < begin for target, begin in self.gone_back)

    @property
    def newest(self) -> str:
        """The begin of the newest run that went back: later saves must sort after it, even if a clock was set back."""
        return max((begin for _, begin in self.gone_back), default="")

    def gone_back_to(self, save_id: str, begin: str) -> Lineage:
        """Return the lineage after the job goes back to a save that counts.

        Args:
            begin: sorts after all saves so far, and before all to come.
        """
        older = [each for each in self.gone_back if each[1] <= save_id]
        return Lineage((*older, (save_id, begin))[-_MOST:])


def merged(lineages: Iterable[Lineage]) -> Lineage:
    """Return the lineage with the ranges of all; the same for any order."""
    ranges = sorted({each for lineage in lineages for each in lineage.gone_back})
    return Lineage(tuple(ranges[-_MOST:]))


def lineage_from_json(text: str | bytes) -> Lineage:
    """Read what `lineage_to_json` wrote. Trust nothing in it.

    Raises:
        DamagedError: it is anything else.
    """
    try:
        return Lineage(tuple((target, begin) for target, begin in json.loads(text)))
    except (ValueError, TypeError, RecursionError, FlashpointError) as error:
        raise DamagedError(f"this is no lineage: {error}") from None


def lineage_to_json(lineage: Lineage) -> str:
    """Return the lineage as JSON."""
    return json.dumps(lineage.gone_back)


def read_lineage(folder: Path) -> Lineage:
    """Read the record in a private folder; an empty lineage if there is none.

    Raises:
        DamagedError: the file is no record.
        UnsafePathError: the path is no file of this user.
        UnreadableError: the file cannot be read just now.
    """
    path = folder / RECORD
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return Lineage()
    except OSError as error:
        raise UnreadableError(f"the lineage: {error.strerror}", path=path) from error
    return lineage_from_json(data)


def write_lineage(folder: Path, lineage: Lineage) -> None:
    """Replace the record in a private folder, whole. A writer that is killed leaves at most a hidden file.

    Raises:
        CapacityError: the filesystem is full.
        SaveError: the record cannot be written for another reason.
    """
    path, temporary = folder / RECORD, f".{RECORD}.{secrets.token_hex(4)}.tmp"
    try:
        descriptor = open_folder(folder)
        try:
            for name in os.listdir(descriptor):
                if name.startswith(f".{RECORD}.") and name.endswith(".tmp"):
                    os.unlink(name, dir_fd=descriptor)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=descriptor), "wb") as file:
                file.write(lineage_to_json(lineage).encode())
            os.replace(temporary, RECORD, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except (OSError, UnsafePathError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = error.message if isinstance(error, FlashpointError) else error.strerror
        raise (CapacityError if full else SaveError)(f"the lineage cannot be written: {why}", path=path) from error


def remove_lineage(folder: Path) -> None:
    """Forget what the job has gone back from."""
    (folder / RECORD).unlink(missing_ok=True)
