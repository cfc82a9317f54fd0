"""What a `TransferService` serves from and stores to.

Owns the two interfaces only. The store behind them is the replication manager's.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from ml_flashpoint.format.manifest import Manifest


class IncomingPart(Protocol):
    """Room for a copy that is being received. One thread uses it."""

    @property
    def buffers(self) -> tuple[memoryview, ...]:
        """A writable buffer for each object of the manifest, in its order, of the object's `size` exactly."""
        ...

    def commit(self) -> None:
        """Make the part exist: all bytes are there and have the manifest's digests. Called once at most."""
        ...

    def abort(self) -> None:
        """Give the room back: the copy did not arrive intact, or `commit` raised. Called at most once."""
        ...


class TransferBackend(Protocol):
    """What a `TransferService` serves from and stores to. Called by many threads at once.

    Errors reach the peer: a `FlashpointError` with its type and text, anything else by its name.
    """

    def open_object(self, version: str, name: str) -> AbstractContextManager[memoryview]:
        """The bytes of a committed object, read-only, which must stay as they are until the context is left.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def read_manifest(self, version: str, rank: int, save_id: str) -> bytes:
        """The encoded manifest of the part of ``rank`` that was saved in ``save_id``.

        Raises:
            ObjectNotFoundError: there is none.
        """
        ...

    def begin_receive(self, manifest: Manifest) -> IncomingPart | None:
        """Make room for a part, or return None if it is held and verified already.

        Raises:
            FlashpointError: the part is refused.
        """
        ...
