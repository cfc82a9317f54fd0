"""Arenas that forked children, such as workers of a data loader, inherit without knowing."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ml_flashpoint.checkpoint_object_manager.arena import Arena
from ml_flashpoint.checkpoint_object_manager.arena_pool import ArenaPool
from ml_flashpoint.checkpoint_object_manager.rank_store import RankStore
from ml_flashpoint.tools.items import open_version
from tests.checkpoint_object_manager.store_support import commit

pytestmark = pytest.mark.stores_any_bytes
MIB = 1 << 20


def free_bytes(folder: Path) -> int:
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


def look(pipe: Connection, arena: Arena) -> None:
    while pipe.recv():
        pipe.send(bytes(arena.buffer[:4]))


@contextlib.contextmanager
def child_with(arena: Arena) -> Iterator[Connection]:
    """A forked child that maps the arena, and says what it sees in it when asked."""
    context = multiprocessing.get_context("fork")
    pipe, remote = context.Pipe()
    child = context.Process(target=look, args=(remote, arena))
    child.start()
    try:
        yield pipe
    finally:
        pipe.send(False)
        child.join(60)
    assert child.exitcode == 0


def seen(pipe: Connection) -> bytes:
    pipe.send(True)
    answer: bytes = pipe.recv()
    return answer


def test_a_discarded_arena_is_free_although_children_map_it(small_tmpfs: Path) -> None:
    pool = ArenaPool(small_tmpfs, threading.RLock())
    before = free_bytes(small_tmpfs)
    arena = pool.acquire(2 * MIB, exact=True)
    arena.buffer[:4] = b"mine"
    with child_with(arena) as child:
        assert seen(child) == b"mine"
        pool.release(arena)
        pool.discard([arena])
        assert free_bytes(small_tmpfs) == before
        larger = pool.acquire(3 * MIB, exact=True)
        assert larger.size == 3 * MIB
    pool.close()


def test_an_arena_that_holds_a_version_keeps_its_bytes(small_tmpfs: Path) -> None:
    pool = ArenaPool(small_tmpfs, threading.RLock())
    arena = pool.acquire(MIB)
    arena.buffer[:4] = b"mine"
    os.link(arena.path, small_tmpfs / "part")
    with child_with(arena) as child:
        pool.release(arena)
        pool.discard([arena])
        assert seen(child) == b"mine"
    assert (small_tmpfs / "part").read_bytes()[:4] == b"mine"


def test_arenas_that_others_may_read_keep_their_bytes(small_tmpfs: Path) -> None:
    pool = ArenaPool(small_tmpfs, threading.RLock(), reusable=lambda arena: True)
    arena = pool.acquire(MIB)
    arena.buffer[:4] = b"mine"
    with child_with(arena) as child:
        pool.release(arena)
        pool.discard([arena])
        assert seen(child) == b"mine"


def test_who_has_opened_the_file_still_reads_it(small_tmpfs: Path) -> None:
    """A reader would die of SIGBUS where the pages have gone and there is no room for others."""
    store = RankStore(small_tmpfs / "job", 0)
    part = commit(store, 1, "a1")
    (arena,) = part.arenas
    begin = bytes(arena.buffer[:4])
    with open(small_tmpfs / "job" / part.version / part.names[0], "rb") as reader:
        store.drop(part)
        store.arenas.delete_free(0)
        assert not arena.path.exists()
        assert reader.read(4) == begin
    store.close()


def test_a_version_that_is_held_keeps_its_arena(tmpfs: Path) -> None:
    store = RankStore(tmpfs, 0)
    part = commit(store, 1, "a1")
    begin = bytes(part.arenas[0].buffer[:4])
    with open_version(tmpfs, partial=True):
        store.drop(part)
        store.arenas.delete_free(0)
        assert bytes(part.arenas[0].buffer[:4]) == begin
    store.close()


def test_programs_that_are_started_inherit_no_descriptor(tmpfs: Path) -> None:
    pool = ArenaPool(tmpfs, threading.RLock())
    made = pool.acquire(MIB)
    made.grow(2 * MIB)
    later = ArenaPool(tmpfs, threading.RLock())
    (opened,) = later.open_left()
    later.release(opened)
    script = "import glob, os; print([os.path.realpath(path) for path in glob.glob('/proc/self/fd/*')])"
    done = subprocess.run([sys.executable, "-c", script], close_fds=False, capture_output=True, text=True, check=True)
    assert "arena-" not in done.stdout
    assert "arena-0" in str([os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")])
    later.close()
    pool.close()
