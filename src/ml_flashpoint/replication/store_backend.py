"""The store behind a `TransferService`: parts of this node go out of it, copies of others' parts come into it.

Owns that a copy appears whole and in nobody else's place. When one is sent or dropped is for others to decide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.capacity import most_bytes
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import (
    CapacityError,
    InvalidNameError,
    ManifestError,
    ObjectNotFoundError,
    UnreadableError,
)
from ml_flashpoint.format.manifest import Manifest, manifest_name, object_name, parse_object_name
from ml_flashpoint.net.messages import Fields
from ml_flashpoint.net.transfers import PartName

ROOM_S = 5.0
"""Seconds that a peer's copy waits for room: long enough for this rank to hear a verdict that its peer has heard."""

_MOST_OBJECTS = 16
"""Of a part. Each takes a file that is open and mapped."""


class StoreBackend:
    """Serves the parts of this node and takes in copies for a store: a `TransferBackend`. Thread-safe.

    Args:
        store: gives the store; may wait for it, and raise `FlashpointError` where it does not come.
        check: raises `FlashpointError` for a part that no copy is taken of.
    """

    def __init__(
        self, store: Callable[[], RankStore], check: Callable[[Manifest], None] = lambda manifest: None
    ) -> None:
        self._store = store
        self._check = check

    def open_part(self, part: PartName) -> AbstractContextManager[memoryview]:
        """See `TransferBackend`."""
        return self._store().open_object(part.version, object_name(part.rank, part.save))

    def read_manifest(self, part: PartName) -> bytes:
        """See `TransferBackend`."""
        rank = part.rank
        path = self._store().base / part.version / manifest_name(rank, part.save)
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFoundError("no such part here", rank=rank, path=path) from error
        except OSError as error:
            raise UnreadableError(f"the manifest: {error.strerror}", rank=rank, path=path) from error

    @contextlib.contextmanager
    def receive(self, manifest: Manifest, rider: Fields) -> Iterator[memoryview | None]:
        """See `TransferBackend`."""
        _check_names(manifest)  # before the store is asked for, which may have to be waited for
        self._check(manifest)
        store = self._store()
        held = store.find(manifest.save_id, manifest.rank)
        if held is not None and held.manifest is not None and not held.doomed:
            yield None
            return
        incoming = IncomingCopy(store, manifest, timeout_s=ROOM_S)
        try:
            yield incoming.buffers[0]
            incoming.commit()
        except BaseException:
            incoming.abort()
            raise


class IncomingCopy:
    """Arenas being filled with a part from elsewhere; nothing is visible before :meth:`commit`.

    Args:
        timeout_s: see `RankStore.acquire_for_copy`.

    Raises:
        InvalidNameError: an object is not called like the part.
        ManifestError: there are more objects than any door makes.
        CapacityError: no room.
    """

    def __init__(self, store: RankStore, manifest: Manifest, *, timeout_s: float = 0.0) -> None:
        _check_names(manifest)
        _check_size(manifest, store)
        self._store = store
        self._manifest = manifest
        self._arenas: list[Arena] = []
        try:
            for record in manifest.objects:
                size = record.file_size
                self._arenas.append(store.acquire_for_copy(size, manifest.rank, timeout_s=timeout_s))
        except BaseException:
            self.abort()
            raise
        self.buffers = tuple(a.buffer[: o.size] for a, o in zip(self._arenas, manifest.objects, strict=True))

    def commit(self) -> None:
        """The bytes are verified: commit the part under this node's base."""
        self._store.commit(self._manifest, self._arenas)

    def abort(self) -> None:
        """Release the arenas."""
        for arena in self._arenas:
            self._store.release(arena)


def _check_size(manifest: Manifest, store: RankStore) -> None:
    """Refuse what there never can be room for, before anything makes way for it."""
    if len(manifest.objects) > _MOST_OBJECTS:
        raise ManifestError(f"the part has {len(manifest.objects)} objects", step=manifest.step, rank=manifest.rank)
    needed, most = sum(record.file_size for record in manifest.objects), most_bytes(store.base)
    if needed > most:
        raise CapacityError(
            f"the part has {needed} bytes, and there can be no more than {most} here",
            needed_bytes=needed,
            available_bytes=most,
            step=manifest.step,
            rank=manifest.rank,
            path=store.base,
            hint="enlarge the tmpfs (mount -o remount,size=...), or let larger nodes hold copies of one another",
        )


def _check_names(manifest: Manifest) -> None:
    for record in manifest.objects:
        if parse_object_name(record.name) != (manifest.rank, manifest.save_id):
            # It would take the place of another part's file.
            raise InvalidNameError(f"no object of this part: {record.name!a}", rank=manifest.rank)
