"""Objects of a store are found by their names, for as long as they are there and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.checkpoint_object_manager import CheckpointObjectManager
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import JobInUseError, ObjectNotFoundError
from ml_flashpoint.format.manifest import object_name
from tests.checkpoint_object_manager.store_support import ARENA, commit, content
from tests.support.forked import call
from tests.workers import fault_engine as engine

pytestmark = pytest.mark.stores_any_bytes


@pytest.fixture
def store(tmpfs: Path) -> Iterator[RankStore]:
    store = RankStore(tmpfs / "job", 0)
    yield store
    store.close()


def read(store: RankStore, step: int, save_id: str, rank: int = 0) -> bytes:
    with store.open_object(f"step-{step}_ckpt", object_name(rank, save_id)) as view:
        return bytes(view)


def test_every_object_is_found(store: RankStore) -> None:
    for step in range(3):
        for rank in (0, 1):
            commit(store, step, f"a-{step}", rank=rank)
    for step in range(3):
        for rank in (0, 1):
            assert read(store, step, f"a-{step}", rank) == content(rank, f"a-{step}")
    with pytest.raises(ObjectNotFoundError):
        read(store, 1, "a-2")


def test_what_was_dropped_is_not_found(store: RankStore) -> None:
    store.drop(commit(store, 1, "a-1"))
    commit(store, 2, "a-2")
    with pytest.raises(ObjectNotFoundError):
        read(store, 1, "a-1")
    assert read(store, 2, "a-2") == content(0, "a-2")


def test_a_part_that_was_replaced_is_found_in_its_new_place(store: RankStore) -> None:
    commit(store, 1, "a-1")
    commit(store, 1, "a-1")
    assert read(store, 1, "a-1") == content(0, "a-1")
    commit(store, 2, "a-1")
    with pytest.raises(ObjectNotFoundError):
        read(store, 1, "a-1")
    assert read(store, 2, "a-1") == content(0, "a-1")


def test_a_part_that_is_replaced_while_it_is_read_is_found_anew(store: RankStore) -> None:
    first = commit(store, 1, "a-1")
    with store.open_object(first.version, first.names[0]) as view:
        second = commit(store, 1, "a-1")
        assert second.arenas[0] is not first.arenas[0]
        assert bytes(view) == content(0, "a-1")
    assert read(store, 1, "a-1") == content(0, "a-1")


def test_a_part_that_another_process_left_is_found(store: RankStore, tmpfs: Path) -> None:
    commit(store, 1, "a-1")
    store.close()
    again = RankStore(tmpfs / "job", 0)
    assert read(again, 1, "a-1") == content(0, "a-1")
    again.close()


def test_free_arenas_beyond_what_is_expected_are_given_back(store: RankStore) -> None:
    parts = [commit(store, 1, f"a-{number}") for number in range(5)]
    for part in parts:
        store.drop(part)
    for _ in range(40):
        store.arenas.trim(2)
    assert store.arenas.resident_bytes() == (0, 2 * ARENA)


def test_one_directory_has_one_store_in_a_process_whatever_its_path(tmpfs: Path) -> None:
    (tmpfs / "real").mkdir()
    (tmpfs / "link").symlink_to("real")
    mine = RankStore(tmpfs / "real", 0)
    with pytest.raises(JobInUseError, match="this process"):
        RankStore(tmpfs / "link", 0, lock_deadline_s=0)
    assert call(engine.open_base, str(tmpfs / "real"), env={"FLASHPOINT_LOCK_DEADLINE_S": "0.2"}).startswith(
        "JobInUseError"
    ), "the refused one must not have let go of the lock"
    mine.close()
    RankStore(tmpfs / "link", 0).close()


def test_a_path_and_its_symlink_are_one_base_container(tmpfs: Path) -> None:
    (tmpfs / "real").mkdir()
    (tmpfs / "link").symlink_to("real")
    one, other = CheckpointObjectManager(), CheckpointObjectManager()
    assert one.open(tmpfs / "real", 0) is other.open(tmpfs / "link", 0)
    assert one.open(f"{tmpfs}/link", 0) is one.store
    one.close()
