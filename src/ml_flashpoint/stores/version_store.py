"""The one interface of everything that holds versions of a job: a base container, a directory, a URL.

Nothing is handed out of an object whose blocks were not compared with their digests: see `StoredObject`. Which version
to take, and copying from store to store, is `tools`'.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    FlashpointError,
    JobInUseError,
    ManifestError,
    ObjectFormatError,
    ObjectNotFoundError,
    PrunedError,
    SaveError,
    UnreadableError,
    is_damage,
)
from ml_flashpoint.format.manifest import JOB_LABEL, MAX_RECORD_BYTES, Manifest, ObjectRecord, decode, encode
from ml_flashpoint.format.names import SaveId, manifest_name
from ml_flashpoint.format.object_format import Entry, Layout, header_length, parse_header
from ml_flashpoint.memory.lineage import RunRecord
from ml_flashpoint.stores.files import PIECE_BYTES, Files

if TYPE_CHECKING:
    from typing_extensions import Buffer

_log = logging.getLogger(__name__)

_CACHED_BLOCKS: Final = 2
_ZEROS: Final = bytes(1 << 20)
UNKNOWN: Final = SaveId(0, -1)
"""The save of a version whose name cannot be read."""


@dataclass(frozen=True, slots=True)
class Version:
    """One save of one step, in one store.

    Attributes:
        save: its name; `UNKNOWN` if that cannot be read.
        folder: of the version, in the store.
        ranks: ranks whose parts are there, by the names of files or by the marker.
        world_size: number of ranks that saved it; 0 if not known.
        counts: True if the parts may be read: a durable version has its marker.
        problem: the damage that was found without reading parts; "" if none was.
        job: the job that saved it, as the labels of its manifests have it; "" if not known.
    """

    save: SaveId
    folder: str
    ranks: Sequence[int] = ()
    world_size: int = 0
    counts: bool = False
    problem: str = ""
    job: str = ""

    @property
    def step(self) -> int:
        """Training step."""
        return self.save.step

    @property
    def save_id(self) -> str:
        """The run that saved it, as its files spell it; "" if not known."""
        return "" if self.save == UNKNOWN else self.save.text

    @property
    def name(self) -> str:
        """Name of its folder: ``step-<n>_ckpt``."""
        return self.save.version

    @property
    def complete(self) -> bool:
        """True if the store has the parts of all ranks."""
        return self.counts and len(self.ranks) == self.world_size > 0


class VersionStore(ABC):
    """Versions in files; ``path`` is for messages. Calls block; several threads may read, and write parts of different
    ranks. What cannot be read just now is an `UnreadableError`, and no reason for an older version."""

    durable: bool
    """True if its versions outlive memory: then the newest one is removed only when that is asked for."""

    def __init__(self, files: Files, path: str) -> None:
        self.files, self.path = files, path

    @abstractmethod
    def folder_of(self, save: SaveId) -> str:
        """Return the folder of a save."""

    @abstractmethod
    def versions(self) -> list[Version]:
        """Return all versions, the newest save first, with those that are incomplete or damaged."""

    @abstractmethod
    def has(self, save: SaveId, rank: int) -> bool:
        """Return False if a part was removed since it was listed: then nothing about it is damage."""

    @abstractmethod
    def remove(self, step: int | None, check: Callable[[], None] = lambda: None) -> list[str]:
        """Remove all versions of a step, oldest first; of None, all versions and what else the job has left. Return
        their folders. ``check`` is called before each removal, and may raise. Raise an `ObjectNotFoundError` if there
        is none, a `SaveError` if one cannot be removed: those removed before are gone."""

    def manifest(self, version: Version, rank: int) -> Manifest:
        """Return the manifest of a rank's part. Raise an `ObjectNotFoundError` if there is no such part, or a
        `DamagedError` if the manifest is not as it was saved."""
        if rank not in version.ranks:
            raise ObjectNotFoundError("there is no part of this rank", step=version.step, rank=rank, path=self.path)
        manifest = self._manifest(version.save, rank)
        if version.world_size not in (0, manifest.world_size):
            path = self.files.path_of(version.folder)
            raise ManifestError(f"this is a part of {manifest.world_size} ranks", rank=rank, path=path)
        if version.job not in ("", manifest.labels.get(JOB_LABEL)):
            text, hint = "another job has written this part", "give each job a URL of its own"
            raise ManifestError(text, step=version.step, rank=rank, path=self.path_of(manifest), hint=hint)
        return manifest

    def _manifest(self, save: SaveId, rank: int) -> Manifest:
        name = f"{self.folder_of(save)}/{manifest_name(rank, save.text)}"
        return decode(self.files.read(name, limit=MAX_RECORD_BYTES), self.files.path_of(name))

    def check_size(self, manifest: Manifest) -> None:
        """Check that the object of a part is there, and as long as it should be. Raises what `manifest` raises."""
        size, wanted = self.files.size(self._name_of(manifest)), manifest.record.file_size
        if size != wanted:
            text = f"the object has {size} bytes, and {wanted} were committed"
            raise DamagedError(text, rank=manifest.rank, path=self.path_of(manifest))

    def check_parts(self, version: Version, moved: Callable[[], None] = lambda: None) -> None:
        """Check that all parts of a version are there, with their sizes; ``moved`` is called after each. Content is not
        read. Raises what `manifest` raises."""
        for rank in version.ranks:
            self.check_size(self.manifest(version, rank))
            moved()

    def read_into(self, manifest: Manifest, begin: int, into: memoryview) -> None:
        """Fill a view with bytes of a part's object, from byte ``begin`` on. Raises what `manifest` raises."""
        self.files.read_into(self._name_of(manifest), begin, into)

    def path_of(self, manifest: Manifest) -> str:
        """Return the path or URL of a part's object."""
        return self.files.path_of(self._name_of(manifest))

    def _name_of(self, manifest: Manifest) -> str:
        return f"{self.folder_of(manifest.save)}/{manifest.object_name}"

    def write_part(
        self, manifest: Manifest, content: Callable[[], Iterable[Buffer]], moved: Callable[[], None] = lambda: None
    ) -> bool:
        """Write a part, durably: its object, then its manifest. Return False if it was there already.

        A part that is there is compared with its digests, and written anew if it is damaged. ``content`` returns the
        bytes of the object, as many as its file has, in pieces. ``moved`` is called for each piece that is compared.
        Raises a `JobInUseError` if the part is another job's: same run, same step is the same state.
        """
        save, rank = manifest.save, manifest.rank
        with contextlib.suppress(DamagedError, ObjectNotFoundError, PrunedError):  # the usual case
            if self._manifest(save, rank) != manifest:
                text, hint = "there is another part of this name, of another job", "give each job a URL of its own"
                raise JobInUseError(text, step=save.step, rank=rank, path=self.path_of(manifest), hint=hint)
            for _ in StoredObject(manifest, [self]).pieces():
                moved()
            return False
        written = self.files.write(self._name_of(manifest), iter(content()))
        if written != manifest.record.file_size:
            text = f"{written} bytes were written, and not {manifest.record.file_size}"
            raise SaveError(text, step=save.step, rank=rank, path=self.path_of(manifest))
        self.files.write(f"{self.folder_of(save)}/{manifest_name(rank, save.text)}", [encode(manifest)])
        return True

    def records(self) -> list[RunRecord]:
        """Return the records of runs that the store has, by which versions exist; none if it has no records."""
        return []

    def hold(self, manifest: Manifest) -> AbstractContextManager[object]:
        """Have a running job keep a part until this is left, if it can. Raise a `PrunedError` if the part went."""
        return contextlib.nullcontext()


class StoredObject:
    """The object of a part that several stores hold, read by ranges. Thread-safe.

    A block that one store cannot give is read from the next. Whole blocks are read to where they are wanted. Of blocks
    that are wanted in part, the last two stay in memory.
    """

    def __init__(self, manifest: Manifest, stores: Sequence[VersionStore]) -> None:
        self.manifest, self.record, self.path = manifest, manifest.record, stores[0].path_of(manifest)
        self._stores = stores
        self._block = lru_cache(maxsize=_CACHED_BLOCKS)(self._read_block)

    def _read_blocks(self, begin: int, into: memoryview) -> None:
        """Fill a view with whole blocks, from byte ``begin`` on, compared with their digests."""
        save, rank, failures = self.manifest.save, self.manifest.rank, list[FlashpointError]()
        for store in self._stores:
            path = store.path_of(self.manifest)
            try:
                store.read_into(self.manifest, begin, into)
                return self.record.check(into, begin, path=path)
            except (DamagedError, ObjectNotFoundError, PrunedError, UnreadableError) as error:
                failures.append(error)
                if isinstance(error, (DigestMismatchError, ObjectNotFoundError)) and not store.has(save, rank):
                    text, hint = "the version was pruned while it was read", "read the newest version"
                    failures[-1] = PrunedError(text, step=save.step, rank=rank, path=path, hint=hint)
            if len(failures) < len(self._stores):
                _log.warning("rank %d: taking another copy: %s", rank, failures[-1])
        # What cannot be read just now may be sound: no reason for an older version.
        raise next((error for error in failures if not is_damage(error)), failures[0])

    def _read_block(self, block: int) -> bytearray:
        begin = block * self.record.block_size
        content = bytearray(min(self.record.block_size, self.record.size - begin))
        self._read_blocks(begin, memoryview(content))
        return content

    @cached_property
    def layout(self) -> Layout:
        """The items of the object; see `read_layout`."""
        return read_layout(self.record, self.read, self.path)

    def entry(self, key: str) -> Entry:
        """Return the place of an item. Raise an `ObjectNotFoundError` if there is none."""
        found = self.layout.by_key.get(key)
        if found is None:
            raise ObjectNotFoundError(f"the object has no item {str(key)[:80]!a}", path=self.path)
        return found

    def bytes_of(self, key: str) -> memoryview:
        """Return an item, in memory of its own."""
        entry = self.entry(key)
        return memoryview(self.read(entry.begin, entry.end))

    def read(self, begin: int, end: int) -> bytearray:
        """Return bytes ``begin:end``. Raises what `read_into` raises."""
        if not 0 <= begin <= end <= self.record.size:
            raise DamagedError(f"the file has no bytes {begin} to {end}", path=self.path)
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return content

    def read_into(self, begin: int, into: memoryview) -> None:
        """Fill a view from byte ``begin`` on. Raise a `PrunedError` if a running job has removed the part, and what
        `VersionStore.manifest` raises."""
        end, size = begin + len(into), self.record.block_size
        piece = max(PIECE_BYTES // size, 1) * size
        at = begin
        while at < end:
            start = at - at % size
            whole = min((end if end == self.record.size else end - end % size) - start, piece)
            if start < at or whole <= 0:
                content = memoryview(self._block(start // size))[at - start : end - start]
                into[at - begin : at - begin + len(content)] = content
                at += len(content)
            else:
                self._read_blocks(at, into[at - begin : at - begin + whole])
                at += whole

    def pieces(self) -> Iterator[memoryview]:
        """Yield the bytes that count. A piece is valid until the next one. Raises what `read_into` raises."""
        record = self.record
        piece = max(PIECE_BYTES // record.block_size, 1) * record.block_size
        view = memoryview(bytearray(min(piece, record.size)))
        for begin in range(0, record.size, piece):
            content = view[: min(piece, record.size - begin)]
            self._read_blocks(begin, content)
            yield content

    def file(self) -> Iterator[memoryview]:
        """Yield the whole file: `pieces`, then zeros for the unused room."""
        yield from self.pieces()
        for begin in range(self.record.size, self.record.file_size, len(_ZEROS)):
            yield memoryview(_ZEROS)[: self.record.file_size - begin]


def read_layout(record: ObjectRecord, read: Callable[[int, int], Buffer], path: str) -> Layout:
    """Return the items of an object, of which ``read`` returns a range of bytes. Raise an `ObjectFormatError` if the
    header is not valid, although its digest is right, or an item lies past the bytes that count."""
    length = header_length(read(0, min(8, record.size)), record.file_size, path)
    layout = parse_header(read(0, min(length, record.size)), record.file_size, path).layout
    if layout.size > record.size:
        text = f"the header has items up to byte {layout.size}, and the manifest says that {record.size} bytes count"
        raise ObjectFormatError(text, path=path)
    return layout
