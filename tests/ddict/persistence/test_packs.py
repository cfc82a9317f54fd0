from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ml_flashpoint.ddict.persistence import packs
from ml_flashpoint.ddict.persistence.packs import PackReader, Receipt, read_receipt, write_pack
from ml_flashpoint.format.errors import (
    DamagedError,
    DigestMismatchError,
    InvalidArgumentError,
    ManifestError,
    ObjectNotFoundError,
)
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.stores import version_store as parts
from ml_flashpoint.stores.files import Directory, Files, UrlFiles

FOLDER = "run/step-7_ckpt"


def _write(store: Files, items: list[tuple[str, bytes]], index: bytes = b"{}", **others: str) -> Receipt:
    part = Manifest("step-7_ckpt", 1, 2, others.pop("attempt", "first"), "node-0", (), others)
    return write_pack(store, FOLDER, part, index, items)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that happens with blocks, on little data."""
    monkeypatch.setattr(packs, "PACK_BLOCK_BYTES", 64)
    monkeypatch.setattr(packs, "PIECE_BYTES", 256)
    monkeypatch.setattr(parts, "PIECE_BYTES", 256)


_ITEMS = st.dictionaries(st.text(max_size=8), st.binary(max_size=900), max_size=8)


@given(index=st.binary(max_size=300), items=_ITEMS, order=st.randoms())
@pytest.mark.parametrize("small", [True, False])
def test_what_is_packed_comes_back(small: bool, index: bytes, items: dict[str, bytes], order: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(packs, "PACK_BLOCK_BYTES", 64)
            patch.setattr(packs, "PIECE_BYTES", 256)
            patch.setattr(parts, "PIECE_BYTES", 256)
        store = UrlFiles("memory://packs")
        if any(0xD800 <= ord(c) < 0xE000 for name in items for c in name):
            with pytest.raises(InvalidArgumentError):
                _write(store, list(items.items()), index)
            return
        receipt = _write(store, list(items.items()), index, label="yes")
        assert Receipt.parse(str(receipt)) == receipt
        assert read_receipt(store, FOLDER, receipt).labels == {"label": "yes"}
        reader = PackReader(store, FOLDER, receipt)
        names = list(items)
        order.shuffle(names)  # type: ignore[attr-defined]
        for name in names:
            assert reader.item(name) == items[name]
            into = bytearray(b"?" * (len(items[name]) + 3))
            assert reader.item(name, into) == items[name]
            assert into == items[name] + b"???"
        assert reader.index() == index


def test_a_large_item_comes_back_wherever_it_lies(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    items = [("a", os.urandom(2**20 - 4096)), ("b", os.urandom(20 * 2**20 + 5)), ("c", b""), ("d", os.urandom(2**20))]
    reader = PackReader(store, FOLDER, _write(store, items))
    for name, content in items:
        assert reader.item(name) == content


def test_small_items_in_their_order_take_one_read_a_block(tmpfs: Path) -> None:
    read: list[int] = []

    class Watched(Directory):
        def read_into(self, name: str, begin: int, into: memoryview) -> None:
            if name.endswith(".safetensors"):
                read.append(len(into))
            super().read_into(name, begin, into)

    store = Watched(tmpfs)
    items = [(f"item-{i}", os.urandom(1000)) for i in range(3000)]
    reader = PackReader(store, FOLDER, _write(store, items))
    for name, content in items:
        assert reader.item(name) == content
    size = reader.manifest.total_size
    assert sum(read) < size + 2 * packs.PACK_BLOCK_BYTES


def test_any_tool_can_open_a_pack(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    receipt = _write(store, [("x", b"some"), ("y", b"")], b"the index")
    with safe_open(store.path_of(f"{FOLDER}/{receipt.files[0]}"), "pt") as file:
        content = {key: bytes(file.get_tensor(key).tolist()) for key in file.keys()}  # noqa: SIM118
    assert content == {"index": b"the index", "item/x": b"some", "item/y": b""}


@pytest.mark.damages_on_purpose
@pytest.mark.usefixtures("small_blocks")
def test_no_flipped_byte_goes_unnoticed(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    items = [("a", os.urandom(100)), ("b", os.urandom(700)), ("c", os.urandom(1))]
    receipt = _write(store, items)
    path = tmpfs / FOLDER / receipt.files[0]
    good = path.read_bytes()
    entries = PackReader(store, FOLDER, receipt)._object.layout.by_key
    begin = min(entry.begin for entry in entries.values())
    for offset in [*range(0, begin, 61), *range(begin, len(good), 7), len(good) - 1]:
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
        touched = offset // 64
        if offset < begin:
            with pytest.raises(DamagedError, match=path.name):
                PackReader(store, FOLDER, receipt)
            continue
        reader = PackReader(store, FOLDER, receipt)
        for name, content in items:
            entry = entries[f"item/{name}"]
            if entry.begin // 64 <= touched <= (entry.end - 1) // 64:
                with pytest.raises(DigestMismatchError, match=f"block {touched}.*{path.name}"):
                    reader.item(name)
            else:
                assert reader.item(name) == content


@pytest.mark.damages_on_purpose
def test_a_pack_cut_short_or_gone(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    receipt = _write(store, [("a", os.urandom(3 * 2**20))])
    path = tmpfs / FOLDER / receipt.files[0]
    good = path.read_bytes()
    for other in [good[:-1], good[:100], b"", good + b"\0"]:
        path.write_bytes(other)
        with pytest.raises(DamagedError, match="as recorded"):
            read_receipt(store, FOLDER, receipt)
    path.write_bytes(good)
    reader = PackReader(store, FOLDER, receipt)
    path.write_bytes(good[:-1])
    with pytest.raises(DamagedError, match=f"ends.*{path.name}"):
        reader.item("a")
    path.unlink()
    with pytest.raises(ObjectNotFoundError, match=path.name):
        reader.item("a")
    with pytest.raises(ObjectNotFoundError, match=path.name):
        read_receipt(store, FOLDER, receipt)


def test_only_the_very_manifest_is_accepted(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    receipt = _write(store, [("a", b"1")])
    other = _write(store, [("a", b"2")], attempt="second")
    manifest = tmpfs / FOLDER / receipt.manifest
    good = manifest.read_bytes()
    for data in [good[:-1], b"", good.replace(b"node-0", b"node-1"), (tmpfs / FOLDER / other.manifest).read_bytes()]:
        manifest.write_bytes(data)
        with pytest.raises(ManifestError, match=manifest.name):
            read_receipt(store, FOLDER, receipt)
    manifest.unlink()
    with pytest.raises(ObjectNotFoundError, match=manifest.name):
        read_receipt(store, FOLDER, receipt)


def test_a_killed_writer_leaves_no_manifest_without_its_pack(tmpfs: Path) -> None:
    written: list[str] = []

    class Watched(Directory):
        def write(self, name: str, chunks: Iterator[bytes]) -> int:  # type: ignore[override]
            written.append(name)
            return super().write(name, chunks)

    receipt = _write(Watched(tmpfs), [("a", b"1")])
    assert written == [f"{FOLDER}/{name}" for name in receipt.files]


def test_arguments_that_cannot_be_used(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    with pytest.raises(InvalidArgumentError, match="twice"):
        _write(store, [("a", b"1"), ("a", b"2")])
    with pytest.raises(InvalidArgumentError, match="save id"):
        _write(store, [], attempt="../../escape")
    assert store.list() == []
    reader = PackReader(store, FOLDER, _write(store, [("a", b"1234")]))
    with pytest.raises(ObjectNotFoundError, match="absent"):
        reader.item("absent")
    for into in [bytearray(3), bytes(4)]:
        with pytest.raises(InvalidArgumentError, match="into"):
            reader.item("a", into)


@pytest.mark.parametrize("text", ["", "a:b", "../x.manifest:" + "0" * 32, "rank-00001-a.manifest:" + "g" * 32, None])
def test_receipts_are_distrusted(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        Receipt.parse(text)
