"""What every durable store does, and what only some do."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from ml_flashpoint.ddict import CheckpointPersister, FsspecCheckpointPersister, PosixCheckpointPersister
from ml_flashpoint.format.errors import (
    CapacityError,
    DamagedError,
    InvalidArgumentError,
    InvalidNameError,
    JobInUseError,
    ObjectNotFoundError,
    SaveError,
    UnsafePathError,
)
from ml_flashpoint.stores.files import Directory, Files
from tests.support.forked import Child


class Broken(Exception):
    pass


@pytest.fixture(params=["directory", "file", "memory", "object store"])
def store(request: pytest.FixtureRequest, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    if request.param == "directory":
        yield Directory(tmpfs / "deep" / "root")
    elif request.param == "file":
        yield Files(f"file://{tmpfs}/root")
    else:
        # An object store's way to write, on the one that is here.
        if request.param == "object store":
            monkeypatch.setattr("ml_flashpoint.stores.files._PUBLISHED_WHEN_COMPLETE", {"memory"})
        name = f"memory://{secrets.token_hex(4)}"
        yield Files(name)
        import fsspec

        if fsspec.filesystem("memory").exists(name):
            fsspec.filesystem("memory").rm(name, recursive=True)


def test_a_file_comes_back_whole_and_in_ranges(store: Files) -> None:
    big = os.urandom(6 * 2**20 + 17)  # more than one request
    chunks = [b"", b"head", memoryview(big), bytearray(b"tail"), memoryview(b"abcdefgh").cast("I")]
    whole = b"head" + big + b"tailabcdefgh"
    store.write("a/b/file", [b"x" * 9_000_000])
    assert store.write("a/b/file", chunks) == len(whole), "writing replaces"
    assert store.list("a/b") == ["file"]
    assert store.size("a/b/file") == len(whole)
    assert store.read("a/b/file", limit=len(whole)) == whole
    for begin, end in [(0, 0), (0, 1), (3, 2**20 + 1), (2**20, 2**21), (len(whole) - 1, len(whole)), (7, len(whole))]:
        into = bytearray(end - begin)
        store.read_into("a/b/file", begin, memoryview(into))
        assert into == whole[begin:end]
    with pytest.raises(DamagedError, match="file"):
        store.read_into("a/b/file", len(whole) - 2, memoryview(bytearray(3)))
    with pytest.raises(DamagedError, match="more than 4"):
        store.read("a/b/file", limit=4)
    store.write("empty", [])
    assert (store.size("empty"), store.read("empty", limit=0)) == (0, b"")


@pytest.mark.parametrize("size", [1, 5 * 2**20])
def test_a_failed_write_leaves_nothing_new_and_nothing_behind(
    request: pytest.FixtureRequest, store: Files, size: int
) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"y" * size
        raise Broken

    with pytest.raises((Broken, SaveError)):
        store.write("folder/file", chunks())
    assert [name for name in store.list("folder") if not name.startswith(".")] == []
    store.write("folder/file", [b"old"])
    if "object store" in request.node.name:
        return  # its writer chooses a new name
    with pytest.raises((Broken, SaveError)):
        store.write("folder/file", chunks())
    assert store.read("folder/file", limit=10) == b"old"
    assert store.list("folder") == ["file"]


def test_a_list_that_an_object_store_refuses_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("slow down")

    monkeypatch.setattr("ml_flashpoint.stores.files._PUBLISHED_WHEN_COMPLETE", {"memory"})
    store = Files(f"memory://{secrets.token_hex(4)}")
    store.write("folder/file", [b"old"])
    with monkeypatch.context() as broken:
        broken.setattr(MemoryFile, "write", refuse)
        broken.setattr(MemoryFileSystem, "pipe_file", refuse)
        with pytest.raises(SaveError, match="slow down"):
            store.write("folder/file", [b"new"])
    assert store.read("folder/file", limit=10) == b"old"
    store.remove_folder("folder")


def test_what_is_not_there(store: Files) -> None:
    store.write("there", [b"1"])
    with pytest.raises(ObjectNotFoundError, match="absent"):
        store.size("absent")
    with pytest.raises(ObjectNotFoundError, match="absent"):
        store.read_into("folder/absent", 0, memoryview(bytearray(1)))
    assert store.list("absent") == []
    store.remove("absent")
    store.remove("folder/absent")
    store.remove_folder("folder")
    assert store.list() == ["there"]


def test_listing_and_removing(store: Files) -> None:
    for name in ["a/1", "a/2", "a/c/3", "ab/4", "top"]:
        store.write(name, [name.encode()])
    assert store.list() == ["a", "ab", "top"]
    assert store.list("a") == ["1", "2", "c"]
    store.remove("a/1")
    assert store.list("a") == ["2", "c"]
    store.remove_folder("a")
    assert store.list() == ["ab", "top"]
    assert store.read("ab/4", limit=10) == b"ab/4"


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../out", "a/../../out", "a//b", "a/.", "nul\0", "x" * 256])
def test_names_cannot_lead_out(store: Files, name: str) -> None:
    calls = [
        lambda: store.write(name, [b""]),
        lambda: store.read(name, limit=1),
        lambda: store.remove(name),
        lambda: store.remove_folder(name),
        lambda: store.list(name or ".."),
    ]
    for call in calls:
        with pytest.raises(InvalidNameError):
            call()


def test_a_directory_says_when_it_cannot_be_written(small_tmpfs: Path) -> None:
    store = Directory(small_tmpfs)
    with pytest.raises(CapacityError):
        store.write("file", [bytes(2**20)] * 8)
    assert store.list() == []
    store.write("file", [b"old"])
    with open(small_tmpfs / "file", "rb") as file:
        store.write("file", [b"new"])
        assert file.read() == b"old", "who reads meanwhile sees the old file"
    with pytest.raises(SaveError):
        Directory(small_tmpfs / "file").write("name", [b""])
    with pytest.raises(InvalidArgumentError, match="nosuch"):
        Files("nosuch://folder").list()


def test_a_directory_follows_no_links(tmpfs: Path) -> None:
    store = Directory(tmpfs / "root")
    store.write("folder/real", [b"1"])
    outside = tmpfs / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"2")
    (tmpfs / "root" / "link").symlink_to(outside / "secret")
    (tmpfs / "root" / "folder" / "link").symlink_to(outside)
    os.mkfifo(tmpfs / "root" / "pipe")
    for name in ["link", "folder", "pipe"]:
        with pytest.raises(DamagedError):
            store.read(name, limit=10)
    store.remove_folder("folder")
    assert (outside / "secret").read_bytes() == b"2"
    store.remove_folder("link")
    assert (outside / "secret").read_bytes() == b"2"
    assert store.list() == ["pipe"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("persister_class", [PosixCheckpointPersister, FsspecCheckpointPersister])
def test_nothing_is_read_or_written_where_another_user_planted_a_link(
    tmpfs: Path, persister_class: type[CheckpointPersister]
) -> None:
    shared, elsewhere = tmpfs / "shared", tmpfs / "elsewhere"
    shared.mkdir()
    shared.chmod(0o1777)
    elsewhere.mkdir()
    persister = persister_class(str(shared / "link"), name="n", managers=1)
    (shared / "link").symlink_to(elsewhere)
    os.lchown(shared / "link", 54321, 54321)
    with pytest.raises(UnsafePathError, match="user 54321"):
        persister.open_store().write("file", [b""])
    with pytest.raises(UnsafePathError, match="user 54321"):
        Directory(shared / "link").lock("n/lock", 0.0)
    assert not list(elsewhere.iterdir())


def _lock(report: Any, folder: Path) -> None:
    kept = Directory(folder).lock("folder/lock", 1.0)
    report("locked", kept is not None)
    report.listen()


def test_a_lock_ends_with_its_owner(tmpfs: Path) -> None:
    store = Directory(tmpfs)
    with Child(_lock, tmpfs) as child:
        assert child.next_report("locked") == ("locked", True)
        with pytest.raises(JobInUseError, match="lock"):
            store.lock("folder/lock", 0.0)
    lock = store.lock("folder/lock", 0.0)
    assert lock is not None
    with pytest.raises(JobInUseError):
        store.lock("folder/lock", 0.0)
    with lock:
        pass
    again = store.lock("folder/lock", 0.0)
    assert again is not None
    again.__exit__(None, None, None)
    again.__exit__(None, None, None)  # twice does no harm
