"""How many files a process may have open: each connection is one, and each slot."""

from __future__ import annotations

import contextlib
import resource


def allow_many_files() -> int:
    """Let this process have as many files open as it may: each slot is one. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
