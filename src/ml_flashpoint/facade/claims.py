"""One façade of a process for each base container and rank. Owns who has it."""

from __future__ import annotations

import os
import threading
import weakref

from ml_flashpoint.format.errors import JobInUseError

# The façades of this process, by base container and rank: files have one owner.
_live: weakref.WeakValueDictionary[tuple[str, int], object] = weakref.WeakValueDictionary()
_live_lock = threading.Lock()


def claim(new: object, base: str, rank: int) -> tuple[str, int]:
    """Take a base container for a rank; returns what to give to :func:`release`.

    Raises:
        JobInUseError: another one of this process has it.
    """
    with _live_lock:
        if (base, rank) in _live:
            raise JobInUseError(
                "another Flashpoint of this process uses this base container",
                rank=rank,
                path=base,
                hint="close it first, or give each job a base container of its own",
            )
        _live[base, rank] = new
    return base, rank


def release(old: object, key: tuple[str, int]) -> None:
    """Let go of what :func:`claim` returned."""
    with _live_lock:
        if _live.get(key) is old:
            del _live[key]


def _begin_anew() -> None:
    """In a forked child: all of them are its parent's."""
    global _live_lock
    _live_lock = threading.Lock()
    _live.clear()


os.register_at_fork(after_in_child=_begin_anew)
