"""DCP's metadata of a version: as bytes, and out of what each rank writes of it.

Usual metadata is JSON with a schema of our own: nothing of it is unpickled, and for tens of thousands of tensors it is
several times faster than pickle. Metadata that planners have extended with types of their own is an archive.

::

    {"dcp": 1, "version": text, "save_id": text,                  each may be null
     "properties": [[dtype, layout, requires_grad, memory_format, pin_memory], ...],
     "items": [[fqn, number in properties, size, chunks], [fqn], ...],      one of bytes has nothing but its name
     "places": [[fqn, offset, index, rank, key], ...],
     "planner_data": [[fqn, path], ...]}                          or {"pickle": base64}, or null
"""

from __future__ import annotations

import base64
import json
from collections import ChainMap, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import metadata as legacy
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ml_flashpoint.format.errors import DamagedError, FlashpointError, SaveError, UnsafeContentError
from ml_flashpoint.state.archive import SafeGlobal, load_archive, plain_modes, save_archive

METADATA_KEY = "__dcp_metadata__"
"""Item of the coordinator's object that holds the metadata."""

_SCHEMA = 1
_FIELDS = {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"}
# What torch's own writer says; torch 2.6 has none.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The part and the object key of an item. The same for every save of one structure, because DCP may reuse it from a
    cached plan."""

    rank: int
    key: str


_TYPES: tuple[Any, ...] = (
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
    *(ChainMap, OrderedDict, defaultdict, set, frozenset, tuple, torch.Size, torch.layout),
)


class _UnusualError(Exception):
    """The schema has no words for something in the metadata."""


def encode_metadata(metadata: Metadata, allowed: Sequence[SafeGlobal] | None = ()) -> bytes:
    """Return DCP metadata as bytes. Of ``storage_meta``, only the ``save_id`` is kept: the reader knows what it reads.
    Raises `UnsafeContentError` if `decode_metadata` would refuse this metadata.

    Args:
        allowed: what `decode_metadata` will be told to allow; None if nothing is to be refused here.
    """
    if _DCP_VERSION is not None and metadata.version is None:
        metadata.version = _DCP_VERSION
    try:
        return json.dumps(_fields_of(metadata, allowed), separators=(",", ":")).encode()
    except _UnusualError:
        return _pickled(metadata, allowed)


def decode_metadata(data: bytes, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> Metadata:
    """Return the metadata that `encode_metadata` made bytes of.

    Args:
        allowed: further types that a custom planner puts into it.

    Raises:
        UnsafeContentError: it refers to anything that is not allowed. Nothing of it was executed.
        DamagedError: it is in no form of ours.
    """
    if data.startswith(b"{"):
        try:
            return _metadata_of(json.loads(data), lambda piece: _unpickled(piece, path=path, allowed=allowed))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise DamagedError(f"the checkpoint's metadata is not valid: {error}", path=path) from error
    found = _unpickled(data, path=path, allowed=allowed)
    if not isinstance(found, Metadata):
        raise UnsafeContentError(f"the checkpoint's metadata is a {type(found).__name__}", path=path)
    places = found.storage_data
    if not isinstance(places, dict) or not all(
        isinstance(p, ItemPlace) and type(p.rank) is int and type(p.key) is str for p in places.values()
    ):
        raise DamagedError("the checkpoint's metadata is not valid: it does not say where its items are", path=path)
    return found


# ---- of several ranks ---------------------------------------------------------------------------------------------


def metadata_of_share(items: Sequence[WriteItem], keys: Sequence[str], paths: Mapping[str, Any], rank: int) -> bytes:
    """Return the metadata of items that one rank writes under these keys.

    Args:
        paths: place of each item in the nested state, by name. An adapter adds notes under ``"<name>\\0<note>"``.
    """
    _, metadata = create_default_global_save_plan([SavePlan(list(items))], rewrite_index_hints=False)
    names = {item.index.fqn for item in items}
    metadata.planner_data = {name: path for name, path in paths.items() if name.partition("\0")[0] in names}
    metadata.storage_data = {item.index: ItemPlace(rank, key) for item, key in zip(items, keys, strict=True)}
    return encode_metadata(metadata)


def merged_metadata(shares: Sequence[bytes]) -> bytes:
    """Return the metadata of a version, out of what `metadata_of_share` has returned on each rank, in order; ``b""`` of
    a rank that could not plan.

    Raises:
        SaveError: a rank could not plan. `DamagedError`, `UnsafeContentError`: a share from another rank is none.
        ValueError: the shards of a tensor do not fit each other.
    """
    if b"" in shares:
        text = "a rank could not plan what it saves; its own log says why"
        raise SaveError(text, rank=shares.index(b""))
    found = [decode_metadata(share, path=f"rank {rank}") for rank, share in enumerate(shares)]
    with plain_modes():
        plans = [SavePlan(list(_items(each)), planner_data=each.planner_data) for each in found]
        _, metadata = DefaultSavePlanner().create_global_plan(plans)
    metadata.storage_data = {index: place for each in found for index, place in each.storage_data.items()}
    return encode_metadata(metadata)


def _items(metadata: Metadata) -> Iterator[WriteItem]:
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)
            continue
        for chunk in entry.chunks:
            data = TensorWriteData(chunk, entry.properties, entry.size)
            yield WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


# ---- the schema ---------------------------------------------------------------------------------------------------


def _require(condition: bool) -> None:
    if not condition:
        raise _UnusualError


def _fields_of(metadata: Metadata, allowed: Sequence[SafeGlobal] | None) -> dict[str, Any]:
    save_id, version = getattr(metadata.storage_meta, "save_id", None), getattr(metadata, "version", None)
    _require(type(metadata) is Metadata and vars(metadata).keys() <= _FIELDS)
    _require({type(version), type(save_id)} <= {str, type(None)} and isinstance(metadata.storage_data, dict))
    properties: dict[tuple[Any, ...], int] = {}
    items: list[list[Any]] = []
    for fqn, item in metadata.state_dict_metadata.items():
        _require(type(fqn) is str)
        items.append([fqn] if type(item) is BytesStorageMetadata else [fqn, *_tensor_fields(item, properties)])
    places: list[list[Any]] = []
    for index, place in metadata.storage_data.items():
        _require(type(index) is MetadataIndex and type(place) is ItemPlace and type(index.fqn) is str)
        places.append([index.fqn, index.offset, index.index, place.rank, place.key])
    planner_data: Any = metadata.planner_data
    if type(planner_data) is dict and all(type(path) is tuple for path in planner_data.values()):
        planner_data = list(planner_data.items())
        _require({type(part) for fqn, path in planner_data for part in (fqn, *path)} <= {str, int})
    elif planner_data is not None:
        planner_data = {"pickle": base64.b64encode(_pickled(planner_data, allowed)).decode()}
    return {
        "dcp": _SCHEMA,
        "version": version,
        "save_id": save_id,
        "properties": list(properties),
        "items": items,
        "places": places,
        "planner_data": planner_data,
    }


def _tensor_fields(item: Any, properties: dict[tuple[Any, ...], int]) -> tuple[Any, ...]:
    _require(type(item) is TensorStorageMetadata and type(item.properties) is TensorProperties)
    its = item.properties
    names = str(its.dtype), str(its.layout), bool(its.requires_grad), str(its.memory_format), bool(its.pin_memory)
    chunks = [(chunk.offsets, chunk.sizes) for chunk in item.chunks]
    return properties.setdefault(names, len(properties)), item.size, chunks


def _metadata_of(fields: Mapping[str, Any], unpickle: Callable[[bytes], Any]) -> Metadata:
    """Reverse `_fields_of`. Raises ValueError, TypeError or LookupError for whatever is not valid."""
    if fields["dcp"] != _SCHEMA:
        raise ValueError(f"it is of version {fields['dcp']!r}, not {_SCHEMA}")
    properties = [_properties_of(*described) for described in fields["properties"]]
    items: dict[Any, Any] = {}
    for fqn, *tensor in fields["items"]:
        items[_text(fqn)] = _tensor_of(properties, *tensor) if tensor else BytesStorageMetadata()
    places = {}
    for fqn, offset, index, rank, key in fields["places"]:
        if type(rank) is not int or rank < 0 or not (index is None or type(index) is int):
            raise ValueError(f"a place of {fqn!r} is none")
        places[MetadataIndex(_text(fqn), offset, index)] = ItemPlace(rank, _text(key))
    planner_data = fields["planner_data"]
    if isinstance(planner_data, list):
        planner_data = {
            _text(fqn): tuple(p if type(p) is int else _text(p) for p in path) for fqn, path in planner_data
        }
    elif planner_data is not None:
        planner_data = unpickle(base64.b64decode(planner_data["pickle"], validate=True))
    metadata = Metadata(items, planner_data, places)
    if fields["version"] is not None:
        metadata.version = _text(fields["version"])
    if fields["save_id"] is not None:
        metadata.storage_meta = StorageMeta(save_id=_text(fields["save_id"]))
    return metadata


def _tensor_of(properties: list[TensorProperties], number: int, size: list[int], chunks: Any) -> TensorStorageMetadata:
    found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks]
    return TensorStorageMetadata(properties[number], torch.Size(size), found)


def _properties_of(dtype: str, layout: str, grad: bool, memory_format: str, pinned: bool) -> TensorProperties:
    kinds = _constant(dtype, torch.dtype), _constant(layout, torch.layout)
    return TensorProperties(*kinds, bool(grad), _constant(memory_format, torch.memory_format), bool(pinned))


def _constant(name: str, kind: type) -> Any:
    value = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(value, kind):
        raise ValueError(f"this torch has no {kind.__name__} {name!r}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"a name is a {type(value).__name__}")
    return value


def _part(value: Any) -> str | int:
    return value if type(value) is int else _text(value)


def _pickled(value: Any, allowed: Sequence[SafeGlobal] | None) -> bytes:
    return save_archive(value, "the planner's metadata", allowed=None if allowed is None else [*_TYPES, *allowed])


def _unpickled(data: bytes, *, path: str, allowed: Sequence[SafeGlobal]) -> Any:
    try:
        return load_archive(data, "metadata", path=path, allowed=[*_TYPES, *allowed])
    except FlashpointError as error:
        raise UnsafeContentError(
            f"the checkpoint's metadata is not acceptable: {error}",
            path=path,
            hint="pass the planner's own types as safe_globals",
        ) from error
