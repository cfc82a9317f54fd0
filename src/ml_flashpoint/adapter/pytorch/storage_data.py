"""What DCP keeps with our checkpoints beside tensors: where each item lies. Its metadata is `metadata_format`'s."""

from __future__ import annotations

from dataclasses import dataclass

METADATA_KEY = "__dcp_metadata__"
"""Item of the coordinator's object that holds DCP's metadata."""

METADATA_SCOPE = "dcp_metadata"
"""Manifest label of a part whose object has that item: ``global`` or, for saves without collectives, ``rank``."""


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item of a checkpoint lies: the part of a rank, and the key in its object. The same for every save
    of one structure, because DCP may reuse it from a cached plan."""

    rank: int
    key: str
