"""DCP's metadata as bytes and back: equal in every detail, and nothing else is taken for metadata."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardTensorProperties
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ml_flashpoint.adapter.pytorch.metadata_format import ItemPlace, decode_metadata, encode_metadata
from ml_flashpoint.format.errors import DamagedError, FlashpointError, SaveError


def _small() -> Metadata:
    size = torch.Size([4, 3])
    chunks = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 3])) for at in (0, 2)]
    tensor = TensorStorageMetadata(TensorProperties.create_from_tensor(torch.zeros(4, 3)), size, chunks)
    places = {MetadataIndex("w", torch.Size([at, 0]), at // 2): ItemPlace(at // 2, "w") for at in (0, 2)}
    places |= {MetadataIndex("step"): ItemPlace(0, "step")}
    return Metadata({"w": tensor, "step": BytesStorageMetadata()}, {"w": ("w",), "step": ("step",)}, places)


class _OwnBytes(BytesStorageMetadata):
    pass


class _OwnTensor(TensorStorageMetadata):
    pass


class _OwnMetadata(Metadata):
    pass


def test_metadata_that_would_lose_something_is_refused_when_it_is_saved() -> None:
    tensor = _small().state_dict_metadata["w"]
    more: Any = _small()
    more.own = {"of": "the planner"}
    for odd in (
        dataclasses.replace(_small(), storage_data={MetadataIndex("w"): "elsewhere"}),
        dataclasses.replace(_small(), state_dict_metadata={"w": object()}),
        dataclasses.replace(_small(), state_dict_metadata={5: BytesStorageMetadata()}),
        dataclasses.replace(_small(), state_dict_metadata={"w": _OwnBytes()}),
        dataclasses.replace(_small(), state_dict_metadata={"w": _OwnTensor(**vars(tensor))}),
        _OwnMetadata(**vars(_small())),
        more,
    ):
        with pytest.raises(SaveError, match="not that of DCP"):
            encode_metadata(odd)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3) | st.just("AAAA"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("pickle"), inner, max_size=2)
    ),
    max_leaves=4,
)


def _places_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else []
    return [path, *(deeper for key in keys for deeper in _places_in(value[key], (*path, key)))]


@pytest.mark.slow
@given(st.data(), _JSON)
@settings(max_examples=400)
def test_whatever_else_it_says_is_refused_or_harmless(data: st.DataObject, instead: Any) -> None:
    fields = json.loads(encode_metadata(_small()))
    path = data.draw(st.sampled_from([p for p in _places_in(fields) if p]))
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = instead
    try:
        decoded = decode_metadata(json.dumps(fields).encode(), path="p")
    except FlashpointError:
        return
    assert all(isinstance(place, ItemPlace) and place.rank >= 0 for place in decoded.storage_data.values())


@given(st.binary(max_size=50))
def test_other_bytes_and_those_cut_short_are_refused(data: bytes) -> None:
    good = encode_metadata(_small())
    for bad in (data, b"{" + data, good[: len(data)], good[: -1 - len(data)], b'{"dcp":' + b"[" * 100_000):
        with pytest.raises(FlashpointError):
            decode_metadata(bad, path="p")
    later = json.dumps(json.loads(good) | {"dcp": 2}).encode()
    with pytest.raises(DamagedError, match="version 2"):
        decode_metadata(later, path="p")


def test_the_properties_that_older_planners_use() -> None:
    metadata = _small()
    said = metadata.state_dict_metadata["w"]
    assert isinstance(said, TensorStorageMetadata)
    old = ShardTensorProperties(dtype=torch.float16, memory_format=torch.channels_last)
    metadata.state_dict_metadata["w"] = dataclasses.replace(said, properties=old)
    found: Any = decode_metadata(encode_metadata(metadata, []), path="p").state_dict_metadata["w"]
    assert (found.properties.dtype, found.properties.memory_format) == (torch.float16, torch.channels_last)
