"""Arenas of large values: which may be used again, and how many files may be open for them."""

from __future__ import annotations

import resource
from pathlib import Path

from ml_flashpoint.ddict.manager.arenas import allow_many_files, is_unused
from tests.ddict.value_support import open_store


def test_an_arena_whose_file_is_gone_is_not_reused(tmpfs: Path) -> None:
    store = open_store(tmpfs)
    arena = store.acquire(1000)
    arena.unlink()
    assert not is_unused(arena)
    store.close()


def test_as_many_files_as_allowed() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, before[1]), before[1]))
        assert allow_many_files() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
