"""An incoming copy finds as many arenas as there may be, all in use: what will never be verified makes way."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.arena import PAGE
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.checkpoint_object_manager.capacity import most_bytes
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.format.errors import CapacityError, ManifestError
from ml_flashpoint.format.manifest import Manifest, ObjectRecord, object_name
from ml_flashpoint.replication.store_backend import StoreBackend
from tests.checkpoint_object_manager.store_support import ARENA, commit

pytestmark = pytest.mark.stores_any_bytes


def test_a_rejected_copy_makes_way_for_the_next_of_its_rank(tmpfs: Path) -> None:
    with contextlib.closing(RankStore(tmpfs, 0)) as store:
        budget = Budget(store.directory, copies=1)
        store.arenas.budget = budget
        for step in range(1, 5):
            commit(store, step, f"a-{step}")
        for step in range(1, 3):
            commit(store, step, f"a-{step}", rank=1)
        assert store.arenas.count == budget.most
        store.reject("a-2")
        assert store.find("a-2", 1) is not None  # the newest there is of that rank
        store.release(store.acquire_for_copy(ARENA, 1))
        assert store.arenas.count == budget.most
        assert store.find("a-2", 1) is None
        assert store.find("a-1", 1) is not None


def test_an_own_version_makes_way_where_no_copy_does(tmpfs: Path) -> None:
    with contextlib.closing(RankStore(tmpfs, 0)) as store:
        budget = Budget(store.directory, copies=1)
        store.arenas.budget = budget
        own = [commit(store, step, f"a-{step}") for step in range(1, 5)]
        for step in range(1, 3):
            commit(store, step, f"a-{step}", rank=1)

        def evict() -> bool:
            if own:
                store.drop(own.pop(0))
            return bool(own)

        store.evict = evict
        store.release(store.acquire_for_copy(ARENA, 1))
        assert (store.arenas.count, len(own)) == (budget.most, 3)


@pytest.mark.parametrize("size", [1 << 62, None], ids=["beyond", "just"])
def test_nothing_makes_way_for_what_can_never_have_room(small_tmpfs: Path, size: int | None) -> None:
    """Whatever a peer announces."""
    with contextlib.closing(RankStore(small_tmpfs / "job", 0)) as store:
        own = commit(store, 1, "a-1")
        store.release(store.acquire(ARENA))
        store.evict = lambda: store.drop(own) is None
        large = ObjectRecord(object_name(1, "a-1"), 0, size or most_bytes(store.base) + PAGE, ())
        part = Manifest("step-1_ckpt", 1, 2, "a-1", "node", (large,))
        with pytest.raises(CapacityError, match="there can be no more than"):
            StoreBackend(lambda: store).receive(part, {}).__enter__()
        assert store.held() == [own]
        assert len(store.arenas.free) == 1


def test_a_part_of_more_objects_than_any_door_makes_is_refused(tmpfs: Path) -> None:
    """Each takes an open file."""
    with contextlib.closing(RankStore(tmpfs, 0)) as store:
        many = tuple(ObjectRecord(object_name(1, "a-1", f"kind{n}"), 0, 1, ()) for n in range(1000))
        with pytest.raises(ManifestError, match="1000 objects"):
            StoreBackend(lambda: store).receive(Manifest("step-1_ckpt", 1, 2, "a-1", "node", many), {}).__enter__()
        assert store.arenas.count == 0
