"""Reads the parts of one version, from whatever store has them. Nothing is handed out before its block was checked."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch

from ml_flashpoint.copy.cpu import typed_view
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.format.errors import DamagedError, ObjectNotFoundError, PrunedError, UnreadableError, retrying
from ml_flashpoint.format.knobs import recovery_deadline_s
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import CheckpointContainerId, SaveId
from ml_flashpoint.format.object_format import Entry, Layout
from ml_flashpoint.memory.container import BaseContainer
from ml_flashpoint.memory.pool import Pool
from ml_flashpoint.stores.bounded import in_background, result_of
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.version_store import StoredObject, Version, read_layout

if TYPE_CHECKING:
    from typing_extensions import Self

    from ml_flashpoint.engine.copying import Copies

_log = logging.getLogger(__name__)

_ELSEWHERE = (DamagedError, ObjectNotFoundError, PrunedError, UnreadableError)
_LATE_S = 1.0
_T = TypeVar("_T")

FetchBlocks = Callable[[int, memoryview], None]
"""``(first block, buffer)``: fill a buffer with whole, checked blocks of an object that is elsewhere."""


class ObjectReader:
    """The bytes of one object, checked before use: ``local`` ones, or those that ``fetch`` gives. Not thread-safe.

    Raises an `UnreadableError` if the object is larger than the memory that this process can map.
    """

    def __init__(
        self, manifest: Manifest, *, local: memoryview | None = None, fetch: FetchBlocks | None = None, path: str = ""
    ) -> None:
        self.manifest = manifest
        self.record: ObjectRecord = manifest.record
        self.path = path
        self._fetch = fetch
        self._present: set[int] | None = set() if local is None else None
        self._buffer = _room(manifest, path) if local is None else local[: self.record.size]
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if self.record.size:
            self._data = torch.frombuffer(self._buffer, dtype=torch.uint8)

    def ensure(self, begin: int, end: int) -> None:
        """Have bytes ``begin:end`` here and checked."""
        if self._present is None or self._fetch is None or begin >= end:
            return
        size = self.record.block_size
        missing = [block for block in range(begin // size, -(-end // size)) if block not in self._present]
        for _, consecutive in groupby(enumerate(missing), lambda pair: pair[1] - pair[0]):
            run = [block for _, block in consecutive]
            self._fetch(run[0], self._buffer[run[0] * size : min((run[-1] + 1) * size, self.record.size)])
            self._present.update(run)

    def read(self, begin: int, end: int) -> memoryview:
        """Return bytes ``begin:end``, where they lie."""
        self.ensure(begin, end)
        return self._buffer[begin:end]

    @cached_property
    def layout(self) -> Layout:
        """The items of the object; see `read_layout`."""
        return read_layout(self.record, self.read, self.path)

    def entry(self, key: str) -> Entry:
        """Return where an item lies. Raises `ObjectNotFoundError`."""
        try:
            return self.layout.by_key[key]
        except KeyError:
            raise ObjectNotFoundError(f"the object has no item {key!r}", path=self.path) from None

    def tensor(self, key: str) -> torch.Tensor:
        """Return an item over the object's own memory: copy out of it, and do not write to it."""
        entry = self.entry(key)
        self.ensure(entry.begin, entry.end)
        return typed_view(self._data, entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)

    def rows(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """Return a box of a tensor; of a remote object only the blocks of its rows are fetched."""
        entry = self.entry(key)
        begin, end = entry.begin, entry.end
        if entry.shape and entry.nbytes:
            row = entry.nbytes // entry.shape[0]
            begin, end = entry.begin + offsets[0] * row, entry.begin + (offsets[0] + lengths[0]) * row
        self.ensure(begin, end)
        tensor = typed_view(self._data, entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if offset or length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def bytes_of(self, key: str) -> memoryview:
        """Return an item as plain bytes."""
        entry = self.entry(key)
        return self.read(entry.begin, entry.end)


def _room(manifest: Manifest, path: str) -> memoryview:
    """Return anonymous memory for an object: blocks that are never fetched cost nothing."""
    size, rank = manifest.record.size, manifest.rank
    try:
        return memoryview(mmap.mmap(-1, max(1, size)))[:size]
    except (OSError, OverflowError, ValueError) as error:
        text = f"no memory can be had for an object of {size} bytes: {error}"
        raise UnreadableError(text, step=manifest.save.step, rank=rank, node=manifest.node, path=path) from error


class MemoryParts:
    """The parts of a version in base containers: of this node where they are here, else of their holders.

    ``pool`` is of this rank's own parts, which it has mapped. ``holders`` are the other nodes that have each rank's
    part. ``checked`` are the saves and ranks of the parts here that this process has checked; it grows.
    """

    def __init__(
        self,
        save: SaveId,
        container: BaseContainer,
        pool: Pool,
        copies: Copies,
        holders: Sequence[Sequence[str]],
        checked: set[tuple[SaveId, int]],
    ) -> None:
        self._save, self._container, self._pool, self._copies = save, container, pool, copies
        self._holders, self._checked = holders, checked

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of a rank's part."""
        try:
            return self._container.read_manifest(self._save, rank)
        except _ELSEWHERE:
            if not self._holders[rank]:
                raise
        return self._copies.manifest_of(self._save, rank, self._holders[rank])

    def open(self, rank: int, stack: contextlib.ExitStack) -> ObjectReader:
        """Return a reader of a rank's object; ``stack`` unlocks it."""
        until, nodes = time.monotonic() + recovery_deadline_s(), self._holders[rank]
        try:
            return retrying(lambda: self.open_here(rank, stack), until, f"opening the part of rank {rank}")
        except _ELSEWHERE as error:
            if not nodes:
                raise
            if not isinstance(error, ObjectNotFoundError):
                _log.warning("reading another node's copy of the part of rank %d: %s", rank, error)
        manifest = self.manifest(rank)

        def fetch(first: int, buffer: memoryview) -> None:
            self._copies.read_blocks(self._save, manifest, first, buffer, nodes)

        return ObjectReader(manifest, fetch=fetch, path=f"{self._save.version}/{manifest.object_name}")

    def open_here(self, rank: int, stack: contextlib.ExitStack) -> ObjectReader:
        """Return a reader of a part of this node. Its digests are checked once a process.

        Raises:
            ObjectNotFoundError, PrunedError: there is no such part here.
            DamagedError: the part is not as it was saved.
            UnreadableError: it cannot be read just now.
        """
        save, container = self._save, self._container
        with contextlib.ExitStack() as opened:
            manifest = container.read_manifest(save, rank)
            record = manifest.record
            path = os.fspath(container.base / save.version / manifest.object_name)
            if rank == self._pool.owner.rank and self._pool.slot_of(save) is not None:
                buffer = opened.enter_context(self._pool.reading(save)).buffer
                if len(buffer) != record.file_size:
                    raise DamagedError("the object is not of the size in the manifest", path=path, rank=rank)
            else:
                buffer = opened.enter_context(container.open_part(save, rank)).buffer
            if (save, rank) not in self._checked:
                record.check(buffer[: record.size], path=path)
                self._checked.add((save, rank))
            stack.push(opened.pop_all())
            return ObjectReader(manifest, local=buffer, path=path)


class DurableParts:
    """The parts of a version in a durable store, read by checked ranges."""

    def __init__(self, store: DurableVersions, version: Version) -> None:
        self._store, self._version = store, version

    def manifest(self, rank: int) -> Manifest:
        """See `MemoryParts.manifest`."""
        return waited_for(lambda: self._store.manifest(self._version, rank), self._store.path)

    def open(self, rank: int, stack: contextlib.ExitStack) -> ObjectReader:
        """See `MemoryParts.open`."""
        stored = StoredObject(self.manifest(rank), [self._store])

        def fetch(first: int, buffer: memoryview) -> None:
            begin = first * stored.record.block_size
            waited_for(lambda: stored.read_into(begin, buffer), self._store.path)

        return ObjectReader(stored.manifest, fetch=fetch, path=stored.path)


class VersionReader:
    """The parts of one version. One caller at a time; a context manager. While a part of this node is open its slot is
    locked against reuse."""

    def __init__(self, version: CheckpointContainerId, world_size: int, parts: MemoryParts | DurableParts) -> None:
        self.version, self.world_size, self._parts = version, world_size, parts
        self._open = contextlib.ExitStack()
        self._readers: dict[int, ObjectReader] = {}

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            text = f"it was saved by {self.world_size} ranks"
            raise ObjectNotFoundError(text, step=self.version.step, rank=rank, path=str(self.version))

    def manifest(self, rank: int) -> Manifest:
        """Return the manifest of one rank's part. Raises `ObjectNotFoundError`."""
        self._check(rank)
        return self._parts.manifest(rank)

    def open(self, rank: int) -> ObjectReader:
        """Return a reader of the object of one rank's part; it stays valid until `release`."""
        if rank not in self._readers:
            self._check(rank)
            self._readers[rank] = self._parts.open(rank, self._open)
        return self._readers[rank]

    def release(self) -> None:
        """Unlock everything that was opened."""
        self._readers.clear()
        self._open.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def waited_for(call: Callable[[], _T], url: str, deadline_s: float | None = None) -> _T:
    """Return the result of a call to a durable store, which may hang, and is tried again if it fails. Raise a
    `DeadlineError` after ``FLASHPOINT_RECOVERY_DEADLINE_S``, and an `UnreadableError` if it cannot be read just now."""
    deadline_s = recovery_deadline_s() if deadline_s is None else deadline_s
    until = time.monotonic() + deadline_s
    return result_of(in_background(lambda: retrying(call, until, f"reading at {url}")), deadline_s + _LATE_S)
