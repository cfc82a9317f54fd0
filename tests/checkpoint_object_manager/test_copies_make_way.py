"""An incoming copy finds as many arenas as there may be, all in use: what will never be verified makes way."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
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
