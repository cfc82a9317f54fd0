"""Reading all bytes of versions in a store and comparing them with their digests. Imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import FlashpointError, PrunedError
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.stores.version_store import Version, VersionStore

_MANIFESTS_AT_A_TIME: Final = 8


@dataclass(frozen=True, slots=True)
class CheckedPart:
    """A rank's part of a version, after a look at it.

    Attributes:
        rank: of the part.
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
        """Bytes of its objects that count."""
        return 0 if self.manifest is None else self.manifest.total_size


def look_at(store: VersionStore, version: Version) -> list[CheckedPart]:
    """Read the manifests of a version. Raises a `FlashpointError` if the store cannot be read just now."""

    def look(rank: int) -> CheckedPart:
        manifest = None
        try:
            manifest = store.manifest(version, rank)
            store.check_sizes(manifest)
        except PrunedError:
            return CheckedPart(rank, None, removed=True)
        except FlashpointError as error:
            if not is_damage(error):
                raise
            if not store.has(version.name, rank, version.save_id):
                return CheckedPart(rank, None, removed=True)
            return CheckedPart(rank, manifest, (_problem(error, store),))
        return CheckedPart(rank, manifest)

    if not store.durable:  # in memory
        return [look(rank) for rank in version.ranks]
    with ThreadPoolExecutor(_MANIFESTS_AT_A_TIME) as pool:
        return list(pool.map(look, version.ranks if version.counts else ()))


def check_part(
    store: VersionStore, part: CheckedPart, *, threads: int = 2, advance: Callable[[int], object] = lambda count: None
) -> CheckedPart:
    """Read all bytes of a part and compare them with their digests.

    Args:
        store: where it is.
        part: from `look_at`.
        threads: blocks that are read at the same time.
        advance: called with the bytes of each block, from several threads.
    """
    manifest = part.manifest
    if manifest is None or part.problems:
        return part
    problems: list[tuple[str, str]] = []
    for record in manifest.objects:

        def read(begin: int, into: memoryview, record: ObjectRecord = record) -> None:
            advance(len(into))
            store.read_into(manifest, record, begin, into)

        try:
            if (wrong := _wrong_blocks(record, read, threads)) is not None:
                problems.append((store.path_of(manifest, record), wrong))
        except PrunedError:
            return CheckedPart(part.rank, manifest, removed=True)
        except FlashpointError as error:
            problems.append(_problem(error, store))
    if problems and not store.has(manifest.version, manifest.rank, manifest.save_id):
        return CheckedPart(part.rank, manifest, removed=True)
    return CheckedPart(part.rank, manifest, tuple(problems))


def _wrong_blocks(record: ObjectRecord, read: Callable[[int, memoryview], None], threads: int) -> str | None:
    """Say which blocks of an object do not have their digests; None if all have. Raises what ``read`` raises.

    Args:
        record: of the object.
        read: fills views, on several threads.
        threads: blocks that are read at the same time.
    """
    buffers = threading.local()

    def is_good(index: int) -> bool:
        begin = index * record.block_size
        if not hasattr(buffers, "block"):
            buffers.block = bytearray(min(record.block_size, record.size))
        with memoryview(buffers.block)[: record.size - begin] as block:
            read(begin, block)
            return digest_block(block) == record.digests[index]

    count = len(record.digests)
    with ThreadPoolExecutor(max(1, min(threads, count))) as pool:
        try:
            bad = [index for index, good in enumerate(pool.map(is_good, range(count))) if not good]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not bad:
        return None
    begin = bad[0] * record.block_size
    return (
        f"{len(bad)} of {count} blocks do not have the digests that were recorded, the first is block {bad[0]} (bytes"
        f" {begin} to {min(begin + record.block_size, record.size)})"
    )


def _problem(error: FlashpointError, store: VersionStore) -> tuple[str, str]:
    return str(error.path or store.path), error.message
