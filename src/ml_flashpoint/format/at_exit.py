"""What a process does at its end, also if it was forked, and what a forked one closes at its beginning. Imports nothing
that takes long.

Since Python 3.13, a child of `multiprocessing` does what was registered with `atexit`, but forgets what its parent had
registered before the fork: modules that were imported there do nothing at the child's end then. Owns that they do.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from typing import Protocol

_functions: list[Callable[[], object]] = []


class _Closable(Protocol):
    def close(self) -> None: ...


_opened: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_in_children(opened: _Closable) -> None:
    """Have a socket, a pipe or a locked file closed in children that this process forks.

    A child (a data loader's worker, say) would otherwise keep the port in use, the connection open and the lock taken
    after this process has died, and nobody would notice that until a deadline.
    """
    _opened.add(opened)


def _close_inherited() -> None:
    for opened in list(_opened):
        with contextlib.suppress(OSError):  # the others must not stay open for it
            opened.close()
    _opened.clear()


def at_exit(function: Callable[[], object]) -> Callable[[], object]:
    """Have a function called at the end of this process and of those that it forks, the last one first, as `atexit` has
    it. In a forked process, it is the function's business to leave alone what is the parent's."""
    _functions.append(function)
    atexit.register(function)
    return function


def _register_again(_: object) -> None:
    for function in _functions:
        atexit.unregister(function)
        atexit.register(function)


def _when_forked() -> None:
    # What is registered by now is forgotten in a moment, before what this registers is called.
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.register_after_fork(_register_again, _register_again)


os.register_at_fork(after_in_child=_close_inherited)
os.register_at_fork(after_in_child=_when_forked)
