"""Objects on their way out: their bytes, then zeros, whatever the memory they are read into was used for before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ml_flashpoint.engine.reader import ObjectReader
from ml_flashpoint.format.digest import digest_block
from ml_flashpoint.format.errors import DamagedError, ObjectFormatError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord
from ml_flashpoint.format.names import SaveId
from ml_flashpoint.format.object_format import encode_header, plan_layout
from ml_flashpoint.stores import version_store as module
from ml_flashpoint.stores.durable import DurableVersions
from ml_flashpoint.stores.files import Directory
from ml_flashpoint.stores.version_store import StoredObject

BLOCK = 1000


def written(root: Path, size: int, file_size: int) -> tuple[bytes, StoredObject]:
    data = os.urandom(size)
    digests = tuple(digest_block(data[at : at + BLOCK]) for at in range(0, size, BLOCK))
    manifest = Manifest(SaveId(1, size), 0, 1, "node", ObjectRecord(size, file_size, digests, BLOCK))
    store = DurableVersions(Directory(root))
    store.write_part(manifest, lambda: [data + b"\xff" * (file_size - size)])
    store.complete(manifest.save, 1)
    return data, StoredObject(manifest, [store])


def content(stored: StoredObject) -> bytes:
    return b"".join(map(bytes, stored.file()))


def test_the_whole_file_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(module, "_ZEROS", bytes(300))
    for size, file_size in ((5500, 6500), (700, 700), (0, 1), (4000, 4299)):
        data, stored = written(tmp_path, size, file_size)
        assert content(stored) == data + bytes(file_size - size)


def test_an_item_past_the_bytes_that_count_is_damage(tmp_path: Path) -> None:
    layout = plan_layout([("weight", "float32", (3000,))])
    data = encode_header(layout, layout.size) + bytes(layout.size - layout.data_start)
    data = data[: layout.data_start + 1000]
    digests = tuple(digest_block(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
    manifest = Manifest(SaveId(1, 1), 0, 1, "node", ObjectRecord(len(data), layout.size, digests, BLOCK))
    store = DurableVersions(Directory(tmp_path))
    store.write_part(manifest, lambda: [data + bytes(layout.size - len(data))])
    with pytest.raises(ObjectFormatError, match=f"up to byte {layout.size}"):
        StoredObject(manifest, [store]).bytes_of("weight")
    with pytest.raises(ObjectFormatError, match=f"up to byte {layout.size}"):
        ObjectReader(manifest, local=memoryview(bytearray(data))).tensor("weight")


@pytest.mark.parametrize("change", [0, 4999])
def test_what_is_damaged_is_not_handed_out(tmp_path: Path, change: int) -> None:
    data, stored = written(tmp_path, 5000, 5000)
    Path(stored.path).write_bytes(data[:change] + bytes([data[change] ^ 1]) + data[change + 1 :])
    with pytest.raises(DamagedError):
        content(stored)
    Path(stored.path).write_bytes(data[:-1])
    with pytest.raises(DamagedError, match="ends before byte"):
        content(stored)
