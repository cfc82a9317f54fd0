"""Versions made of what other tools wrote: a DCP directory, or safetensors files.

Owns their form. What is imported is a persisted version, so that any number of ranks starts from it, each reading only
what it needs, and nothing has to know the memory of a job's nodes. It is written part by part, in bounded memory, and
there is nothing until its marker is written.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ml_flashpoint.adapter.pytorch.import_sources import Source, SourceItem, open_source
from ml_flashpoint.adapter.pytorch.metadata_format import encode_metadata
from ml_flashpoint.adapter.pytorch.storage_data import IMPORTED, METADATA_KEY, METADATA_SCOPE, ItemPlace
from ml_flashpoint.core.bounded import while_it_moves
from ml_flashpoint.core.persist_version import DEADLINE_S, durable_url, owned_store
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DamagedError, FlashpointError
from ml_flashpoint.format.knobs import block_bytes
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.format.object_format import encode_header
from ml_flashpoint.format.object_layout import Layout, plan_layout
from ml_flashpoint.persist.opening import open_store
from ml_flashpoint.persist.ownership import PERIOD_S
from ml_flashpoint.persist.packs import digested, receipt_of
from ml_flashpoint.persist.store import DurableStore, as_octets
from ml_flashpoint.persist.versions import PersistedVersion, complete, folder_of, list_persisted
from ml_flashpoint.persist.watched_store import watched_store
from ml_flashpoint.ranks.rank_group import new_run_id
from ml_flashpoint.staging.state_dict_stager import storable_name
from ml_flashpoint.staging.torch_dtypes import dtype_name

PART_BYTES: Final = 4 << 30
"""Bytes of a part, about: a larger tensor has one of its own."""

_SAVED_BY_FLASHPOINT: Final = "_flashpoint.rank-"


@dataclass(frozen=True)
class Imported:
    """What was imported.

    Attributes:
        url: where to.
        version: as it is there.
        items: how many, tensors and others.
        nbytes: bytes of these.
    """

    url: str
    version: PersistedVersion
    items: int
    nbytes: int


def import_version(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    step: int,
    *,
    prefix: str = "",
    part_bytes: int = PART_BYTES,
    progress: Callable[[int, int], object] = lambda done, total: None,
    deadline_s: float = DEADLINE_S,
    period_s: float = PERIOD_S,
) -> Imported:
    """Make a DCP directory, or safetensors files, a persisted version that counts as newer than all that are there.

    Args:
        source: the directory, the file, or a folder of safetensors files, with or without an index.
        url: as a job has it in ``persist=``.
        step: of the version: the job goes on from there.
        prefix: put before the names of safetensors: ``"model."``, for a model that is tracked as ``model``.
        part_bytes: bytes of a part, about.
        progress: called with how many bytes are written, of how many.
        deadline_s, period_s: see `persist_version`.

    Raises:
        ObjectNotFoundError: there is no such source.
        DamagedError, UnsafeContentError, LoadError: it is not valid, or holds what cannot be imported.
        JobInUseError: somebody persists there.
        DeadlineError: nothing has happened for too long; nothing that was written by then counts.
        SaveError, CapacityError: it cannot be written; nothing of it is left, as far as that could be removed.
        InvalidArgumentError, UnsafePathError: an argument is unusable.
    """
    version = CheckpointContainerId.format_version_container(step)
    checked = durable_url(url)
    found = _marked(open_source(Path(os.path.abspath(source)), prefix))
    store = open_store(checked)
    nbytes = sum(item.nbytes for item in found.items)

    def write(moved: Callable[[], None]) -> PersistedVersion:
        watched = watched_store(store, moved)
        with owned_store(store, period_s, moved) as ownership:
            there, _ = list_persisted(watched)
            save_id = f"{new_run_id(there[0].save_id if there else None)}-{1:019d}"
            try:
                writer = _Writer(watched, version, save_id, progress, nbytes)
                writer.write(found, part_bytes)
                ownership.check()
                return complete(watched, version, save_id, writer.world_size)
            except BaseException:
                with contextlib.suppress(FlashpointError):
                    store.remove_folder(folder_of(version, save_id).partition("/")[0])
                raise

    return Imported(checked, while_it_moves(write, deadline_s, checked), len(found.items), nbytes)


def _marked(source: Source) -> Source:
    """With an item that tells a `Flashpoint` why there is nothing of its own."""
    described = dict(source.metadata.state_dict_metadata)
    if any(str(fqn).startswith((_SAVED_BY_FLASHPOINT, IMPORTED)) for fqn in described):
        return source
    stream = io.BytesIO()
    torch.save(True, stream)
    content = stream.getvalue()
    described[IMPORTED] = BytesStorageMetadata()
    item = SourceItem(MetadataIndex(IMPORTED), None, len(content), lambda: iter([content]))
    return Source(replace(source.metadata, state_dict_metadata=described), [*source.items, item])


class _Writer:
    """Writes the parts of one version."""

    def __init__(
        self,
        store: DurableStore,
        version: str,
        save_id: str,
        progress: Callable[[int, int], object],
        total: int,
    ) -> None:
        self._store, self._version, self._save_id = store, version, save_id
        self._progress, self._total, self._done = progress, total, 0
        self.world_size = 0

    def write(self, source: Source, part_bytes: int) -> None:
        """Write all of them."""
        batches = list(_batches(source.items, part_bytes))
        self.world_size = len(batches)
        keyed = [dict(zip(_keys(batch), batch, strict=True)) for batch in batches]
        places = {item.index: ItemPlace(rank, key) for rank, some in enumerate(keyed) for key, item in some.items()}
        metadata = encode_metadata(replace(source.metadata, storage_data=places), [])
        for rank, items in enumerate(keyed):
            self._write_part(rank, items, metadata if rank == 0 else None)

    def _write_part(self, rank: int, items: dict[str, SourceItem], metadata: bytes | None) -> None:
        tensors = [(key, dtype_name(item.tensor[0]), item.tensor[1]) for key, item in items.items() if item.tensor]
        others = [(key, item.nbytes) for key, item in items.items() if not item.tensor]
        if metadata is not None:
            others.append((METADATA_KEY, len(metadata)))
        layout = plan_layout(tensors, others, reserve=0)
        digests: list[str] = []
        size = block_bytes()
        name = object_name(rank, self._save_id)
        folder = folder_of(self._version, self._save_id)
        content = self._content(layout, items, metadata)
        self._store.write(f"{folder}/{name}", digested(content, digests, size))
        record = ObjectRecord(name, layout.size, layout.size, tuple(digests), size)
        labels = {"door": "import"} if metadata is None else {"door": "import", METADATA_SCOPE: "global"}
        node = socket.gethostname() or "import"
        manifest = Manifest(self._version, rank, self.world_size, self._save_id, node, (record,), labels)
        receipt, data = receipt_of(manifest)
        self._store.write(f"{folder}/{receipt.manifest}", [data])

    def _content(self, layout: Layout, items: dict[str, SourceItem], metadata: bytes | None) -> Iterator[memoryview]:
        yield memoryview(encode_header(layout, layout.size))
        for entry in layout.entries:
            item = items.get(entry.key)
            left = entry.nbytes
            pieces: Any = [metadata] if item is None else item.read()
            for piece in pieces:
                octets = as_octets(piece)
                left -= len(octets)
                if left < 0:
                    break
                yield octets
                self._done += len(octets)
                self._progress(min(self._done, self._total), self._total)
            if left:
                raise DamagedError(f"{entry.key!r} has not the {entry.nbytes} bytes that it should have")


def _batches(items: Sequence[SourceItem], limit: int) -> Iterator[list[SourceItem]]:
    batch: list[SourceItem] = []
    size = 0
    for item in items:
        if batch and size + item.nbytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item.nbytes
    yield batch


def _keys(items: Sequence[SourceItem]) -> list[str]:
    """A name for each item in its object: see `plan_items.item_keys`."""
    keys: dict[str, None] = {}
    for item in items:
        key = storable_name(item.index.fqn)
        if key in keys and item.index.offset is not None:
            key = f"{key}@{','.join(map(str, item.index.offset))}"
        while key in keys:
            key += "'"
        keys[key] = None
    return list(keys)
