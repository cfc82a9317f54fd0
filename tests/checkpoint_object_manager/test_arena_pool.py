"""Which arena a size gets: reuse, growth, what is given back, and a filesystem without room."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool, with_headroom
from ml_flashpoint.checkpoint_object_manager.budget import Budget
from ml_flashpoint.format.errors import CapacityError, SaveError
from tests.support.injector import Fault, Injector

MIB = 1 << 20


@pytest.fixture
def pool(tmpfs: Path) -> Iterator[ArenaPool]:
    made = ArenaPool(tmpfs, threading.RLock())
    yield made
    made.close()


def files(pool: ArenaPool) -> set[str]:
    return {path.name for path in pool.directory.iterdir()}


def test_a_free_arena_of_about_the_size_is_reused_as_it_is(pool: ArenaPool) -> None:
    arena = pool.acquire(8 * MIB)
    inode, size, address = arena.inode, arena.size, arena.address
    assert not pool.has_free(8 * MIB)
    pool.release(arena)
    for wanted in (8 * MIB, 7 * MIB, size, 2 * MIB):
        assert pool.has_free(wanted)
        again = pool.acquire(wanted)
        assert (again.inode, again.size, again.address) == (inode, size, address)
        pool.release(again)
    assert files(pool) == {"arena-0"}


def test_an_arena_much_larger_than_wanted_is_left_for_others(pool: ArenaPool) -> None:
    large = pool.acquire(8 * MIB)
    pool.release(large)
    small = pool.acquire(MIB)
    assert small is not large
    assert small.size == with_headroom(MIB)


def test_an_arena_grows_in_its_place(pool: ArenaPool) -> None:
    arena = pool.acquire(MIB)
    pool.release(arena)
    grown = pool.acquire(3 * MIB)
    assert grown is arena
    assert grown.size == with_headroom(3 * MIB) == (pool.directory / "arena-0").stat().st_size


def test_an_exact_size(pool: ArenaPool) -> None:
    arena = pool.acquire(3 * MIB + 4096, exact=True)
    assert arena.size == 3 * MIB + 4096
    pool.release(arena)
    assert pool.acquire(3 * MIB, exact=True) is not arena
    assert pool.acquire(3 * MIB + 4096, exact=True) is arena


def test_spare_arenas_go_after_a_while_and_the_largest_stay(pool: ArenaPool) -> None:
    arenas = [pool.acquire(size * MIB) for size in (1, 5, 2)]
    for arena in arenas:
        pool.release(arena)
    for _ in range(100):
        pool.trim(expected=3)
    assert len(files(pool)) == 3, "three are expected, so none is spare"
    calls = 0
    while len(files(pool)) == 3:
        pool.trim(expected=1)
        calls += 1
        assert calls < 100
    assert calls > 5, "not at the first occasion"
    assert files(pool) == {"arena-1"}
    assert pool.acquire(5 * MIB) is arenas[1]


def test_free_arenas_make_room_for_one_that_none_of_them_can_be(small_tmpfs: Path) -> None:
    pool = ArenaPool(small_tmpfs, threading.RLock())
    kept = pool.acquire(MIB // 2, exact=True)
    unfit = [pool.acquire(3 * MIB // 2, exact=True) for _ in range(2)]
    for arena in unfit:
        pool.release(arena)
    large = pool.acquire(3 * MIB, exact=True)
    assert large.size == 3 * MIB
    assert pool.resident_bytes() == (kept.size + large.size, 0)
    with pytest.raises(CapacityError):
        pool.acquire(MIB)
    assert pool.resident_bytes() == (kept.size + large.size, 0)
    pool.close()


@pytest.mark.parametrize("free", [1, 3])
def test_arenas_beyond_what_is_due_do_not_grow_at_the_cost_of_neighbours(small_tmpfs: Path, free: int) -> None:
    """There was room for four of them while states were small."""
    large = 5 * MIB // 4
    here, there = small_tmpfs / "here", small_tmpfs / "there"
    here.mkdir()
    there.mkdir()
    neighbour = ArenaPool(there, threading.RLock())
    neighbour.acquire(MIB // 4, exact=True)
    pool = ArenaPool(here, threading.RLock())
    pool.budget = Budget(here, [there])
    arenas = []
    for _ in range(4):
        assert pool.ensure_free(1, MIB // 4)
        arenas.append(pool.acquire(MIB // 4))
    for arena in arenas[:free]:
        pool.release(arena)
    assert pool.ensure_free(1, large) is (free == 3)
    assert pool.has_or_may_make(large) is (free == 3)
    assert pool.count == max(2, 4 - free)
    if free == 3:
        pool.acquire(large)
    neighbour.acquire(large, exact=True)  # it has one, and is due two
    pool.close()
    neighbour.close()


def test_what_an_earlier_process_left(pool: ArenaPool, tmpfs: Path) -> None:
    path = pool.acquire(MIB).path
    (tmpfs / "arena-7").mkdir()
    (tmpfs / "note").write_text("not an arena")
    later = ArenaPool(tmpfs, threading.RLock())
    (tmpfs / "arena-7").rmdir()
    found = later.open_left()
    assert [arena.path for arena in found] == [path]
    later.release(found[0])
    assert later.acquire(MIB) is found[0]
    assert later.at(path, rank=0) is found[0]
    with pytest.raises(SaveError, match="no arena of this rank"):
        later.at(tmpfs / "elsewhere" / "arena-0", rank=0)
    later.close()


def test_another_process_made_an_arena(pool: ArenaPool, tmpfs: Path) -> None:
    mine = pool.acquire(MIB)
    other = ArenaPool(tmpfs, threading.RLock())
    theirs = other.acquire(2 * MIB)
    assert theirs.path != mine.path, "a name that is taken is passed over"
    here = pool.at(theirs.path, rank=0)
    theirs.grow(3 * MIB)
    assert pool.at(theirs.path, rank=0) is here
    assert here.size == 3 * MIB
    other.close()


def test_an_arena_is_given_out_only_if_it_is_reusable(tmpfs: Path) -> None:
    asked: list[str] = []
    busy: set[str] = set()

    def reusable(arena: Arena) -> bool:
        name = arena.path.name
        asked.append(name)
        return name not in busy

    pool = ArenaPool(tmpfs, threading.RLock(), reusable=reusable)
    first, second = pool.acquire(MIB), pool.acquire(2 * MIB)
    assert asked == []  # nobody knows a new one
    pool.release(first)
    pool.release(second)
    busy.add("arena-0")
    assert pool.acquire(MIB) is second  # and not first, which fits better
    assert asked == ["arena-0", "arena-1"]
    grown = pool.acquire(3 * MIB)  # neither in place of the one that is busy
    assert grown is not first
    pool.release(grown)
    pool.release(second)
    busy.add("arena-1")
    exact = pool.acquire(second.size, exact=True)
    assert exact not in (first, second)
    busy.clear()
    assert pool.acquire(MIB) is first
    assert pool.resident_bytes() == (first.size + exact.size, second.size + grown.size)
    pool.close()


def test_free_arenas_are_given_back_down_to_a_size_the_oldest_first(pool: ArenaPool) -> None:
    arenas = [pool.acquire(MIB) for _ in range(4)]
    size = arenas[0].size
    for arena in arenas[:3]:
        pool.release(arena)
    assert pool.delete_free(10 * MIB) == 0
    assert pool.delete_free(2 * size) == size
    assert files(pool) == {"arena-1", "arena-2", "arena-3"}
    assert pool.delete_free(2 * size - 1) == size
    assert pool.delete_free(0) == size
    assert pool.delete_free(0) == 0
    assert files(pool) == {"arena-3"}


def test_pages_that_no_thread_can_fault_in_are_left_to_the_first_copy(tmpfs: Path) -> None:
    arena = Arena.create(tmpfs / "arena", 1 << 16)
    with Injector(0, [Fault(rank=0, step=0, point="thread", action="no-thread")]) as injector:
        arena.prefault_in_background()
    assert injector.fired
    arena.join_prefault()
    arena.close()


@pytest.mark.parametrize("point", ["open", "allocate"])
def test_errors_of_the_system_are_ours_and_lose_no_arena(pool: ArenaPool, point: str) -> None:
    fault = Fault(rank=0, step=0, point=point, action="emfile" if point == "open" else "eio")
    with Injector(0, [fault], base=str(pool.directory)), pytest.raises(SaveError):
        pool.acquire(MIB)
    assert not files(pool)
    arena = pool.acquire(MIB)
    pool.release(arena)
    if point == "allocate":
        with Injector(0, [fault]), pytest.raises(SaveError):
            pool.acquire(3 * MIB)
    assert pool.free == (arena,)
    assert pool.acquire(3 * MIB) is arena


def test_an_arena_that_cannot_be_mapped_larger_is_as_before(pool: ArenaPool, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = pool.acquire(MIB)
    pool.release(arena)
    size, mapped = arena.size, arena._map

    def failing(wanted: int) -> None:
        raise OSError(12, "out of memory")

    monkeypatch.setattr(arena, "_map", failing)
    with pytest.raises(SaveError):
        pool.acquire(3 * MIB)
    monkeypatch.setattr(arena, "_map", mapped)
    assert arena.size == size == arena.path.stat().st_size
    assert pool.acquire(size, exact=True) is arena


def test_an_arena_that_was_needed_once_makes_way(pool: ArenaPool) -> None:
    """One for a copy does not: how large that is, is up to whoever sends it."""
    copies = pool.acquire(5 * MIB, exact=True)
    held = [pool.acquire(4 * MIB), pool.acquire(4 * MIB)]
    pool.release(held.pop())

    def save(size: int) -> int:
        held.append(pool.acquire(size))
        pool.release(held.pop(0))
        pool.release(copies)
        pool.trim(3)
        assert pool.acquire(5 * MIB, exact=True) is copies
        assert len(files(pool)) <= 3
        return max(arena.size for arena in held)

    sizes = [save(2 * MIB - turn * 4096) for turn in range(30)]
    assert sizes[10] == with_headroom(4 * MIB)
    assert sizes[-1] <= with_headroom(2 * MIB)
    kept = files(pool)
    assert {save(2 * MIB - turn % 3) for turn in range(30)} == {sizes[-1]}
    assert files(pool) == kept
