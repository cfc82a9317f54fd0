"""Manifests: the record by which one rank commits its part of a version.

Owns the names of the files of a part, the content and encoding of a manifest, and its atomic write. A part
exists from the moment its manifest does; a version is complete when the parts of all ranks exist with one
save id, which is for `ranks.recovery` to decide. Whether the objects' bytes have the digests recorded here is
checked by `format.digest`. Knows neither torch nor any process group.

A manifest file is one line, `MLFLASHPOINT-MANIFEST 1 <xxh3_128 of the rest>`, and then JSON, so that any
flipped byte and any truncation shows. The checksum is no defence against forgery: that is what peers
authenticate for.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.digest import BLOCK_SIZE, block_count, is_digest
from ml_flashpoint.format.errors import (
    CapacityError,
    FlashpointError,
    InvalidArgumentError,
    InvalidNameError,
    ManifestError,
    ObjectNotFoundError,
    SaveError,
    UnreadableError,
)

MAX_MANIFEST_BYTES = 64 * 2**20
"""Largest encoded manifest: the digests of some 50 TiB."""

MAX_WORLD_SIZE = 2**24
"""Largest number of ranks in a job."""

MAX_BLOCK_SIZE = 2**30
"""Largest block that digests may be kept by, in bytes."""

_MAX_SIZE = 2**63 - 1
_MAX_LABEL_CHARACTERS = 4096
_MAGIC = b"MLFLASHPOINT-MANIFEST 1 "
_HEADER_LENGTH = len(_MAGIC) + 32 + 1
_SAVE_ID = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")
_PART_FILE = re.compile(rf"rank-([0-9]{{5,8}})-({_SAVE_ID.pattern})\.([0-9A-Za-z][0-9A-Za-z._-]*)")
_MANIFEST_KIND = "manifest"
# The save id keeps the name that it had when the format was made.
_CONTENT = ("version", "rank", "world_size", "attempt", "node", "objects", "labels")
_KIND = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")


def manifest_name(rank: int, save_id: str) -> str:
    """Return the file name of the manifest of a rank's part: ``rank-00003-<save id>.manifest``.

    The save id is in it so that the parts of two saves of one step can stand side by side: the earlier save
    must stay whole until the later one is.

    Raises:
        InvalidArgumentError: ``rank`` is not an integer from 0 to `MAX_WORLD_SIZE` - 1, or ``save_id`` no plain name.
    """
    return _part_file(rank, save_id, _MANIFEST_KIND)


def parse_manifest_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from a manifest's file name, or ``None`` if `manifest_name` would not have written it."""
    parsed = _parse_part_file(name)
    return parsed[:2] if parsed is not None and parsed[2] == _MANIFEST_KIND else None


def object_name(rank: int, save_id: str, kind: str = "safetensors") -> str:
    """Return the file name of a rank's object: ``rank-00003-<save id>.<kind>``.

    Raises:
        InvalidArgumentError: ``rank`` is out of range, or ``save_id`` or ``kind`` is not a plain name.
    """
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or kind == _MANIFEST_KIND:
        raise InvalidArgumentError("kind must be a file name extension", argument="kind", value=kind)
    return _part_file(rank, save_id, kind)


def parse_object_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from an object's file name, or ``None`` if `object_name` would not have written it."""
    parsed = _parse_part_file(name)
    return parsed[:2] if parsed is not None and parsed[2] != _MANIFEST_KIND else None


def _part_file(rank: int, save_id: str, kind: str) -> str:
    _check_rank(rank)
    _check_save_id(save_id)
    return f"rank-{rank:05d}-{save_id}.{kind}"


def _parse_part_file(name: str) -> tuple[int, str, str] | None:
    match = _PART_FILE.fullmatch(name)
    if match is None:
        return None
    rank = int(match[1])
    canonical = rank < MAX_WORLD_SIZE and match[1] == f"{rank:05d}"
    return (rank, match[2], match[3]) if canonical else None


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """What a manifest says about one object of its part.

    Attributes:
        name: file name in the version's directory.
        size: bytes, from the start of the file, that count: the rest of the file is unused room.
        file_size: bytes of the whole file.
        digests: digests of the blocks of the first `size` bytes, in order.
        block_size: bytes of each of those blocks but the last.

    Raises:
        InvalidArgumentError: A field has the wrong type, is out of range, or disagrees with another one.
    """

    name: str
    size: int
    file_size: int
    digests: tuple[str, ...]
    block_size: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        try:
            validate_segment(self.name)
        except InvalidNameError as error:
            raise InvalidArgumentError(error.message, argument="name", value=self.name) from error
        _check_integer("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_integer("file_size", self.file_size, 0, _MAX_SIZE)
        _check_integer("size", self.size, 0, self.file_size)
        if not isinstance(self.digests, tuple) or not all(map(_is_digest, self.digests)):
            raise InvalidArgumentError(
                "digests must be a tuple of 16 hexadecimal digits each",
                argument="digests",
                value=self.digests,
            )
        expected = block_count(self.size, self.block_size)
        if len(self.digests) != expected:
            raise InvalidArgumentError(
                f"an object of {self.size} bytes has {expected} blocks of {self.block_size} bytes,"
                f" not {len(self.digests)}",
                argument="digests",
                value=self.digests,
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The part of a version that one rank has committed. Compared by value; `labels` makes it unhashable.

    Attributes:
        version: name of the version's directory, ``step-<n>_ckpt``.
        rank: global rank whose part this is.
        world_size: number of ranks, and so of parts, of the version.
        save_id: common to all parts of one save of the step; letters, digits, `_` and ``-``. Later
            save ids compare greater as strings.
        node: id of the node that the rank ran on, at most 255 bytes.
        objects: the objects of the part, with distinct names.
        labels: anything else that the writer wants known before the objects are opened.

    Raises:
        InvalidArgumentError: A field has the wrong type, is out of range, or disagrees with another one.
    """

    version: str
    rank: int
    world_size: int
    save_id: str
    node: str
    objects: tuple[ObjectRecord, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.version, str) or _step_of(self.version) is None:
            raise InvalidArgumentError(
                "version must be of the form step-<n>_ckpt", argument="version", value=self.version
            )
        _check_integer("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _check_integer("rank", self.rank, 0, self.world_size - 1)
        _check_save_id(self.save_id)
        try:
            validate_segment(self.node)
        except InvalidNameError as error:
            raise InvalidArgumentError(error.message, argument="node", value=self.node) from error
        if not isinstance(self.objects, tuple) or not all(isinstance(o, ObjectRecord) for o in self.objects):
            raise InvalidArgumentError(
                "objects must be a tuple of ObjectRecord", argument="objects", value=self.objects
            )
        names = {record.name for record in self.objects}
        if len(names) != len(self.objects):
            raise InvalidArgumentError("objects must have distinct names", argument="objects", value=self.objects)
        own_name = manifest_name(self.rank, self.save_id)
        if own_name in names:
            raise InvalidArgumentError(
                "an object must not be called like its manifest", argument="objects", value=own_name
            )
        if not isinstance(self.labels, Mapping) or not all(
            _is_label(text) for item in self.labels.items() for text in item
        ):
            raise InvalidArgumentError(
                f"labels must map strings to strings of at most {_MAX_LABEL_CHARACTERS} characters",
                argument="labels",
                value=self.labels,
            )
        # A copy, so that the caller's later changes do not show up in a record that is meant to be final.
        object.__setattr__(self, "labels", dict(self.labels))

    @property
    def step(self) -> int:
        """Training step of the version."""
        step = _step_of(self.version)
        assert step is not None  # checked on construction
        return step

    @property
    def total_size(self) -> int:
        """Bytes of all objects of the part that count."""
        return sum(record.size for record in self.objects)


def encode(m: Manifest) -> bytes:
    """Return the content of the file of a manifest; equal manifests give equal bytes.

    Raises:
        InvalidArgumentError: it would be larger than `MAX_MANIFEST_BYTES`.
    """
    content = {
        "version": m.version,
        "rank": m.rank,
        "world_size": m.world_size,
        "attempt": m.save_id,
        "node": m.node,
        "objects": [
            {
                "name": record.name,
                "size": record.size,
                "file_size": record.file_size,
                "block_size": record.block_size,
                "digests": record.digests,
            }
            for record in m.objects
        ],
        "labels": dict(sorted(m.labels.items())),
    }
    body = json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n"
    if _HEADER_LENGTH + len(body) > MAX_MANIFEST_BYTES:
        raise InvalidArgumentError(
            f"a manifest must not exceed {MAX_MANIFEST_BYTES} bytes", argument="m", value=len(body)
        )
    return _MAGIC + _checksum(body) + b"\n" + body


def decode(data: bytes, path: str | os.PathLike[str] | None = None) -> Manifest:
    """Return the manifest that `encode` made ``data`` from. Trusts nothing in it.

    Args:
        data: content of a manifest file.
        path: where it was read from, if it is a file: then its name must be that of the rank and save id in it, and its
            directory's name, if it is a version's at all, that of the version in it.

    Raises:
        ManifestError: ``data`` is not exactly what `encode` gives for some manifest, or disagrees with ``path``.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}", path=path)
    header, body = data[:_HEADER_LENGTH], data[_HEADER_LENGTH:]
    if not header.startswith(_MAGIC):
        raise ManifestError("this is not a manifest, or of another format version", path=path)
    if header != _MAGIC + _checksum(body) + b"\n":
        raise ManifestError("the manifest is truncated or altered: its checksum does not match", path=path)
    try:
        manifest = _from_content(json.loads(body.decode("ascii"), object_pairs_hook=_unique_pairs))
    except (ValueError, RecursionError, MemoryError, TypeError, FlashpointError) as error:
        raise ManifestError(f"the manifest is not valid: {error}", path=path) from error
    if path is not None:
        _check_place(manifest, os.fspath(path))
    return manifest


def write_manifest(directory: str | os.PathLike[str], m: Manifest, *, fsync: bool = False) -> Path:
    """Commit a part: makes its manifest appear in ``directory``, whole, beside those of the rank's other save ids.

    One of the same rank and save id is replaced. A writer that is killed leaves at most a hidden ``.*.tmp`` file.

    Args:
        directory: the version's directory; must exist.
        m: the manifest.
        fsync: make the manifest and its directory entry durable before returning. Of no use on tmpfs.

    Returns:
        Path of the manifest.

    Raises:
        CapacityError: the filesystem is full.
        SaveError: it cannot be written for another reason.
        InvalidArgumentError: the manifest is too large.
    """
    data = encode(m)
    target = Path(directory, manifest_name(m.rank, m.save_id))
    temporary = Path(directory, f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        try:
            _write_new_file(temporary, data, fsync)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if fsync:
            sync_directory(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                "no room for the manifest", needed_bytes=len(data), step=m.step, rank=m.rank, path=target
            ) from error
        raise SaveError(
            f"the manifest cannot be written: {error.strerror}", step=m.step, rank=m.rank, path=target
        ) from error
    return target


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest in a file; see `decode` for how its place is checked.

    Raises:
        ObjectNotFoundError: there is no such file.
        ManifestError: it is not a regular file, or is not a valid manifest of its place.
        UnreadableError: it is there and cannot be read just now.
    """
    try:
        # Without O_NONBLOCK, a FIFO of this name would block the reader for good.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ManifestError("the manifest is not a regular file", path=path)
            # Not simply the most that is allowed: Python makes room for as much as is asked for, which takes 4 ms.
            data = file.read(min(status.st_size, MAX_MANIFEST_BYTES) + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError("there is no such manifest", path=path) from error
    except OSError as error:
        # A link or a directory is nobody's manifest; anything else may be the system's fault, not the file's.
        kind = ManifestError if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR) else UnreadableError
        raise kind(f"the manifest cannot be read: {error.strerror}", path=path) from error
    return decode(data, path)


def _write_new_file(path: Path, data: bytes, fsync: bool) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        remaining = memoryview(data)
        while remaining:
            remaining = remaining[file.write(remaining) :]
        if fsync:
            os.fsync(descriptor)


def sync_directory(directory: Path) -> None:
    """Have what was created, renamed or removed in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network filesystems do not know this
            raise
    finally:
        os.close(descriptor)


def _checksum(body: bytes) -> bytes:
    return xxhash.xxh3_128_hexdigest(body).encode("ascii")


def _from_content(content: object) -> Manifest:
    fields = _fields(content, "the manifest", _CONTENT)
    records = []
    for item in _list(fields["objects"], "objects"):
        record = _fields(item, "an object", ObjectRecord.__dataclass_fields__)
        records.append(ObjectRecord(**{**record, "digests": tuple(_list(record["digests"], "digests"))}))
    save_id = fields.pop("attempt")
    return Manifest(**{**fields, "save_id": save_id, "objects": tuple(records)})


def _fields(value: object, what: str, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != set(names):
        raise ValueError(f"{what} must have exactly the fields {', '.join(names)}")
    return value


def _list(value: object, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} must be a list")
    return value


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a name occurs twice")
    return unique


def _check_place(manifest: Manifest, path: str) -> None:
    directory, name = os.path.split(path)
    if name != manifest_name(manifest.rank, manifest.save_id):
        own = f"rank {manifest.rank}, save id {manifest.save_id}"
        raise ManifestError(f"the manifest is of {own}, unlike its file name", path=path)
    container = os.path.basename(directory)
    if container != manifest.version and _step_of(container) is not None:
        raise ManifestError(f"the manifest is of version {manifest.version}, unlike its directory", path=path)


def _step_of(version: str) -> int | None:
    return CheckpointContainerId.parse_version_container(version)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and is_digest(value)


def _is_label(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LABEL_CHARACTERS


def _check_integer(argument: str, value: object, lowest: int, highest: int) -> None:
    # A bool is an int to Python, but not to whoever reads a manifest.
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidArgumentError(
            f"{argument} must be an integer from {lowest} to {highest}", argument=argument, value=value
        )


def _check_rank(rank: object) -> None:
    _check_integer("rank", rank, 0, MAX_WORLD_SIZE - 1)


def _check_save_id(save_id: object) -> None:
    if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):
        raise InvalidArgumentError(
            "a save id must be 1 to 128 letters, digits, '_' or '-', the first a letter or digit",
            argument="save_id",
            value=save_id,
        )
