"""What the commit queue reads stays as it is meanwhile, whoever drops it: a recovery does, on another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.core.commit_queue import CommitQueue
from ml_flashpoint.core.save import Save, SaveState
from ml_flashpoint.core.save_identity import SaveIdentity
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import CapacityError
from tests.checkpoint_object_manager.store_support import ARENA, commit, content, write

pytestmark = pytest.mark.stores_any_bytes


@pytest.fixture
def store(tmpfs: Path) -> Iterator[RankStore]:
    store = RankStore(tmpfs / "job", 0)
    yield store
    store.close()


def queue_of(replicate: Callable[[HeldPart], None] = lambda part: None) -> CommitQueue:
    """The queue of a single rank, with a copy of each part made by a function."""
    alone: Any = SimpleNamespace(distributed=False, rank=0, node="n", is_node_leader=False, close=lambda: None)
    copies: Any = SimpleNamespace(
        initialized=True, copies_of=lambda rank: (1,), replicate=lambda part, cancelled: replicate(part)
    )
    return CommitQueue(alone, alone, alone, copies, seal_deadline_s=lambda: 10.0, watch=lambda save: None)


def committed(store: RankStore, step: int) -> Save:
    save = Save(SaveIdentity("a", step))
    save.version = CheckpointContainerId(str(store.base / f"step-{step}_ckpt"))
    assert save.commit(commit(store, step, save.save_id), store)
    return save


def recover_newer(store: RankStore, part: HeldPart) -> None:
    """What a recovery does that has found a newer version, and then the next save, which fills whatever is free."""
    store.drop_before_next_save([part])
    store.drop_useless()
    write(store.acquire(ARENA), 0, "newer")


def test_what_is_copied_is_not_another_saves_meanwhile(store: RankStore) -> None:
    copied: list[bytes] = []

    def copy(part: HeldPart) -> None:
        recover_newer(store, part)
        copied.append(bytes(part.arenas[0].buffer[: len(content(0, part.save_id))]))

    queue, save = queue_of(copy), committed(store, 1)
    queue.submit(save)
    assert save.finished.wait(10)
    assert copied == [content(0, save.save_id)]
    assert store.held() == []
    assert len(store.arenas.free) == 1, "it is free at the end"
    assert save.state is SaveState.EVICTED, "a version without it is not verified"
    queue.close(5)


def test_what_was_dropped_before_its_turn_is_not_read(store: RankStore) -> None:
    copied: list[HeldPart] = []
    queue, save = queue_of(copied.append), committed(store, 1)
    assert save.part is not None
    recover_newer(store, save.part)
    queue.submit(save)
    assert save.finished.wait(10)
    assert (save.state, copied) == (SaveState.EVICTED, [])
    assert len(store.arenas.free) == 0, "its arena is the newer save's"
    queue.close(5)


def test_what_is_lent_stays_until_there_is_no_room_and_is_freed_once(
    store: RankStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = commit(store, 1, "a-1")
    arena = part.arenas[0]
    with store.pinned(part, loan=True) as held:
        assert held
        store.drop(part)
        store.drop_useless()
        assert store.held() == [part], "there is room for others"
        with monkeypatch.context() as full:
            full.setattr(store.arenas, "_make", no_room)
            assert store.acquire(ARENA) is arena, "a save does not fail for it"
        assert store.held() == []
    assert arena not in store.arenas.free, "it is the save's now"
    store.release(arena)
    with store.pinned(commit(store, 2, "a-2"), loan=True):
        store.drop(store.held()[0])
    assert store.held() == []
    assert len(store.arenas.free) >= 1


def no_room(size: int) -> Any:
    raise CapacityError("no room")
