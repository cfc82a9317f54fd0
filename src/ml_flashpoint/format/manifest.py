"""Manifests: the record by which one rank commits its part of a version. A part exists once its manifest does.

A manifest file is one line, `MLFLASHPOINT-MANIFEST 1 <xxh3_128 of the rest>`, and then JSON, so that any flipped byte
and any truncation shows. The checksum is no defence against forgery: that is what peers authenticate for.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, is_segment
from ml_flashpoint.format.digest import BLOCK_SIZE, block_count, is_digest
from ml_flashpoint.format.errors import (
    FlashpointError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import read_file, replace_file, writing

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
_PART_FILE = re.compile(rf"rank-([0-9]{{5,8}})-({_SAVE_ID.pattern})\.(manifest|safetensors)")


def manifest_name(rank: int, save_id: str) -> str:
    """Return the file name of the manifest of a rank's part: ``rank-00003-<save id>.manifest``.

    Raises:
        InvalidArgumentError: ``rank`` is not an integer from 0 to `MAX_WORLD_SIZE` - 1, or ``save_id`` no plain name.
    """
    return _part_file(rank, save_id, "manifest")


def parse_manifest_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from a file name of `manifest_name`, or None for any other."""
    return _parse_part_file(name, "manifest")


def object_name(rank: int, save_id: str) -> str:
    """Return the file name of a rank's object: ``rank-00003-<save id>.safetensors``."""
    return _part_file(rank, save_id, "safetensors")


def parse_object_name(name: str) -> tuple[int, str] | None:
    """Return rank and save id from a file name of `object_name`, or None for any other."""
    return _parse_part_file(name, "safetensors")


def _part_file(rank: int, save_id: str, kind: str) -> str:
    _check_integer("rank", rank, 0, MAX_WORLD_SIZE - 1)
    if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):
        raise InvalidArgumentError(
            "a save id must be 1 to 128 letters, digits, '_' or '-', the first a letter or digit",
            argument="save_id",
            value=save_id,
        )
    return f"rank-{rank:05d}-{save_id}.{kind}"


def _parse_part_file(name: str, kind: str) -> tuple[int, str] | None:
    match = _PART_FILE.fullmatch(name)
    if match is None or match[3] != kind:
        return None
    rank = int(match[1])
    return (rank, match[2]) if rank < MAX_WORLD_SIZE and match[1] == f"{rank:05d}" else None


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """An object of a part, in its manifest.

    Attributes:
        name: file name in the version's directory.
        size: bytes that count, from the start of the file; the rest is unused.
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
        _check_integer("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check_integer("file_size", self.file_size, 0, _MAX_SIZE)
        _check_integer("size", self.size, 0, self.file_size)
        _check("name", self.name, is_segment(self.name), "be a file name")
        blocks, digests = block_count(self.size, self.block_size), self.digests
        is_right = isinstance(digests, tuple) and all(map(is_digest, digests)) and len(digests) == blocks
        _check("digests", digests, is_right, f"be a tuple of the digests of {blocks} blocks")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The part of a version that one rank has committed.

    Attributes:
        version: name of the version's directory, ``step-<n>_ckpt``.
        rank: global rank whose part this is.
        world_size: number of ranks, and so of parts, of the version.
        save_id: the run that saved it; letters, digits, `_` and ``-``. Later ones compare greater as strings.
        node: id of the node that the rank ran on, at most 255 bytes.
        objects: the objects of the part, with distinct names.
        labels: text by keys that readers need before they open the objects.

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
        _check_integer("world_size", self.world_size, 1, MAX_WORLD_SIZE)
        _check_integer("rank", self.rank, 0, self.world_size - 1)
        own = manifest_name(self.rank, self.save_id)
        is_version = isinstance(self.version, str) and _step_of(self.version) is not None
        _check("version", self.version, is_version, "be of the form step-<n>_ckpt")
        _check("node", self.node, is_segment(self.node), "be a name without slashes")
        are_objects = isinstance(self.objects, tuple) and all(isinstance(each, ObjectRecord) for each in self.objects)
        are_objects = are_objects and len({own, *(each.name for each in self.objects)}) == 1 + len(self.objects)
        _check("objects", self.objects, are_objects, "be a tuple of ObjectRecord with distinct names")
        are_labels = isinstance(self.labels, Mapping) and all(map(_is_label, (*self.labels, *self.labels.values())))
        _check("labels", self.labels, are_labels, f"map text to text of at most {_MAX_LABEL_CHARACTERS} characters")
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
    names = ("name", "size", "file_size", "block_size", "digests")
    content = {
        "version": m.version,
        "rank": m.rank,
        "world_size": m.world_size,
        "save_id": m.save_id,
        "node": m.node,
        "objects": [{name: getattr(record, name) for name in names} for record in m.objects],
        "labels": dict(sorted(m.labels.items())),
    }
    body = json.dumps(content, separators=(",", ":")).encode("ascii") + b"\n"
    if _HEADER_LENGTH + len(body) > MAX_MANIFEST_BYTES:
        raise InvalidArgumentError(
            f"a manifest must not exceed {MAX_MANIFEST_BYTES} bytes", argument="m", value=len(body)
        )
    return _MAGIC + xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body


def decode(data: bytes, path: str | os.PathLike[str] | None = None) -> Manifest:
    """Return the manifest that `encode` made ``data`` from. Trusts nothing in it.

    Args:
        data: content of a manifest file.
        path: the file that it was read from, if any: its name must be that of the rank and save id in it, and the name
            of its directory, if it is a version's at all, that of the version in it.

    Raises:
        ManifestError: ``data`` is not exactly what `encode` gives for some manifest, or disagrees with ``path``.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"the manifest has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}", path=path)
    header, body = data[:_HEADER_LENGTH], data[_HEADER_LENGTH:]
    if not header.startswith(_MAGIC):
        raise ManifestError("this is not a manifest, or of another format version", path=path)
    if header != _MAGIC + xxhash.xxh3_128_hexdigest(body).encode() + b"\n":
        raise ManifestError("the manifest is truncated or altered: its checksum does not match", path=path)
    try:
        content = json.loads(body.decode("ascii"))
        records = tuple(ObjectRecord(**{**each, "digests": tuple(each["digests"])}) for each in content["objects"])
        manifest = Manifest(**{**content, "objects": records})
        if encode(manifest) != data:
            raise ValueError("it is not written as manifests are")
    except (ValueError, KeyError, AttributeError, RecursionError, MemoryError, TypeError, FlashpointError) as error:
        raise ManifestError(f"the manifest is not valid: {error}", path=path) from error
    if path is not None:
        _check_place(manifest, os.fspath(path))
    return manifest


def write_manifest(directory: str | os.PathLike[str], m: Manifest, *, fsync: bool = False) -> Path:
    """Commit a part: write its manifest, whole, and return the path.

    Args:
        directory: the version's directory; must exist.
        m: the manifest. One of the same rank and save id is replaced.
        fsync: make the manifest and its directory entry durable before returning. Of no use on tmpfs.

    Raises:
        CapacityError: the filesystem is full.
        SaveError: it cannot be written for another reason.
        InvalidArgumentError: the manifest is too large.
    """
    target = Path(directory, manifest_name(m.rank, m.save_id))
    with writing(target):
        replace_file(target, [encode(m)], fsync=fsync)
    return target


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest in a file; see `decode` for how its place is checked.

    Raises:
        ObjectNotFoundError: there is no such file.
        ManifestError: it is not a regular file, or is not a valid manifest of its place.
        UnreadableError: it is there and cannot be read just now.
    """
    try:
        data = read_file(Path(path), MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError("there is no such manifest", path=path) from error
    except UnsafePathError as error:
        raise ManifestError(f"the manifest cannot be read: {error.message}", path=path) from error
    except OSError as error:
        raise UnreadableError(f"the manifest cannot be read: {error.strerror}", path=path) from error
    return decode(data, path)


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


def _is_label(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LABEL_CHARACTERS


def _check(argument: str, value: object, is_right: bool, form: str) -> None:
    if not is_right:
        raise InvalidArgumentError(f"{argument} must {form}", argument=argument, value=value)


def _check_integer(argument: str, value: object, lowest: int, highest: int) -> None:
    is_right = type(value) is int and lowest <= value <= highest
    _check(argument, value, is_right, f"be an integer from {lowest} to {highest}")
