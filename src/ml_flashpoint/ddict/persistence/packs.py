"""Packs: many byte items in one durable file, which can be read one by one and are verified when they are.

Owns what a pack looks like, writing it from buffers without gathering them in memory, and reading ranges of it. A
pack is an object of the engine, that is, a valid safetensors file, called like one (`format.manifest.object_name`); its
items are byte items of it, `item/<name>` each, and `index` is what its writer wants to find first. The manifest
beside it records digests by blocks of 1 MiB; a pack exists once its manifest does. When it counts is up to others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import xxhash

from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError, ManifestError, ObjectFormatError
from ml_flashpoint.format.files import as_octets
from ml_flashpoint.format.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    ObjectRecord,
    decode,
    encode,
    manifest_name,
    object_name,
    parse_manifest_name,
)
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.stores.files import PIECE_BYTES, Files
from ml_flashpoint.stores.version_store import StoredObject, check_blocks, only_object

if TYPE_CHECKING:
    from typing_extensions import Buffer

PACK_BLOCK_BYTES: Final = 2**20
"""Digests are kept by blocks of this size: to read one item means to read and verify all of the blocks it lies in."""

_INDEX: Final = "index"
_ITEM: Final = "item/"
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The proof of a part: whoever has it notices any other part in its place. As text, ``<manifest>:<digest>``.

    Attributes:
        manifest: file name of the manifest.
        digest: xxh3_128 of that file, in hexadecimal.

    Raises:
        InvalidArgumentError: these are no such name and digest.
    """

    manifest: str
    digest: str

    def __post_init__(self) -> None:
        if not isinstance(self.manifest, str) or parse_manifest_name(self.manifest) is None:
            raise InvalidArgumentError("not the name of a manifest", argument="manifest", value=self.manifest)
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise InvalidArgumentError("not a digest", argument="digest", value=self.digest)

    @property
    def files(self) -> tuple[str, str]:
        """Names of the object and of its manifest."""
        parsed = parse_manifest_name(self.manifest)
        assert parsed is not None  # checked on construction
        return object_name(*parsed), self.manifest

    def __str__(self) -> str:
        return f"{self.manifest}:{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Receipt:
        """Return what `str` was called on. Raise an `InvalidArgumentError` if ``text`` is no receipt."""
        if not isinstance(text, str):
            raise InvalidArgumentError("a receipt must be text", argument="text", value=text)
        return cls(*text.partition(":")[::2])

    @classmethod
    def of(cls, rank: int, save_id: str, data: bytes) -> Receipt:
        """Return the receipt of a part, from the content of its manifest's file."""
        return cls(manifest_name(rank, save_id), xxhash.xxh3_128(data).hexdigest())


def read_receipt(files: Files, folder: str, receipt: Receipt) -> Manifest:
    """Return the manifest of a receipt, after checking that it is whole and that its object has its size.

    Raises:
        ObjectNotFoundError: one of the files is not there.
        DamagedError: the manifest is not the one that was written, or the object does not have its size.
        LoadError: the files cannot be read just now.
    """
    name = f"{folder}/{receipt.manifest}"
    path = files.path_of(name)
    data = files.read(name, limit=MAX_MANIFEST_BYTES)
    if xxhash.xxh3_128(data).hexdigest() != receipt.digest:
        raise ManifestError("this is not the manifest that was written: its digest differs", path=path)
    manifest = decode(data, path)
    record = only_object(manifest, path)
    size = files.size(f"{folder}/{record.name}")
    if size != record.file_size:
        raise DamagedError(
            f"the file has {size} bytes, and not {record.file_size} as recorded",
            path=files.path_of(f"{folder}/{record.name}"),
        )
    return manifest


def write_pack(
    store: Files, folder: str, part: Manifest, index: Buffer, items: Sequence[tuple[str, Buffer]]
) -> Receipt:
    """Writes a pack and its manifest; both are durable on return.

    Args:
        store: where to.
        folder: the folder in it; its last segment should be the version.
        part: the manifest that it is to have, without objects. No other pack of this rank there has its save id.
        index: anything.
        items: distinct names, and contiguous buffers that do not change meanwhile.

    Raises:
        InvalidArgumentError: a name occurs twice, or there are so many items (some 300,000) that the header would be
            longer than safetensors allows.
        FlashpointError: see `Files.write`.
    """
    views = [as_octets(index), *(as_octets(buffer) for _, buffer in items)]
    names = [_INDEX, *(_ITEM + name for name, _ in items)]
    layout = plan_layout([], list(zip(names, map(len, views), strict=True)), reserve=0)
    name = object_name(part.rank, part.save_id)
    digests: list[str] = []
    header = encode_header(layout, layout.size, {"flashpoint": "pack"})
    store.write(f"{folder}/{name}", digested([memoryview(header), *views], digests, PACK_BLOCK_BYTES))
    record = ObjectRecord(name, layout.size, layout.size, tuple(digests), PACK_BLOCK_BYTES)
    data = encode(dataclasses.replace(part, objects=(record,)))
    receipt = Receipt.of(part.rank, part.save_id, data)
    store.write(f"{folder}/{receipt.manifest}", [data])
    return receipt


class PackReader:
    """Reads a pack by ranges; whatever it returns has been verified. Thread-safe.

    Raises:
        FlashpointError: see `read_receipt`; `DamagedError` also for a header that is not what was written.
    """

    def __init__(self, store: Files, folder: str, receipt: Receipt) -> None:
        self.manifest = read_receipt(store, folder, receipt)
        record = self.manifest.objects[0]
        name = f"{folder}/{record.name}"
        self.path = store.path_of(name)

        def read(begin: int, into: memoryview) -> None:
            store.read_into(name, begin, into)
            check_blocks(record, begin, into, self.path)

        self._object = StoredObject(record, read, self.path)
        if _INDEX not in self._object.layout.by_key:
            raise ObjectFormatError("this is not a pack: it has no index", path=self.path)

    def index(self) -> bytes:
        """Returns the index.

        Raises:
            FlashpointError: see `item`.
        """
        return bytes(self._object.bytes_of(_INDEX))

    def item(self, name: str, into: Buffer | None = None) -> bytes | memoryview:
        """Returns an item, or reads it into the start of a writable buffer and returns that part of it.

        Raises:
            ObjectNotFoundError: there is no item of this name, or no file any more.
            DamagedError: the bytes are not what was written; names the file.
            InvalidArgumentError: `into` is too short, or cannot be written.
            LoadError: the store cannot be read.
        """
        if into is None:
            return bytes(self._object.bytes_of(_ITEM + name))
        entry = self._object.entry(_ITEM + name)
        view = as_octets(into)
        if view.readonly or len(view) < entry.nbytes:
            raise InvalidArgumentError(
                f"must be writable and have at least {entry.nbytes} bytes", argument="into", value=len(view)
            )
        view = view[: entry.nbytes]
        self._object.read_into(entry.begin, view)
        return view


def digested(chunks: Iterable[memoryview], digests: list[str], block_bytes: int) -> Iterator[memoryview]:
    """Passes chunks on, and appends the digest of each block of them as it ends, at the latest at the end."""
    block, room = xxhash.xxh3_64(), block_bytes
    for chunk in chunks:
        while len(chunk):
            # In pieces, so that what is written is still in the processor's cache.
            piece = chunk[: min(room, PIECE_BYTES)]
            chunk = chunk[len(piece) :]
            block.update(piece)
            room -= len(piece)
            if not room:
                digests.append(block.hexdigest())
                block, room = xxhash.xxh3_64(), block_bytes
            yield piece
    if room < block_bytes:
        digests.append(block.hexdigest())
