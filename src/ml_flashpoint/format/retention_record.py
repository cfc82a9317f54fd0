"""The record of what is kept by name, and of what was gone back from: one small file on each node of a job.

Owns its content, encoding and atomic write. Every change writes the whole of it, with a higher revision, on all nodes;
where a crash has left nodes with different ones, the highest revision counts, on all. So pinning, unpinning and going
back each have happened or not. What follows from it is `ranks.retention`'s and the engine's. The file is one line,
``MLFLASHPOINT-RETENTION 1 <xxh3_128 of the rest>``, and then JSON, as manifests are; whoever reads it trusts nothing.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
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

RECORD = "retention"
"""Name of the file, in the private folder of a base container."""

MAX_LABEL_CHARACTERS = 200
"""Longest label of a pin."""

_MOST = 1000
_MAX_BYTES = 1 << 20
_MAX_REVISION = 2**53
_MAGIC = b"MLFLASHPOINT-RETENTION 1 "
_HEADER_LENGTH = len(_MAGIC) + 32 + 1


@dataclass(frozen=True, slots=True)
class Pin:
    """A version that is kept until it is unpinned.

    Attributes:
        label: by which it is unpinned; printable, not empty.
        version: its directory name.
        save_id: the save: there may be several of one step.

    Raises:
        InvalidArgumentError: a field has the wrong type or form.
    """

    label: str
    version: str
    save_id: str

    def __post_init__(self) -> None:
        checked_label(self.label)
        if not isinstance(self.version, str) or CheckpointContainerId.parse_version_container(self.version) is None:
            raise InvalidArgumentError("must be of the form step-<n>_ckpt", argument="version", value=self.version)
        manifest_name(0, self.save_id)

    @property
    def step(self) -> int:
        """The step of the version."""
        return CheckpointContainerId.parse_version_container(self.version) or 0


def checked_label(label: str) -> str:
    """A label for a pin.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not isinstance(label, str) or not 0 < len(label) <= MAX_LABEL_CHARACTERS or not label.isprintable():
        raise InvalidArgumentError(
            f"must be printable, of 1 to {MAX_LABEL_CHARACTERS} characters", argument="label", value=label
        )
    return label


@dataclass(frozen=True, slots=True)
class RetentionRecord:
    """See the module.

    Attributes:
        revision: rises with every change.
        pins: by age, labels are distinct.
        gone_back: ``(after, before)``: saves whose ids are between these were gone back from, and are never taken for
            the newest. In order, without overlap.

    Raises:
        InvalidArgumentError: a field has the wrong type or range.
    """

    revision: int = 0
    pins: tuple[Pin, ...] = ()
    gone_back: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if type(self.revision) is not int or not 0 <= self.revision <= _MAX_REVISION:
            raise InvalidArgumentError("must be a number", argument="revision", value=self.revision)
        if len(self.pins) > _MOST or len(self.gone_back) > _MOST:
            raise InvalidArgumentError(f"there may be {_MOST} pins", argument="pins", value=len(self.pins))
        if len(self.labels) != len(self.pins):
            raise InvalidArgumentError("labels must differ", argument="pins", value=self.pins)
        for after, before in self.gone_back:
            manifest_name(0, after)
            manifest_name(0, before)

    @property
    def labels(self) -> dict[str, Pin]:
        """The pins by label."""
        return {pin.label: pin for pin in self.pins}

    @property
    def bounds(self) -> tuple[str, ...]:
        """What later saves must sort after, even if a clock was set back, or they would count as gone back from."""
        return tuple(before for _, before in self.gone_back)

    @property
    def pinned(self) -> frozenset[str]:
        """Save ids of what is pinned."""
        return frozenset(pin.save_id for pin in self.pins)

    def labels_of(self, save_id: str) -> tuple[str, ...]:
        """Labels of a save."""
        return tuple(pin.label for pin in self.pins if pin.save_id == save_id)

    def is_abandoned(self, save_id: str) -> bool:
        """Whether a save was gone back from."""
        return any(after < save_id < before for after, before in self.gone_back)

    def with_pins(self, pins: Iterable[Pin]) -> RetentionRecord:
        """The next record, with these pins."""
        return replace(self, revision=self.revision + 1, pins=tuple(pins))

    def gone_back_to(self, save_id: str, before: str) -> RetentionRecord:
        """The next record, after going back to a save: all later ones, up to ``before``, are abandoned; it is not, even
        if it was gone back from earlier."""
        older = [(after, min(until, save_id)) for after, until in self.gone_back if after < save_id]
        return replace(self, revision=self.revision + 1, gone_back=(*older, (save_id, before))[-_MOST:])

    def to_json(self) -> str:
        """To be read by `from_json`."""
        pins = [[pin.label, pin.version, pin.save_id] for pin in self.pins]
        return json.dumps({"revision": self.revision, "pins": pins, "gone_back": self.gone_back})

    @classmethod
    def from_json(cls, text: str | bytes) -> RetentionRecord:
        """Reads what `to_json` wrote.

        Raises:
            DamagedError: it is anything else.
        """
        try:
            document = json.loads(text)
            pins = tuple(Pin(label, version, save_id) for label, version, save_id in document["pins"])
            gone_back = tuple((after, before) for after, before in document["gone_back"])
            return cls(document["revision"], pins, gone_back)
        except (ValueError, KeyError, TypeError, RecursionError, FlashpointError) as error:
            raise DamagedError(f"a record of pins is not one: {error}") from None


def newest_record(records: Iterable[RetentionRecord]) -> RetentionRecord:
    """The record that counts, of those that nodes have. The same for any order of them.

    Of several with the highest revision, one was never agreed on: its node was lost while it was written, and has come
    back after the others had written another one. Nobody can tell which, so all that they pin is pinned.
    """
    found = sorted(records, key=lambda record: (record.revision, len(record.gone_back), record.to_json()), reverse=True)
    if not found:
        return RetentionRecord()
    newest = found[0]
    alike = [record for record in found if record.revision == newest.revision]
    pins = {pin.label: pin for record in reversed(alike) for pin in record.pins}
    missing = [pin for label, pin in pins.items() if label not in newest.labels]
    return replace(newest, pins=(*newest.pins, *missing)[:_MOST])


def read_record(folder: Path) -> RetentionRecord:
    """The record in a private folder; an empty one if there is none.

    Raises:
        DamagedError: it is no record, or not as it was written.
        UnsafePathError: it is no file of this user.
        UnreadableError: it cannot be read just now.
    """
    path = folder / RECORD
    try:
        with open(open_own(path, os.O_RDONLY), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return RetentionRecord()
    except OSError as error:
        raise UnreadableError(f"the record of pins: {error.strerror}", path=path) from error
    header, body = data[:_HEADER_LENGTH], data[_HEADER_LENGTH:]
    if len(data) > _MAX_BYTES or header != _header(body):
        raise DamagedError("the record of pins is not as it was written", path=path)
    return RetentionRecord.from_json(body)


def write_record(folder: Path, record: RetentionRecord) -> None:
    """Put a record in the place of the one before, whole. A writer that is killed leaves at most a hidden file.

    Raises:
        CapacityError: the filesystem is full.
        SaveError: it cannot be written for another reason.
        InvalidArgumentError: it is too large.
    """
    body = record.to_json().encode()
    path, temporary = folder / RECORD, f".{RECORD}.{secrets.token_hex(4)}.tmp"
    if len(body) > _MAX_BYTES - _HEADER_LENGTH:
        raise InvalidArgumentError("there are too many pins", argument="pins", value=len(record.pins))
    try:
        descriptor = open_folder(folder)
        try:
            _sweep(descriptor)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(temporary, flags, 0o600, dir_fd=descriptor), "wb") as file:
                file.write(_header(body) + body)
            os.replace(temporary, RECORD, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        finally:
            os.close(descriptor)
    except (OSError, UnsafePathError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        why = error.message if isinstance(error, FlashpointError) else error.strerror
        raise (CapacityError if full else SaveError)(f"the record of pins cannot be written: {why}", path=path) from (
            error
        )


def remove_record(folder: Path) -> None:
    """Forget all pins, and what was gone back from."""
    (folder / RECORD).unlink(missing_ok=True)


def _sweep(descriptor: int) -> None:
    """Remove what a writer that was killed has left."""
    for name in os.listdir(descriptor):
        if name.startswith(f".{RECORD}.") and name.endswith(".tmp"):
            os.unlink(name, dir_fd=descriptor)


def _header(body: bytes) -> bytes:
    return _MAGIC + xxhash.xxh3_128_hexdigest(body).encode() + b"\n"
