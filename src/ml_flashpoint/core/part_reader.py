"""Reads the objects of a version: from this node where they are here, else block by block from a peer.

Owns the bytes while they are read. Nothing is handed out before its block was checked against the digest in
the manifest (once a process for objects of this node). Which version to read is the loader's to decide.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import map_object
from ml_flashpoint.copy.cpu import typed_view
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.format.digest import digest_workers, verify_blocks
from ml_flashpoint.format.errors import DamagedError, FlashpointError, ObjectNotFoundError, PrunedError, UnreadableError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, manifest_name, read_manifest
from ml_flashpoint.format.object_format import Entry, Layout, header_length, parse_header

FetchBlocks = Callable[[Manifest, ObjectRecord, int, memoryview], None]
"""``(manifest, record, first block, buffer)``: fill a buffer with whole, verified blocks of a remote object."""


class ObjectReader:
    """The bytes of one object, verified before use. Not thread-safe; close it when done.

    Args:
        manifest, record: what the object should be.
        local: the bytes, if they are on this node; they are verified as a whole on first use.
        fetch: where blocks come from otherwise.
        path: for errors.
        verified: whether the local bytes were verified by this process before.

    Raises:
        DamagedError: the local bytes are not what the object should be.
        UnreadableError: a remote object is larger than what this process can map.
    """

    def __init__(
        self,
        manifest: Manifest,
        record: ObjectRecord,
        *,
        local: memoryview | None = None,
        fetch: FetchBlocks | None = None,
        path: str = "",
        verified: bool = False,
    ) -> None:
        self.manifest = manifest
        self.record = record
        self.path = path
        self._fetch = fetch
        self._present: set[int] | None = None
        self._local = local is not None
        name = manifest_name(manifest.rank, manifest.save_id)
        self._manifest_path = os.path.join(os.path.dirname(path), name)
        if local is not None:
            if local.nbytes < record.size:
                raise DamagedError(
                    f"the object has {local.nbytes} bytes of {record.size}", path=path, step=manifest.step
                )
            self._buffer = local[: record.size]
            if not verified:
                verify_blocks(self._buffer, record.digests, record.block_size, path=path, workers=digest_workers())
        else:
            self._buffer = self._room()
            self._present = set()
        self._data = torch.empty(0, dtype=torch.uint8, device="cpu")
        if record.size:
            self._data = torch.frombuffer(self._buffer, dtype=torch.uint8)
        self._layout: Layout | None = None

    def _room(self) -> memoryview:
        """Anonymous memory: blocks that are never fetched cost nothing."""
        size = self.record.size
        try:
            return memoryview(mmap.mmap(-1, max(1, size)))[:size]
        except (OSError, OverflowError, ValueError) as error:
            raise UnreadableError(
                f"no memory can be had for an object of {size} bytes: {error}",
                step=self.manifest.step,
                rank=self.manifest.rank,
                node=self.manifest.node,
                path=self.path,
            ) from error

    def check_kept(self) -> None:
        """Check, after the bytes were used, that they were the object's all the while.

        An object of another process of this node may be pruned at any time, and its arena reused. Its manifest goes
        first, so if that is there still, nothing had happened.

        Raises:
            PrunedError: it was; what was read may be anything.
        """
        if self._local and not os.path.exists(self._manifest_path):
            raise PrunedError(
                "the version was pruned while it was read",
                step=self.manifest.step,
                rank=self.manifest.rank,
                path=self.path,
                hint="do not load while newer versions are being saved",
            )

    def ensure(self, begin: int, end: int) -> None:
        """Have bytes ``begin:end`` here and verified.

        Raises:
            FlashpointError: no holder could give them.
        """
        if self._present is None or begin >= end:
            return
        assert self._fetch is not None
        size = self.record.block_size
        missing = [b for b in range(begin // size, -(-end // size)) if b not in self._present]
        for first, last in _runs(missing):
            buffer = self._buffer[first * size : min(last * size, self.record.size)]
            self._fetch(self.manifest, self.record, first, buffer)
            self._present.update(range(first, last))

    @property
    def layout(self) -> Layout:
        """What the header says.

        Raises:
            ObjectFormatError: it is no valid header, although its digest is right.
        """
        if self._layout is None:
            size = self.record.size
            self.ensure(0, min(8, size))
            length = header_length(self._buffer[:8], self.record.file_size, self.path)
            self.ensure(0, min(length, size))
            self._layout = parse_header(self._buffer[:length], self.record.file_size, self.path).layout
        return self._layout

    def entry(self, key: str) -> Entry:
        """Where an item lies.

        Raises:
            ObjectNotFoundError: there is no such item.
        """
        try:
            return self.layout.by_key[key]
        except KeyError:
            raise ObjectNotFoundError(f"the object has no item {key!r}", path=self.path) from None

    def tensor(self, key: str) -> torch.Tensor:
        """An item as a tensor over the object's own memory: copy out of it, and do not write to it."""
        entry = self.entry(key)
        self.ensure(entry.begin, entry.end)
        return typed_view(self._data, entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)

    def rows(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """A box of a tensor; of a remote object only the blocks of its rows (first dimension) are fetched."""
        entry = self.entry(key)
        if self._present is not None and entry.shape and entry.nbytes:
            row = entry.nbytes // entry.shape[0]
            begin = entry.begin + offsets[0] * row
            self.ensure(begin, begin + lengths[0] * row)
        else:
            self.ensure(entry.begin, entry.end)
        tensor = typed_view(self._data, entry.begin, entry.end, torch_dtype(entry.dtype), entry.shape)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if offset or length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def bytes_of(self, key: str) -> memoryview:
        """An item as plain bytes."""
        entry = self.entry(key)
        self.ensure(entry.begin, entry.end)
        return self._buffer[entry.begin : entry.end]


def open_local(
    store: RankStore, manifest: Manifest, record: ObjectRecord, *, verified: bool
) -> tuple[ObjectReader, contextlib.ExitStack]:
    """A reader of an object of this node, and what must be closed when it is no longer needed.

    Raises:
        ObjectNotFoundError: it is not on this node.
        DigestMismatchError, DamagedError: it is, but not as it was saved.
    """
    stack = contextlib.ExitStack()
    try:
        held = store.find(manifest.save_id, manifest.rank)
        if held is not None and held.version == manifest.version:
            view = stack.enter_context(store.open_object(manifest.version, record.name))
        else:
            view = stack.enter_context(map_object(store.base, manifest.version, record.name))
        path = os.fspath(store.base / manifest.version / record.name)
        return ObjectReader(manifest, record, local=view, path=path, verified=verified), stack
    except BaseException:
        stack.close()
        raise


def read_local_manifests(base: Path, version: str) -> tuple[list[Manifest], list[FlashpointError]]:
    """The readable manifests in a version directory of this node, and what is wrong with the others.

    Raises:
        OSError: the directory cannot be listed just now.
    """
    manifests: list[Manifest] = []
    errors: list[FlashpointError] = []
    try:
        names = sorted(entry.name for entry in os.scandir(base / version) if entry.name.endswith(".manifest"))
    except FileNotFoundError:
        names = []
    for name in names:
        try:
            manifests.append(read_manifest(base / version / name))
        except ObjectNotFoundError:
            continue  # pruned meanwhile
        except FlashpointError as error:
            errors.append(error)
    return manifests, errors


def find_local_manifest(base: Path, version: str, rank: int, save_id: str) -> Manifest | None:
    """The manifest of one part, if this node has it and it is sound.

    Raises:
        UnreadableError: that cannot be known just now.
    """
    try:
        return read_manifest(base / version / manifest_name(rank, save_id))
    except (DamagedError, ObjectNotFoundError):
        return None


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers, as half-open ranges."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
