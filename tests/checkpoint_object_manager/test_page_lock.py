"""Arenas are locked for devices ahead of the copy, and never end locked."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager import arena as arena_module
from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool
from tests.support.played_cuda import PlayedRuntime, play

SIZE = 1 << 20


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> PlayedRuntime:
    played = PlayedRuntime()
    play(monkeypatch, played)
    return played


def test_a_prefaulted_arena_is_locked_too_until_it_is_closed(runtime: PlayedRuntime, tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", SIZE)
    arena.prefault_in_background()
    arena.lock_in_background()
    arena.join_prefault()
    arena.lock_in_background()
    arena.join_prefault()
    assert arena.is_page_locked
    assert sum(runtime.locked.values()) == SIZE
    view = arena.view(0, 8, arena.tensor.dtype, (8,))
    arena.close()
    assert not runtime.locked
    del view


def test_a_grown_arena_is_locked_anew(runtime: PlayedRuntime, tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", SIZE)
    arena.lock_in_background()
    arena.grow(2 * SIZE)
    assert not arena.is_page_locked
    assert not runtime.locked
    arena.lock_in_background()
    arena.join_prefault()
    assert sum(runtime.locked.values()) == 2 * SIZE
    arena.free_pages()
    assert not runtime.locked, "its pages stay as long as they are locked"
    arena.close()


def test_a_mapping_that_nobody_closes_is_unlocked_with_its_last_view(runtime: PlayedRuntime, tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", SIZE)
    arena.lock_in_background()
    arena.join_prefault()
    view = arena.view(0, 8, arena.tensor.dtype, (8,))
    assert runtime.locked
    del arena
    gc.collect()
    assert runtime.locked, "the view may be copied to"
    del view
    gc.collect()
    assert not runtime.locked


def test_whoever_wants_an_arena_does_not_wait_until_all_of_it_is_locked(
    runtime: PlayedRuntime, tmpfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ml_flashpoint.copy.pinned.SLICE", SIZE)
    arena = Arena.create(tmpfs / "arena", 8 * SIZE)
    begun, go_on = threading.Event(), threading.Event()
    register = runtime.register

    def held_up(address: int, size: int) -> int:
        begun.set()
        go_on.wait()
        return register(address, size)

    monkeypatch.setattr(runtime, "register", held_up)
    arena.lock_in_background()
    begun.wait()
    arena._is_wanted = True
    go_on.set()
    arena.join_prefault()
    assert len(runtime.locked) == 1
    arena.close()


@pytest.mark.parametrize(("device", "slices"), [(None, 8), (0, 1)])
def test_copies_from_a_device_do_not_wait_for_pages_either(
    tmpfs: Path, monkeypatch: pytest.MonkeyPatch, device: int | None, slices: int
) -> None:
    play(monkeypatch, PlayedRuntime(), device=device)
    monkeypatch.setattr(arena_module, "_POPULATE_SLICE", SIZE)
    arena = Arena.create(tmpfs / "arena", 8 * SIZE)
    asked: list[int] = []

    class Libc:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            asked.append(address)
            arena._is_wanted = True
            return 0

    monkeypatch.setattr(arena_module, "_libc", Libc)
    arena.prefault_in_background()
    assert arena._prefault is not None
    arena._prefault.join()
    assert len(asked) == slices
    monkeypatch.undo()
    arena.close()


def test_saves_prefer_locked_arenas_and_copies_the_others(runtime: PlayedRuntime, tmpfs: Path) -> None:
    pool = ArenaPool(tmpfs, threading.RLock())
    arenas = [pool.acquire(SIZE, exact=True) for _ in range(3)]
    arenas[1].lock_in_background()
    arenas[1].join_prefault()
    for arena in arenas:
        pool.release(arena)
    assert pool.acquire(SIZE) is arenas[1]
    pool.release(arenas[1])
    assert pool.acquire(SIZE, exact=True) is not arenas[1]
    pool.close()
    assert not runtime.locked


def test_a_job_without_cuda_locks_nothing(tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", SIZE)
    arena.prefault_in_background()
    arena.lock_in_background()
    assert not arena.is_page_locked
    arena.close()
