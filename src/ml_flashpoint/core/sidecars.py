"""Files that a framework looks for beside the parts of a version, kept as items of an object.

Owns how they are named there and how they come back. A door that needs such files adds them to the object of one
rank of each node, or of one rank for all; the manifest of every part names that rank. As items they have
digests, copies and recovery like all others; the files are written from them, by the door when a part is committed
and by every recovery, from bytes that were verified.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping

from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.reserve import give_up_reserve
from ml_flashpoint.checkpoint_object_manager.version_files import is_sidecar_name, write_sidecars
from ml_flashpoint.core.loader import MLFlashpointCheckpointLoader
from ml_flashpoint.core.object_stages import BytesItem
from ml_flashpoint.core.part_reader import ObjectReader
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId, validate_segment
from ml_flashpoint.format.errors import InvalidNameError, ManifestError
from ml_flashpoint.format.manifest import Manifest

_LABEL = "companions"
_KEY_PREFIX = "__file__/"


def sidecar_items(files: Mapping[str, bytes]) -> list[BytesItem]:
    """The items of an object that keep these files, by name.

    Raises:
        InvalidNameError: a name that a sidecar cannot have.
    """
    for name in files:
        _check(name)
    return [(f"{_KEY_PREFIX}{name}", content) for name, content in files.items()]


def sidecar_labels(carrier: int) -> dict[str, str]:
    """What the manifest of a part says of the files that belong beside it: they are in the object of this rank."""
    return {_LABEL: str(carrier)}


def carrier_of(manifest: Manifest) -> int | None:
    """The rank whose object keeps the files that belong beside a part; None if there are none.

    Raises:
        ManifestError: the manifest names no rank of its version.
    """
    label = manifest.labels.get(_LABEL)
    if label is None:
        return None
    if not (label.isascii() and label.isdigit() and int(label) < manifest.world_size):
        raise ManifestError(f"no rank keeps its files: {label!a}", step=manifest.step, rank=manifest.rank)
    return int(label)


def sidecar_files(reader: ObjectReader) -> dict[str, bytes]:
    """The files that an object keeps, verified.

    Raises:
        InvalidNameError: one has a name that no sidecar can have.
        FlashpointError: the object is damaged, or out of reach.
    """
    files = {}
    for entry in reader.layout.byte_items:
        if entry.key.startswith(_KEY_PREFIX):
            name = _check(entry.key.removeprefix(_KEY_PREFIX))
            files[name] = bytes(reader.bytes_of(entry.key))
    return files


def restore_sidecars(
    loader: MLFlashpointCheckpointLoader, version: CheckpointContainerId, own: Manifest, store: RankStore
) -> None:
    """Write the files that belong beside the parts of a version on this node, if there are any. On one rank of each.

    Args:
        loader: has found the version.
        own: manifest of this rank's part, or of any if it has none.
        store: of this rank.

    Raises:
        FlashpointError: the object that keeps them is damaged, or out of reach.
        OSError: they cannot be written.
    """
    carrier = carrier_of(own)
    if carrier is None:
        return
    manifest = loader.read_manifest(version, carrier)
    try:
        files = sidecar_files(loader.open_object(version, manifest, manifest.objects[0]))
    finally:
        loader.release()
    try:
        write_sidecars(store.base, version.name, files)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # What is kept for saves to come is of less use than a version that can be loaded.
        store.arenas.delete_free(0)
        give_up_reserve(store.directory)
        write_sidecars(store.base, version.name, files)


def _check(name: str) -> str:
    if not is_sidecar_name(validate_segment(name)):
        raise InvalidNameError(f"no name for a file beside the parts: {name!a}")
    return name
