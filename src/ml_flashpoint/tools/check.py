"""Reading all bytes of versions in a store and comparing them with their digests. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ml_flashpoint.format.errors import FlashpointError, PrunedError, is_damage
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.stores.version_store import StoredObject, Version, VersionStore

_MANIFESTS_AT_A_TIME: Final = 8


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A rank's part of a version, after a look at it.

    Attributes:
        manifest: None if it cannot be used.
        problems: the damage that was found, as paths and messages.
        removed: True if the part was removed meanwhile; then nothing is wrong.
    """

    rank: int
    manifest: Manifest | None
    problems: tuple[tuple[str, str], ...] = ()
    removed: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of its object that count."""
        return 0 if self.manifest is None else self.manifest.record.size


def look_at(store: VersionStore, version: Version) -> list[CheckedPart]:
    """Read the manifests of a version. Raises a `FlashpointError` if the store cannot be read just now."""

    def look(rank: int) -> CheckedPart:
        manifest = None
        try:
            manifest = store.manifest(version, rank)
            store.check_size(manifest)
        except FlashpointError as error:
            if not is_damage(error):
                raise
            if isinstance(error, PrunedError) or not store.has(version.save, rank):
                return CheckedPart(rank, None, removed=True)
            return CheckedPart(rank, manifest, (_problem(error, store),))
        return CheckedPart(rank, manifest)

    with ThreadPoolExecutor(_MANIFESTS_AT_A_TIME) as pool:
        return list(pool.map(look, version.ranks if version.counts else ()))


def check_part(
    store: VersionStore, part: CheckedPart, advance: Callable[[int], object] = lambda count: None
) -> CheckedPart:
    """Read all bytes of a part that was looked at and compare them with their digests, up to the first block that
    differs. ``advance`` is called with the bytes of each piece."""
    manifest = part.manifest
    if manifest is None or part.problems:
        return part
    try:
        for piece in StoredObject(manifest, [store]).pieces():
            advance(len(piece))
    except FlashpointError as error:
        if isinstance(error, PrunedError) or not store.has(manifest.save, part.rank):
            return CheckedPart(part.rank, manifest, removed=True)
        return CheckedPart(part.rank, manifest, (_problem(error, store),))
    return part


def _problem(error: FlashpointError, store: VersionStore) -> tuple[str, str]:
    return str(error.path or store.path), error.message
