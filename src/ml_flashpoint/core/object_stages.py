"""What an object is on its way into a part: staged, filled, written.

Owns what these stages hand on, to another thread or another process, and what is given up with each. Making one of the
other is `object_writer`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_tensor import ArenaTensor
from ml_flashpoint.copy.late import LateCopy
from ml_flashpoint.format.digest import BlockDigester, block_count
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.format.object_format import Layout

TensorItem = tuple[str, torch.Tensor]
BytesItem = tuple[str, bytes]


@dataclass(slots=True, eq=False)
class Interior:
    """Bytes ``begin:end`` of an object that stay as they are until it is committed, being digested meanwhile.

    Whatever is still to be written goes before or behind them; of their digests, those count whose blocks lie
    wholly within both them and the object.

    Attributes:
        block_size: bytes of a block.
        digester: computes the digests of :attr:`blocks`; None once they are known.
    """

    begin: int
    end: int
    block_size: int
    digester: BlockDigester | None = None
    _digests: tuple[str, ...] = ()

    @property
    def blocks(self) -> range:
        """The blocks that lie wholly within."""
        first = block_count(self.begin, self.block_size)
        return range(first, max(first, self.end // self.block_size))

    def digests(self) -> tuple[str, ...]:
        """Digests of those blocks; waits for the ones still being computed."""
        if self.digester is not None:
            self._digests = self.digester.finish()
            self.digester = None
        return self._digests

    def discard(self) -> None:
        """Stop digesting: the bytes will not be used."""
        if self.digester is not None:
            self.digester.abort()
            self.digester = None


@dataclass(slots=True, eq=False)
class StagedObject:
    """Tensors copied into an arena and not yet named.

    Attributes:
        arena_path: file of the arena.
        interior: where the copies lie; what is before is room for the header.
        views: the copies, in the order of the tensors staged; they stay in this process, like ``arena``.
        late: what is still being copied from CUDA devices; None if nothing is.
    """

    arena_path: Path
    interior: Interior
    views: Sequence[ArenaTensor] = field(default=(), repr=False)
    arena: Arena | None = None
    late: LateCopy | None = None

    def wait(self, deadline_s: float) -> None:
        """Wait until all is copied, and begin to digest it. Does nothing where all is.

        Raises:
            SaveError: a source has changed, or the copy was not over in time. The bytes are of no use.
        """
        if self.late is None:
            return
        try:
            self.late.wait(deadline_s)
        except BaseException:
            self.interior.discard()
            raise
        self.late = None
        if (digester := self.interior.digester) is not None:
            digester.advance(0, digester.size)

    def settle(self) -> None:
        """Wait until nothing is copied into the arena any more: the bytes will not be used."""
        if self.late is not None:
            self.late.settle()


@dataclass(slots=True, eq=False)
class FilledObject:
    """An object whose items are in place, and whose header and digests wait for what may still be added.

    Attributes:
        interior: what stays as it is.
    """

    arena: Arena
    layout: Layout
    byte_items: list[BytesItem]
    metadata: Mapping[str, str] | None
    interior: Interior


@dataclass(frozen=True, slots=True)
class WrittenObject:
    """An object whose bytes and digests are final, not yet committed."""

    arena: Arena
    size: int
    digests: tuple[str, ...]
    block_size: int

    def record(self, name: str) -> ObjectRecord:
        """Its entry in a manifest."""
        return ObjectRecord(name, self.size, self.arena.size, self.digests, self.block_size)
