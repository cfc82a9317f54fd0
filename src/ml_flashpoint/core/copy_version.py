"""Copies of versions, out of a base container that a job is using.

Owns that a copy is what was saved, or is not there: objects and manifests are copied from a held version into a hidden
folder, the copied bytes are compared with the digests, the hold is checked, and only then does the folder get its name.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ml_flashpoint.core.open_version import HeldVersion, hold_version, if_kept
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import DamagedError, DigestMismatchError, SaveError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, sync_directory, write_manifest
from ml_flashpoint.format.private_folders import check_unplanted

_CHUNK: Final = 8 << 20


def copy_version(
    base: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    partial: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Copy a version out of a base container that a job may be using.

    Args:
        base: of a job, on this node.
        destination: the folder in which the version gets one of its own, ``step-<n>_ckpt``; made if need be.
        step: which version; by default the newest, and if that goes meanwhile, the newest then.
        partial: also one that is not whole on this node.
        progress: called with how many bytes are copied, of how many.

    Returns:
        The copy. It is made durable before it gets its name.

    Raises:
        ObjectNotFoundError: there is no such version.
        PrunedError: it went before it was copied.
        DigestMismatchError, DamagedError: it is not what was saved.
        UnreadableError: it cannot be read just now.
        SaveError: the copy cannot be written, or is there already.
        UnsafePathError: somebody else has planted the destination.
    """

    def copy() -> Path:
        with hold_version(base, step, partial=partial) as version:
            return _copy(version, Path(destination), progress)

    return if_kept(copy, step)


def _copy(version: HeldVersion, destination: Path, progress: Callable[[int, int], object]) -> Path:
    target = destination / version.path.name
    hidden = destination / f".{target.name}.{secrets.token_hex(4)}.tmp"
    records = [record for manifest in version.manifests.values() for record in manifest.objects]
    total, done = sum(record.file_size for record in records), 0
    try:
        if os.path.lexists(target):
            raise SaveError("there is a copy already", step=version.step, path=target, hint="remove it first")
        check_unplanted(destination)
        destination.mkdir(parents=True, exist_ok=True)
        check_unplanted(destination)  # nobody else can be there first any more
        hidden.mkdir(mode=0o700)
        try:
            for manifest in version.manifests.values():
                for record in manifest.objects:
                    for count in _copy_object(version, manifest, record, hidden):
                        done += count
                        progress(done, total)
                write_manifest(hidden, manifest, fsync=True)
            version.check()
            os.rename(hidden, target)
            sync_directory(destination)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise SaveError(f"the copy cannot be written: {error.strerror}", step=version.step, path=target) from error
    return target


def _copy_object(version: HeldVersion, manifest: Manifest, record: ObjectRecord, hidden: Path) -> Iterator[int]:
    """Copies an object, and yields the bytes of each piece. Digests are those of what was written."""
    path = version.path / record.name
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with (
        open(version.open_object(record), "rb", buffering=0) as old,
        open(os.open(hidden / record.name, flags, 0o600), "wb", buffering=0) as new,
    ):
        made, left = new.fileno(), record.file_size
        while left:
            piece = memoryview(old.read(min(_CHUNK, left)))
            if not piece:
                raise DamagedError("the object is too short", step=version.step, rank=manifest.rank, path=path)
            left -= len(piece)
            yield len(piece)
            while piece:
                piece = piece[new.write(piece) :]
        os.fsync(made)
        for block, digest in enumerate(record.digests):
            begin = block * record.block_size
            count = min(record.block_size, record.size - begin)
            if digest_block(os.pread(made, count, begin)) != digest:
                version.check()
                raise DigestMismatchError(
                    f"block {block} is not what was saved", step=version.step, rank=manifest.rank, path=path
                )
