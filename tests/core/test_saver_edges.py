"""What a saver does where saves get in each other's way, or end in ways that no door plans for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ml_flashpoint.adapter.pytorch.staged_state import StagedStateDict
from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.held_part import HeldPart
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.checkpoint_object_manager.version_files import list_versions
from ml_flashpoint.core import checkpoint_saver
from ml_flashpoint.core.checkpoint_saver import DefaultMLFlashpointCheckpointSaver
from ml_flashpoint.format.checkpoint_id_types import CheckpointContainerId
from ml_flashpoint.format.errors import DeadlineError, SaveError
from ml_flashpoint.format.manifest import Manifest
from ml_flashpoint.ranks import rank_group as rank_groups
from tests.checkpoint_object_manager import store_support

TENSORS = [("weight", torch.arange(1000.0))]


def version(base: Path, step: int) -> CheckpointContainerId:
    name = CheckpointContainerId.format_version_container(step)
    return CheckpointContainerId.create_child(CheckpointContainerId(base), name)


@pytest.fixture
def saver() -> Iterator[DefaultMLFlashpointCheckpointSaver]:
    saver = DefaultMLFlashpointCheckpointSaver()
    yield saver
    saver.close(0.1)
    saver._objects.close()


def store_of(saver: DefaultMLFlashpointCheckpointSaver) -> RankStore:
    store = saver._objects.store
    assert store is not None
    return store


@pytest.mark.timeout(60)
@pytest.mark.stores_any_bytes
@pytest.mark.parametrize("left", [2, 3, 5])
def test_what_an_earlier_run_left_keeps_no_run_from_saving(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, left: int
) -> None:
    """Nobody knows yet whether one of these is verified, so they stay, and nothing is under way that could free one."""
    store = RankStore(tmpfs, 0)
    for step in range(1, left + 1):
        store_support.commit(store, step, f"{1:013d}-12345678-{step:019d}")
    store_support.commit(store, left, f"{1:013d}-12345678-{left:019d}", rank=1)
    store.close()
    saver._objects.open(tmpfs, 0).asked = True
    saver.save(version(tmpfs, left + 1), TENSORS)
    assert saver.wait(30)
    assert saver.stats.last_verified == left + 1


def test_the_oldest_save_finds_an_arena_where_later_ones_hold_all(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    oldest, *later = [saver.begin() for _ in range(5)]  # the oldest is not staged
    for save in later[:3]:
        saver.stage(save, TENSORS)
    with monkeypatch.context() as only_here:
        only_here.setattr(checkpoint_saver, "seal_deadline_s", lambda: 0.3)  # for an arena, not for the saves to end
        with pytest.raises(SaveError, match="4 earlier saves are still under way"):
            saver.stage(later[3], TENSORS)
    saver.fail(later[3], SaveError("given up"))
    for step, save in enumerate([oldest, *later[:3]], 2):
        saver.write(save, version(tmpfs, step), TENSORS)
        saver.commit(save)
    assert saver.wait(10)
    assert saver.stats.last_verified == 5


def test_a_save_is_given_up_only_for_one_that_all_ranks_have(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were a rank killed now that has not committed the newest one, all would go back to the one before it."""
    verdict = threading.Event()
    monkeypatch.setattr(saver._commits, "_finish", lambda save: verdict.wait(60))
    monkeypatch.setattr(saver._commits, "is_queue_thread", lambda: True)  # so that a save does not wait for its verdict
    try:
        for step in range(1, 5):
            saver.save(version(tmpfs, step), TENSORS)
        saver._saves[2].complete, saver._saves[3].complete = True, False
        assert saver._evict_one(None, full=False)
        assert not saver._evict_one(None, full=False)
        assert sorted(list_versions(tmpfs)) == ["step-1_ckpt", "step-3_ckpt", "step-4_ckpt"], "1 is being verified"
        assert saver._evict_one(None, full=True)
        assert sorted(list_versions(tmpfs)) == ["step-1_ckpt", "step-3_ckpt"]
    finally:
        verdict.set()


def test_many_saves_at_once_take_no_more_arenas_than_a_few(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    tickets = [saver.begin() for _ in range(12)]
    tensors = [("weight", torch.ones(2 << 20))]
    together = threading.Barrier(len(tickets))
    errors: list[BaseException] = []

    def write(step: int) -> None:
        try:
            together.wait(30)
            saver.write(tickets[step], version(tmpfs, step + 2), tensors)
            saver.commit(tickets[step])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(step,)) for step in range(len(tickets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert saver.wait(30)
    assert saver.stats.last_verified == 13
    sizes = [path.stat().st_size for path in store_of(saver).directory.glob("arena-*")]
    assert sum(size >= tensors[0][1].nbytes for size in sizes) <= 5, "four, and one for the oldest save"


def test_the_arena_of_a_save_whose_thread_is_gone_is_taken_back_before_its_turn(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    first = saver.begin()  # nobody resolves it, so the queue comes to no later one

    def write_and_die() -> None:
        save = saver.begin()
        save.worker = threading.current_thread()
        saver.write(save, version(tmpfs, 2), TENSORS)

    for _ in range(5):  # more than there are arenas
        dying = threading.Thread(target=write_and_die)
        dying.start()
        dying.join(30)
        assert not dying.is_alive()
    save = saver.begin()
    saver.write(save, version(tmpfs, 3), TENSORS)
    saver.fail(first, SaveError("given up"))
    saver.commit(save)
    assert saver.wait(10)
    assert (saver.stats.last_verified, saver.stats.failed) == (3, 6)


def test_a_save_committed_after_its_deadline_gives_its_arena_back(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "0.2")
    save = saver.begin()
    saver.write(save, version(tmpfs, 1), TENSORS)
    assert save.finished.wait(10)
    monkeypatch.delenv("FLASHPOINT_SEAL_DEADLINE_S")
    size = sum(store_of(saver).arenas.resident_bytes())
    assert store_of(saver).arenas.resident_bytes() == (0, size)  # nobody writes to it, and nobody may begin to
    with pytest.raises(SaveError, match="given up") as caught:
        saver.commit(save)
    saver.fail(save, caught.value)
    assert store_of(saver).arenas.resident_bytes() == (0, size)
    saver.save(version(tmpfs, 2), TENSORS)
    saver.fail(save, caught.value)  # once more: the arena is another save's now
    assert store_of(saver).arenas.resident_bytes()[0] == size


def test_a_save_given_up_while_it_commits_leaves_nothing(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = saver.begin()
    saver.write(save, version(tmpfs, 1), TENSORS)
    commit = store_of(saver).commit

    def slow_commit(manifest: Manifest, arenas: list[Arena]) -> HeldPart:
        part = commit(manifest, arenas)
        save.fail(DeadlineError("not committed in time"))
        return part

    monkeypatch.setattr(store_of(saver), "commit", slow_commit)
    with pytest.raises(SaveError, match="too late") as caught:
        saver.commit(save)
    saver.fail(save, caught.value)
    assert list_versions(tmpfs) == []
    assert store_of(saver).arenas.resident_bytes()[0] == 0


def test_staged_copies_stay_the_object_with_many_byte_items(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path
) -> None:
    items = [(f"layers.{i}.self_attention.linear_qkv._extra_state/shard_{i}_2000", b"") for i in range(2000)]
    save = saver.begin()
    base = CheckpointContainerId(tmpfs)
    (copy,) = saver.stage(save, TENSORS, base=base, byte_keys=[key for key, _ in items]) or [None]
    assert copy is not None, "staged nothing, although the base container was named"
    saver.write(save, version(tmpfs, 1), [("weight", copy)], items)
    assert save.staged is not None
    assert save.filled is not None
    assert save.filled.arena is save.staged.arena
    saver.commit(save)
    assert not save.filled, "the next save would have to let go of it, on the loop's thread"


def test_a_child_forked_while_locks_are_held_ends(saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with saver._lock, rank_groups._lock:
            held.set()
            forked.wait(60)

    holding = threading.Thread(target=hold)
    holding.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # which ends it if it hangs
        saver.close()
        os._exit(0 if rank_groups.rank_group().world_size == 1 else 1)
    forked.set()
    holding.join(60)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def hold_in(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> tuple[threading.Event, threading.Event]:
    """Have the first call of a method wait in its middle: events for that it has come, and that it may go on."""
    real, came, go_on = getattr(owner, name), threading.Event(), threading.Event()

    def held(*args: object, **kwargs: object) -> object:
        if not came.is_set():
            came.set()
            assert go_on.wait(30)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, held)
    return came, go_on


@pytest.mark.timeout(60)
@pytest.mark.parametrize("point", ["_fill_staged", "finish"])
def test_a_save_given_up_while_it_is_written_keeps_its_arena_for_as_long(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    saver.save(version(tmpfs, 1), TENSORS)
    late = saver.begin()
    staged = saver.stage(late, TENSORS)
    assert staged is not None
    arenas = late.arenas
    came, go_on = hold_in(monkeypatch, saver._writer, point)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            saver.write(late, version(tmpfs, 2), [("weight", staged[0])], [("bytes", b"late" * 9)])
            saver.commit(late)
        except SaveError as error:
            errors.append(error)
            saver.fail(late, error)

    worker = threading.Thread(target=write)
    worker.start()
    assert came.wait(30)
    saver.fail(late, DeadlineError("not committed in time"))  # as a door does that waits no longer
    for step in range(3, 7):
        save = saver.begin()
        saver.write(save, version(tmpfs, step), TENSORS)
        assert not save.arenas & arenas, "another save may not have what is still written to"
        saver.commit(save)
    go_on.set()
    worker.join(30)
    assert "given up" in str(errors[0])
    assert saver.wait(30)
    assert saver.stats.last_verified == 6
    assert not late.arenas
    assert not any("step-2" in name for name in list_versions(tmpfs))


@pytest.mark.timeout(60)
def test_the_arena_of_a_save_that_is_not_gone_on_with_by_its_deadline_is_free(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator's, say, whose thread waits for the other ranks, and is told by none of them that it was in vain."""
    saver.save(version(tmpfs, 1), TENSORS)
    monkeypatch.setenv("FLASHPOINT_SEAL_DEADLINE_S", "0.2")
    for _ in range(5):  # more than there may be arenas

        def write_and_end() -> None:
            save = saver.begin()
            save.worker = threading.current_thread()
            saver.write(save, version(tmpfs, 2), TENSORS)
            assert save.finished.wait(30)

        ending = threading.Thread(target=write_and_end)
        ending.start()
        ending.join(30)
    monkeypatch.delenv("FLASHPOINT_SEAL_DEADLINE_S")
    in_use, _ = store_of(saver).arenas.resident_bytes()
    assert in_use == max(path.stat().st_size for path in store_of(saver).directory.glob("arena-*"))
    saver.save(version(tmpfs, 3), TENSORS)
    assert saver.wait(30)
    assert saver.stats.last_verified == 3


@pytest.mark.timeout(60)
def test_a_save_can_begin_while_another_one_looks_for_an_arena(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        saver.save(version(tmpfs, step), TENSORS)
    looks, began = threading.Event(), threading.Event()
    missing, new = saver._missing_for_copies, saver._numbering.begin

    def missing_for_copies(store: RankStore) -> int:
        looks.set()
        began.wait(5)
        return missing(store)

    def begin() -> object:
        began.set()  # with the saver's lock held
        return new()

    save, other = saver.begin(), saver.begin()
    saver.stage(other, TENSORS)
    monkeypatch.setattr(saver, "_missing_for_copies", missing_for_copies)
    monkeypatch.setattr(saver._numbering, "begin", begin)
    writing = threading.Thread(target=saver.write, args=(save, version(tmpfs, 3), TENSORS), daemon=True)
    writing.start()
    assert looks.wait(30)
    beginning = threading.Thread(target=saver.begin, daemon=True)
    beginning.start()
    beginning.join(10)
    writing.join(10)
    assert not beginning.is_alive()
    assert not writing.is_alive()


def test_who_looks_at_a_staged_state_that_is_being_saved_does_not_save_it(
    saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path
) -> None:
    save = saver.begin()
    state = StagedStateDict({"weight": TENSORS[0][1]}, save, lambda save: None)
    saver.offer(save)
    state.items()
    saver.claim(save)
    looking = threading.Thread(target=state.items)
    looking.start()
    looking.join(30)
    assert save.worker is threading.current_thread()
    saver.write(save, version(tmpfs, 1), TENSORS)
    saver.commit(save)
    assert saver.wait(30)
    assert saver.stats.last_verified == 1


@pytest.mark.timeout(60)
def test_who_fails_late_finds_another_store(saver: DefaultMLFlashpointCheckpointSaver, tmpfs: Path) -> None:
    """Between two looks of a worker, its store may be closed."""
    saver.save(version(tmpfs, 1), TENSORS)
    late = saver.begin()
    saver.stage(late, TENSORS)
    (arena,) = late.arenas
    saver._objects.close()
    reopened = saver._objects.open(tmpfs, 0)
    saver.fail(late, SaveError("the trainer ends"))
    assert late.decided.is_set()
    assert not late.arenas
    assert arena.path in {each.path for each in reopened.arenas.free}
