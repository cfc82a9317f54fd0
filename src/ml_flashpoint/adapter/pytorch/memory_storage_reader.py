"""`MemoryStorageReader`: DCP's way out of the engine. Reads of DCP become reads of objects, here or on peers."""

from __future__ import annotations

import io
import logging
import os
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_KEY, ItemPlace, decode_metadata
from ml_flashpoint.adapter.pytorch.saves import checked_version
from ml_flashpoint.adapter.pytorch.seed import DefaultMLFlashpointCheckpointLoader
from ml_flashpoint.copy.cpu import copy_all
from ml_flashpoint.engine.checkpointer import Checkpointer
from ml_flashpoint.engine.reader import ObjectReader, VersionReader
from ml_flashpoint.format.errors import InvalidArgumentError, LoadError, ObjectNotFoundError
from ml_flashpoint.format.names import CheckpointContainerId
from ml_flashpoint.state.archive import SafeGlobal, check_bytes, load_archive

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_log = logging.getLogger(__name__)


class MemoryStorageReader(StorageReader):
    """Loads DCP checkpoints from memory, on any number of ranks.

    Args:
        path: a checkpoint's id, used until ``dcp.load`` is given another one.
        checkpoint_loader: a `Checkpointer`, or a `DefaultMLFlashpointCheckpointLoader`.
        safe_globals: further types that non-tensor items may be made of, as for
            ``torch.serialization.safe_globals``. Anything not allowed is refused before it is unpickled.
        trust_bytes: pass non-tensor items to the planner unchecked. Only for planners that do not unpickle.

    Raises:
        InvalidArgumentError: ``checkpoint_loader`` is neither. `InvalidNameError`: ``path`` is no absolute path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        checkpoint_loader: Checkpointer | DefaultMLFlashpointCheckpointLoader | None = None,
        *,
        safe_globals: Sequence[SafeGlobal] = (),
        trust_bytes: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(checkpoint_loader, (Checkpointer, DefaultMLFlashpointCheckpointLoader)):
            raise InvalidArgumentError(
                "must be a Checkpointer or a DefaultMLFlashpointCheckpointLoader",
                argument="checkpoint_loader",
                value=checkpoint_loader,
            )
        self._loader = checkpoint_loader
        self._version = None if path is None else CheckpointContainerId(path)
        self._safe_globals = tuple(safe_globals)
        self._trust_bytes = trust_bytes
        self._places: dict[Any, ItemPlace] = {}
        self._parts: VersionReader | None = None  # until the load is done
        self._unread: Exception | None = None  # why this load could not read metadata

    @property
    def checkpoint_id(self) -> str | None:
        """The checkpoint being loaded; torch logs it."""
        return None if self._version is None else str(self._version)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, of ``checkpoint_id`` if there is one."""
        if checkpoint_id is not None:
            self._version = CheckpointContainerId(checkpoint_id)
        self._release()  # of a load that failed while it was planned
        self._unread = None

    def _release(self) -> None:
        parts, self._parts = self._parts, None
        if parts is not None:
            parts.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if an id names a version of a base container."""
        return CheckpointContainerId.of_version(checkpoint_id) is not None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's metadata of the checkpoint.

        Where that raises, torch asks again with a ``rank``, and does the rest of the load without collectives if that
        does not raise. A rank without collectives beside others with them is a hang, so the second call always raises.

        Raises:
            ObjectNotFoundError: there is none.
            LoadError: the version was not saved through DCP.
        """
        if kwargs.get("rank") is not None:
            error = self._unread or LoadError("there is no metadata by rank", path=self.checkpoint_id)
            # Some releases of torch (2.9) keep to themselves why neither call worked.
            _log.error("the metadata of %s cannot be read: %s", self.checkpoint_id or "a checkpoint", error)
            raise error
        self._unread = None
        try:
            reader = self._reader(0)
            if METADATA_KEY not in reader.layout.by_key:
                text = "this version was not saved through DCP: it has no DCP metadata"
                raise LoadError(text, step=checked_version(self._version).step, path=self.checkpoint_id)
            data = bytes(reader.bytes_of(METADATA_KEY))
            metadata = decode_metadata(data, path=reader.path, allowed=self._safe_globals)
        except Exception as error:
            self._unread = error
            raise
        finally:
            self._release()  # where planning fails, DCP says nothing, and a slot that is read is used for no save
        save_id = getattr(metadata.storage_meta, "save_id", None)
        metadata.storage_meta = StorageMeta(self.checkpoint_id, save_id=save_id, load_id=str(uuid.uuid4()))
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take note of where the items of a checkpoint are, from its metadata."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy everything in the plan into the planner's tensors.

        Raises:
            FlashpointError: an object is damaged, or out of reach; tensors may be partly loaded.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        copied: list[tuple[ReadItem, torch.Tensor]] = []
        try:
            for item in plan.items:
                reader, key = self._find(item.storage_index)
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._bytes(reader, key))
                    continue
                target = planner.resolve_tensor(item)
                if reader.entry(key).kind == "bytes":
                    _assign(target, self._whole_tensor(reader, key, item), path=reader.path)
                    planner.commit_tensor(item, target)
                    continue
                source = reader.rows(key, item.storage_offsets, item.lengths)
                if source.shape != target.shape:
                    shapes = f"has shape {tuple(source.shape)}, not {tuple(target.shape)}"
                    raise LoadError(f"item {item.dest_index.fqn!r} {shapes}", path=reader.path)
                targets.append(target.detach())
                sources.append(source)
                copied.append((item, target))
            copy_all(targets, sources)
            for item, target in copied:
                planner.commit_tensor(item, target)
        finally:
            sources.clear()
            self._release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def read_items(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return items that are no tensors as they are, by name. Raises `FlashpointError` as `read_data`."""
        try:
            found = {name: self._find(MetadataIndex(name)) for name in names}
            return {name: bytes(reader.bytes_of(key)) for name, (reader, key) in found.items()}
        finally:
            self._release()

    def _bytes(self, reader: ObjectReader, key: str) -> io.BytesIO:
        data = reader.bytes_of(key)
        if self._trust_bytes:
            return io.BytesIO(data)
        return check_bytes(data, key, path=reader.path, allowed=self._safe_globals)

    def _whole_tensor(self, reader: ObjectReader, key: str, item: ReadItem) -> torch.Tensor:
        """Return a tensor that is more than its memory (sparse, quantized, of its own class), saved by torch.save."""
        value = load_archive(reader.bytes_of(key), key, path=reader.path, allowed=self._safe_globals)
        if not isinstance(value, torch.Tensor) or value.shape != torch.Size(item.lengths):
            raise LoadError(f"item {item.dest_index.fqn!r} can only be loaded as a whole", path=reader.path)
        return value

    def _find(self, index: MetadataIndex) -> tuple[ObjectReader, str]:
        place = self._places.get(index)
        if place is None:
            raise ObjectNotFoundError(f"the checkpoint has no {index}", path=self.checkpoint_id)
        return self._reader(place.rank), place.key

    def _reader(self, rank: int) -> ObjectReader:
        if self._parts is None:
            self._parts = self._loader.open_version(checked_version(self._version))
        return self._parts.open(rank)


def _assign(target: torch.Tensor, value: torch.Tensor, *, path: str) -> None:
    """Make ``target`` equal to ``value``, structure and all; it stays the same object."""
    if (target.layout, target.dtype, target.shape) != (value.layout, value.dtype, value.shape):
        raise LoadError(
            f"a tensor {value.layout}, {value.dtype} of shape {tuple(value.shape)} cannot be loaded into one that is "
            f"{target.layout}, {target.dtype} of shape {tuple(target.shape)}",
            path=path,
        )
    value = value.to(target.device)
    with torch.no_grad():
        if target.layout in _COMPRESSED:  # which copy_ takes only where as many elements are specified
            target.resize_as_sparse_(value)
        target.copy_(value)
