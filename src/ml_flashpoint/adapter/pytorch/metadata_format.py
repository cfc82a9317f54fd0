"""DCP's metadata of a version: as JSON, and out of what each rank writes of it.

torch reads archives with checks in Python, and needs six times as long for tens of thousands of tensors. So only what a
planner has put there of its own is an archive.

::

    {"dcp": 1, "version": text, "save_id": text,                  each may be null
     "properties": [[dtype, layout, requires_grad, memory_format, pin_memory], ...],
     "items": [[fqn, number in properties, size, chunks], [fqn], ...],      one of bytes has nothing but its name
     "places": [[fqn, offset, index, rank, key], ...],
     "planner_data": [[fqn, path], ...]}                          or base64 of an archive, or null
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
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
# What torch's own writer says; torch 2.6 has none.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
_FIELDS = {field.name for field in dataclasses.fields(Metadata)} | {"version"}


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """The part and the object key of an item. The same for every save of one structure, because DCP may reuse it from a
    cached plan."""

    rank: int
    key: str


def encode_metadata(metadata: Metadata, allowed: Sequence[SafeGlobal] | None = ()) -> bytes:
    """Return DCP metadata as bytes.

    Args:
        allowed: what `decode_metadata` will be told to allow; None if nothing is to be refused here.

    Raises:
        UnsafeContentError: `decode_metadata` would refuse what a planner has put into it.
        SaveError: a planner has made it of other types than DCP's own, or has set other attributes of it.
    """
    if _DCP_VERSION is not None and metadata.version is None:
        metadata.version = _DCP_VERSION
    properties: dict[tuple[Any, ...], int] = {}
    try:
        if type(metadata) is not Metadata or not vars(metadata).keys() <= _FIELDS:
            raise TypeError(f"a {type(metadata).__name__} with {sorted(vars(metadata).keys() - _FIELDS)}")
        items = [_item_fields(fqn, item, properties) for fqn, item in metadata.state_dict_metadata.items()]
        places = [
            (_text(index.fqn), index.offset, index.index, place.rank, _text(place.key))
            for index, place in metadata.storage_data.items()
        ]
        fields = {
            "dcp": _SCHEMA,
            "version": getattr(metadata, "version", None),
            "save_id": getattr(metadata.storage_meta, "save_id", None),
            "properties": list(properties),
            "items": items,
            "places": places,
            "planner_data": _planner_fields(metadata.planner_data, allowed),
        }
        return json.dumps(fields, separators=(",", ":")).encode()
    except (TypeError, AttributeError, ValueError) as error:
        raise SaveError(f"the planner's metadata is not that of DCP: {error}") from error


def _item_fields(fqn: str, item: Any, properties: dict[tuple[Any, ...], int]) -> tuple[Any, ...]:
    kind = type(item)
    if kind not in (BytesStorageMetadata, TensorStorageMetadata):
        raise TypeError(f"{fqn!r} is a {kind.__module__}.{kind.__qualname__}")
    if kind is BytesStorageMetadata:
        return (_text(fqn),)
    its = item.properties
    names = str(its.dtype), str(its.layout), bool(its.requires_grad), str(its.memory_format), bool(its.pin_memory)
    chunks = [(chunk.offsets, chunk.sizes) for chunk in item.chunks]
    return _text(fqn), properties.setdefault(names, len(properties)), item.size, chunks


def _planner_fields(data: Any, allowed: Sequence[SafeGlobal] | None) -> Any:
    if data is None:
        return None
    if type(data) is dict and all(type(fqn) is str and type(path) is tuple for fqn, path in data.items()):
        parts = {type(part) for path in data.values() for part in path}
        if parts <= {str, int}:
            return list(data.items())
    return base64.b64encode(save_archive(data, "the planner's metadata", allowed=allowed)).decode()


def decode_metadata(data: bytes, *, path: str, allowed: Sequence[SafeGlobal] = ()) -> Metadata:
    """Return the metadata that `encode_metadata` made bytes of.

    Args:
        allowed: further types that a custom planner puts into it.

    Raises:
        UnsafeContentError: it refers to anything that is not allowed. Nothing of it was executed.
        DamagedError: it is not of this form.
    """
    try:
        fields = json.loads(data)
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
                _text(fqn): tuple(p if type(p) is int else _text(p) for p in its) for fqn, its in planner_data
            }
        elif planner_data is not None:
            planner_data = load_archive(
                base64.b64decode(planner_data, validate=True), "metadata", path=path, allowed=allowed
            )
        metadata = Metadata(items, planner_data, places)
        if fields["version"] is not None:
            metadata.version = _text(fields["version"])
        if fields["save_id"] is not None:
            metadata.storage_meta = StorageMeta(save_id=_text(fields["save_id"]))
    except UnsafeContentError as error:
        text = f"the checkpoint's metadata is not acceptable: {error}"
        raise UnsafeContentError(text, path=path, hint="pass the planner's own types as safe_globals") from error
    except (FlashpointError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedError(f"the checkpoint's metadata is not valid: {error}", path=path) from error
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
