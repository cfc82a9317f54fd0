"""A filesystem that is filled to the last page between the stage of a save and its commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.arena import PAGE
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.reserve import RESERVE, give_up_reserve, keep_reserve
from ml_flashpoint.format.digest import BLOCK_SIZE
from ml_flashpoint.format.errors import CapacityError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, manifest_name, object_name, read_manifest
from tests.checkpoint_object_manager.store_support import ARENA, content, files, manifest_of, write

pytestmark = pytest.mark.stores_any_bytes


def fill(folder: Path) -> None:
    """Take every page that is free."""
    with open(folder / "filler", "ab", buffering=0) as file:
        while free_pages(folder):
            file.write(bytes(PAGE))


def free_pages(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize // PAGE


def kept(directory: Path) -> int:
    return (directory / RESERVE).stat().st_blocks * 512


def test_a_save_is_committed_on_a_full_filesystem_again_and_again(small_tmpfs: Path) -> None:
    base = small_tmpfs / "job"
    store = RankStore(base, 0)
    for arena in [store.acquire(ARENA, exact=True) for _ in range(2)]:
        store.release(arena)
    for step in range(1, 12):
        arena = write(store.acquire(ARENA, exact=True), 0, f"a{step:02d}")
        fill(small_tmpfs)
        store.commit(manifest_of(step, 0, f"a{step:02d}"), [arena])
        assert read_manifest(base / f"step-{step}_ckpt" / manifest_name(0, f"a{step:02d}")).step == step
        store.advance(f"a{step:02d}")
        fill(small_tmpfs)
    assert free_pages(small_tmpfs) == 0
    store.close()


def test_the_very_first_save(small_tmpfs: Path) -> None:
    store = RankStore(small_tmpfs / "job", 0)
    arena = write(store.acquire(ARENA, exact=True), 0, "a1")
    fill(small_tmpfs)
    store.commit(manifest_of(1, 0, "a1"), [arena])
    store.close()


def test_without_a_page_left_that_save_fails_and_later_ones_do_not(small_tmpfs: Path) -> None:
    base = small_tmpfs / "job"
    store = RankStore(base, 0)
    arena = write(store.acquire(ARENA, exact=True), 0, "a1")
    assert give_up_reserve(store.directory)
    assert not give_up_reserve(store.directory)
    fill(small_tmpfs)
    with pytest.raises(CapacityError, match="no room for the manifest"):
        store.commit(manifest_of(1, 0, "a1"), [arena])
    assert files(base) == set()
    os.truncate(small_tmpfs / "filler", 0)
    store.commit(manifest_of(2, 0, "a1"), [arena])
    assert kept(store.directory) >= 4 * PAGE, "there is room again"
    store.close()


def test_it_grows_with_the_manifest(small_tmpfs: Path) -> None:
    base = small_tmpfs / "job"
    blocks = 2000
    digest = "0123456789abcdef"

    def large(step: int, save_id: str) -> Manifest:
        record = ObjectRecord(
            object_name(0, save_id), blocks * BLOCK_SIZE, blocks * BLOCK_SIZE, (digest,) * blocks, BLOCK_SIZE
        )
        return Manifest(f"step-{step}_ckpt", 0, 1, save_id, "node", (record,))

    store = RankStore(base, 0)
    first, second = (store.acquire(ARENA, exact=True) for _ in range(2))
    path = base / "step-1_ckpt" / manifest_name(0, "a1")
    part = store.commit(large(1, "a1"), [first])
    assert kept(store.directory) > path.stat().st_size > 4 * PAGE
    fill(small_tmpfs)
    other = store.commit(large(2, "a2"), [second])
    for each in (part, other):  # the bytes are not there
        store.drop(each)
    store.close()


def test_what_there_is_room_for_is_kept(small_tmpfs: Path) -> None:
    fill(small_tmpfs)
    os.truncate(small_tmpfs / "filler", (small_tmpfs / "filler").stat().st_size - 2 * PAGE)
    keep_reserve(small_tmpfs)
    assert kept(small_tmpfs) == 2 * PAGE
    os.truncate(small_tmpfs / "filler", 0)
    keep_reserve(small_tmpfs)
    assert kept(small_tmpfs) == 4 * PAGE


def test_it_outlives_its_process_and_goes_with_the_rank(tmpfs: Path) -> None:
    store = RankStore(tmpfs, 0)
    inode = (store.directory / RESERVE).stat().st_ino
    store.close()
    again = RankStore(tmpfs, 0)
    assert (again.directory / RESERVE).stat().st_ino == inode
    again.delete_and_close()
    assert not again.directory.exists()


def test_a_store_does_not_need_it(tmpfs: Path) -> None:
    store = RankStore(tmpfs, 0)
    (store.directory / RESERVE).unlink()
    (store.directory / RESERVE).mkdir()
    keep_reserve(store.directory)
    assert not give_up_reserve(store.directory)
    arena = write(store.acquire(ARENA, exact=True), 0, "a1")
    store.commit(manifest_of(1, 0, "a1"), [arena])
    (store.directory / RESERVE).rmdir()
    store.close()


def test_a_full_filesystem_can_be_opened_and_loaded_from(small_tmpfs: Path) -> None:
    """Also by a rank that was never there: nothing is written for that."""
    base = small_tmpfs / "job"
    store = RankStore(base, 0)
    store.commit(manifest_of(1, 0, "a-1"), [write(store.acquire(ARENA, exact=True), 0, "a-1")])
    store.close()
    fill(small_tmpfs)
    for rank in (5, 0):
        store = RankStore(base, rank)
        fill(small_tmpfs)
        with store.open_object("step-1_ckpt", object_name(0, "a-1")) as view:
            assert len(view) >= len(content(0, "a-1"))
        store.close()
