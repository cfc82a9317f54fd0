"""Persisted versions read from outside of a job, for exports and comparisons.

Owns the choice of the version, and reading its items one by one: each is read from the store when it is wanted and
compared with its digests, and its memory is its user's, so a version may be larger than memory. Jobs load by
`core.persisted_loader`, which is about ranges and votes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from ml_flashpoint.copy.cpu import typed_view
from ml_flashpoint.copy.dtypes import torch_dtype
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.object_format import header_length, parse_header
from ml_flashpoint.format.object_layout import Layout
from ml_flashpoint.persist.blocks import VerifiedFile
from ml_flashpoint.persist.opening import open_store
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import PersistedVersion, list_persisted, read_part_manifest

_log = logging.getLogger(__name__)

_MANIFESTS_AT_A_TIME: Final = 8


class StreamedObject(ObjectReader):
    """A persisted object whose items are read anew each time, into memory of their own.

    Args:
        manifest: of the part.
        file: its object.
    """

    def __init__(self, manifest: Manifest, file: VerifiedFile) -> None:
        self.manifest, self.record, self.path = manifest, file.record, file.path
        self._file = file
        self._layout: Layout | None = None

    @property
    def layout(self) -> Layout:
        """See the base class."""
        if self._layout is None:
            size, file_size = self.record.size, self.record.file_size
            length = header_length(self._file.read(0, min(8, size)), file_size, self.path)
            self._layout = parse_header(self._file.read(0, length), file_size, self.path).layout
        return self._layout

    def check_kept(self) -> None:
        """Nothing that was read can change any more."""

    def bytes_of(self, key: str) -> memoryview:
        """See the base class."""
        entry = self.entry(key)
        return memoryview(self._file.read(entry.begin, entry.end))

    def tensor(self, key: str) -> torch.Tensor:
        """See the base class."""
        entry = self.entry(key)
        content = self._file.read(entry.begin, entry.end)
        dtype = torch_dtype(entry.dtype)
        if not content:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        return typed_view(torch.frombuffer(content, dtype=torch.uint8), 0, entry.nbytes, dtype, entry.shape)

    def rows(self, key: str, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """See the base class."""
        tensor = self.tensor(key)
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            tensor = tensor.narrow(dim, offset, length)
        return tensor

    def ensure(self, begin: int, end: int) -> None:
        """Nothing is kept."""


class PersistedParts:
    """A version in a store, whose parts can be read; the counterpart of `core.open_version.OpenVersion`.

    Attributes:
        path: stands for its folder in errors, and has its name.
        step, world_size: of the version.
        manifests: those of all parts, by rank.

    Raises:
        FlashpointError: a part is missing or not what the marker says, or the store cannot be read.
    """

    def __init__(self, store: DurableStore, version: PersistedVersion) -> None:
        self.path = Path("/" + store.path_of(version.folder))
        self.step, self.world_size = version.step, version.world_size
        self._store, self._version = store, version
        with ThreadPoolExecutor(_MANIFESTS_AT_A_TIME) as pool:
            found = pool.map(lambda rank: read_part_manifest(store, version, rank), range(version.world_size))
            self.manifests: dict[int, Manifest] = dict(enumerate(found))
        self._readers: dict[int, StreamedObject] = {}

    def reader(self, rank: int) -> StreamedObject:
        """The part of a rank."""
        if rank not in self._readers:
            manifest = self.manifests[rank]
            record = manifest.objects[0]
            file = VerifiedFile(self._store, f"{self._version.folder}/{record.name}", record)
            self._readers[rank] = StreamedObject(manifest, file)
        return self._readers[rank]

    def check(self) -> None:
        """Each item was compared when it was read, and belongs to whoever has it."""


def open_persisted(url: str, step: int | None = None) -> PersistedParts:
    """Open a persisted version.

    Args:
        url: from `persist.opening.checked_url`.
        step: which version; by default the newest whose parts are all there, as `Flashpoint.resume` takes it.

    Raises:
        ObjectNotFoundError: there is none.
        DamagedError: there is none that is sound.
        LoadError: the store cannot be read.
        InvalidArgumentError, UnsafePathError: it is no store.
    """
    store = open_store(url)
    found, unusable = list_persisted(store)
    wanted = [version for version in found if step is None or version.step == step]
    problems: list[FlashpointError] = []
    for version in wanted:
        try:
            return PersistedParts(store, version)
        except FlashpointError as error:
            if not is_damage(error) or (step is not None and version is wanted[-1]):
                raise
            _log.warning("%s cannot be used, trying an older one: %s", store.path_of(version.folder), error)
            problems.append(error)
    if problems:
        raise problems[0]
    of_step = "" if step is None else f" of step {step}"
    others = "; ".join(f"{os.path.basename(each.folder)}: {each.why}" for each in unusable[:4])
    raise ObjectNotFoundError(
        f"there is no complete version{of_step}{f' ({others})' if others else ''}",
        path=store.path_of(""),
        hint="flashpoint ls shows what there is",
    )
