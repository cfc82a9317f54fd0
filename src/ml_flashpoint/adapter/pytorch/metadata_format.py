"""DCP's metadata as bytes.

Owns both forms of it. The usual one is JSON with a schema of our own: nothing of it is unpickled, and for tens of
thousands of tensors it is several times faster than pickle and ten times faster than torch's restricted unpickler.
Metadata that planners have extended with types of their own is stored by ``torch.save`` and loaded by that unpickler.

::

    {"dcp": 1, "version": null,
     "properties": [[dtype, layout, requires_grad, memory_format, pin_memory], ...],
     "items": [[fqn, properties, size, chunks], [fqn], ...]       one of bytes has nothing but its name
     "places": [[item, offset, index, rank, key], ...]            item: its place in "items", or an fqn
     "planner_data": [[fqn, path], ...],                          or {"pickle": base64}, or null
     "save_id": text}                                             or null; not in older ones

For brevity, 0 stands for chunks that are one and the whole, for a key or a path that is the fqn.
"""

from __future__ import annotations

import base64
import json
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as legacy
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.format.errors import DamagedError, FlashpointError, UnsafeContentError
from ml_flashpoint.state.archive import SafeGlobal, load_archive, save_archive

_VERSION = 1
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
_NAMES = (str, int)

METADATA_TYPES: tuple[Any, ...] = (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    _MEM_FORMAT_ENCODING,
    legacy.TensorProperties,
    legacy.MEM_FORMAT_ENCODING,
    ItemPlace,
    ChainMap,
    OrderedDict,
    defaultdict,
    set,
    frozenset,
    tuple,
    torch.Size,
    torch.layout,
)


def encode_metadata(metadata: Metadata, allowed: Sequence[SafeGlobal] | None = None) -> bytes:
    """DCP metadata as bytes. Of its ``storage_meta``, only the ``save_id`` is kept: the reader knows what it reads.

    Args:
        allowed: what :func:`decode_metadata` will be told to allow; None if that is not known.

    Raises:
        UnsafeContentError: it would refuse this metadata.
    """
    try:
        fields = _fields_of(metadata, allowed)
    except _UnusualError:
        return _pickled(metadata, allowed)
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_metadata(data: bytes, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> Metadata:
    """The metadata that :func:`encode_metadata` made bytes of.

    Args:
        allowed: further types that a custom planner puts into it.

    Raises:
        UnsafeContentError: it refers to anything that is not allowed. Nothing of it was executed.
        DamagedError: it is in no form of ours.
    """
    if not data.startswith(b"{"):
        found = _unpickled(data, path=path, allowed=allowed)
        if not isinstance(found, Metadata):
            raise UnsafeContentError(f"the checkpoint's metadata is a {type(found).__name__}", path=path)
        return found
    try:
        return _metadata_of(json.loads(data), lambda piece: _unpickled(piece, path=path, allowed=allowed))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the checkpoint's metadata is not valid: {error}", path=path) from error


# ---- the schema ---------------------------------------------------------------------------------------------------


class _UnusualError(Exception):
    """There is something in the metadata that the schema has no words for."""


def _require(condition: bool) -> None:
    if not condition:
        raise _UnusualError


def _fields_of(metadata: Metadata, allowed: Sequence[SafeGlobal] | None) -> dict[str, Any]:
    _require(type(metadata) is Metadata and vars(metadata).keys() <= _FIELDS)
    _require(isinstance(metadata.storage_data, dict) and isinstance(metadata.state_dict_metadata, dict))
    version = getattr(metadata, "version", None)  # not in torch 2.6
    _require(version is None or type(version) is str)
    save_id = getattr(metadata.storage_meta, "save_id", None)
    _require(save_id is None or type(save_id) is str)
    properties: dict[tuple[Any, ...], int] = {}
    numbers: dict[Any, int] = {}
    items: list[list[Any]] = []
    for fqn, item in metadata.state_dict_metadata.items():
        _require(type(fqn) in _NAMES)
        numbers[fqn] = len(items)
        items.append([fqn] if type(item) is BytesStorageMetadata else [fqn, *_tensor_fields(item, properties)])
    places: list[list[Any]] = []
    for index, place in metadata.storage_data.items():
        _require(type(index) is MetadataIndex and type(place) is ItemPlace and type(index.fqn) in _NAMES)
        number: Any = numbers.get(index.fqn, [index.fqn])
        key = 0 if place.key == index.fqn else place.key
        places.append([number, None if index.offset is None else list(index.offset), index.index, place.rank, key])
    return {
        "dcp": _VERSION,
        "version": version,
        "properties": list(properties),
        "items": items,
        "places": places,
        "planner_data": _planner_fields(metadata.planner_data, allowed),
        "save_id": save_id,
    }


def _tensor_fields(item: Any, properties: dict[tuple[Any, ...], int]) -> tuple[Any, ...]:
    _require(type(item) is TensorStorageMetadata and type(item.properties) is TensorProperties)
    its = item.properties
    names = str(its.dtype), str(its.layout), bool(its.requires_grad), str(its.memory_format), bool(its.pin_memory)
    size = list(item.size)
    chunks: Any = [[list(chunk.offsets), list(chunk.sizes)] for chunk in item.chunks]
    if len(chunks) == 1 and chunks[0][1] == size and not any(chunks[0][0]) and len(chunks[0][0]) == len(size):
        chunks = 0
    return properties.setdefault(names, len(properties)), size, chunks


def _planner_fields(data: Any, allowed: Sequence[SafeGlobal] | None) -> Any:
    if data is None:
        return None
    if type(data) is dict and all(
        type(fqn) is str and type(path) is tuple and all(type(part) in _NAMES for part in path)
        for fqn, path in data.items()
    ):
        return [[fqn, 0 if path == (fqn,) else list(path)] for fqn, path in data.items()]
    return {"pickle": base64.b64encode(_pickled(data, allowed)).decode()}


def _metadata_of(fields: Mapping[str, Any], unpickle: Callable[[bytes], Any]) -> Metadata:
    """Reverse :func:`_fields_of`. Raises ValueError, TypeError or LookupError for whatever is not valid."""
    if fields["dcp"] != _VERSION:
        raise ValueError(f"it is of version {fields['dcp']!r}, not {_VERSION}")
    properties = [_properties_of(*described) for described in fields["properties"]]
    items: dict[Any, Any] = {}
    for fqn, *tensor in fields["items"]:
        items[_name(fqn)] = _tensor_of(properties, *tensor) if tensor else BytesStorageMetadata()
    names = list(items)
    places = {}
    for item, offset, index, rank, key in fields["places"]:
        fqn = names[item] if type(item) is int else _name(item[0])
        if type(rank) is not int or rank < 0 or not (index is None or type(index) is int):
            raise ValueError(f"a place of {fqn!r} is none")
        places[MetadataIndex(fqn, offset, index)] = ItemPlace(rank, fqn if key == 0 else _name(key))
    planner_data = fields["planner_data"]
    if isinstance(planner_data, list):
        planner_data = {_name(fqn): (fqn,) if path == 0 else tuple(map(_name, path)) for fqn, path in planner_data}
    elif planner_data is not None:
        planner_data = unpickle(base64.b64decode(planner_data["pickle"], validate=True))
    metadata = Metadata(items, planner_data, places)
    if fields["version"] is not None:
        metadata.version = _name(fields["version"])
    if fields.get("save_id") is not None:
        metadata.storage_meta = StorageMeta(save_id=str(_name(fields["save_id"])))
    return metadata


def _tensor_of(properties: list[TensorProperties], number: int, size: list[int], chunks: Any) -> TensorStorageMetadata:
    whole = torch.Size(size)
    if chunks == 0:
        found = [ChunkStorageMetadata(torch.Size([0] * len(size)), whole)]
    else:
        found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(properties[number], whole, found)


def _properties_of(dtype: str, layout: str, grad: bool, memory_format: str, pinned: bool) -> TensorProperties:
    kinds = _constant(dtype, torch.dtype), _constant(layout, torch.layout)
    return TensorProperties(*kinds, bool(grad), _constant(memory_format, torch.memory_format), bool(pinned))


def _constant(name: str, kind: type) -> Any:
    value = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(value, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return value


def _name(value: Any) -> Any:
    if type(value) not in _NAMES:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


# ---- what the schema has no words for -----------------------------------------------------------------------------


def _pickled(value: Any, allowed: Sequence[SafeGlobal] | None) -> bytes:
    everything = None if allowed is None else [*METADATA_TYPES, *allowed]
    return save_archive(value, "the planner's metadata", allowed=everything)


def _unpickled(data: bytes, *, path: str, allowed: Sequence[SafeGlobal]) -> Any:
    try:
        return load_archive(data, "metadata", path=path, allowed=[*METADATA_TYPES, *allowed])
    except FlashpointError as error:
        raise UnsafeContentError(
            f"the checkpoint's metadata is not acceptable: {error}",
            path=path,
            hint="pass the planner's own types as safe_globals",
        ) from error
