"""Records, which are small JSON files that show any flipped byte and any truncation; and manifests.

A record is one JSON object with the fields `kind`, `digest` and `content`. The digest is the xxh3_128 of the content
with sorted keys and no blanks. It finds accidents, and is no defence against forgery: for that, peers authenticate.

By a manifest, a record, one rank commits its part of a version. A part exists once its manifest does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

from ml_flashpoint.format.digest import BLOCK_SIZE, block_count, digest_blocks
from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
    UnreadableError,
    UnsafePathError,
)
from ml_flashpoint.format.files import read_file, replace_file
from ml_flashpoint.format.names import (
    MAX_RUN,
    MAX_STEP,
    MAX_WORLD_SIZE,
    CheckpointContainerId,
    SaveId,
    manifest_name,
    object_name,
    validate_segment,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

JOB_LABEL: Final = "job"
"""Label of a part: the job that saved it, the same on all ranks and in no other job."""
TABLE_LABEL: Final = "table"
"""Label of a part: name of what the ranks had agreed on about who writes what."""

MAX_RECORD_BYTES: Final = 64 * 2**20
"""Largest record. As a manifest: the digests of some 50 TiB."""

MAX_BLOCK_SIZE = 2**30
"""Largest block that digests may be kept by, in bytes."""

_MAX_SIZE = 2**63 - 1
_KIND = "mlflashpoint-manifest-1"
_DIGEST = re.compile(r"[0-9a-f]{16}")


def encode_record(kind: str, content: dict[str, Any]) -> bytes:
    """Return the file of a record, whose content is plain JSON. Equal contents give equal bytes. Raise an
    `InvalidArgumentError` if it would be larger than `MAX_RECORD_BYTES`."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    data = f'{{"kind":"{kind}","digest":"{xxhash.xxh3_128_hexdigest(text.encode())}","content":{text}}}'.encode()
    if len(data) > MAX_RECORD_BYTES:
        what = f"a record must not exceed {MAX_RECORD_BYTES} bytes"
        raise InvalidArgumentError(what, argument="content", value=len(data))
    return data


def decode_record(
    kind: str, data: bytes, path: str | os.PathLike[str] | None = None, *, error: type[DamagedError] = DamagedError
) -> dict[str, Any]:
    """Return the content of a record, which remains to be checked. Raise an ``error`` if `data` is no such record."""
    if len(data) > MAX_RECORD_BYTES:
        raise error(f"a record must not exceed {MAX_RECORD_BYTES} bytes", path=path)
    try:
        record = json.loads(data.decode("ascii"))
        content = record["content"]
        if record["kind"] != kind or not isinstance(content, dict):
            raise ValueError("of another kind")
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        is_right = record["digest"] == xxhash.xxh3_128_hexdigest(canonical)
    except (ValueError, KeyError, TypeError, RecursionError, MemoryError) as caught:
        raise error(f"not a valid record of kind {kind}", path=path) from caught
    if not is_right:
        raise error("the record was altered: its digest does not match", path=path)
    return content


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """The object of a part, in its manifest.

    Attributes:
        size: bytes that count, from the start of the file; the rest is unused.
        file_size: bytes of the whole file.
        digests: digests of the blocks of the first `size` bytes, in order.
        block_size: bytes of each of those blocks but the last.
    """

    size: int
    file_size: int
    digests: tuple[str, ...]
    block_size: int = BLOCK_SIZE

    def check(self, content: Buffer, begin: int = 0, *, path: str | os.PathLike[str] | None = None) -> None:
        """Compare whole blocks of the object, from byte ``begin`` on, with their digests. Raise a `DigestMismatchError`
        if they differ; ``path`` is the object's, for the error."""
        found, first = digest_blocks(content, block_size=self.block_size), begin // self.block_size
        recorded = self.digests[first : first + len(found)]
        for block, (one, other) in enumerate(zip_longest(found, recorded), first):
            if one != other:
                at = block * self.block_size
                text = f"block {block}, from byte {at} on, has digest {one} and not {other} as recorded"
                raise DigestMismatchError(text, path=path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The part of a version that one rank has committed. Trusted: `decode` checks what comes from elsewhere.

    Attributes:
        save: the save that made it.
        rank: global rank whose part this is.
        world_size: number of ranks, and so of parts, of the version.
        node: id of the node that the rank ran on, a file name.
        labels: text by keys that readers need before they open the object.
    """

    save: SaveId
    rank: int
    world_size: int
    node: str
    record: ObjectRecord
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def object_name(self) -> str:
        """File name of the object, in the folder of the version."""
        return object_name(self.rank, self.save.text)


def encode(m: Manifest) -> bytes:
    """Return the content of the file of a manifest; see `encode_record`."""
    record = m.record
    described = {"size": record.size, "file_size": record.file_size, "block_size": record.block_size}
    content = {"run": m.save.run, "step": m.save.step, "rank": m.rank, "world_size": m.world_size, "node": m.node}
    content |= {"object": {**described, "digests": record.digests}, "labels": dict(m.labels)}
    return encode_record(_KIND, content)


def decode(data: bytes, path: str | os.PathLike[str] | None = None) -> Manifest:
    """Return the manifest that `encode` made ``data`` from. Trusts nothing in it.

    Raise a `ManifestError` if `encode` makes no such data, or the manifest disagrees with the ``path`` that it was read
    from: the file is named by its rank and run, and its directory, if that is a version's at all, by its step.
    """
    content = decode_record(_KIND, data, path, error=ManifestError)
    try:
        manifest = _parsed(content)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ManifestError(f"the manifest is not valid: {error}", path=path) from error
    save, name = manifest.save, manifest_name(manifest.rank, manifest.save.text)
    place = Path(name if path is None else path)
    if place.name != name:
        text = f"the manifest is of rank {manifest.rank}, run {save.run}, unlike its file name"
        raise ManifestError(text, path=path)
    if CheckpointContainerId.parse_version_container(place.parent.name) not in (None, save.step):
        raise ManifestError(f"the manifest is of {save.version}, unlike its directory", path=path)
    return manifest


def _parsed(content: dict[str, Any]) -> Manifest:
    """Return the manifest that JSON describes, checked. Raises `ValueError`, `TypeError` and the like if it is none."""
    described = content.pop("object")
    record = ObjectRecord(**{**described, "digests": tuple(described["digests"])})
    manifest = Manifest(save=SaveId(content.pop("run"), content.pop("step")), record=record, **content)
    for value, lowest, highest in (
        (manifest.save.run, 0, MAX_RUN),
        (manifest.save.step, 0, MAX_STEP),
        (manifest.world_size, 1, MAX_WORLD_SIZE),
        (manifest.rank, 0, manifest.world_size - 1),
        (record.block_size, 1, MAX_BLOCK_SIZE),
        (record.file_size, 0, _MAX_SIZE),
        (record.size, 0, record.file_size),
    ):
        if type(value) is not int or not lowest <= value <= highest:
            raise ValueError(f"{value!r:.80} is no integer from {lowest} to {highest}")
    validate_segment(manifest.node)
    if len(record.digests) != block_count(record.size, record.block_size):
        raise ValueError(f"{len(record.digests)} digests for {record.size} bytes")
    if not all(map(_DIGEST.fullmatch, record.digests)):
        raise ValueError("a digest is none")
    if not all(isinstance(text, str) for label in manifest.labels.items() for text in label):
        raise ValueError("a label is no text")
    return manifest


def write_manifest(directory: Path, m: Manifest) -> Path:
    """Commit a part: write its manifest into the version's directory, whole, and return the path."""
    target = directory / manifest_name(m.rank, m.save.text)
    replace_file(target, [encode(m)], fsync=False)
    return target


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return the manifest in a file, as `decode` does. Raise an `ObjectNotFoundError` if there is no such file, an
    `UnreadableError` if it cannot be read just now."""
    try:
        data = read_file(Path(path), MAX_RECORD_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError("there is no such manifest", path=path) from error
    except UnsafePathError as error:
        raise ManifestError(f"the manifest cannot be read: {error.message}", path=path) from error
    except OSError as error:
        raise UnreadableError(f"the manifest cannot be read: {error.strerror}", path=path) from error
    return decode(data, path)
