"""The parts of a dictionary as others see them: names, labels, and the object of a snapshot.

Owns what tells a part of a dictionary from any other, and where index and segment lie in the object of a snapshot. What
an index says is `entry_index`'s. Nothing here touches a store or a peer.

The object is a safetensors file with two byte items: ``index``, and ``segment``, small values one after the other.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ml_flashpoint.ddict.checkpoint_persister import check_checkpoint_id
from ml_flashpoint.format.errors import DamagedError, InvalidArgumentError
from ml_flashpoint.format.manifest import Manifest, object_name
from ml_flashpoint.format.object_format import encode_header, parse_header
from ml_flashpoint.format.object_layout import Layout, plan_layout

KIND_LABEL: Final = "ddict"
"""Label of a part that says what it is: `SNAPSHOT` or `VALUE`."""

STAMP_LABEL: Final = "stamp"
"""Label of a part that says when it was sealed: see `format_stamp`."""

SNAPSHOT: Final = "snapshot"
VALUE: Final = "value"

_HEADER_RESERVE: Final = 1024
_SNAPSHOT_ATTEMPT: Final = re.compile(r"s-([0-9]{20})-[0-9A-Za-z]{1,64}")
_STAMP: Final = re.compile(r"[0-9]{20}")


class PartRef(NamedTuple):
    """Names a part of this manager.

    Attributes:
        attempt: of the part; those of snapshots begin with ``s-``, and later ones of a manager compare greater.
        step: checkpoint that it was sealed in, which is the step of its version.
    """

    attempt: str
    step: int

    @property
    def version(self) -> str:
        """Directory of the part."""
        return f"step-{self.step}_ckpt"


def part_ref(attempt: object, step: object) -> PartRef:
    """A reference that somebody else gave.

    Raises:
        InvalidArgumentError, InvalidNameError: it names no part.
    """
    if not isinstance(attempt, str):
        raise InvalidArgumentError("not the name of a part", argument="attempt", value=attempt)
    object_name(0, attempt)  # refuses what cannot be part of a file's name
    return PartRef(attempt, check_checkpoint_id(step, "step"))


# ---- names and labels -------------------------------------------------------------------------------------


def format_stamp(nanoseconds: int) -> str:
    """A point in the life of a manager, as text that compares as the points do."""
    return f"{nanoseconds:020}"


def check_stamp(stamp: object) -> str:
    """The stamp, if `format_stamp` may have given it.

    Raises:
        InvalidArgumentError: it cannot have.
    """
    if not isinstance(stamp, str) or not _STAMP.fullmatch(stamp):
        raise InvalidArgumentError("a stamp has 20 digits", argument="stamp", value=stamp)
    return stamp


def snapshot_attempt(stamp: str, incarnation: str) -> str:
    """Name of the part of a snapshot.

    Raises:
        InvalidArgumentError: the incarnation is not 1 to 64 letters and digits.
    """
    attempt = f"s-{check_stamp(stamp)}-{incarnation}"
    if not _SNAPSHOT_ATTEMPT.fullmatch(attempt):
        raise InvalidArgumentError("must be 1 to 64 letters and digits", argument="incarnation", value=incarnation)
    return attempt


def labels_of(kind: str, checkpoint_id: int, stamp: str) -> dict[str, str]:
    """Labels of a part."""
    return {KIND_LABEL: kind, "checkpoint": str(checkpoint_id), STAMP_LABEL: stamp}


def part_kind(manifest: Manifest) -> str | None:
    """`SNAPSHOT` or `VALUE`; None: the manifest is of no part that a dictionary would have made."""
    kind = manifest.labels.get(KIND_LABEL)
    match = _SNAPSHOT_ATTEMPT.fullmatch(manifest.save_id)
    stamp = manifest.labels.get(STAMP_LABEL, "")
    if (
        kind not in (SNAPSHOT, VALUE)
        or (kind == SNAPSHOT) != (match is not None)
        or (match is not None and match[1] != stamp)
        or not _STAMP.fullmatch(stamp)
        or manifest.labels.get("checkpoint") != str(manifest.step)
        or [record.name for record in manifest.objects] != [object_name(manifest.rank, manifest.save_id)]
    ):
        return None
    return kind


# ---- the object -------------------------------------------------------------------------------------------


def plan_object(index_bytes: int, segment_bytes: int) -> Layout:
    """Where index and segment lie in the object of a snapshot."""
    return plan_layout([], [("index", index_bytes), ("segment", segment_bytes)], reserve=_HEADER_RESERVE)


def object_header(layout: Layout, file_size: int) -> bytes:
    """Header of the object of a snapshot."""
    return encode_header(layout, file_size, {KIND_LABEL: SNAPSHOT})


def split_object(data: memoryview, file_size: int, path: str) -> tuple[memoryview, memoryview]:
    """Index and segment of the object of a snapshot; views.

    Args:
        data: the object, up to its used size.
        file_size: bytes of its whole file.

    Raises:
        DamagedError: it is not such an object.
    """
    entries = parse_header(data, file_size, path).layout.by_key
    found = []
    for key in ("index", "segment"):
        entry = entries.get(key)
        if entry is None or entry.kind != "bytes" or entry.end > data.nbytes:
            raise DamagedError(f"a snapshot without its {key}", path=path)
        found.append(data[entry.begin : entry.end])
    return found[0], found[1]
