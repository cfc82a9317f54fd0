"""What the dictionary stores: values as managers see them, and the entries of their history.

Owns the value types between the layers only; the rules are `shard`'s, bytes are `value_arenas`'.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ml_flashpoint.checkpoint_object_manager.arena import Arena


@dataclass(frozen=True, slots=True)
class InlineValue:
    """A small value, encoded (`values.to_inline`)."""

    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return len(self.data)


@dataclass(frozen=True, slots=True, eq=False)
class StoredValue:
    """A large value: one object in one arena.

    Attributes:
        value_id: unique in the dictionary; `attempt` of the part that it becomes.
        size: bytes of the object; the arena may be larger.
    """

    value_id: str
    arena: Arena
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.arena.size


Value: TypeAlias = "InlineValue | StoredValue"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One state of one key.

    Attributes:
        key: encoded (`keys.encode_key`).
        checkpoint_id: id at which it was written.
        writer: id of the handle that wrote it.
        value: None: deleted.
        persistent: written by `pput`: does not have to be written again in each checkpoint.
        broadcast: written by `bput`: every manager has one.
        sequence: orders the writes of one manager; not kept by snapshots.
    """

    key: bytes
    checkpoint_id: int
    writer: str
    value: Value | None
    persistent: bool = False
    broadcast: bool = False
    sequence: int = 0
