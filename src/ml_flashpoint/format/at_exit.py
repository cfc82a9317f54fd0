"""What a process does at its end, also if `multiprocessing` has forked it. Imports nothing that takes long.

Since Python 3.13, a child of `multiprocessing` does what was registered with `atexit`, but forgets what its parent had
registered before the fork: modules that were imported there do nothing at the child's end then. Owns that they do.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable

_functions: list[Callable[[], object]] = []


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


os.register_at_fork(after_in_child=_when_forked)
