"""Copies of persisted versions, as folders that `flashpoint ls`, `verify` and `export` take.

Owns that a copy is what was persisted, or is not there: each block is compared with its digest on its way into a hidden
folder, which gets its name once all of it is durable. Imports no torch.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ml_flashpoint.format.errors import FlashpointError, ObjectNotFoundError, SaveError
from ml_flashpoint.format.failure_kinds import is_damage
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, sync_directory, write_manifest
from ml_flashpoint.format.private_folders import check_unplanted
from ml_flashpoint.persist.blocks import VerifiedFile
from ml_flashpoint.persist.opening import open_store
from ml_flashpoint.persist.store import DurableStore
from ml_flashpoint.persist.versions import PersistedVersion, list_persisted, read_part_manifest

_log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 16 << 20


def copy_persisted(
    url: str,
    destination: str | os.PathLike[str],
    step: int | None = None,
    *,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Path:
    """Copy a persisted version.

    Args:
        url: from `persist.opening.checked_url`.
        destination: the folder in which the version gets one of its own, ``step-<n>_ckpt``; made if need be.
        step: which version; by default the newest that is sound.
        progress: called with how many bytes are copied, of how many.

    Returns:
        The copy. It is made durable before it gets its name.

    Raises:
        ObjectNotFoundError: there is no such version.
        DamagedError, DigestMismatchError: it is not what was persisted.
        LoadError: the store cannot be read.
        SaveError: the copy cannot be written, or is there already.
        UnsafePathError: somebody else has planted the destination.
    """
    store = open_store(url)
    wanted = [version for version in list_persisted(store)[0] if step is None or version.step == step]
    for version in wanted:
        try:
            return _copy(store, version, Path(destination), progress)
        except FlashpointError as error:
            if not is_damage(error) or version is wanted[-1]:
                raise
            _log.warning("%s cannot be copied, trying an older one: %s", store.path_of(version.folder), error)
    of_step = "" if step is None else f" of step {step}"
    raise ObjectNotFoundError(
        f"there is no complete version{of_step}", path=store.path_of(""), hint="flashpoint ls shows what there is"
    )


def _copy(
    store: DurableStore, version: PersistedVersion, destination: Path, progress: Callable[[int, int], object]
) -> Path:
    target = destination / version.name
    hidden = destination / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        if os.path.lexists(target):
            raise SaveError("there is a copy already", step=version.step, path=target, hint="remove it first")
        manifests = [read_part_manifest(store, version, rank) for rank in range(version.world_size)]
        total, done = sum(manifest.objects[0].file_size for manifest in manifests), 0
        check_unplanted(destination)
        destination.mkdir(parents=True, exist_ok=True)
        check_unplanted(destination)  # nobody else can be there first any more
        hidden.mkdir(mode=0o700)
        try:
            for manifest in manifests:
                for count in _copy_object(store, version, manifest, hidden):
                    done += count
                    progress(done, total)
                write_manifest(hidden, manifest, fsync=True)
            os.rename(hidden, target)
            sync_directory(destination)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise
    except OSError as error:
        raise SaveError(f"the copy cannot be written: {error.strerror}", step=version.step, path=target) from error
    return target


def _copy_object(store: DurableStore, version: PersistedVersion, manifest: Manifest, hidden: Path) -> Iterator[int]:
    """Copies an object, and yields the bytes of each piece."""
    record: ObjectRecord = manifest.objects[0]
    content = VerifiedFile(store, f"{version.folder}/{record.name}", record)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    piece = max(_PIECE_BYTES // record.block_size, 1) * record.block_size
    with open(os.open(hidden / record.name, flags, 0o600), "wb", buffering=0) as file:
        for begin in range(0, record.size, piece):
            left = memoryview(content.read(begin, min(begin + piece, record.size)))
            yield len(left)
            while left:
                left = left[file.write(left) :]
        os.truncate(file.fileno(), record.file_size)  # what is unused behind it is zeros
        yield record.file_size - record.size
        os.fsync(file.fileno())
