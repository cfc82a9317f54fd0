"""Files that a framework looks for beside the parts of a version, kept as items of an object.

An adapter adds such files to the object of one rank of each node, or of one rank for all. The manifest of every part
names that rank, the carrier. As items the files have digests, copies and recovery like all others. They are written
from the items: by the adapter when a part is committed, and by every recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from ml_flashpoint.format.errors import ManifestError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.format.names import validate_segment

if TYPE_CHECKING:
    from ml_flashpoint.engine.reader import ObjectReader

_LABEL: Final = "companions"
_KEY_PREFIX: Final = "__file__/"


def sidecar_items(files: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """Return the items of an object that keep files, by name. Raise an `InvalidNameError` for a name with a slash."""
    return [(f"{_KEY_PREFIX}{validate_segment(name)}", content) for name, content in files.items()]


def sidecar_labels(carrier: int) -> dict[str, str]:
    """Return the labels of the manifest of a part whose sidecars are in the object of the rank ``carrier``."""
    return {_LABEL: str(carrier)}


def carrier_of(manifest: Manifest) -> int | None:
    """Return the rank whose object keeps the sidecars of a part; None if there are none."""
    label = manifest.labels.get(_LABEL)
    if label is None:
        return None
    if not (label.isascii() and label.isdigit() and int(label) < manifest.world_size):
        raise ManifestError(f"no rank keeps its files: {label!a}", step=manifest.save.step, rank=manifest.rank)
    return int(label)


def sidecar_files(reader: ObjectReader) -> dict[str, bytes]:
    """Return the files that an object keeps. Raise a `FlashpointError` if it is damaged, or out of reach."""
    keys = [entry.key for entry in reader.layout.byte_items if entry.key.startswith(_KEY_PREFIX)]
    return {key.removeprefix(_KEY_PREFIX): bytes(reader.bytes_of(key)) for key in keys}
