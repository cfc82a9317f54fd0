"""Values, parts and damage for tests of snapshots."""

from __future__ import annotations

from pathlib import Path

from ml_flashpoint.ddict.manager.index import part_of
from ml_flashpoint.ddict.manager.part_ref import PartRef
from ml_flashpoint.ddict.manager.shard import StoredValue
from ml_flashpoint.format.manifest import object_name
from tests.support.managers import Member

PAGE = 4096

SMALL_PART = 4 * PAGE
"""More than a snapshot takes in which hardly anything is new."""


def some(count: int, size: int = 100, salt: int = 0) -> dict[bytes, bytes | None]:
    return {b"key-%d" % i: bytes([i % 256, salt]) * (size // 2) for i in range(count)}


def path_of(member: Member, of: int, part: PartRef) -> Path:
    return member.folder / part.save.version / object_name(of, part.name)


def flip_a_byte(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def value_parts(member: Member) -> list[PartRef]:
    return [part_of(e.value) for e in member.entries.values() if isinstance(e.value, StoredValue)]
