"""DCP's metadata of a version, out of what each rank writes of it: pure functions, whose bytes travel between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ml_flashpoint.adapter.pytorch.metadata_format import decode_metadata, encode_metadata
from ml_flashpoint.adapter.pytorch.storage_data import ItemPlace
from ml_flashpoint.format.errors import ProtocolError, SaveError
from ml_flashpoint.state.plain_modes import plain_modes

# What torch's own writer says; torch 2.6 has none.
_DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)


def metadata_of_share(items: Sequence[WriteItem], keys: Sequence[str], paths: dict[str, Any], rank: int) -> bytes:
    """Return the metadata of what one rank writes.

    Args:
        items: what it writes. keys: the name of each in the object.
        paths: place of each item in the nested state, by name, as DCP's planner has it.
    """
    _, metadata = create_default_global_save_plan([SavePlan(list(items))], rewrite_index_hints=False)
    metadata.planner_data = {item.index.fqn: paths[item.index.fqn] for item in items}
    metadata.storage_data = {item.index: ItemPlace(rank, key) for item, key in zip(items, keys, strict=True)}
    data = encode_metadata(metadata, ())
    if not data.startswith(b"{"):
        raise SaveError("DCP describes the state in a way that cannot be sent to other ranks", rank=rank)
    return data


def merged_metadata(shares: Sequence[bytes]) -> bytes:
    """Return the metadata of a version.

    Args:
        shares: what `metadata_of_share` has returned, of all ranks, in order.

    Raises:
        ProtocolError, DamagedError: a share came from another rank, and is none.
        ValueError: the shards of a tensor do not fit each other.
    """
    found = []
    for rank, share in enumerate(shares):
        if not share.startswith(b"{"):
            raise ProtocolError("metadata from another rank is no JSON", rank=rank)
        found.append(decode_metadata(share, path=f"rank {rank}"))
    with plain_modes():
        plans = [SavePlan(list(_items(each)), planner_data=each.planner_data) for each in found]
        _, metadata = DefaultSavePlanner().create_global_plan(plans)
    metadata.storage_data = {index: place for each in found for index, place in each.storage_data.items()}
    if _DCP_VERSION is not None and metadata.version is None:
        metadata.version = _DCP_VERSION
    return encode_metadata(metadata, ())


def _items(metadata: Metadata) -> Iterator[WriteItem]:
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            yield WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)
            continue
        for chunk in entry.chunks:
            data = TensorWriteData(chunk, entry.properties, entry.size)
            yield WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
