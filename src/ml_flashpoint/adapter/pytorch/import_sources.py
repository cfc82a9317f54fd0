"""What a version can be made of: a DCP directory that torch wrote, or safetensors files.

Owns reading them as what they are, files of somebody else: no pickle is run but one that may only name the few types of
DCP's metadata, nothing is read beyond the folder, and every size, offset, dtype and shape is checked before it is used.
Items are described first, and read one by one.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pickle
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ml_flashpoint.adapter.pytorch.metadata_format import METADATA_TYPES
from ml_flashpoint.format.checkpoint_id_types import validate_segment
from ml_flashpoint.format.errors import (
    DamagedError,
    FlashpointError,
    InvalidArgumentError,
    LoadError,
    ObjectNotFoundError,
    UnreadableError,
    UnsafeContentError,
)
from ml_flashpoint.format.object_format import header_length, parse_header
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.staging.torch_dtypes import bytes_of, dtype_name, torch_dtype
from ml_flashpoint.unpickling.safe_archive import load_archive

_METADATA: Final = ".metadata"
_INDEX: Final = "model.safetensors.index.json"
_SUFFIX: Final = ".safetensors"
_MAX_METADATA_BYTES: Final = 1 << 30
_MAX_INDEX_BYTES: Final = 64 << 20
_PIECE_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class SourceItem:
    """One item: a tensor, a shard of one, or bytes that stand for something else.

    Attributes:
        index: by which DCP finds it.
        tensor: dtype and shape; None for bytes.
        nbytes: how many.
        read: they, in pieces.
    """

    index: MetadataIndex
    tensor: tuple[torch.dtype, tuple[int, ...]] | None
    nbytes: int
    read: Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class Source:
    """What there is. `metadata` says it as DCP does, without the places.

    Attributes:
        metadata: of all items.
        items: where each comes from.
    """

    metadata: Metadata
    items: list[SourceItem]


def open_source(path: Path, prefix: str = "") -> Source:
    """Looks at a DCP directory, a safetensors file, or a folder of those.

    Args:
        path: which.
        prefix: put before the names of safetensors: ``"model."``, for a model that is tracked as ``model``.

    Raises:
        ObjectNotFoundError: there is nothing of the kind.
        InvalidArgumentError: a prefix for a DCP directory, whose names stay.
        DamagedError, UnsafeContentError, LoadError: it is not valid, or holds what cannot be imported.
        UnsafePathError: somebody else could have planted it.
    """
    check_unplanted(path)
    if path.is_dir() and os.path.lexists(path / _METADATA):
        if prefix:
            raise InvalidArgumentError("the names of a DCP directory stay", argument="prefix", value=prefix)
        return _dcp_source(path)
    return _safetensors_source(path, prefix)


# ---- safetensors ----------------------------------------------------------------------------------------------------


def _safetensors_source(path: Path, prefix: str) -> Source:
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    items: list[SourceItem] = []
    for file, wanted in _safetensors_files(path).items():
        with _opened(file) as (descriptor, size):
            length = header_length(_pread(descriptor, min(8, size), 0, file), size, file)
            layout = parse_header(_pread(descriptor, length, 0, file), size, file).layout
        if layout.byte_items or (wanted is not None and not wanted <= layout.by_key.keys()):
            raise LoadError("it does not have the tensors that it should have, or others", path=file)
        for name, entry in layout.by_key.items():
            if wanted is not None and name not in wanted:
                continue
            fqn = prefix + name
            if fqn in described:
                raise LoadError(f"two files have {name!r}", path=file)
            dtype = torch_dtype(entry.dtype)
            described[fqn] = TensorStorageMetadata(
                TensorProperties(dtype), torch.Size(entry.shape), [_whole(torch.Size(entry.shape))]
            )
            read = partial(_read_range, file, entry.begin, entry.nbytes)
            index = MetadataIndex(fqn, torch.Size([0] * len(entry.shape)), 0)
            items.append(SourceItem(index, (dtype, tuple(entry.shape)), entry.nbytes, read))
    lead = prefix[:-1].split(".") if prefix.endswith(".") else []
    paths = {fqn: (*lead, fqn[len(prefix) :]) if lead else (fqn,) for fqn in described}
    return Source(Metadata(described, paths), items)


def _whole(size: torch.Size) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(size)), size)


def _safetensors_files(path: Path) -> Mapping[Path, set[str] | None]:
    """The files, and the names to be read from each; None for all."""
    if not path.is_dir():
        return {path: None}
    index = path / _INDEX
    if not os.path.lexists(index):
        found = sorted(name for name in os.listdir(path) if name.endswith(_SUFFIX))
        if not found:
            raise ObjectNotFoundError("there is neither a DCP directory here nor a safetensors file", path=path)
        return {path / name: None for name in found}
    files: dict[Path, set[str]] = {}
    try:
        with _opened(index) as (descriptor, size):
            if size > _MAX_INDEX_BYTES:
                raise ValueError("too large")
            content = json.loads(_pread(descriptor, size, 0, index))["weight_map"]
        for name, file in content.items():
            if not validate_segment(file).endswith(_SUFFIX):
                raise ValueError(f"{file!r} is no safetensors file")
            files.setdefault(path / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the index is not valid: {error}", path=index) from error
    return files


# ---- DCP ------------------------------------------------------------------------------------------------------------


def _dcp_source(path: Path) -> Source:
    metadata = _read_dcp_metadata(path / _METADATA)
    described, places = metadata.state_dict_metadata, metadata.storage_data
    items = []
    for index, place in places.items():
        of = described.get(index.fqn)
        sizes = (place.offset, place.length)
        if of is None or not all(type(each) is int and each >= 0 for each in sizes):
            raise DamagedError(f"the metadata does not say what or where {index.fqn!r} is", path=path)
        if getattr(place, "transform_descriptors", None):
            raise LoadError(f"{index.fqn!r} is stored by an extension", path=path, hint="save it without")
        file = path / validate_segment(place.relative_path)
        if not isinstance(of, TensorStorageMetadata):
            items.append(SourceItem(index, None, place.length, partial(_read_range, file, *sizes)))
            continue
        chunk = next((each for each in of.chunks if index.offset in (None, each.offsets)), None)
        if chunk is None:
            raise DamagedError(f"the metadata does not say which part of {index.fqn!r} it is", path=path)
        kind = (of.properties.dtype, tuple(chunk.sizes))
        nbytes = math.prod(chunk.sizes) * of.properties.dtype.itemsize
        items.append(SourceItem(index, kind, nbytes, partial(_read_tensor, file, *sizes, index.fqn, kind)))
    stored = {(index.fqn, index.offset) for index in places}
    wanted = {(fqn, each.offsets) for fqn, of in described.items() for each in getattr(of, "chunks", ())}
    missing = described.keys() - {item.index.fqn for item in items}
    missing |= {fqn for fqn, offset in wanted - stored if (fqn, None) not in stored}
    if missing:
        raise DamagedError(f"the metadata does not say where {min(map(str, missing))!r} is", path=path)
    return Source(Metadata(described, metadata.planner_data), items)


class _MetadataUnpickler(pickle._Unpickler):
    """Knows the types of DCP's metadata, and no others. In Python, since it must not alter these types either."""

    _TYPES: Final = {(each.__module__, each.__qualname__): each for each in (*METADATA_TYPES, _StorageInfo)}

    def find_class(self, module: str, name: str) -> Any:
        found = self._TYPES.get((module, name))
        if found is not None:
            return found
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout_of
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "PurePosixPath"):
            return _path_of
        raise UnsafeContentError(f"the metadata needs {module}.{name}, which may run code when it is loaded")

    def load_build(self) -> None:
        """Set the state of an instance."""
        if isinstance(self.stack[-2], type) or callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise UnsafeContentError("the metadata would alter what it is made of")
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def _path_of(*parts: str) -> str:
    """A path is told, and not used."""
    return "/".join(map(str, parts))


def _layout_of(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise ValueError(f"no layout: {name!r}")
    return found


def _read_dcp_metadata(path: Path) -> Metadata:
    with _opened(path) as (descriptor, size):
        if size > _MAX_METADATA_BYTES:
            raise DamagedError(f"the metadata has {size} bytes", path=path)
        content = _pread(descriptor, size, 0, path)
    try:
        found = _MetadataUnpickler(io.BytesIO(content)).load()
    except FlashpointError:
        raise
    except Exception as error:  # whatever is wrong with it
        raise DamagedError(f"the metadata is not valid: {type(error).__name__}: {error}", path=path) from error
    if type(found) is not Metadata or not isinstance(found.state_dict_metadata, dict):
        raise DamagedError("this is no metadata of a DCP directory", path=path)
    places = found.storage_data
    if not isinstance(places, dict) or not all(
        type(index) is MetadataIndex and type(place) is _StorageInfo for index, place in places.items()
    ):
        raise LoadError("the metadata does not say where its items are, or another writer wrote it", path=path)
    for fqn, of in found.state_dict_metadata.items():
        _check_described(fqn, of, path)
    return found


def _check_described(fqn: object, of: object, path: Path) -> None:
    if isinstance(of, BytesStorageMetadata):
        return
    sound = (
        type(of) is TensorStorageMetadata
        and isinstance(of.properties.dtype, torch.dtype)
        and all(len(each.sizes) == len(each.offsets) == len(of.size) for each in of.chunks)
        and all(
            type(number) is int and number >= 0
            for each in (of.size, *(part for chunk in of.chunks for part in (chunk.sizes, chunk.offsets)))
            for number in each
        )
    )
    if not sound:
        raise DamagedError(f"the metadata of {fqn!r} is not valid", path=path)
    assert isinstance(of, TensorStorageMetadata)
    if of.properties.layout is not torch.strided:
        raise LoadError(f"{fqn!r} is {of.properties.layout}, which cannot be imported", path=path)
    dtype_name(of.properties.dtype)  # quantized ones are refused


def _read_tensor(
    path: Path, offset: int, length: int, fqn: str, kind: tuple[torch.dtype, tuple[int, ...]]
) -> Iterator[Any]:
    content = b"".join(_read_range(path, offset, length))
    found = load_archive(content, fqn, path=str(path))
    del content
    if not isinstance(found, torch.Tensor) or (found.dtype, tuple(found.shape)) != kind:
        raise DamagedError(f"{fqn!r} is not the tensor that the metadata describes", path=path)
    if found.numel():
        yield bytes_of(found.detach().resolve_conj().resolve_neg().contiguous()).numpy()


# ---- files ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[int, int]]:
    """A descriptor of a regular file, and its size. Links of the user's own are followed: a hub's cache has such."""
    try:
        check_unplanted(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise LoadError("this is no regular file", path=path)
            yield descriptor, status.st_size
        finally:
            os.close(descriptor)
    except FileNotFoundError as error:
        raise ObjectNotFoundError("there is no such file", path=path) from error
    except OSError as error:
        raise UnreadableError(f"the file cannot be read: {error.strerror}", path=path) from error


def _pread(descriptor: int, count: int, offset: int, path: Path) -> bytes:
    data = os.pread(descriptor, count, offset)
    if len(data) != count:
        raise DamagedError(f"the file ends before byte {offset + count}", path=path)
    return data


def _read_range(path: Path, offset: int, length: int) -> Iterator[bytes]:
    with _opened(path) as (descriptor, size):
        if offset + length > size:
            raise DamagedError(f"the file ends at byte {size}, before byte {offset + length}", path=path)
        for begin in range(offset, offset + length, _PIECE_BYTES):
            yield _pread(descriptor, min(_PIECE_BYTES, offset + length - begin), begin, path)
