"""Pushing to several holders at once.

Owns the threads for that, and that none of them fails in silence. What is pushed, and over which connections, is its
callers' to decide: ranks of a job and managers of a dictionary.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ml_flashpoint.format.errors import FlashpointError, ReplicationError

_log = logging.getLogger(__name__)


def push_to_all(targets: Sequence[int], push: Callable[[int], None]) -> None:
    """Call ``push(target)`` for each, all at once; returns when all have ended.

    Raises:
        FlashpointError: what one of them failed with. Others may have worked.
    """
    failures: list[FlashpointError] = []

    def guarded(target: int) -> None:
        try:
            push(target)
        except FlashpointError as error:
            failures.append(error)
        except Exception as error:  # lost with its thread, it would pass for an acknowledgement
            _log.exception("pushing a copy to rank %d failed", target)
            failures.append(ReplicationError(f"{type(error).__name__}: {error}", rank=target))

    mine, threads = list(targets[:1]), []
    for target in targets[1:]:
        thread = threading.Thread(target=guarded, args=(target,), daemon=True, name=f"flashpoint-push-{target}")
        try:
            thread.start()
            threads.append(thread)
        except RuntimeError:  # no more threads to be had
            mine.append(target)
    for target in mine:
        guarded(target)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
