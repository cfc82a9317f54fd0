"""Objects on their way out: their bytes, then zeros, whatever the memory they are read into was used for before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import DamagedError
from ml_flashpoint.format.manifest import ObjectRecord
from ml_flashpoint.stores import version_store as module
from ml_flashpoint.stores.files import Directory
from ml_flashpoint.stores.version_store import StoredObject, check_blocks

BLOCK = 1000


def written(path: Path, size: int, file_size: int) -> tuple[bytes, ObjectRecord]:
    data = os.urandom(size)
    path.write_bytes(data + b"\xff" * (file_size - size))
    digests = tuple(digest_block(data[at : at + BLOCK]) for at in range(0, size, BLOCK))
    return data, ObjectRecord(size, file_size, digests, BLOCK)


def content(path: Path, record: ObjectRecord) -> bytes:
    def read(begin: int, into: memoryview) -> None:
        Directory(path.parent).read_into(path.name, begin, into)
        check_blocks(record, begin, into, str(path))

    return b"".join(map(bytes, StoredObject(record, read, str(path)).file()))


def test_the_whole_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(module, "_ZEROS", bytes(300))
    for size, file_size in ((5500, 6500), (700, 700), (0, 1), (4000, 4299)):
        data, record = written(tmp_path / "object", size, file_size)
        assert content(tmp_path / "object", record) == data + bytes(file_size - size)


@pytest.mark.parametrize("change", [0, 4999])
def test_what_is_damaged_is_not_handed_out(tmp_path: Path, change: int) -> None:
    data, record = written(tmp_path / "object", 5000, 5000)
    (tmp_path / "object").write_bytes(data[:change] + bytes([data[change] ^ 1]) + data[change + 1 :])
    with pytest.raises(DamagedError):
        content(tmp_path / "object", record)
    (tmp_path / "object").write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="ends at byte"):
        content(tmp_path / "object", record)
